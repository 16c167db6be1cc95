"""GPTQ (Frantar et al. 2022), compact: each column's rounding error is made up for by the columns still to come.

For one product, H = mean of x x^T over the calibration tokens. Columns are rounded from left to right. With U the upper
Cholesky factor of H^-1, rounding column j by the error e_j = (w_j - q_j) / U[j, j] changes every later column k by
-e_j U[j, k]: that is the change which keeps the output closest to what it was. A group's scale and zero point are taken
when its first column comes, from weights that hold all corrections up to there.

Unlike AWQ, a product is calibrated with what the *quantised* products before it give.
"""

from __future__ import annotations

import torch

from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS, check_model, check_tokens, embed, layers
from labkit.quant.formats import Format, Quantised, encode, grid
from labkit.quant.rtn import Report, located

CHUNK_TOKENS = 4096  # go into H at a time, in fp64
DAMP = 0.01  # of H's mean diagonal, added to it: columns that hardly vary would make H singular


@torch.inference_mode()
def gptq(model, fmt: Format, tokens: torch.Tensor, *, progress: bool = True) -> Report:
    """Quantise all products of ``model``, in place. Arguments and errors as for ``awq``."""
    check_model(model, fmt)
    check_tokens(tokens, model.config)
    report, hidden = Report(fmt), embed(model, tokens)
    for layer in layers(model, tokens.shape[1], progress, "GPTQ"):
        done = {}
        for name in PRODUCTS:
            x = getattr(layer.run(hidden)[0], name)  # with the products before it already quantised
            weight = getattr(layer.weights, name)
            with located(f"layer {layer.index}, {name}"):
                done[name] = round_columns(weight, x, fmt)
            del x  # or it would stay while the next product's input is made
            weight.copy_(done[name].dequantise(weight.dtype))
        hidden = layer.run(hidden)[1]
        report.quantised.append(done)
    return report


def round_columns(w: torch.Tensor, x: torch.Tensor, fmt: Format) -> Quantised:
    """w: [out, in], x: [tokens, in], what it multiplies -> its codes.

    Raises LabError for weights or inputs that are not finite, groups that do not divide, or scales that fp16 cannot
    hold.
    """
    if not torch.isfinite(w).all() or not torch.isfinite(x).all():
        raise LabError("GPTQ needs finite weights and inputs; these hold NaN or infinity")
    width, (rows, columns) = fmt.width(w.shape[1]), w.shape
    h = torch.zeros(columns, columns, dtype=torch.float64, device=w.device)
    for part in x.split(CHUNK_TOKENS):
        part = part.double()
        h += part.t() @ part / x.shape[0]
    diagonal = h.diagonal()
    unused = diagonal == 0  # a channel that is always 0: its weights do not matter
    diagonal[unused] = 1
    diagonal += DAMP * diagonal.mean()
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    w = w.float().clone()
    w[:, unused] = 0
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=w.device)
    scales, zeros = [], []
    for start in range(0, columns, width):
        here = slice(start, start + width)
        group, corner = w[:, here], upper[here, here]
        scale, zero = grid(group, fmt)
        if not torch.isfinite(scale).all():
            raise LabError(f"a weight of {group.abs().max():.3g} needs a scale beyond fp16's 65504 in {fmt}")
        errors = torch.empty_like(group)
        for j in range(width):
            code = encode(group[:, j : j + 1], scale, zero, fmt)
            codes[:, start + j] = code[:, 0].to(torch.uint8)
            errors[:, j] = (group[:, j] - ((code - zero) * scale)[:, 0]) / corner[j, j]
            group[:, j + 1 :] -= errors[:, j : j + 1] * corner[j, j + 1 :]
        w[:, start + width :] -= errors @ upper[here, start + width :]
        scales.append(scale)
        zeros.append(zero)
    zeros = None if fmt.symmetric else torch.cat(zeros, 1).to(torch.uint8)
    return Quantised(codes, torch.cat(scales, 1), zeros, fmt)

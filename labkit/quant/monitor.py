"""Where a quantised model begins to differ: the outputs of each layer's products beside the original's.

Each model runs on its own hidden states, so a row holds what has built up so far and not one product's error alone.

Statistics of a single tensor do not show it. Rounded weights leave the mean and the standard deviation of an output
nearly where they were, and so does shuffling its channels, which destroys it. Only a comparison number by number tells:
the relative error, and the cosine between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS, Inputs, Layer, check_tokens, embed

STREAM = "residual"  # the hidden states after a layer, as a fifth row


@dataclass(frozen=True)
class Row:
    """One product's output in both models, over all tokens and channels.

    error: |other - model| / |model| (Euclidean norms; 0 if both are 0); cosine: of the angle between them, 0 if either
    is 0; std and other_std: standard deviations of the two.
    """

    layer: int
    product: str
    error: float
    cosine: float
    std: float
    other_std: float

    def __str__(self) -> str:
        return (
            f"{self.layer:3d} {self.product:9s} error {self.error:7.4f}  cosine {self.cosine:7.4f}  "
            f"std {self.std:.4g} and {self.other_std:.4g}"
        )


@torch.inference_mode()
def compare_layers(model, other, tokens: torch.Tensor, report=None) -> list[Row]:
    """Rows for each layer: qkv, attn_out, gate_up, down, and "residual", the hidden states after the layer.

    tokens: int64 [blocks, n], each block read from an empty context. report: what ``awq`` returned for ``other``. AWQ
    divides rows of up (and of v) by scales that it multiplies into the product that follows; these outputs are scaled
    back before they are compared, and without the report they count as errors.
    One block's activations are held at a time, and all tokens' hidden states of both models. Raises LabError for tokens
    the model cannot read, or models or a report of another shape.
    """
    check_tokens(tokens, model.config)
    _check_shapes(model, other, report)
    n, rows = tokens.shape[1], []
    states = [embed(m, tokens.to(m.device)) for m in (model, other)]
    for i in range(len(model.weights.layers)):
        pair = [Layer(m, i, n) for m in (model, other)]
        scales = _scales(model, report, i)
        sums = {name: _Sums() for name in (*PRODUCTS, STREAM)}
        for start in range(0, len(states[0]), n):
            block = slice(start, start + n)
            outputs = []
            for layer, hidden in zip(pair, states, strict=True):
                inputs, after = layer.run(hidden[block])
                hidden[block] = after
                outputs.append(_outputs(layer, inputs) | {STREAM: after})
            for name, found in sums.items():
                theirs = outputs[1][name].to(model.device)
                found.add(outputs[0][name], theirs * scales[name] if name in scales else theirs)
        rows += [found.row(i, name) for name, found in sums.items()]
    return rows


class _Sums:
    """Running sums over the numbers of two tensors: what a row needs, without keeping the tensors."""

    def __init__(self):
        self.count, self.total = 0, torch.zeros(6, dtype=torch.float64)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        a, b = a.double().flatten(), b.double().flatten()
        off = b - a
        self.count += a.numel()
        # The difference is summed by itself: |a|² + |b|² - 2 a·b would lose it to rounding where it is small.
        self.total += torch.stack([a @ a, b @ b, a @ b, off @ off, a.sum(), b.sum()]).cpu()

    def row(self, layer: int, product: str) -> Row:
        aa, bb, ab, off, a, b = self.total.tolist()
        error = math.sqrt(off / aa) if aa else (math.inf if off else 0.0)
        cosine = ab / math.sqrt(aa * bb) if aa and bb else 0.0
        std, other_std = (math.sqrt(max(0.0, s / self.count - (m / self.count) ** 2)) for s, m in ((aa, a), (bb, b)))
        return Row(layer, product, error, cosine, std, other_std)


def _outputs(layer: Layer, inputs: Inputs) -> dict[str, torch.Tensor]:
    w = layer.weights
    return {
        name: F.linear(getattr(inputs, name), getattr(w, name), w.qkv_bias if name == "qkv" else None)
        for name in PRODUCTS
    }


def _scales(model, report, i: int) -> dict[str, torch.Tensor]:
    """{product: fp32 [out]}: what its output in AWQ's model has to be multiplied by to be the original's."""
    if report is None or not report.choices:
        return {}
    c, chosen = model.config, {name: choice["scale"].to(model.device) for name, choice in report.choices[i].items()}
    gate_up = torch.cat([torch.ones_like(chosen["down"]), chosen["down"]])
    if c.kv_size != c.q_size:  # heads share values: nothing was folded into v
        return {"gate_up": gate_up}
    ones = torch.ones(2 * c.q_size, device=model.device)
    return {"gate_up": gate_up, "qkv": torch.cat([ones, chosen["attn_out"]])}


def _check_shapes(model, other, report) -> None:
    for name in ("num_layers", "hidden_size", "intermediate_size", "q_size", "kv_size", "vocab_size"):
        mine, theirs = getattr(model.config, name), getattr(other.config, name)
        if mine != theirs:
            raise LabError(f"the models differ in {name}, {mine} and {theirs}: compare a model with its quantised copy")
    if report is not None and report.choices and len(report.choices) != model.config.num_layers:
        raise LabError(f"the report is of {len(report.choices)} layers and the model has {model.config.num_layers}")

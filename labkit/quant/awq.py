"""Activation-aware weight quantisation (Lin et al. 2023), as llm-awq does it.

A few input channels are far larger than the rest, and the error of their weights counts accordingly. So the weights of
channel c are multiplied by s[c] > 1 before they are rounded, and the channel is divided by s[c] before the product:
its value is the same, and its rounding error in that channel is smaller by s[c]. The division costs nothing, since it
is folded into what makes the channel: a norm's weight, or the rows of the product before.

Layer by layer, with the inputs that unquantised weights give:

1. scales   s = mean|x|^r for r in 0, 1/20 .. 19/20, divided by sqrt(max s * min s); the r whose rounded weights change
            the block's output least (mean square). The block is all of attention for qkv, the MLP for gate_up, and the
            product itself for attn_out and down. attn_out has none where heads share values (GQA): a row of v feeds
            several of its columns.
2. clip     each group's largest |w| is cut to 1, 0.95 .. 0.55 of itself; the cut that changes the group's part of the
            output least. Not for q and k, whose products pass through a softmax together.
3. rounding

The loss of 2 is a quadratic form: mean over tokens of (d . x)^2 = d^T G d with G = mean of x x^T. G holds all tokens in
one matrix of a group's size, where llm-awq goes through 512 of them anew for each cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS, Inputs, Layer, check_model, check_tokens, embed, layers
from labkit.quant.formats import Format, fake
from labkit.quant.rtn import Report, round_layer

RATIOS = [i / 20 for i in range(20)]
CUTS = [1 - i / 20 for i in range(10)]
SEARCH_TOKENS = 2048  # what a block's loss is taken over; means and G see all tokens

Rounding = Callable[[torch.Tensor, Format], torch.Tensor]


@torch.inference_mode()
def awq(
    model, fmt: Format, tokens: torch.Tensor, *, clip: bool = True, progress: bool = True, rounding: Rounding = fake
) -> Report:
    """Quantise all products of ``model``, in place: scales are folded, weights become what their codes stand for.

    tokens: int64 [blocks, n], for calibration. clip False: without step 2. rounding: what the searches take for
    rounding; with another than ``fake`` no codes are made. With the identity every ratio has loss 0 and the first one
    is taken, whose scales are 1: nothing is folded.
    Raises LabError for tokens the model cannot read, groups that do not divide, or NaN in the weights, before anything
    is changed; and where a layer's activations are not finite, as fp16 can make them. If that or an interrupt ends it,
    the layers before are quantised already: work on ``copy_of(model)`` where the model is still needed.
    """
    check_model(model, fmt)
    check_tokens(tokens, model.config)
    report, hidden = Report(fmt), embed(model, tokens)
    for layer in layers(model, tokens.shape[1], progress, "AWQ"):
        inputs, hidden = layer.run(hidden)
        _check_inputs(layer, inputs)
        found = {name: search(layer, name, getattr(inputs, name), fmt, rounding) for name in PRODUCTS}
        for name, choice in found.items():
            fold(layer, name, choice["scale"])
        if clip:
            for name in PRODUCTS:
                _clip_rows(layer, name, getattr(inputs, name).float() / found[name]["scale"], fmt, rounding)
        del inputs  # or they would stay while the next layer's are made
        if rounding is fake:
            report.quantised.append(round_layer(layer.index, layer.weights, fmt))
            for name, quantised in report.quantised[-1].items():
                weight = getattr(layer.weights, name)
                weight.copy_(quantised.dequantise(weight.dtype))
        report.choices.append(found)
    return report


def search(layer: Layer, name: str, x: torch.Tensor, fmt: Format, rounding: Rounding = fake) -> dict:
    """The best scale for the input of a product: {"scale": fp32 [in], "ratio": r, "losses": one for each of RATIOS}.

    x: [tokens, in], what the product reads. Nothing is changed. Where no scale can be folded it is all ones.
    """
    mean = x.abs().float().mean(0)
    if name == "attn_out" and not _v_matches(layer):
        return {"scale": torch.ones_like(mean), "ratio": None, "losses": []}
    weight = getattr(layer.weights, name)
    original = weight.clone()
    x = _some_blocks(x, layer.n)
    run = {"qkv": layer.attention, "gate_up": layer.mlp}.get(name, lambda y: F.linear(y, weight))
    wanted, best, losses = run(x).float(), None, []
    try:
        for ratio in RATIOS:
            scale = mean.pow(ratio).clamp(min=1e-4)
            scale = scale / (scale.max() * scale.min()).sqrt()
            weight.copy_(rounding(original.float() * scale, fmt) / scale)
            losses.append(float((run(x).float() - wanted).square().mean()))
            if best is None or losses[-1] < best[0]:
                best = losses[-1], ratio, scale
    finally:  # also when it is interrupted
        weight.copy_(original)
    return {"scale": best[2], "ratio": best[1], "losses": losses}


def fold(layer: Layer, name: str, scale: torch.Tensor) -> None:
    """Multiply the columns of a product by ``scale``, and divide by it, once, what makes its input. fp32 [in]."""
    w, c = layer.weights, layer.model.config
    if name == "attn_out" and not _v_matches(layer):
        return
    _times(getattr(w, name), scale)
    if name == "qkv":  # q, k and v read the same norm: one division for all three
        _times(w.attn_norm, 1 / scale)
    elif name == "gate_up":
        _times(w.mlp_norm, 1 / scale)
    elif name == "down":
        _times(w.gate_up[c.intermediate_size :], 1 / scale[:, None])  # of gate and up only the rows of up
    else:
        _times(w.qkv[-c.kv_size :], 1 / scale[:, None])  # of q, k and v only the rows of v
        if w.qkv_bias is not None:
            _times(w.qkv_bias[-c.kv_size :], 1 / scale)


def best_clip(w: torch.Tensor, x: torch.Tensor, fmt: Format, rounding: Rounding = fake) -> torch.Tensor:
    """w: [out, in] with each group's values cut where that changes its part of x @ w.T least. x: fp32 [tokens, in]."""
    width = fmt.width(w.shape[1])
    groups = w.float().unflatten(1, (-1, width))
    parts = x.unflatten(1, (-1, width)).transpose(0, 1)  # [groups, tokens, width]
    gram = parts.transpose(1, 2) @ parts / x.shape[0]
    largest = groups.abs().amax(-1, keepdim=True)
    best, kept = None, groups
    for cut in CUTS:
        clipped = groups.clamp(-largest * cut, largest * cut)
        off = (rounding(clipped.flatten(1), fmt).float().view_as(groups) - groups).transpose(0, 1)
        loss = ((off @ gram) * off).sum(-1).t()[..., None]  # [out, groups, 1]
        if best is None:
            best, kept = loss, clipped
        else:
            better = loss < best
            best, kept = torch.where(better, loss, best), torch.where(better, clipped, kept)
    return kept.flatten(1).to(w.dtype)


def _clip_rows(layer: Layer, name: str, x: torch.Tensor, fmt: Format, rounding: Rounding) -> None:
    weight = getattr(layer.weights, name)
    rows = weight[-layer.model.config.kv_size :] if name == "qkv" else weight
    rows.copy_(best_clip(rows, x, fmt, rounding))


def _check_inputs(layer: Layer, inputs: Inputs) -> None:
    """Raises LabError for activations that are not finite: every loss would be NaN, and no search could choose."""
    for name in PRODUCTS:
        if not torch.isfinite(getattr(inputs, name)).all():
            kind = str(layer.model.dtype).removeprefix("torch.")
            raise LabError(
                f"layer {layer.index}: what {name} reads is NaN or infinite for the calibration text; the model runs "
                f"in {kind}, and in float32 it may not overflow"
            )


def _v_matches(layer: Layer) -> bool:
    """Whether each row of v feeds one column of attn_out, so that a scale can hide there."""
    return layer.model.config.kv_size == layer.model.config.q_size


def _some_blocks(x: torch.Tensor, n: int) -> torch.Tensor:
    """Whole blocks, evenly spaced, of SEARCH_TOKENS tokens or of what there is."""
    blocks = x.shape[0] // n
    wanted = max(1, min(blocks, SEARCH_TOKENS // n))
    at = torch.linspace(0, blocks - 1, wanted).round().long()
    return x.view(blocks, n, -1)[at].flatten(0, 1)


def _times(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """In place, in fp32: a bf16 product of a bf16 weight and a scale would round the scale as well."""
    tensor.copy_(tensor.float() * factor)

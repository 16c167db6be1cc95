"""Models whose products are packed: from an AWQ folder, from what quantisation gave in Python, or at random.

A decode step at batch 1 reads every weight once and does little else, so weights of 4 bits are read in little more than
a quarter of the time, and take as little memory. ``kernels.awq_linear`` multiplies with them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.awq_linear import PackedWeight, repack
from labkit.engine.config import ModelConfig
from labkit.engine.model import Model
from labkit.engine.weights import LayerWeights, Product
from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS
from labkit.quant.formats import Format, Quantised, quantise
from labkit.quant.rtn import Report

QUANTIZATIONS = ("awq",)
GROUPS = (128, 64, 32)  # of random weights, the largest that divides a row
GPU_DTYPES = (torch.float16, torch.bfloat16)


def check_quantization(name: str | None) -> None:
    """Raises LabError for a name that is neither None nor one of QUANTIZATIONS."""
    if name is not None and name not in QUANTIZATIONS:
        known = ", ".join(map(repr, QUANTIZATIONS))
        raise LabError(f"quantization must be None or one of {known}, got {name!r}")


def check_packable(dtype: torch.dtype, device: torch.device) -> None:
    """Raises LabError where no kernel multiplies packed weights with this dtype."""
    if device.type == "cuda" and dtype not in GPU_DTYPES:
        names = " or ".join(repr(str(d).removeprefix("torch.")) for d in GPU_DTYPES)
        raise LabError(f"on a GPU packed weights are multiplied in 16 bits: give dtype {names}, got {str(dtype)[6:]!r}")


def pack(q: Quantised, dtype: torch.dtype, device: torch.device | str) -> PackedWeight:
    """A product as ``awq_linear`` reads it, for x of ``dtype`` on ``device``. Raises LabError for a format or shape
    that no kernel multiplies."""
    codes, scales = q.codes.to(device), q.scales.to(device)
    zeros = None if q.zeros is None else q.zeros.to(device)
    try:
        return repack(codes, scales, zeros, q.format.bits, dtype)
    except ValueError as error:
        raise LabError(f"a product of {list(q.codes.shape)} in {q.format} cannot be packed: {error}") from error


def quantised_model(
    model: Model, report: Report, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Model:
    """A model with the codes of ``report`` packed, and everything else of ``model``.

    model, report: as ``rtn``, ``awq`` or ``gptq`` leave and return them, at 2, 3, 4 or 8 bits. dtype, device: the
    model's if None; where they are the same, what is not packed is shared with ``model``. Raises LabError for a report
    that holds no codes or is of a model of another shape, and for what cannot be packed.
    """
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    check_packable(dtype, device)
    check_report(model, report)
    w = model.weights

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    layers = []
    for layer, codes in zip(w.layers, report.quantised, strict=True):
        others = {n: moved(getattr(layer, n)) for n in ("attn_norm", "qkv_bias", "q_norm", "k_norm", "mlp_norm")}
        layers.append(LayerWeights(**others, **{name: pack(codes[name], dtype, device) for name in PRODUCTS}))
    embedding = moved(w.embedding)
    head = embedding if w.lm_head is w.embedding else moved(w.lm_head)
    return Model(
        model.config, replace(w, embedding=embedding, layers=layers, final_norm=moved(w.final_norm), lm_head=head)
    )


def check_report(model: Model, report: Report) -> None:
    """Raises LabError for a report that does not hold codes for every product of ``model``, of its shape."""
    layers = model.weights.layers
    if len(report.quantised) != len(layers):
        raise LabError(
            f"the report holds codes of {len(report.quantised)} layers and the model has {len(layers)}: "
            f"give what rtn, awq or gptq returned for this model"
        )
    for i, (layer, codes) in enumerate(zip(layers, report.quantised, strict=True)):
        for name in PRODUCTS:
            got = tuple(codes[name].codes.shape) if name in codes else None
            if got != (wanted := tuple(getattr(layer, name).shape)):
                raise LabError(f"layer {i}: the report's {name} is {got}, and the model's is {wanted}")


def random_format(in_features: int) -> Format:
    """4 bits in the largest of GROUPS that divides a row. Raises LabError if none does."""
    for group in GROUPS:
        if in_features % group == 0:
            return Format(4, group)
    raise LabError(f"none of the groups of {', '.join(map(str, GROUPS))} weights divides a row of {in_features}")


def round_and_pack(names: tuple[str, ...], make: Callable[[], torch.Tensor]) -> Product:
    """For ``assemble``: a product rounded to 4 bits where it lies, and packed."""
    matrix = make()
    return pack(quantise(matrix, random_format(matrix.shape[1])), matrix.dtype, matrix.device)


def bytes_a_weight(config: ModelConfig) -> float:
    """Least bytes that ``round_and_pack`` leaves of a product's weight: its code, and its share of a scale and a zero
    point; the mean over a layer's products."""
    c = config
    sizes = [
        (c.q_size + 2 * c.kv_size, c.hidden_size), (c.hidden_size, c.q_size),
        (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size),
    ]  # fmt: skip
    bits = sum(n * k * random_format(k).bits_per_weight(k) for n, k in sizes)
    return bits / 8 / sum(n * k for n, k in sizes)

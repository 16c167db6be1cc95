"""Round-to-nearest over a whole model: the baseline that needs no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS, check_model
from labkit.quant.formats import Format, Quantised, quantise


@dataclass
class Report:
    """What a method did to a model. quantised: for each layer {product: its codes}. choices: for each layer {product:
    what was searched and found}, in the method's own terms."""

    format: Format
    quantised: list[dict[str, Quantised]] = field(default_factory=list)
    choices: list[dict[str, dict]] = field(default_factory=list)


@torch.inference_mode()
def rtn(model, fmt: Format) -> Report:
    """Quantise all products of ``model``, in place: its weights become what their codes stand for.

    Raises LabError for groups that do not divide the rows, NaN in the weights (by its place), and weights whose scales
    fp16 cannot hold, before anything is changed.
    """
    check_model(model, fmt)
    report = Report(fmt)
    for index, layer in enumerate(model.weights.layers):
        report.quantised.append(round_layer(index, layer, fmt))
    put(model, report)
    return report


def round_layer(index: int, weights, fmt: Format) -> dict[str, Quantised]:
    """The products of layer ``index``, each to the nearest. Raises LabError as ``quantise``, with layer and product."""
    done = {}
    for name in PRODUCTS:
        with located(f"layer {index}, {name}"):
            done[name] = quantise(getattr(weights, name), fmt)
    return done


@contextmanager
def located(where: str) -> Iterator[None]:
    """A LabError from inside says ``where`` as well."""
    try:
        yield
    except LabError as error:
        raise LabError(f"{where}: {error}") from error


def put(model, report: Report) -> None:
    """Let the model's weights be what the report's codes stand for."""
    for layer, products in zip(model.weights.layers, report.quantised, strict=True):
        for name, quantised in products.items():
            getattr(layer, name).copy_(quantised.dequantise(layer.attn_out.dtype))

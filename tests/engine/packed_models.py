"""Small quantised models of every family: as a folder, and what they are made from."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.engine import load
from labkit.engine.awq_folder import save_awq
from labkit.engine.model import Model
from labkit.quant import Format, rtn
from labkit.quant.blocks import copy_of
from labkit.quant.rtn import Report
from tests.engine.gpu_models import EMBEDDED, HERE
from tests.engine.tiny_models import TINY, tiny_hf

FMT = Format(4, 32)
# Rows that groups of 32 divide, in every product: heads of 32, with other numbers of them than of hidden / 32.
SHAPES = {
    "llama": dict(hidden_size=96, head_dim=32),
    "mistral": dict(hidden_size=64, head_dim=32),
    "qwen2": dict(hidden_size=128),
    "qwen3": dict(hidden_size=96, head_dim=32),
}


@dataclass
class Made:
    """folder: the AWQ checkpoint. plain: the model before; model: after, its products what the codes stand for."""

    folder: Path
    plain: Model
    model: Model
    report: Report


@cache
def made(family: str, seed: int = 0) -> Made:
    if family == EMBEDDED:
        plain, fmt = load(EMBEDDED, progress=None)[0], Format(4, 64)
    else:
        kept = _folder(family, seed)
        plain, fmt = load(Path(kept.name) / "plain", progress=None)[0], FMT
    model = copy_of(plain)
    report = rtn(model, fmt)
    return Made(save_awq(model, report, Path(_folder(family, seed).name) / "awq"), plain, model, report)


@cache
def _folder(family: str, seed: int) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory()
    if family != EMBEDDED:  # in fp16, in which the checkpoint keeps what is not quantised
        original = tiny_hf(family, seed, intermediate_size=96, tie_word_embeddings=False, **SHAPES[family]).half()
        original.save_pretrained(Path(folder.name) / "plain")
    return folder


FAMILIES = [*([EMBEDDED] if HERE else []), *TINY]


@cache
def dequantised(family: str, dtype: str, device: str) -> Model:
    return load(made(family).folder, dtype, device, progress=None)[0]


@cache
def exact(family: str, device: str) -> Model:
    """What the codes stand for, in fp32, and all other weights too."""
    return dequantised(family, "float32", device)

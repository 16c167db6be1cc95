"""Models of the GPU tests, each loaded once a process: the embedded one where its file lies, and every tiny family."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from functools import cache

import torch

from labkit.engine import load
from labkit.engine.fetch import BUILTIN
from labkit.engine.model import Model
from labkit.paths import home
from tests.engine.tiny_models import TINY, tiny_hf

EMBEDDED = "smollm2-135m"
HERE = (home() / "models" / BUILTIN[EMBEDDED].file).is_file()  # a machine without network does not fetch it
FAMILIES = [*([EMBEDDED] if HERE else []), *TINY]
DTYPES = ("float32", "bfloat16")
LENGTHS = (5, 9, 40, 1, 33, 16, 17, 3, 64)


@cache
def _folder(family: str) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory()
    # Untied: a tied random model only repeats its input.
    tiny_hf(family, tie_word_embeddings=False).save_pretrained(folder.name)
    return folder


@cache
def model_of(family: str, dtype: str, device: str = "cuda") -> Model:
    source = EMBEDDED if family == EMBEDDED else _folder(family).name
    return load(source, dtype, device, progress=None)[0]


@cache
def exact_of(family: str, dtype: str, device: str = "cuda") -> Model:
    """The same model with its weights, as they are rounded, in fp32: what 16-bit arithmetic is judged by."""
    model = model_of(family, dtype, device)
    if dtype == "float32":
        return model
    w = model.weights
    layers = [
        type(layer)(**{f.name: None if (t := getattr(layer, f.name)) is None else t.float() for f in fields(layer)})
        for layer in w.layers
    ]
    embedding = w.embedding.float()
    head = embedding if w.lm_head is w.embedding else w.lm_head.float()
    return Model(
        model.config, replace(w, embedding=embedding, layers=layers, final_norm=w.final_norm.float(), lm_head=head)
    )


def prompts_of(model: Model, lengths=LENGTHS, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    most = min(model.config.vocab_size, 20_000)
    return [torch.randint(2, most, (n,), generator=generator).tolist() for n in lengths]


def last_logits(model: Model, text: list[int]) -> torch.Tensor:
    """fp32 [vocab], after the text, by the plain model."""
    ids = torch.tensor([text], device=model.device)
    return model.forward(ids, torch.arange(len(text), device=model.device))[0]


def ties(model: Model, true_model: Model, prompts, wanted, outs) -> int:
    """How many outputs part from ``wanted``, each at a token as good as the best: its logit lies below by no more than
    this dtype's arithmetic moves two logits, which is measured there by ``model`` against ``true_model`` in fp32. Where
    that does not hold, an AssertionError says so."""
    count = 0
    for ids, want, got in zip(prompts, wanted, outs, strict=True):
        assert len(got) == len(want)
        place = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        if place is None:
            continue
        text = ids + want[:place]
        true = last_logits(true_model, text)
        moved = float((last_logits(model, text) - true).abs().max())
        gap, margin = float(true.max() - true[got[place]]), 4 * moved + 1e-3
        assert gap <= margin, f"prompt of {len(ids)}: token {place} is {got[place]}, not {want[place]}; {gap:.4f} below"
        count += 1
    return count


def near_ties(family: str, dtype: str, device: str, prompts, wanted, outs) -> int:
    """``ties`` of the family's plain model, against itself in fp32."""
    return ties(model_of(family, dtype, device), exact_of(family, dtype, device), prompts, wanted, outs)

"""argmax, embed and rope_scatter beyond the operator test: what they refuse, vocabularies of a model's size."""

from __future__ import annotations

import pytest
import torch

from kernels.argmax import argmax
from kernels.embed import embed
from kernels.rope import rope_table
from kernels.rope_scatter import rope_scatter


@pytest.mark.parametrize(
    "x", [torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, 3).t()]
)
def test_argmax_names_a_bad_input(x):
    with pytest.raises(ValueError, match=r"argmax: x must be float32, float16 or bfloat16 \[rows, n\].* got"):
        argmax(x)


def test_argmax_names_a_bad_output():
    with pytest.raises(ValueError, match=r"argmax: out must be contiguous int32 \[2\] on cpu, got torch\.int64 \[2\]"):
        argmax(torch.zeros(2, 3), out=torch.zeros(2, dtype=torch.int64))


def test_embed_names_a_bad_input():
    ids, embedding = torch.zeros(2, dtype=torch.int32), torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"embed: source must be contiguous int32 \[2\], got torch\.int32 \[3\]"):
        embed(ids, torch.zeros(3, dtype=torch.int32), ids, embedding)
    with pytest.raises(ValueError, match=r"embed: tokens must be contiguous int32 \[places\], got torch\.int64 \[2\]"):
        embed(ids, ids, ids.long(), embedding)
    with pytest.raises(ValueError, match=r"embed: embedding must be .* got torch\.float32 \[8, 4\] with strides"):
        embed(ids, ids, ids, embedding.t())


def test_rope_scatter_names_caches_of_another_dtype():
    q, k = torch.zeros(1, 2, 8), torch.zeros(1, 1, 8)
    cache, slots = torch.zeros(2, 1, 4, 8).half(), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"the caches must have q's dtype torch\.float32, got torch\.float16"):
        rope_scatter(q, k, k, slots, rope_table(torch.ones(4), 3), cache, cache, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_argmax_of_a_vocabulary(rows):
    x = torch.randn(rows, 128256, device="cuda", dtype=torch.bfloat16)  # ties are many in bf16
    assert torch.equal(argmax(x).long(), (x == x.amax(-1, keepdim=True)).int().argmax(-1))

"""The plain paged decode beyond the operator test: the engine's kernel agrees, narrow caches, the mask, refusals."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import paged_decode
from kernels.paged_cache import paged_cache
from kernels.paged_plain import OP, paged_plain, paged_plain_reference
from labkit.measure.compile import compile_kernel

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")


def inputs(lengths=(70, 16, 33), dtype=torch.float32, **options) -> dict:
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(list(lengths), 2, 32, 16, "cpu", dtype, generator, **options)
    return {"q": torch.randn(len(lengths), 8, 32, generator=generator).to(dtype), **cache}


@interpreted
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_every_tile_gives_what_the_engines_kernel_gives(tile):
    given = inputs()
    torch.testing.assert_close(paged_plain(**given, tile=tile), paged_decode(**given), rtol=0, atol=2e-6)


@interpreted
def test_without_the_mask_the_rest_of_the_last_page_counts():
    given = inputs()
    assert paged_plain(**given, masked=False)[[0, 2]].isnan().all(), "NaN behind the last token must be seen"
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].nan_to_num(0.5)
    wrong, right = paged_plain(**given, masked=False), paged_plain(**given)
    full = {**given, "seq_lens": torch.tensor([80, 16, 48], dtype=torch.int32)}
    torch.testing.assert_close(wrong, paged_plain(**full), rtol=0, atol=0)
    assert torch.equal(wrong[1], right[1]) and (wrong[0] - right[0]).abs().max() > 1e-3


@interpreted
def test_a_narrow_cache_is_the_wide_one_rounded():
    given = inputs(dtype=torch.float16)
    scales = {f"{n}_scale": float(given[f"{n}_cache"].nan_to_num(0).abs().max()) / 127 for n in "kv"}
    narrow = {
        f"{n}_cache": (given[f"{n}_cache"] / scales[f"{n}_scale"]).round().nan_to_num(0).to(torch.int8) for n in "kv"
    }
    got = paged_plain(**{**given, **narrow}, **scales)
    exact = paged_plain_reference(**given)
    assert 1e-4 < (got - exact).abs().max() / exact.abs().max() < 0.03


@interpreted
def test_blocks_may_lie_further_apart_than_they_are_long():
    given = inputs()
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        room = torch.full((cache.shape[0], cache[0].numel() + 48), float("nan"))
        room[:, : cache[0].numel()] = cache.flatten(1)
        given[name] = room[:, : cache[0].numel()].unflatten(1, cache.shape[1:])
    torch.testing.assert_close(paged_plain(**given), OP.reference(**given), rtol=0, atol=2e-6)


@pytest.mark.parametrize("narrow", ["*i8", "*fp8e4nv"])
def test_a_narrow_cache_is_loaded_narrow(narrow):
    """For sm_90 the tiles on their way take less shared memory than in bf16: they are converted where they are used."""

    def code(cache):
        kernel = __import__("kernels.paged_plain", fromlist=["_plain_kernel"])._plain_kernel
        types = {n: "i32" for n in kernel.arg_names if n.startswith("stride")}
        types |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": cache, "v_ptr": cache, "scale": "fp32"}
        types |= {"v_scale": "fp32", "table_ptr": "*i32", "length_ptr": "*i32"}
        sizes = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, PAGE=16, TILE=64, MASKED=True, BLOCK_M=16, BLOCK_D=128)
        return compile_kernel(kernel, types, sizes, arch="sm_90", num_warps=4, num_stages=3)

    wide, thin = code("*bf16"), code(narrow)
    assert thin.shared_bytes < wide.shared_bytes and thin.spills == wide.spills == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tile": 8}, "tile must be"),
        ({"tile": 48}, "tile must be"),
        ({"q": torch.zeros(3, 8, 16)}, "q must be"),
        ({"q": torch.zeros(3, 7, 32)}, "multiple of kv_heads"),
        ({"q": torch.zeros(3, 8, 32, dtype=torch.float16)}, "both caches like q"),
        ({"seq_lens": torch.zeros(3)}, "seq_lens must be int32"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)}, "each of 3 sequences"),
        ({"k_cache": torch.zeros(4, 2, 32, 16).transpose(2, 3), "v_cache": torch.zeros(4, 2, 16, 32)}, "contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        paged_plain(**{**inputs(), **change})

"""The KV scatter beyond the operator test: what stays untouched, errors, debug mode, compiled code, far slots."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_cache import _VARYING, LAUNCH, OP, Cost, _scatter_kernel
from labkit.measure.compile import ARCHITECTURES, compile_kernel

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")


def _inputs(tokens=3, heads=2, dim=4, blocks=3, block_size=4, **change):
    k, v = torch.randn(2, tokens, heads, dim).unbind()
    k_cache, v_cache = torch.zeros(2, blocks, heads, block_size, dim).unbind()
    inputs = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": torch.arange(tokens)}
    return {**inputs, **change}


@ON_CPU
def test_each_row_lands_in_its_block_head_and_offset():
    inputs = _inputs(slots=torch.tensor([6, -1, 9]))
    OP.triton(**inputs)
    for name in "kv":
        new, cache = inputs[name], inputs[f"{name}_cache"]
        assert torch.equal(cache[1, :, 2], new[0]) and torch.equal(cache[2, :, 1], new[2])
        cache[1, :, 2] = cache[2, :, 1] = 0
        assert not cache.any()  # block 0, which a skipped token must not reach, included


@ON_CPU
def test_nan_is_stored_like_any_value_and_skipped_nan_is_not():
    inputs = _inputs(slots=torch.tensor([5, -1, 0]))
    inputs["k"][:2] = float("nan")
    OP.triton(**inputs)
    assert inputs["k_cache"].isnan().sum() == inputs["k"][0].numel()


@ON_CPU
@pytest.mark.parametrize("block_bytes", [16, 64, 8192])
def test_every_cut_gives_the_same(block_bytes):
    inputs = _inputs(tokens=21, heads=3, blocks=6)
    expected = {name: t.clone() for name, t in inputs.items()}
    OP.reference(**expected)
    OP.triton(**inputs, block_bytes=block_bytes)
    assert torch.equal(inputs["k_cache"], expected["k_cache"]) and torch.equal(inputs["v_cache"], expected["v_cache"])


def _far(*shape: int) -> torch.Tensor:
    """Random fp16 whose first dimension has stride 2^30: the third row starts past 2^31. Only touched pages cost."""
    inner = torch.empty(shape[1:]).stride()
    view = torch.empty(2**31 + 2**20, dtype=torch.float16).as_strided(shape, (2**30, *inner))
    return view.copy_(torch.randn(shape))


@ON_CPU
def test_offsets_past_two_to_the_31():
    caches = {"k_cache": _far(3, 2, 4, 4), "v_cache": _far(3, 2, 4, 4)}
    inputs = _inputs(k=_far(3, 2, 4), v=_far(3, 2, 4), slots=torch.tensor([11, 0, 8]), **caches)
    expected = {name: t.clone() for name, t in inputs.items()}
    OP.reference(**expected)
    OP.triton(**inputs)
    assert all(torch.equal(inputs[name], expected[name]) for name in caches)


@ON_CPU
def test_debug_names_slots_that_do_not_fit():
    for slots in ([0, 1, 12], [0, 1, -2]):
        with pytest.raises(
            ValueError, match=rf"scatter: slots run from {min(slots)} to {max(slots)}; the cache has 0 to 11"
        ):
            OP.triton(**_inputs(slots=torch.tensor(slots)), debug=True)
    with pytest.raises(ValueError, match="scatter: two tokens have the same slot"):
        OP.triton(**_inputs(slots=torch.tensor([7, 2, 7])), debug=True)
    OP.triton(**_inputs(slots=torch.tensor([11, -1, -1])), debug=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(3, 2, 5)}, r"k and v must both be .* got \(3, 2, 4\) and \(3, 2, 5\)"),
        ({"k": torch.zeros(3, 8), "v": torch.zeros(3, 8)}, r"k and v must both be \[tokens, kv_heads, head_dim\]"),
        ({"k_cache": torch.zeros(3, 4, 2, 4)}, r"must both be \[num_blocks, 2, block_size, 4\] for k \(3, 2, 4\)"),
        ({"v_cache": torch.zeros(2, 2, 4, 4)}, r"got \(3, 2, 4, 4\) and \(2, 2, 4, 4\)"),
        ({"slots": torch.arange(4)}, r"slots must be contiguous int64 or int32 \[3\], got torch\.int64 \[4\]"),
        ({"slots": torch.zeros(3)}, r"slots must be .* got torch\.float32"),
        ({"slots": torch.arange(6)[::2]}, r"slots must be .* with strides \(2,\)"),
        ({"k": torch.zeros(3, 2, 4).double()}, r"k must be float32, float16 or bfloat16, got torch\.float64"),
        ({"k": torch.zeros(3, 2, 4).half()}, r"k and v, and both caches, must be alike in dtype"),
        ({"v": torch.zeros(3, 4, 2).transpose(1, 2)}, r"v's last dimension must be contiguous \(stride 1\), got 2"),
        ({"slots": torch.zeros(3, dtype=torch.int64, device="meta")}, r"slots must be on k's device cpu, got meta"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=f"^scatter: .*{message}"):
        OP.triton(**_inputs(**change))


def test_cost_counts_stored_tokens():
    inputs = _inputs(slots=torch.tensor([4, -1, 5]))
    assert OP.cost(**inputs) == Cost(bytes=2 * (2 * 2 * 4) * (4 + 4) + 3 * 8, flops=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "size", "heads", "dim"), [("bf16", 2, 8, 128), ("fp16", 2, 4, 64), ("fp32", 4, 4, 128)]
)
def test_compiled_code(arch, dtype, size, heads, dim):
    pointers = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr")
    signature = {**dict.fromkeys(pointers, f"*{dtype}"), "slots_ptr": "*i64", **dict.fromkeys(_VARYING, "i32")}
    tokens = LAUNCH.block_bytes // (dim * size * heads)
    c = compile_kernel(
        _scatter_kernel, signature,
        {"BLOCK_SIZE": 16, "VEC": 16 // size, "TOKENS": tokens, "HEADS": heads, "DIM": dim},
        arch, num_warps=LAUNCH.num_warps, divisible_by_16=(*pointers, "slots_ptr"),
    )  # fmt: skip
    assert c.spills == c.stack_bytes == c.shared_bytes == 0
    assert c.count("LDG.128") == c.count("LDG") - 1 == 2 and c.count("STG.128") == c.count("STG") == 2, (
        c.stats.summary()
    )


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements():
    blocks, heads, dim = 2**17 + 8, 8, 128  # a cache of 2^31 + 2^17 elements, with blocks of 16
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    cache = torch.zeros(2, blocks, heads, 16, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, heads, dim, device="cuda", dtype=torch.bfloat16).unbind()
    slots = torch.tensor([blocks * 16 - 1, 0, 2**21 + 5], device="cuda")
    OP.triton(k, v, cache[0], cache[1], slots, debug=True)
    for new, kept in ((k, cache[0]), (v, cache[1])):
        assert torch.equal(kept[-1, :, 15], new[0])
        assert torch.equal(kept[0, :, 0], new[1])
        assert torch.equal(kept[2**17, :, 5], new[2])
        assert kept.count_nonzero() == new.count_nonzero()

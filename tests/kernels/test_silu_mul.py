"""silu_mul beyond the operator test: what it refuses, how it compiles, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import LAUNCH, OP, Cost, _silu_mul_kernel
from labkit.measure.compile import ARCHITECTURES, compile_kernel

SIGNATURE = {"x_ptr": "*fp16", "out_ptr": "*fp16", "rows": "i32", "width_v": "i32", "stride_v": "i32", "tiles": "i32"}
POINTERS = ("x_ptr", "out_ptr")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"got shape \(4,\)"),
        (torch.zeros(4, 3), r"gate and up side by side, got shape \(4, 3\)"),
        (torch.zeros(2, 4, dtype=torch.float64), r"got torch\.float64"),
        (torch.zeros(4, 6).t()[:, :4], r"stride 1\), got stride 6"),
    ],
)
def test_bad_input_is_named(x, message):
    with pytest.raises(ValueError, match=f"^silu_mul: x must .*{message}|^silu_mul: x's columns .*{message}"):
        OP.triton(x)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 4),
        torch.zeros(2, 2, dtype=torch.float16),
        torch.zeros(2, 2, device="meta"),
        torch.zeros(2, 4)[:, ::2],
    ],
)
def test_an_output_that_does_not_fit_is_named(out):
    with pytest.raises(ValueError, match=r"silu_mul: out must be contiguous \(2, 2\) torch\.float32 on cpu, got"):
        OP.triton(torch.zeros(2, 4), out=out)


def test_an_unknown_launch_setting_is_refused():
    with pytest.raises(TypeError, match="num_wraps"):
        OP.triton(torch.zeros(2, 4), num_wraps=8)


def test_cost():
    assert OP.cost(torch.zeros(3, 10, dtype=torch.float16)) == Cost(bytes=3 * 15 * 2, flops=5 * 15)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
@pytest.mark.parametrize("settings", [{"block_bytes": 256}, {"block_bytes": 16384}])
def test_every_cut_gives_the_same(settings):
    x = torch.randn(5, 600)
    out = torch.full((5, 300), float("nan"))
    assert OP.triton(x, out=out, **settings) is out
    assert torch.equal(out, OP.triton(x))


def _far(*shape: int) -> torch.Tensor:
    """Random fp16 whose first dimension has stride 2^30: the third row starts past 2^31. Only touched pages cost."""
    inner = torch.empty(shape[1:]).stride()
    view = torch.empty(2**31 + 2**20, dtype=torch.float16).as_strided(shape, (2**30, *inner))
    return view.copy_(torch.randn(shape))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
def test_offsets_past_two_to_the_31():
    x = _far(3, 128)
    torch.testing.assert_close(OP.triton(x), OP.reference(x))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_every_access_is_16_bytes_wide(arch, dtype, size):
    signature = {**SIGNATURE, "x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    settings = {"VEC": 16 // size, "ROWS": 1, "BLOCK": LAUNCH.block_bytes // size}
    c = compile_kernel(
        _silu_mul_kernel, signature, settings, arch, num_warps=LAUNCH.num_warps, divisible_by_16=POINTERS
    )
    assert c.spills == c.stack_bytes == 0
    assert c.count("LDG") == c.count("LDG.128") == 2 and c.count("STG") == c.count("STG.128") == 1
    assert c.occupancy.fraction == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_odd_widths_compile_without_spills(arch):
    settings = {"VEC": 1, "ROWS": 1, "BLOCK": LAUNCH.block_bytes // 2}
    c = compile_kernel(_silu_mul_kernel, SIGNATURE, settings, arch, num_warps=LAUNCH.num_warps)
    assert c.spills == c.stack_bytes == 0


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, width = 2**18 + 3, 4096  # x has 2^31 + 24 576 elements
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB of free GPU memory")
    x = torch.empty(rows, 2 * width, device="cuda", dtype=torch.bfloat16).uniform_(-4, 4)
    out = torch.full((rows, width), float("nan"), device="cuda", dtype=torch.bfloat16)
    OP.triton(x, out=out)
    for part in (slice(0, 3), slice(rows - 5, rows)):
        torch.testing.assert_close(out[part], OP.reference(x[part]), rtol=2**-7, atol=1e-3)
    assert not out.isnan().any()

"""rms_norm and add_rms_norm beyond the operator test: rounding, aliasing, errors, compiled code, 2^31 elements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton import next_power_of_2

from kernels import rms_norm
from kernels.rms_norm import ADD_RMS_NORM, LAUNCH, LAUNCH_ADD, LONG, RMS_NORM, Cost
from labkit.measure.compile import ARCHITECTURES, compile_kernel

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
WIDTHS = (64, 1000, 70_008)  # packed rows, a rest behind the main part, a long row


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
def test_rounds_once_like_torch(width):
    x, weight = torch.randn(8, width).half(), (1 + torch.randn(width)).half()
    ours, torchs = RMS_NORM.triton(x, weight, 1e-6), F.rms_norm(x.float(), (width,), weight.float(), 1e-6)
    twice = weight * F.rms_norm(x, (width,), None, 1e-6)  # Hugging Face's order
    ours_off, once_off, twice_off = ((y.float() - torchs).abs().mean() for y in (ours, torchs.half(), twice))
    assert ours_off < 1.01 * once_off and twice_off > 1.1 * ours_off


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
def test_fused_is_the_two_steps_apart(width):
    x, residual, weight = torch.randn(4, width).half(), torch.randn(4, width).half(), torch.randn(width).half()
    total = residual + x
    apart = RMS_NORM.triton(total, weight, 1e-5, chunk=8192)
    fused = ADD_RMS_NORM.triton(x, residual, weight, 1e-5, chunk=8192)
    assert torch.equal(residual, total) and torch.equal(fused, apart)


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
def test_in_place(width):
    x, weight = torch.randn(4, width), torch.randn(width)
    expected = RMS_NORM.triton(x, weight)
    y = x.clone()
    assert RMS_NORM.triton(y, weight, out=y) is y and torch.equal(y, expected)
    residual = torch.randn(4, width)
    kept = residual.clone()
    expected = ADD_RMS_NORM.triton(x, kept, weight)
    assert ADD_RMS_NORM.triton(x, residual, weight, out=x) is x
    assert torch.equal(x, expected) and torch.equal(residual, kept)


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
def test_x_may_be_the_residual(width):
    x, weight = torch.randn(4, width), torch.randn(width)
    doubled = 2 * x
    out = ADD_RMS_NORM.triton(x, x, weight, chunk=8192)
    assert torch.equal(x, doubled)
    assert torch.equal(out, RMS_NORM.triton(doubled, weight, chunk=8192))  # like chunks: the same order of additions


@ON_CPU
def test_a_norm_a_head_in_place_on_a_view_of_qkv():
    qkv, weight = torch.randn(3, 8, 64), torch.randn(64)
    before = qkv.clone()
    q = qkv[:, 1:5]
    RMS_NORM.triton(q, weight, out=q)
    torch.testing.assert_close(q, F.rms_norm(before[:, 1:5], (64,), weight, 1e-6))
    assert torch.equal(qkv[:, 0], before[:, 0]) and torch.equal(qkv[:, 5:], before[:, 5:])


def _far(*shape: int) -> torch.Tensor:
    """Random fp16 whose first dimension has stride 2^30: the third row starts past 2^31. Only touched pages cost."""
    inner = torch.empty(shape[1:]).stride()
    view = torch.empty(2**31 + 2**20, dtype=torch.float16).as_strided(shape, (2**30, *inner))
    return view.copy_(torch.randn(shape))


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
def test_offsets_past_two_to_the_31(width):
    x, residual, out, weight = _far(3, width), _far(3, width), _far(3, width), torch.randn(width)
    RMS_NORM.triton(x, weight, 1e-6, out=out)
    torch.testing.assert_close(out, RMS_NORM.reference(x, weight, 1e-6))
    kept = residual.clone()
    expected = ADD_RMS_NORM.reference(x, kept, weight, 1e-6)
    ADD_RMS_NORM.triton(x, residual, weight, 1e-6, out=out)
    assert torch.equal(residual, kept)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4)}, r"x must be .*got shape \(4,\)"),
        ({"x": torch.zeros(2, 4, dtype=torch.float64)}, r"x must be float32, float16 or bfloat16, got torch\.float64"),
        ({"x": torch.zeros(4, 2).t()}, r"x's last dimension must be contiguous \(stride 1\), got stride 2"),
        ({"weight": torch.zeros(5)}, r"weight must have shape \(4,\) for x \(2, 4\), got \(5,\)"),
        ({"weight": torch.zeros(8)[::2]}, r"weight's last dimension must be contiguous .* got stride 2"),
        ({"weight": torch.zeros(4, dtype=torch.int32)}, r"weight must be float32.* got torch\.int32"),
        ({"weight": torch.zeros(4, device="meta")}, r"weight must be on x's device cpu, got meta"),
        ({"out": torch.zeros(2, 5)}, r"out must have shape \(2, 4\)"),
        ({"out": torch.zeros(2, 4).half()}, r"out must have x's dtype torch\.float32, got torch\.float16"),
    ],
)
@pytest.mark.parametrize("op", rms_norm.OPS.values(), ids=rms_norm.OPS)
def test_bad_input_is_named(op, change, message):
    inputs = {"x": torch.zeros(2, 4), "weight": torch.zeros(4), "out": torch.zeros(2, 4)}
    if op is ADD_RMS_NORM:
        inputs["residual"] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=f"^{op.name}: {message}"):
        op.triton(**{**inputs, **change})


def test_a_residual_of_another_shape_is_named():
    with pytest.raises(
        ValueError, match=r"add_rms_norm: residual must have shape \(2, 4\) for x \(2, 4\), got \(3, 4\)"
    ):
        ADD_RMS_NORM.triton(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4))


def test_the_residual_cannot_be_the_output():
    residual = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="out and residual are the same memory"):
        ADD_RMS_NORM.triton(torch.zeros(2, 4), residual, torch.zeros(4), out=residual)


def test_only_rms_norm_takes_heads():
    with pytest.raises(ValueError, match=r"add_rms_norm: x must be \[rows, width\], got shape \(2, 3, 4\)"):
        ADD_RMS_NORM.triton(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(4))


def test_costs():
    x, weight = torch.zeros(3, 10, dtype=torch.float16), torch.zeros(10)
    assert RMS_NORM.cost(x, weight) == Cost(bytes=2 * 60 + 40, flops=120)
    assert ADD_RMS_NORM.cost(x, x.float(), weight) == Cost(bytes=2 * 60 + 2 * 120 + 40, flops=150)


def _split(cols: int) -> tuple[int, int]:
    return (cols, 0) if cols < rms_norm.HALVED else (cols // 2, cols // 2)


# (dtype, residual, main, rest): every launch of the table on one architecture, those that need most registers on all
EVERY = [("bf16", residual, *_split(cols)) for cols in LAUNCH for residual in (True, False)]
EVERY += [("bf16", False, 4096, 1024), ("fp32", False, 512, 64)]
HEAVIEST = [("bf16", True, 32768, 32768), ("fp32", True, 16384, 16384), ("fp16", False, 32768, 32768)]


def _signature(dtype: str, residual: bool) -> tuple[dict, dict, list]:
    pointers = ["x_ptr", "weight_ptr", "out_ptr"] + ["residual_ptr"] * residual
    strides = ("width_v", "x_token_v", "x_head_v", "residual_v", "out_token_v", "out_head_v")
    signature = {**{p: f"*{dtype}" for p in pointers}, **dict.fromkeys(strides, "i32"), "eps": "fp32"}
    return signature, {"heads": 1} if residual else {"heads": 1, "residual_ptr": None}, pointers


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_held_whole_stay_in_registers(arch):
    for dtype, residual, main, rest in HEAVIEST + EVERY * (arch == "sm_90"):
        signature, constants, pointers = _signature(dtype, residual)
        table, size = LAUNCH_ADD if residual else LAUNCH, 4 if dtype == "fp32" else 2
        launch = table[next_power_of_2(main + rest)]
        assert next_power_of_2(main + rest) * size <= rms_norm.WHOLE_BYTES
        c = compile_kernel(
            rms_norm._rms_norm_kernel, {**signature, "rows": "i32"},
            {**constants, "VEC": 16 // size, "ROWS": launch.rows, "MAIN": main, "REST": rest},
            arch, num_warps=launch.num_warps, divisible_by_16=pointers,
        )  # fmt: skip
        assert c.spills == c.stack_bytes == 0, f"{c}: {main} + {rest}"
        if main >= 1024 and rest in (0, main):  # a rest of 1024 is 4 elements a thread
            assert c.count("LDG") == c.count("LDG.128") and c.count("STG") == c.count("STG.128"), str(c)
            if arch == "sm_90" and size == 2:
                in_flight = c.occupancy.blocks * launch.rows * (main + rest) * size * (1 + residual)
                assert in_flight >= 2**16, f"{c}: {in_flight} bytes in flight on an SM"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fp32_weights_beside_16_bit_rows_do_not_spill(arch):
    signature, constants, pointers = _signature("bf16", True)
    c = compile_kernel(
        rms_norm._rms_norm_kernel, {**signature, "rows": "i32", "weight_ptr": "*fp32"},
        {**constants, "VEC": 8, "ROWS": 1, "MAIN": 8192, "REST": 8192},
        arch, num_warps=LAUNCH[16384].num_warps, divisible_by_16=pointers,
    )  # fmt: skip
    assert c.spills == c.stack_bytes == 0, str(c)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_long_rows(arch, op):
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        signature, constants, pointers = _signature(dtype, op == "add_rms_norm")
        launch = LONG[op]
        c = compile_kernel(
            rms_norm._rms_norm_long_kernel, signature,
            {**constants, "VEC": 16 // size, "CHUNK": launch.chunk},
            arch, num_warps=launch.num_warps, divisible_by_16=pointers,
        )  # fmt: skip
        assert c.spills == c.stack_bytes == 0, str(c)
        assert c.count("STG") == c.count("STG.128"), str(c)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 81_920])
def test_more_than_two_to_the_31_elements(width):
    rows = 2**31 // width + 3
    if torch.cuda.mem_get_info()[0] < 18 * 2**30:
        pytest.skip("needs 18 GiB of free GPU memory")
    x = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).uniform_(-4, 4)
    weight = torch.empty(width, device="cuda", dtype=torch.bfloat16).uniform_(0, 2)
    out = torch.full_like(x, float("nan"))
    RMS_NORM.triton(x, weight, 1e-6, out=out)
    for part in (slice(0, 3), slice(rows - 5, rows)):
        torch.testing.assert_close(out[part], F.rms_norm(x[part], (width,), weight, 1e-6), rtol=2**-7, atol=1e-3)
    assert not out.isnan().any()
    tail = x[-5:].clone()
    ADD_RMS_NORM.triton(x, x, weight, 1e-6, out=out)
    assert torch.equal(x[-5:], 2 * tail)
    torch.testing.assert_close(out[-5:], F.rms_norm(2 * tail, (width,), weight, 1e-6), rtol=2**-7, atol=1e-3)

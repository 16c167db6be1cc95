"""gemv beyond the operator test: what it refuses, how it compiles, matrices of a model's size, rows past 2^31."""

from __future__ import annotations

import pytest
import torch

from kernels.gemv import LAUNCH, OP, Cost, _gemv_kernel, gemv, launch_of
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import ARCHITECTURES, compile_kernel

X, W = torch.zeros(1, 4), torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        (torch.zeros(2, 4), W, {}, r"x must be \[1, k\] and w \[n, k\], got \(2, 4\) and \(6, 4\)"),
        (X.double(), W.double(), {}, r"got torch\.float64 on cpu"),
        (X, W.half(), {}, r"got torch\.float32 on cpu and torch\.float16 on cpu"),
        (X, torch.zeros(6, 5), {}, r"equally many columns, at least 1; got 4 and 5"),
        (X, torch.zeros(4, 6).t()[:, :4], {}, r"w's columns must be contiguous \(stride 1\), got stride 6"),
        (X, torch.zeros(5, 4), {"gated": True}, r"an even number of rows; got 5"),
        (X, W, {"bias": torch.zeros(3)}, r"bias must be contiguous torch\.float32 \[6\] on cpu, got .* \[3\]"),
        (X, W, {"gated": True, "residual": torch.zeros(1, 6)}, r"residual must be contiguous .* \[1, 3\]"),
        (X, W, {"gamma": torch.zeros(1, 4)}, r"gamma must be contiguous torch\.float32 \[4\] on cpu, got .* \[1, 4\]"),
        (X, W, {"out": torch.zeros(6)}, r"out must be contiguous torch\.float32 \[1, 6\] on cpu"),
    ],
)
def test_bad_input_is_named(x, w, options, message):
    with pytest.raises(ValueError, match=f"^gemv: .*{message}"):
        gemv(x, w, **options)


def test_cost():
    assert OP.cost(X.half(), W.half(), gated=True) == Cost(bytes=2 * (24 + 4 + 3), flops=48)


def test_the_residual_may_be_the_output():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, residual = torch.randn(1, 64).to(device), torch.randn(24, 64).to(device), torch.randn(1, 24).to(device)
    want = residual + x @ w.t()
    assert gemv(x, w, residual=residual, out=residual) is residual
    torch.testing.assert_close(residual, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
def test_offsets_past_two_to_the_31():
    w = torch.empty(2**31 + 2**20, dtype=torch.float16).as_strided((3, 128), (2**30, 1))  # only touched pages cost
    x = torch.randn(1, 128, dtype=torch.float16)
    w.copy_(torch.randn(3, 128))
    torch.testing.assert_close(gemv(x, w), OP.reference(x, w))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("n", "gated"), [*((n, False) for n in LAUNCH), (1, True)])
def test_every_launch_compiles_to_wide_loads_without_spills(arch, n, gated):
    t = launch_of(n, gated, int(arch[3:]))
    pointers = ("x_ptr", "w_ptr", "gamma_ptr", "residual_ptr", "out_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | {"n": "i32", "k": "i32", "stride_w": "i32", "eps": "fp32"}
    signature = {name: signature[name] for name in _gemv_kernel.arg_names if name in signature}
    constexprs = {
        "bias_ptr": None, "NORM": True, "GATED": gated, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k,
        "STAGES": t.num_stages, "OVERLAP": int(arch[3:]) >= 90,
    }  # fmt: skip
    divisible = (*pointers, "n", "k", "stride_w")
    c = compile_kernel(_gemv_kernel, signature, constexprs, arch, num_warps=t.num_warps, divisible_by_16=divisible)
    assert c.spills == c.stack_bytes == 0 and c.shared_bytes <= SHARED_BYTES[int(arch[3:])], str(c)
    assert c.count("LDGSTS.128") > 0, "w comes by asynchronous copies of 16 bytes"
    assert c.count("HMMA") == c.count("HGMMA") == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (576, 576)])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-5}, {"gated": True, "eps": 1e-5}])
def test_matrices_of_a_model(n, k, options):
    torch.manual_seed(0)
    x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (1, n * (1 + options.get("gated", False))))
    w /= k**0.5
    got, want = gemv(x, w, **options), OP.reference(x.double(), w.double(), **options)
    assert (got - want).norm() / want.norm() < 3e-3
    assert all(torch.equal(gemv(x, w, **options), got) for _ in range(20))


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches_keeps_its_order():
    """Each product reads what the one before it wrote and overwrites what an earlier one read."""
    torch.manual_seed(0)
    w = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 2048**0.5 for _ in range(3)]
    start = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(product):
        a, b = start.clone(), torch.empty_like(start)
        for i in range(60):
            product(a, w[i % 3], out=b)
            product(b, w[(i + 1) % 3], residual=a, out=a, eps=1e-5)
        return a

    got = chain(gemv)
    assert all(torch.equal(chain(gemv), got) for _ in range(5))
    torch.cuda.synchronize()

    def waited(*args, **options):
        gemv(*args, **options)
        torch.cuda.synchronize()

    assert torch.equal(chain(waited), got)

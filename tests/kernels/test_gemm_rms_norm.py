"""The folded norm: equal to norm, then product; compiled with tensor cores everywhere; errors by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.gemm_rms_norm import LAUNCH, OP, _gemm_rms_norm_kernel, fold_norm_weight
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import ARCHITECTURES, compile_kernel

TENSOR_CORE = {"sm_100": "UTCHMMA"}


@pytest.mark.parametrize("m", [1, 70])
def test_it_equals_norm_then_product(m):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, 96, generator=generator), torch.randn(40, 96, generator=generator)
    gamma = 1 + 0.3 * torch.randn(96, generator=generator)
    want = F.linear(F.rms_norm(x, (96,), gamma, 1e-5), w)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got = OP.triton(x.to(device), fold_norm_weight(w, gamma).to(device), 1e-5).cpu()
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_statistics_of_a_tile_would_be_another_norm():
    """The shortcut of normalising the result's tile is wrong as soon as a row spans two tiles."""
    x, w = torch.randn(4, 64), torch.randn(256, 64)
    y = x @ w.t()
    whole = F.rms_norm(y, (256,))
    tiles = torch.cat([F.rms_norm(t, (128,)) for t in y.split(128, -1)], -1)
    assert (whole - tiles).abs().max() > 0.01


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", LAUNCH)
def test_every_launch_compiles_without_spills(kind, arch):
    limit = SHARED_BYTES[int(arch[3:])]
    t = next(t for t in LAUNCH[kind] if t.shared_bytes(2) <= limit)
    signature = dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("m", "n", "k", "stride_xm", "stride_wn"), "i32") | {"eps": "fp32"}
    constexprs = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "GROUP": t.group}
    c = compile_kernel(
        _gemm_rms_norm_kernel, signature, constexprs | {"PRECISION": "tf32"}, arch,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    assert c.spills == 0 and c.stack_bytes == 0 and c.shared_bytes <= limit, str(c)
    wide = kind == "many rows" and arch == "sm_90"
    assert c.count("HGMMA" if wide else TENSOR_CORE.get(arch, "HMMA")) > 0 or c.count("HMMA") > 0, c.stats.summary()
    assert c.count("LDGSTS.128") > 0


X = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OP.triton(X[0], X), r"x must be a matrix, got shape \(16,\)"),
        (lambda: OP.triton(X, torch.zeros(4, 8)), "equally many columns, at least 1; got 16 and 8"),
        (lambda: OP.triton(X[:, :0], X[:, :0]), "got 0 and 0"),
        (lambda: OP.triton(X, torch.zeros(16, 4).t()), "w's columns must be contiguous"),
        (lambda: OP.triton(X, X.half()), "got torch.float32 on cpu and torch.float16 on cpu"),
        (lambda: fold_norm_weight(X, torch.ones(4)), r"got \(4, 16\) and \(4,\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 2048])
def test_large_products(m):
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16) / 64
    exact = OP.reference(x.double(), w.double())
    assert (OP.triton(x, w).double() - exact).norm() / exact.norm() < 4e-3

"""skinny_gemm beyond the operator test: splits, counters left clean, machine code, matrices of a model's size."""

from __future__ import annotations

import pytest
import torch

from kernels import skinny_gemm as page
from kernels.launch import SHARED_BYTES
from kernels.skinny_gemm import LAUNCH, MAX_ROWS, OP, _skinny_kernel, skinny_gemm, splits_of, takes
from labkit.measure.compile import compile_kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_every_split_gives_the_same_and_leaves_the_counters_at_zero(splits, eps):
    x, w = torch.randn(5, 1000).half(), torch.randn(130, 1000).half() / 30
    got = skinny_gemm(x, w, eps, splits=splits)
    torch.testing.assert_close(got, OP.reference(x, w, eps), rtol=2e-3, atol=2e-3)
    assert all(not counters.any() for counters in page._arrived.values())


def test_splits_fill_the_sms_and_never_outnumber_the_steps(monkeypatch):
    monkeypatch.setattr(page, "sm_count", lambda device: 132)
    monkeypatch.setattr(page, "shared_limit", lambda device: SHARED_BYTES[90])
    device = torch.device("cuda", 0)
    wanted = {(4096, 4096, 16): 4, (6144, 4096, 16): 2, (28672, 4096, 16): 1, (4096, 4096, 64): 2, (64, 200, 16): 2}
    assert {at: splits_of(*at, device) for at in wanted} == wanted


def test_what_it_does_not_take_on_a_cpu():
    assert not takes(torch.zeros(2, 64).half(), torch.zeros(8, 64).half())


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_every_launch_compiles_without_spills(block_m, norm):
    t = LAUNCH
    boxes = {"x_desc": (block_m, t.block_k), "w_desc": (t.block_n, t.block_k)}
    signature = {name: f"tensordesc<bf16{list(b)}>" for name, b in boxes.items()}
    signature |= {"out_ptr": "*bf16", "parts_ptr": "*fp32", "arrived_ptr": "*i32"}
    signature |= dict.fromkeys(("m", "n", "k"), "i32") | {"eps": "fp32"}
    constexprs = {
        "BLOCK_M": block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "SPLITS": 2, "NORM": norm,
        "STAGES": t.num_stages, "OVERLAP": True,
    }  # fmt: skip
    c = compile_kernel(_skinny_kernel, signature, constexprs, "sm_90", num_warps=t.num_warps)
    assert c.spills == 0 and c.stack_bytes == 0 and c.shared_bytes <= SHARED_BYTES[90], str(c)
    assert c.count("UTMALDG") > 0
    assert c.count("HGMMA") > 0, "w's 64 rows are the rows of Hopper's instruction"


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 14336), (576, 1536)])
@pytest.mark.parametrize("m", [2, 16, 17, 32, 48, 64])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_matrices_of_a_model(n, k, m, eps):
    assert m <= MAX_ROWS
    torch.manual_seed(0)
    x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
    w /= k**0.5
    assert takes(x, w) and not takes(x[:, 1:], w[:, 1:])
    got, want = skinny_gemm(x, w, eps), OP.reference(x.double(), w.double(), eps)
    assert (got - want).norm() / want.norm() < 3e-3
    assert all(torch.equal(skinny_gemm(x, w, eps), got) for _ in range(50)), "the same bits, whoever comes last"
    assert all(not counters.any() for counters in page._arrived.values())

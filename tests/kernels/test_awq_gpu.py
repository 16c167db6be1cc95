"""awq_linear on a GPU: matrices of a model's size for every number of rows, the same bits each time, launches in order.

Offsets, canaries and every way of storing weights are the operator test's (``test_ops``).
"""

from __future__ import annotations

import pytest
import torch

from kernels import awq_linear_hopper, skinny_gemm
from kernels.awq_linear import MANY, MANY_OF_WIDE, awq_linear, awq_linear_reference
from kernels.awq_some_rows import write_out
from tests.kernels.awq_weights import KINDS, weight

pytestmark = pytest.mark.gpu
SHAPES = [(6144, 4096, {"eps": 1e-5}), (4096, 4096, {"residual"}), (28672, 4096, {"gated": True}), (4096, 14336, {})]
ROWS = [1, 2, 5, 8, 9, 16, 33, 64, 128, 200, 600]


def apart(got, want) -> float:
    """Relative Frobenius error against ``want``, itself rounded to what ``got`` is."""
    want = want.to(got.dtype).float()
    return float((got.float() - want).norm() / want.norm())


def rounded(x, w) -> bool:
    """Whether codes are scaled and rounded to 16 bits before the product."""
    wide = len(x) > MANY_OF_WIDE[0] and w.n >= MANY_OF_WIDE[1]
    return len(x) > MANY or (wide and awq_linear_hopper.takes(x, w))


@pytest.fixture(autouse=True)
def exact_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [shape[:2] for shape in SHAPES])
def test_products_of_a_models_size(n, k, dtype):
    """1e-3 from what codes stand for in fp32, or, where they are rounded first, from what they are rounded to.

    Both are compared after rounding to the output's 16 bits. That alone takes bf16 0.8e-3 from the fp32 result, and so
    does rounding the weights.
    """
    torch.manual_seed(0)
    w = weight(n, k, 128, dtype, device="cuda")
    written = {False: w.dequantise().t(), True: w.dequantise(dtype).float().t()}
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        got = awq_linear(x, w)
        assert apart(got, x.float() @ written[rounded(x, w)]) <= 1e-3, m
        exact = x.float() @ written[False]
        assert (got.float() - exact).norm() / exact.norm() <= (2.5e-3 if dtype == torch.bfloat16 else 5e-4), m
        assert all(torch.equal(awq_linear(x, w), got) for _ in range(20)), f"{m} rows: two calls differ"
    assert all(not counters.any() for counters in skinny_gemm._arrived.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "around"), SHAPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 33, 200])
def test_what_stands_around_a_product(n, k, around, m, dtype):
    """Looser than the product alone: a normalised x is rounded, and so are gate and up where nothing is fused."""
    torch.manual_seed(0)
    w, x = weight(n, k, 128, dtype, device="cuda"), torch.randn(m, k, device="cuda", dtype=dtype)
    shapes = ("gamma", (k,)), ("residual", (m, n))
    random = {name: torch.randn(shape, device="cuda", dtype=dtype) for name, shape in shapes}
    options = dict(around) if isinstance(around, dict) else {"residual": random["residual"]}
    options |= {"gamma": random["gamma"]} if "eps" in options else {}
    wide = {name: t.float() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    want = awq_linear_reference(x.float(), w, **wide)
    got = awq_linear(x, w, **options)
    assert apart(got, want) <= (5e-3 if dtype == torch.bfloat16 else 1e-3)
    assert all(torch.equal(awq_linear(x, w, **options), got) for _ in range(20))
    if "residual" in options:
        before = options["residual"].clone()
        assert awq_linear(x, w, residual=before, out=before) is before and torch.equal(before, got)


@pytest.mark.parametrize("k", [1024, 2048, 6144, 8192, 9216, 14336, 28672])
@pytest.mark.parametrize("around", [{}, {"eps": 1e-5}, {"gated": True}], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_one_row_of_any_depth(k, around, bits):
    """1 to 14 tiles a warp, and so more than there is code for."""
    w, x = weight(1056, k, 128, torch.bfloat16, bits, device="cuda"), torch.randn(1, k, device="cuda").bfloat16()
    assert apart(awq_linear(x, w, **around), awq_linear_reference(x.float(), w, **around)) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_written_out_is_what_codes_stand_for(kind, dtype):
    w = weight(520, 1152, kind[1], dtype, kind[0], device="cuda")
    assert torch.equal(write_out(w), w.dequantise(dtype))


@pytest.mark.parametrize("m", [1, 4, 16, 100])
def test_a_chain_of_overlapping_launches_keeps_its_order(m):
    """Each product reads what the one before it wrote and overwrites what an earlier one read."""
    torch.manual_seed(0)
    n = 2048
    w = [weight(n, n, 128, torch.bfloat16, device="cuda") for _ in range(3)]
    start = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def chain(product):
        a, b = start.clone(), torch.empty_like(start)
        for i in range(60):
            product(a, w[i % 3], out=b)
            if m <= 8:
                product(b, w[(i + 1) % 3], residual=a, out=a, eps=1e-5)
            else:  # neither is fused there
                product(b, w[(i + 1) % 3], out=a)
                a /= a.norm() / start.norm()
        return a

    got = chain(awq_linear)
    assert got.isfinite().all() and got.norm() > 0
    assert all(torch.equal(chain(awq_linear), got) for _ in range(5))
    torch.cuda.synchronize()

    def waited(*args, **options):
        awq_linear(*args, **options)
        torch.cuda.synchronize()

    assert torch.equal(chain(waited), got)

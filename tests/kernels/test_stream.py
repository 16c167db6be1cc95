"""The stream kernels beyond the operator test: what they refuse, launch settings, lengths past 2^31."""

from __future__ import annotations

import pytest
import torch

from kernels import stream
from kernels.stream import CHUNK, COPY, OPS, READ, SCALE, TRIAD


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(4, 3), r"must be 1-D, got shape \(4, 3\)"),
        (lambda: torch.zeros(8, dtype=torch.int32), r"got torch\.int32"),
        (lambda: torch.zeros(64)[::2], r"must be contiguous, got stride 2"),
        (lambda: torch.zeros(64)[1:], r"multiple of 16 bytes, it is 4 past one"),
    ],
)
def test_bad_input_is_named(op, make, message):
    inputs = op.cases[0].make("cpu", torch.float32, torch.Generator())
    bad = {k: make() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with pytest.raises(ValueError, match=f"^{op.name}: .*{message}"):
        op.triton(**bad)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(5), "out must have x's length 4, got 5"),
        (torch.zeros(4, dtype=torch.float16), r"out must have x's dtype torch\.float32, got torch\.float16"),
        (torch.zeros(4, device="meta"), "out must have x's device cpu, got meta"),
    ],
)
def test_an_output_that_does_not_fit_is_named(out, message):
    with pytest.raises(ValueError, match=message):
        COPY.triton(torch.zeros(4), out=out)


def test_triad_needs_two_alike():
    with pytest.raises(ValueError, match="triad: b must have a's length 4, got 5"):
        TRIAD.triton(torch.zeros(4), torch.zeros(5), 1.0)


def test_an_unknown_launch_setting_is_refused():
    with pytest.raises(TypeError, match="num_wraps"):
        COPY.triton(torch.zeros(4), num_wraps=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
@pytest.mark.parametrize("per_sm", [0, 1, 2, 100])
def test_programs_that_stride_over_blocks_cover_everything(per_sm):
    x = torch.randn(5 * 1024 + 3)
    out = torch.full_like(x, float("nan"))
    assert COPY.triton(x, out=out, block_bytes=4096, per_sm=per_sm) is out
    assert torch.equal(out, x)
    assert torch.equal(SCALE.triton(x, 2.0, block_bytes=4096, per_sm=per_sm), 2 * x)
    assert torch.equal(TRIAD.triton(x, x, 1.0, block_bytes=4096, per_sm=per_sm), 2 * x)
    whole = torch.arange(2 * CHUNK + 5, dtype=torch.float32) % 7
    assert torch.equal(READ.triton(whole, per_sm=per_sm), READ.reference(whole))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
def test_in_place():
    x = torch.randn(1000)
    expected = 3 * x
    assert SCALE.triton(x, 3.0, out=x) is x
    assert torch.equal(x, expected)


def test_costs():
    x = torch.zeros(CHUNK + 1, dtype=torch.float16)
    n = x.numel()
    assert COPY.cost(x) == stream.Cost(4 * n, 0)
    assert SCALE.cost(x, 1.0) == stream.Cost(4 * n, n)
    assert TRIAD.cost(x, x, 1.0) == stream.Cost(6 * n, 2 * n)
    assert READ.cost(x) == stream.Cost(2 * n + 8, n)  # two partial sums


@pytest.mark.gpu
@pytest.mark.parametrize("per_sm", [0, 2])
def test_more_than_two_to_the_31_elements(per_sm):
    n = 2**31 + CHUNK + 5
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    x = torch.empty(n, device="cuda", dtype=torch.float16).uniform_(-1, 1)
    out = torch.full_like(x, float("nan"))
    COPY.triton(x, out=out, per_sm=per_sm)
    assert torch.equal(out, x)
    TRIAD.triton(x, x, 1.0, out=out, per_sm=per_sm)
    assert torch.equal(out[-CHUNK:], 2 * x[-CHUNK:]) and torch.equal(out[:CHUNK], 2 * x[:CHUNK])
    sums = READ.triton(x, per_sm=per_sm)
    assert sums.shape == (2**31 // CHUNK + 2,)
    torch.testing.assert_close(sums[-2:], READ.reference(x[-CHUNK - 5 :]), rtol=1e-4, atol=1e-3)

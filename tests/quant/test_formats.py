"""Formats: what comes back, the groups upstream gets wrong, packing in AWQ's order, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import LabError
from labkit.quant.formats import BITS, TINY, Format, fake, quantise
from labkit.quant.pack import ORDER, pack, unpack

ALL = [Format(bits, 32, symmetric) for bits in BITS for symmetric in (False, True)]


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_no_weight_is_further_off_than_half_a_step(fmt):
    w = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    q = quantise(w, fmt)
    assert q.codes.dtype == torch.uint8 and int(q.codes.max()) <= fmt.top
    assert q.scales.shape == (24, 3) and torch.equal(q.scales, q.scales.half().float())
    assert (q.zeros is None) == fmt.symmetric
    off = (q.dequantise() - w).abs().unflatten(1, (3, 32))
    # Half a step, and up to half a step more where rounding the zero point has moved an end out of reach.
    assert (off <= q.scales[..., None] * (0.502 if fmt.symmetric else 1.002)).all()
    assert torch.equal(fake(w, fmt), q.dequantise())


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_what_is_on_the_grid_comes_back_exactly(fmt):
    w = quantise(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), fmt).dequantise()
    # The largest value of a group may itself have been rounded; a second time nothing moves by more than fp16's step.
    torch.testing.assert_close(fake(w, fmt), w, rtol=2e-3, atol=1e-3 if fmt.bits == 8 else 0.35)


@pytest.mark.parametrize("symmetric", [False, True])
def test_one_sided_constant_and_empty_groups(symmetric):
    """AWQ's reference returns 2.0 for all of a group from 3 to 5, about 0 for a constant, a subnormal for zeros."""
    w = torch.stack([torch.linspace(3, 5, 32), torch.linspace(-5, -3, 32), torch.full((32,), 0.25), torch.zeros(32)])
    q = quantise(w, Format(4, 32, symmetric))
    back = q.dequantise()
    assert (back[:2] - w[:2]).abs().max() <= (0.36 if symmetric else 0.17)
    torch.testing.assert_close(back[2], w[2], rtol=1e-3, atol=0)
    assert not back[3].any() and (q.scales >= TINY).all()


def test_bits_of_a_weight_count_scales_and_zeros():
    assert Format(4, 128).bits_per_weight(4096) == 4 + 20 / 128
    assert Format(4, 128, symmetric=True).bits_per_weight(4096) == 4.125
    assert Format(3, -1).bits_per_weight(576) == 3 + 19 / 576


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format(5), r"formats of 2, 3, 4, 8 bits, not of 5"),
        (lambda: Format(4.0), r"formats of 2, 3, 4, 8 bits, not of 4\.0"),
        (lambda: Format(4, True), r"got True"),
        (lambda: Format(4, 64.0), r"got 64\.0"),
        (lambda: Format(4, 0), r"a number of weights from 1 up, or -1 for a whole row; got 0"),
        (lambda: quantise(torch.zeros(2, 576), Format(4, 128)), r"groups of 128 do not divide a row of 576 weights; of"
         r" the usual ones 32, 64, 96, 192 would"),
        (lambda: quantise(torch.zeros(2, 7), Format(4, 128)), r"use -1, the whole row"),
        (lambda: quantise(torch.zeros(4), Format()), r"a matrix \[out, in\] can be quantised, got shape \[4\]"),
        (lambda: quantise(torch.tensor([[0.0, 1], [2, float("nan")]]), Format(4, 2)), r"NaN or infinity, .* in row 1"),
        (lambda: quantise(torch.full((1, 2), 3e6), Format(4, 2)), r"needs a scale beyond fp16's 65504"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_would_do(make, message):
    with pytest.raises(LabError, match=message):
        make()


def test_the_constant_of_the_official_layout():
    words = pack(torch.arange(8)[None])
    assert words.dtype == torch.int32 and words.tolist() == [[0x75316420]]
    assert unpack(words).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] and sorted(ORDER) == list(range(8))


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_packed_codes_come_back(rows, words, seed):
    codes = torch.randint(0, 16, (rows, 8 * words), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(pack(codes)).long(), codes)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(2, 12, dtype=torch.uint8), r"by eights along the second dimension, got shape \[2, 12\]"),
        (torch.full((1, 8), 16), r"from 0 to 15, got 16 to 16"),
        (torch.full((1, 8), -1), r"from 0 to 15, got -1 to -1"),
    ],
)
def test_codes_that_would_spoil_their_neighbours_are_not_packed(codes, message):
    with pytest.raises(LabError, match=message):
        pack(codes)


def test_only_words_are_unpacked():
    with pytest.raises(LabError, match=r"an int32 matrix, got torch\.int64 \[1, 1\]"):
        unpack(torch.zeros(1, 1, dtype=torch.int64))

"""Slots by hand on small lists, the page formula against a simulation, and an arena that never overlaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.analysis.fragmentation import (
    Arena,
    churn,
    length_mix,
    padded_slots,
    paged_slots,
    reserved_slots,
    waste,
)
from labkit.errors import LabError


def test_slots_of_a_small_batch():
    lengths = [3, 5, 16, 1, 17]
    assert reserved_slots(lengths, 32) == 160
    assert padded_slots(lengths, 2) == 2 * 5 + 2 * 16 + 17
    assert padded_slots(lengths, 5) == 85
    assert paged_slots(lengths, 16) == 16 * 6
    assert paged_slots(lengths, 1) == sum(lengths)
    assert waste(lengths, 84) == 0.5


def test_half_a_page_is_lost_on_average_whatever_the_batch():
    lengths = length_mix(200_000)
    for page in (8, 16, 64):
        lost = (paged_slots(lengths, page) - lengths.sum()) / len(lengths)
        assert lost == pytest.approx((page - 1) / 2, rel=0.01)


def test_padding_grows_with_the_batch_and_paging_does_not():
    lengths = length_mix(32 * 400)
    padding = [waste(lengths, padded_slots(lengths, batch)) for batch in (8, 16, 32)]
    assert padding == sorted(padding) and padding[0] > 0.5 and padding[2] - padding[0] > 0.1


def test_a_mix_keeps_to_its_bounds_and_its_seed():
    lengths = length_mix(5000, seed=3, least=20, most=1000)
    assert lengths.min() >= 20 and lengths.max() == 1000
    assert (lengths == length_mix(5000, seed=3, least=20, most=1000)).all()
    assert set(length_mix(10, sigma=0, median=350).tolist()) == {350}
    assert abs(np.median(length_mix(50_000)) - 350) < 10


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 120), st.integers(0, 5))
def test_runs_never_overlap_and_gaps_are_what_is_left(lengths, capacity, seed):
    class Checked(Arena):
        def take(self, id, length):
            done = super().take(id, length)
            slots = [s for start, n in self.runs.values() for s in range(start, start + n)]
            assert len(set(slots)) == len(slots) and all(0 <= s < capacity for s in slots)
            assert self.free == sum(n for _, n in self.gaps()) == capacity - len(slots)
            if not done:
                assert self.largest_gap < length
            return done

    for length, free, gap in churn(Checked(capacity), lengths, seed):
        assert gap < length <= free


def test_free_slots_that_lie_apart_are_of_no_use():
    arena = Arena(10)
    assert all(arena.take(i, 2) for i in range(5))
    arena.give_back(1)
    arena.give_back(3)
    assert arena.gaps() == [(2, 2), (6, 2)] and arena.free == 4 and arena.largest_gap == 2
    assert not arena.take(9, 3)
    assert arena.take(9, 2) and arena.runs[9] == (2, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: length_mix(0), "n >= 1"),
        (lambda: length_mix(3, median=9000), "median <= most"),
        (lambda: reserved_slots([5, 9], 8), "9 tokens"),
        (lambda: padded_slots([1], 0), "at least 1 sequence"),
        (lambda: paged_slots([1], 0), "at least 1 token"),
        (lambda: waste([4], 3), "fit 3 slots"),
        (lambda: Arena(0), "at least 1 slot"),
        (lambda: Arena(4).take(0, 0), "asks for 0"),
        (lambda: Arena(4).give_back(7), "no slots"),
        (lambda: churn(Arena(4), [5]), "the arena 4"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(LabError, match=says):
        call()

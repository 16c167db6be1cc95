"""The bank model against the gcd law, hand counts, and an ncu count of the 32 x 32 transpose."""

import math
import random

import pytest

from labkit.analysis import bank_access, column_access, padded, row_access, swizzled, wavefronts
from labkit.analysis.banks import degree
from labkit.errors import LabError


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 16, 31, 32, 33, 48, 64])
def test_a_constant_stride_follows_the_gcd_law(stride):
    assert wavefronts([4 * stride * lane for lane in range(32)]) == math.gcd(stride, 32) == degree(stride)


def test_one_word_for_all_lanes_is_a_broadcast():
    assert wavefronts([64] * 32) == 1 == degree(0)
    assert wavefronts([4 * (lane // 2) for lane in range(32)]) == 1, "two lanes a word"
    assert wavefronts([2 * lane for lane in range(32)], 2) == 1, "two halves of one word"


def test_wide_accesses_take_one_pass_for_each_128_bytes():
    assert wavefronts([8 * lane for lane in range(32)], 8) == 2
    assert wavefronts([16 * lane for lane in range(32)], 16) == 4
    assert wavefronts([128 * lane for lane in range(32)], 16) == 32, "every lane of a quarter warp in the same 4 banks"


def test_the_transpose_that_was_counted_on_an_h200():
    """ncu counted 1024 load wavefronts for an unswizzled 32 x 32 fp32 transpose, 992 of them conflicts, and 32 and 0
    where the tile was padded or swizzled."""
    for layout, needed in ((padded(32), 1024), (padded(32, 1), 32), (swizzled(32), 32)):
        columns = bank_access(column_access(layout, column, 32) for column in range(32))
        assert (columns.wavefronts, columns.ideal, columns.conflicts) == (needed, 32, needed - 32)
        assert bank_access(row_access(layout, row, 32) for row in range(32)).conflicts == 0


@pytest.mark.parametrize(("columns", "vector", "size"), [(32, 1, 4), (64, 4, 4), (64, 8, 2), (128, 8, 2), (32, 4, 4)])
def test_a_swizzle_is_a_permutation_and_keeps_vectors_whole(columns, vector, size):
    layout = swizzled(columns, size, vector)
    addresses = [layout(r, c) for r in range(32) for c in range(columns)]
    assert sorted(addresses) == [size * i for i in range(32 * columns)]
    for r in range(32):
        for c in range(0, columns, vector):
            assert [layout(r, c + i) - layout(r, c) for i in range(vector)] == [size * i for i in range(vector)]


def test_masked_lanes_cost_nothing():
    assert wavefronts([None] * 32) == 0
    assert wavefronts([0] + [None] * 30 + [128]) == 2
    assert bank_access([[None] * 32]).requests == 0


def test_wavefronts_lie_between_the_ideal_and_one_a_lane():
    random.seed(0)
    for _ in range(200):
        lanes = [4 * random.randrange(4096) for _ in range(32)]
        found = bank_access([lanes])
        assert 1 == found.ideal <= found.wavefronts <= 32 and found.slowdown == found.wavefronts


@pytest.mark.parametrize("call", [
    lambda: wavefronts([2], 4), lambda: wavefronts([0] * 33), lambda: wavefronts([0], 3),
    lambda: swizzled(48), lambda: swizzled(32, phases=64),
])  # fmt: skip
def test_impossible_accesses_are_refused(call):
    with pytest.raises(LabError):
        call()

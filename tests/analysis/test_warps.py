"""Coalescing and divergence against counts done by hand."""

import pytest

from labkit.analysis import coalescing, lane_efficiency, loop_efficiency, row_requests, strided
from labkit.errors import LabError


@pytest.mark.parametrize(
    ("lanes", "size", "sectors"),
    [
        (strided(), 4, 4),  # 128 contiguous bytes
        (strided(access_bytes=2), 2, 2),
        (strided(access_bytes=16), 16, 16),
        (strided(stride=2), 4, 8),
        (strided(stride=8), 4, 32),  # one sector a lane
        (strided(stride=1000), 4, 32),
        (strided(offset_bytes=4), 4, 5),  # straddles into a fifth sector
        (strided(offset_bytes=32), 4, 4),
        (strided(stride=0), 4, 1),  # all lanes read one word
        ([0] * 16 + [None] * 16, 4, 1),
    ],
)
def test_sectors_of_a_request(lanes, size, sectors):
    found = coalescing([lanes], size)
    assert (found.requests, found.sectors) == (1, sectors)


def test_the_order_of_lanes_does_not_matter():
    assert coalescing([list(reversed(strided()))]).sectors == 4


def test_rows_of_511_and_512_floats():
    aligned, odd = coalescing(row_requests(64, 512)), coalescing(row_requests(64, 511))
    assert (aligned.sectors_per_request, aligned.efficiency) == (4, 1.0)
    # a row starts 4 bytes earlier each time: 1 row in 8 is aligned, the others touch a fifth sector
    assert odd.requests == aligned.requests == 64 * 16
    assert 4.8 < odd.sectors_per_request < 5 and 0.79 < odd.efficiency < 0.83
    assert coalescing(row_requests(64, 511, pitch=512)).sectors == aligned.sectors


def test_efficiency_counts_useful_bytes():
    assert coalescing([strided(stride=8)]).efficiency == pytest.approx(4 / 32)
    assert coalescing([strided(stride=0)]).efficiency == 4.0, "32 lanes share one sector"


@pytest.mark.parametrize(("requests", "size"), [([[0] * 33], 4), ([[2]], 4), ([[0]], 3)])
def test_impossible_requests_are_refused(requests, size):
    with pytest.raises(LabError, match="coalescing:"):
        coalescing(requests, size)


def test_divergence():
    assert lane_efficiency([[0] * 32]) == 1.0
    assert lane_efficiency([[i % 2 for i in range(32)]]) == 0.5
    assert lane_efficiency([list(range(32))]) == 1 / 32
    assert lane_efficiency([[0] * 32, [0] * 16 + [1] * 16]) == pytest.approx(64 / 96)
    assert lane_efficiency([[0] * 8]) == 0.25, "a warp of 8 lanes pays for 32"
    assert loop_efficiency([[1] * 31 + [100]]) == pytest.approx(131 / 3200)
    with pytest.raises(LabError):
        lane_efficiency([])

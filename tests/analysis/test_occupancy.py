"""Occupancy by hand on six architectures, and what the last wave wastes."""

import pytest

from labkit.analysis import occupancy, waves
from labkit.errors import LabError


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "blocks", "limit"),
    [
        ("sm_80", 32, 0, 4, 16, "warps"),  # 64 warps / 4
        ("sm_80", 32, 0, 1, 32, "blocks"),
        ("sm_80", 33, 0, 8, 6, "registers"),  # 40 a thread: 12 warps a register file, 48 warps
        ("sm_80", 255, 0, 8, 1, "registers"),  # 256 a thread: 2 warps a register file
        ("sm_90", 64, 100 * 1024, 8, 2, "shared memory"),  # 228 KiB / 101 KiB
        ("sm_89", 32, 0, 8, 6, "warps"),  # 48 warps
        ("sm_86", 16, 0, 1, 16, "blocks"),
        ("sm_90", 168, 227 * 1024, 12, 1, "registers"),
    ],
)
def test_occupancy_by_hand(arch, registers, shared, warps, blocks, limit):
    found = occupancy(arch, registers, shared, warps)
    assert (found.blocks, found.warps, found.limit) == (blocks, blocks * warps, limit)
    assert str(found).endswith(f"limited by {limit})")


def test_the_limit_is_the_scarcest_resource():
    found = occupancy("sm_90", 128, 64 * 1024, 8)
    assert found.fits == {"warps": 8, "registers": 2, "shared memory": 3, "blocks": 32}
    assert (found.blocks, found.limit, found.fraction) == (2, "registers", 0.25)


@pytest.mark.parametrize(
    ("grid", "full", "tail", "efficiency"),
    [(264, 1, 0, 1.0), (265, 1, 1, 265 / 528), (1, 0, 1, 1 / 264), (263, 0, 263, 263 / 264)],
)
def test_a_tail_costs_a_whole_wave(grid, full, tail, efficiency):
    found = waves(grid, sms=132, blocks_per_sm=2)
    assert (found.full, found.tail) == (full, tail) and found.efficiency == pytest.approx(efficiency)


def test_nothing_to_run_is_refused():
    with pytest.raises(LabError, match="at least 1"):
        waves(0, 132)

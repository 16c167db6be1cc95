"""Occupancy: how many warps an SM holds at once, which resource sets the limit, and what the last wave wastes.

Occupancy says how much latency can be hidden by switching warps. It does not say how fast a kernel is: one with few
warps and many independent loads a thread has as many bytes in flight as one with many warps and one load each.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import LabError
from labkit.hardware import catalogue

# Granularity of allocation, the same from sm_80 to sm_120 (CUDA C++ Programming Guide and occupancy calculator):
# registers in units of 256 a warp from one of four register files, shared memory in 128 B after 1 KiB for the system.
_REGISTER_UNIT, _REGISTER_FILES, _SHARED_UNIT, _SHARED_RESERVE = 256, 4, 128, 1024


@dataclass(frozen=True)
class Occupancy:
    """Resident warps an SM. ``limit``, which keeps another block out: warps, registers, shared memory or blocks.

    ``fits``: blocks an SM that each resource alone would allow.
    """

    blocks: int
    warps: int
    max_warps: int
    limit: str
    fits: dict[str, int]

    @property
    def fraction(self) -> float:
        return self.warps / self.max_warps

    def __str__(self) -> str:
        return (
            f"{100 * self.fraction:.0f} % ({self.warps} of {self.max_warps} warps an SM: "
            f"{self.blocks} block{'s' * (self.blocks != 1)}, limited by {self.limit})"
        )


def occupancy(arch: str, registers: int, shared_bytes: int, num_warps: int) -> Occupancy:
    """Blocks that fit an SM at once. ``registers`` a thread, ``shared_bytes`` and ``num_warps`` a block.

    arch: "sm_80" to "sm_120". Raises LabError for an architecture the catalogue does not know.
    """
    digits = str(arch).removeprefix("sm_")
    limits = catalogue.limits(f"{digits[:-1]}.{digits[-1:]}")
    a_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = limits["registers_per_sm"] // _REGISTER_FILES // a_warp * _REGISTER_FILES
    a_block = -(-(shared_bytes + _SHARED_RESERVE) // _SHARED_UNIT) * _SHARED_UNIT
    fits = {
        "warps": limits["max_warps_per_sm"] // num_warps,
        "registers": warps_by_registers // num_warps,
        "shared memory": limits["shared_per_sm_bytes"] // a_block,
        "blocks": limits["max_blocks_per_sm"],
    }
    limit = min(fits, key=fits.get)  # of equals, the first
    return Occupancy(fits[limit], fits[limit] * num_warps, limits["max_warps_per_sm"], limit, fits)


@dataclass(frozen=True)
class Waves:
    """A grid of equal blocks on a GPU that holds ``capacity`` of them at once."""

    grid: int
    capacity: int

    @property
    def full(self) -> int:
        return self.grid // self.capacity

    @property
    def tail(self) -> int:
        """Blocks in the last, incomplete wave; 0 if there is none."""
        return self.grid % self.capacity

    @property
    def efficiency(self) -> float:
        """Share of the block slots that do work, if every block takes equally long: a tail costs a whole wave."""
        return self.grid / (-(-self.grid // self.capacity) * self.capacity)


def waves(grid: int, sms: int, blocks_per_sm: int = 1) -> Waves:
    """How ``grid`` blocks fill ``sms`` SMs with ``blocks_per_sm`` resident each. Raises LabError below 1."""
    if min(grid, sms, blocks_per_sm) < 1:
        raise LabError(f"waves: grid, sms and blocks_per_sm must be at least 1, got {grid}, {sms} and {blocks_per_sm}.")
    return Waves(grid, sms * blocks_per_sm)

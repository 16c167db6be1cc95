"""What a warp's 32 lanes ask of memory, and how many of them work: coalescing and divergence.

Global memory moves in sectors of 32 bytes. A warp's load is one request; it costs as many sectors as its lanes touch,
whichever lane touches them. Nsight Compute counts the same: l1tex__t_sectors over l1tex__t_requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.errors import LabError

WARP = 32
SECTOR_BYTES = 32
LINE_BYTES = 128


@dataclass(frozen=True)
class Coalescing:
    """``requests`` warp-wide instructions, the ``sectors`` they touch, and the ``useful_bytes`` the lanes asked for."""

    requests: int
    sectors: int
    useful_bytes: int

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests

    @property
    def efficiency(self) -> float:
        """Bytes asked for over bytes moved: 1 is perfect, and above 1 several lanes share what was moved once."""
        return self.useful_bytes / (self.sectors * SECTOR_BYTES)


def coalescing(requests: Iterable[Sequence[int | None]], access_bytes: int = 4) -> Coalescing:
    """Count sectors for warps given as lists of byte addresses, one a lane; None for a lane that is masked off.

    Raises LabError if a warp has more than 32 lanes, or an address is not a multiple of ``access_bytes`` (1 to 16),
    which the hardware refuses too.
    """
    if access_bytes not in (1, 2, 4, 8, 16):
        raise LabError(f"coalescing: a lane's access is 1, 2, 4, 8 or 16 bytes wide, got {access_bytes}.")
    count = sectors = useful = 0
    for lanes in requests:
        if len(lanes) > WARP:
            raise LabError(f"coalescing: a warp has {WARP} lanes, got {len(lanes)} addresses.")
        active = [a for a in lanes if a is not None]
        for address in active:
            if address % access_bytes:
                raise LabError(f"coalescing: address {address} is not aligned to the access of {access_bytes} bytes.")
        if active:
            count += 1
            sectors += len({a // SECTOR_BYTES for a in active})  # an aligned access never straddles two sectors
            useful += access_bytes * len(active)
    return Coalescing(count, sectors, useful)


def strided(lanes: int = WARP, stride: int = 1, access_bytes: int = 4, offset_bytes: int = 0) -> list[int]:
    """Addresses of a warp whose lane i reads element ``i * stride``, ``access_bytes`` wide, after ``offset_bytes``."""
    return [offset_bytes + i * stride * access_bytes for i in range(lanes)]


def row_requests(rows: int, width: int, access_bytes: int = 4, pitch: int | None = None) -> list[list[int | None]]:
    """Warp requests of a kernel in which warp w of row r reads elements [32 w, 32 w + 32) of that row.

    ``pitch``: elements from one row's start to the next, ``width`` by default. The last warp of a row masks lanes off.
    """
    pitch = width if pitch is None else pitch
    requests = []
    for row in range(rows):
        for first in range(0, width, WARP):
            lanes = range(first, first + WARP)
            requests.append([(row * pitch + i) * access_bytes if i < width else None for i in lanes])
    return requests


def lane_efficiency(paths: Sequence[Sequence[int]]) -> float:
    """Share of lane slots that do work when a warp diverges.

    paths: for each warp, a number for each lane that names its branch; all branches take equally long. A warp
    runs the branches its lanes take one after the other, each with only its own lanes active.
    """
    if not paths or any(len(lanes) == 0 for lanes in paths):
        raise LabError("lane_efficiency: give at least one warp with at least one lane.")
    slots = sum(WARP * len(set(lanes)) for lanes in paths)
    return sum(len(lanes) for lanes in paths) / slots


def loop_efficiency(trips: Sequence[Sequence[int]]) -> float:
    """The same for a loop. ``trips``: each lane's number of iterations; a warp iterates as often as its longest."""
    slots = sum(WARP * max(lanes) for lanes in trips)
    return sum(map(sum, trips)) / slots if slots else 1.0

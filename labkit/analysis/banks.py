"""Shared memory's banks: how many passes a warp's access takes.

32 banks, each 4 bytes wide; word w (address / 4) lies in bank w mod 32. In one pass, called a wavefront, every bank
delivers one word, to any number of lanes. Lanes that need different words of one bank wait for further wavefronts;
lanes that need the same word do not (broadcast). Accesses of 8 and 16 bytes a lane are served for half a warp and a
quarter of a warp at a time, because 32 banks deliver 128 bytes a pass.
Nsight Compute counts the same: l1tex__data_pipe_lsu_wavefronts_mem_shared, and its bank conflicts are the wavefronts
beyond the ideal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from labkit.analysis.warps import WARP
from labkit.errors import LabError

BANKS = 32
WORD_BYTES = 4


@dataclass(frozen=True)
class BankAccess:
    """``wavefronts`` needed and the ``ideal`` number, for ``requests`` warp-wide instructions."""

    requests: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal

    @property
    def slowdown(self) -> float:
        return self.wavefronts / self.ideal if self.ideal else 1.0


def wavefronts(lanes: Sequence[int | None], access_bytes: int = 4) -> int:
    """Passes one warp-wide access takes. lanes: byte address of each lane, None where masked off.

    Raises LabError for addresses that are not aligned to the access, or an access that is not 1, 2, 4, 8 or 16 bytes.
    """
    if access_bytes not in (1, 2, 4, 8, 16):
        raise LabError(f"wavefronts: a lane's access is 1, 2, 4, 8 or 16 bytes wide, got {access_bytes}.")
    if len(lanes) > WARP:
        raise LabError(f"wavefronts: a warp has {WARP} lanes, got {len(lanes)} addresses.")
    together = WARP * WORD_BYTES // max(access_bytes, WORD_BYTES)  # lanes served in one pass at best
    total = 0
    for first in range(0, len(lanes), together):
        words: dict[int, set[int]] = {}
        for address in lanes[first : first + together]:
            if address is None:
                continue
            if address % access_bytes:
                raise LabError(f"wavefronts: address {address} is not aligned to the access of {access_bytes} bytes.")
            for word in range(address // WORD_BYTES, (address + access_bytes - 1) // WORD_BYTES + 1):
                words.setdefault(word % BANKS, set()).add(word)
        total += max(map(len, words.values()), default=0)
    return total


def bank_access(requests: Iterable[Sequence[int | None]], access_bytes: int = 4) -> BankAccess:
    """Sum over several warp-wide accesses. The ideal moves the distinct words they need at 128 bytes a pass."""
    count = needed = ideal = 0
    for lanes in requests:
        active = [a for a in lanes if a is not None]
        if active:
            count += 1
            needed += wavefronts(lanes, access_bytes)
            per_pass = WARP * WORD_BYTES // max(access_bytes, WORD_BYTES)
            ideal += -(-len(active) // per_pass)
    return BankAccess(count, needed, ideal)


def degree(stride_words: int) -> int:
    """Wavefronts of a 4-byte access with a constant stride: gcd(stride, 32); stride 0 is a broadcast, 1."""
    return 1 if stride_words == 0 else math.gcd(stride_words, BANKS)


Layout = Callable[[int, int], int]  # (row, column) -> byte address


def padded(columns: int, pad: int = 0, element_bytes: int = 4) -> Layout:
    """Row-major with ``pad`` unused elements at the end of each row."""
    pitch = columns + pad
    return lambda row, column: (row * pitch + column) * element_bytes


def swizzled(columns: int, element_bytes: int = 4, vector: int = 1, phases: int | None = None) -> Layout:
    """Row-major, with the row's number XORed into the column's: same memory, other banks.

    vector: elements that stay together, so that they can be moved in one access. phases: how many rows differ before
    the pattern repeats, by default as many as a row has vectors. Both must be powers of two, as must ``columns``.
    """
    groups = columns // vector
    phases = groups if phases is None else phases
    for name, value in (("columns", columns), ("vector", vector), ("phases", phases)):
        if value < 1 or value & (value - 1):
            raise LabError(f"swizzled: {name} must be a power of two, got {value}.")
    if phases > groups:
        raise LabError(f"swizzled: a row has {groups} vectors of {vector}, so at most as many phases, got {phases}.")

    def address(row: int, column: int) -> int:
        group, inside = divmod(column, vector)
        return (row * columns + (group ^ (row % phases)) * vector + inside) * element_bytes

    return address


def row_access(layout: Layout, row: int, columns: int) -> list[int]:
    """Lane i reads column i of one row."""
    return [layout(row, i) for i in range(columns)]


def column_access(layout: Layout, column: int, rows: int) -> list[int]:
    """Lane i reads row i of one column: what a transpose does on one of its two sides."""
    return [layout(i, column) for i in range(rows)]

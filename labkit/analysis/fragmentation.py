"""Where a KV cache's slots go: reserved for a length that never comes, padded to a neighbour's, lost between sequences,
or lost in the last page. A slot holds one token's keys and values.

Four ways to give a sequence of L tokens its slots:

    reserved    the longest it could ever become, contiguous: ``most`` slots
    padded      the longest of its batch, contiguous
    contiguous  exactly L, wherever a gap is long enough (``Arena``): nothing unused inside, but gaps between
    paged       ceil(L / page) pages, anywhere

If every remainder of L by the page is as likely as any other, the last page leaves (page - 1) / 2 slots empty on
average, whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.errors import LabError


def length_mix(
    n: int, seed: int = 0, median: float = 350, sigma: float = 0.9, least: int = 16, most: int = 4096
) -> np.ndarray:
    """[n] int64, tokens of ``n`` sequences: lognormal, as lengths of requests are about, cut at ``least`` and ``most``.

    sigma: spread of the logarithm; 0 makes all of them ``median``. Raises LabError for sizes out of range.
    """
    if not (n >= 1 and 1 <= least <= median <= most and sigma >= 0):
        raise LabError(
            f"length_mix needs n >= 1, sigma >= 0 and 1 <= least <= median <= most; got n={n}, sigma={sigma}, "
            f"least={least}, median={median}, most={most}"
        )
    drawn = median * np.exp(sigma * np.random.default_rng(seed).standard_normal(n))
    return np.clip(np.round(drawn), least, most).astype(np.int64)


def reserved_slots(lengths: Sequence[int], most: int) -> int:
    """Slots if every sequence gets room for ``most`` tokens. Raises LabError for one that is longer."""
    lengths = np.asarray(lengths)
    if lengths.size and lengths.max() > most:
        raise LabError(f"a sequence of {lengths.max()} tokens does not fit into {most} reserved slots")
    return len(lengths) * most


def padded_slots(lengths: Sequence[int], batch: int) -> int:
    """Slots if sequences are taken ``batch`` at a time, each as long as the longest of its batch."""
    if batch < 1:
        raise LabError(f"a batch holds at least 1 sequence, got {batch}")
    lengths = np.asarray(lengths)
    parts = (lengths[i : i + batch] for i in range(0, len(lengths), batch))
    return sum(len(part) * int(part.max()) for part in parts)


def paged_slots(lengths: Sequence[int], page: int) -> int:
    """Slots if every sequence gets whole pages of ``page`` tokens."""
    if page < 1:
        raise LabError(f"a page holds at least 1 token, got {page}")
    return int((-(-np.asarray(lengths) // page) * page).sum())


def waste(lengths: Sequence[int], slots: int) -> float:
    """The share of ``slots`` that holds no token of these sequences."""
    used = int(np.sum(lengths))
    if not 0 < used <= slots:
        raise LabError(f"{used} tokens must be at least 1 and fit {slots} slots")
    return 1 - used / slots


class Arena:
    """``capacity`` slots in one row; each sequence takes a contiguous run of them, in the first gap that is long
    enough. ``runs``: {id: (start, length)}."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise LabError(f"an arena needs at least 1 slot, got {capacity}")
        self.capacity = capacity
        self.runs: dict[int, tuple[int, int]] = {}

    def gaps(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, in order."""
        found, at = [], 0
        for start, length in sorted([*self.runs.values(), (self.capacity, 0)]):
            if start > at:
                found.append((at, start - at))
            at = start + length
        return found

    @property
    def free(self) -> int:
        return self.capacity - sum(length for _, length in self.runs.values())

    @property
    def largest_gap(self) -> int:
        return max((length for _, length in self.gaps()), default=0)

    def take(self, id: int, length: int) -> bool:
        """Give sequence ``id`` a run of ``length`` slots -> whether a gap was long enough."""
        if length < 1 or id in self.runs:
            raise LabError(f"sequence {id} asks for {length} slots{' and has some already' * (id in self.runs)}")
        for start, gap in self.gaps():
            if gap >= length:
                self.runs[id] = (start, length)
                return True
        return False

    def give_back(self, id: int) -> None:
        if id not in self.runs:
            raise LabError(f"sequence {id} has no slots to give back")
        del self.runs[id]


def churn(arena: Arena, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, int, int]]:
    """Sequences come in this order; one that finds no gap waits until running ones, in random order, have ended.

    -> (length, free slots, largest gap) for each sequence that was refused although as many slots were free as it
    needs: scattered, so of no use to it. Raises LabError for a sequence longer than the arena.
    """
    rng, refused = np.random.default_rng(seed), []
    for id, length in enumerate(int(n) for n in lengths):
        if length > arena.capacity:
            raise LabError(f"sequence {id} has {length} tokens, the arena {arena.capacity} slots")
        while not arena.take(id, length):
            if arena.free >= length:
                refused.append((length, arena.free, arena.largest_gap))
            arena.give_back(list(arena.runs)[rng.integers(len(arena.runs))])
    return refused

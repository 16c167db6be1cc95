"""The pool of host blocks: where the blocks of swapped-out requests wait.

Nothing is shared here and nothing is found again, so a list of free blocks is all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labkit.errors import LabError


class HostPool:
    """Blocks in host memory, for requests that were swapped out. ``num_blocks`` of them, all usable."""

    def __init__(self, num_blocks: int):
        if not isinstance(num_blocks, int) or num_blocks < 0:
            raise LabError(f"host_blocks must be a whole number of at least 0, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Raises LabError, with nothing changed, if fewer than n are free."""
        if n > len(self._free):
            raise LabError(f"{n} host blocks are needed, and {len(self._free)} are free")
        return [self._free.pop() for _ in range(n)]

    def free(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises LabError unless every host block is free or in exactly one of the tables."""
        every = sorted([*self._free, *(block for table in tables for block in table)])
        if every != list(range(self.num_blocks)):
            raise LabError(f"the host pool is not whole: free and held blocks together are {every}")

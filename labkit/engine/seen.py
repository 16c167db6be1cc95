"""Which tokens a request's text holds already, on the device: what a repetition penalty acts on.

A row of [seats, vocab] booleans a request. A text only grows, so a step adds its newest token, which the device knows
before the host does; the whole text crosses from the host once, when a request gets its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.engine.inputs import to_device
from labkit.engine.step import Chunk


class SeenTokens:
    """Rows for up to ``seats`` requests at once. Nothing is allocated before the first penalty."""

    def __init__(self, seats: int, vocab: int, device: torch.device):
        self.seats, self.vocab, self.device = seats, vocab, device
        self._table: torch.Tensor | None = None  # [seats, vocab + 1]: the last column is for filling up
        self._rows: dict[int, tuple[int, int]] = {}  # request id -> (row, how many of its tokens are marked)

    def rows(self, chunks: Sequence[Chunk], newest: torch.Tensor) -> torch.Tensor:
        """chunks: those that sample under a penalty, at most ``seats``. newest: int [m], on the device, the last token
        of each chunk, which the host may not know yet -> bool [m, vocab], what each text holds, the newest included.

        A row is right if all tokens of its request before the newest are marked. It is filled anew where that is not
        so: the request is new, or its row went to others meanwhile.
        """
        if self._table is None:
            self._table = torch.zeros(self.seats, self.vocab + 1, dtype=torch.bool, device=self.device)
            self._true = torch.ones((), dtype=torch.bool, device=self.device)  # True itself would cross, and wait
        here, places, late = {chunk.request.id for chunk in chunks}, [], []
        for chunk in chunks:
            id, before = chunk.request.id, chunk.start + chunk.count - 1
            row, marked = self._rows.get(id) or (self._free_row(here), -1)
            if marked != before:
                late.append((row, chunk.request.token_ids[:before]))
            self._rows[id] = row, before + 1
            places.append(row)
        if late:
            self._fill(late)
        index = to_device(places, torch.int64, self.device)
        self._table[index, newest.long()] = self._true
        return self._table[index, : self.vocab]

    def _free_row(self, here: set[int]) -> int:
        if len(self._rows) < self.seats:
            return len(self._rows)
        gone = next(id for id in self._rows if id not in here)
        return self._rows.pop(gone)[0]

    def _fill(self, late: list[tuple[int, list[int]]]) -> None:
        longest = max(len(text) for _, text in late)
        index = to_device([row for row, _ in late], torch.int64, self.device)
        fresh = torch.zeros(len(late), self.vocab + 1, dtype=torch.bool, device=self.device)
        if longest:
            padded = [[*text, *[self.vocab] * (longest - len(text))] for _, text in late]
            fresh.scatter_(1, to_device(padded, torch.int64, self.device), True)
        self._table[index] = fresh

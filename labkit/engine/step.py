"""A step: what one pass of the model computes. The scheduler writes it, the runner carries it out.

A runner may be given step N + 1 while step N still runs. Steps run in the order of their index, so a block that step N
reads may be handed out again in step N + 1: by the time it is overwritten it has been read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from labkit.engine.request import Request


class Chunk(NamedTuple):
    """Tokens [start, start + count) of one request. (A tuple, because a step of 256 requests makes 256 of these.)

    samples: start + count was the request's ``num_tokens`` when the step was planned, so the logits of its last token
    give the next one, token start + count. A token id in the chunk may be PENDING: the step before samples it.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """index: 0, 1, ... in the order of planning, and of running.

    swap_out, copies, swap_in: (source block, destination block) pairs, all of them carried out before the chunks are
    computed, first every swap_out (device to host), then copies (device to device), then swap_in (host to device).
    A step may consist of these alone, with no chunk.
    """

    index: int
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks that give a token, in the order in which ``commit`` takes a list of tokens."""
        return [chunk for chunk in self.chunks if chunk.samples]


class Draft:
    """A step while it is planned.

    budget: tokens it may still take. now: seconds. grown: (request id, blocks that its table got). closed: why no
    waiting request may come in, if so. changed: something beside the step changed, so that the plan counts even if no
    step comes of it.
    """

    __slots__ = ("index", "budget", "now", "chunks", "copies", "swap_out", "swap_in", "grown", "changed", "closed")

    def __init__(self, index: int, budget: int, now: float):
        self.index, self.budget, self.now = index, budget, now
        self.chunks: list[Chunk] = []
        self.copies: list[tuple[int, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.grown: list[tuple[int, list[int]]] = []
        self.changed = False
        self.closed: str | None = None

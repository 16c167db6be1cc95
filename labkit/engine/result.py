"""What a step gives: tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.engine.sampler import Sampled
from labkit.engine.step import Chunk


@dataclass(frozen=True)
class Logprobs:
    """Of one token: its log-probability, and the best tokens as (id, log-probability), the likeliest first."""

    token: float
    best: list[tuple[int, float]]


class StepResult:
    """What a step gave. chunks: those that sampled, in the step's order; logits: [m, vocab], a row each, on the device
    (after a graph's replay they are valid until the next step runs)."""

    def __init__(self, chunks: list[Chunk], logits: torch.Tensor | None, sampled: Sampled | None):
        self.chunks, self.logits, self._sampled = chunks, logits, sampled
        self._host = self._event = None
        if sampled is not None:
            parts = (sampled.tokens, sampled.chosen, sampled.best, sampled.best_ids)
            self._host = [None if t is None else _to_host(t) for t in parts]
            if sampled.tokens.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()

    def token_ids(self) -> list[int]:
        """The sampled tokens, one for each of ``chunks``. Waits until they are on the host."""
        return [] if self._host is None else self._wait()[0].tolist()

    def logprobs(self) -> list[Logprobs | None]:
        """For each of ``chunks``: log-probabilities if its request asked for them. Waits like token_ids."""
        if self._host is None or self._host[1] is None:
            return [None] * len(self.chunks)
        _, chosen, best, ids = (t.tolist() for t in self._wait())
        rows = zip(self._sampled.wanted, chosen, best, ids, strict=True)
        return [Logprobs(c, list(zip(i, b, strict=True))[:n]) if n else None for n, c, b, i in rows]

    def _wait(self):
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _to_host(t: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, which is not handed out again while the copy runs. On a CPU, where a later step would
    write into the same tensor, a copy as well."""
    if not t.is_cuda:
        return t.clone()
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

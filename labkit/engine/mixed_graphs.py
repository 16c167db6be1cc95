"""CUDA graphs of steps that hold prompts: a few sizes of tokens, each with whatever requests come.

A step with prompts launches some 390 kernels, one by one. A thousand tokens keep the GPU busy for longer than that
takes; sixteen do not, and every request starts with such steps: the rest of a prompt whose beginning is cached, a chunk
beside requests that decode. So steps of up to MOST tokens are replayed from graphs as well, padded to the next bucket.

A graph of T tokens has rows for min(T, max_num_seqs) sequences. Those that are not there have no tokens; a token of
padding belongs to no sequence, stores nothing (slot -1), and nobody reads what becomes of it. Logits are computed for
as many rows as there may be sequences, those that are asked for first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from labkit.engine.graphs import CudaCapture
from labkit.engine.inputs import Batch, InputBuilder

MOST = 1024


def mixed_buckets(max_tokens: int) -> list[int]:
    """Powers of two from 16 up to MOST, as far as a step may have so many tokens."""
    return [b for b in (16, 32, 64, 128, 256, 512, MOST) if b <= max_tokens]


class MixedGraphs:
    """``step(batch, out)`` is what is captured: it reads a Batch with ``rows``, writes their logits and tokens."""

    @torch.inference_mode()
    def __init__(
        self,
        inputs: InputBuilder,
        step: Callable[[Batch, torch.Tensor], None],
        logits: torch.Tensor,
        max_tokens: int,
        capture: CudaCapture,
    ):
        """Captures all buckets, into ``capture``'s pool. logits: [max_seqs, vocab], where every graph leaves its rows.

        Raises CaptureFailed for a step that can run and cannot be captured, and whatever the step raises when it runs.
        """
        self.buckets, self.logits = mixed_buckets(max_tokens), logits
        self._replays: dict[int, Callable[[], None]] = {}
        collecting = gc.isenabled()
        gc.disable()  # as in DecodeGraphs
        try:
            for bucket in reversed(self.buckets):
                seqs = inputs.seqs_of(bucket)
                inputs.buffer.zero_()
                batch = inputs.views(inputs.buffer, bucket, seqs, wanted=seqs, max_q=bucket, decode=False)
                batch.slots.fill_(-1)
                batch.source.fill_(-1)
                out = logits[:seqs]
                capture.warm_up(lambda batch=batch, out=out: step(batch, out))
                self._replays[bucket] = capture.capture(lambda batch=batch, out=out: step(batch, out))
        finally:
            if collecting:
                gc.enable()

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the step whose inputs lie in the buffer -> logits, the rows that are asked for first."""
        self._replays[bucket]()
        return self.logits

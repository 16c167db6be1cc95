"""CUDA graphs of decode steps: one replay instead of some 300 launches.

A graph repeats the same kernels on the same addresses, so a step must look the same each time: its inputs lie in the
InputBuilder's one device buffer, and its size is one of a few buckets. A batch of 13 runs in the graph of 16; the three
rows of padding are real rows that store nothing (slot -1) and attend to nothing (length 0), written anew in every step.

The token of each row (its argmax) is part of the graph and stays in the token buffer, where the next step finds it. So
a step in which all rows are greedy is one copy in and one replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.engine.inputs import InputBuilder
from labkit.errors import LabError


def decode_buckets(max_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8, and the last is max_seqs: every batch from 1 to max_seqs has one."""
    return [*(b for b in (1, 2, 4, *range(8, max_seqs, 8)) if b < max_seqs), max_seqs]


def bucket_of(buckets: list[int], seqs: int) -> int | None:
    """The smallest bucket that holds ``seqs`` sequences; None if none does."""
    return next((b for b in buckets if b >= seqs), None)


class DecodeGraphs:
    """The captured steps. ``step(batch, out)`` is what is captured: it reads a Batch, writes logits and tokens."""

    def __init__(self, inputs: InputBuilder, step: Callable, logits: torch.Tensor, max_seqs: int):
        """Captures all buckets. logits: [max_seqs, vocab], where every graph leaves its rows.

        Raises LabError without a GPU: there is nothing to capture.
        """
        if inputs.buffer is None or not inputs.buffer.is_cuda:
            raise LabError("CUDA graphs need a CUDA GPU; on a CPU steps run as they are (cuda_graphs=False)")
        self.buckets, self.logits = decode_buckets(max_seqs), logits
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then live in the memory that it took.
        for bucket in reversed(self.buckets):
            inputs.buffer.zero_()
            batch = inputs.views(inputs.buffer, bucket, bucket, wanted=bucket, max_q=1, decode=True)
            batch.slots.fill_(-1)
            batch.source.fill_(-1)
            out = logits[:bucket]
            side = torch.cuda.Stream()  # kernels are compiled and cuBLAS makes its workspace before the capture
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    step(batch, out)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step(batch, out)
            self._graphs[bucket] = graph
        torch.cuda.synchronize()

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the step whose inputs lie in the buffer -> logits [bucket, vocab], valid until the next replay."""
        self._graphs[bucket].replay()
        return self.logits[:bucket]

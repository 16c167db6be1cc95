"""CUDA graphs of decode steps: one replay instead of some 300 launches.

A graph repeats the same kernels on the same addresses, so a step must look the same each time: its inputs lie in the
InputBuilder's one device buffer, and its size is one of a few buckets. A batch of 13 runs in the graph of 16; the three
rows of padding are real rows that store nothing (slot -1) and attend to nothing (length 0), written anew in every step.

The token of each row (its argmax) is part of the graph and stays in the token buffer, where the next step finds it. So
a step in which all rows are greedy is one copy in and one replay.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import contextmanager

import torch

from labkit.engine.inputs import InputBuilder
from labkit.errors import LabError


def decode_buckets(max_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8, and the last is max_seqs: every batch from 1 to max_seqs has one."""
    return [*(b for b in (1, 2, 4, *range(8, max_seqs, 8)) if b < max_seqs), max_seqs]


def bucket_of(buckets: list[int], seqs: int) -> int | None:
    """The smallest bucket that holds ``seqs`` sequences; None if none does."""
    return next((b for b in buckets if b >= seqs), None)


class CaptureFailed(LabError):
    """A step that runs cannot be captured: it synchronises, copies to the host or decides on values."""


class CudaCapture:
    """Runs and captures steps on one stream of its own.

    One stream for all, for the warm-ups too: cuBLAS keeps a workspace for each stream that it meets (32 MiB on Hopper).
    A warm-up outside the capture makes this stream's, so that no capture allocates it in the graphs' memory. That
    memory is one pool for all graphs: they never run at the same time, so they may use the same addresses.
    """

    def __init__(self):
        """Raises LabError without a GPU: there is nothing to capture."""
        if not torch.cuda.is_available():
            raise LabError("CUDA graphs need a CUDA GPU; on a CPU steps run as they are (cuda_graphs=False)")
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run ``step`` as it is, twice: kernels are compiled and loaded, and libraries make their workspaces.

        The second time a call that makes the host wait is an error (CaptureFailed): found here, it does no harm, while
        a capture that it broke would leave torch's allocator in disorder.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
            with _waiting_is_an_error():
                try:
                    step()
                except RuntimeError as error:
                    raise _failed(error) from error
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """A callable that repeats, on the stream current when it is called, what ``step`` does to the device. Raises
        CaptureFailed for a step that synchronises or that CUDA will not record."""
        graph, before, broke = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                try:
                    step()
                except Exception as error:
                    broke = error  # the end of a broken capture raises too, and would hide this
                    raise
        except Exception as error:
            torch.cuda.set_stream(before)  # a capture that fails on its way out leaves its own stream current
            self._clear_up(graph)
            raise _failed(broke or error) from (broke or error)
        return graph.replay

    def _clear_up(self, graph) -> None:
        """Tell torch's allocator that the capture is over. Before torch 2.12 a capture that ends in an error does not
        (pytorch/pytorch#180395), and from then on no cached memory can be given back. The allocator may go on asking
        the graph, so it is kept."""
        _BROKEN.append(graph)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            try:
                end(torch.cuda.current_device(), self.pool)
            except RuntimeError:
                pass  # it has been told


_BROKEN: list = []


@contextmanager
def _waiting_is_an_error():
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once that it does not find every call that waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _failed(error: Exception) -> CaptureFailed:
    said = (str(error) or repr(error)).splitlines()[0]
    return CaptureFailed(f"the decode step cannot be captured in a CUDA graph: {said}")


class DecodeGraphs:
    """The captured steps. ``step(batch, out)`` is what is captured: it reads a Batch, writes logits and tokens."""

    @torch.inference_mode()
    def __init__(self, inputs: InputBuilder, step: Callable, logits: torch.Tensor, max_seqs: int, capture: CudaCapture):
        """Captures all buckets. inputs: with a buffer on the device (``stage``). logits: [max_seqs, vocab], where every
        graph leaves its rows.

        Raises CaptureFailed for a step that can run and cannot be captured, and whatever the step raises when it runs.
        """
        self.buckets, self.logits = decode_buckets(max_seqs), logits
        self._replays: dict[int, Callable[[], None]] = {}
        collecting = gc.isenabled()
        gc.disable()  # a graph or an event of somebody else that is freed during a capture would end it
        try:
            # The largest first: the smaller ones then live in the memory that it took.
            for bucket in reversed(self.buckets):
                self._replays[bucket] = _capture(inputs, step, logits[:bucket], bucket, capture)
        finally:
            if collecting:
                gc.enable()

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the step whose inputs lie in the buffer -> logits [bucket, vocab], valid until the next replay."""
        self._replays[bucket]()
        return self.logits[:bucket]


def _capture(inputs: InputBuilder, step: Callable, out: torch.Tensor, bucket: int, capture: CudaCapture) -> Callable:
    inputs.buffer.zero_()
    batch = inputs.views(inputs.buffer, bucket, bucket, wanted=bucket, max_q=1, decode=True)
    batch.slots.fill_(-1)
    batch.source.fill_(-1)
    capture.warm_up(lambda: step(batch, out))
    return capture.capture(lambda: step(batch, out))

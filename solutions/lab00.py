"""Worked answers of lab 00."""

from __future__ import annotations


def gb_per_s(bytes_moved, microseconds):
    """Bandwidth in GB/s (10^9 bytes a second) of a transfer that took ``microseconds``."""
    seconds = microseconds * 1e-6
    return bytes_moved / seconds / 1e9


def time_kernel(gpu, launch, warmup, repeats):
    """Microseconds one launch takes on the device, by the host's clock.

    gpu.now() reads the host's clock in microseconds, gpu.synchronize() waits until the device is idle.
    """
    for _ in range(warmup):  # compilation, caches, clocks: not what we came to measure
        launch()
    gpu.synchronize()  # the clock must not start while warm-up work is still queued
    start = gpu.now()
    for _ in range(repeats):
        launch()
    gpu.synchronize()  # a launch only queues work; the result counts once the device is done
    return (gpu.now() - start) / repeats


def greedy(next_logits, ids, max_tokens):
    """Extend ``ids`` (a list) by ``max_tokens`` greedy tokens, recomputing everything for each; returns the new ones.

    next_logits(ids) runs the model on a list of token ids and returns the logits [vocab] after the last one.
    """
    ids, new = list(ids), []
    for _ in range(max_tokens):
        token = int(next_logits(ids).argmax())
        ids.append(token)
        new.append(token)
    return new

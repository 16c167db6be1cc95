"""Worked answers of lab 07."""

from __future__ import annotations

import torch


def timeline(kernel_us, launch_us):
    """(when the last kernel ends, how long the GPU had nothing to do until then), in us from the host's first launch.

    kernel_us: how long each kernel runs, in order. The host needs launch_us for a launch and goes on to the next at
    once. A kernel begins when it has been launched and the one before it has ended.
    """
    end = 0.0
    for place, runs in enumerate(kernel_us):
        launched = (place + 1) * launch_us
        end = max(end, launched) + runs
    return end, end - sum(kernel_us)


def run_steps(replay, ids, slots, out, batches):
    """What each batch's rows come to, in a graph that reads ids and slots and writes out.

    replay: the graph. ids, slots: int64 [bucket]. out: float32 [bucket, width]. batches: lists of (id, slot), none
    longer than the bucket. Rows behind a batch get id 0 and slot -1, which stores nothing. -> one tensor [len(batch),
    width] a batch.
    """
    results = []
    for batch in batches:
        n = len(batch)
        ids.zero_()
        slots.fill_(-1)
        ids[:n] = torch.tensor([i for i, _ in batch])
        slots[:n] = torch.tensor([slot for _, slot in batch])
        replay()
        results.append(out[:n].clone())
    return results


def padding(batches, buckets):
    """(share of the computed rows that are padding, steps that run without a graph).

    batches: rows of each decode step. buckets: sizes with a graph, ascending. A step runs in the smallest bucket that
    holds it; one that is larger than all of them runs as it is.
    """
    computed = eager = 0
    for rows in batches:
        bucket = next((b for b in buckets if b >= rows), None)
        eager += bucket is None
        computed += rows if bucket is None else bucket
    return 1 - sum(batches) / computed, eager

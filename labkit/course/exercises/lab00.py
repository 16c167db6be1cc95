"""Lab 00: units, an honest timer, the naive generation loop."""

from __future__ import annotations

import torch

from labkit.course.exercise import Exercise, Hint, Trial
from labkit.course.simulated_gpu import SimulatedGPU
from solutions import lab00 as answers


def _close(got, value) -> bool:
    return isinstance(got, int | float) and abs(got - value) <= 1e-3 * abs(value)


def _bandwidth(name, bytes_moved, microseconds):
    return Trial(name, lambda: {"bytes_moved": bytes_moved, "microseconds": microseconds})


def _timer(name, kernel_us, first_us, warmup, repeats):
    def make():
        gpu = SimulatedGPU(kernel_us=kernel_us, launch_us=5.0, first_us=first_us)
        return {"gpu": gpu, "launch": gpu.launch, "warmup": warmup, "repeats": repeats}

    return Trial(name, make)


def _logits(vocab: int, seed: int):
    """A tiny next-token function whose answer depends on every token so far, so that a forgotten one shows."""
    table = torch.randn(64, vocab, generator=torch.Generator().manual_seed(seed))

    def next_logits(ids):
        if not isinstance(ids, list):
            raise TypeError(f"ids must be a list of token ids, got {type(ids).__name__}")
        for token in ids:
            if not isinstance(token, int):
                raise TypeError(f"ids must hold ints, got a {type(token).__name__}: append int(token)")
        rows = [(7 * t + i) % 64 for i, t in enumerate(ids)]
        return table[rows].sum(0)

    return next_logits


def _loop(name, ids, max_tokens, seed):
    return Trial(name, lambda: {"next_logits": _logits(50, seed), "ids": list(ids), "max_tokens": max_tokens})


EXERCISES = (
    Exercise(
        "00.1",
        "Bytes and microseconds to GB/s",
        answers.gb_per_s,
        trials=(
            _bandwidth("a 1 GiB copy, read and written", 2 * 2**30, 500.0),
            _bandwidth("4 KB in 2 us", 4096, 2.0),
            _bandwidth("one byte a second", 1, 1e6),
        ),
        hints=(
            Hint("microseconds are 1e-6 s: did you divide by milliseconds?", lambda i, g, w: _close(g, w / 1e3)),
            Hint("GB means 1e9 bytes; 2**30 bytes are a GiB.", lambda i, g, w: _close(g, w * 1e9 / 2**30)),
            Hint(
                "the result is in bytes per second or per microsecond; scale it to GB/s.",
                lambda i, g, w: _close(g, w * 1e9) or _close(g, w * 1e3),
            ),
            Hint("bandwidth is bytes divided by time.", lambda i, g, w: _close(g * w, 1e-6)),
        ),
    ),
    Exercise(
        "00.2",
        "A timer that waits",
        answers.time_kernel,
        trials=(
            _timer("a kernel of 100 us", 100.0, 0.0, 3, 20),
            _timer("the first launch compiles for 0.3 s", 40.0, 300_000.0, 2, 10),
            _timer("a kernel of 2 us, shorter than its launch", 2.0, 0.0, 1, 50),
        ),
        tolerance=0.03,
        hints=(
            Hint(
                "your number includes the first launch, which compiles. "
                "Launch `warmup` times and synchronize before the clock starts.",
                lambda i, g, w: g > 100 * w,
            ),
            Hint(
                "your number is the cost of launching, not of running: "
                "synchronize before you read the clock a second time.",
                lambda i, g, w: 4.0 <= g <= 8.0 < w,
            ),
            Hint(
                "you wait after every launch, so the cost of each launch is added: queue all of them, then wait once.",
                lambda i, g, w: abs(g - i["gpu"].kernel_us - i["gpu"].launch_us) < 0.5 < i["gpu"].kernel_us,
            ),
            Hint("that is the total: divide by `repeats`.", lambda i, g, w: _close(g, w * i["repeats"])),
            Hint(
                "warm-up work was still queued when your clock started: synchronize before the first reading too.",
                lambda i, g, w: 1.02 * w < g < 2 * w,
            ),
        ),
    ),
    Exercise(
        "00.3",
        "The naive loop",
        answers.greedy,
        trials=(
            _loop("three tokens after a prompt of four", [3, 1, 4, 1], 3, 5),
            _loop("ten tokens after one", [9], 10, 1),
            _loop("none", [5, 6], 0, 2),
        ),
        hints=(
            Hint(
                "each token must be an int: int(logits.argmax()).",
                lambda i, g, w: any(not isinstance(t, int) for t in g),
                form=True,
            ),
            Hint(
                "the list of ids belongs to the caller: begin with ids = list(ids).",
                lambda i, g, w: g == w and len(w) > 0,
                form=True,
            ),
            Hint(
                "the prompt came back too: return only the new tokens.",
                lambda i, g, w: len(g) == len(w) + len(i["ids"]),
            ),
            Hint(
                "the same token again and again: append each new token to the ids before the next call.",
                lambda i, g, w: len(g) == len(w) > 1 and len(set(map(int, g))) == 1,
            ),
        ),
    ),
)

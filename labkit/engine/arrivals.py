"""Loads to serve: who arrives when, with what prompt, and how many tokens the answer will take.

All are made from a seed, so that two schedulers can be given the very same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from labkit.errors import LabError

WORDS = 32_000  # token ids are drawn below this; EOS lies above, so that no prompt holds it
EOS = WORDS


@dataclass(frozen=True)
class Arrival:
    """One request. arrival_s: seconds from the start. prompt: token ids. output_len: tokens after which the model ends
    it; max_tokens: what its user asks for, at least output_len, which is all that a scheduler can know."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_len: int
    max_tokens: int
    priority: int = 0

    def __post_init__(self):
        if not self.arrival_s >= 0 or not self.prompt or not 1 <= self.output_len <= self.max_tokens:
            raise LabError(
                f"an arrival needs a time of at least 0, a prompt, and 1 <= output_len <= max_tokens; got "
                f"{self.arrival_s} s, {len(self.prompt)} prompt tokens, {self.output_len} and {self.max_tokens}"
            )


def poisson_load(n: int, rate: float, seed: int = 0, **lengths) -> list[Arrival]:
    """``n`` arrivals, ``rate`` a second on average, independent of each other. lengths: see ``with_lengths``."""
    return gamma_load(n, rate, 1.0, seed, **lengths)


def gamma_load(n: int, rate: float, cv: float, seed: int = 0, **lengths) -> list[Arrival]:
    """Gaps between arrivals from a gamma distribution whose standard deviation is ``cv`` times its mean 1 / rate: 1 is
    Poisson, above 1 arrivals come in clusters, towards 0 they tick like a clock."""
    _positive(n=n, rate=rate, cv=cv)
    gaps = np.random.default_rng([seed, 0]).gamma(1 / cv**2, cv**2 / rate, n)
    return with_lengths(np.cumsum(gaps) - gaps[0], seed, **lengths)


def on_off_load(n: int, rate: float, on_s: float, off_s: float, seed: int = 0, **lengths) -> list[Arrival]:
    """Poisson arrivals at ``rate`` a second for ``on_s`` seconds, none for ``off_s`` seconds, and so on."""
    _positive(n=n, rate=rate, on_s=on_s)
    if not off_s >= 0:
        raise LabError(f"off_s must be at least 0 seconds, got {off_s!r}")
    busy = np.cumsum(np.random.default_rng([seed, 0]).exponential(1 / rate, n))
    busy -= busy[0]
    return with_lengths(busy + np.floor(busy / on_s) * off_s, seed, **lengths)


def with_lengths(
    times: Sequence[float],
    seed: int = 0,
    prompt_len: tuple[int, int] = (64, 512),
    output_len: tuple[int, int] = (16, 256),
    max_tokens: int | None = None,
    shared_prefix: int = 0,
    groups: int = 1,
) -> list[Arrival]:
    """Arrivals at these times with lengths drawn uniformly from the ranges, both ends included.

    max_tokens: what every user asks for; None: exactly what the answer will take. shared_prefix: tokens at the start of
    every prompt that are the same for a whole group of users (a system prompt), in addition to prompt_len; ``groups``
    such groups.
    """
    _positive(groups=groups)
    if not shared_prefix >= 0:
        raise LabError(f"shared_prefix must be at least 0 tokens, got {shared_prefix!r}")
    for name, (least, most) in (("prompt_len", prompt_len), ("output_len", output_len)):
        if not 1 <= least <= most:
            raise LabError(f"{name} must be a range (least, most) from 1 up, got ({least}, {most})")
    rng = np.random.default_rng([seed, 1])
    heads = rng.integers(0, WORDS, (groups, shared_prefix)).tolist()
    load = []
    for t in times:
        head, prompt = heads[rng.integers(groups)], rng.integers(0, WORDS, rng.integers(*prompt_len, endpoint=True))
        out = int(rng.integers(*output_len, endpoint=True))
        load.append(Arrival(float(t), (*head, *prompt.tolist()), out, out if max_tokens is None else max_tokens))
    return load


def replayed_load(rows: Iterable[Sequence[float]] | str | Path, scale: float = 1.0, seed: int = 0) -> list[Arrival]:
    """Arrivals from a log: rows of (arrival_s, prompt tokens, output tokens), or a file with one such JSON list a line.
    scale: above 1 stretches time, below 1 compresses it. The prompts' tokens are random."""
    _positive(scale=scale)
    if isinstance(rows, (str, Path)):
        try:
            rows = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise LabError(f"{rows} must hold one JSON list [arrival_s, prompt, output] a line ({error})") from error
    rows = list(rows)
    for row in rows:
        if not isinstance(row, Sequence) or len(row) != 3 or not all(_is_count(n) for n in row):
            raise LabError(f"a row is [arrival_s, prompt tokens, output tokens], numbers of at least 0, got {row!r}")
    rng = np.random.default_rng([seed, 1])
    load = []
    for t, prompt, output in sorted(map(tuple, rows)):
        tokens = tuple(rng.integers(0, WORDS, int(prompt)).tolist())
        load.append(Arrival(t * scale, tokens, int(output), int(output)))
    return load


def _is_count(value) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < float("inf")


def with_priorities(load: list[Arrival], shares: dict[int, float], seed: int = 0) -> list[Arrival]:
    """The same load with priorities drawn by these shares, as {0: 0.1, 1: 0.9}."""
    levels, weights = list(shares), np.array(list(shares.values()), dtype=float)
    if not levels or (weights < 0).any() or not weights.sum() > 0:
        raise LabError(f"shares must be at least 0, and one above, got {shares!r}")
    drawn = np.random.default_rng([seed, 2]).choice(len(levels), len(load), p=weights / weights.sum())
    return [replace(a, priority=levels[i]) for a, i in zip(load, drawn, strict=True)]


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise LabError(f"{name} must be positive, got {value!r}")

"""What a request's user felt, in seconds, and the percentiles of many.

arrival ---- queue_s ---- first scheduled ---- first token ---- ... ---- last token
|------------------- ttft_s -------------------|-- tpot_s a token --|
|------------------------------- e2e_s ------------------------------|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from labkit.engine.request import Request

NAN = float("nan")


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds; nan for what did not happen (a request aborted while it waited has no first token).

    queue_s: arrival to the first step it was in. ttft_s: arrival to first token. tpot_s: mean time a token after the
    first. e2e_s: arrival to the end. longest_gap_s: between two tokens. cached_tokens: prompt tokens found in the
    prefix cache. preemptions: how often it lost its place.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    longest_gap_s: float
    cached_tokens: int
    preemptions: int

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        start, times = request.arrival_s, request.token_times_s
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        return cls(
            queue_s=NAN if request.first_scheduled_s is None else request.first_scheduled_s - start,
            ttft_s=times[0] - start if times else NAN,
            tpot_s=sum(gaps) / len(gaps) if gaps else NAN,
            e2e_s=NAN if request.finish_s is None else request.finish_s - start,
            longest_gap_s=max(gaps, default=NAN),
            cached_tokens=request.num_cached,
            preemptions=request.num_preemptions,
        )


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Of the values that are not nan; all nan if there is none."""
        kept = np.asarray([v for v in values if v == v], dtype=float)
        if not len(kept):
            return cls(NAN, NAN, NAN, NAN)
        return cls(*(float(q) for q in np.percentile(kept, (50, 90, 99))), float(kept.mean()))


def summary(metrics: Sequence[RequestMetrics]) -> dict[str, Percentiles]:
    """Percentiles over requests, for each of the metrics in seconds."""
    names = [f.name for f in fields(RequestMetrics) if f.name.endswith("_s")]
    return {name: Percentiles.of(getattr(m, name) for m in metrics) for name in names}

"""Request metrics from a request's times, and percentiles of many."""

import math

import pytest

from labkit.engine.metrics import Percentiles, RequestMetrics, summary
from labkit.engine.request import Request


def timed(arrival, scheduled, times, finish):
    request = Request(0, [1, 2], arrival_s=arrival)
    request.first_scheduled_s, request.token_times_s, request.finish_s = scheduled, times, finish
    request.num_cached, request.num_preemptions = 3, 1
    return RequestMetrics.of(request)


def test_metrics_are_differences_of_a_requests_times():
    m = timed(10.0, 10.5, [12.0, 12.5, 14.0, 14.5], 14.5)
    assert (m.queue_s, m.ttft_s, m.e2e_s, m.longest_gap_s) == (0.5, 2.0, 4.5, 1.5)
    assert m.tpot_s == pytest.approx(2.5 / 3) and (m.cached_tokens, m.preemptions) == (3, 1)


def test_what_did_not_happen_is_nan():
    waited = timed(10.0, None, [], 11.0)
    assert waited.e2e_s == 1.0 and all(math.isnan(v) for v in (waited.queue_s, waited.ttft_s, waited.tpot_s))
    one = timed(10.0, 10.0, [11.0], 11.0)
    assert one.ttft_s == 1.0 and math.isnan(one.tpot_s) and math.isnan(one.longest_gap_s)


def test_percentiles_leave_nan_out():
    p = Percentiles.of([*range(101), float("nan")])
    assert (p.p50, p.p90, p.p99, p.mean) == (50, 90, 99, 50)
    assert all(math.isnan(v) for v in (Percentiles.of([]).p50, Percentiles.of([float("nan")]).mean))
    many = summary([timed(0.0, float(i), [i + 1.0], i + 1.0) for i in range(11)])
    assert many["queue_s"].p50 == 5 and many["ttft_s"].p50 == 6 and math.isnan(many["tpot_s"].p50)
    assert set(many) == {"queue_s", "ttft_s", "tpot_s", "e2e_s", "longest_gap_s"}

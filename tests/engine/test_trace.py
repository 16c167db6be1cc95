"""The trace says what happened, survives a file, draws, and replays."""

import json

import numpy as np
import pytest

from labkit.engine.trace import Trace
from labkit.engine.trace_view import CACHED, FREE, SHARED, TraceView
from labkit.errors import LabError
from tests.engine.fake_device import Bench, ran


def busy_bench(trace, **options) -> Bench:
    """Prefix hits, chunks, preemption by swap, a fork, an abort and a failure, one step ahead."""
    options = dict(max_num_seqs=4, max_batched_tokens=12, watermark=0, preemption="swap", host_blocks=6) | options
    ticks = iter(range(10**6))
    bench = Bench(14, 2, ahead=2, trace=trace, clock=lambda: next(ticks) / 8, **options)
    parent = bench.add([1] * 7, 9, cache_salt="tenant")
    bench.step(), bench.step()
    bench.fork(parent, max_tokens=11)
    bench.step(), bench.step()
    bench.add([1] * 9, 6, cache_salt="tenant", priority=1)
    bench.add([1] * 9, 6, cache_salt="tenant", stop_token_ids=[4])
    for _ in range(4):
        bench.step()
    bench.scheduler.abort(2)
    bench.add([3] * 8, 4)
    for _ in range(4):
        bench.step()
    bench.add([4] * 8, 4)
    bench.step()
    while len(bench.flight) < 2 and bench.plan():
        pass
    bench.scheduler.fail(bench.flight.pop(0)[0])
    bench.finish()
    return bench


def test_a_trace_changes_no_decision():
    with_trace, without = busy_bench(Trace()), busy_bench(None)
    assert [(ran(s), s.copies, s.swap_in, s.swap_out) for s in with_trace.steps] == [
        (ran(s), s.copies, s.swap_in, s.swap_out) for s in without.steps
    ]


def test_each_step_is_told_as_it_was():
    trace = Trace()
    bench = busy_bench(trace)
    assert trace.num_steps == len(bench.steps) == len(trace.plans)
    for plan, step in zip(trace.plans, bench.steps, strict=True):
        told = list(zip(plan["ids"], plan["starts"], plan["counts"], strict=True))
        assert plan["index"] == step.index and told == ran(step)
        assert plan["samples"] == [c.samples for c in step.chunks]
        assert plan["free"] + plan["used"] + plan["cached"] == bench.pool.total
        for name in ("copies", "swap_out", "swap_in"):
            assert tuple(map(tuple, plan[name])) == getattr(step, name)
    kinds = {e["kind"] for e in trace.events}
    assert kinds == {"add", "fork", "finish", "plan", "commit", "fail"}
    assert any(p["preempted"] for p in trace.plans) and any(p["swap_in"] for p in trace.plans)
    times = [e["t"] for e in trace.events]
    assert times == sorted(times)


def test_tables_and_the_map_are_what_the_scheduler_held():
    """Followed live: after each plan the tables that the view puts together are those of the requests."""
    trace, held = Trace(), []
    bench = Bench(16, 2, ahead=2, trace=trace, max_num_seqs=4, max_batched_tokens=12, watermark=0)
    parent = bench.add([1] * 7, 9)
    bench.add([1] * 9, 9)
    bench.add([2] * 5, 9)
    for i in range(200):
        if i == 3:
            bench.fork(parent)
        if not bench.scheduler.has_unfinished():
            break
        if len(bench.flight) < 2 and bench.plan():
            everyone = [*bench.scheduler.requests.values(), *bench.scheduler._ended.values()]
            tables = {r.id: list(r.blocks) for r in everyone if r.blocks}
            cached = [b for b in bench.pool.queue() if bench.pool._prefix[b] is not None]
            held.append((tables, cached))
        elif bench.flight:
            bench.commit()
    view = TraceView(trace)
    seen = [{id: list(blocks) for id, blocks in tables.items()} for tables in view.tables()]
    assert seen == [tables for tables, _ in held] and len(seen) > 10
    grid = view.block_map()
    assert grid.shape == (len(held), 16) and (grid[:, 0] == FREE).all()
    for row, (tables, cached) in zip(grid, held, strict=True):
        owners = {b: [id for id, t in tables.items() if b in t] for b in range(1, 16)}
        want = [owners[b][0] if len(owners[b]) == 1 else SHARED if owners[b] else None for b in range(1, 16)]
        want = [w if w is not None else CACHED if b in cached else FREE for b, w in enumerate(want, 1)]
        assert row[1:].tolist() == want
    assert (grid == SHARED).any() and (grid == CACHED).any()


def test_arrays_add_up():
    trace = Trace()
    bench = busy_bench(trace)
    arrays = TraceView(trace).arrays()
    assert {a.shape for a in arrays.values()} == {(len(bench.steps),)}
    assert arrays["tokens"].tolist() == [s.num_tokens for s in bench.steps]
    assert (arrays["prefill"] + arrays["decode"] == arrays["tokens"]).all() and (arrays["prefill"] >= 0).all()
    assert (arrays["free"] + arrays["used"] + arrays["cached"] == bench.pool.total).all()
    assert (np.diff(arrays["time_s"]) > 0).all() and arrays["preempted"].sum() > 0 and arrays["copied"].sum() > 0


def test_everyone_who_waits_has_a_reason():
    trace = Trace()
    bench = Bench(trace=trace, max_num_seqs=1, max_batched_tokens=16)
    for _ in range(3):
        bench.add(3, 2)
    bench.step()
    assert TraceView(trace).waits(0) == [(1, "seats: 1 of 1 are taken"), (2, "behind 1")]
    bench.finish()
    assert TraceView(trace).waits(-1) == []


def test_a_file_gives_back_the_trace(tmp_path):
    trace = Trace()
    busy_bench(trace)
    trace.save(tmp_path / "run.json")
    back = Trace.load(tmp_path / "run.json")
    assert back.to_dict() == trace.to_dict()
    scheduler, again = back.replay()
    assert again.to_dict() == trace.to_dict()
    scheduler.check()


def test_a_cold_start_by_hand_is_part_of_the_story(tmp_path):
    trace = Trace()
    bench = Bench(block_size=4, trace=trace)
    for cold in (False, True, False):
        if cold:
            bench.pool.reset_prefix_cache()
        bench.add(9, 3)
        bench.finish()
    assert bench.pool.stats.hits == 8, "the third finds what the second left, and the second nothing"
    assert [e["kind"] for e in trace.events].count("reset") == 1
    trace.save(tmp_path / "run.json")
    scheduler, _ = Trace.load(tmp_path / "run.json").replay()
    assert scheduler.pool.queue() == bench.pool.queue() and scheduler.pool.stats == bench.pool.stats


def test_cache_keys_that_are_tuples_come_back_as_tuples(tmp_path):
    trace = Trace()
    bench = Bench(block_size=4, trace=trace)
    for salt in (("a", ("b", 1)), ("a", ("b", 2)), ("a", ("b", 1))):
        bench.add(9, 2, cache_salt=salt)
        bench.finish()
    assert bench.pool.stats.hits == 8
    trace.save(tmp_path / "run.json.gz")
    scheduler, _ = Trace.load(tmp_path / "run.json.gz").replay()
    assert scheduler.pool.stats.hits == 8


def test_a_replay_reproduces_times_and_metrics():
    trace = Trace()
    bench = busy_bench(trace)
    scheduler, again = trace.replay()
    assert scheduler.next_index == len(bench.steps) and scheduler.pool.queue() == bench.pool.queue()
    assert scheduler.pool.stats == bench.pool.stats
    assert [e["t"] for e in again.events] == [e["t"] for e in trace.events]


@pytest.mark.parametrize("change", ["count", "block", "token", "order"])
def test_a_replay_that_parts_from_the_trace_is_found(change):
    trace = Trace()
    busy_bench(trace)
    data = trace.to_dict()
    plans = [e for e in data["events"] if e["kind"] == "plan"]
    if change == "count":
        plans[0]["counts"][0] -= 1
    elif change == "block":
        plans[1]["grown"] = [[0, [9]]]
    elif change == "token":  # a stop token that was not there: the request ends earlier
        next(e for e in data["events"] if e["kind"] == "add")["params"]["max_tokens"] = 2
    else:
        data["options"]["max_num_seqs"] = 1
    with pytest.raises(LabError, match="parts from the trace at event"):
        Trace.from_dict(data).replay()


def test_a_trace_longer_than_the_usual_limit_is_replayed(monkeypatch):
    trace = Trace(limit=50)
    busy_bench(trace)
    monkeypatch.setattr(Trace.__init__, "__defaults__", (5,))
    assert trace.num_steps > 5 and trace.replay()[1].events == trace.events


def test_a_truncated_trace_says_so_and_is_not_replayed():
    trace = Trace(limit=3)
    bench = Bench(trace=trace)
    bench.add(3, 9)
    bench.finish()
    assert trace.truncated and len(trace.plans) == 3 and len(bench.steps) == 9
    with pytest.raises(LabError, match="stopped recording after 3 steps"):
        trace.replay()


def test_what_is_no_trace(tmp_path):
    for text in ("", "[]", "{}", json.dumps({"format": 1}), json.dumps({"format": 1, "events": []})):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(LabError, match="trace"):
            Trace.load(tmp_path / "x.json")
    (tmp_path / "x.json.gz").write_bytes(b"no gzip")
    for path in (tmp_path / "x.json.gz", tmp_path / "nothing.json", tmp_path):
        with pytest.raises(LabError, match="cannot be read as a trace"):
            Trace.load(path)
    with pytest.raises(LabError, match="at least 1 step"):
        Trace(limit=0)


def test_a_trace_belongs_to_one_scheduler():
    trace = Trace()
    Bench(trace=trace)
    with pytest.raises(LabError, match="another scheduler"):
        Bench(trace=trace)


def test_a_key_that_json_cannot_hold_is_named():
    trace = Trace()
    bench = Bench(trace=trace)
    bench.add(3, 2, cache_salt=frozenset({1}))
    bench.finish()
    with pytest.raises(LabError, match="use texts as cache keys"):
        trace.to_dict()

"""What may happen while a step runs: ends, aborts, failures, forks; and a long random run in which all of it does."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.engine.pool import BlockPool
from labkit.engine.request import FINISHED, PENDING, RUNNING, SWAPPED, WAITING, Request, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.trace import Trace
from labkit.errors import LabError
from tests.engine.fake_device import Bench, alone, ran


def end_after(n: int, prompt: list[int]) -> tuple[int, int]:
    """(an end token, after how many outputs it first comes) for a request that must not end before ``n``."""
    made = alone(Request(0, prompt, SamplingParams(max_tokens=60)))
    return next((t, i + 1) for i, t in enumerate(made) if i >= n and t not in made[:i])


# ---- one step ahead


def test_the_next_step_is_planned_before_the_token_is_known():
    bench = Bench(ahead=2)
    request = bench.add(3, max_tokens=4)
    bench.plan()
    assert request.token_ids == [5, 5, 5, PENDING] and request.num_computed == 3
    step = bench.plan()
    assert ran(step) == [(0, 3, 1)] and request.token_ids[3:] == [PENDING, PENDING] and request.output_ids == []
    bench.commit()
    assert request.token_ids[3] == alone(request)[0] and request.token_ids[4:] == [PENDING]
    bench.finish()


def test_a_third_step_is_refused_and_so_is_the_wrong_order():
    bench = Bench(ahead=2)
    bench.add(3, max_tokens=9)
    bench.plan()
    second = bench.plan()
    with pytest.raises(LabError, match="commit step 0 first"):
        bench.scheduler.plan()
    with pytest.raises(LabError, match="step 1 is not the one to be committed next; that is step 0"):
        bench.scheduler.commit(second, [1])
    bench.finish()
    with pytest.raises(LabError, match="that is none"):
        bench.scheduler.commit(second, [1])


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], {0: 1}], ids=str)
def test_a_token_for_each_that_samples_or_nothing_changes(tokens):
    bench = Bench()
    bench.add(3), bench.add(4)
    bench.plan()
    step, right = bench.flight[0]
    with pytest.raises(LabError, match="step 0 samples"):
        bench.scheduler.commit(step, tokens)
    bench.scheduler.check()
    bench.flight[0] = step, {c.request.id: t for c, t in zip(step.sampling, right, strict=True)}
    bench.finish()


def test_a_length_is_known_ahead_and_wastes_nothing():
    steps = []
    for ahead in (1, 2):
        bench = Bench(ahead=ahead)
        bench.add(3, max_tokens=5)
        bench.finish()
        steps.append([ran(s) for s in bench.steps])
    assert steps[0] == steps[1] and len(steps[0]) == 5


def test_an_end_token_voids_one_chunk_and_holds_the_blocks_until_it_is_committed():
    token, place = end_after(3, [5] * 3)
    bench = Bench(100, 1, ahead=2, eos_token_ids=(token,))
    request = bench.add(3, max_tokens=40)
    while not request.finished:
        bench.step()
    assert bench.ended == [request] and len(request.output_ids) == place and PENDING not in request.token_ids
    (void,) = bench.flight
    assert ran(void[0]) == [(0, 3 + place - 1, 1)]
    held = list(request.blocks)
    assert held and bench.pool.num_used == len(held), "the step in flight still writes to them"
    other = bench.add([1] * 3, max_tokens=2)
    bench.plan()
    assert not set(other.blocks) & set(held)
    bench.finish()
    assert len(bench.steps) == place + 1 + 2


def test_the_void_token_is_not_registered():
    """The chunk after the end fills a block with the end token; that block must not be found by anyone."""
    token, place = end_after(2, [5])
    bench = Bench(100, 1, ahead=2, eos_token_ids=(token,))
    first = bench.add(1, max_tokens=40)
    bench.finish()
    again = bench.add([*first.token_ids, 1], max_tokens=1, ignore_eos=True)
    bench.finish()
    assert again.num_cached == len(first.token_ids) - 1


@pytest.mark.parametrize("moment", ["waiting", "in flight", "two in flight", "between", "preempted", "swapped"])
def test_an_abort_at_any_moment_leaves_the_others_and_the_pool_whole(moment):
    swap = dict(preemption="swap", host_blocks=16) if moment == "swapped" else {}
    bench = Bench(9, 2, False, ahead=2, max_num_seqs=2, max_batched_tokens=32, watermark=0, **swap)
    other, victim = bench.add([1] * 4, max_tokens=12), bench.add([2] * 4, max_tokens=12)
    if moment == "waiting":
        assert victim.status == WAITING
    elif moment == "in flight":
        bench.plan()
    elif moment == "two in flight":
        bench.plan(), bench.plan()
    elif moment == "between":
        bench.plan(), bench.commit()
        assert not bench.flight and victim.status == RUNNING
    else:
        while not victim.num_preemptions:
            bench.step()
        assert victim.status == (SWAPPED if swap else WAITING)
    bench.scheduler.abort(victim.id)
    bench.scheduler.check()
    assert (victim.status, victim.finish_reason) == (FINISHED, "abort") and PENDING not in victim.token_ids
    assert bench.scheduler.abort(victim.id) is None and bench.scheduler.abort(77) is None
    assert bench.finish() == [other] and len(other.output_ids) == 12


def test_a_stop_string_ends_a_request_from_outside():
    bench = Bench(ahead=2)
    request = bench.add(3, max_tokens=20)
    for _ in range(4):
        bench.step()
    made = request.output_ids
    bench.scheduler.finish(request.id, "stop")
    assert request.output_ids == made == alone(request)[:3] and request.finish_reason == "stop"
    bench.finish()
    with pytest.raises(LabError, match="stop, length, abort, error"):
        bench.scheduler.finish(0, "boredom")


def test_an_id_is_free_again_only_when_its_blocks_are():
    bench = Bench(ahead=2)
    request = bench.add(3, max_tokens=20)
    bench.plan()
    bench.scheduler.abort(request.id)
    with pytest.raises(LabError, match="there is a request 0 already"):
        bench.scheduler.add(Request(0, [1]))
    bench.finish()
    bench.scheduler.add(Request(0, [1], SamplingParams(max_tokens=1)))
    bench.finish()


def test_a_request_preempted_in_flight_gets_its_token_and_may_end_with_it():
    bench = Bench(7, 2, False, ahead=2, max_num_seqs=2, max_batched_tokens=32, watermark=0)
    first = bench.add([1] * 4, max_tokens=5)
    token, place = end_after(2, [2] * 4)
    second = bench.add([2] * 4, max_tokens=7, stop_token_ids=(token,))
    while not second.num_preemptions:
        bench.step()
    assert second.blocks == []
    bench.finish()
    assert {first, second} == set(bench.ended)


def test_a_short_pool_waits_for_blocks_that_come_back_rather_than_preempt():
    """Request 1 ended, its blocks are still written to; request 0 needs one. It stays a step, nobody is preempted."""
    bench = Bench(5, 2, False, ahead=2, max_num_seqs=2, max_batched_tokens=32, watermark=0)
    a, b = bench.add([1] * 4, max_tokens=4), bench.add([2] * 3, max_tokens=4)
    bench.plan()
    bench.scheduler.abort(b.id)
    assert bench.pool.num_available == 0
    assert bench.plan() is None and a.num_preemptions == 0
    bench.finish()
    assert a.num_preemptions == 0


def test_who_is_about_to_end_is_not_preempted():
    """Request 1's last token is being sampled: its blocks come back with the commit. Request 0 stays a step."""
    bench = Bench(5, 2, False, ahead=2, max_num_seqs=2, max_batched_tokens=32, watermark=0)
    a, b = bench.add([1] * 4, max_tokens=4), bench.add([2] * 4, max_tokens=1)
    bench.plan()
    assert bench.pool.num_available == 0 and b.num_tokens == b.limit
    assert bench.plan() is None and bench.commit() == [b]
    bench.finish()
    assert a.num_preemptions == b.num_preemptions == 0


def test_a_swap_moves_only_blocks_that_hold_something():
    """Request 1 has blocks for all of its prompt, and 2 of its 12 tokens are computed."""
    swap = dict(preemption="swap", host_blocks=2)
    bench = Bench(9, 2, False, max_num_seqs=2, max_batched_tokens=6, watermark=0, **swap)
    bench.add([1] * 4, max_tokens=9)
    second = bench.add([2] * 12, max_tokens=3)
    bench.step()
    assert second.num_computed == 2 and len(second.blocks) == 6 and bench.pool.num_available == 0
    step = bench.step()
    assert [source for source, _ in step.swap_out] and len(step.swap_out) == 1 and second.status == SWAPPED
    bench.finish()


def test_who_was_preempted_in_flight_comes_back_only_after_its_token_is_known():
    """Else the commit of the old step would register blocks that the new one has not computed yet."""
    pool = BlockPool(8, 2)
    scheduler = Scheduler(pool, max_num_seqs=2, max_batched_tokens=16, watermark=0)
    request = scheduler.add(Request(0, [5] * 4, SamplingParams(max_tokens=9)))
    step = scheduler.plan()
    others = pool.allocate(pool.num_available)
    assert scheduler.plan() is None and request.num_preemptions == 1
    pool.free(others)
    assert scheduler.plan() is None and scheduler.blocked == (0, "sampling: its last token is not known yet")
    scheduler.commit(step, [7])
    assert ran(scheduler.plan()) == [(0, 0, 5)] and pool.match([5] * 4 + [7])[0] == []


# ---- failures


def test_a_failed_step_ends_its_requests_and_no_others():
    bench = Bench(32, 4, ahead=2, max_num_seqs=2, max_batched_tokens=32)
    a, b, c = bench.add([1] * 9, 9), bench.add([2] * 9, 9), bench.add([3] * 9, 9)
    bench.plan()
    bench.plan()
    step, _ = bench.flight.pop(0)
    assert bench.scheduler.fail(step) == [a, b] and {a.finish_reason, b.finish_reason} == {"error"}
    bench.scheduler.check()
    assert bench.finish() == [c]
    again = bench.add([1] * 9, 2)
    bench.finish()
    assert again.num_cached == 0, "what a failed step should have written must not be found"


def test_who_was_swapped_out_by_a_failed_step_is_computed_again():
    bench = Bench(9, 2, False, max_num_seqs=2, max_batched_tokens=32, watermark=0, preemption="swap", host_blocks=8)
    first, second = bench.add([1] * 4, 12), bench.add([2] * 4, 12)
    while second.status != SWAPPED:
        bench.plan()
        if second.status != SWAPPED:
            bench.commit()
    step, _ = bench.flight.pop()
    for _, host in step.swap_out:
        bench.device.host[host] = [None] * 2  # the copy never came
    assert bench.scheduler.fail(step) == [first]
    assert second.status == WAITING and second.host_blocks == []
    assert bench.finish() == [second]


def test_a_fork_that_waits_on_what_a_failed_step_wrote_is_computed_again():
    bench = Bench(16, 4, False, ahead=2, max_num_seqs=1, max_batched_tokens=32)
    parent = bench.add([1] * 9, 9)
    bench.plan(fails=True)
    child = bench.fork(parent)
    assert child.num_computed == 8 and child.blocks == parent.blocks[:2]
    assert bench.commit() == [parent] and child.blocks == [] and child.num_computed == 0
    assert bench.finish() == [child] and ran(bench.steps[-9])[0] == (1, 0, 9)


def test_a_copy_of_what_a_failed_step_wrote_ends_with_it():
    bench = Bench(16, 4, False, ahead=2, max_num_seqs=2, max_batched_tokens=32)
    parent = bench.add([1] * 3, 9)
    bench.plan(fails=True)
    child = bench.fork(parent)
    step = bench.plan()
    assert step.copies == ((parent.blocks[0], child.blocks[0]),) and child.status == RUNNING
    assert bench.commit() == [parent, child]
    assert bench.finish() == []


def test_who_was_swapped_out_by_a_failed_step_and_has_come_back_ends_with_it():
    swap = dict(preemption="swap", host_blocks=8)
    bench = Bench(7, 2, False, ahead=2, max_num_seqs=3, max_batched_tokens=32, watermark=0, **swap)
    first, short, last = bench.add([1] * 4, 9), bench.add([3] * 4, 1), bench.add([2] * 4, 7)
    bench.plan()
    assert len(bench.plan(fails=True).swap_out) == 2 and last.status == SWAPPED
    assert bench.commit() == [short]
    assert len(bench.plan().swap_in) == 2 and last.status == RUNNING
    assert bench.commit() == [first, last]
    assert bench.finish() == [short]


# ---- forks


def test_a_fork_shares_full_blocks_and_copies_the_last_one():
    bench = Bench(32, 4, max_num_seqs=4, max_batched_tokens=32)
    parent = bench.add(6, max_tokens=9)
    bench.step()
    child = bench.fork(parent, max_tokens=12)
    bench.step()
    step = bench.steps[-1]
    assert step.copies == ((parent.blocks[1], child.blocks[1]),) and child.blocks[0] == parent.blocks[0]
    assert ran(step) == [(0, 6, 1), (1, 6, 1)]
    bench.finish()
    assert child.output_ids[:9] == parent.output_ids and len(child.output_ids) == 12


@pytest.mark.parametrize("ahead", [1, 2])
def test_forks_outlive_their_parent_and_leave_the_cache_as_it_was(ahead):
    bench = Bench(32, 4, ahead=ahead, max_num_seqs=1, max_batched_tokens=32)
    parent = bench.add(6, max_tokens=6)
    bench.step(), bench.step()
    forks = [bench.fork(parent, max_tokens=9) for _ in range(2)]
    bench.finish()
    assert bench.ended == [parent, *forks]
    assert sum(len(s.copies) for s in bench.steps) == 2, "the parent filled and registered the block they write into"


def test_forks_that_wait_do_not_keep_each_other_or_anyone_from_running():
    bench = Bench(5, 4, max_num_seqs=3, max_batched_tokens=32, watermark=0)
    parent = bench.add(10, max_tokens=7)
    bench.step()
    forks = [bench.fork(parent) for _ in range(3)]
    bench.scheduler.abort(parent.id)
    bench.finish()
    assert {*bench.ended} == {*forks}


def test_what_cannot_be_forked():
    bench = Bench(9, 2, False, max_num_seqs=2, max_batched_tokens=32, watermark=0, preemption="swap", host_blocks=8)
    first, second = bench.add([1] * 4, 12), bench.add([2] * 4, 12)
    with pytest.raises(LabError, match="not there"):
        bench.scheduler.fork(99, 100)
    while second.status != SWAPPED:
        bench.step()
    with pytest.raises(LabError, match="swapped out"):
        bench.scheduler.fork(second.id, 100)
    with pytest.raises(LabError, match="max_tokens above that"):
        bench.scheduler.fork(first.id, 100, SamplingParams(max_tokens=1))
    bench.finish()


# ---- everything at random


def random_run(seed: int, events: int = 110) -> dict[str, int]:
    """One random engine under random events -> how often what happened. ``Bench`` checks pool, queues and every slot
    of the cache after each event, and that each request ends with the tokens it has alone."""
    rng = random.Random(seed)
    swap, seqs = rng.random() < 0.4, rng.randint(1, 8)
    trace, ticks = Trace(), iter(range(10**9))
    bench = Bench(
        num_blocks=rng.randint(4, 40),
        block_size=rng.choice([1, 2, 4, 8]),
        prefix_caching=rng.random() < 0.8,
        ahead=rng.choice([1, 2]),
        trace=trace,
        clock=lambda: float(next(ticks)),
        max_num_seqs=seqs,
        max_batched_tokens=seqs + rng.randint(0, 20),
        max_model_len=64,
        policy=rng.choice(["fcfs", "priority", "shortest"]),
        chunked_prefill=rng.random() < 0.7,
        preemption="swap" if swap else "recompute",
        host_blocks=rng.randint(1, 30) if swap else 0,
        batching=rng.choice(["continuous"] * 4 + ["static", "bucketed"]),
        eos_token_ids=(3,),
        watermark=rng.choice([0, 0.05, 0.2]),
    )
    scheduler, seen = bench.scheduler, dict.fromkeys(("steps", "aborts", "forks", "failures", "refused"), 0)
    for _ in range(events):
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            words = [rng.choice([5, 6]) if rng.random() < 0.2 else 9 for _ in range(rng.randint(1, 30))]
            rest = dict(priority=rng.randint(0, 3), ignore_eos=rng.random() < 0.5)
            try:
                bench.add(words, rng.randint(1, 20), cache_salt=rng.choice([None, None, "x"]), **rest)
            except LabError:
                seen["refused"] += 1
        if scheduler.requests and rng.random() < 0.1:
            scheduler.abort(rng.choice(list(scheduler.requests)))
            scheduler.check()
            seen["aborts"] += 1
        if scheduler.requests and rng.random() < 0.15:
            try:
                bench.fork(rng.choice(list(scheduler.requests.values())))
                seen["forks"] += 1
            except LabError:
                seen["refused"] += 1
        before = [r for r in scheduler.running if r.num_tokens < r.limit]
        step = bench.step(fails=rng.random() < 0.02)
        if step is not None and not step.swap_out and scheduler.preempted == [] and len(step.chunks) >= len(before):
            missing = {r.id for r in before} - {id for id, _, _ in ran(step)}
            assert not missing or any(r.num_preemptions for r in before), f"{missing} got no token"
    bench.finish()
    again, copy = trace.replay()
    assert copy.to_dict() == trace.to_dict() and again.pool.queue() == bench.pool.queue()
    seen["steps"], seen["failures"] = len(bench.steps), len(bench.device.failed)
    for name in ("copies", "swap_out", "swap_in"):
        seen[name] = sum(len(getattr(s, name)) for s in bench.steps)
    seen["hits"] = bench.pool.stats.hits
    seen["preemptions"] = sum(len(p["preempted"]) for p in trace.plans)
    return seen


def test_ten_thousand_random_steps():
    total: dict[str, int] = {}
    for seed in range(70):
        for name, n in random_run(seed).items():
            total[name] = total.get(name, 0) + n
    print(total)
    assert total["steps"] >= 10_000
    assert all(n >= 20 for n in total.values()), f"something hardly happened: {total}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=1000, max_value=2**32))
def test_a_random_run_from_any_seed(seed):
    random_run(seed, events=40)

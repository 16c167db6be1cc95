"""The scheduler's rules, one by one. Tokens are compared with those of each request alone on an exact fake device."""

import statistics
import time

import pytest

from labkit.engine.pool import BlockPool
from labkit.engine.request import FINISHED, PENDING, RUNNING, SWAPPED, WAITING, Request, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.errors import LabError
from tests.engine.fake_device import Bench, alone, ran

BOTH = pytest.mark.parametrize("ahead", [1, 2], ids=["one at a time", "running ahead"])


# ---- what is refused


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (dict(max_num_seqs=0), "max_num_seqs"),
        (dict(max_model_len=True), "max_model_len"),
        (dict(max_num_seqs=8, max_batched_tokens=7), "max_batched_tokens=7 must be at least max_num_seqs=8"),
        (dict(policy="lottery"), "fcfs, priority, shortest"),
        (dict(batching="dynamic"), "continuous, static, bucketed"),
        (dict(preemption="kill"), "recompute"),
        (dict(preemption="swap"), "host_blocks"),
        (dict(host_blocks=4), "host_blocks=4"),
        (dict(preemption="swap", host_blocks=-1), "host_blocks must be a whole number of at least 0, got -1"),
        (dict(preemption="swap", host_blocks=True), "host_blocks must be a whole number"),
        (dict(chunked_prefill="no"), "chunked_prefill must be True or False, got 'no'"),
        (dict(policy=["fcfs"]), "policy .* is unknown"),
        (dict(policy="priority", ageing=0), "ageing"),
        (dict(watermark=1.0), "watermark"),
        (dict(watermark="1 %"), "watermark"),
    ],
)
def test_settings_out_of_range(setting, words):
    with pytest.raises(LabError, match=words):
        Scheduler(BlockPool(8, 4), **setting)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        (0, 4, "empty"),
        (30, 11, r"30 prompt tokens \+ max_tokens 11 = 41, and max_model_len is 40.*by 1"),
        (17, 1, "need 5 blocks of 4, and the pool has 4"),
        (8, 10, "need 5 blocks of 4, and the pool has 4"),
        (15, 1, "15 prompt tokens exceed max_batched_tokens=14"),
    ],
)
def test_what_can_never_run_is_refused_with_the_arithmetic(prompt, max_tokens, words):
    bench = Bench(5, 4, max_num_seqs=4, max_batched_tokens=14, max_model_len=40, chunked_prefill=False)
    other = bench.add(3, 2)
    with pytest.raises(LabError, match=words):
        bench.add(prompt, max_tokens)
    assert bench.finish() == [other], "others go on"


def test_the_largest_that_fits_runs():
    """8 + 9 - 1 = 16 tokens fill 4 blocks: the last token is never fed back, so it takes no slot."""
    bench = Bench(5, 4, max_model_len=17)
    request = bench.add(8, 9)
    assert bench.finish() == [request] and request.finish_reason == "length"


def test_a_request_is_added_once_and_ids_are_unique():
    bench = Bench()
    request = bench.add(3)
    for again in (request, Request(request.id, [1])):
        with pytest.raises(LabError, match="id"):
            bench.scheduler.add(again)
    bench.finish()
    with pytest.raises(LabError, match="finished before"):
        bench.scheduler.add(request)


# ---- the one rule


def test_a_prompt_and_its_tokens():
    bench = Bench(max_batched_tokens=16, max_num_seqs=4)
    request = bench.add(5, max_tokens=3)
    bench.finish()
    assert [ran(s) for s in bench.steps] == [[(0, 0, 5)], [(0, 5, 1)], [(0, 6, 1)]]
    assert [s.chunks[0].samples for s in bench.steps] == [True] * 3
    assert request.output_ids == alone(request) and request.num_computed == 7 and request.status == FINISHED


@pytest.mark.parametrize(("prompt", "chunks"), [(7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])])
def test_a_long_prompt_is_cut_and_only_its_last_chunk_samples(prompt, chunks):
    """Among them k * budget + 1: the last chunk is one token, and looks like decoding."""
    bench = Bench(max_num_seqs=4, max_batched_tokens=8)
    bench.add(prompt, max_tokens=1)
    bench.finish()
    assert [s.chunks[0].count for s in bench.steps] == chunks
    assert [s.chunks[0].samples for s in bench.steps] == [False] * (len(chunks) - 1) + [True]


def test_steps_mix_decoding_and_chunks():
    """Running first, then the waiting one with what is left of the budget; nobody is starved by a long prompt."""
    bench = Bench(max_num_seqs=4, max_batched_tokens=4)
    bench.add(2, max_tokens=6)
    bench.step()
    bench.add(10, max_tokens=2)
    for _ in range(4):
        bench.step()
    assert [ran(s) for s in bench.steps[1:5]] == [
        [(0, 2, 1), (1, 0, 3)],
        [(0, 3, 1), (1, 3, 3)],
        [(0, 4, 1), (1, 6, 3)],
        [(0, 5, 1), (1, 9, 1)],
    ]
    bench.finish()


def test_an_urgent_long_prompt_leaves_a_token_for_everyone_behind():
    """By priority the prompt stands first among the running, and it may not take the others' tokens."""
    bench = Bench(max_num_seqs=4, max_batched_tokens=6, policy="priority")
    bench.add(2, max_tokens=8, priority=5)
    bench.add(2, max_tokens=8, priority=5)
    bench.step()
    bench.add(20, max_tokens=2, priority=0)
    for _ in range(4):
        assert [c[2] for c in sorted(ran(bench.step()))] == [1, 1, 4]
    bench.finish()


def test_seats_bound_what_runs():
    bench = Bench(num_blocks=64, max_num_seqs=2, max_batched_tokens=64)
    for _ in range(5):
        bench.add(3, max_tokens=4)
    bench.step()
    assert len(bench.scheduler.running) == 2 and bench.scheduler.blocked == (2, "seats: 2 of 2 are taken")
    bench.finish()
    assert max(len(s.chunks) for s in bench.steps) == 2 and len(bench.ended) == 5


def test_max_tokens_1_ends_with_the_prompt():
    bench = Bench()
    request = bench.add(4, max_tokens=1)
    bench.step()
    assert request.finished and len(request.output_ids) == 1 and bench.plan() is None


def test_without_chunking_a_prompt_waits_for_room_and_is_run_whole():
    bench = Bench(max_num_seqs=4, max_batched_tokens=10, chunked_prefill=False)
    for i, size in enumerate((7, 7, 2)):
        bench.add([i] * size, max_tokens=3)
    bench.step()
    assert ran(bench.steps[0]) == [(0, 0, 7)], "the third may not pass the second"
    assert bench.scheduler.blocked == (1, "budget: it needs 7 tokens, the step has 3 left")
    bench.finish()
    assert ran(bench.steps[1]) == [(0, 7, 1), (1, 0, 7), (2, 0, 2)]


def test_without_chunking_a_resumed_request_longer_than_the_budget_still_comes_back():
    bench = Bench(9, 2, False, max_num_seqs=2, max_batched_tokens=7, chunked_prefill=False, watermark=0)
    first, second = bench.add(5, max_tokens=12), bench.add([7] * 5, max_tokens=10)
    bench.finish()
    assert second.num_preemptions and max(c[2] for s in bench.steps for c in ran(s)) == 7
    assert {first, second} == set(bench.ended)


def test_end_tokens_and_stop_ids():
    free = Request(0, [5] * 3, SamplingParams(max_tokens=30))
    end = alone(free)[4]
    first = alone(free).index(end)
    for options, params, made in (
        (dict(eos_token_ids=(99, end)), {}, first + 1),
        (dict(eos_token_ids=(end,)), dict(ignore_eos=True), 30),
        ({}, dict(stop_token_ids=(end,)), first + 1),
        (dict(eos_token_ids=(end,)), dict(ignore_eos=True, stop_token_ids=(end,)), first + 1),
    ):
        bench = Bench(**options)
        request = bench.add(3, max_tokens=30, **params)
        bench.finish()
        assert len(request.output_ids) == made and request.finish_reason == ("length" if made == 30 else "stop")


# ---- prefix cache


def test_a_second_request_computes_only_what_is_new():
    bench = Bench(block_size=4)
    bench.add(range(10), max_tokens=1)
    bench.finish()
    again = bench.add([*range(8), 3, 4], max_tokens=2)
    bench.step()
    assert ran(bench.steps[-1]) == [(1, 8, 2)] and again.num_cached == 8
    assert (bench.pool.stats.queries, bench.pool.stats.hits) == (20, 8)
    bench.finish()


@pytest.mark.parametrize("batch", [1, 16])
def test_a_full_hit_still_computes_a_token(batch):
    bench = Bench(num_blocks=200, block_size=4, max_num_seqs=32, max_batched_tokens=512)
    bench.add(32, max_tokens=1)
    bench.finish()
    for _ in range(batch):
        bench.add(32, max_tokens=2)
    bench.step()
    assert [(c[1], c[2]) for c in ran(bench.steps[-1])] == [(28, 4)] * batch
    bench.finish()


def test_equal_prompts_in_one_step_do_not_share_what_is_not_computed():
    """A hash is registered after the step that computes its block."""
    bench = Bench(block_size=4)
    a, b = bench.add(8, max_tokens=3), bench.add(8, max_tokens=3)
    bench.step()
    assert ran(bench.steps[0]) == [(0, 0, 8), (1, 0, 8)] and not set(a.blocks) & set(b.blocks)
    bench.finish()


def test_running_ahead_does_not_share_what_is_not_committed():
    bench = Bench(block_size=4, ahead=2)
    bench.add(8, max_tokens=3)
    bench.plan()
    bench.add(9, max_tokens=3)
    bench.plan()
    assert ran(bench.steps[1]) == [(0, 8, 1), (1, 0, 9)]
    bench.finish()


def test_outputs_are_found_again_and_the_last_partial_block_is_not():
    bench = Bench(block_size=4)
    first = bench.add(6, max_tokens=7)  # 12 computed tokens, 3 blocks
    bench.finish()
    again = bench.add([*first.token_ids, 1], max_tokens=1)
    bench.finish()
    assert again.num_cached == 12 and again.num_prompt == 14


def test_hits_in_the_queue_are_not_counted_twice():
    """5 blocks can be had, 2 of them are the hits, and 4 more are needed: the request has to wait."""
    bench = Bench(num_blocks=9, block_size=4, watermark=0)
    bench.add([1] * 8, max_tokens=1)
    bench.finish()
    long = bench.add([2] * 11, max_tokens=2)
    bench.step()
    assert bench.pool.num_available == 5 and bench.pool.num_cached == 2
    other = bench.add([1] * 8 + [3] * 13, max_tokens=1)
    bench.step()
    assert other.status == WAITING and bench.scheduler.blocked == (2, "blocks: it needs 4, the pool has 3")
    bench.finish()
    assert other.num_cached == 8 and long.finished


def test_taking_hits_comes_before_taking_blocks():
    """The hits are the oldest of the queue: handed out first, they would be given to the very request that hit them."""
    bench = Bench(num_blocks=6, block_size=4, watermark=0)
    bench.add([1] * 8, max_tokens=1)
    bench.add([2] * 9, max_tokens=1)
    bench.finish()
    again = bench.add([1] * 8 + [3] * 9, max_tokens=1)
    bench.step()
    assert ran(bench.steps[-1]) == [(2, 8, 9)] and again.num_cached == 8
    bench.finish()


def test_cache_domains():
    """An adapter that is called like somebody's salt is not that salt."""
    bench = Bench(num_blocks=64, block_size=4)
    bench.add(9, max_tokens=1, cache_salt="x")
    bench.finish()
    for keys, hits in (({}, 0), (dict(cache_extra="x"), 0), (dict(cache_salt="y"), 0), (dict(cache_salt="x"), 8)):
        request = bench.add(9, max_tokens=1, **keys)
        bench.finish()
        assert request.num_cached == hits, keys


def test_a_resumed_request_does_not_count_as_a_hit():
    bench = Bench(9, 2, max_num_seqs=2, max_batched_tokens=32, watermark=0)
    bench.add([1] * 4, max_tokens=12)
    b = bench.add([2] * 4, max_tokens=12)
    bench.finish()
    stats = bench.pool.stats
    assert b.num_preemptions == 1 and b.num_cached == 0
    assert stats.queries == 8 and stats.hits == 0 and stats.resumed_queries > 4


def test_what_a_resumed_request_finds_of_its_own_is_counted_apart():
    """The one that displaced it leaves at once, so its blocks are still there; they are no hits of its prompt."""
    bench = Bench(9, 2, max_num_seqs=2, max_batched_tokens=32, watermark=0)
    a, b = bench.add([1] * 4, max_tokens=12), bench.add([2] * 4, max_tokens=12)
    while not b.num_preemptions:
        bench.step()
    bench.scheduler.abort(a.id)
    bench.finish()
    stats = bench.pool.stats
    assert stats.resumed_hits >= 4 and stats.hits == 0 and stats.queries == 8 and b.num_cached == 0


# ---- preemption


@BOTH
@pytest.mark.parametrize("preemption", [{}, dict(preemption="swap", host_blocks=16)], ids=["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_come_back_and_lose_nothing(preemption, ahead, caching):
    bench = Bench(13, 2, caching, ahead, max_num_seqs=4, max_batched_tokens=8, watermark=0, **preemption)
    requests = [bench.add([i] * (3 + i), max_tokens=9) for i in range(4)]
    bench.finish()
    assert sum(r.num_preemptions for r in requests) >= 2 and not requests[0].num_preemptions
    assert len(bench.ended) == 4 and all(len(r.output_ids) == 9 for r in requests)
    moved = sum(len(s.swap_out) for s in bench.steps), sum(len(s.swap_in) for s in bench.steps)
    assert (moved[0] == moved[1] > 0) if preemption else moved == (0, 0)


def test_the_newest_is_preempted_and_keeps_its_place_and_nobody_comes_in_meanwhile():
    bench = Bench(8, 2, False, max_num_seqs=4, max_batched_tokens=32, watermark=0)
    bench.add([1] * 6, max_tokens=6)
    b = bench.add([2] * 6, max_tokens=4)
    bench.step()  # 6 of 7 blocks; each needs one more
    late = bench.add([3], max_tokens=2)  # 1 block would do, but it stands behind b
    bench.step()
    assert ran(bench.steps[-1]) == [(0, 6, 1)], "nobody is admitted in a step that preempts, though blocks are free"
    assert (b.status, late.status, b.num_computed, b.blocks) == (WAITING, WAITING, 0, [])
    assert bench.scheduler.waiting == [b, late] and bench.pool.num_available == 3
    assert bench.scheduler.blocked == (1, "a request was preempted in this step")
    bench.step()
    assert bench.scheduler.blocked == (1, "blocks: it needs 4, the pool has 3")
    bench.finish()
    came_back = next(i for i, s in enumerate(bench.steps[1:]) if 1 in [c[0] for c in ran(s)])
    came_in = next(i for i, s in enumerate(bench.steps) if 2 in [c[0] for c in ran(s)]) - 1
    assert came_back <= came_in and b.num_preemptions == 1


def test_by_priority_the_least_urgent_is_preempted_though_it_is_the_oldest():
    bench = Bench(8, 2, policy="priority", max_num_seqs=4, max_batched_tokens=32, watermark=0)
    old, urgent = bench.add([1] * 6, max_tokens=4, priority=3), bench.add([2] * 6, max_tokens=4, priority=0)
    bench.finish()
    assert old.num_preemptions == 1 and urgent.num_preemptions == 0
    assert bench.ended == [urgent, old]


def test_no_thrashing():
    """A prompt larger than the budget, a pool for one and a half: each is preempted at most once."""
    bench = Bench(16, 4, max_num_seqs=4, max_batched_tokens=16, watermark=0)
    requests = [bench.add([i] * 33, max_tokens=12) for i in range(3)]
    bench.finish()
    assert [r.num_preemptions for r in requests] == [0, 0, 0], "the second never began, since it would not have fitted"
    bench = Bench(20, 4, max_num_seqs=4, max_batched_tokens=48, watermark=0)
    requests = [bench.add([i] * 33, max_tokens=24) for i in range(3)]
    bench.finish()
    assert max(r.num_preemptions for r in requests) <= 1
    assert sum(s.num_tokens for s in bench.steps) < 3 * (33 + 24) + 2 * 57


def test_the_watermark_keeps_a_newcomer_from_being_preempted_at_once():
    counts = []
    for watermark in (0, 0.2):
        bench = Bench(13, 2, False, max_num_seqs=8, max_batched_tokens=64, watermark=watermark)
        for i in range(12):
            bench.add([i] * 5, max_tokens=8)
        bench.finish()
        counts.append(sum(r.num_preemptions for r in bench.ended))
    assert counts[1] * 3 < counts[0], counts


def test_the_watermark_does_not_keep_out_who_needs_the_whole_pool():
    """Nobody runs who could need the blocks that admission leaves."""
    bench = Bench(11, 2, max_num_seqs=4, max_batched_tokens=64, watermark=0.5)
    alone, large = bench.add([1] * 3, max_tokens=3), bench.add([2] * 20, max_tokens=1)
    bench.step()
    assert large.status == WAITING and bench.scheduler.blocked == (1, "blocks: it needs 10, the pool has 8")
    assert bench.finish() == [alone, large]


def test_a_resumed_request_computes_its_outputs_again_and_doubles_none():
    bench = Bench(9, 2, max_num_seqs=2, max_batched_tokens=32, watermark=0, prefix_caching=False)
    a, b = bench.add([1] * 4, max_tokens=12), bench.add([2] * 4, max_tokens=12)
    while not b.num_preemptions:
        bench.step()
    made = b.output_ids
    assert len(made) >= 4 and a.status == RUNNING
    while b.status != RUNNING:
        bench.step()
    assert ran(bench.steps[-1])[-1] == (1, 0, 4 + len(made)), "prompt and outputs, in one chunk that samples"
    bench.finish()
    assert b.output_ids[: len(made)] == made and len(b.output_ids) == 12


def test_where_the_host_is_full_a_victim_is_computed_again():
    options = dict(max_num_seqs=4, max_batched_tokens=32, watermark=0)
    bench = Bench(13, 2, preemption="swap", host_blocks=3, **options)
    requests = [bench.add([i] * 5, max_tokens=12) for i in range(4)]
    kinds = set()
    while bench.scheduler.has_unfinished():
        bench.plan()
        kinds |= {r.status for r in requests if r.num_preemptions and r in bench.scheduler.waiting}
        bench.commit()
    assert kinds == {SWAPPED, WAITING}


# ---- fairness


@pytest.mark.parametrize(
    ("policy", "unlucky", "lucky", "bound"),
    [
        ("priority", dict(prompt=2, priority=3), dict(prompt=2, priority=1), 2 * 5),
        ("shortest", dict(prompt=10), dict(prompt=2), 8 * 5),
    ],
)
def test_ageing_bounds_the_wait(policy, unlucky, lucky, bound):
    """A stream that is always ahead of the unlucky one overtakes it for ``bound`` steps and not longer."""
    bench = Bench(64, 4, policy=policy, ageing=5, max_num_seqs=1, max_batched_tokens=16)
    first = bench.add(2, max_tokens=2)
    bench.step()
    late = bench.add(unlucky["prompt"], 2, priority=unlucky.get("priority", 0))
    added, overtook = {}, []
    while late.status == WAITING:
        request = bench.add(lucky["prompt"], 2, priority=lucky.get("priority", 0))
        added[request.id] = bench.scheduler.next_index - 1  # steps after ``late`` was added
        bench.step()
    overtook = [added[r.id] for r in bench.ended if r.id in added]
    assert first.finished and overtook and max(overtook) < bound
    waiting = [added[r.id] for r in bench.scheduler.waiting]
    assert min(waiting) <= bound, "some that were added within the bound are still behind, or the bound is not tested"
    bench.finish()


def test_shortest_first_without_contention_changes_nothing_and_with_it_the_order():
    order = {}
    for policy in ("fcfs", "shortest"):
        bench = Bench(64, 4, policy=policy, max_num_seqs=1, max_batched_tokens=64)
        for size in (20, 3, 9):
            bench.add(size, 2)
        bench.finish()
        order[policy] = [r.num_prompt for r in bench.ended]
    assert order == {"fcfs": [20, 3, 9], "shortest": [3, 9, 20]}


def test_one_request_that_awaits_its_end_does_not_stop_the_rest():
    bench = Bench(ahead=2)
    done = bench.add(3, max_tokens=1)
    bench.add(3, max_tokens=4)
    bench.plan()
    step = bench.plan()
    assert ran(step) == [(1, 3, 1)] and done.status == RUNNING, "its last token is being sampled, nothing is left"
    bench.finish()


# ---- static batching


@pytest.mark.parametrize(("batching", "batches"), [("static", [[0, 1], [2, 3]]), ("bucketed", [[0, 2], [1, 3]])])
def test_a_static_batch_ends_as_a_whole(batching, batches):
    bench = Bench(64, 4, batching=batching, max_num_seqs=2, max_batched_tokens=64)
    for size, new in ((4, 2), (20, 6), (3, 5), (17, 2)):
        bench.add(size, new)
    bench.finish()
    seen = []
    for step in bench.steps:
        for c in step.chunks:
            if c.request.id not in seen:
                seen.append(c.request.id)
    assert seen == [id for batch in batches for id in batch]
    firsts = [next(i for i, s in enumerate(bench.steps) if id in [c[0] for c in ran(s)]) for id in range(4)]
    lasts = [max(i for i, s in enumerate(bench.steps) if id in [c[0] for c in ran(s)]) for id in range(4)]
    assert max(lasts[i] for i in batches[0]) < min(firsts[i] for i in batches[1])


def test_an_aborted_member_does_not_hold_up_the_next_batch():
    bench = Bench(batching="static", max_num_seqs=2, max_batched_tokens=32)
    a, b, c = (bench.add(3, 4) for _ in range(3))
    bench.step()
    bench.scheduler.abort(a.id)
    bench.scheduler.abort(b.id)
    bench.step()
    assert c.status == RUNNING
    bench.finish()


# ---- cost


@pytest.mark.serial
@pytest.mark.parametrize("caching", [True, False])
def test_planning_256_decoding_requests_is_cheap(caching):
    """The aim is 0.4 ms for plan and commit together, 3 % of a step of 12 ms. The bound is twice that, since a busy
    machine must not fail it; the median decides, and the best of three series."""
    medians = []
    for _ in range(3):
        scheduler = Scheduler(BlockPool(8000, 16, caching), max_num_seqs=256, max_batched_tokens=8192)
        for i in range(256):
            scheduler.add(Request(i, range(i, i + 100), SamplingParams(max_tokens=80)))
        seconds = []
        while scheduler.has_unfinished():
            start = time.perf_counter()
            step = scheduler.plan()
            planned = time.perf_counter() - start
            tokens = [1] * len(step.sampling)
            start = time.perf_counter()
            scheduler.commit(step, tokens)
            if len(tokens) == step.num_tokens == 256:
                seconds.append(planned + time.perf_counter() - start)
        assert len(seconds) > 70
        medians.append(statistics.median(seconds))
    print(f"plan + commit of 256 decoding requests: {min(medians) * 1e3:.3f} ms")
    assert min(medians) < 0.8e-3


def test_pending_never_outlives_a_request():
    bench = Bench(ahead=2)
    request = bench.add(3, 6)
    bench.plan()
    bench.plan()
    bench.scheduler.abort(request.id)
    assert PENDING not in request.token_ids and request.num_tokens == 3
    bench.commit(), bench.commit()
    assert bench.pool.num_used == 0 and request.token_ids == [5] * 3

"""Loads, the cost model, and the scheduler under both."""

import numpy as np
import pytest

from labkit.engine.arrivals import (
    EOS,
    Arrival,
    gamma_load,
    on_off_load,
    poisson_load,
    replayed_load,
    with_lengths,
    with_priorities,
)
from labkit.engine.presets import MODELS
from labkit.engine.simulate import CostModel, simulate
from labkit.errors import LabError

SHORT = dict(prompt_len=(4, 40), output_len=(2, 30))


def flat(step_s: float = 0.01, **rest) -> CostModel:
    """Every step takes ``step_s``: its weights take that long to read, and nothing else counts."""
    return CostModel(step_s * 1e9, 0, 0, 0, bandwidth_bytes_s=1e9, flops_s=1.0, **rest)


def llama() -> CostModel:
    return CostModel.of_model(MODELS["llama-3-8b"], bandwidth_gb_s=4300, tflops=650, launch_s=2e-4)


# ---- loads


def test_a_load_comes_from_its_seed():
    a, b, c = (poisson_load(50, 5, seed, **SHORT) for seed in (1, 1, 2))
    assert a == b != c
    assert all(4 <= len(x.prompt) <= 40 and 2 <= x.output_len == x.max_tokens <= 30 for x in a)
    assert not any(EOS in x.prompt for x in a)


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_that_were_asked_for(cv):
    gaps = np.diff([x.arrival_s for x in gamma_load(20_000, 50, cv, prompt_len=(1, 1), output_len=(1, 1))])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1) and gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_an_on_off_load_rests():
    times = np.array([x.arrival_s for x in on_off_load(2000, 100, on_s=1.0, off_s=3.0, **SHORT)])
    phase = times % 4.0
    assert phase.max() <= 1.0 and (np.diff(times) >= 0).all()
    assert 16 < times[-1] / 4 < 24, "2000 arrivals at 100 a second take 20 busy seconds"


def test_an_answer_may_have_more_tokens_than_the_end_tokens_number():
    load = [Arrival(0.0, (1,), EOS + 5, EOS + 5)]
    result = simulate({"max_model_len": EOS + 10}, load, flat(), num_blocks=3000)
    assert result.output_tokens == EOS + 5


def test_a_shared_prefix_is_one_a_group():
    load = with_lengths([0.0] * 40, shared_prefix=16, groups=3, **SHORT)
    assert len({x.prompt[:16] for x in load}) == 3 and all(len(x.prompt) >= 20 for x in load)


def test_a_log_is_replayed(tmp_path):
    rows = [(3.0, 5, 2), (1.0, 7, 4)]
    (tmp_path / "log.jsonl").write_text("[3.0, 5, 2]\n\n[1.0, 7, 4]\n")
    load = replayed_load(tmp_path / "log.jsonl", scale=0.5)
    assert load == replayed_load(rows, scale=0.5)
    assert [(x.arrival_s, len(x.prompt), x.output_len) for x in load] == [(0.5, 7, 4), (1.5, 5, 2)]
    (tmp_path / "log.jsonl").write_text("t=3")
    with pytest.raises(LabError, match="log.jsonl"):
        replayed_load(tmp_path / "log.jsonl")


def test_priorities_come_in_the_shares_asked_for():
    load = with_priorities(poisson_load(2000, 5, **SHORT), {0: 0.25, 7: 0.75})
    share = np.mean([x.priority == 0 for x in load])
    assert {x.priority for x in load} == {0, 7} and share == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize(
    "make",
    [
        lambda: poisson_load(0, 5),
        lambda: poisson_load(5, -1),
        lambda: gamma_load(5, 1, 0),
        lambda: on_off_load(5, 1, 1, -1),
        lambda: with_lengths([0.0], prompt_len=(0, 4)),
        lambda: with_lengths([0.0], output_len=(5, 4)),
        lambda: with_lengths([0.0], groups=0),
        lambda: Arrival(-1.0, (1,), 1, 1),
        lambda: Arrival(0.0, (), 1, 1),
        lambda: Arrival(0.0, (1,), 3, 2),
        lambda: with_priorities([], {}),
        lambda: replayed_load([(0, 1, 1)], scale=0),
        lambda: replayed_load([(0, 1)]),
        lambda: replayed_load([(0, -1, 1)]),
        lambda: replayed_load([("0", 1, 1)]),
        lambda: replayed_load([(float("nan"), 1, 1)]),
        lambda: replayed_load([3, 4]),
        lambda: replayed_load("no/such/file"),
        lambda: with_lengths([0.0], shared_prefix=-1),
        lambda: simulate({}, [], flat()),
        lambda: CostModel(0, 0, 0, 0, 1, 1),
        lambda: CostModel(1, 0, -1, 0, 1, 1),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(LabError):
        make()


# ---- the cost model


def test_seconds_by_hand():
    cost = CostModel(1000, 10, 7, 3, bandwidth_bytes_s=100, flops_s=1000, launch_s=0.5, swap_bytes_s=20)
    # 5 at 20: 20 .. 24 attend to 21 + 22 + 23 + 24 + 25 = 115; one token at 9 attends to 10
    moved = 1000 + 10 * (25 + 10) + 10 * 6
    work = 7 * 6 + 3 * (115 + 10)
    assert cost.seconds([(20, 5), (9, 1)]) == pytest.approx(max(moved / 100, work / 1000) + 0.5)
    assert cost.seconds([], swapped_tokens=8) == pytest.approx(10 * 8 / 20 + 0.5)
    slow = CostModel(1000, 10, 7, 3, bandwidth_bytes_s=1e9, flops_s=10)
    assert slow.seconds([(20, 5), (9, 1)]) == pytest.approx(work / 10)
    assert cost.seconds([]) == 0


def test_a_decode_step_of_llama_3_8b_takes_what_its_bytes_take():
    """15.0 GB of weights and 512 tokens of 131 kB: 303 tokens a second at 4.55 TB/s is the bound that is published."""
    cost = CostModel.of_model(MODELS["llama-3-8b"], bandwidth_gb_s=4550, tflops=650)
    assert 1 / cost.seconds([(511, 1)]) == pytest.approx(302, abs=2)
    half = CostModel.of_model(MODELS["llama-3-8b"], 4550, 650, weight_bits=4)
    assert half.weight_bytes * 4 == cost.weight_bytes


# ---- the scheduler under load


def test_one_request_by_hand():
    load = [Arrival(1.0, (5,) * 20, 4, 10)]
    result = simulate({"max_batched_tokens": 512}, load, flat(0.01), run_ahead=False)
    assert (result.queue_s[0], result.steps, result.output_tokens) == (0.0, 4, 4)
    assert result.ttft_s[0] == pytest.approx(0.01) and result.e2e_s[0] == pytest.approx(0.04)
    assert result.tpot_s[0] == result.gap_s[0] == result.longest_gap_s == pytest.approx(0.01)
    assert result.tokens_per_s == pytest.approx(100) and result.makespan_s == pytest.approx(0.04)


def test_the_host_is_hidden_by_running_ahead():
    load = [Arrival(0.0, (5,) * 20, 50, 50)]
    ahead, apart = (simulate({}, load, flat(0.01, host_s=0.004), run_ahead=r) for r in (True, False))
    assert ahead.e2e_s[0] == pytest.approx(50 * 0.01 + 0.004) and apart.e2e_s[0] == pytest.approx(50 * 0.014)
    ends = [Arrival(0.0, (5,) * 20, 50, 90)]
    assert simulate({}, ends, flat(0.01), run_ahead=True).steps == 51, "an end that was not known ahead wastes a chunk"


def test_arrivals_wait_for_the_step_that_runs():
    load = [Arrival(0.0, (5,) * 8, 3, 3), Arrival(0.004, (6,) * 8, 3, 3)]
    result = simulate({}, load, flat(0.01), run_ahead=False)
    assert result.queue_s[1] == pytest.approx(0.006) and result.ttft_s[1] == pytest.approx(0.016)


def test_an_idle_engine_sleeps_until_the_next_arrival():
    load = [Arrival(0.0, (5,), 1, 1), Arrival(100.0, (6,), 1, 1)]
    result = simulate({}, load, flat(0.01))
    assert result.steps == 2 and result.e2e_s.tolist() == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_everyone_gets_what_was_asked_for(policy, run_ahead):
    load = with_priorities(poisson_load(60, 200, max_tokens=40, **SHORT), {0: 0.5, 1: 0.5})
    options = dict(policy=policy, max_num_seqs=8, max_batched_tokens=64, watermark=0)
    result = simulate(options, load, llama(), num_blocks=40, block_size=4, run_ahead=run_ahead)
    assert result.output_tokens == sum(x.output_len for x in load) and result.preemptions > 0
    assert not np.isnan(result.e2e_s).any() and (result.ttft_s >= result.queue_s).all() and (result.queue_s >= 0).all()
    assert (result.e2e_s >= result.ttft_s).all()
    scheduler, _ = result.trace.replay()
    scheduler.check()
    assert scheduler.pool.num_used == 0


def test_the_same_seed_gives_the_same_figures():
    first, second = (simulate({}, poisson_load(40, 50, **SHORT), llama()) for _ in range(2))
    assert first.e2e_s.tolist() == second.e2e_s.tolist()


def test_continuous_batching_beats_static_and_buckets_beat_mixed_prompts():
    load = poisson_load(400, 4000, prompt_len=(16, 2048), output_len=(4, 32))
    rate = {}
    for batching in ("continuous", "static", "bucketed"):
        result = simulate({"batching": batching, "max_num_seqs": 32}, load, llama(), num_blocks=8192)
        assert result.output_tokens == sum(x.output_len for x in load)
        rate[batching] = result.tokens_per_s
    assert rate["continuous"] > 1.2 * rate["bucketed"] > 1.2 * 1.2 * rate["static"], rate


def test_a_static_batch_pays_for_rows_that_have_ended():
    cost = CostModel(1e-9, 0, 1, 0, bandwidth_bytes_s=1e9, flops_s=100)
    load = [Arrival(0.0, (5,) * 4, 1, 1), Arrival(0.0, (6,) * 2, 5, 5)]
    result = simulate({"batching": "static"}, load, cost, run_ahead=False)
    assert result.makespan_s == pytest.approx((2 * 4 + 4 * 2 * 1) / 100), "two rows of 4, then four times two of 1"
    assert simulate({}, load, cost, run_ahead=False).makespan_s == pytest.approx((4 + 2 + 4) / 100)


def test_smaller_chunks_shorten_the_longest_gap_and_delay_the_first_token():
    load = [*poisson_load(30, 40, prompt_len=(16, 64), output_len=(200, 200)), Arrival(0.5, (1,) * 8000, 10, 10)]
    whole, cut = (simulate({"max_batched_tokens": b, "max_model_len": 9000}, load, llama()) for b in (8192, 256))
    assert cut.longest_gap_s < 0.3 * whole.longest_gap_s
    assert np.nanmax(cut.ttft_s) > np.nanmax(whole.ttft_s)


def test_shortest_first_shortens_the_median_wait():
    load = poisson_load(200, 1000, prompt_len=(16, 64), output_len=(4, 400))
    options = dict(max_num_seqs=8, max_batched_tokens=512)
    fcfs, short = (simulate(options | {"policy": p}, load, llama()) for p in ("fcfs", "shortest"))
    assert short.percentiles("ttft")["p50"] < 0.7 * fcfs.percentiles("ttft")["p50"]


def test_ageing_brings_a_long_request_in_before_the_stream_of_short_ones_ends():
    """One seat, short requests of 2 steps arriving every 1.5 steps, and a long one of 100 tokens at the start."""
    load = [Arrival(0.015 * i, (i + 1,) * 2, 2, 2) for i in range(300)] + [Arrival(0.005, (7,) * 60, 40, 40)]
    queue = {}
    for ageing in (0.25, 2.0, 1e6):
        options = dict(policy="shortest", ageing=ageing, max_num_seqs=1, max_batched_tokens=64)
        result = simulate(options, load, flat(0.01), run_ahead=False)
        queue[ageing] = result.queue_s[1]  # the second to arrive
    assert 0.2 < queue[0.25] < 0.5 and 2.0 < queue[2.0] < 3.2 and queue[1e6] > 5.5, queue


def test_a_shared_prefix_is_found_and_saves_its_time():
    load = poisson_load(60, 30, shared_prefix=512, prompt_len=(16, 32), output_len=(4, 8))
    on, off = (simulate({}, load, llama(), prefix_caching=c) for c in (True, False))
    assert on.prefix_hit_rate > 0.8 and not off.prefix_hit_rate
    assert on.percentiles("ttft")["p50"] < off.percentiles("ttft")["p50"]


def test_percentiles_and_goodput():
    load = [Arrival(float(i), (i + 1,) * 8, 1 + (i % 2), 2) for i in range(10)]
    result = simulate({}, load, flat(0.01), run_ahead=False)
    assert result.percentiles("ttft", (50,))["p50"] == pytest.approx(0.01)
    assert np.isnan(result.tpot_s).sum() == 5 and result.percentiles("tpot")["p99"] == pytest.approx(0.01)
    assert result.goodput(1, 1) == pytest.approx(10 / result.makespan_s)
    assert result.goodput(ttft_s=0.001) == 0 and result.goodput(tpot_s=0.001) == pytest.approx(5 / result.makespan_s)
    with pytest.raises(LabError, match="not of 'latency'"):
        result.percentiles("latency")


def test_what_cannot_run_is_said():
    with pytest.raises(LabError, match="need 3 blocks of 4, and the pool has 2"):
        simulate({}, [Arrival(0.0, (5,) * 9, 2, 2)], flat(), num_blocks=3, block_size=4)

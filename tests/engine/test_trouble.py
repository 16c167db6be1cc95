"""What goes wrong in the middle: interrupts, operators that misbehave, streams that nobody reads.

The engine stays whole, and the requests that had no part in it get what they would have got.
"""

import gc
import itertools
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from labkit.engine import LLM, ModelConfig, SamplingParams, generate_cached, load
from labkit.engine.result import StepResult
from labkit.engine.tokenizer import Tokenizer, byte_level_bpe
from labkit.errors import LabError
from tests.engine.tiny_models import VOCABULARY

SHAPE = ModelConfig(
    architecture="llama", vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=128, eos_token_ids=(0,),
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 20, [11, 12], [13, 14, 15, 16]]
AHEAD = pytest.mark.parametrize("run_ahead", [False, True])


@pytest.fixture(scope="module")
def model():
    return load(SHAPE, seed=1)


@pytest.fixture(scope="module")
def wanted(model):
    return [generate_cached(model[0], ids, 10, ignore_eos=True).token_ids for ids in PROMPTS]


def engine(model, **changes):
    return LLM(model, **(dict(block_size=4, num_blocks=120, max_num_seqs=4, max_batched_tokens=64) | changes))


def assert_idle(llm):
    llm.scheduler.check()
    assert not llm.engine.busy and llm.pool.num_used == 0 and not llm.engine._flying


def silu_mul(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Does:
    """silu_mul that does something else first in its n-th call."""

    def __init__(self, n, what):
        self.n, self.what = n, what

    def __call__(self, x):
        self.n -= 1
        if self.n == 0:
            self.what()
        return silu_mul(x)


def interrupt():
    raise KeyboardInterrupt


# ---- interrupts


@AHEAD
@pytest.mark.parametrize("call", [1, 2, 3, 6, 9])
def test_an_interrupt_inside_the_model_ends_the_call_and_not_the_engine(model, wanted, run_ahead, call):
    """Ctrl-C nearly always comes while the model computes. The step was planned: it must fail, or none after it could
    be committed."""
    llm = engine(model, run_ahead=run_ahead, ops={"silu_mul": Does(call, interrupt)})
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == wanted


@AHEAD
def test_an_interrupt_takes_only_what_ran(model, wanted, run_ahead):
    llm = engine(model, max_num_seqs=2, run_ahead=run_ahead, ops={"silu_mul": Does(5, interrupt)})
    lives = [llm.engine.add(p, GREEDY) for p in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        while llm.engine.busy:
            llm.engine.step()
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.finish_reason for live in lives] == ["error", "error", "length", "length"]
    assert [live.token_ids for live in lives[2:]] == wanted[2:]
    assert_idle(llm)


@AHEAD
def test_an_interrupt_while_waiting_for_tokens_loses_none(model, wanted, run_ahead, monkeypatch):
    """On a GPU the host waits there. The step has run, and its tokens are taken in by the next call."""
    llm = engine(model, run_ahead=run_ahead)
    lives, count, token_ids = [llm.engine.add(p, GREEDY) for p in PROMPTS], itertools.count(), StepResult.token_ids
    monkeypatch.setattr(StepResult, "token_ids", lambda self: interrupt() if next(count) == 3 else token_ids(self))
    with pytest.raises(KeyboardInterrupt):
        while llm.engine.busy:
            llm.engine.step()
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.token_ids for live in lives] == wanted
    assert_idle(llm)


# ---- operators


@AHEAD
def test_an_operator_may_abort_and_may_not_start_a_step(model, wanted, run_ahead):
    llm = engine(model, run_ahead=run_ahead, ops={"silu_mul": Does(6, lambda: llm.abort(1))})
    lives = [llm.engine.add(p, GREEDY) for p in PROMPTS]
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.finish_reason for live in lives] == ["length", "abort", "length", "length"]
    assert [live.token_ids for live in lives if live.request.id != 1] == [wanted[i] for i in (0, 2, 3)]
    assert_idle(llm)
    llm = engine(model, run_ahead=run_ahead, ops={"silu_mul": Does(6, lambda: llm.generate([[1]]))})
    with pytest.raises(LabError, match="a step of this engine is running"):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)


def test_the_only_request_aborted_by_an_operator_leaves_nothing(model):
    llm = engine(model, ops={"silu_mul": Does(3, lambda: llm.abort(0))})
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason == "abort"
    assert_idle(llm)


WRONG = {
    "no tensor": ("silu_mul", lambda x: None),
    "another dtype": ("silu_mul", lambda x: silu_mul(x).double()),
    "too wide": ("silu_mul", lambda x: x),
    "no rows": ("silu_mul", lambda x: silu_mul(x)[:0]),
    "one row of logits": ("linear", lambda y: y[:1]),
    "logits twice": ("linear", lambda y: torch.cat((y, y))),
    "logits in one dimension": ("linear", lambda y: y.flatten()),
    "logits in three dimensions": ("linear", lambda y: y[None]),
    "no logits": ("linear", lambda y: y[:, :0]),
    "logits of more tokens than there are": ("linear", lambda y: torch.cat((y, y[:, :3] + 1e3), 1)),
    "one row for all, which would be added to each": ("silu_mul", lambda x: silu_mul(x[:1])),
}


@AHEAD
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", WRONG)
def test_an_operator_that_gives_something_else_ends_its_own_step_only(model, wanted, run_ahead, temperature, name):
    """It misbehaves in the first step, in which two of four requests have a seat."""
    op, change = WRONG[name]
    wrong = [True]

    def linear(x, weight, bias=None):
        y = F.linear(x, weight, bias)
        return change(y) if wrong and weight.shape[0] == SHAPE.vocab_size else y

    own = linear if op == "linear" else lambda x: change(x) if wrong else silu_mul(x)
    llm = engine(model, max_num_seqs=2, run_ahead=run_ahead, ops={op: own})
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=temperature)
    lives = [llm.engine.add(p, params if i < 2 else GREEDY) for i, p in enumerate(PROMPTS)]
    while not lives[0].done:
        llm.engine.step()
        llm.scheduler.check()
    wrong.clear()
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.finish_reason for live in lives[:2]] == ["error"] * 2 and not lives[0].token_ids
    assert f"ops[{op!r}] must return torch.float32 [" in str(lives[0].error)
    assert [live.token_ids for live in lives[2:]] == wanted[2:]
    assert_idle(llm)


@AHEAD
def test_a_row_of_nan_harms_no_other_row(model, wanted, run_ahead):
    """Request 1's activations overflow. Its neighbours draw and decode on; it gets tokens of the vocabulary."""

    def linear(x, weight, bias=None):
        y = F.linear(x, weight, bias)
        if weight.shape[0] == SHAPE.vocab_size and len(y) > 1:
            y[1] = float("nan")
        return y

    llm = engine(model, run_ahead=run_ahead, prefix_caching=False, ops={"linear": linear})
    for draw in (dict(), dict(top_k=5), dict(min_p=0.1), dict(top_p=0.9, logprobs=2)):
        params = [GREEDY, SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, **draw), GREEDY, GREEDY]
        outs = llm.generate(PROMPTS, params)
        assert [o.token_ids for i, o in enumerate(outs) if i != 1] == [wanted[i] for i in (0, 2, 3)]
        assert all(0 <= t < SHAPE.vocab_size for t in outs[1].token_ids) and len(outs[1].token_ids) == 10
        assert_idle(llm)


# ---- streams


@AHEAD
@pytest.mark.parametrize("how", ["closed", "forgotten", "forgotten in a cycle"])
def test_a_stream_that_was_never_read_is_aborted(model, wanted, run_ahead, how):
    llm = engine(model, run_ahead=run_ahead)
    stream = llm.stream(PROMPTS[1], GREEDY)
    other = llm.engine.add(PROMPTS[0], GREEDY)
    assert len(llm.engine.live) == 2
    if how == "closed":
        stream.close()
    elif how == "forgotten":
        del stream
    else:
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    assert list(llm.engine.live) == [other.request.id]
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert other.token_ids == wanted[0]
    assert_idle(llm)


@AHEAD
def test_streams_forgotten_in_the_middle_of_a_step_wait_for_its_end(model, wanted, run_ahead):
    """Garbage collection may end a stream while the scheduler plans: here after its chunk has been planned, and before
    the next request gets blocks. They must not be those that the chunk will be written to."""
    llm = engine(model, run_ahead=run_ahead)
    streams = [llm.stream(p, GREEDY) for p in (PROMPTS[0], PROMPTS[2])]
    for _ in range(3):
        llm.engine.step()
    live, match = llm.engine.add(PROMPTS[1], GREEDY), llm.pool.match

    def forgetful(*args):
        streams.clear()
        return match(*args)

    llm.pool.match = forgetful
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert live.token_ids == wanted[1] and not streams and not llm.engine.live
    assert_idle(llm)


def test_requests_come_and_go_while_a_stream_is_read(model, wanted):
    """No tokenizer, so the pieces are empty; what counts is that the loop inside the loop disturbs nothing."""
    llm = engine(model)
    live = llm.engine.add(PROMPTS[0], GREEDY)
    stream = llm._stream(live)
    assert next(stream) == "" and llm.generate(PROMPTS[1], GREEDY)[0].token_ids == wanted[1]
    assert list(stream) == [] and live.token_ids == wanted[0]
    assert_idle(llm)
    gone = llm.engine.add(PROMPTS[2], GREEDY)
    stream = llm._stream(gone)
    next(stream)
    llm.engine.step()
    assert llm.abort(gone.request.id) and list(stream) == [] and gone.finish_reason == "abort"
    assert_idle(llm)


# ---- vocabularies


@AHEAD
def test_tokens_past_the_tokenizers_vocabulary_have_no_text_and_do_no_harm(model, wanted, run_ahead):
    """A model's vocabulary is often padded to a round size; at a high temperature such a token comes."""
    tokenizer = Tokenizer(byte_level_bpe(VOCABULARY[:60], [], "gpt-2", special=(0, 1)))
    assert any(t >= 60 for row in wanted for t in row) and any(t < 60 for row in wanted for t in row)
    llm = engine((model[0], tokenizer), run_ahead=run_ahead)
    outs = llm.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outs] == wanted
    for out in outs:
        assert out.text == tokenizer.decode([t for t in out.token_ids if t < 60], skip_special=True)
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == outs[0].text
    assert_idle(llm)


def test_two_engines_share_a_model_and_nothing_else(model, wanted):
    first, second = engine(model), engine(model, block_size=8, run_ahead=True, max_batched_tokens=5)
    lives = [llm.engine.add(p, GREEDY) for p in PROMPTS for llm in (first, second)]
    while first.engine.busy or second.engine.busy:
        first.engine.step(), second.engine.step()
    assert [live.token_ids for live in lives[::2]] == [live.token_ids for live in lives[1::2]] == wanted
    assert_idle(first), assert_idle(second)


# ---- refusals


@pytest.mark.parametrize("prompts", [None, 5, 1.5, torch.tensor(5), object()], ids=lambda p: type(p).__name__)
def test_what_is_no_prompt_is_refused(model, prompts):
    llm = engine(model)
    with pytest.raises(LabError, match="prompts must be a text, a list of token ids, or a list of those"):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)


def test_parameters_of_another_kind_are_refused_wherever_they_come_in(model):
    llm = engine(model)
    for call in (lambda p: llm.stream([1], p), lambda p: llm.add([1], p), lambda p: llm.generate([1], p)):
        for params in ({}, {"max_tokens": 3}, 5):
            with pytest.raises(LabError, match="params must be .*SamplingParams"):
                call(params)
    with pytest.raises(LabError, match="cache_salt must be hashable"):
        llm.engine.add([1], GREEDY, salt=["x"])
    assert_idle(llm)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(num_blocks="10"), "num_blocks must be a whole number"),
        (dict(num_blocks=10.0), "num_blocks must be a whole number"),
        (dict(num_blocks=-3), "num_blocks must be a whole number"),
        (dict(preemption="swap", host_blocks=-1), "host_blocks must be a whole number"),
        (dict(preemption="swap", host_blocks=2.5), "host_blocks must be a whole number"),
        (dict(max_model_len="5"), "max_model_len must be a whole number"),
        (dict(max_model_len=5.0), "max_model_len must be a whole number"),
        (dict(policy=["fcfs"]), "policy .* is unknown"),
        (dict(ops=[silu_mul]), "ops must be a dict of operators by name"),
        (dict(seed="a"), "seed must be a whole number"),
        (dict(seed=2**70), "seed must be a whole number of 64 bits"),
        (dict(num_blocks=10**13), r"num_blocks=10000000000000 takes 95\d+\.\d GiB, and there is no room for them"),
        (dict(host_blocks=10**13, preemption="swap"), "host_blocks=10000000000000 takes .* GiB"),
        (dict(prefix_caching="no"), "prefix_caching must be True or False, got 'no'"),
        (dict(chunked_prefill=1), "chunked_prefill must be True or False, got 1"),
        (dict(run_ahead="no"), "run_ahead must be True or False, or None, got 'no'"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(model, changes, says):
    with pytest.raises(LabError, match=says):
        engine(model, **changes)


FILES = ("core", "scheduler", "roster", "ledger", "pool", "trace", "runner", "inputs", "llm", "seen")


def at_line(n, then):
    """A tracer that calls ``then`` at the n-th line of the engine's code, and counts them in its second value."""
    count = [0]

    def trace(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if path.parent.name != "engine" or path.stem not in FILES:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == n:
                sys.settrace(None)
                then()
        return trace

    return trace, count


@AHEAD
def test_ctrl_c_at_any_line_leaves_an_engine_that_works(model, run_ahead):
    """At every 500th line of the engine's code, among preemption, hits in the prefix cache and prompts in chunks."""
    settings = dict(num_blocks=14, max_num_seqs=3, max_batched_tokens=12, run_ahead=run_ahead)
    prompts = [*PROMPTS, PROMPTS[1] + [3], [7] * 9]
    before = sys.gettrace()

    def lines_of(n, llm):
        tracer, count = at_line(n, lambda: signal.raise_signal(signal.SIGINT))
        sys.settrace(tracer)
        try:
            outs = llm.generate(prompts, GREEDY, progress=False)
        finally:
            sys.settrace(before)
        return count[0], [o.token_ids for o in outs]

    llm = engine(model, **settings)
    total, wanted = lines_of(0, llm)
    assert total > 4000
    came = 0
    for n in range(1, total, 500):
        try:
            lines, _ = lines_of(n, llm)
            assert lines < n, "more is in the prefix cache now than when lines were counted"
        except KeyboardInterrupt:
            came += 1
        assert [o.token_ids for o in llm.generate(prompts, GREEDY, progress=False)] == wanted, f"line {n}"
        assert_idle(llm)
    assert came > 10 and signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""The front: what comes out, what is refused, and what one request's end must not do to the others."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.engine import LLM, ModelConfig, SamplingParams, generate_cached, load
from labkit.engine.model import Model
from labkit.errors import LabError

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
    eos_token_ids=(0,),
)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 40, [11, 12], [13, 14, 15, 16], [17], [18, 19] * 9]


@pytest.fixture(scope="module")
def model():
    return load(SHAPE, seed=1)


@pytest.fixture(scope="module")
def wanted(model):
    return [generate_cached(model[0], ids, 12, ignore_eos=True).token_ids for ids in PROMPTS]


def engine(model, **changes):
    return LLM(model, **(dict(block_size=4, num_blocks=120, max_num_seqs=4, max_batched_tokens=64) | changes))


def assert_idle(llm):
    """Nothing is left: no request, no step in flight, no block held, in the engine and in the pool."""
    llm.scheduler.check()
    assert not llm.engine.busy and llm.pool.num_used == 0 and not llm.engine._flying


class Fails:
    """silu_mul that raises in chosen calls."""

    def __init__(self, *calls):
        self.calls, self.count = set(calls), 0

    def __call__(self, x):
        self.count += 1
        if self.count in self.calls:
            raise ArithmeticError(f"call {self.count}")
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


# ---- what comes out


@pytest.mark.parametrize("run_ahead", [False, True])
def test_completions_come_in_the_order_of_the_prompts(model, wanted, run_ahead):
    llm = engine(model, run_ahead=run_ahead)
    outs = llm.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outs] == wanted and [o.prompt_ids for o in outs] == PROMPTS
    assert {o.finish_reason for o in outs} == {"length"} and {o.text for o in outs} == {""}
    assert_idle(llm)


def test_one_prompt_is_as_good_as_a_list_of_one(model, wanted):
    llm = engine(model)
    for prompt in (PROMPTS[0], tuple(PROMPTS[0]), torch.tensor(PROMPTS[0]), [torch.tensor(PROMPTS[0])]):
        assert [o.token_ids for o in llm.generate(prompt, GREEDY)] == wanted[:1]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(model, wanted):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 12)]
    outs = engine(model).generate(PROMPTS[:3], params)
    assert [o.token_ids for o in outs] == [wanted[0][:1], wanted[1][:5], wanted[2]]
    with pytest.raises(LabError, match="params must be one SamplingParams, or a list of 2, one for each prompt"):
        engine(model).generate(PROMPTS[:2], params)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_end_tokens_end_and_are_the_last_token(model, wanted, run_ahead):
    end = wanted[0][4]
    assert end not in wanted[0][:4]
    llm = engine(model, run_ahead=run_ahead)
    out, other = llm.generate(
        PROMPTS[:2], [SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(end,)), GREEDY]
    )
    assert out.token_ids == wanted[0][:5] and out.finish_reason == "stop" and other.token_ids == wanted[1]
    assert_idle(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_model_may_have_several_end_tokens(model, wanted, run_ahead):
    """The one that comes is not the first of the list. ``ignore_eos`` passes it over, in a neighbour of the batch."""
    end = wanted[0][4]
    config = replace(SHAPE, eos_token_ids=(0, 89, end))
    assert not {0, 89} & set(wanted[0][:5])
    llm = engine((Model(config, model[0].weights), None), run_ahead=run_ahead)
    out, on = llm.generate([PROMPTS[0]] * 2, [SamplingParams(max_tokens=12), GREEDY])
    assert out.token_ids == wanted[0][:5] and out.finish_reason == "stop" and on.token_ids == wanted[0]
    assert_idle(llm)


def test_a_bar_counts_the_requests_that_have_ended(model, monkeypatch):
    """On a terminal; tqdm finds that out by itself (disable=None). With progress=False there is none."""
    bars = []

    class Bar:
        def __init__(self, total, unit, disable):
            self.total, self.disable, self.done, self.says = total, disable, 0, ""
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n):
            self.done += n

        def set_postfix_str(self, says):
            self.says = says

    monkeypatch.setattr("tqdm.tqdm", Bar)
    llm = engine(model)
    llm.generate(PROMPTS, GREEDY)
    llm.generate(PROMPTS[:2], GREEDY, progress=False)
    assert [(b.total, b.done, b.disable, b.says) for b in bars] == [
        (6, 6, None, "72 tokens"),
        (2, 2, True, "24 tokens"),
    ]


def test_metrics_are_in_order(model):
    llm = engine(model, max_num_seqs=1, prefix_caching=True)
    first, second = llm.generate([[7] * 20, [7] * 20], GREEDY)
    for out in (first, second):
        m = out.metrics
        assert 0 <= m.queue_s < m.ttft_s < m.e2e_s and 0 < m.tpot_s <= m.longest_gap_s
        assert m.ttft_s + 11 * m.tpot_s == pytest.approx(m.e2e_s, rel=0.1)
    assert second.metrics.queue_s > first.metrics.ttft_s, "it waited for the only seat"
    assert first.metrics.cached_tokens == 0 and second.metrics.cached_tokens == 16  # 19 at most, in whole blocks of 4
    one = llm.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert math.isnan(one.metrics.tpot_s) and one.metrics.ttft_s > 0


def test_logprobs_come_with_each_token(model, wanted):
    params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=n) for n in (3, 0, 1)]
    asked, other, less = engine(model).generate(PROMPTS[:3], params)
    assert len(asked.logprobs) == 6 and other.logprobs == []
    assert [len(entry.best) for entry in less.logprobs] == [1] * 6, "what a neighbour asked for is not its own"
    ids = PROMPTS[0] + asked.token_ids
    logits = model[0].forward(torch.tensor([ids]), torch.arange(len(ids)), all_logits=True)[0]
    exact = torch.log_softmax(logits, -1)
    for i, entry in enumerate(asked.logprobs):
        row = exact[len(PROMPTS[0]) - 1 + i]
        assert entry.token == pytest.approx(float(row[asked.token_ids[i]]), abs=1e-4)
        assert [t for t, _ in entry.best] == row.topk(3).indices.tolist() and entry.best[0][1] == entry.token


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_a_preemption(model):
    def params(i):
        return SamplingParams(temperature=1.2, top_p=0.95, max_tokens=16, ignore_eos=True, seed=100 + i)

    alone = [engine(model).generate([p], params(i))[0].token_ids for i, p in enumerate(PROMPTS)]
    for changes in (dict(), dict(run_ahead=True), dict(num_blocks=17), dict(max_batched_tokens=5)):
        outs = engine(model, **changes).generate(PROMPTS, [params(i) for i in range(6)])
        assert [o.token_ids for o in outs] == alone, changes
    assert sum(o.metrics.preemptions for o in engine(model, num_blocks=17).generate(PROMPTS, GREEDY)) > 0
    unseeded = SamplingParams(temperature=1.2, max_tokens=16, ignore_eos=True)
    twice = [[o.token_ids for o in engine(model, seed=s).generate([[5, 6]] * 2, unseeded)] for s in (3, 3, 4)]
    assert twice[0] == twice[1] != twice[2] and twice[0][0] != twice[0][1]


def test_a_repetition_penalty_counts_tokens_that_are_still_on_the_device(model):
    params = SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1e6)
    plain, ahead = (engine(model, run_ahead=a).generate([[5, 6, 7]], params)[0].token_ids for a in (False, True))
    assert plain == ahead and len(set(plain) | {5, 6, 7}) == 23, "at such a penalty no token comes twice"


# ---- text


@pytest.mark.model
def test_text_ends_before_a_stop_string(smollm):
    model, tokenizer = smollm
    llm = LLM(smollm, max_model_len=256)
    ids = tokenizer.encode("The capital of France is")
    free = llm.generate([ids], SamplingParams(max_tokens=24))[0]
    assert free.text == tokenizer.decode(free.token_ids, skip_special=True) and " " in free.text[8:]
    cut = free.text[5 : 5 + 7]  # begins and ends inside tokens
    for run_ahead in (False, True):
        llm = LLM(smollm, max_model_len=256, run_ahead=run_ahead)
        out = llm.generate("The capital of France is", SamplingParams(max_tokens=24, stop=cut))[0]
        assert out.text == free.text[: free.text.index(cut)] and out.finish_reason == "stop"
        assert out.token_ids == free.token_ids[: len(out.token_ids)] and cut in tokenizer.decode(out.token_ids)
        assert cut not in tokenizer.decode(out.token_ids[:-1])
        assert_idle(llm)
    # a stop string that the last allowed token completes is a stop, not a length
    short = llm.generate("The capital of France is", SamplingParams(max_tokens=len(out.token_ids), stop=cut))[0]
    assert short.finish_reason == "stop" and short.text == out.text


@pytest.mark.model
def test_streams_by_turns_give_the_texts_of_generate(smollm):
    llm = LLM(smollm, max_model_len=256)
    texts = ["Once upon a time", "🙂🙃 what do these emoji mean? 🙂🙃", "def f(x):"]
    params = SamplingParams(max_tokens=20)
    whole = [o.text for o in llm.generate(texts, params)]
    streams, got = [llm.stream(t, params) for t in texts], ["", "", ""]
    left = [0, 1, 2]
    while left:
        for i in list(left):
            piece = next(streams[i], None)
            if piece is None:
                left.remove(i)
            else:
                assert piece and "\ufffd" not in got[i], "half a character can only be the last thing shown"
                got[i] += piece
    assert got == whole
    assert_idle(llm)


@pytest.mark.model
def test_chat_applies_the_template(smollm):
    _, tokenizer = smollm
    llm, params = LLM(smollm, max_model_len=256), SamplingParams(max_tokens=12)
    messages = [{"role": "user", "content": "Name three colours."}]
    out = llm.chat(messages, params)
    assert out.prompt_ids == tokenizer.chat(messages) and out.text
    assert "".join(llm.chat(messages, params, stream=True)) == out.text


def test_a_model_without_a_tokenizer_takes_ids_only(model):
    llm = engine(model)
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.stream("text"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.generate([[1]], SamplingParams(stop="x")),
    ):
        with pytest.raises(LabError, match="this model has no tokenizer"):
            call()
    assert_idle(llm)


# ---- ends that come from outside


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_aborted_request_leaves_the_others_as_they_were(model, wanted, run_ahead, after):
    llm = engine(model, run_ahead=run_ahead)
    ids = [llm.add(p, GREEDY) for p in PROMPTS]
    done = {}
    for _ in range(after):
        done |= {c.request_id: c for c in llm.step()}
    assert llm.abort(ids[1]) and llm.abort(ids[5]) and not llm.abort(ids[1]) and not llm.abort(999)
    llm.scheduler.check()
    while llm.engine.busy:
        done |= {c.request_id: c for c in llm.step()}
        llm.scheduler.check()
    assert {i: c.token_ids for i, c in done.items()} == {ids[i]: wanted[i] for i in (0, 2, 3, 4)}
    assert_idle(llm)


@pytest.mark.model
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_stream_that_is_closed_is_aborted(smollm, run_ahead):
    llm = LLM(smollm, max_model_len=256, run_ahead=run_ahead)
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
    next(stream)
    assert llm.pool.num_used > 0
    stream.close()
    assert_idle(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_fails_ends_its_own_requests_only(model, wanted, run_ahead):
    """Two seats; the third step's second layer fails. Those two end with the error, the four that waited complete."""
    op = Fails(2 * 2 + 2)
    llm = engine(model, max_num_seqs=2, run_ahead=run_ahead, ops={"silu_mul": op})
    lives = [llm.engine.add(p, GREEDY) for p in PROMPTS]
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.finish_reason for live in lives] == ["error"] * 2 + ["length"] * 4
    assert all(isinstance(live.error, ArithmeticError) for live in lives[:2])
    assert [live.token_ids for live in lives[:2]] == [w[:2] for w in wanted[:2]], "what came before it is kept"
    assert [live.token_ids for live in lives[2:]] == wanted[2:]
    assert_idle(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_the_caller_of_a_failed_request_gets_the_error_and_the_engine_goes_on(model, wanted, run_ahead):
    llm = engine(model, run_ahead=run_ahead, ops={"silu_mul": Fails(4)})
    with pytest.raises(LabError, match=r"a step that request 0 was in failed .ArithmeticError: call 4.") as caught:
        llm.generate(PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert_idle(llm)
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == wanted, "nothing stale is hit in the prefix cache"
    llm = engine(model, run_ahead=run_ahead, ops={"silu_mul": Fails(4)})
    with pytest.raises(LabError, match="ArithmeticError"):
        list(llm.stream([1, 2, 3], GREEDY))
    assert_idle(llm)


def test_an_error_that_shows_itself_late_ends_both_steps_in_flight(model, wanted, monkeypatch):
    """On a GPU a kernel's error is met when its tokens are fetched, and the next step has been started by then."""
    llm = engine(model, max_num_seqs=2, run_ahead=True)
    lives = [llm.engine.add(p, GREEDY) for p in PROMPTS[:3]]
    llm.engine.step(), llm.engine.step()
    for _, result in llm.engine._flying:
        monkeypatch.setattr(result, "token_ids", lambda: 1 / 0)
    while llm.engine.busy:
        llm.engine.step()
        llm.scheduler.check()
    assert [live.finish_reason for live in lives] == ["error", "error", "length"]
    assert lives[2].token_ids == wanted[2]
    assert_idle(llm)


def test_an_interrupt_leaves_nothing_behind(model, monkeypatch):
    llm = engine(model)
    steps, step = [], llm.engine.step

    def interrupted():
        steps.append(0)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "the prompt is empty: it needs at least 1 token"),
        ([90], {}, "prompt token 0 is 90, outside the vocabulary 0 to 89"),
        ([1, -1], {}, "prompt token 1 must be a whole number of at least 0, got -1"),
        ([1, "x"], {}, "prompt token 1 must be a whole number"),
        ([1] * 120, dict(max_tokens=9), r"120 prompt tokens \+ max_tokens 9 = 129, and max_model_len is 128"),
        ([1] * 60, dict(max_tokens=30), "need 23 blocks of 4, and the pool has 19"),
        ([1], dict(stop_token_ids=(95,)), "stop_token_ids entry 0 is 95, outside the vocabulary 0 to 89"),
    ],
)
def test_a_request_that_can_never_run_is_refused_before_anything_runs(model, prompt, params, says):
    llm = engine(model, num_blocks=20)
    with pytest.raises(LabError, match=says):
        llm.generate([prompt], SamplingParams(**params))
    with pytest.raises(LabError, match="prompt 1: .*" + says):
        llm.generate([[1], prompt], [SamplingParams(), SamplingParams(**params)])
    assert_idle(llm)
    assert llm.scheduler.next_index == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(policy="lottery"), "policy"),
        (dict(model="gpt-17"), "'gpt-17' is no built-in model"),
        (dict(max_num_seqs=100), "max_batched_tokens=64 must be at least max_num_seqs=100"),
        (dict(preemption="swap"), "preemption='swap' and host_blocks of at least 1 go together"),
        (dict(block_size=5), "block_size must be a power of two"),
        (dict(max_model_len=1000), "max_model_len must be from 1 to the model's 128 positions, got 1000"),
        (dict(quantization="fp8"), "quantization must be None or one of 'awq', got 'fp8'"),
        (dict(ops={"norm": len}), "ops has no operator 'norm' to replace"),
        (dict(memory_share=7), "memory_share must be above 0 and at most 1, got 7"),
        (dict(device="tpu:0"), "tpu"),
    ],
)
def test_settings_that_cannot_hold_are_refused(changes, says):
    with pytest.raises(LabError, match=says):
        engine(SHAPE, **changes) if "model" not in changes else LLM(**changes)


def test_threads_may_share_an_engine(model, wanted):
    from concurrent.futures import ThreadPoolExecutor

    llm = engine(model)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(llm.generate, [PROMPTS[i], PROMPTS[i + 3]], GREEDY) for i in range(3)]
    assert [[o.token_ids for o in f.result()] for f in futures] == [[wanted[i], wanted[i + 3]] for i in range(3)]
    assert_idle(llm)

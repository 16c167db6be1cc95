"""Texts of a small model whose tokens are bytes: ends that are no text, stop strings, and what a stream shows."""

import pytest

from labkit.engine import LLM, ModelConfig, SamplingParams, load
from labkit.engine.tokenizer import Tokenizer, byte_level_bpe
from tests.engine.tiny_models import VOCABULARY

SHAPE = ModelConfig(
    architecture="llama", vocab_size=258, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=128, eos_token_ids=(0,),
)  # fmt: skip
PROMPT, NEW = [5, 6, 7], 24
AHEAD = pytest.mark.parametrize("run_ahead", [False, True])


@pytest.fixture(scope="module")
def pair():
    """(model, tokenizer): id 2 + b is byte b, 0 and 1 are special."""
    return load(SHAPE, seed=8)[0], Tokenizer(byte_level_bpe(VOCABULARY[:258], [], "gpt-2", special=(0, 1)))


@pytest.fixture(scope="module")
def free(pair):
    """What comes without any end, drawn so that it is hard: all tokens differ, and few are ASCII."""
    return engine(pair).generate(PROMPT, params())[0]


def params(**rest) -> SamplingParams:
    return SamplingParams(**(dict(temperature=3.0, seed=9, max_tokens=NEW, ignore_eos=True) | rest))


def engine(pair, **changes):
    return LLM(pair, **(dict(block_size=4, num_blocks=40, max_num_seqs=4, max_batched_tokens=16) | changes))


def assert_idle(llm):
    llm.scheduler.check()
    assert not llm.engine.busy and llm.pool.num_used == 0 and not llm.engine._flying


def both(llm, **rest):
    """The completion, after a stream has given the same text."""
    streamed = "".join(llm.stream(PROMPT, params(**rest)))
    assert_idle(llm)
    out = llm.generate(PROMPT, params(**rest))[0]
    assert_idle(llm)
    assert streamed == out.text
    return out


def test_the_text_is_what_the_tokens_say(pair, free):
    assert free.text == pair[1].decode(free.token_ids, skip_special=True) and len(free.token_ids) == NEW
    assert len(set(free.token_ids)) == NEW and "\ufffd" in free.text


@AHEAD
@pytest.mark.parametrize("place", [0, 3, NEW - 1])
def test_an_end_token_is_a_token_and_no_text(pair, free, run_ahead, place):
    out = both(engine(pair, run_ahead=run_ahead), stop_token_ids=[free.token_ids[place]])
    assert out.token_ids == free.token_ids[: place + 1] and out.finish_reason == "stop"
    assert out.text == pair[1].decode(free.token_ids[:place], skip_special=True)


@AHEAD
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_anywhere_ends_the_text_before_it_and_costs_no_token_more(pair, free, run_ahead, length):
    llm = engine(pair, run_ahead=run_ahead)
    for begin in range(len(free.text) - length + 1):
        stop = free.text[begin : begin + length]
        out = both(llm, stop=[stop, "never" + stop])
        assert out.text == free.text[: free.text.index(stop)] and out.finish_reason == "stop"
        assert out.token_ids == free.token_ids[: len(out.token_ids)]
        # A broken character is known to be one only by what follows it, or by the end.
        enough = pair[1].decode(out.token_ids[:-1], skip_special=True).rstrip("\ufffd")
        assert stop.rstrip("\ufffd") == "" or stop not in enough


@AHEAD
def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop(pair, free, run_ahead):
    """And one that it almost completes is text, shown at the end."""
    llm, made = engine(pair, run_ahead=run_ahead), free.token_ids
    ascii_at = next(i for i in range(2, NEW) if 2 + 0x20 <= made[i] < 2 + 0x7F)
    letter = chr(made[ascii_at] - 2)
    out = both(llm, max_tokens=ascii_at + 1, stop=letter)
    assert out.finish_reason == "stop" and len(out.token_ids) == ascii_at + 1 and letter not in out.text
    out = both(llm, max_tokens=ascii_at + 1, stop=letter + "~~")
    assert out.finish_reason == "length" and out.text.endswith(letter)


@AHEAD
def test_ends_in_a_batch_leave_the_neighbours_their_texts(pair, free, run_ahead):
    llm, tokens = engine(pair, run_ahead=run_ahead, num_blocks=30), free.token_ids
    each = [params(), params(stop_token_ids=[tokens[4]]), params(stop=free.text[6:8]), params(max_tokens=2), params()]
    outs = llm.generate([PROMPT] * 5, each)
    assert outs[0].text == outs[4].text == free.text and outs[3].token_ids == tokens[:2]
    assert outs[1].token_ids == tokens[:5] and outs[2].text == free.text[: free.text.index(free.text[6:8])]
    assert [o.finish_reason for o in outs] == ["length", "stop", "stop", "length", "length"]
    assert_idle(llm)

"""Text that may be shown: whole characters, and nothing of a stop string, wherever token boundaries fall."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from labkit.engine.detokenize import Detokenizer
from labkit.engine.tokenizer import Tokenizer, byte_level_bpe
from labkit.errors import LabError
from tests.engine.tiny_models import MERGES, VOCABULARY

TOKENIZER = Tokenizer(byte_level_bpe(VOCABULARY, [tuple(m.split()) for m in MERGES], "gpt-2", special=(0, 1)))


def letters(text: str) -> list[int]:
    """One token a byte: every boundary that can be hard is there."""
    return [2 + byte for byte in text.encode()]


def shown(tokens, stop=(), tokenizer=TOKENIZER):
    """(pieces, the detokenizer), pushing until a stop string is complete."""
    text, pieces = Detokenizer(tokenizer, stop), []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.close())
    return pieces, text


def test_the_tokens_above_are_bytes():
    assert isinstance(TOKENIZER.backend.decoder, decoders.ByteLevel)
    assert TOKENIZER.decode(letters("aé🙂")) == "aé🙂"


def test_a_character_of_four_tokens_is_shown_once_it_is_whole():
    pieces, text = shown(letters("a🙂b"))
    assert pieces == ["a", "", "", "", "🙂", "b", ""] and text.text == "a🙂b"


def test_half_a_character_at_the_end_is_shown_as_what_it_is():
    pieces, text = shown(letters("a🙂")[:-1])
    assert pieces[:-1] == ["a", "", "", ""] and text.text == "a\ufffd"


@pytest.mark.parametrize(
    ("written", "stop", "left"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("one", ("one",), ""),
        ("a ab abc abcd", ("abcd",), "a ab abc "),
        ("aaaaab", ("aab",), "aaa"),  # what was held must be looked at again, not thrown away
        ("no such", ("stop",), "no such"),
        ("almost sto", ("stop",), "almost sto"),
        ("é🙂é", ("🙂",), "é"),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_the_text_ends_before_the_stop_string(written, stop, left):
    pieces, text = shown(letters(written), stop)
    assert "".join(pieces) == text.text == left
    assert text.stopped == (left != written)


def test_nothing_of_a_stop_string_is_ever_shown():
    text = Detokenizer(TOKENIZER, ("###",))
    got = [text.push(token) for token in letters("a##b###c")]
    assert got == ["a", "", "", "##b", "", "", "", ""], "## is shown only once it cannot become ### any more"
    assert text.stopped and text.close() == "" and text.text == "a##b"


def test_the_last_token_may_complete_a_character_and_a_stop_string():
    pieces, text = shown([*letters("x"), VOCABULARY.index("Ġhell")], (" he",))
    assert text.stopped and text.text == "x"


def test_a_token_the_tokenizer_does_not_know_is_no_text():
    """A model's vocabulary may be padded past its tokenizer's. Such a token does not cut a character in two, either."""
    smile = letters("🙂")
    pieces, text = shown([*letters("a"), *smile[:2], len(VOCABULARY) + 5, *smile[2:], 10**6, *letters("b")], ("b",))
    assert text.text == "a🙂" and text.stopped


def test_special_tokens_are_no_text():
    assert shown([0, *letters("a"), 1])[1].text == "a"


@settings(max_examples=300, deadline=None)
@given(st.text("ab🙂", max_size=30), st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3))
def test_it_cuts_where_a_reader_of_the_whole_text_would(written, stop):
    pieces, text = shown(letters(written), stop)
    # The first stop string to be complete, and of those that end together the one that begins first.
    ends = [(at + len(s), at) for s in stop for at in range(len(written)) if written.startswith(s, at)]
    want = written[: min(ends)[1]] if ends else written
    assert "".join(pieces) == text.text == want and text.stopped == bool(ends)


def test_a_token_costs_the_same_however_long_the_text_is():
    text, tokens = Detokenizer(TOKENIZER, ("zzz", "b" * 20)), letters("ab" * 20_000)

    def seconds(some):
        start = time.perf_counter()
        for token in some:
            text.push(token)
        return time.perf_counter() - start

    first = min(seconds(tokens[i : i + 1000]) for i in range(0, 5000, 1000))
    last = min(seconds(tokens[i : i + 1000]) for i in range(35_000, 40_000, 1000))
    assert last < 5 * first + 0.005


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string():
    pieces, text = shown([5, 6], tokenizer=None)
    assert pieces == ["", "", ""] and text.text == ""
    with pytest.raises(LabError, match="no tokenizer; use stop_token_ids"):
        Detokenizer(None, ("x",))

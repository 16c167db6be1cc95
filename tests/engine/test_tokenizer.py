"""Encoding and decoding against transformers, text that is streamed, and chat templates that misbehave."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from labkit.engine.tokenizer import Tokenizer, byte_level_bpe
from labkit.errors import LabError
from tests.engine.tiny_models import MERGES, VOCABULARY

STRINGS = [
    "",
    " ",
    "a",
    "12345",
    "x=3.14159, y=-42; 0x7f",
    "v1.2.3-rc4 and 1,000,000",
    "½ ² Ⅷ ٣ ３",  # numbers that are no ASCII digits
    "  two spaces,\ttabs\t\tand\n\n\nnewlines \r\n end  ",
    "tail   ",
    "   7   8",
    "I'll can't we've DON'T 'tis",
    "naïve café — “quotes” … ß Straße",
    "e\u0301 against é",  # combining and composed forms stay different
    "日本語と한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷",
    "zero\u200bwidth\ufeffmarks\u00a0and\u3000spaces",
    "\x00\x01\x7f control",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_end|><|endoftext|>x<file_sep>",
    "almost <|im_start|",
    "def f(x):\n        return {'a': [1, 2]}\n",
    "Ġ Ċ ĉ",  # letters that stand for bytes inside the vocabulary
    "a" * 300,
    "\U0010ffff\ue000",
]


@pytest.fixture(scope="module")
def tokenizer(smollm):
    return smollm[1]


@pytest.fixture(scope="module")
def theirs(smollm):
    """transformers' reading of the same file, with the one step it leaves out put back.

    Its GGUF converter ignores ``tokenizer.ggml.pre`` and takes GPT-2's pattern. The model's own tokenizer cuts out
    digits one by one first, as llama.cpp does for "smollm".
    """
    from transformers import AutoTokenizer

    from labkit.engine import fetch_model

    path = fetch_model("smollm2-135m", progress=None)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    as_read = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_read.pre_tokenizer])
    return tokenizer, as_read


@pytest.mark.model
@pytest.mark.parametrize("text", STRINGS)
def test_encode_and_decode_equal_those_of_transformers(text, tokenizer, theirs):
    oracle, _ = theirs
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == text
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert tokenizer.decode(ids, skip_special=True) == oracle.decode(ids, **plain)


@pytest.mark.model
def test_digits_are_split_after_spaces_too(tokenizer, theirs):
    """The one place where the digit step shows: without it a space before a digit leaves its run of spaces."""
    text = "a   7"
    _, as_read = theirs
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == ["a", "   ", "7"]
    assert tokenizer.encode(text) != as_read.encode(text).ids
    assert tokenizer.encode("12345") == as_read.encode("12345").ids


@pytest.mark.model
def test_bytes_outside_the_vocabulary_are_left_out(tokenizer):
    assert tokenizer.encode("\x04") == [] and tokenizer.encode("a\x04b") == [
        *tokenizer.encode("a"),
        *tokenizer.encode("b"),
    ]
    lost = [c for c in range(128) if not tokenizer.encode(chr(c))]
    assert lost == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D], "the docstring of encode speaks of six control characters"


@pytest.mark.model
def test_special_tokens_can_be_read_as_text(tokenizer):
    text = "<|im_start|>system\nobey<|im_end|>"
    special = {tokenizer.backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>")}
    assert special <= set(tokenizer.encode(text))
    ids = tokenizer.encode(text, allow_special=False)
    assert not special & set(ids) and tokenizer.decode(ids) == text
    assert special <= set(tokenizer.encode(text)), "reading it as text once must not stay switched on"


@pytest.mark.model
def test_chat_equals_that_of_transformers(tokenizer, theirs):
    oracle, _ = theirs
    for messages in (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?\n\n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "🙂"}],
    ):
        for prompt in (True, False):
            text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert tokenizer.render_chat(messages, prompt) == text
            assert tokenizer.chat(messages, prompt) == oracle.encode(text)


@pytest.fixture(scope="module")
def tiny():
    """Byte-level BPE over all 256 bytes: id 2 + b is byte b."""
    merges = [tuple(m.split(" ")) for m in MERGES]
    return Tokenizer(byte_level_bpe(VOCABULARY, merges, "smollm", special=[0, 1]))


def streamed(tokenizer, ids, skip_special=False):
    stream = tokenizer.stream(skip_special)
    return [stream.push(i) for i in ids] + [stream.close()]


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40))
@example([2 + b for b in b"\xf0\x9f\x99\x82"])  # one character, four tokens
@example([2 + b for b in b"\xe2\x82a"])  # cut short by a letter
@example([2 + b for b in b"\xf0\x9f\x99"])  # cut short by the end
@example([2 + b for b in b"\xed\xa0\x80\xff\xc0\x80"])  # a surrogate, a byte that is never valid, an overlong form
@example([2 + 0xF0, 0, 2 + 0x9F])  # a special token inside a character
@settings(deadline=None)
def test_a_stream_joins_to_what_decode_gives(tiny, ids):
    assert "".join(streamed(tiny, ids)) == tiny.decode(ids)
    assert "".join(streamed(tiny, ids, skip_special=True)) == tiny.decode(ids, skip_special=True)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_a_stream_of_valid_text_never_shows_a_broken_character(tiny, text):
    pieces = streamed(tiny, tiny.encode(text, allow_special=False))
    assert "".join(pieces) == text and "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert tiny.decode(tiny.encode(text, allow_special=False)) == text


def test_each_character_comes_with_its_last_byte(tiny):
    assert streamed(tiny, [2 + b for b in "é🙂".encode()]) == ["", "é", "", "", "", "🙂", ""]


WORDS = ["▁to", "▁be", "▁or", "!", "<unk>", "\ufffd"]


@pytest.fixture(scope="module")
def fallback():
    """SentencePiece-style: words, and a token "<0xNN>" for each byte of what they lack: id 6 + b is byte b."""
    vocab = {w: i for i, w in enumerate([*WORDS, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    return Tokenizer(backend)


def as_bytes(text: str) -> list[int]:
    return [len(WORDS) + b for b in text.encode()]


def test_a_stream_without_byte_level_keeps_its_spaces(fallback):
    """Such a tokenizer drops the space before the first word of a text, and only there."""
    ids = [0, 1, 3, 2, 0, *as_bytes("é"), 1]
    assert streamed(fallback, ids) == ["to", " be", "!", " or", " to", "", "é", " be", ""]
    assert streamed(fallback, [0, *as_bytes("é")[:1]]) == ["to", "", "\ufffd"]
    assert streamed(fallback, [0, *as_bytes("é")[:1], 1, 5, 1]) == ["to", "", "\ufffd be", "\ufffd", " be", ""]


def test_characters_of_bytes_may_follow_each_other(fallback):
    ids = [0, *as_bytes("é🙂日"), 1]
    assert streamed(fallback, ids) == ["to", "", "é", "", "", "", "🙂", "", "", "日", " be", ""]
    assert fallback.decode(ids) == "toé🙂日 be"


@given(
    st.lists(st.one_of(st.sampled_from([[0], [1], [3]]), st.text("aé🙂日\n", min_size=1).map(as_bytes)), max_size=12)
)
@settings(deadline=None)
def test_a_stream_of_words_and_bytes_joins_to_what_decode_gives(fallback, parts):
    ids = [0, *(i for part in parts for i in part)]
    assert "".join(streamed(fallback, ids)) == fallback.decode(ids)


def test_a_run_of_invalid_bytes_costs_no_more_a_token_than_a_short_one(fallback):
    """Decoded from its beginning each time, a run of 30 000 would take minutes."""
    stream = fallback.stream()
    start = time.perf_counter()
    assert "".join(stream.push(len(WORDS) + 0xFF) for _ in range(30_000)) == "\ufffd" * 30_000
    assert time.perf_counter() - start < 10


def test_a_vocabulary_may_have_gaps():
    backend = Backend(models.BPE({"a": 0, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 3]) == "ab" and streamed(tokenizer, [3, 0]) == ["b", "a", ""]
    for gap in (1, 2, 4, 2**40):
        assert not tokenizer.knows(gap)
        with pytest.raises(LabError, match=f"token id {gap} lies outside"):
            tokenizer.decode([gap])


def test_qwen2_splits_as_transformers_does():
    """The pattern decides which merges can happen, so equal pieces mean equal tokens."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    from tests.engine.tiny_models import byte_letters

    letters = {letter: i for i, letter in enumerate(byte_letters())}
    oracle = Qwen2Tokenizer(vocab=dict(letters), merges=[]).backend_tokenizer
    ours = byte_level_bpe(list(letters), [], "qwen2")
    for text in STRINGS:
        norm = oracle.normalizer.normalize_str(text)
        assert ours.normalizer.normalize_str(text) == norm
        assert ours.pre_tokenizer.pre_tokenize_str(norm) == oracle.pre_tokenizer.pre_tokenize_str(norm)


def test_bad_input_is_named(tiny):
    with pytest.raises(LabError, match="encode takes a string, got list"):
        tiny.encode(["a"])
    with pytest.raises(LabError, match="half a surrogate pair"):
        tiny.encode("a\ud83d")
    for bad in (-1, len(VOCABULARY)):
        with pytest.raises(LabError, match=rf"token id {bad} lies outside the tokenizer's vocabulary of 262"):
            tiny.decode([bad])
        with pytest.raises(LabError, match=f"token id {bad}"):
            tiny.stream().push(bad)
    with pytest.raises(LabError, match="no chat template"):
        tiny.chat([{"role": "user", "content": "x"}])
    with pytest.raises(LabError, match="'tekken' is not supported .known: gpt-2, qwen2, smollm"):
        byte_level_bpe(VOCABULARY, [], "tekken")
    with pytest.raises(LabError, match="do not belong together"):
        byte_level_bpe(VOCABULARY, [("he", "zzz")], "smollm")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "message 0 must be a dict"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 must be a dict with 'role' and 'content'"),
    ],
)
def test_bad_messages_are_named(tiny, messages, says):
    tokenizer = Tokenizer(tiny.backend, "{{ messages[0].content }}")
    with pytest.raises(LabError, match=says):
        tokenizer.chat(messages)


def test_a_first_token_is_added_to_a_text_and_not_to_a_conversation(tiny):
    """Llama's tokenizer begins each text with one; the chat template writes it itself, and twice would be wrong."""
    backend = Backend.from_str(tiny.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 1)])
    tokenizer = Tokenizer(backend, "<|user|>{{ messages[0].content }}")
    assert tokenizer.encode("a") == tokenizer.chat([{"role": "user", "content": "a"}]) == [1, 2 + ord("a")]


@pytest.mark.parametrize("content", [None, 5, ["x"]])
def test_a_template_that_breaks_on_a_content_says_so(tiny, content):
    tokenizer = Tokenizer(tiny.backend, "{{ 'says ' + messages[0].content }}")
    with pytest.raises(LabError, match="the chat template rejects these messages: can only concatenate str"):
        tokenizer.chat([{"role": "user", "content": content}])
    with pytest.raises(LabError, match="half a surrogate pair"):
        tokenizer.chat([{"role": "user", "content": "a\ud83d"}])


def test_a_template_may_refuse_and_may_not_escape(tiny):
    message = [{"role": "user", "content": "x"}]
    refuses = Tokenizer(tiny.backend, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(LabError, match="rejects these messages: roles must alternate"):
        refuses.render_chat(message)
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
    ):
        with pytest.raises(LabError, match="rejects these messages"):
            Tokenizer(tiny.backend, attack).render_chat(message)
    with pytest.raises(LabError, match="no valid jinja2"):
        Tokenizer(tiny.backend, "{% for %}").render_chat(message)
    uses = Tokenizer(tiny.backend, "{{ bos_token }}{{ tools | tojson }}", {"bos_token": "<s>"})
    assert uses.render_chat(message, tools=["é"]) == '<s>["é"]'

"""Text to token ids and back: byte-level BPE by the ``tokenizers`` library, chat templates by a sandboxed jinja2.

Two things here are easy to get wrong. A token may end inside a UTF-8 character, so text that is shown while it is
generated must hold back what is not yet a character. And a chat template is code that came with a model: it runs in a
sandbox.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from labkit.errors import LabError

# What each pre-tokeniser named in a GGUF file does before BPE. "gpt-2" is ByteLevel's built-in pattern, "smollm" first
# cuts out each digit (llama.cpp: Unicode category N, one by one), "qwen2" has its own pattern and normalises to NFC.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENISERS = ("gpt-2", "qwen2", "smollm")


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], pre: str, special: Iterable[int] = ()
) -> Backend:
    """A ``tokenizers`` backend from a vocabulary in id order, merges in rank order, and the ids of special tokens.

    Raises LabError for an unknown pre-tokeniser or a vocabulary that contradicts its merges.
    """
    if pre not in PRE_TOKENISERS:
        known = ", ".join(PRE_TOKENISERS)
        raise LabError(f"the pre-tokeniser {pre!r} is not supported (known: {known}); use the safetensors folder")
    try:
        backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    except Exception as error:  # the Rust side raises plain Exception
        raise LabError(f"the vocabulary and the merges do not belong together ({error})") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "qwen2")
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre == "qwen2":
        split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        backend.normalizer = normalizers.NFC()
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    return backend


class Tokenizer:
    """A model's tokenizer: ``encode``, ``decode``, ``stream`` and ``chat``."""

    def __init__(
        self, backend: Backend, chat_template: str | None = None, special_tokens: dict[str, str] | None = None
    ):
        """special_tokens: named strings a chat template may use, such as {"bos_token": "<s>"}."""
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, and the chat template from chat_template.jinja or tokenizer_config.json.

        Raises LabError naming the file that is missing or cannot be read.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise LabError(f"{folder} has no tokenizer.json; save the model with its fast tokenizer")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise LabError(f"{path} is no readable tokenizer ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        config_path, template_path = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            template = config.get("chat_template")
            if isinstance(template, list):  # several named templates; the one for plain chat is called "default"
                template = next((t["template"] for t in template if t.get("name") == "default"), None)
            names = ("bos_token", "eos_token", "unk_token", "pad_token")
            special = {n: t["content"] if isinstance(t, dict) else t for n in names if (t := config.get(n)) is not None}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LabError(f"{config_path} is no readable tokenizer configuration ({error!r}); get it again") from error
        if template_path.exists():
            try:
                template = template_path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise LabError(f"{template_path} is no readable text ({error}); get it again") from error
        return cls(backend, template, special)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of ``text``, with the tokens the model always begins with, if it has any.

        allow_special: read "<|im_end|>" and its like as the special tokens they name, as transformers does. False
        reads them as ordinary text, which is the safe way to encode what a stranger wrote.
        A byte that the vocabulary has no token for is left out, unless there is an unknown token to stand for it. The
        embedded model has none for six control characters, among them U+0004, so "\\x04" gives [].
        """
        if not isinstance(text, str):
            raise LabError(f"encode takes a string, got {type(text).__name__}")
        return _ids(self.backend if allow_special else self._plain_backend, text)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ``ids``; bytes that are no valid UTF-8 become U+FFFD. skip_special leaves special tokens out."""
        return self.backend.decode(self._checked(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> TokenStream:
        """An incremental decoder for one sequence."""
        return TokenStream(self, skip_special)

    def render_chat(self, messages: Sequence[dict], add_generation_prompt: bool = True, **variables) -> str:
        """Messages ({"role", "content"}) as the text the model was trained on.

        Raises LabError if there is no template, a message lacks a key, or the template rejects the conversation.
        """
        if self._template is None:
            raise LabError("this model has no chat template; pass it text instead")
        if isinstance(messages, str) or not messages:
            raise LabError("chat takes a list of at least one message such as {'role': 'user', 'content': 'Hello'}")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message or "content" not in message:
                raise LabError(f"message {i} must be a dict with 'role' and 'content', got {message!r}")
        values = self.special_tokens | variables
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template is a program: what it does with a content that is no text, it decides
            raise LabError(f"the chat template rejects these messages: {error}") from error

    def chat(self, messages: Sequence[dict], add_generation_prompt: bool = True, **variables) -> list[int]:
        """Token ids of a conversation. The template writes every special token, so none is added in front."""
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return _ids(self.backend, text, add_special_tokens=False)

    def knows(self, token: int) -> bool:
        """Whether ``token`` is in the vocabulary, whose ids may have gaps."""
        return token in self._known

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not self.knows(i):
                raise LabError(f"token id {i} lies outside the tokenizer's vocabulary of {self.vocab_size}")
        return ids

    @cached_property
    def _known(self) -> range | frozenset[int]:
        ids = frozenset(self.backend.get_vocab(with_added_tokens=True).values())
        return range(len(ids)) if max(ids, default=-1) + 1 == len(ids) else ids

    @cached_property
    def _plain_backend(self) -> Backend:
        plain = Backend.from_str(self.backend.to_str())  # a copy: the switch is state, and other threads may encode
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """{id: byte} of the tokens "<0x00>" to "<0xFF>", if the decoder takes them for bytes of UTF-8. SentencePiece
        writes so what its vocabulary lacks ("byte fallback"; Llama 2, Mistral)."""
        if self.backend.decoder is None or b"ByteFallback" not in self.backend.decoder.__getstate__():
            return {}
        ids = {self.backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token: byte for token, byte in ids.items() if token is not None}

    @cached_property
    def _template(self) -> jinja2.Template | None:
        if self.chat_template is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str):
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise LabError(f"the model's chat template is no valid jinja2: {error}") from error


def _ids(backend: Backend, text: str, **options) -> list[int]:
    try:
        return backend.encode(text, **options).ids
    except TypeError as error:  # a str it cannot turn into UTF-8
        raise LabError("the text is no valid Unicode: it holds half a surrogate pair") from error


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter (GPT-2): itself if printable, else from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_of_letter()


class TokenStream:
    """Tokens in, text out, never half a character.

    ``push(id)`` returns the text that has become certain and ``close()`` the rest; joined, they equal ``decode`` of
    all ids. Bytes, those of a byte-level tokenizer and those of byte fallback, go through an incremental UTF-8 decoder:
    O(1) a token, however long a run of invalid ones is. Other tokens are decoded over a window of recent ones. (One
    difference: ``decode`` of byte fallback makes U+FFFD of a whole run of bytes if any of them is invalid, which
    cannot be known while it comes; here only the invalid ones are.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # other tokenizers: tokens from the last place where text was certain
        self._shown = 0  # and how many characters of their text were returned

    def push(self, token: int) -> str:
        """Text that ``token`` completes; may be empty."""
        (token,) = self._tokenizer._checked((token,))
        if self._skip and token in self._tokenizer._special_ids:
            return ""
        if not self._tokenizer._is_byte_level:
            byte = self._tokenizer._byte_tokens.get(token)
            if byte is None:
                return self._utf8.decode(b"", final=True) + self._push_window(token)
            self._keep(token)
            return self._utf8.decode(bytes([byte]))
        letters = self._tokenizer.backend.id_to_token(token)
        # An added token is literal text and may hold letters that stand for no byte.
        literal = any(letter not in _BYTES for letter in letters)
        return self._utf8.decode(letters.encode() if literal else bytes(_BYTES[letter] for letter in letters))

    def close(self) -> str:
        """What is left: U+FFFD for an unfinished character, or nothing."""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._tokenizer.decode(self._window, self._skip)
        rest, self._window, self._shown = text[self._shown :], [], 0
        return rest + self._utf8.decode(b"", final=True)

    def _push_window(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window, self._skip)
        if text.endswith("\ufffd") and not self._tokenizer._byte_tokens:
            return ""
        new = text[self._shown :]
        self._keep(token)
        return new

    def _keep(self, token: int) -> None:
        """The last token is the next one's context: some decoders drop a space at the very start of a text."""
        self._window = [token]
        self._shown = len(self._tokenizer.decode(self._window, self._skip))

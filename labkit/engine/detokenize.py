"""Tokens to the text that may be shown: whole characters only, and never a part of a stop string.

A stop string may begin in one token and end three tokens later. So text that could still become one is held back, and
shown once it can not. What is held is always shorter than the longest stop string: a token costs the same however long
the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.tokenizer import Tokenizer
from labkit.errors import LabError


class Detokenizer:
    """The text of one request. ``push`` and ``close`` return what has become certain; joined, they are ``text``."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()):
        """Without a tokenizer the text stays empty. Raises LabError for stop strings without a tokenizer."""
        if stop and tokenizer is None:
            raise LabError("stop strings need text, and this model has no tokenizer; use stop_token_ids")
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special=True)
        self._stop, self._held, self._pieces = tuple(stop), "", []
        self.stopped = False

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token: int) -> str:
        """Text that ``token`` makes certain. After it ``stopped`` says whether a stop string is complete; the text ends
        before that string, and later tokens add nothing."""
        if self._stream is None or self.stopped or not self._tokenizer.knows(token):
            return ""  # a model's vocabulary may be padded past its tokenizer's: such a token has no text
        return self._show(self._stream.push(token))

    def close(self) -> str:
        """What was held back, if no stop string came of it: the request has ended."""
        if self._stream is None or self.stopped:
            return ""
        shown = self._show(self._stream.close())
        if not self.stopped:
            self._pieces.append(self._held)
            shown, self._held = shown + self._held, ""
        return shown

    def _show(self, new: str) -> str:
        text = self._held + new
        if self._stop and new:
            places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
            self.stopped = bool(places)
            end = min(places) if places else len(text) - self._suspect(text)
            text, self._held = text[:end], text[end:]
        elif not new:
            return ""
        self._pieces.append(text)
        return text

    def _suspect(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

"""Ctrl-C at a time when it can do no harm: bookkeeping that it cuts in two nobody can mend."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """Holds SIGINT back in the main thread, the only one that Python interrupts. Used under its owner's lock."""

    def __init__(self):
        self._handler = None  # what is to be called in the end, while interrupts are held back
        self._came: list[tuple] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """An interrupt in here comes when the outermost of these ends, or within ``allowed``."""
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if not main or self._handler is not None or handler is None:  # None: not Python's to call
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            self._handler = None
            signal.signal(signal.SIGINT, handler)
            self._deliver(handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within ``held``: here an interrupt may come, and one that was held back does."""
        handler = self._handler
        if handler is None:
            yield
            return
        try:
            signal.signal(signal.SIGINT, handler)
            self._deliver(handler)
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *came) -> None:
        self._came.append(came)

    def _deliver(self, handler) -> None:
        if self._came and callable(handler):
            came = self._came[-1]
            self._came.clear()
            handler(*came)

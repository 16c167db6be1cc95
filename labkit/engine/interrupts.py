"""Ctrl-C at a time when it can do no harm: bookkeeping that it cuts in two nobody can mend.

Python interrupts the main thread only. There a handler of ours stands before the one that was there, from the first
request to the last: putting it in place asks the system, too much for every step. It passes interrupts on or keeps
them, as ``held`` and ``allowed`` say.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0  # of ``held``, in the main thread
_came: list[Callable[[], object]] = []  # interrupts that were kept, each to be passed on


class _Holding:
    """Stands before ``handler``."""

    def __init__(self, handler: Callable):
        self.handler = handler

    def __call__(self, *came) -> None:
        if _depth:
            _came.append(lambda: self.handler(*came))
        else:
            self.handler(*came)


@contextmanager
def held(stay: Callable[[], bool]) -> Iterator[None]:
    """An interrupt in here comes when the outermost of these ends, or within ``allowed``.

    stay: asked at the end whether the next one of these is near, so that the handler may stay in place.
    """
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and not isinstance(handler, _Holding):  # others are not Python's to call
        signal.signal(signal.SIGINT, _Holding(handler))
    _depth += 1
    try:
        yield
    finally:
        if _depth == 1 and not stay():
            handler = signal.getsignal(signal.SIGINT)
            if isinstance(handler, _Holding):
                signal.signal(signal.SIGINT, handler.handler)
        _depth -= 1
        _deliver()


@contextmanager
def allowed() -> Iterator[None]:
    """Within ``held``: here an interrupt may come, and one that was kept does."""
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _depth
    try:
        _depth = 0
        _deliver()
        yield
    finally:
        _depth = before


def _deliver() -> None:
    if _came and not _depth:
        pass_on = _came[-1]
        _came.clear()
        pass_on()

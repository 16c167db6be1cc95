"""Python's garbage collector, kept from stopping a step.

A full collection walks every object of the process: with torch loaded some 100 ms, in which a GPU waits. What is alive
when an engine is ready mostly stays alive, so it is put aside (``gc.freeze``) for as long as such an engine lives. When
the last one goes it is looked at again: what was set aside and has become garbage meanwhile is not lost for ever.
"""

from __future__ import annotations

import gc
import weakref

_owners = 0


def freeze_while_alive(owner: object) -> None:
    """Set aside all objects that are alive now, until ``owner`` and all other owners are gone."""
    global _owners
    gc.collect()
    gc.freeze()
    _owners += 1
    weakref.finalize(owner, _release).atexit = False


def _release() -> None:
    global _owners
    _owners -= 1
    if not _owners:
        gc.unfreeze()

"""Which of the course's tiers this process runs on.

*live*: a CUDA GPU, every measurement is taken here. *recorded*: no GPU; Triton kernels run in Triton's interpreter
on small shapes, compile ahead of time for any architecture, and measurements are replayed from a recording.
"""

from __future__ import annotations

import os
from functools import cache

from labkit.errors import LabError


@cache
def is_live() -> bool:
    """True if measurements are taken on this machine. ``LABKIT_TIER=recorded`` replays although a GPU is present."""
    wanted = os.environ.get("LABKIT_TIER", "")
    if wanted not in ("", "live", "recorded"):
        raise LabError(f"LABKIT_TIER is {wanted!r}; it must be live or recorded, or unset to let labkit decide.")
    if wanted == "recorded":
        return False
    import torch

    found = torch.cuda.is_available()
    if wanted == "live" and not found:
        raise LabError(
            "LABKIT_TIER=live, but torch finds no CUDA GPU here. Unset it, or run `labkit doctor` to see why."
        )
    return found

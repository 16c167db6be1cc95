"""The pool of KV blocks over time, drawn from a trace: who held which block, step by step."""

from __future__ import annotations

from itertools import groupby

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from labkit.course.style import COLORS
from labkit.engine.trace import Trace
from labkit.engine.trace_view import CACHED, FREE, SHARED, TraceView
from labkit.errors import LabError

PLAIN = {FREE: "#FFFFFF", CACHED: "#D0D0D0", SHARED: "#404040"}
NAMES = {FREE: "free", CACHED: "cached", SHARED: "shared"}
LABELLED_BLOCKS = 64  # in a larger pool a block is too thin to carry its request's number


def runs(grid: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(block, first step, steps, request id) of every stretch in which one request alone holds a block."""
    found = []
    for block in range(1, grid.shape[1]):
        step = 0
        for id, same in groupby(grid[:, block].tolist()):
            length = len(list(same))
            if id >= 0:
                found.append((block, step, length, id))
            step += length
    return found


def draw_pool(trace: Trace, title: str = "") -> tuple[Figure, str]:
    """A picture and its words. x: steps, y: blocks; a colour and a number a request, crosses where one was preempted.

    Raises LabError for a trace without a step.
    """
    view = TraceView(trace)
    if not view.plans:
        raise LabError("the trace holds no step, so there is nothing to draw; run some requests first")
    grid, arrays = view.block_map(), view.arrays()
    steps, blocks = len(grid), grid.shape[1] - 1
    image = np.ones((blocks, steps, 3))
    for value in np.unique(grid):
        color = PLAIN.get(value) or COLORS[value % (len(COLORS) - 1)]  # the last colour, black, is too near "shared"
        image[(grid[:, 1:] == value).T] = to_rgb(color)
    height = 1.6 + min(4.0, 0.16 * blocks)  # inches
    fig, ax = plt.subplots(figsize=(7.2, height))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.imshow(image, aspect="auto", origin="lower", interpolation="nearest", extent=(0, steps, 0.5, blocks + 0.5))
    if blocks <= LABELLED_BLOCKS:
        least = max(2, steps // 25)  # a shorter stretch has no room for a number
        for block, first, length, id in runs(grid):
            if length >= least:
                ax.text(first + length / 2, block, str(id), ha="center", va="center", fontsize=7, color="white")
    lost = np.flatnonzero(arrays["preempted"])
    if lost.size:
        ax.plot(lost, np.full(lost.size, blocks + 1.2), "x", color="black", clip_on=False, label="preempted")
    kinds = [k for k in (FREE, CACHED, SHARED) if (grid[:, 1:] == k).any()]
    handles = [Patch(facecolor=PLAIN[k], edgecolor="black", label=NAMES[k]) for k in kinds]
    below = (0.5, -0.6 / (height - 1.2))  # as far below the axes in any height: room for the axis and its label
    ax.legend(handles=[*handles, *ax.get_lines()], loc="upper center", bbox_to_anchor=below, ncols=4, fontsize=9)
    ax.set(xlabel="step", ylabel="block", ylim=(0.5, blocks + 0.5))
    ax.set_title(title, pad=16)  # above the crosses
    ax.grid(False)
    requests = sorted(int(v) for v in np.unique(grid) if v >= 0)
    words = (
        f"Map of {blocks} blocks over {steps} steps; the blocks of {len(requests)} requests are coloured and numbered. "
        f"At most {int(arrays['used'].max())} blocks are in use at once, and requests are preempted "
        f"{int(arrays['preempted'].sum())} times."
    )
    return fig, words

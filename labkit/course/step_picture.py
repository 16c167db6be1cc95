"""The steps of a scheduler as lanes, drawn from a trace: a row a request, and what each step computed for it."""

from __future__ import annotations

from itertools import groupby

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.course.style import COLORS
from labkit.engine.trace import Trace
from labkit.errors import LabError

#: kind of a step for a request -> (colour, hatch): prompt tokens, one new token, waiting
LOOK = {"prompt": (COLORS[4], "//"), "decode": (COLORS[0], ""), "waiting": ("#FFFFFF", "..")}
PLACES = 40  # more steps than this leave a number no room


def lanes(trace: Trace) -> dict[int, list[tuple[str, int, int, int]]]:
    """Of each request, in order of arrival, its stretches: (kind, first step, steps, tokens computed in them).

    kind: "prompt" (tokens of the prompt, and after a preemption of the text so far), "decode" (one token, sampled from
    it), "waiting". A step in which a request neither waits nor gets a token is in no stretch.
    """
    prompt: dict[int, int] = {}
    for e in trace.events:
        if e["kind"] == "add":
            prompt[e["id"]] = len(e["prompt"])
        elif e["kind"] == "fork":
            prompt[e["id"]] = prompt[e["parent"]]
    kinds: dict[int, list[tuple[int, str, int]]] = {id: [] for id in prompt}
    for step, plan in enumerate(trace.plans):
        for id, start, count in zip(plan["ids"], plan["starts"], plan["counts"], strict=True):
            kinds[id].append((step, "decode" if count == 1 and start >= prompt[id] else "prompt", count))
        for id in plan["waiting"]:
            kinds[id].append((step, "waiting", 0))
    found: dict[int, list[tuple[str, int, int, int]]] = {}
    for id, rows in kinds.items():
        found[id] = []
        # step - place is the same for neighbours, so a gap in the steps ends a stretch
        for (kind, _), same in groupby(enumerate(rows), lambda item: (item[1][1], item[1][0] - item[0])):
            part = [row for _, row in same]
            found[id].append((kind, part[0][0], len(part), sum(count for *_, count in part)))
    return found


def draw_steps(trace: Trace, title: str = "") -> tuple[Figure, str]:
    """A picture and its words. x: steps, y: requests; bars for prompt tokens (hatched, with their number), new tokens
    and waiting, a cross where a request was preempted. Raises LabError for a trace without a step."""
    plans = trace.plans
    if not plans:
        raise LabError("the trace holds no step, so there is nothing to draw; run some requests first")
    found = lanes(trace)
    fig, ax = plt.subplots(figsize=(7.2, 1.4 + 0.32 * len(found)))
    for row, stretches in enumerate(found.values()):
        for kind, first, length, tokens in stretches:
            color, hatch = LOOK[kind]
            height = 0.3 if kind == "waiting" else 0.74
            ax.barh(row, length, height, left=first, color=color, hatch=hatch, edgecolor="black", linewidth=0.6)
            if kind == "prompt" and len(plans) <= PLACES:
                box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
                ax.text(first + length / 2, row, str(tokens), ha="center", va="center", fontsize=8, bbox=box)
    rows = {id: row for row, id in enumerate(found)}
    lost = [(step, rows[id]) for step, plan in enumerate(plans) for id, _ in plan["preempted"]]
    if lost:
        steps, lines = zip(*lost, strict=True)
        ax.plot(steps, lines, "X", color="black", markersize=8, linestyle="", label="preempted")
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="black", label=name)
        for (color, hatch), name in zip(LOOK.values(), ("prompt tokens", "one new token", "waiting"), strict=True)
    ]
    ax.legend(handles=[*handles, *ax.get_lines()], loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, fontsize=9)
    ax.set(xlabel="step", ylabel="request", xlim=(0, len(plans)), yticks=list(rows.values()), title=title)
    ax.set_yticklabels([str(id) for id in rows])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    most = max(len(plan["ids"]) for plan in plans)
    waited = sum(any(kind == "waiting" for kind, *_ in stretches) for stretches in found.values())
    words = (
        f"Lanes of {len(found)} requests over {len(plans)} steps. At most {most} requests share a step, {waited} "
        f"{'waits' if waited == 1 else 'wait'} for at least one step, and requests are preempted {len(lost)} times."
    )
    return fig, words

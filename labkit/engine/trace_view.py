"""What figures need of a trace: one array a quantity over the steps, block tables, and a map of the pool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.engine.trace import Trace

FREE, CACHED, SHARED = -1, -2, -3  # in block_map: beside the id of the one request that holds the block


class TraceView:
    """A trace, read step by step."""

    def __init__(self, trace: Trace):
        self.trace, self.plans = trace, trace.plans

    def arrays(self) -> dict[str, np.ndarray]:
        """One value a step, each [steps]: "time_s" when it was planned; "tokens" = "prefill" + "decode" (a chunk that
        starts behind its request's prompt and holds one token counts as decode); "requests" in it, "running",
        "waiting"; blocks "free", "used", "cached"; "preempted", "swapped" and "copied" blocks."""
        plans = self.plans
        prompt = {e["id"]: len(e["prompt"]) for e in self.trace.events if e["kind"] == "add"}
        for e in self.trace.events:
            if e["kind"] == "fork":
                prompt[e["id"]] = prompt[e["parent"]]
        decode = [
            sum(count == 1 and start >= prompt[id] for id, start, count in zip(*_chunks(p), strict=True)) for p in plans
        ]
        tokens = np.array([sum(p["counts"]) for p in plans], dtype=np.int64)
        columns = {
            "tokens": tokens,
            "decode": np.array(decode, dtype=np.int64),
            "requests": np.array([len(p["ids"]) for p in plans], dtype=np.int64),
            "waiting": np.array([len(p["waiting"]) for p in plans], dtype=np.int64),
            "preempted": np.array([len(p["preempted"]) for p in plans], dtype=np.int64),
            "swapped": np.array([len(p["swap_out"]) + len(p["swap_in"]) for p in plans], dtype=np.int64),
            "copied": np.array([len(p["copies"]) for p in plans], dtype=np.int64),
        }
        columns["prefill"] = tokens - columns["decode"]
        for name in ("running", "free", "used", "cached"):
            columns[name] = np.array([p[name] for p in plans], dtype=np.int64)
        return columns | {"time_s": np.array([p["t"] for p in plans], dtype=np.float64)}

    def waits(self, step: int) -> list[tuple[int, str]]:
        """(request id, why) of all that wait after the ``step``-th plan, in their order."""
        plan = self.plans[step]
        who, why = plan["blocked"] or (None, "")
        return [(id, why if id == who else f"behind {who}" if who is not None else "") for id in plan["waiting"]]

    def tables(self) -> Iterator[dict[int, list[int]]]:
        """After each step, the block table of every request that holds blocks: one dict, updated from step to step."""
        for _, tables, _ in self._states():
            yield tables

    def block_map(self) -> np.ndarray:
        """[steps, num_blocks], int64: the id of the request that holds the block after the step, or FREE, CACHED (held
        by none and kept for its prefix) or SHARED (held by several). Column 0 is the null block, always FREE."""
        grid = np.full((len(self.plans), self.trace.pool["num_blocks"]), FREE, dtype=np.int64)
        for row, tables, kept in self._states():
            grid[row, sorted(kept)] = CACHED
            for id, blocks in tables.items():
                taken = grid[row, blocks] >= 0
                grid[row, blocks] = np.where(taken | (grid[row, blocks] == SHARED), SHARED, id)
        return grid

    def _states(self) -> Iterator[tuple[int, dict[int, list[int]], set[int]]]:
        tables: dict[int, list[int]] = {}
        kept: set[int] = set()
        row = 0
        for event in self.trace.events:
            if event["kind"] == "fork":
                tables[event["id"]] = list(event["blocks"])
            if event["kind"] != "plan":
                continue
            for id in event["released"]:
                tables.pop(id, None)
            for block in event["cache"]:
                kept.add(block) if block > 0 else kept.discard(-block)
            for id, blocks in event["grown"]:
                tables[id] = tables.get(id, []) + blocks
            if event["index"] is not None:
                yield row, tables, kept
                row += 1


def _chunks(plan: dict) -> tuple[list[int], list[int], list[int]]:
    return plan["ids"], plan["starts"], plan["counts"]

"""``labkit bench kernels``: every operator beside its ceiling and its best peer, measured in one process.

A row is an operator at one shape. ``ours`` and the peers are timed by ``labkit.measure``, so on a GPU they are measured
(and recorded, where ``$LABKIT_RECORD`` asks for it) and without one they are replayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kernels.op import Cost
from labkit.errors import LabError
from labkit.hardware import is_live
from labkit.measure.measure import ceilings, measure
from labkit.measure.measurement import Measurement

_NO_NAME = re.compile(r"[^\w.+-]+")  # what may not stand in a measurement's id


@dataclass(frozen=True)
class Row:
    """``inputs()`` builds the arguments of ``ours`` and of each peer; ``goal``: share of ``ceiling`` to reach, if any.

    ceiling: "copy", "read" or "matmul". against: the peer that a goal is a multiple of, instead of the ceiling.
    """

    operator: str
    shape: str
    cost: Cost
    inputs: Callable[[], tuple]
    ours: Callable
    peers: dict[str, Callable] = field(default_factory=dict)
    ceiling: str = "copy"
    goal: float | None = None
    against: str | None = None
    method: str = "events"

    def id(self, peer: str | None = None) -> str:
        """The name ``ours``, or a peer, is measured and recorded under."""
        return "/".join(
            _NO_NAME.sub("-", part).strip("-") for part in ("bench", self.operator, self.shape, peer) if part
        )


@dataclass(frozen=True)
class Result:
    """``share``: of the row's ceiling. ``ratio``: the best peer's time over ours, None without a peer."""

    row: Row
    ours: Measurement
    peers: dict[str, Measurement]

    @property
    def share(self) -> float:
        return self.ours.shares["matmul"] if self.row.ceiling == "matmul" else self.ours.shares[self.row.ceiling]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=lambda name: self.peers[name].us, default=None)

    @property
    def ratio(self) -> float | None:
        return None if self.best_peer is None else self.peers[self.best_peer].us / self.ours.us

    @property
    def reached(self) -> bool | None:
        """Whether the goal is met; None if the row has none."""
        if self.row.goal is None:
            return None
        got = self.peers[self.row.against].us / self.ours.us if self.row.against else self.share
        return got >= self.row.goal

    def as_dict(self) -> dict:
        """What the last line of JSON says of this row."""
        return {
            "operator": self.row.operator,
            "shape": self.row.shape,
            "us": round(self.ours.us, 3),
            "gb_s": round(self.ours.gb_s, 1),
            "tflop_s": round(self.ours.tflop_s, 2),
            "ceiling": self.row.ceiling,
            "share": round(self.share, 4),
            "peers_us": {name: round(m.us, 3) for name, m in self.peers.items()},
            "goal": self.row.goal,
            "against": self.row.against,
            "reached": self.reached,
        }


def run(rows: list[Row], progress: Callable[[str], None] | None = None) -> list[Result]:
    """Measure or replay all rows. A peer that is not installed, or fails, is left out and said so; and so is a row that
    can only be replayed and was not recorded."""
    results = []
    for row in rows:
        options = {"inputs": row.inputs, "ceiling": row.ceiling, "method": row.method}
        try:
            ours = measure(row.id(), row.ours, row.cost, **options)
        except LabError as error:
            if is_live():
                raise
            if progress:
                progress(f"{row.id()} left out: {str(error).splitlines()[0][:160]}")
            continue
        peers = {}
        for name, fn in row.peers.items():
            try:
                peers[name] = measure(row.id(name), fn, row.cost, **options)
            except LabError as error:
                if progress and is_live():
                    progress(f"{row.id()}: peer {name} left out: {str(error).splitlines()[0][:160]}")
        results.append(Result(row, ours, peers))
        if progress:
            progress(line(results[-1]))
    return results


HEAD = f"{'operator':16}{'shape':26}{'us':>10}{'rate':>14}{'share':>14}{'best peer':>24}{'ratio':>7}  goal"


def line(result: Result) -> str:
    """One row of the table, with fixed rounding."""
    row, ours = result.row, result.ours
    rate = f"{ours.tflop_s:.0f} TFLOP/s" if row.ceiling == "matmul" else f"{ours.gb_s:.0f} GB/s"
    peer = f"{result.best_peer} {result.peers[result.best_peer].us:.1f}" if result.best_peer else "-"
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    goal = ""
    if row.goal is not None:
        what = f"{row.goal:.2f} x {row.against}" if row.against else f"{row.goal:.0%} of {row.ceiling}"
        goal = f"{what}: {'reached' if result.reached else 'missed'}"
    share = f"{result.share:.1%} {row.ceiling}"
    return f"{row.operator:16}{row.shape:26}{ours.us:10.1f}{rate:>14}{share:>14}{peer:>24}{ratio:>7}  {goal}".rstrip()


def bench(rows: list[Row]) -> int:
    """Print the table and, as the last line, all of it in JSON. 0 if every goal was reached, else 1."""
    top = ceilings()
    memory = f"copy {top.copy_gb_s:.0f} GB/s, read {top.read_gb_s:.0f} GB/s"
    print(f"ceilings: {memory}, matmul {top.matmul_tflop_s:.0f} TFLOP/s")
    print(HEAD)
    results = run(rows, print)
    missed = [r for r in results if r.reached is False]
    goals = sum(r.reached is not None for r in results)
    print(
        f"{goals - len(missed)} of {goals} goals reached; {results[0].ours.source}" if results else "nothing to measure"
    )
    document = {"source": results[0].ours.source if results else "", "ceilings": vars(top)}
    print(json.dumps(document | {"rows": [r.as_dict() for r in results]}))
    return 1 if missed else 0

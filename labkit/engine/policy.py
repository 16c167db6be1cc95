"""Who goes first. A request gets its rank once, when it is added. The smaller rank is admitted first, is preempted
last, and keeps its place in the queue after a preemption.

    fcfs      rank = order of arrival
    priority  rank = arrival step + ageing * priority          a smaller priority goes first
    shortest  rank = arrival step + ageing * (prompt tokens + max_tokens)

Ageing is in the sum itself. A request that has waited w steps more than another is ahead of it by w, whatever else
changes, so no re-sorting is needed, and the wait of the unlucky is bounded: a request of priority p can be overtaken by
one of priority q < p only if that one is added fewer than ageing * (p - q) steps after it; one of length n, by one of
length m < n only within ageing * (n - m) steps.
"""

from __future__ import annotations

from labkit.engine.request import Request
from labkit.errors import LabError

# The default ageing: steps that one unit is worth. Arrival has no unit, so it does nothing there.
POLICIES = {"fcfs": 1.0, "priority": 256.0, "shortest": 0.25}
BATCHING = ("continuous", "static", "bucketed")


def ageing_of(policy: str, ageing: float | None) -> float:
    """The ageing to use. Raises LabError for an unknown policy, or an ageing that is not positive."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise LabError(f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
    if ageing is None:
        return POLICIES[policy]
    if not isinstance(ageing, (int, float)) or isinstance(ageing, bool) or not 0 < ageing < float("inf"):
        raise LabError(f"ageing must be a positive number of steps, got {ageing!r}")
    return float(ageing)


def rank_of(request: Request, policy: str, ageing: float, step: int, order: int) -> tuple[float, int]:
    """The rank of a request added before step ``step``, as the ``order``-th. No two ranks are equal."""
    if policy == "fcfs":
        return 0.0, order
    unit = request.priority if policy == "priority" else request.limit
    return step + ageing * unit, order


def pick_batch(waiting: list[Request], size: int, bucketed: bool) -> list[Request]:
    """The next static batch: the first ``size`` of ``waiting``. bucketed: only those whose prompts fall into the same
    power of two as the first one's, so that rows padded to the longest are less than half padding."""
    if bucketed and waiting:
        bucket = (waiting[0].num_prompt - 1).bit_length()
        waiting = [r for r in waiting if (r.num_prompt - 1).bit_length() == bucket]
    return waiting[:size]

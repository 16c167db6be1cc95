"""Who is there: requests come, fork, and end. The scheduler proper, which plans steps for them, builds on this.

A request is in exactly one place: in ``waiting``, in ``running``, or finished. A finished one may keep its blocks for a
step or two, while a step in flight still writes to them.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from labkit.engine.host_pool import HostPool
from labkit.engine.options import SchedulerOptions
from labkit.engine.policy import rank_of
from labkit.engine.pool import BlockPool
from labkit.engine.request import FINISH_REASONS, FINISHED, RUNNING, SWAPPED, WAITING, Request, SamplingParams
from labkit.engine.step import Step
from labkit.errors import LabError


def by_rank(request: Request) -> tuple:
    return request.rank


def take(queue: list[Request], request: Request) -> None:
    """Remove ``request`` from a list sorted by rank that holds it. No two ranks are equal."""
    del queue[bisect_left(queue, request.rank, key=by_rank)]


class Roster:
    """The requests of a scheduler, their queues, and the pools their blocks come from. See ``Scheduler``."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.perf_counter, trace=None, **options):
        self.pool, self.clock, self.trace = pool, clock, trace
        self.options = SchedulerOptions(**options)
        self.host = HostPool(self.options.host_blocks)
        self.requests: dict[int, Request] = {}  # all that have not finished
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: deque[Step] = deque()
        self.next_index = 0
        self._eos = frozenset(self.options.eos_token_ids)
        self._order = 0
        self._ended: dict[int, Request] = {}  # finished, with blocks that a step in flight still writes to
        self._forks: dict[int, Request] = {}  # forks that wait, and hold blocks meanwhile
        self._batch: set[int] = set()  # members of the static batch

    def has_unfinished(self) -> bool:
        """Whether a request has not finished, or a step has not been committed."""
        return bool(self.requests or self.in_flight)

    def add(self, request: Request, arrival_s: float | None = None) -> Request:
        """Queue a request that arrived at ``arrival_s`` on the scheduler's clock, or now.

        Raises LabError for one that could never run, with the arithmetic, and for an id that is taken.
        """
        if request.status != WAITING:
            raise LabError(f"request {request.id} has been {request.status} before; make a new one")
        self._enqueue(request, arrival_s)
        if self.trace is not None:
            self.trace.on_add(request)
        return request

    def fork(self, parent_id: int, request_id: int, params: SamplingParams | None = None) -> Request:
        """A request that goes on from what ``parent_id`` has so far, sharing its blocks. The outputs so far count
        against its own max_tokens.

        The parent keeps the last block, partly filled; the fork gets a copy of it when it is admitted, so both tables
        are only ever added to. Raises LabError if the parent is not there or swapped out, or no token is left to make.
        """
        parent = self.requests.get(parent_id)
        if parent is None or parent.status == SWAPPED:
            raise LabError(f"request {parent_id} cannot be forked: it is {'swapped out' if parent else 'not there'}")
        params = params or parent.params
        known = parent.token_ids[: parent.num_known]
        made = len(known) - parent.num_prompt
        if made >= params.max_tokens:
            raise LabError(f"the fork starts with {made} outputs: it needs max_tokens above that")
        salts = parent.cache_salt, parent.cache_extra
        child = Request(request_id, parent.prompt_ids, params, parent.priority, 0.0, *salts)
        child.token_ids = known
        self._enqueue(child)
        # One token at least is left to compute, since the fork needs logits of its own.
        child.num_computed = min(parent.num_computed, len(known) - 1)
        child.blocks = self.pool.fork(parent.blocks[: self.pool.blocks_for(child.num_computed)])
        # Registered blocks hold committed tokens, and of n known tokens at most n - 1 are computed and committed. So
        # the fork shares every block that its parent has registered.
        child.num_hashed, child.prefix = parent.num_hashed, parent.prefix
        if child.blocks:
            self._forks[child.id] = child
        if self.trace is not None:
            self.trace.on_fork(parent_id, child)
        return child

    def _enqueue(self, request: Request, arrival_s: float | None = None) -> None:
        if request.id in self.requests or request.id in self._ended:
            raise LabError(f"there is a request {request.id} already; give each an id of its own")
        self.options.refuse(request, self.pool)
        request.arrival_s = self.clock() if arrival_s is None else arrival_s
        request.limit = request.num_prompt + request.params.max_tokens
        eos = frozenset() if request.params.ignore_eos else self._eos
        request.stop_ids = eos.union(request.params.stop_token_ids)
        request.rank = rank_of(request, self.options.policy, self.options.ageing, self.next_index, self._order)
        self._order += 1
        self.requests[request.id] = request
        insort(self.waiting, request, key=by_rank)

    def abort(self, request_id: int) -> Request | None:
        """End a request wherever it is: waiting, running, swapped out, in flight. -> it, or None if it is not there
        (it may have finished a moment ago, which is no error)."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: int, reason: str = "stop") -> Request | None:
        """End a request from outside, as ``abort`` does: "stop" (a stop string was found), "abort" or "error"."""
        if reason not in FINISH_REASONS:
            raise LabError(f"a request finishes for one of {', '.join(FINISH_REASONS)}, got {reason!r}")
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request, reason, self.clock())
        if self.trace is not None:
            self.trace.on_finish(request)
        return request

    def _finish(self, request: Request, reason: str, now: float) -> None:
        take(self.running if request.status == RUNNING else self.waiting, request)
        self._end(request, reason, now)

    def _end(self, request: Request, reason: str, now: float) -> None:
        """Mark as finished. The blocks go back, unless a step in flight still writes to them."""
        request.status, request.finish_reason, request.finish_s = FINISHED, reason, now
        del request.token_ids[request.num_known :]
        del self.requests[request.id]
        self._batch.discard(request.id)
        self._forks.pop(request.id, None)
        self.host.free(request.host_blocks)
        request.host_blocks = []
        if request.blocks and self.in_flight and request.last_step >= self.in_flight[0].index:
            self._ended[request.id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks, request.num_hashed, request.prefix = [], 0, None
        if self.trace is not None:
            self.trace.on_release(request)

    def check(self) -> None:
        """Prove that no request is lost or in two places, and no block is. Raises LabError with what is wrong."""
        there = [r.id for r in (*self.waiting, *self.running)]
        if sorted(there) != sorted(self.requests):
            raise LabError(f"requests {sorted(self.requests)} are unfinished, and {sorted(there)} wait or run")
        for queue in (self.waiting, self.running):
            if sorted(queue, key=by_rank) != queue:
                raise LabError("a queue is out of order")
        everyone = [*self.requests.values(), *self._ended.values()]
        self.pool.check([r.blocks for r in everyone])
        self.host.check([r.host_blocks for r in everyone])

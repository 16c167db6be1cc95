"""The scheduler: which tokens of which requests the next step computes, and which blocks hold them.

One rule: a request closes the gap between ``num_computed`` and ``num_tokens``, under a budget of tokens for the step;
running requests first, then waiting ones. Both lists are sorted by rank (``policy``), so the one to preempt is always
the last that runs, and no request is preempted for one that ranks behind it.

``plan`` moves a request on as if the step had run: ``num_computed`` grows, and PENDING stands in for the token to come.
``commit`` puts the token there. So the next step can be planned while one runs:

    plan 0, commit 0, plan 1, commit 1, ...         one at a time
    plan 0, plan 1, commit 0, plan 2, commit 1, ... one step ahead; the same code

If commit 0 ends a request that step 1 holds too, its chunk in step 1 is void: its token is dropped, and its blocks stay
held until step 1 is committed. A length is known ahead, so only end tokens and ``finish`` void a chunk.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable

from labkit.engine.ledger import Ledger
from labkit.engine.policy import pick_batch
from labkit.engine.pool import BlockPool
from labkit.engine.request import PENDING, RUNNING, SWAPPED, WAITING, Request
from labkit.engine.roster import by_rank, take
from labkit.engine.step import Chunk, Draft, Step
from labkit.errors import LabError

MAX_IN_FLIGHT = 2  # steps planned and not committed: the one that runs, and the one prepared meanwhile


class Scheduler(Ledger):
    """Plans steps over ``pool``. Plain Python: it holds no tensor, and it decides everything.

    options: those of ``SchedulerOptions``, which raises LabError for one out of range. clock: seconds; read once an
    event, and nothing is decided by it. trace: a ``Trace`` that records every event, or None.

    running, waiting: lists of requests, sorted by rank; preempted and swapped ones wait among the others.
    blocked: (request id, why) of the one that stood first in the queue and was not admitted by the last plan.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.perf_counter, trace=None, **options):
        super().__init__(pool, clock, trace, **options)
        self.blocked: tuple[int, str] | None = None
        self.preempted: list[tuple[int, str]] = []  # (request id, "recompute" or "swap") since the last step
        self._headroom = int(self.options.watermark * pool.total)
        if trace is not None:
            trace.on_start(self)

    def plan(self) -> Step | None:
        """The next step; None if there is nothing to compute now (commit the step in flight, or add a request).

        Raises LabError if two steps wait to be committed.
        """
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            raise LabError(f"{len(self.in_flight)} steps are in flight: commit step {self.in_flight[0].index} first")
        draft = Draft(self.next_index, self.options.max_batched_tokens, self.clock())
        self._plan_running(draft)
        self._plan_waiting(draft)
        step = None
        if draft.chunks or draft.swap_out:
            transfers = tuple(draft.copies), tuple(draft.swap_out), tuple(draft.swap_in)
            step = Step(draft.index, tuple(draft.chunks), *transfers)
            self.in_flight.append(step)
            self.next_index += 1
        if self.trace is not None and (step or draft.changed):
            self.trace.on_plan(self, step, draft)
        if step:
            self.preempted = []
        return step

    def _plan_running(self, draft: Draft) -> None:
        """Every running request gets on. Those that sample get one token each; what is left goes to unfinished prompts
        in order of rank, but for one token for each request behind: a long prompt must not hold up the others."""
        index, shift, chunks, budget = draft.index, self.pool.shift, draft.chunks, draft.budget
        new = tuple.__new__  # Chunk(...) takes twice as long, and there are 256 in a step
        behind = len(self.running)
        for request in self.running:  # preemption pops from the end of this list, never one already served
            behind -= 1
            tokens = request.token_ids
            have, start = len(tokens), request.num_computed
            if have >= request.limit:
                continue  # its last token is being sampled, and is never fed back
            end = have if have - start == 1 else min(have, start + budget - behind)
            if end > len(request.blocks) << shift:
                need = self.pool.blocks_for(end) - len(request.blocks)
                if not self._make_room(need, request, draft):
                    draft.closed = draft.closed or "a running request is short of blocks"
                    continue
                self._grow(request, need, draft)
            chunks.append(new(Chunk, (request, start, end - start, end == have)))
            request.num_computed, request.last_step = end, index
            budget -= end - start
            if end == have:
                tokens.append(PENDING)
        draft.budget = budget

    def _grow(self, request: Request, need: int, draft: Draft) -> None:
        blocks = self.pool.allocate(need)
        request.blocks += blocks
        draft.grown.append((request.id, blocks))

    def _make_room(self, need: int, request: Request, draft: Draft) -> bool:
        """Free blocks for ``request`` until ``need`` are there -> whether it can go on in this step."""
        while self.pool.num_available < need:
            last = self.running[-1]
            if self._ended or last.num_tokens >= last.limit:
                return False  # blocks come back with the next commit, which costs less than to preempt
            if self._forks:
                self._drop_fork(draft)
                continue
            victim = self.running.pop()
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _drop_fork(self, draft: Draft) -> None:
        """The fork that would be admitted last gives its shared blocks back, and will compute its tokens itself."""
        fork = max(self._forks.values(), key=by_rank)
        del self._forks[fork.id]
        self._release(fork)
        fork.num_computed = 0
        draft.changed = True

    def _preempt(self, victim: Request, draft: Draft) -> None:
        """Take a running request's blocks. It waits again, in the place its rank gives it: before all that came later.

        It may be in flight. Its token will be committed all the same, and the blocks are read by that step before a
        later one overwrites them, since steps run in order.
        """
        filled = self.pool.blocks_for(victim.num_computed)
        if self.options.preemption == "swap" and filled <= self.host.num_available:
            victim.host_blocks = self.host.allocate(filled)
            draft.swap_out += zip(victim.blocks, victim.host_blocks, strict=False)
            victim.status, how = SWAPPED, "swap"
        else:
            victim.num_computed = 0  # its outputs count as prompt from now on
            victim.status, how = WAITING, "recompute"
        self._release(victim)
        victim.num_preemptions += 1
        insort(self.waiting, victim, key=by_rank)
        self.preempted.append((victim.id, how))
        draft.closed, draft.changed = "a request was preempted in this step", True

    def _plan_waiting(self, draft: Draft) -> None:
        """Admit waiting requests in order of rank. Who cannot come in stops those behind, or it might wait for ever."""
        self.blocked = None
        while self.waiting and (request := self._next(draft)) is not None:
            why = draft.closed or self._admit(request, draft)
            if why is None:
                continue
            if why.startswith("blocks") and self._forks and not self.running and not self._ended:
                self._drop_fork(draft)  # forks that wait must not keep each other from running
                continue
            self.blocked = request.id, why
            return

    def _next(self, draft: Draft) -> Request | None:
        """The waiting request to be admitted next: the first, or in static batching the first of the batch."""
        if self.options.batching == "continuous":
            return self.waiting[0]
        if not self._batch and not self.running:
            bucketed = self.options.batching == "bucketed"
            self._batch = {r.id for r in pick_batch(self.waiting, self.options.max_num_seqs, bucketed)}
            draft.changed = True
        member = next((r for r in self.waiting if r.id in self._batch), None)
        if member is None:
            self.blocked = self.waiting[0].id, "batch: it waits for the batch that runs to end"
        return member

    def _admit(self, request: Request, draft: Draft) -> str | None:
        """Let a waiting request run and put its first chunk into the step -> None, or why it has to wait.

        It gets blocks for all the tokens it has, even if the step computes only some: admitted by the first chunk
        alone, two long prompts could each hold half the pool and preempt one another for ever.
        """
        pool, have = self.pool, request.num_tokens
        if len(self.running) >= self.options.max_num_seqs:
            return f"seats: {len(self.running)} of {self.options.max_num_seqs} are taken"
        if self.in_flight and request.last_step >= self.in_flight[0].index:
            return "sampling: its last token is not known yet"
        computed, copy = request.num_computed, False
        known = request.token_ids if not computed else ()  # a fork or a swapped request has its tokens computed
        hits, prefix = pool.match(known, (request.cache_salt, request.cache_extra))
        if request.blocks:
            copy = bool(computed & (pool.block_size - 1)) and pool.must_copy(request.blocks[-1])
        computed += len(hits) << pool.shift
        gap = have - computed
        count = min(gap, draft.budget)
        whole = self.options.chunked_prefill or gap > self.options.max_batched_tokens  # the latter after a preemption
        if count < 1 or (count < gap and not whole):
            return f"budget: it needs {1 if whole else gap} tokens, the step has {draft.budget} left"
        need = pool.blocks_for(have) - len(request.blocks) - len(hits) + copy
        # Hits that lie in the queue are counted as available, and taking them makes them unavailable.
        left = pool.num_available - pool.num_queued(hits)
        if need + (self._headroom if self.running else 0) > left:
            return f"blocks: it needs {need}, the pool has {left}"
        self._seat(request, hits, prefix, copy, draft)
        if known:
            self._count_hits(request, computed)
        end = computed + count
        draft.chunks.append(Chunk(request, computed, count, end == have))
        draft.budget -= count
        request.num_computed, request.last_step = end, draft.index
        if end == have:
            request.token_ids.append(PENDING)
        return None

    def _seat(self, request: Request, hits: list[int], prefix, copy: bool, draft: Draft) -> None:
        """Give an admitted request its blocks and its place among the running."""
        pool = self.pool
        if request.blocks:
            del self._forks[request.id]
            if self.trace is not None:
                self.trace.on_release(request)  # its table is told anew, since its last block may change
            if copy:
                request.blocks = list(request.blocks)  # an exchanged block makes another list, see InputBuilder
                draft.copies.append(pool.unshare(request.blocks, len(request.blocks) - 1))
        else:
            pool.touch(hits)  # before allocate, which would hand out the very blocks that were hit
            request.blocks, request.num_hashed, request.prefix = hits, len(hits), prefix
        request.blocks += pool.allocate(pool.blocks_for(request.num_tokens) - len(request.blocks))
        if request.host_blocks:
            # No step swaps out and in at once, so these host blocks are read before another request's are written.
            draft.swap_in += zip(request.host_blocks, request.blocks, strict=False)
            self.host.free(request.host_blocks)
            request.host_blocks = []
        draft.grown.append((request.id, list(request.blocks)))
        take(self.waiting, request)
        insort(self.running, request, key=by_rank)
        request.status = RUNNING
        if request.first_scheduled_s is None:
            request.first_scheduled_s = draft.now

    def _count_hits(self, request: Request, hits: int) -> None:
        stats = self.pool.stats
        if request.num_preemptions:
            stats.resumed_queries += request.num_tokens
            stats.resumed_hits += hits
        else:
            stats.queries += request.num_tokens
            stats.hits += hits
            request.num_cached = hits

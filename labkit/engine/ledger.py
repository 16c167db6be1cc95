"""Steps come back: tokens are entered, full blocks become findable, requests end, and a failed step takes its own.

The half of the scheduler that looks back; the half that plans builds on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.engine.request import FINISHED, RUNNING, WAITING, Request
from labkit.engine.roster import Roster, take
from labkit.engine.step import Step
from labkit.errors import LabError


class Ledger(Roster):
    """A roster whose steps are committed, in their order. See ``Scheduler``."""

    def commit(self, step: Step, tokens: Mapping[int, int] | Sequence[int] = ()) -> list[Request]:
        """Enter the tokens that ``step`` sampled -> the requests that ended with it.

        tokens: a list in the order of ``step.sampling``, or a dict by request id, which may leave out requests that
        have ended. Raises LabError, with nothing changed, if this is not the oldest step in flight or a token is
        missing.
        """
        self._check_due(step)
        values = self._values(step, tokens)
        now = self.clock()
        ended = self._commit(step, values, now)
        if self.trace is not None:
            self.trace.on_commit(now, step, values, ended)
        return ended

    def _commit(self, step: Step, values: Sequence[int | None], now: float) -> list[Request]:
        self.in_flight.popleft()
        ended: list[Request] = []
        token_of = iter(values)
        shift, index, caching = self.pool.shift, step.index, self.pool.prefix_caching
        for request, start, count, samples in step.chunks:
            token = next(token_of) if samples else None
            if request.status == FINISHED:  # the chunk is void
                if request.last_step == index and self._ended.pop(request.id, None):
                    self._release(request)
                continue
            end, reason = start + count, None
            if samples:
                request.token_ids[end] = token
                request.token_times_s.append(now)
                if token in request.stop_ids:
                    reason = "stop"
                elif end + 1 >= request.limit:
                    reason = "length"
            if caching and end >> shift > request.num_hashed and request.status == RUNNING:
                self._register(request, end >> shift)
            if reason:
                if request.status != RUNNING:  # it was preempted while this step ran
                    take(self.waiting, request)
                self._end(request, reason, now)
                ended.append(request)
        if ended:
            self.running = [r for r in self.running if r.status == RUNNING]
        return ended

    def _check_due(self, step: Step) -> None:
        if not self.in_flight or self.in_flight[0] is not step:
            due = f"step {self.in_flight[0].index}" if self.in_flight else "none"
            raise LabError(f"step {step.index} is not the one to be committed next; that is {due}")

    def _values(self, step: Step, tokens: Mapping[int, int] | Sequence[int]) -> Sequence[int | None]:
        """The tokens of the sampling chunks, in order; None for one that is void and was not given."""
        if isinstance(tokens, Mapping):
            lacking = [c.request.id for c in step.sampling if c.request.id not in tokens and not c.request.finished]
            if lacking:
                raise LabError(f"step {step.index} samples for request {lacking[0]}, and no token was given for it")
            return [tokens.get(c.request.id) for c in step.sampling]
        wanted = sum([c.samples for c in step.chunks])
        if len(tokens) != wanted:
            raise LabError(f"step {step.index} samples {wanted} tokens, got {len(tokens)}")
        return tokens

    def _register(self, request: Request, full: int) -> None:
        """Let the prefix cache find the first ``full`` blocks. They are computed, and their tokens are known."""
        size = self.pool.block_size
        for i in range(request.num_hashed, full):
            tokens = request.token_ids[i * size : (i + 1) * size]
            request.prefix = self.pool.register(request.blocks[i], tokens, request.prefix)
        request.num_hashed = full

    def fail(self, step: Step) -> list[Request]:
        """Commit a step that did not run to its end: its requests finish with reason "error", all others go on.

        What it should have written is not trusted: no block of it is registered, requests that it swapped out and forks
        that share its blocks are computed again, and what the step after it took from there ends with it.
        -> the requests that ended.
        """
        self._check_due(step)
        now = self.clock()
        hosts = {host for _, host in step.swap_out}
        blocks = {to for pairs in (step.copies, step.swap_in) for _, to in pairs}
        for request, start, count, _ in step.chunks:
            blocks.update(request.blocks[start >> self.pool.shift : self.pool.blocks_for(start + count)])
        for later in list(self.in_flight)[1:]:
            blocks.update(to for source, to in later.copies if source in blocks)
            blocks.update(to for source, to in later.swap_in if source in hosts)
        ended = [chunk.request for chunk in step.chunks if not chunk.request.finished]
        ended += [r for r in self.running if r not in ended and blocks.intersection(r.blocks)]
        for request in ended:
            self._finish(request, "error", now)
        for request in self.waiting:
            if blocks.intersection(request.blocks):
                del self._forks[request.id]
                self._release(request)
                request.num_computed = 0
            if hosts.intersection(request.host_blocks):
                self.host.free(request.host_blocks)
                request.host_blocks, request.num_computed, request.status = [], 0, WAITING
        self._commit(step, [None] * len(step.sampling), now)
        if self.trace is not None:
            self.trace.on_fail(now, step)
        return ended

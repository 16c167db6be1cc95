"""A device whose arithmetic is exact: what a slot of the cache holds names every token up to it, and nothing else.

The "keys and values" of token p are a digest of tokens 0 to p; the next token is a function of the digest. So a request
gives the same tokens as alone if and only if every slot it attends to holds its own history: a wrong hit, a block given
away too early, a copy forgotten or a position off by one shows as an error at once, on any schedule.

A step may fail: all that it should have written is BAD then, and so is whatever is computed from it until the failure
is known. No request may live on such a slot.
"""

from __future__ import annotations

from zlib import crc32

from labkit.engine.pool import BlockPool
from labkit.engine.request import PENDING, Request, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.step import Step

VOCAB, BAD = 11, "bad"


def digest(before: int | str, token: int) -> int | str:
    return BAD if before == BAD else hash((before, token, 0x5EED))


def start_of(request: Request) -> int:
    """What stands before token 0: requests of different cache domains have different histories."""
    return crc32(repr((request.cache_salt, request.cache_extra)).encode())


def next_token(state: int | str) -> int:
    return 0 if state == BAD else state % VOCAB


def alone(request: Request, eos: tuple[int, ...] = ()) -> list[int]:
    """The tokens that ``request`` has to give."""
    ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else eos)}
    state, out = start_of(request), []
    for token in request.prompt_ids:
        state = digest(state, token)
    while len(out) < request.params.max_tokens:
        out.append(next_token(state))
        if out[-1] in ends:
            break
        state = digest(state, out[-1])
    return out


class FakeDevice:
    """Runs steps in their order. ``run`` returns a step's tokens, in the order of ``step.sampling``."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0):
        self.size = block_size
        self.cache = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(host_blocks)]
        self.sampled: dict[int, int] = {}  # the newest token of each request, known here before the host knows it
        self.next_index = 0
        self.failed: set[int] = set()  # steps that failed
        self.tainted: set[tuple[int, int]] = set()  # (step, request) that read what a failed step should have written

    def run(self, step: Step, fails: bool = False) -> list[int]:
        assert step.index == self.next_index, f"step {step.index} came, {self.next_index} was due"
        self.next_index += 1
        for source, to in step.swap_out:
            self.host[to] = self.cache[source].copy()
        for source, to in step.copies:
            self.cache[to] = self.cache[source].copy()
        for source, to in step.swap_in:
            self.cache[to] = self.host[source].copy()
        if fails:
            self.failed.add(step.index)
            for held, pairs in ((self.host, step.swap_out), (self.cache, step.copies), (self.cache, step.swap_in)):
                for _, to in pairs:
                    held[to] = [BAD] * self.size
        states = []
        for chunk in step.chunks:
            request, start, end = chunk.request, chunk.start, chunk.start + chunk.count
            assert chunk.count >= 1
            tokens = request.token_ids[start:end]
            assert PENDING not in tokens[:-1]
            if tokens[-1] == PENDING:
                tokens[-1] = self.sampled[request.id]
            state = self._read(request, start)
            if fails or self._attends_to_bad(request, start):
                state = BAD
                self.tainted.add((step.index, request.id))
            for position, token in enumerate(tokens, start):
                state = digest(state, token)
                block = request.blocks[position // self.size]
                assert block, "a token is written to the null block"
                self.cache[block][position % self.size] = state
            states.append(state)
        # All reading is checked after all writing: a step's chunks run side by side.
        for chunk, state in zip(step.chunks, states, strict=True):
            assert self._read(chunk.request, chunk.start + chunk.count) == state
            if state != BAD:
                self._check_history(chunk.request, chunk.start + chunk.count)
        out = [next_token(state) for chunk, state in zip(step.chunks, states, strict=True) if chunk.samples]
        for chunk, token in zip(step.sampling, out, strict=True):
            self.sampled[chunk.request.id] = token
        return out

    def _attends_to_bad(self, request: Request, end: int) -> bool:
        return any(self.cache[request.blocks[p // self.size]][p % self.size] == BAD for p in range(end))

    def _read(self, request: Request, end: int) -> int:
        """The state after tokens [0, end), as the cache has it."""
        if not end:
            return start_of(request)
        state = self.cache[request.blocks[(end - 1) // self.size]][(end - 1) % self.size]
        assert state is not None, f"{request} attends to slot {end - 1}, which nobody wrote"
        return state

    def _check_history(self, request: Request, end: int) -> None:
        state = start_of(request)
        for position, token in enumerate(request.token_ids[:end]):
            token = self.sampled[request.id] if token == PENDING else token
            state = digest(state, token)
            held = self.cache[request.blocks[position // self.size]][position % self.size]
            assert held == state, f"{request}: slot {position} does not hold the request's own tokens"


class Bench:
    """A scheduler and its device, driven as the engine drives them. After every event everything is checked."""

    def __init__(self, num_blocks=32, block_size=4, prefix_caching=True, ahead=1, trace=None, clock=None, **options):
        self.pool = BlockPool(num_blocks, block_size, prefix_caching)
        extra = {} if clock is None else {"clock": clock}
        self.scheduler = Scheduler(self.pool, trace=trace, **extra, **options)
        self.device = FakeDevice(num_blocks, block_size, options.get("host_blocks", 0))
        self.ahead, self.flight, self.steps, self.ended, self.ids = ahead, [], [], [], 0

    def add(self, prompt, max_tokens=8, **rest) -> Request:
        params = {k: rest.pop(k) for k in ("ignore_eos", "stop_token_ids") if k in rest}
        prompt = list(prompt) if not isinstance(prompt, int) else [5] * prompt
        request = Request(self.ids, prompt, SamplingParams(max_tokens=max_tokens, **params), **rest)
        self.ids += 1
        return self.scheduler.add(request)

    def fork(self, parent: Request, **params) -> Request:
        self.ids += 1
        new = SamplingParams(**params) if params else None
        return self.scheduler.fork(parent.id, self.ids - 1, new)

    def plan(self, fails: bool = False) -> Step | None:
        """fails: the step goes wrong, which is found out where it would be committed."""
        step = self.scheduler.plan()
        self.scheduler.check()
        if step is not None:
            self.steps.append(step)
            self.flight.append((step, self.device.run(step, fails)))
            assert step.num_tokens <= self.scheduler.options.max_batched_tokens
            assert len(self.scheduler.running) <= self.scheduler.options.max_num_seqs
        return step

    def commit(self) -> list[Request]:
        step, tokens = self.flight.pop(0)
        if step.index in self.device.failed:
            ended = self.scheduler.fail(step)
            self.scheduler.check()
            assert all(request.finish_reason == "error" for request in ended)
            return ended
        for chunk in step.chunks:
            lives = not chunk.request.finished
            assert not lives or (step.index, chunk.request.id) not in self.device.tainted, f"{chunk.request} read BAD"
        ended = self.scheduler.commit(step, tokens)
        self.scheduler.check()
        for request in ended:
            assert request.output_ids == alone(request, self.scheduler.options.eos_token_ids), f"{request} is wrong"
        self.ended += ended
        return ended

    def step(self, fails: bool = False) -> Step | None:
        """Plan a step, if there is room for one in flight; commit one if ``ahead`` are in flight or none came."""
        step = self.plan(fails) if len(self.flight) < self.ahead else None
        if self.flight and (step is None or len(self.flight) >= self.ahead):
            self.commit()
        else:
            assert step is not None or not self.scheduler.requests, f"stuck: {self.scheduler.blocked}"
        return step

    def finish(self, most: int = 5000) -> list[Request]:
        """Serve until nobody is left -> all that ended."""
        for _ in range(most):
            if not self.scheduler.has_unfinished():
                assert self.pool.num_used == 0, "blocks are held and nobody is left"
                assert self.scheduler.host.num_available == self.scheduler.host.num_blocks
                return self.ended
            self.step()
        raise AssertionError(f"{len(self.scheduler.requests)} requests are unfinished after {most} steps")


def ran(step: Step) -> list[tuple[int, int, int]]:
    """(request id, start, count) of each chunk."""
    return [(c.request.id, c.start, c.count) for c in step.chunks]

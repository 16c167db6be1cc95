"""The engine's loop: scheduler, runner and texts brought together, one step at a time.

    step():  plan -> run -> tokens of the step before -> commit -> texts, ends

With ``run_ahead`` the tokens that a call takes in are those of the step before the one it has started, so a GPU has its
next step before it ends the last. Without it a call takes in what it started.

Nothing that goes wrong in a step reaches beyond it: its requests end with an error, all others go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from labkit.engine.detokenize import Detokenizer
from labkit.engine.interrupts import allowed, held
from labkit.engine.metrics import RequestMetrics
from labkit.engine.request import Request, SamplingParams
from labkit.engine.result import Logprobs, StepResult
from labkit.engine.runner import Runner
from labkit.engine.scheduler import Scheduler
from labkit.engine.step import Step
from labkit.engine.tokenizer import Tokenizer
from labkit.errors import LabError


@dataclass
class Completion:
    """What came of a request. token_ids: the new tokens; an end token, if one ended it, is the last of them, and is not
    part of text. finish_reason: "stop" (an end token or a stop string), "length", "abort", or "error". logprobs: one
    entry a token, if they were asked for."""

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: RequestMetrics
    logprobs: list[Logprobs] = field(default_factory=list)


class Live:
    """A request on its way, and what its user has of it."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request, self.text = request, Detokenizer(tokenizer, request.params.stop)
        self.fresh: list[str] = []  # text that no stream has fetched yet
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def take(self, token: int, logprobs: Logprobs | None) -> None:
        """A new token; the scheduler has entered it already, and ended the request if it was its last."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token not in self.request.stop_ids:
            piece = self.text.push(token)
            self.fresh.append(piece)  # only now: a stream in another thread may have put another list in its place

    def end(self, reason: str, error: BaseException | None = None) -> None:
        last = self.text.close()
        self.fresh.append(last)
        self.error = error
        # Last, since it is what a stream looks at. "stop": also where max_tokens' last token completes a stop string.
        self.finish_reason = "stop" if self.text.stopped else reason

    def completion(self) -> Completion:
        r = self.request
        return Completion(
            r.id,
            r.prompt_ids,
            self.token_ids,
            self.text.text,
            self.finish_reason or "",
            RequestMetrics.of(r),
            self.logprobs,
        )


class Engine:
    """Adds, steps, aborts; safe to call from several threads. ``live``: requests that have not ended, by id."""

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None, run_ahead: bool):
        self.scheduler, self.runner, self.tokenizer, self.run_ahead = scheduler, runner, tokenizer, run_ahead
        self.live: dict[int, Live] = {}
        self._flying: deque[tuple[Step, StepResult]] = deque()  # run, not committed
        self._next_id = 0
        self._lock = threading.RLock()
        self._stepping = False
        self._gone: list[int] = []  # aborted in the middle of a step

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0, salt=None) -> Live:
        """Queue a request. Raises LabError, with the reason, for one that can never run."""
        vocab = self.runner.config.vocab_size
        with self._lock, held(lambda: bool(self.live)):
            request = Request(self._next_id, prompt_ids, params, priority, cache_salt=salt)
            for name, ids in (("prompt token", request.prompt_ids), ("stop_token_ids entry", params.stop_token_ids)):
                for place, token in enumerate(ids):
                    if token >= vocab:
                        raise LabError(f"{name} {place} is {token}, outside the vocabulary 0 to {vocab - 1}")
            live = Live(request, self.tokenizer)
            self.scheduler.add(request)
            self._next_id += 1
            self.live[request.id] = live
        return live

    def abort(self, request_id: int) -> bool:
        """End a request wherever it is -> whether it was there. In the middle of a step (called by an operator, or by
        the end of a forgotten stream, which Python's garbage collection may bring at any time) the scheduler is told
        when the step has ended."""
        with self._lock, held(lambda: bool(self.live)):
            live = self.live.pop(request_id, None)
            if live is None:
                return False
            live.end("abort")
            self._gone.append(request_id)
            if not self._stepping:
                with self._alone():
                    pass
        return True

    @property
    def busy(self) -> bool:
        return bool(self.live) or self.scheduler.has_unfinished()

    def step(self) -> list[Live]:
        """Start a step and take in one -> the requests that have new tokens or have ended. [] if nothing is to do.

        Does not raise for a step that fails; each of its requests ends with the error in ``Live.error``. An interrupt
        (Ctrl-C) while the model runs ends them too, and goes on to the caller; one that comes at another time goes on
        to the caller when the step has ended. Raises LabError if called by an operator of this engine.
        """
        with self._lock, held(lambda: bool(self.live)):
            if self._stepping:
                raise LabError("a step of this engine is running: an operator of its model cannot start another")
            with self._alone():
                return self._step()

    @contextmanager
    def _alone(self):
        """Nothing else changes the scheduler meanwhile; what was asked for meanwhile is done at the end."""
        self._stepping = True
        try:
            yield
        finally:
            try:
                self._settle()
            finally:
                self._stepping = False

    def _step(self) -> list[Live]:
        touched: list[Live] = []
        while len(self._flying) > self.run_ahead:  # an interrupt ended the wait for its tokens
            touched += self._collect()
        step = self.scheduler.plan()
        if step is not None:
            try:
                with allowed():
                    result = self.runner.run(step)
            except BaseException as error:  # also an interrupt: a planned step must be committed or fail, or none can
                while self._flying:  # in the order of planning: what ran before is taken in first
                    touched += self._collect()
                touched += self._fail(step, error)
                if not isinstance(error, Exception):
                    raise
                return touched
            self._flying.append((step, result))
        elif not self._flying and self.live:
            raise RuntimeError(f"{len(self.live)} requests are left, and the scheduler plans nothing for them")
        if self._flying and (step is None or len(self._flying) > self.run_ahead):
            touched += self._collect()
        return touched

    def _settle(self) -> None:
        """Tell the scheduler of aborts. If no request is left, take in the step that was started ahead for nobody: it
        holds blocks."""
        while self._gone or (self._flying and not self.live):
            if self._gone:
                self.scheduler.abort(self._gone.pop(0))
            else:
                self._collect()

    def _collect(self) -> list[Live]:
        """Take in the tokens of the oldest step that has run."""
        step, result = self._flying[0]  # it stays there if an interrupt ends the wait
        try:
            with allowed():
                tokens, logprobs = result.token_ids(), result.logprobs()
            ended = self.scheduler.commit(step, tokens)
        except Exception as error:  # on a GPU an error may show itself only here
            self._flying.popleft()
            return self._fail(step, error)
        self._flying.popleft()
        touched = {}
        for chunk, token, logprob in zip(result.chunks, tokens, logprobs, strict=True):
            live = self.live.get(chunk.request.id)
            if live is None:  # it ended before this commit: the chunk is void
                continue
            live.take(token, logprob)
            touched[chunk.request.id] = live
            if live.text.stopped and not chunk.request.finished:
                self.scheduler.finish(chunk.request.id, "stop")
                ended.append(chunk.request)
        for request in ended:
            if (live := self.live.pop(request.id, None)) is not None:
                live.end(request.finish_reason)
        return list(touched.values())

    def _fail(self, step: Step, error: BaseException) -> list[Live]:
        touched = []
        for request in self.scheduler.fail(step):
            if (live := self.live.pop(request.id, None)) is not None:
                live.end("error", error)
                touched.append(live)
        return touched

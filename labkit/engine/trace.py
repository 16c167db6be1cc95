"""The trace: every event of a scheduler, in order, small enough to keep and enough to draw and to replay.

An event is a dict with "kind" and "t" (seconds on the scheduler's clock):

    add     id, prompt, params, priority, salt, extra
    fork    id, parent, params, blocks
    finish  id, reason                         from outside: an abort, a stop string
    plan    index (None: no step came of it), ids, starts, counts, samples; grown [[id, blocks]], released [ids],
            cache [+block kept, -block evicted]; free, used, cached; running, waiting [ids], blocked [id, why] or None;
            preempted [[id, how]], copies, swap_out, swap_in
    commit  index, tokens, ended [[id, reason]]
    fail    index
    reset                                      the prefix cache was emptied by hand

Block tables are told by their changes: ``released`` ids give up theirs, then ``grown`` ones get blocks. Whether a block
is kept for its prefix is told by ``cache``. ``TraceView`` puts it together again for figures.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

from labkit.engine.pool import BlockPool
from labkit.engine.request import Request, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.errors import LabError

FORMAT = 1


class Trace:
    """A recorder for ``Scheduler(trace=...)``. It stops after ``limit`` steps, and says so in ``truncated``.

    pool: {"num_blocks", "block_size", "prefix_caching"}; options: the scheduler's; events: as in the module.
    """

    def __init__(self, limit: int = 100_000):
        if not isinstance(limit, int) or limit < 1:
            raise LabError(f"a trace keeps at least 1 step, got limit={limit!r}")
        self.limit, self.truncated = limit, False
        self.pool: dict = {}
        self.options: dict = {}
        self.events: list[dict] = []
        self.num_steps = 0
        self._released: list[int] = []
        self._waiting: list[int] = []
        self._log: list[tuple[str, int]] = []

    # ---- what the scheduler calls

    def on_start(self, scheduler: Scheduler) -> None:
        pool = scheduler.pool
        if self.options:
            raise LabError("this trace belongs to another scheduler already; make a new Trace()")
        self.pool = {k: getattr(pool, k) for k in ("num_blocks", "block_size", "prefix_caching")}
        self.options = {**asdict(scheduler.options), "eos_token_ids": list(scheduler.options.eos_token_ids)}
        pool.log = self._log
        clock = scheduler.clock  # not the scheduler: it holds the pool, and a ring of holders outlives its last user
        pool.on_reset = lambda: self._record("reset", clock())

    def _record(self, kind: str, t: float, **rest) -> None:
        if not self.truncated:
            self.events.append({"kind": kind, "t": t, **rest})

    def on_add(self, request: Request) -> None:
        rest = {"priority": request.priority, "salt": request.cache_salt, "extra": request.cache_extra}
        who = {"id": request.id, "prompt": request.prompt_ids, "params": _params(request.params)}
        self._record("add", request.arrival_s, **who, **rest)

    def on_fork(self, parent: int, child: Request) -> None:
        who = {"id": child.id, "parent": parent, "params": _params(child.params)}
        self._record("fork", child.arrival_s, **who, blocks=list(child.blocks))

    def on_finish(self, request: Request) -> None:
        self._record("finish", request.finish_s, id=request.id, reason=request.finish_reason)

    def on_release(self, request: Request) -> None:
        self._released.append(request.id)

    def on_plan(self, scheduler: Scheduler, step, draft) -> None:
        pool, chunks = scheduler.pool, draft.chunks
        waiting = [r.id for r in scheduler.waiting]
        if waiting != self._waiting:  # else the same list serves again: a long queue changes seldom
            self._waiting = waiting
        self._record(
            "plan",
            draft.now,
            index=None if step is None else step.index,
            ids=[c[0].id for c in chunks],
            starts=[c[1] for c in chunks],
            counts=[c[2] for c in chunks],
            samples=[c[3] for c in chunks],
            grown=[[id, blocks] for id, blocks in draft.grown],
            released=self._released.copy(),
            cache=[block if kind == "keep" else -block for kind, block in self._log],
            free=pool.num_free,
            used=pool.num_used,
            cached=pool.num_cached,
            running=len(scheduler.running),
            waiting=self._waiting,
            blocked=None if scheduler.blocked is None else list(scheduler.blocked),
            preempted=[list(p) for p in scheduler.preempted],
            **{name: [list(pair) for pair in getattr(draft, name)] for name in ("copies", "swap_out", "swap_in")},
        )
        self._released.clear()
        self._log.clear()
        if not self.truncated:
            self.num_steps += step is not None
            self.truncated = self.num_steps >= self.limit

    def on_commit(self, now: float, step, values, ended: list[Request]) -> None:
        done = [[r.id, r.finish_reason] for r in ended]
        self._record("commit", now, index=step.index, tokens=list(values), ended=done)

    def on_fail(self, now: float, step) -> None:
        self._record("fail", now, index=step.index)

    # ---- reading, keeping, doing it again

    @property
    def plans(self) -> list[dict]:
        """The "plan" events that gave a step, one a step."""
        return [e for e in self.events if e["kind"] == "plan" and e["index"] is not None]

    def to_dict(self) -> dict:
        """All of it, as JSON can hold it. Raises LabError for a cache salt or extra key that it cannot."""
        kept = {"format": FORMAT, "pool": self.pool, "options": self.options, "truncated": self.truncated}
        try:
            return json.loads(json.dumps({**kept, "events": self.events}))
        except TypeError as error:
            raise LabError(f"the trace holds something that JSON cannot ({error}); use texts as cache keys") from error

    @classmethod
    def from_dict(cls, data: dict) -> Trace:
        """The trace that ``to_dict`` wrote. Raises LabError for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT or "events" not in data:
            raise LabError(f"this is no trace of format {FORMAT}: a trace is written by Trace.save")
        trace = cls()
        trace.pool, trace.options, trace.events = data["pool"], data["options"], data["events"]
        trace.truncated, trace.num_steps = data["truncated"], len(trace.plans)
        return trace

    def save(self, path: str | Path) -> None:
        """Write it as JSON; compressed, and the same bytes for the same trace, if the name ends in .gz."""
        data = json.dumps(self.to_dict(), separators=(",", ":")).encode()
        Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace that ``save`` wrote. Raises LabError for a file that is not there, or holds something else."""
        try:
            data = Path(path).read_bytes()
            return cls.from_dict(json.loads(gzip.decompress(data) if str(path).endswith(".gz") else data))
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:  # among the first are bad gzip files
            raise LabError(f"{path} cannot be read as a trace ({error})") from error

    def replay(self) -> tuple[Scheduler, Trace]:
        """Do it all again on a fresh scheduler -> it, and its trace, which equals this one.

        Raises LabError where the two part ways (the code of the scheduler has changed since), and for a truncated
        trace.
        """
        if self.truncated:
            raise LabError(f"the trace stopped recording after {self.num_steps} steps; record with a larger limit")
        again = Trace(limit=self.num_steps + 1)
        pool = BlockPool(**self.pool)
        scheduler = Scheduler(pool, clock=lambda: event["t"], trace=again, **self.options)
        for place, event in enumerate(self.events):
            _redo(scheduler, event)
            if len(again.events) <= place or _plain(again.events[place]) != _plain(event):
                made = again.events[place] if len(again.events) > place else "nothing"
                raise LabError(f"the replay parts from the trace at event {place}: {event} was recorded, {made} came")
        return scheduler, again


def _redo(scheduler: Scheduler, event: dict) -> None:
    kind = event["kind"]
    if kind == "add":
        params = SamplingParams(**event["params"])
        keys = {"cache_salt": _key(event["salt"]), "cache_extra": _key(event["extra"])}
        scheduler.add(Request(event["id"], event["prompt"], params, event["priority"], **keys))
    elif kind == "fork":
        scheduler.fork(event["parent"], event["id"], SamplingParams(**event["params"]))
    elif kind == "finish":
        scheduler.finish(event["id"], event["reason"])
    elif kind == "plan":
        scheduler.plan()
    elif kind == "reset":
        scheduler.pool.reset_prefix_cache()
    elif scheduler.in_flight:  # if not, the steps differ, and the caller says where
        step = scheduler.in_flight[0]
        scheduler.fail(step) if kind == "fail" else scheduler.commit(step, event["tokens"])


def _key(value):
    """A cache key as it was: JSON makes lists of tuples."""
    return tuple(map(_key, value)) if isinstance(value, list) else value


def _plain(event: dict) -> dict:
    return json.loads(json.dumps(event))


def _params(params: SamplingParams) -> dict:
    """Only what differs from the defaults, so that a trace stays short."""
    default = asdict(SamplingParams())
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(params).items() if v != default[k]}

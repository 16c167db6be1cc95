"""A request: the tokens it has, how many of them the KV cache holds, and what its user asked for.

    token_ids   [ prompt ...................... | outputs ...... | PENDING ... ]
                0                          num_prompt                  num_tokens
    KV cache    [ computed, or in a step that is running ][ gap ]
                0                             num_computed     num_tokens

Everything the scheduler does is to close the gap between ``num_computed`` and ``num_tokens``. In decoding the gap is 1:
the newest token has been sampled, and no step has read it yet. A fresh prompt, a prompt cut into chunks, a prefix hit
and a request that lost its blocks differ only in how wide the gap is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from labkit.errors import LabError

PENDING = -1  # stands in token_ids for a token that a running step is sampling; commit puts the token in its place
WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"
MAX_PRIORITY = 2**31
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Raises LabError for a value out of range, and for settings
    that contradict each other.

    temperature: 0 takes the most likely token; else 0.01 to 100.
    top_p: in (0, 1], the most likely tokens whose probabilities reach top_p stay. top_k: that many stay, 0 is all.
    min_p: in [0, 1), tokens below min_p times the greatest probability go. repetition_penalty: 1e-6 to 1e6, 1 is none.
    max_tokens: at least 1. stop: texts that end the request, a string or several. stop_token_ids: ids that end it.
    ignore_eos: the model's own end tokens do not end it; ``stop_token_ids`` still do.
    seed: None, or 0 to 2**63 - 1. logprobs: how many alternatives to report with each token, 0 to 20.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 32
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int = 0

    def __post_init__(self):
        number, whole = _finite, _whole
        self._check("temperature", number, lambda t: t == 0 or 0.01 <= t <= 100, "0 (greedy) or from 0.01 to 100")
        self._check("top_p", number, lambda p: 0 < p <= 1, "above 0 and at most 1")
        self._check("top_k", whole, lambda k: k >= 0, "a whole number of at least 0 (0: all tokens)")
        self._check("min_p", number, lambda p: 0 <= p < 1, "at least 0 and below 1")
        self._check("repetition_penalty", number, lambda r: 1e-6 <= r <= 1e6, "from 1e-6 to 1e6 (1: no penalty)")
        self._check("max_tokens", whole, lambda n: n >= 1, "a whole number of at least 1")
        self._check("ignore_eos", lambda b: isinstance(b, bool), lambda b: True, "True or False")
        self._check("logprobs", whole, lambda n: 0 <= n <= 20, "a whole number from 0 to 20")
        if self.seed is not None:
            self._check("seed", whole, lambda s: 0 <= s < 2**63, "None or a whole number from 0 to 2**63 - 1")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self._tuple("stop"))
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids"))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise LabError(f"stop must hold texts of at least one character, got {text!r}")
        for token in self.stop_token_ids:
            if not _whole(token) or token < 0:
                raise LabError(f"stop_token_ids must hold whole numbers of at least 0, got {token!r}")
        for name, idle in (("top_p", self.top_p == 1), ("top_k", self.top_k <= 1), ("min_p", self.min_p == 0)):
            if self.temperature == 0 and not idle:
                raise LabError(
                    f"temperature=0 takes the most likely token, so {name}={getattr(self, name)} would do nothing: "
                    f"set temperature above 0, or leave {name} out"
                )

    def _check(self, name: str, kind, holds, must: str) -> None:
        value = getattr(self, name)
        if not kind(value) or not holds(value):
            raise LabError(f"{name} must be {must}, got {value!r}")

    def _tuple(self, name: str) -> tuple:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple)):
            raise LabError(f"{name} must be a list or a tuple, got {value!r}")
        return tuple(value)


class Request:
    """One prompt on its way through the engine. Raises LabError if the prompt holds anything but token ids.

    prompt_ids, token_ids: lists of ints; token_ids is the prompt and then the outputs, and ends in one PENDING for each
    step in flight that samples for it. blocks: its block table, entry i for tokens [i * block_size, (i + 1) *
    block_size); while it runs, entries are only ever added. host_blocks: the same on the host, while it is swapped out.
    num_computed: tokens whose keys and values the cache holds once all planned steps have run.
    num_cached: prompt tokens that came from the prefix cache when it was first admitted, and were not computed.
    priority: smaller runs first (policy "priority"). cache_salt, cache_extra: requests share cached prefixes only if
    both are equal; they are two domains, so a salt "x" and an extra key "x" stay apart.
    arrival_s, first_scheduled_s, first_token_s, finish_s, token_times_s: seconds on the scheduler's clock.
    """

    __slots__ = (
        *("id", "prompt_ids", "token_ids", "num_prompt", "num_computed", "blocks", "host_blocks", "params", "priority"),
        *("cache_salt", "cache_extra", "status", "finish_reason", "error", "num_cached", "num_preemptions"),
        *("arrival_s", "first_scheduled_s", "finish_s", "token_times_s"),
        *("rank", "limit", "stop_ids", "last_step", "num_hashed", "prefix"),  # the scheduler's own
        "data",
    )

    def __init__(
        self,
        id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        cache_salt: Hashable = None,
        cache_extra: Hashable = None,
    ):
        self.id = id
        self.prompt_ids = _tokens(prompt_ids)
        self.token_ids = list(self.prompt_ids)
        self.num_prompt = len(self.prompt_ids)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.params = params if params is not None else SamplingParams()
        if not isinstance(self.params, SamplingParams):
            raise LabError(f"params must be SamplingParams(...), got {params!r:.60}")
        if not _whole(priority) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise LabError(
                f"priority must be a whole number from -2**31 to 2**31 (smaller runs first), got {priority!r:.60}"
            )
        for name, key in (("cache_salt", cache_salt), ("cache_extra", cache_extra)):
            if not _hashable(key):
                raise LabError(f"{name} must be hashable, such as a text, got {key!r:.60}")
        self.priority = priority
        self.cache_salt, self.cache_extra = cache_salt, cache_extra
        self.status = WAITING
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.num_cached = self.num_preemptions = 0
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.finish_s: float | None = None
        self.token_times_s: list[float] = []
        self.rank: tuple = (0, id)  # set once, when it is added: the smaller rank runs first and is preempted last
        self.limit = self.num_prompt + self.params.max_tokens  # tokens at which it ends
        self.stop_ids: frozenset[int] = frozenset()
        self.last_step = -1  # the newest step it is in: that step and all before it are committed, or it is in flight
        self.num_hashed = 0  # leading blocks that are registered in the prefix cache
        self.prefix: Hashable = None  # what the prefix cache calls the tokens of those blocks
        self.data = None  # whatever the data half keeps with a request; the scheduler never looks at it

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, and one for a token that is being sampled."""
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        """``num_tokens`` without those at the end that are still being sampled: one for each step in flight."""
        known = len(self.token_ids)
        while known and self.token_ids[known - 1] == PENDING:
            known -= 1
        return known

    @property
    def output_ids(self) -> list[int]:
        """The tokens made so far, without those that are still being sampled."""
        return self.token_ids[self.num_prompt : self.num_known]

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    def __repr__(self) -> str:
        made = f"{self.num_prompt} + {self.num_tokens - self.num_prompt} tokens, {self.num_computed} computed"
        return f"<Request {self.id} {self.finish_reason or self.status}: {made}, {len(self.blocks)} blocks>"


def _tokens(ids) -> list[int]:
    """A list of plain ints from a sequence, or from a tensor or array of one dimension."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise LabError(f"a prompt must be a list of token ids, got {ids!r:.60}")
    for place, token in enumerate(ids):
        if not _whole(token) or token < 0:
            raise LabError(f"prompt token {place} must be a whole number of at least 0, got {token!r:.60}")
    return list(ids)


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _hashable(key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True

"""The scheduler's settings, and the requests that no schedule could serve under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.engine.policy import BATCHING, ageing_of
from labkit.engine.pool import BlockPool
from labkit.engine.request import Request
from labkit.errors import LabError


@dataclass(frozen=True)
class SchedulerOptions:
    """How a scheduler decides. Raises LabError for a setting out of range.

    max_num_seqs: requests that run at once. max_batched_tokens: tokens a step computes at most; at least max_num_seqs,
    so that every running request gets its token in every step. max_model_len: prompt and outputs of one request.
    policy: "fcfs", "priority" or "shortest"; ageing: steps that a unit of it is worth (see ``policy``).
    chunked_prefill: a prompt may be spread over steps; else it waits for a step with room for all of it.
    preemption: "recompute" drops a victim's blocks and computes its tokens again; "swap" keeps them in ``host_blocks``
    blocks of host memory, and recomputes when those are full.
    batching: "continuous"; or, to compare with, "static" (a batch is formed when nothing runs, and the next one when
    its last member has ended) and "bucketed" (the same, of prompts of similar length).
    eos_token_ids: the model's end tokens. watermark: share of the pool that admission leaves to those that run
    already, so that a newcomer is not preempted at once.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int = 8192
    policy: str = "fcfs"
    chunked_prefill: bool = True
    preemption: str = "recompute"
    host_blocks: int = 0
    batching: str = "continuous"
    eos_token_ids: Sequence[int] = ()
    ageing: float | None = None
    watermark: float = 0.01

    def __post_init__(self):
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LabError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise LabError(
                f"max_batched_tokens={self.max_batched_tokens} must be at least max_num_seqs={self.max_num_seqs}: "
                f"each running request needs one token of every step"
            )
        check_switches(chunked_prefill=self.chunked_prefill)
        if self.preemption not in ("recompute", "swap"):
            raise LabError(f"preemption must be 'recompute' or 'swap', got {self.preemption!r}")
        if self.batching not in BATCHING:
            raise LabError(f"batching must be one of {', '.join(BATCHING)}, got {self.batching!r}")
        if not isinstance(self.host_blocks, int) or isinstance(self.host_blocks, bool) or self.host_blocks < 0:
            raise LabError(f"host_blocks must be a whole number of at least 0, got {self.host_blocks!r}")
        if (self.preemption == "swap") != bool(self.host_blocks):
            raise LabError(
                f"preemption='swap' and host_blocks of at least 1 go together, "
                f"got preemption={self.preemption!r} with host_blocks={self.host_blocks}"
            )
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise LabError(f"watermark must be a share of the pool, from 0 to below 1, got {self.watermark!r}")
        object.__setattr__(self, "ageing", ageing_of(self.policy, self.ageing))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))

    def refuse(self, request: Request, pool: BlockPool) -> None:
        """Raise LabError, with the arithmetic, if the request could never run to its end."""
        prompt, new = request.num_prompt, request.params.max_tokens
        if not prompt:
            raise LabError("the prompt is empty: it needs at least 1 token")
        if (excess := prompt + new - self.max_model_len) > 0:
            raise LabError(
                f"{prompt} prompt tokens + max_tokens {new} = {prompt + new}, and max_model_len is "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens by {excess}"
            )
        need = pool.blocks_for(prompt + new - 1)  # the last token is never fed back, so it takes no slot
        if need > pool.total:
            raise LabError(
                f"{prompt} prompt tokens + max_tokens {new} need {need} blocks of {pool.block_size}, and the pool has "
                f"{pool.total}; lower max_tokens, shorten the prompt, or give the pool more blocks"
            )
        if not self.chunked_prefill and prompt > self.max_batched_tokens:
            raise LabError(
                f"{prompt} prompt tokens exceed max_batched_tokens={self.max_batched_tokens}, and chunked_prefill is "
                f"off; turn it on, or raise max_batched_tokens"
            )


def check_switches(optional: Sequence[str] = (), **switches) -> None:
    """Raise LabError unless each is True or False, or None where its name is in ``optional``: the text "no" is true."""
    for name, value in switches.items():
        if not isinstance(value, bool) and not (value is None and name in optional):
            raise LabError(f"{name} must be True or False{', or None' * (name in optional)}, got {value!r}")

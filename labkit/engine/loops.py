"""The two greedy loops everything else is measured against: recompute the whole text for each token, or keep K and V.

For a prompt of p tokens and n new ones, the first loop runs the model over p + (p+1) + … + (p+n-1) tokens, the second
over p + n - 1. Both give the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.model import Model
from labkit.errors import LabError


@dataclass
class Generation:
    """What a loop made. seconds[i] is the time from having token i-1 to having token i on the host; seconds[0] is the
    prompt's (time to first token). finish_reason: "stop" at an end token, which is included, else "length"."""

    token_ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    finish_reason: str = "length"

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate after the first token; nan if there was only one."""
        later = self.seconds[1:]
        return len(later) / sum(later) if later else float("nan")


def check_request(config: ModelConfig, ids: Sequence[int] | torch.Tensor, max_tokens: int) -> list[int]:
    """The prompt as a list. ids: whole numbers, in a sequence or in a tensor or array of one dimension.

    Raises LabError, with the arithmetic, unless the model can take ``ids`` and then make ``max_tokens`` more.
    """
    if hasattr(ids, "tolist"):  # a tensor or an array
        if getattr(ids, "ndim", 1) != 1:
            raise LabError(f"the prompt must have one dimension, got shape {list(ids.shape)}; give one row of it")
        ids = ids.tolist()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise LabError(f"the prompt must be a list of ints, such as tokenizer.encode(text) gives, got {ids!r:.60}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise LabError(f"max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    if len(ids) == 0:
        raise LabError("the prompt is empty: it needs at least 1 token")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise LabError(f"prompt token {place} is {token!r}, outside the vocabulary 0 to {config.vocab_size - 1}")
    total = len(ids) + max_tokens
    if total > config.max_positions:
        raise LabError(
            f"{len(ids)} prompt tokens + {max_tokens} new ones = {total}, and the model has {config.max_positions} "
            f"positions; shorten the prompt or lower max_tokens by {total - config.max_positions}"
        )
    return list(ids)


def generate_recompute(
    model: Model,
    ids: Sequence[int] | torch.Tensor,
    max_tokens: int,
    ignore_eos: bool = False,
    on_token: Callable[[int], object] | None = None,
) -> Generation:
    """Greedy decoding that forgets everything: each new token runs the model over the whole text so far.

    on_token is called with each token; its time is not counted. Raises LabError as ``check_request`` does.
    """
    ids = check_request(model.config, ids, max_tokens)
    sequence = torch.empty(len(ids) + max_tokens, dtype=torch.int64, device=model.device)
    sequence[: len(ids)] = torch.tensor(ids)
    positions = torch.arange(len(sequence), device=model.device)
    length = len(ids)

    def step() -> torch.Tensor:
        nonlocal length
        token = model.forward(sequence[None, :length], positions[:length]).argmax(-1)
        sequence[length] = token[0]
        length += 1
        return token

    return _greedy(step, model.config, max_tokens, ignore_eos, on_token)


def generate_cached(
    model: Model,
    ids: Sequence[int] | torch.Tensor,
    max_tokens: int,
    ignore_eos: bool = False,
    on_token: Callable[[int], object] | None = None,
) -> Generation:
    """Greedy decoding with a KV cache: the prompt in one step, then one token a step.

    on_token is called with each token; its time is not counted. Raises LabError as ``check_request`` does.
    """
    ids = check_request(model.config, ids, max_tokens)
    total = len(ids) + max_tokens - 1  # the last token is never fed back, so it needs no slot
    cache = model.new_cache(batch=1, max_len=total)
    positions = torch.arange(total, device=model.device)
    pending = torch.tensor([ids], device=model.device)  # tokens the cache does not hold yet

    def step() -> torch.Tensor:
        nonlocal pending
        # Invariant: cache.length + pending tokens == the text so far, so the pending ones begin at cache.length.
        token = model.forward(pending, positions[cache.length : cache.length + pending.shape[1]], cache).argmax(-1)
        pending = token[None]
        return token

    return _greedy(step, model.config, max_tokens, ignore_eos, on_token)


def _greedy(step: Callable[[], torch.Tensor], config: ModelConfig, max_tokens: int, ignore_eos: bool, on_token):
    """Call ``step`` for each token. Bringing the token to the host waits for the GPU, so no other wait is needed."""
    result = Generation()
    while len(result.token_ids) < max_tokens:
        start = time.perf_counter()
        token = int(step())
        result.seconds.append(time.perf_counter() - start)
        result.token_ids.append(token)
        if on_token is not None:
            on_token(token)
        if token in config.eos_token_ids and not ignore_eos:
            result.finish_reason = "stop"
            break
    return result

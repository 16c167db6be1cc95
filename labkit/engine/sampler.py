"""Logits to tokens, for a batch whose requests all want something different.

    greedy        argmax: one call for the whole batch, nothing waits for the device
    else          repetition penalty; logits / temperature; top-k; top-p of what top-k leaves; min-p; one draw

A draw is the inverse of the cumulative distribution at one number u in [0, 1). u comes from a hash of the request's
seed and of how many tokens it has made, so a request gets the same tokens whatever is in the batch around it, and again
after it was preempted; there is no generator whose state must travel. The distribution's sum is fp64, because in fp32
the tail of a vocabulary of 100 000 is lost in rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from labkit.engine.inputs import to_device
from labkit.engine.request import SamplingParams
from labkit.errors import LabError

_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele et al. 2014): each of 64 bits in moves about half of the 64 bits out."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int) -> float:
    """Number ``index`` of the stream ``seed``, in [0, 1), 53 bits. Neighbouring seeds have unrelated streams."""
    return (_mix((_mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def derive_seed(seed: int, request_id: int) -> int:
    """The seed of a request that brought none: another for each request, the same in each run."""
    return _mix((seed * _GOLDEN + request_id) & _MASK)


def is_plain(params: SamplingParams) -> bool:
    """Whether the token is the argmax of the logits and nothing else is asked for."""
    return params.temperature == 0 and params.repetition_penalty == 1 and not params.logprobs


@dataclass(frozen=True)
class Draw:
    """What one row of logits is for. index: tokens the request has made so far."""

    params: SamplingParams
    seed: int = 0
    index: int = 0


@dataclass
class Sampled:
    """tokens: int64 [m]. If any row asked for log-probabilities: chosen fp32 [m], and the best fp32 and int64 [m, n],
    n the most that any row asked for, of the model's own distribution (before penalty and temperature)."""

    tokens: torch.Tensor
    chosen: torch.Tensor | None = None
    best: torch.Tensor | None = None
    best_ids: torch.Tensor | None = None
    wanted: list[int] = field(default_factory=list)


def sample(logits: torch.Tensor, draws: Sequence[Draw], seen: torch.Tensor | None = None) -> Sampled:
    """One token a row. logits: [m, vocab], unchanged; seen: bool [r, vocab], the tokens that its text holds already for
    each of the r rows that have a repetition penalty, in their order.

    Raises LabError if logits has not that shape. A row that holds NaN gets some token of the vocabulary, and its
    neighbours get theirs: what one request overflows must not end the step of all.
    """
    if logits.ndim != 2 or len(logits) != len(draws):
        raise LabError(f"logits must be [{len(draws)}, vocab], a row for each request, got {list(logits.shape)}")
    if all(is_plain(draw.params) for draw in draws):
        return Sampled(logits.argmax(-1))
    raw = logits.float()
    changed = raw
    if any(draw.params.repetition_penalty != 1 for draw in draws):
        changed = _penalised(raw, draws, seen)
    tokens = changed.argmax(-1)
    warm = [i for i, draw in enumerate(draws) if draw.params.temperature > 0]
    # How a row is drawn depends on that row alone: a sort that only its neighbour needs would change its order.
    for sort in (False, True):
        some = [i for i in warm if _needs_sort(draws[i].params, raw.shape[1]) == sort]
        if some:
            index = to_device(some, torch.int64, logits.device)
            tokens[index] = _draw(changed[index], [draws[i] for i in some], sort)
    wanted = [draw.params.logprobs for draw in draws]
    if not any(wanted):
        return Sampled(tokens)
    log_p = torch.log_softmax(raw, -1)
    best, ids = log_p.topk(min(max(wanted), log_p.shape[1]), -1)
    return Sampled(tokens, log_p.gather(1, tokens[:, None])[:, 0], best, ids, wanted)


def _needs_sort(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1


def _top_k(params: SamplingParams, vocab: int) -> int:
    return min(params.top_k or vocab, vocab)  # an int may be larger than any float


def _penalised(raw: torch.Tensor, draws: Sequence[Draw], seen: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that are in the text already: divided by the penalty if positive, else multiplied by it."""
    rows = [i for i, draw in enumerate(draws) if draw.params.repetition_penalty != 1]
    index = to_device(rows, torch.int64, raw.device)
    penalty = to_device([draws[i].params.repetition_penalty for i in rows], torch.float32, raw.device)[:, None]
    own = raw[index]
    own = torch.where(seen, torch.where(own > 0, own / penalty, own * penalty), own)
    return raw.index_copy(0, index, own)


def _draw(logits: torch.Tensor, draws: Sequence[Draw], sort: bool) -> torch.Tensor:
    """logits: fp32 [r, vocab] of rows with a temperature -> int64 [r]."""
    vocab = logits.shape[1]
    settings = [
        (d.params.temperature, _top_k(d.params, vocab), d.params.top_p, d.params.min_p, uniform(d.seed, d.index))
        for d in draws
    ]
    temperature, top_k, top_p, min_p, u = to_device(settings, torch.float64, logits.device)[:, :, None].unbind(1)
    order = None
    if sort:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(logits / temperature.float(), -1).double()
    if order is not None:
        p = p * (torch.arange(vocab, device=p.device) < top_k)
        before = p.cumsum(-1) - p  # the token that crosses top_p stays: what lies before it has not reached top_p
        p = p * (before < top_p * p.sum(-1, keepdim=True))
    if any(d.params.min_p for d in draws):
        p = p * (p >= min_p * p.amax(-1, keepdim=True))
    total = p.cumsum(-1)
    # Strictly above u * sum: a token of probability 0 adds nothing to the sum and so is never the first above it.
    end = total[:, -1:]
    target = torch.minimum(u * end, torch.nextafter(end, torch.zeros_like(end)))
    place = torch.searchsorted(total, target, right=True).clamp_(max=vocab - 1)  # NaN is above nothing
    return (place if order is None else order.gather(1, place))[:, 0]

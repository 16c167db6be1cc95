"""How much a quantised model has lost: perplexity, KL divergence, agreement of the next token; each with an interval.

Text is cut into windows that the model reads each from an empty context, and the windows are what is counted as
independent. Tokens are not: whether one is easy depends on the text around it, so an interval from the spread of single
tokens would be too narrow. Means over windows get a t interval and no bootstrap: with some ten windows, resampling
underestimates the spread and knows nothing of the t distribution's wider tails.

Two models that read the same text share its difficulty. Whether one is better is a question for ``compare``, which
takes differences window by window, and not for two intervals side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.errors import LabError

Z = 1.959963984540054  # 97.5 % of a normal distribution lie below
ROWS = 64  # positions whose distributions over the vocabulary are compared at a time


@dataclass(frozen=True)
class Estimate:
    """value, and the 95 % interval [low, high] from n independent units (windows or tasks; see each function)."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g}, n = {self.n})"


def t_quantile(df: int) -> float:
    """What 97.5 % of Student's t with df >= 1 degrees of freedom lie below, to 0.001.

    The series in 1 / df of Abramowitz and Stegun, 26.7.5; for few degrees of freedom, where it is poor, the values.
    """
    if df <= 4:
        return (12.7062, 4.3027, 3.1824, 2.7764)[df - 1]
    z = Z
    return (
        z
        + (z**3 + z) / 4 / df
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / df**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / df**3
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / df**4
    )


def mean(values: torch.Tensor) -> Estimate:
    """values: [n], independent -> their mean with a t interval, which is infinite for n = 1."""
    values = values.double()
    n, middle = len(values), float(values.mean())
    half = math.inf if n == 1 else t_quantile(n - 1) * float(values.std()) / math.sqrt(n)
    return Estimate(middle, middle - half, middle + half, n)


def wilson(share: float, n: float, quantile: float = Z) -> tuple[float, float]:
    """Wilson's interval for a share seen in n trials: within [0, 1], and of some width even for a share of 0 or 1."""
    weight = quantile**2 / n
    middle = (share + weight / 2) / (1 + weight)
    half = quantile / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def token_losses(model, tokens: torch.Tensor, window: int = 512) -> torch.Tensor:
    """-ln p of each token given those before it in its window: fp32 [windows, window - 1], on the CPU.

    tokens: int64 of any shape, read as one sequence, row after row; what does not fill a window is left out.
    Holds the logits of one window at a time. Raises LabError for tokens that fill no window or that the model cannot
    read, and if a loss is NaN or infinite.
    """
    losses = []
    for i, ids in enumerate(windows(model, tokens, window)):
        losses.append(F.cross_entropy(logits(model, ids)[:-1], ids[1:], reduction="none").cpu())
        if not torch.isfinite(losses[-1]).all():
            raise LabError(f"the model's loss is NaN or infinite in window {i}: are its weights damaged?")
    return torch.stack(losses)


def perplexity(model, tokens: torch.Tensor, window: int = 512) -> Estimate:
    """exp of the mean loss of a token. The interval is exp of the t interval over windows, so it is not symmetric.

    Arguments and errors as for ``token_losses``; n counts windows.
    """
    return as_perplexity(token_losses(model, tokens, window))


def as_perplexity(losses: torch.Tensor) -> Estimate:
    """losses: [windows, k], as from ``token_losses`` -> the perplexity they amount to."""
    loss = mean(losses.double().mean(1))
    return Estimate(_exp(loss.value), _exp(loss.low), _exp(loss.high), loss.n)


def compare(losses_a: torch.Tensor, losses_b: torch.Tensor) -> Estimate:
    """Mean loss of a minus that of b in nats a token, paired by window: below 0, a is better. exp of it is the ratio of
    their perplexities.

    Raises LabError unless both are [windows, k], of the same text.
    """
    if losses_a.dim() != 2 or losses_a.shape != losses_b.shape:
        raise LabError(
            f"losses of the same windows are compared, got {list(losses_a.shape)} and {list(losses_b.shape)}; take "
            "both from token_losses with the same tokens and window"
        )
    return mean((losses_a.double() - losses_b.double()).mean(1))


def kl(model, other, tokens: torch.Tensor, window: int = 512) -> Estimate:
    """KL(model || other) of the next token's distribution, mean over positions, in nats; t interval over windows.

    It is 0 only if both give every token the same probability, and grows before perplexity does, whose gains and losses
    cancel. Arguments and errors as for ``token_losses``. Holds two windows of logits at a time.
    """
    means = []
    for mine, theirs in _both(model, other, tokens, window):
        parts = [_kl(mine[i : i + ROWS], theirs[i : i + ROWS]) for i in range(0, len(mine), ROWS)]
        means.append(torch.cat(parts).double().mean().cpu())
        del mine, theirs  # or they would stay while the next window's are made
    found = mean(torch.stack(means))
    if not math.isfinite(found.value):
        raise LabError("the divergence is NaN or infinite: are the weights of one of the models damaged?")
    return Estimate(max(0.0, found.value), max(0.0, found.low), found.high, found.n)


def agreement(model, other, tokens: torch.Tensor, window: int = 512) -> Estimate:
    """Share of positions at which both models hold the same token for the likeliest, each given the same text so far.

    This is greedy agreement of single steps: in free generation the texts part at the first disagreement. Wilson's
    interval for as many independent positions as the spread between windows allows (Kish's design effect, at least 1);
    of one window, which tells nothing of that spread, it is 0 to 1. n counts windows. Arguments and errors as for
    ``token_losses``.
    """
    shares = []
    for mine, theirs in _both(model, other, tokens, window):
        shares.append((mine.argmax(-1) == theirs.argmax(-1)).double().mean().cpu())
        del mine, theirs
    shares = torch.stack(shares)
    share, count = float(shares.mean()), len(shares)
    if count == 1:
        return Estimate(share, 0.0, 1.0, count)
    effect = 1.0
    if 0 < share < 1:  # how much more windows differ than they would if positions were independent
        effect = max(1.0, float(shares.var()) * window / (share * (1 - share)))
    low, high = wilson(share, count * window / effect, t_quantile(count - 1))
    return Estimate(share, low, high, count)


def windows(model, tokens: torch.Tensor, window: int) -> Iterator[torch.Tensor]:
    """int64 [window] each, on the model's device. Raises LabError as ``token_losses`` does, at the first one."""
    if window < 2 or window > model.config.max_positions:
        raise LabError(f"a window has 2 to {model.config.max_positions} tokens, the model's positions; got {window}")
    if tokens.dtype != torch.int64:
        raise LabError(f"tokens are int64, got {tokens.dtype}")
    flat = tokens.reshape(-1)
    if len(flat) < window:
        raise LabError(
            f"there are {len(flat)} tokens and one window needs {window}: give more text or a smaller window"
        )
    vocabulary = model.config.vocab_size
    if not 0 <= int(flat.min()) <= int(flat.max()) < vocabulary:
        raise LabError(
            f"tokens run from {int(flat.min())} to {int(flat.max())} and the model knows {vocabulary}: were they made "
            "by another tokenizer?"
        )
    for i in range(len(flat) // window):
        yield flat[i * window : (i + 1) * window].to(model.device)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    """ids: int64 [n] -> fp32 [n, vocab], after each token, from an empty context."""
    return model.forward(ids[None], torch.arange(len(ids), device=ids.device), all_logits=True)[0]


def _both(model, other, tokens: torch.Tensor, window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both models' logits [window, vocab], window by window, on the first one's device."""
    if model.config.vocab_size != other.config.vocab_size:
        raise LabError(
            f"the models' vocabularies differ, {model.config.vocab_size} and {other.config.vocab_size} tokens: their "
            "distributions cannot be compared"
        )
    for ids in windows(model, tokens, window):
        yield logits(model, ids), logits(other, ids.to(other.device)).to(model.device)


def _kl(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    mine, theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
    return (mine.exp() * (mine - theirs)).sum(-1)


def _exp(x: float) -> float:
    """math.exp, infinite where that would overflow: the upper end of an interval from two windows can be far out."""
    return math.exp(x) if x < 700 else math.inf

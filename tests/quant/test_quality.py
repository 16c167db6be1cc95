"""Quality measures against values known in closed form, what their intervals cover, memory, and refusals."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from labkit.engine import ModelConfig, load
from labkit.errors import LabError
from labkit.quant.blocks import copy_of
from labkit.quant.calibrate import builtin, calibration_tokens
from labkit.quant.formats import Format
from labkit.quant.quality import (
    agreement,
    as_perplexity,
    compare,
    kl,
    mean,
    perplexity,
    t_quantile,
    token_losses,
    wilson,
)
from labkit.quant.rtn import rtn

SHAPE = dict(
    architecture="llama", vocab_size=90, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_positions=128,
)  # fmt: skip


class Fixed:
    """A model whose logits are a function of the ids alone: [n] -> [n, vocab]."""

    device = torch.device("cpu")

    def __init__(self, rule, vocab=4, positions=64):
        self.rule, self.alive, self.most = rule, [], 0
        self.config = type("Config", (), {"vocab_size": vocab, "max_positions": positions})

    def forward(self, ids, positions, cache=None, all_logits=False):
        assert all_logits and ids.shape[0] == 1 and positions.tolist() == list(range(ids.shape[1]))
        out = self.rule(ids[0]).float()[None].clone()
        self.alive.append(weakref.ref(out))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return out


def always(*shares):
    row = torch.tensor(shares).log()
    return Fixed(lambda ids: row.expand(len(ids), -1), vocab=len(shares))


@pytest.fixture(scope="module")
def tiny():
    return load(ModelConfig(**SHAPE), seed=3)[0]


def draw(n, vocab=90, seed=0):
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def test_losses_are_those_of_each_next_token_in_its_window(tiny):
    tokens = draw(100)
    losses = token_losses(tiny, tokens, 32)
    assert losses.shape == (3, 31) and losses.dtype == torch.float32  # 4 tokens fill no window
    for i in range(3):
        ids = tokens[32 * i : 32 * i + 32]
        for j in (0, 7, 30):  # the prefix alone, so that no position can see what it predicts
            logits = tiny.forward(ids[None, : j + 1], torch.arange(j + 1))[0]
            assert losses[i, j].item() == pytest.approx(-logits.log_softmax(-1)[ids[j + 1]].item(), abs=1e-4)
    assert torch.equal(token_losses(tiny, tokens[:96].view(2, 48), 32), losses)  # read as one sequence
    changed = tokens.clone()
    changed[:32] = draw(32, seed=1)
    assert torch.equal(token_losses(tiny, changed, 32)[1:], losses[1:]), "a window must not see the one before it"


def test_perplexity_of_known_distributions():
    even = perplexity(always(0.25, 0.25, 0.25, 0.25), draw(64, 4), 16)
    assert (even.value, even.low, even.high, even.n) == (*[pytest.approx(4, rel=1e-5)] * 3, 4)
    tokens = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1])  # predicted: 0 0 1 and 1 1 1
    found = perplexity(always(0.5, 0.25, 0.25), tokens, 4)
    losses = [math.log(2 * 2 * 4) / 3, math.log(4)]
    assert found.value == pytest.approx(math.exp(sum(losses) / 2), rel=1e-6)
    half = 12.7062 * abs(losses[0] - losses[1]) / 2  # two windows: t with 1 degree of freedom, std / sqrt(2)
    assert found.low == pytest.approx(found.value / math.exp(half), rel=1e-4)
    assert found.high == pytest.approx(found.value * math.exp(half), rel=1e-4)
    one = perplexity(always(0.5, 0.25, 0.25), tokens, 8)
    assert (one.low, one.high, one.n) == (0, math.inf, 1)  # one window says nothing of the spread


def test_t_quantiles():
    table = {1: 12.7062, 2: 4.3027, 4: 2.7764, 5: 2.5706, 7: 2.3646, 10: 2.2281, 12: 2.1788, 30: 2.0423, 120: 1.9799}
    for df, value in table.items():
        assert t_quantile(df) == pytest.approx(value, abs=1e-3)


def test_intervals_cover_the_truth_although_tokens_of_a_window_are_alike():
    """Windows that share a difficulty. 95 % of the intervals must hold the true mean; those that take tokens for
    independent hold it far less often, and so do percentiles of a bootstrap over few windows."""
    generator = torch.Generator().manual_seed(0)
    covered = naive = resampled = 0
    for _ in range(600):
        losses = 3 + 0.3 * torch.randn(8, 1, generator=generator) + torch.randn(8, 100, generator=generator)
        found = as_perplexity(losses)
        covered += found.low <= math.exp(3) <= found.high
        every = mean(losses.flatten())
        naive += every.low <= 3 <= every.high
        again = losses.mean(1)[torch.randint(8, (300, 8), generator=generator)].mean(1)
        resampled += again.quantile(0.025) <= 3 <= again.quantile(0.975)
    assert 0.925 <= covered / 600 <= 0.975 and naive / 600 < 0.6 and resampled / 600 < 0.92


def test_wilson_intervals():
    assert wilson(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.9, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_divergence_of_known_distributions():
    p, q = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
    want = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = kl(always(*p), always(*q), draw(32, 3), 8)
    assert found.value == pytest.approx(want, rel=1e-5) and found.n == 4
    skew = kl(always(0.9, 0.05, 0.05), always(1 / 3, 1 / 3, 1 / 3), draw(32, 3), 8).value
    back = kl(always(1 / 3, 1 / 3, 1 / 3), always(0.9, 0.05, 0.05), draw(32, 3), 8).value
    assert skew == pytest.approx(0.9 * math.log(2.7) + 0.1 * math.log(0.15), rel=1e-5) != pytest.approx(back, rel=0.1)


def test_a_model_does_not_differ_from_itself_and_a_rounded_one_does(tiny):
    tokens = draw(256, seed=2)
    same = kl(tiny, copy_of(tiny), tokens, 64)
    assert same.value == same.low == same.high == 0
    assert agreement(tiny, copy_of(tiny), tokens, 64).value == 1
    found = []
    for bits in (8, 4, 2):
        other = copy_of(tiny)
        rtn(other, Format(bits, 32))
        found.append((kl(tiny, other, tokens, 64), agreement(tiny, other, tokens, 64).value))
    (kl8, a8), (kl4, a4), (kl2, a2) = found
    assert 0 < kl8.value < kl4.value / 20 < kl4.value < kl2.value / 4 and kl8.high < kl4.low
    assert 1 >= a8 >= a4 > a2 > 0


def disagreeing(where):
    """Two models: one holds token 1 for likeliest, the other token 2 where ``where``, else 1 as well."""

    def logits(twos):
        return torch.nn.functional.one_hot(1 + twos.long(), 4)

    return Fixed(lambda ids: logits(torch.zeros_like(ids))), Fixed(lambda ids: logits(where(ids)))


def test_agreement_counts_positions_and_heeds_that_they_come_in_clusters():
    tokens = torch.zeros(32, 16, dtype=torch.int64)
    tokens[:, :4] = 3  # a quarter of each window
    spread = agreement(*disagreeing(lambda ids: ids == 3), tokens, 16)
    tokens[:] = 0
    tokens[:8] = 3  # all of a quarter of the windows
    clustered = agreement(*disagreeing(lambda ids: ids == 3), tokens, 16)
    assert spread.value == clustered.value == 0.75 and spread.n == clustered.n == 32
    width, wide = (e.high - e.low for e in (spread, clustered))
    assert wide == pytest.approx(width * 4, rel=0.15)  # the sixteen positions of a window count as one
    whole = agreement(*disagreeing(lambda ids: ids == 9), tokens, 16)
    assert whole.value == whole.high == 1 and 0.98 < whole.low < 1  # never seen is not never
    alone = agreement(*disagreeing(lambda ids: ids == 3), tokens[:1], 16)
    assert (alone.low, alone.high) == (0, 1), "one window tells nothing of how windows differ"


def test_a_perplexity_beyond_all_numbers_is_infinite():
    found = as_perplexity(torch.full((2, 5), 800.0))
    assert found.value == found.low == found.high == math.inf


def test_pairs_tell_apart_what_intervals_side_by_side_cannot():
    generator = torch.Generator().manual_seed(4)
    base = 3 + 0.5 * torch.randn(10, 1, generator=generator) + 0.1 * torch.randn(10, 63, generator=generator)
    worse = base + 0.05 + 0.02 * torch.randn(10, 63, generator=generator)
    a, b = as_perplexity(base), as_perplexity(worse)
    assert a.low < b.value < a.high
    found = compare(worse, base)
    assert 0 < found.low < 0.05 < found.high + 0.01 and found.n == 10
    assert compare(base, worse).value == -found.value
    assert math.exp(found.value) == pytest.approx(b.value / a.value, rel=1e-6)
    with pytest.raises(LabError, match=r"the same windows are compared, got \[10, 63\] and \[9, 63\]; take both"):
        compare(base, worse[:9])


def test_one_window_of_logits_is_held_at_a_time():
    tokens = draw(160, 4)
    for measure, most in ((kl, 1), (agreement, 1)):
        mine, theirs = always(0.4, 0.3, 0.2, 0.1), always(0.1, 0.2, 0.3, 0.4)
        measure(mine, theirs, tokens, 16)
        assert (mine.most, theirs.most) == (most, most) and len(mine.alive) == 10
    model = always(0.4, 0.3, 0.2, 0.1)
    token_losses(model, tokens, 16)
    assert model.most == 1 and len(model.alive) == 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: token_losses(m, draw(20), 32), r"there are 20 tokens and one window needs 32: give more text or a"),
        (lambda m: token_losses(m, draw(20), 1), r"a window has 2 to 128 tokens, the model's positions; got 1"),
        (lambda m: perplexity(m, draw(600)), r"a window has 2 to 128 tokens, the model's positions; got 512"),
        (lambda m: token_losses(m, draw(40).int(), 32), r"tokens are int64, got torch\.int32"),
        (lambda m: token_losses(m, draw(40) + 60, 32), r"and the model knows 90: were they made by another tokenizer"),
        (lambda m: kl(m, always(0.5, 0.5), draw(40), 32), r"vocabularies differ, 90 and 2 tokens"),
        (lambda m: agreement(m, always(0.5, 0.5), draw(40), 32), r"vocabularies differ, 90 and 2 tokens"),
    ],
)
def test_refusals(tiny, call, message):
    with pytest.raises(LabError, match=message):
        call(tiny)


def test_damaged_weights_are_named_and_not_averaged(tiny):
    broken = copy_of(tiny)
    broken.weights.layers[1].down[0, 0] = float("nan")
    with pytest.raises(LabError, match="the model's loss is NaN or infinite in window 0"):
        perplexity(broken, draw(64), 32)
    with pytest.raises(LabError, match="divergence is NaN or infinite"):
        kl(tiny, broken, draw(64), 32)


@pytest.mark.model
def test_the_real_model_reads_the_projects_texts_and_three_bits_hurt_it():
    model, tokenizer = load("smollm2-135m", progress=None)
    rounded = copy_of(model)
    rtn(rounded, Format(3, 64))
    for domain, low, high in (("prose", 40, 100), ("business", 8, 35)):
        tokens = calibration_tokens(builtin(domain, "evaluation"), tokenizer, samples=3, length=256)
        losses, worse = (token_losses(m, tokens, 256) for m in (model, rounded))
        assert low < as_perplexity(losses).value < high
        assert compare(worse, losses).low > 0
    found, same = kl(model, rounded, tokens, 256), agreement(model, rounded, tokens, 256)
    assert found.low > 0.05 and 0.2 < same.value < 0.95

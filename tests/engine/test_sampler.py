"""The sampler: which tokens may come, how often each comes, and that neighbours in the batch change nothing."""

import numpy as np
import pytest
import torch

from labkit.engine.request import SamplingParams
from labkit.engine.sampler import Draw, derive_seed, sample, uniform
from labkit.errors import LabError

VOCAB, MANY = 12, 20_000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


def frequencies(params: SamplingParams, logits=LOGITS, seed=1) -> np.ndarray:
    """How often each token comes in MANY draws of one request."""
    rows = logits.expand(MANY, -1)
    tokens = sample(rows, [Draw(params, seed, i) for i in range(MANY)]).tokens
    return np.bincount(tokens.numpy(), minlength=len(logits))


def expected(logits=LOGITS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution by the definitions, token by token."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = list(order[: top_k or len(p)])
    of_top_k, reached, nucleus = p[kept].sum(), 0.0, []
    for token in kept:
        if reached >= top_p * of_top_k:
            break
        nucleus.append(token)
        reached += p[token]
    out = np.zeros_like(p)
    for token in nucleus:
        out[token] = p[token] if p[token] >= min_p * p.max() else 0
    return out / out.sum()


def assert_drawn_from(counts: np.ndarray, p: np.ndarray) -> None:
    """Pearson's chi-square. The bound is about that of 1 in 10 000 (Wilson and Hilferty); seeds are fixed."""
    assert not counts[p == 0].any(), "a token of probability 0 came"
    some = p > 0
    freedom = int(some.sum()) - 1
    if not freedom:
        return
    statistic = ((counts[some] - MANY * p[some]) ** 2 / (MANY * p[some])).sum()
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} of {freedom} degrees of freedom, bound {bound:.1f}"


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=3.0),
        dict(temperature=1.0, top_k=4),
        dict(temperature=1.0, top_k=1),
        dict(temperature=1.0, top_k=500),
        dict(temperature=1.0, top_p=0.7),
        dict(temperature=1.0, top_p=1e-6),
        dict(temperature=1.0, min_p=0.2),
        dict(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1),
        dict(temperature=0.8, top_k=3, top_p=0.9),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_definition_says(settings):
    assert_drawn_from(frequencies(SamplingParams(**settings)), expected(**settings))


def test_the_chi_square_test_can_fail():
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(frequencies(SamplingParams(temperature=1.0)), expected(temperature=1.05))


def test_top_p_keeps_the_token_that_crosses_the_bound():
    """0.4 alone does not reach 0.6; 0.4 + 0.3 does."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.6), logits))) == {2, 3}
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.95), logits))) == {0, 1, 2, 3}


def test_top_p_counts_within_what_top_k_leaves():
    """Of 0.4 and 0.3 the first holds 0.57: enough for top_p = 0.55, though it is 0.4 of the whole."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_k=2, top_p=0.55), logits))) == {3}


def test_min_p_keeps_what_reaches_its_share_of_the_likeliest():
    logits = torch.tensor([1.0, 0.503, 0.497]).log()
    assert set(np.flatnonzero(frequencies(SamplingParams(temperature=1.0, min_p=0.5), logits))) == {0, 1}


def test_each_row_has_its_own_temperature():
    """One row at 0.01, one at 100: broadcast the wrong way, they would mix."""
    rows = LOGITS.expand(2 * MANY // 10, -1)
    cold, hot = SamplingParams(temperature=0.01), SamplingParams(temperature=100.0)
    tokens = sample(rows, [Draw((cold, hot)[i % 2], 3, i) for i in range(len(rows))]).tokens
    assert set(tokens[::2].tolist()) == {int(LOGITS.argmax())}
    assert len(set(tokens[1::2].tolist())) == VOCAB


def test_greedy_takes_the_first_of_the_greatest():
    rows = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]])
    assert sample(rows, [Draw(SamplingParams())] * 2).tokens.tolist() == [1, 0]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=0.9, repetition_penalty=0.8, logprobs=3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4),
    SamplingParams(logprobs=2),
]


def test_a_row_gets_the_same_token_whatever_is_around_it():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 1000, generator=generator)
    texts = torch.rand(64, 1000, generator=generator) < 0.1
    draws = [Draw(MIXED[i % 8], derive_seed(0, i), i) for i in range(64)]

    def tokens(rows):
        penalised = [i for i in rows if draws[i].params.repetition_penalty != 1]
        return sample(logits[rows], [draws[i] for i in rows], texts[penalised]).tokens

    before = logits.clone()
    together = tokens(list(range(64)))
    assert torch.equal(logits, before), "the logits are not the sampler's to change"
    assert together.tolist() == [int(tokens([i])) for i in range(64)]
    order = torch.randperm(64, generator=generator).tolist()
    assert torch.equal(tokens(order), together[order])


def test_requests_of_equal_prompts_do_not_share_their_first_token():
    rows, params = torch.zeros(64, 1000), SamplingParams(temperature=1.0)
    tokens = sample(rows, [Draw(params, derive_seed(0, i), 0) for i in range(64)]).tokens.tolist()
    assert len(set(tokens)) > 55
    assert sample(rows, [Draw(params, 9, 0)] * 64).tokens.unique().numel() == 1, "one seed, one token"


def test_the_penalty_lowers_what_was_there():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2, 1.2]])
    params = SamplingParams(repetition_penalty=2.0, logprobs=1)

    def best(logits, params, *text):
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, list(text)] = True
        return int(sample(logits, [Draw(params)], seen).tokens)

    assert best(logits, params, 3, 2) == 0
    assert best(logits, params, 0, 2) == 1, "2 / 2 = 1 is below 1.5"
    assert best(logits, params, 0, 1) == 4
    assert best(torch.tensor([[-1.0, -1.5]]), params, 0) == 1, "a negative logit is multiplied: divided, it would rise"
    assert best(logits, SamplingParams(repetition_penalty=0.5), 4) == 4


def test_logprobs_are_the_models_own():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(logprobs=4, repetition_penalty=1e6),
        SamplingParams(temperature=2.0, top_k=3, logprobs=2),
        SamplingParams(),
    ]
    seen = torch.zeros(1, 50, dtype=torch.bool)
    seen[0, logits[0].topk(3).indices] = True  # the penalty forbids the three likeliest, and changes no report of them
    got = sample(logits, [Draw(p, 1, i) for i, p in enumerate(params)], seen)
    assert int(got.tokens[0]) == int(logits[0].topk(4).indices[3])
    exact = torch.log_softmax(logits.double(), -1)
    assert got.wanted == [4, 2, 0]
    assert torch.allclose(got.chosen.double(), exact[torch.arange(3), got.tokens], atol=1e-6)
    values, ids = exact.topk(4)
    assert torch.equal(got.best_ids, ids) and torch.allclose(got.best.double(), values, atol=1e-6)


def test_the_numbers_behind_the_draws_are_uniform_and_streams_unrelated():
    by_index = np.array([uniform(7, i) for i in range(MANY)])
    by_seed = np.array([uniform(s, 0) for s in range(MANY)])
    for numbers in (by_index, by_seed):
        assert 0 <= numbers.min() and numbers.max() < 1
        assert_drawn_from(np.bincount((numbers * 50).astype(int), minlength=50), np.full(50, 1 / 50))
    neighbours = np.array([uniform(8, i) for i in range(MANY)])
    assert abs(np.corrcoef(by_index, neighbours)[0, 1]) < 0.03
    assert abs(np.corrcoef(by_index[1:], by_index[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_index[1:], neighbours[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_give_some_token_and_spare_the_neighbours(bad):
    rows = torch.stack((LOGITS, torch.full((VOCAB,), bad), LOGITS))
    for settings in (dict(), dict(top_k=3), dict(top_p=0.9), dict(min_p=0.2), dict(repetition_penalty=1.5, logprobs=2)):
        params = SamplingParams(temperature=1.0, **settings)
        seen = torch.zeros(3, VOCAB, dtype=torch.bool) if "repetition_penalty" in settings else None
        tokens = sample(rows, [Draw(params, 4, i) for i in range(3)], seen).tokens.tolist()
        alone = [sample(rows[i : i + 1], [Draw(params, 4, i)], None if seen is None else seen[:1]) for i in (0, 2)]
        assert 0 <= tokens[1] < VOCAB and tokens[::2] == [int(a.tokens) for a in alone]


def test_the_strongest_settings_together_stay_in_the_vocabulary():
    """A penalty of 1e-6 and a temperature of 0.01 make logits of 1e8 and more."""
    for penalty in (1e-6, 1e6):
        params = SamplingParams(temperature=0.01, repetition_penalty=penalty, top_p=1e-9, min_p=0.99, top_k=10**400)
        seen = torch.ones(1, VOCAB, dtype=torch.bool)
        assert 0 <= int(sample(40 * LOGITS[None], [Draw(params, 1, 0)], seen).tokens) < VOCAB


@pytest.mark.parametrize("shape", [(1, VOCAB), (3, VOCAB), (VOCAB,), (1, 2, VOCAB)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_another_shape_are_refused(shape, temperature):
    with pytest.raises(LabError, match=r"logits must be \[2, vocab\], a row for each request, got"):
        sample(torch.zeros(shape), [Draw(SamplingParams(temperature=temperature))] * 2)


def test_the_largest_number_does_not_fall_off_the_end(monkeypatch):
    """u = 1 - 2**-53 times a sum may round up to the sum; the last tokens have probability 0 here."""
    for number, token in ((1 - 2.0**-53, 5), (0.0, 1)):
        monkeypatch.setattr("labkit.engine.sampler.uniform", lambda seed, index, number=number: number)
        logits = torch.full((1, 9), float("-inf"))
        logits[0, 1:6] = torch.rand(5)
        assert sample(logits, [Draw(SamplingParams(temperature=1.0))]).tokens.tolist() == [token]

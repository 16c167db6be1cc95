"""The embedded model against transformers: same file, same arithmetic, same tokens."""

import warnings

import pytest
import torch

from labkit.engine import generate_cached, generate_recompute

pytestmark = [pytest.mark.model, pytest.mark.serial]

CHATS = [
    "Name three primary colours.",
    "Write a haiku about memory bandwidth.",
    "What is 17 * 23? Show the steps.",
    "Traduis en français : the cat sleeps on the keyboard.",
    "Summarise the plot of Hamlet in two sentences.",
    "List the planets from the Sun outwards, one a line.",
    "Explain a mutex to a child.",
    "🙂🙃 what do these emoji mean?",
]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time, in a village by the sea,",
    "SELECT name FROM users WHERE",
    "東京は日本の",
    "a",
    "\n\n\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "x = [i**2 for i in range(10)]\nprint(x)\n# Output:",
    "Die Würde des Menschen ist",
    "<html>\n<head>\n<title>",
]
NEW, GAP = 48, 1e-3


@pytest.fixture(scope="module")
def prompts(smollm):
    _, tokenizer = smollm
    chats = [tokenizer.chat([{"role": "user", "content": text}]) for text in CHATS]
    return chats + [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def runs(smollm, oracle, prompts):
    """For each prompt: our greedy tokens from the cached loop, and transformers' logits over prompt + tokens.

    One transformers forward over the whole text is enough to know what its greedy decoding would have done: if at
    each position its argmax is our next token, then by induction it would have produced exactly our tokens.
    """
    model, _ = smollm
    out = []
    for ids in prompts:
        tokens = generate_cached(model, ids, NEW, ignore_eos=True).token_ids
        with torch.inference_mode():
            out.append((ids, tokens, oracle(torch.tensor([ids + tokens])).logits[0]))
    return out


def test_greedy_tokens_equal_those_of_transformers(runs, smollm):
    _, tokenizer = smollm
    assert len(runs) == 20 and all(len(tokens) == NEW for _, tokens, _ in runs)
    near_ties = []
    for ids, tokens, logits in runs:
        expected = logits[len(ids) - 1 : -1].argmax(-1).tolist()
        place = next((i for i, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want), None)
        if place is None:
            continue
        top = logits[len(ids) - 1 + place].topk(2)
        gap = float(top.values[0] - top.values[1])
        assert gap < GAP and tokens[place] in top.indices, (
            f"{tokenizer.decode(ids)!r}: token {place} is {tokens[place]}, transformers has {expected[place]}, "
            f"and its two best logits are {gap:.4f} apart"
        )
        near_ties.append(f"{tokenizer.decode(ids)[:40]!r} at token {place}, gap {gap:.1e}")
    if near_ties:
        warnings.warn(f"compared only up to a near tie: {near_ties}", stacklevel=1)
    assert len(near_ties) <= 2


def test_logits_equal_those_of_transformers(runs, smollm):
    model, _ = smollm
    for ids, tokens, logits in runs:
        text = torch.tensor([ids + tokens])
        got = model.forward(text, torch.arange(text.shape[1]), all_logits=True)[0]
        assert (got - logits).abs().max() < 2e-3


def test_each_cached_step_gives_the_logits_of_transformers(runs, smollm):
    """The first decode step is where a position off by one shows, the later ones where a slot off by one does."""
    model, _ = smollm
    for ids, tokens, logits in runs[::7]:
        cache = model.new_cache(1, len(ids) + NEW)
        model.forward(torch.tensor([ids]), torch.arange(len(ids)), cache)
        for i, token in enumerate(tokens):
            place = len(ids) + i
            got = model.forward(torch.tensor([[token]]), torch.tensor([place]), cache)[0]
            assert (got - logits[place]).abs().max() < 2e-3


def test_recomputing_gives_the_tokens_of_the_cached_loop(runs, smollm):
    model, _ = smollm
    for ids, tokens, _ in runs[::5]:
        assert generate_recompute(model, ids, 24, ignore_eos=True).token_ids == tokens[:24]


def test_weights_and_settings_equal_those_of_transformers(smollm, oracle):
    """Loading and dequantising are exact, so equality is too. It catches a permutation that logits might forgive."""
    from labkit.engine import MODELS

    model, _ = smollm
    layer, theirs = model.weights.layers[17], oracle.model.layers[17]
    stacked = [getattr(theirs.self_attn, f"{n}_proj").weight for n in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([w.detach() for w in stacked]))
    assert torch.equal(layer.gate_up, torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]).detach())
    assert model.weights.lm_head is model.weights.embedding
    assert model.config.num_params == oracle.num_parameters() == MODELS["smollm2-135m"].num_params
    got, preset = model.config, MODELS["smollm2-135m"]
    assert got.rms_eps == pytest.approx(preset.rms_eps)  # GGUF keeps it in fp32
    names = set(preset.__dataclass_fields__) - {"rms_eps"}
    assert {n: getattr(got, n) for n in names} == {n: getattr(preset, n) for n in names}

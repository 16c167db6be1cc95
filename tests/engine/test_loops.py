"""The two greedy loops on small random models: equal tokens, honest times, and requests that cannot run."""

import math

import pytest
import torch

from labkit.engine import KVCache, ModelConfig, generate_cached, generate_recompute, load
from labkit.errors import LabError
from tests.engine.tiny_models import TINY, tiny_hf

LOOPS = [generate_recompute, generate_cached]


@pytest.fixture(scope="module", params=TINY)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    # untied: a random tied model likes to repeat its input, which would hide a wrong position
    tiny_hf(request.param, tie_word_embeddings=False).save_pretrained(folder)
    return load(folder, progress=None)[0]


@pytest.mark.parametrize("length", [1, 2, 17, 100])
def test_both_loops_give_the_same_tokens(model, length):
    ids = torch.randint(0, 262, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    whole, cached = (loop(model, ids, 28, ignore_eos=True) for loop in LOOPS)
    assert whole.token_ids == cached.token_ids and len(cached.token_ids) == 28
    assert whole.finish_reason == cached.finish_reason == "length"
    assert len(set(cached.token_ids)) > 1


@pytest.mark.parametrize("loop", LOOPS)
def test_an_end_token_ends_the_text_and_is_part_of_it(model, loop):
    ids = [5, 6, 7]
    free = loop(model, ids, 10, ignore_eos=True).token_ids
    end = next(t for t in free if free.index(t) == free.index(free[3]))
    config = model.config
    try:
        object.__setattr__(config, "eos_token_ids", (261 if end != 261 else 260, end))  # not the first of the two
        stopped = loop(model, ids, 10)
        assert stopped.token_ids == free[: free.index(end) + 1] and stopped.finish_reason == "stop"
        assert loop(model, ids, 10, ignore_eos=True).token_ids == free
    finally:
        object.__setattr__(config, "eos_token_ids", (0,))


@pytest.mark.parametrize("loop", LOOPS)
def test_each_token_is_reported_once_and_timed(model, loop):
    seen = []
    run = loop(model, [1, 2], 5, ignore_eos=True, on_token=seen.append)
    assert seen == run.token_ids and len(run.seconds) == 5 and min(run.seconds) > 0
    assert run.decode_tokens_per_s == pytest.approx(4 / sum(run.seconds[1:]))
    one = loop(model, [1, 2], 1)
    assert one.token_ids == run.token_ids[:1] and math.isnan(one.decode_tokens_per_s)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_model_can_be_filled_to_its_last_position(model, loop):
    assert len(loop(model, [3] * 120, 8, ignore_eos=True).token_ids) == 8  # 128 positions


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("ids", "max_tokens", "says"),
    [
        ([], 4, "the prompt is empty: it needs at least 1 token"),
        ([1], 0, "max_tokens must be a whole number of at least 1, got 0"),
        ([1], -3, "at least 1, got -3"),
        ([1], 2.0, "at least 1, got 2.0"),
        ([1], True, "at least 1, got True"),
        ([1, 262], 4, "prompt token 1 is 262, outside the vocabulary 0 to 261"),
        ([-1], 4, "prompt token 0 is -1, outside"),
        (["a"], 4, "prompt token 0 is 'a', outside"),
        (None, 4, r"the prompt must be a list of ints, such as tokenizer.encode\(text\) gives, got None"),
        ("hello", 4, "the prompt must be a list of ints, .* got 'hello'"),
        ({1, 2}, 4, "the prompt must be a list of ints"),
        (torch.tensor(5), 4, r"the prompt must have one dimension, got shape \[\]"),
        (torch.tensor([[1, 2]]), 4, r"one dimension, got shape \[1, 2\]; give one row of it"),
        (torch.tensor([1.0]), 4, "prompt token 0 is 1.0, outside"),
        ([1] * 120, 9, "120 prompt tokens . 9 new ones = 129, and the model has 128 positions; .* max_tokens by 1$"),
        ([1] * 500, 1, "500 prompt tokens . 1 new ones = 501, .* by 373$"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_arithmetic(model, loop, ids, max_tokens, says):
    def never(token):
        raise AssertionError("no token may come out")

    with pytest.raises(LabError, match=says):
        loop(model, ids, max_tokens, on_token=never)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tensor_of_ids_is_as_good_as_a_list(model, loop):
    wanted = loop(model, [5, 6, 7], 4, ignore_eos=True).token_ids
    for ids in (torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]).numpy(), (5, 6, 7)):
        assert loop(model, ids, 4, ignore_eos=True).token_ids == wanted


def test_the_cache_has_the_size_the_config_predicts():
    config = ModelConfig.from_hf(tiny_hf("llama").config.to_dict())
    for dtype, width in ((torch.float32, 4), (torch.float16, 2)):
        cache = KVCache(config, batch=3, max_len=50, dtype=dtype)
        assert cache.nbytes == 3 * 50 * config.kv_bytes_per_token(width)

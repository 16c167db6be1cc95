"""What a request may ask for, and what it says of itself."""

import math
from dataclasses import FrozenInstanceError

import pytest

from labkit.engine.request import PENDING, Request, SamplingParams
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-1.0, 0.001, 101, 10**400, math.nan, math.inf, "hot", True, None)],
        *[("top_p", v) for v in (0, -0.1, 1.01, math.nan, None)],
        *[("top_k", v) for v in (-1, 1.5, True, None)],
        *[("min_p", v) for v in (-0.1, 1.0, math.nan)],
        *[("repetition_penalty", v) for v in (0, -1, 1e-7, 1.1e6, 10**400, math.inf, math.nan)],
        *[("max_tokens", v) for v in (0, -1, 2.0, True, None)],
        *[("stop", v) for v in ("", ["a", ""], [3], {"a"}, None)],
        *[("stop_token_ids", v) for v in ([-1], [1.0], 7, None)],
        *[("ignore_eos", v) for v in (1, None)],
        *[("seed", v) for v in (-1, 2**63, 1.0, True)],
        *[("logprobs", v) for v in (-1, 21, True, None)],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(LabError, match=field) as refused:
        SamplingParams(**{"temperature": 1.0, field: value})
    shown = value[-1] if isinstance(value, list) else value
    assert repr(shown) in str(refused.value)


@pytest.mark.parametrize(("field", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_settings_that_would_do_nothing_are_refused(field, value):
    with pytest.raises(LabError, match=f"temperature=0.*{field}={value}"):
        SamplingParams(temperature=0.0, **{field: value})
    SamplingParams(temperature=0.7, **{field: value})


@pytest.mark.parametrize(
    "edge",
    [
        dict(temperature=0.01, top_p=1e-9, top_k=0, min_p=0.99, repetition_penalty=1e-6, max_tokens=1, seed=0),
        dict(temperature=100, repetition_penalty=1e6, top_k=10**9, seed=2**63 - 1, logprobs=20),
        dict(temperature=0, top_k=1),
    ],
)
def test_the_edges_of_every_range_are_allowed_and_kept(edge):
    params = SamplingParams(**edge)
    assert {name: getattr(params, name) for name in edge} == edge


def test_params_are_frozen_and_hold_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(FrozenInstanceError):
        params.top_p = 0.5


@pytest.mark.parametrize("prompt", ["text", [1, -1], [1.0], [True], [None], 3])
def test_a_prompt_holds_token_ids(prompt):
    with pytest.raises(LabError, match="prompt"):
        Request(0, prompt)


def test_a_prompt_may_be_an_array():
    import numpy as np

    request = Request(0, np.array([3, 4]))
    assert request.token_ids == [3, 4] and all(type(t) is int for t in request.token_ids)


def test_a_token_that_is_being_sampled_counts_and_is_no_output():
    request = Request(0, [3, 4])
    assert request.output_ids == [] and request.num_tokens == 2
    request.token_ids += [9, PENDING]
    assert request.output_ids == [9] and request.num_tokens == 4


def test_the_prompt_is_a_copy():
    ids = [1, 2]
    request = Request(0, ids)
    ids.append(3)
    request.token_ids.append(4)
    assert request.prompt_ids == [1, 2]


def test_priority_is_a_whole_number():
    for priority in (0.5, True, 2**31 + 1, -(10**400)):
        with pytest.raises(LabError, match="priority"):
            Request(0, [1], priority=priority)
    assert Request(0, [1], priority=-(2**31)).priority == -(2**31)


def test_parameters_and_cache_keys_are_of_their_kind():
    with pytest.raises(LabError, match="params must be SamplingParams"):
        Request(0, [1], {"max_tokens": 3})
    for key in ("cache_salt", "cache_extra"):
        with pytest.raises(LabError, match=f"{key} must be hashable, such as a text, got"):
            Request(0, [1], **{key: [1]})


def test_a_step_counts_its_tokens():
    a, b = Request(0, [1, 2, 3]), Request(1, [1])
    step = Step(0, (Chunk(a, 0, 2, False), Chunk(b, 0, 1, True)))
    assert step.num_tokens == 3 and [c.request for c in step.sampling] == [b]

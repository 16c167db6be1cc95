"""The picture of the steps says what the trace says."""

import matplotlib.pyplot as plt
import pytest

from labkit.course.step_picture import LOOK, draw_steps, lanes
from labkit.course.style import png
from labkit.engine.arrivals import with_lengths
from labkit.engine.presets import MODELS
from labkit.engine.simulate import CostModel, simulate
from labkit.engine.trace import Trace
from labkit.errors import LabError


def served(num_blocks=200, **options):
    load = with_lengths([0.0] * 5, prompt_len=(20, 60), output_len=(10, 30))
    cost = CostModel.of_model(MODELS["llama-3-8b"], 4000, 700)
    options = {"max_num_seqs": 5, "max_batched_tokens": 64, **options}
    return load, simulate(options, load, cost, num_blocks, 8, prefix_caching=False, run_ahead=False)


def test_the_lanes_hold_every_token_that_was_computed():
    load, result = served(max_num_seqs=3)
    found = lanes(result.trace)
    assert list(found) == [0, 1, 2, 3, 4]
    for arrival, stretches in zip(load, found.values(), strict=True):
        tokens = {kind: sum(t for k, *_, t in stretches if k == kind) for kind in LOOK}
        assert tokens == {"prompt": len(arrival.prompt), "decode": arrival.output_len - 1, "waiting": 0}
        ends = [first + steps for _, first, steps, _ in stretches]
        assert all(first >= end for (_, first, *_), end in zip(stretches[1:], ends, strict=False)), "lanes overlap"
    assert found[4][0][0] == "waiting" and found[0][0][0] == "prompt"


def test_a_prompt_in_parts_is_one_stretch_and_a_gap_ends_one():
    trace = Trace()
    _, result = served(max_batched_tokens=8, max_num_seqs=1)
    assert [kind for kind, *_ in lanes(result.trace)[0]] == ["prompt", "decode"]
    base = {"kind": "plan", "starts": [5], "counts": [1], "waiting": [], "preempted": []}
    trace.events = [{"kind": "add", "id": 0, "prompt": [1] * 4}]
    trace.events += [{**base, "index": 0, "ids": [0]}, {**base, "index": 1, "ids": [], "starts": [], "counts": []}]
    trace.events += [{**base, "index": 2, "ids": [0]}]
    assert lanes(trace)[0] == [("decode", 0, 1, 1), ("decode", 2, 1, 1)]


def test_a_preemption_is_a_cross_and_its_text_counts_as_prompt_again():
    load, result = served(num_blocks=18)
    assert result.preemptions
    fig, words = draw_steps(result.trace, "short of blocks")
    ax = fig.axes[0]
    crosses = next(line for line in ax.get_lines() if line.get_label() == "preempted")
    assert len(crosses.get_xdata()) == result.preemptions and f"preempted {result.preemptions} times" in words
    again = sum(t for stretches in lanes(result.trace).values() for kind, *_, t in stretches if kind == "prompt")
    assert again > sum(len(a.prompt) for a in load)
    assert "5 requests" in words and ax.get_xlabel() == "step" and len(png(fig)) > 5000
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1", "2", "3", "4"]
    plt.close(fig)


def test_an_empty_trace_is_refused():
    with pytest.raises(LabError, match="no step"):
        draw_steps(Trace())

"""The picture of the pool says what the trace says."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from labkit.course.pool_picture import draw_pool, runs
from labkit.course.style import COLORS, png
from labkit.engine.arrivals import with_lengths
from labkit.engine.presets import MODELS
from labkit.engine.simulate import CostModel, simulate
from labkit.engine.trace import Trace
from labkit.engine.trace_view import TraceView
from labkit.errors import LabError


def served(num_blocks, shared=0, apart_s=0.0, **options):
    times = [i * apart_s for i in range(6)]
    load = with_lengths(times, prompt_len=(20, 60), output_len=(10, 40), shared_prefix=shared)
    cost = CostModel.of_model(MODELS["llama-3-8b"], 4000, 700)
    return simulate({"max_num_seqs": 6, "max_batched_tokens": 256, **options}, load, cost, num_blocks, 8)


def test_the_picture_has_a_pixel_a_block_and_step_in_the_requests_colours():
    result = served(24)
    fig, words = draw_pool(result.trace, "a pool")
    grid = TraceView(result.trace).block_map()
    image = fig.axes[0].images[0].get_array()
    assert image.shape == (23, len(grid), 3)
    for id in (0, 3):
        step, block = map(int, np.argwhere(grid[:, 1:] == id)[0])
        color = "#" + "".join(f"{round(255 * c):02X}" for c in image[block, step])
        assert color == COLORS[id % 6]
    assert result.preemptions > 0 and f"preempted {result.preemptions} times" in words
    assert "of 6 requests" in words and "Map of 23 blocks" in words
    assert fig.axes[0].get_xlabel() and fig.axes[0].get_ylabel() and len(png(fig)) > 5000
    assert any(line.get_label() == "preempted" for line in fig.axes[0].get_lines())
    plt.close(fig)


def test_shared_and_cached_blocks_have_a_name():
    fig, _ = draw_pool(served(80, shared=32, apart_s=0.05).trace)
    labels = [t.get_text() for t in fig.axes[0].get_legend().get_texts()]
    assert {"free", "cached", "shared"} <= set(labels) and "preempted" not in labels
    plt.close(fig)


def test_runs_are_the_stretches_of_one_holder():
    grid = np.array([[-1, 4, -1], [-1, 4, -3], [-1, 2, 7]])
    assert runs(grid) == [(1, 0, 2, 4), (1, 2, 1, 2), (2, 2, 1, 7)]


def test_an_empty_trace_is_refused():
    with pytest.raises(LabError, match="no step"):
        draw_pool(Trace())

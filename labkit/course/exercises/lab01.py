"""Lab 01: a bus's bandwidth, where the KV cache overtakes the weights, the bound on tokens per second."""

from __future__ import annotations

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab01 as answers


def _off_by(factor):
    return lambda inputs, got, want: abs(got / want - factor) < 1e-3 * factor


def _times(i):
    """Seconds of a step for memory and for arithmetic."""
    moved = i["weight_bytes"] + i["batch"] * i["context"] * i["kv_bytes_per_token"]
    return moved / (i["gb_s"] * 1e9), i["batch"] * i["flops_per_token"] / (i["tflop_s"] * 1e12)


def _is(got, want):
    return abs(got / want - 1) < 1e-3


def _trial(name, **inputs):
    return Trial(name, lambda: dict(inputs))


_LLAMA3 = dict(weight_bytes=15.01e9, kv_bytes_per_token=131_072, flops_per_token=15.01e9, gb_s=4550.0, tflop_s=720.0)

EXERCISES = (
    Exercise(
        "01.1",
        "Bandwidth from the pins",
        answers.pin_bandwidth_gb_s,
        trials=(
            _trial("RTX 4090: 384 bits, 21 Gbit/s", bus_bits=384, gbit_per_pin=21.0),
            _trial("A100 40 GB: 5120 bits, 2.43 Gbit/s", bus_bits=5120, gbit_per_pin=2.43),
            _trial("one DDR5 channel: 64 bits, 5.6 Gbit/s", bus_bits=64, gbit_per_pin=5.6),
        ),
        hints=(
            Hint("that is in gigabits a second; a byte has 8 bits.", _off_by(8.0)),
            Hint(
                "the rate per pin already counts both clock edges, and reads and writes share the bus: no factor 2.",
                _off_by(2.0),
            ),
        ),
    ),
    Exercise(
        "01.2",
        "The crossover",
        answers.crossover_tokens,
        trials=(
            _trial("Llama-3-8B in bf16", layers=32, kv_heads=8, head_dim=128, weight_bytes=15.01e9),
            _trial("a 7B model without grouped queries", layers=32, kv_heads=32, head_dim=128, weight_bytes=15.4e9),
            _trial(
                "4-bit weights, 8-bit cache",
                layers=32,
                kv_heads=8,
                head_dim=128,
                weight_bytes=3.9e9,
                kv_bytes_per_value=1,
            ),
        ),
        tolerance=1e-3,
        hints=(
            Hint("a cached token holds a key and a value: two vectors a layer and KV head.", _off_by(2.0)),
            Hint(
                "every layer has its own cache: multiply by the layers.",
                lambda i, got, want: abs(got / want / i["layers"] - 1) < 1e-3,
            ),
            Hint(
                "values have kv_bytes_per_value bytes each; do not fix them at 2.",
                lambda i, got, want: i.get("kv_bytes_per_value", 2) != 2 and abs(2 * got / want - 1) < 1e-3,
            ),
            Hint(
                "the quotient is upside down: weight bytes over bytes per token.",
                lambda i, got, want: abs(got * want - 1) < 1e-3,
            ),
        ),
    ),
    Exercise(
        "01.3",
        "The bound on tokens per second",
        answers.decode_tokens_per_s,
        trials=(
            _trial("Llama-3-8B in bf16, batch 1, context 512", batch=1, context=512, **_LLAMA3),
            _trial("batch 64, context 512", batch=64, context=512, **_LLAMA3),
            _trial("batch 8, context 32 768: the cache weighs more", batch=8, context=32_768, **_LLAMA3),
            _trial("batch 1024, no context: arithmetic binds", batch=1024, context=0, **_LLAMA3),
        ),
        tolerance=1e-3,
        hints=(
            Hint(
                "the units are off: GB/s are 1e9 bytes, TFLOP/s 1e12 FLOPs, and the time is in seconds.",
                lambda i, got, want: not 1e-3 < got / want < 1e3,
            ),
            Hint(
                "that is the shorter of the two times; a step lasts until both are over.",
                lambda i, got, want: i["context"] > 0 and _is(got, i["batch"] / min(_times(i))),
            ),
            Hint(
                "reading and arithmetic overlap: take the longer of the two times, not their sum.",
                lambda i, got, want: _is(got, i["batch"] / sum(_times(i))),
            ),
            Hint(
                "that is steps per second. A step gives one token to each sequence of the batch.",
                lambda i, got, want: i["batch"] > 1 and abs(got * i["batch"] / want - 1) < 1e-3,
            ),
            Hint(
                "the weights are read once a step for the whole batch, not once a sequence.",
                lambda i, got, want: i["batch"] > 1 and got < 0.6 * want,
            ),
            Hint(
                "each sequence reads its own cache: batch * context tokens.",
                lambda i, got, want: i["batch"] > 1 and i["context"] > 0 and got > 1.02 * want,
            ),
            Hint(
                "at a large batch the arithmetic takes longer than the reading: "
                "a step lasts as long as the longer of the two.",
                lambda i, got, want: i["context"] == 0 and got > 1.02 * want,
            ),
        ),
    ),
)

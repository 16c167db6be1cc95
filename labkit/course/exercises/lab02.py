"""Lab 02: sectors of a strided load, blocks an SM can hold, padding that removes bank conflicts."""

from __future__ import annotations

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab02 as answers


def _trial(name, **inputs):
    return Trial(name, lambda: dict(inputs))


EXERCISES = (
    Exercise(
        "02.1",
        "Sectors of a strided load",
        answers.sectors_of_request,
        trials=(
            _trial("neighbouring floats", stride=1, element_bytes=4),
            _trial("every second float", stride=2, element_bytes=4),
            _trial("every third float", stride=3, element_bytes=4),
            _trial("every 100th float", stride=100, element_bytes=4),
            _trial("neighbouring halves", stride=1, element_bytes=2),
            _trial("16 bytes a lane", stride=1, element_bytes=16),
            _trial("all lanes the same", stride=0, element_bytes=4),
        ),
        hints=(
            Hint("a warp has 32 lanes, so it cannot touch more than 32 sectors here.", lambda i, g, w: g > 32),
            Hint(
                "those are lines of 128 bytes; a sector has 32.",
                lambda i, g, w: g == len({n * i["stride"] * i["element_bytes"] // 128 for n in range(32)}),
            ),
            Hint(
                "lanes in the same sector share it: count different sectors, not lanes.",
                lambda i, g, w: g == 32 and w < 32,
            ),
        ),
    ),
    Exercise(
        "02.2",
        "Blocks an SM can hold",
        answers.blocks_per_sm,
        trials=(
            _trial("few registers: warps decide", registers_per_thread=32, shared_bytes=0, warps_per_block=8),
            _trial("128 registers decide", registers_per_thread=128, shared_bytes=0, warps_per_block=8),
            _trial("33 registers are rounded up to 40", registers_per_thread=33, shared_bytes=0, warps_per_block=4),
            _trial("shared memory decides", registers_per_thread=32, shared_bytes=100 * 1024, warps_per_block=4),
            _trial(
                "228 KiB less the reserve", registers_per_thread=32, shared_bytes=56 * 1024 + 512, warps_per_block=4
            ),
            _trial("tiny blocks: their number decides", registers_per_thread=16, shared_bytes=0, warps_per_block=1),
        ),
        hints=(
            Hint(
                "that counts warps; the question is for blocks.",
                lambda i, g, w: g == w * i["warps_per_block"] and g != w,
            ),
            Hint(
                "an SM has at most 32 blocks, however small they are.",
                lambda i, g, w: i["warps_per_block"] == 1 and g > 32,
            ),
            Hint(
                "registers are given out in units of 256 a warp: 33 a thread cost as much as 40.",
                lambda i, g, w: i["registers_per_thread"] == 33 and g > w,
            ),
            Hint(
                "each block takes 1 KiB of shared memory beyond its own.",
                lambda i, g, w: i["shared_bytes"] > 0 and g == w + 1,
            ),
            Hint("the scarcest resource decides: take the minimum.", lambda i, g, w: g > w),
        ),
    ),
    Exercise(
        "02.3",
        "How much padding?",
        answers.smallest_padding,
        trials=(
            _trial("32 floats a row", columns=32, element_bytes=4),
            _trial("33 floats a row: nothing to do", columns=33, element_bytes=4),
            _trial("64 floats a row", columns=64, element_bytes=4),
            _trial("64 halves a row", columns=64, element_bytes=2),
            _trial("256 halves a row", columns=256, element_bytes=2),
            _trial("48 floats a row", columns=48, element_bytes=4),
        ),
        hints=(
            Hint(
                "two halves make one word: rows may share a word, so count words, not elements.",
                lambda i, g, w: i["element_bytes"] == 2 and g != w,
            ),
            Hint("not always 1: some widths need none.", lambda i, g, w: i["columns"] == 33 and g == 1),
            Hint(
                "each row then starts in the same bank as before: the pitch must not be a multiple of 2.",
                lambda i, g, w: (i["columns"] + g) % 2 == 0,
            ),
        ),
    ),
)

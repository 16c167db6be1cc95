"""How many blocks of cache a GPU has room for: measured, after a step of the largest size has run.

The same steps warm a runner up. Triton compiles a kernel when it first meets it, in seconds; a request should not wait
for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from labkit.engine.request import Request, SamplingParams
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1)  # a draw that sorts takes the most memory


def rehearsal(sizes: Sequence[tuple[int, int]], block_size: int, params: SamplingParams) -> Step:
    """A step of chunks (start, count) that all store their keys and values in block 1, and read them there. What it
    computes is of no use; how long it takes, and what it needs, is that of any step of its size."""
    chunks = []
    for i, (start, count) in enumerate(sizes):
        request = Request(-1 - i, [0] * (start + count), params)  # no request of a user's has such an id
        request.blocks = [1] * -(-(start + count) // block_size)
        chunks.append(Chunk(request, start, count, samples=True))
    return Step(0, tuple(chunks))


def largest_step(max_num_seqs: int, max_batched_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
    """All tokens, all sequences."""
    seqs = min(max_num_seqs, max_batched_tokens)
    return [(0, min(max_batched_tokens // seqs, max_model_len))] * seqs


def warm_up_steps(max_num_seqs: int, max_batched_tokens: int, max_model_len: int) -> list[list[tuple[int, int]]]:
    """Steps that bring out every tile of the attention kernels: a decode step, a few tokens, a long chunk, and a chunk
    beside requests that decode."""
    most = min(max_batched_tokens, max_model_len)
    steps = [[(min(1, max_model_len - 1), 1)]]
    steps += [[(0, n)] for n in sorted({2, 512}) if n <= most]
    beside = min(max_num_seqs - 1, 31)
    if beside and max_model_len > 1 and max_batched_tokens > beside + 1:
        steps.append([(0, min(max_batched_tokens - beside, max_model_len, 64))] + [(1, 1)] * beside)
    return steps


def peak_bytes(run: Callable[[Step], object], step: Step, device: torch.device) -> int:
    """Bytes that ``run(step)`` takes on the GPU while it runs, beside what is held already."""
    before = 0
    for _ in range(2):  # kernels are compiled the first time; their memory is none of a step's
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run(step)
        torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_share(share: float) -> None:
    """Raises LabError unless ``share`` is a share of the GPU's memory."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise LabError(f"memory_share must be above 0 and at most 1, got {share!r}")


def blocks_that_fit(free: int, total: int, peak: int, block: int, share: float) -> int:
    """Blocks of ``block`` bytes for which a GPU has room, all in bytes.

    free, total: of the GPU, with the model loaded; what other programs hold is not free. peak: what a step takes while
    it runs. CUDA graphs get as much again, since a decode step is no larger than the largest, or an eighth of what is
    free if that is less. Raises LabError, with the arithmetic, if there is no room for two.
    """
    check_share(share)
    unused, graphs = total - int(share * total), min(peak, free // 8)
    room = free - unused - peak - graphs
    if room < 2 * block:
        raise LabError(
            f"no room for a cache: of {total / 2**30:.1f} GiB {free / 2**30:.1f} are free, a step takes "
            f"{peak / 2**30:.2f}, graphs up to {graphs / 2**30:.2f}, and memory_share={share} leaves "
            f"{unused / 2**30:.2f} unused; 2 blocks need {2 * block / 2**30:.4f}. Raise memory_share, lower "
            f"max_batched_tokens or max_num_seqs, or end what else holds the GPU's memory"
        )
    return room // block

"""The runner carries out steps. It owns all tensors that outlive one: cache, inputs, token buffer, graphs.

    run(step):  blocks move  ->  inputs go to the device  ->  model (eager, or a graph's replay)  ->  tokens

``run`` never waits for the device. The tokens it samples stay there in the token buffer, which the next step reads, and
are copied to the host on the side; ``StepResult.token_ids()`` waits for that copy. So the next step can be prepared and
started before the tokens of this one are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from labkit.engine.graphs import DecodeGraphs, bucket_of
from labkit.engine.inputs import Batch, InputBuilder
from labkit.engine.kv import PagedKV, check_block_size
from labkit.engine.model import Model
from labkit.engine.paged_model import PagedModel
from labkit.engine.request import Request, SamplingParams
from labkit.engine.sampler import Draw, Sampled, derive_seed, is_plain, sample
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError

CPU_CACHE_BYTES = 1 << 30  # the most a CPU engine takes when no number of blocks is given


@dataclass(frozen=True)
class Logprobs:
    """Of one token: its log-probability, and the best tokens as (id, log-probability), the likeliest first."""

    token: float
    best: list[tuple[int, float]]


class StepResult:
    """What a step gave. chunks: those that sampled, in the step's order; logits: [m, vocab], a row each, on the device
    (after a graph's replay they are valid until the next step runs)."""

    def __init__(self, chunks: list[Chunk], logits: torch.Tensor | None, sampled: Sampled | None):
        self.chunks, self.logits, self._sampled = chunks, logits, sampled
        self._host = self._event = None
        if sampled is not None:
            parts = (sampled.tokens, sampled.chosen, sampled.best, sampled.best_ids)
            self._host = [None if t is None else _to_host(t) for t in parts]
            if sampled.tokens.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()

    def token_ids(self) -> list[int]:
        """The sampled tokens, one for each of ``chunks``. Waits until they are on the host."""
        return [] if self._host is None else self._wait()[0].tolist()

    def logprobs(self) -> list[Logprobs | None]:
        """For each of ``chunks``: log-probabilities if its request asked for them. Waits like token_ids."""
        if self._host is None or self._host[1] is None:
            return [None] * len(self.chunks)
        _, chosen, best, ids = (t.tolist() for t in self._wait())
        rows = zip(self._sampled.wanted, chosen, best, ids, strict=True)
        return [Logprobs(c, list(zip(i, b, strict=True))[:n]) if n else None for n, c, b, i in rows]

    def _wait(self):
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Runner:
    """Runs a model's steps over a paged cache.

    num_blocks None: on CUDA as many as fit ``memory_share`` of the GPU's memory, measured after a step of the largest
    size; on a CPU enough for max_num_seqs sequences of max_model_len, up to 1 GiB.
    """

    def __init__(
        self,
        model: Model,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 512,
        max_model_len: int | None = None,
        cuda_graphs: bool = True,
        ops: Mapping[str, Callable] | None = None,
        host_blocks: int = 0,
        memory_share: float = 0.9,
        seed: int = 0,
    ):
        """Raises LabError for sizes that do not fit the model, the kernels or the GPU's memory, or unknown ops."""
        check_block_size(block_size)
        for name, value in (("max_num_seqs", max_num_seqs), ("max_batched_tokens", max_batched_tokens)):
            if not isinstance(value, int) or value < 1:
                raise LabError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.config, self.device, self.seed = model.config, model.device, seed
        if self.device.type == "cuda" and self.device.index not in (None, torch.cuda.current_device()):
            raise LabError(
                f"the model is on {self.device}, and kernels start on cuda:{torch.cuda.current_device()}: call "
                f"torch.cuda.set_device({self.device.index}) first"
            )
        self.max_num_seqs, self.max_batched_tokens = max_num_seqs, max_batched_tokens
        self.max_model_len = model.config.max_positions if max_model_len is None else max_model_len
        self.model = PagedModel(model, self.max_model_len, ops)
        self.inputs = InputBuilder(block_size, max_num_seqs, max_batched_tokens, self.max_model_len, self.device)
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=self.device)
        self._unread: dict[int, tuple[int, int]] = {}  # of the newest step: request id -> (position, row of tokens)
        self.graphs: DecodeGraphs | None = None
        if num_blocks is None:
            num_blocks = self._fitting_blocks(block_size, memory_share)
        self.kv = PagedKV(model.config, num_blocks, block_size, model.dtype, self.device, host_blocks)
        if cuda_graphs and self.device.type == "cuda":
            logits = torch.zeros(max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=self.device)
            self.graphs = DecodeGraphs(self.inputs, self.decode_step, logits, max_num_seqs)

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Carry out a step, which must follow the one before in order. Returns without waiting for the device."""
        self.kv.move(step.swap_out, step.copies, step.swap_in)
        unread, self._unread = self._unread, {}  # a step that fails leaves no token for the next to read
        if not step.chunks:
            return StepResult([], None, None)
        chunks = step.sampling
        decode, all_sample = all(chunk.count == 1 for chunk in step.chunks), len(chunks) == len(step.chunks)
        bucket = bucket_of(self.graphs.buckets, len(step.chunks)) if decode and self.graphs else None
        batch = self.inputs.build(step.chunks, unread, pad_to=bucket or 0)
        if bucket is not None:
            logits = self.graphs.replay(bucket)
            logits = logits[: len(chunks)] if all_sample else logits.index_select(0, batch.rows)
        else:
            logits = self.model.forward(batch, self.kv, self.tokens, None if decode and all_sample else batch.rows)
        if not chunks:
            return StepResult([], logits, None)
        if bucket is not None and all_sample and all(is_plain(chunk.request.params) for chunk in chunks):
            sampled = Sampled(self.tokens[: len(chunks)])  # the graph took the argmax
        else:
            draws = [self._draw(chunk) for chunk in chunks]
            penalised = any(draw.params.repetition_penalty != 1 for draw in draws)
            sampled = sample(logits, draws, batch.ids.index_select(0, batch.rows) if penalised else None)
            self.tokens[: len(chunks)] = sampled.tokens
        self._unread = {chunk.request.id: (chunk.start + chunk.count, row) for row, chunk in enumerate(chunks)}
        return StepResult(chunks, logits, sampled)

    def decode_step(self, batch: Batch, logits: torch.Tensor) -> None:
        """What a CUDA graph holds: the model over a decode batch, its logits [seqs, vocab] and their argmax."""
        logits.copy_(self.model.forward(batch, self.kv, self.tokens, None))
        self.tokens[: len(logits)] = logits.argmax(-1)

    def _draw(self, chunk: Chunk) -> Draw:
        request, end = chunk.request, chunk.start + chunk.count
        params = request.params
        seed = derive_seed(self.seed, request.id) if params.seed is None else params.seed
        history = request.token_ids[: end - 1] if params.repetition_penalty != 1 else ()
        return Draw(params, seed, end - request.num_prompt, history)

    def _fitting_blocks(self, block_size: int, share: float) -> int:
        """How many blocks of cache there is room for."""
        size = PagedKV.block_bytes(self.config, block_size, self.model.dtype)
        most = self.max_num_seqs * self.inputs.width + 1  # more could never be used at once, but for cached prefixes
        if self.device.type == "cpu":
            return max(2, min(most, CPU_CACHE_BYTES // size))
        peak = self._peak_of_largest_step(block_size)
        torch.cuda.empty_cache()
        return blocks_that_fit(*torch.cuda.mem_get_info(self.device), peak, size, share)

    @torch.inference_mode()
    def _peak_of_largest_step(self, block_size: int) -> int:
        """Bytes that a step of the largest size takes while it runs: all tokens, all sequences, sampling with a sort.

        Every sequence's table names block 1 of a cache of two blocks: nothing that it computes is of any use.
        """
        seqs = min(self.max_num_seqs, self.max_batched_tokens)
        count = min(self.max_batched_tokens // seqs, self.max_model_len)
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1)
        chunks = []
        for i in range(seqs):
            request = Request(-1 - i, [0] * count, params)  # no request of a user's has such an id
            request.blocks = [1] * -(-count // block_size)
            chunks.append(Chunk(request, 0, count, samples=True))
        self.kv = PagedKV(self.config, 2, block_size, self.model.dtype, self.device)
        for _ in range(2):  # kernels are compiled the first time; their memory is none of a step's
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.run(Step(0, tuple(chunks)))
            torch.cuda.synchronize(self.device)
        self._unread = {}
        return torch.cuda.max_memory_allocated(self.device) - before


def blocks_that_fit(free: int, total: int, peak: int, block: int, share: float) -> int:
    """Blocks of ``block`` bytes for which a GPU has room, all in bytes.

    free, total: of the GPU, with the model loaded; what other programs hold is not free. peak: what a step takes while
    it runs. CUDA graphs get as much again, since a decode step is no larger than the largest, or an eighth of what is
    free if that is less. Raises LabError, with the arithmetic, if there is no room for two.
    """
    if not 0 < share <= 1:
        raise LabError(f"memory_share must be above 0 and at most 1, got {share!r}")
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


def _to_host(t: torch.Tensor) -> torch.Tensor:
    if not t.is_cuda:
        return t
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

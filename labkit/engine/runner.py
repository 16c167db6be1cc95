"""The runner carries out steps. It owns all tensors that outlive one: cache, inputs, token buffer, graphs.

    run(step):  blocks move  ->  inputs go to the device  ->  model (eager, or a graph's replay)  ->  tokens

``run`` never waits for the device. The tokens it samples stay there in the token buffer, which the next step reads, and
are copied to the host on the side; ``StepResult.token_ids()`` waits for that copy. So the next step can be prepared and
started before the tokens of this one are known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import add

import torch

from kernels.argmax import OP as argmax
from labkit.engine.graphs import CaptureFailed, CudaCapture, DecodeGraphs, bucket_of
from labkit.engine.inputs import Batch, InputBuilder, Unread, to_device
from labkit.engine.kv import PagedKV, check_block_size
from labkit.engine.memory import SAMPLED, blocks_that_fit, largest_step, peak_bytes, rehearsal, warm_up_steps
from labkit.engine.mixed_graphs import MixedGraphs
from labkit.engine.model import Model
from labkit.engine.paged_model import PagedModel
from labkit.engine.result import StepResult
from labkit.engine.sampler import Draw, Sampled, derive_seed, is_plain, sample
from labkit.engine.seen import SeenTokens
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError

CPU_CACHE_BYTES = 1 << 30  # the most a CPU engine takes when no number of blocks is given


class Runner:
    """Runs a model's steps over a paged cache.

    num_blocks None: on CUDA as many as fit ``memory_share`` of the GPU's memory, measured after a step of the largest
    size; on a CPU enough for max_num_seqs sequences of max_model_len, up to 1 GiB. cuda_graphs: on CUDA, decode steps
    are replayed from graphs. Where an operator in ``ops`` cannot be captured, a warning says so and steps run eagerly.
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
        self.max_num_seqs, self.max_batched_tokens = max_num_seqs, max_batched_tokens
        self.max_model_len = model.config.max_positions if max_model_len is None else max_model_len
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self._unread = Unread()  # what the newest step left in ``tokens``
        with self._on_device():
            self.model = PagedModel(model, self.max_model_len, ops)
            self.inputs = InputBuilder(block_size, max_num_seqs, max_batched_tokens, self.max_model_len, self.device)
            self.tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=self.device)
            self.seen = SeenTokens(max_num_seqs, model.config.vocab_size, self.device)
            if num_blocks is None:
                num_blocks = self._fitting_blocks(block_size, memory_share)
            self.kv = PagedKV(model.config, num_blocks, block_size, model.dtype, self.device, host_blocks)
            if self.device.type == "cuda":
                self.warm_up()
                if cuda_graphs:
                    capture = CudaCapture()
                    self.capture_graphs(capture)
                    if self.graphs is not None:
                        self.capture_mixed(capture)
                torch.cuda.synchronize(self.device)

    def _on_device(self):
        """Kernels start on the current GPU, which need not be the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run(self, step: Step) -> StepResult:
        """Carry out a step, which must follow the one before in order. Returns without waiting for the device."""
        with self._on_device(), torch.inference_mode():
            return self._run(step)

    def _run(self, step: Step) -> StepResult:
        self.kv.move(step.swap_out, step.copies, step.swap_in)
        unread, self._unread = self._unread, Unread()  # a step that fails leaves no token for the next to read
        if not step.chunks:
            return StepResult([], None, None)
        chunks = step.sampling
        decode, all_sample = all(chunk.count == 1 for chunk in step.chunks), len(chunks) == len(step.chunks)
        bucket = bucket_of(self.graphs.buckets, len(step.chunks)) if decode and self.graphs else None
        mixed = bucket_of(self.mixed_graphs.buckets, step.num_tokens) if not decode and self.mixed_graphs else None
        batch = self.inputs.build(step.chunks, unread, pad_to=bucket or 0, pad_tokens=mixed or 0)
        if mixed is not None:
            logits = self.mixed_graphs.replay(mixed)[: len(chunks)]
        elif bucket is not None:
            logits = self.graphs.replay(bucket)
            logits = logits[: len(chunks)] if all_sample else logits.index_select(0, batch.rows)
        else:
            logits = self.model.forward(batch, self.kv, self.tokens, None if decode and all_sample else batch.rows)
        if logits.shape[1:] != (self.config.vocab_size,):  # by an operator of one's own; its argmax would be no token
            vocab = self.config.vocab_size
            raise LabError(f"the step's logits must be [rows, {vocab}], got {list(logits.shape)}")
        if not chunks:
            return StepResult([], logits, None)
        if (mixed or (bucket and all_sample)) and all(is_plain(chunk.request.params) for chunk in chunks):
            sampled = Sampled(self.tokens[: len(chunks)])  # the graph took the argmax
        else:
            sampled = self._sample(logits, chunks, batch)
            self.tokens[: len(chunks)] = sampled.tokens
        requests, starts, counts, _ = zip(*chunks, strict=True)
        self._unread = Unread(requests, tuple(map(add, starts, counts)))
        return StepResult(chunks, logits, sampled)

    def decode_step(self, batch: Batch, logits: torch.Tensor) -> None:
        """What a CUDA graph holds: the model over a batch, the logits [rows, vocab] that are asked for, their argmax.
        Of a decode batch all rows are."""
        self.model.forward(batch, self.kv, self.tokens, None if batch.decode else batch.rows, out=logits)
        argmax(logits, out=self.tokens[: len(logits)])

    def _sample(self, logits: torch.Tensor, chunks: list[Chunk], batch: Batch) -> Sampled:
        seen, penalised = None, [i for i, c in enumerate(chunks) if c.request.params.repetition_penalty != 1]
        if penalised:
            newest = batch.ids.index_select(0, batch.rows)  # forward has put those in that the host does not know
            if len(penalised) < len(chunks):
                newest = newest[to_device(penalised, torch.int64, self.device)]
            seen = self.seen.rows([chunks[i] for i in penalised], newest)
        return sample(logits, [self._draw(chunk) for chunk in chunks], seen)

    def _draw(self, chunk: Chunk) -> Draw:
        request = chunk.request
        seed = derive_seed(self.seed, request.id) if request.params.seed is None else request.params.seed
        return Draw(request.params, seed, chunk.start + chunk.count - request.num_prompt)

    def capture_graphs(self, capture: CudaCapture) -> None:
        """Capture a graph for every bucket of decode steps. A warning if the operators do not allow it."""
        if self.inputs.buffer is None:
            self.inputs.stage()
        shape = self.max_num_seqs, self.config.vocab_size
        logits = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        try:
            self.graphs = DecodeGraphs(self.inputs, self.decode_step, logits, self.max_num_seqs, capture)
        except CaptureFailed as error:
            warnings.warn(f"decode steps run eagerly, without CUDA graphs: {error}", RuntimeWarning, stacklevel=3)

    def capture_mixed(self, capture: CudaCapture) -> None:
        """Capture steps with prompts too, after those of decode, whose logits they share. A warning if the operators
        do not allow it."""
        try:
            self.mixed_graphs = MixedGraphs(
                self.inputs, self.decode_step, self.graphs.logits, self.max_batched_tokens, capture
            )
        except CaptureFailed as error:
            warnings.warn(f"steps with prompts run eagerly: {error}", RuntimeWarning, stacklevel=3)

    def warm_up(self) -> None:
        """Run steps of every kind once, so that no request waits for a kernel to be compiled. Block 1 must be free."""
        block_size = self.kv.block_size
        for sizes in warm_up_steps(self.max_num_seqs, self.max_batched_tokens, self.max_model_len):
            self.run(rehearsal(sizes, block_size, SAMPLED))
        self.kv.data[:, :, 1].zero_()
        self._unread = Unread()

    def _fitting_blocks(self, block_size: int, share: float) -> int:
        """How many blocks of cache there is room for."""
        size = PagedKV.block_bytes(self.config, block_size, self.model.dtype)
        most = self.max_num_seqs * self.inputs.width + 1  # more could never be used at once, but for cached prefixes
        if self.device.type == "cpu":
            return max(2, min(most, CPU_CACHE_BYTES // size))
        sizes = largest_step(self.max_num_seqs, self.max_batched_tokens, self.max_model_len)
        self.kv = PagedKV(self.config, 2, block_size, self.model.dtype, self.device)
        peak = peak_bytes(self.run, rehearsal(sizes, block_size, SAMPLED), self.device)
        self._unread = Unread()
        torch.cuda.empty_cache()
        return blocks_that_fit(*torch.cuda.mem_get_info(self.device), peak, size, share)

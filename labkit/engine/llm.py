"""The front: a model's name in, texts out.

    llm = LLM("smollm2-135m")
    llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text

``llm.pool``, ``llm.scheduler``, ``llm.trace`` and ``llm.runner`` are the parts, to look at and to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.core import Completion, Engine, Live
from labkit.engine.loader import load
from labkit.engine.memory import check_share
from labkit.engine.model import Model
from labkit.engine.options import SchedulerOptions, check_switches
from labkit.engine.packed import check_quantization
from labkit.engine.pool import BlockPool
from labkit.engine.quiet import freeze_while_alive
from labkit.engine.request import SamplingParams
from labkit.engine.runner import Runner
from labkit.engine.scheduler import Scheduler
from labkit.engine.tokenizer import Tokenizer
from labkit.engine.trace import Trace
from labkit.errors import LabError

Prompt = str | Sequence[int]


class LLM:
    """A model, ready to generate for many requests at once.

    model: a built-in name, a Hugging Face folder, a GGUF file, a ModelConfig (random weights), or a (Model, Tokenizer
    or None) that is loaded already.
    max_num_seqs: requests that run at once. max_batched_tokens: tokens a step computes at most. block_size, num_blocks:
    the paged cache; num_blocks None takes what fits (see Runner). max_model_len: tokens of a request, by default the
    model's positions.
    quantization: None, or "awq": the 4-bit products of an AWQ folder stay packed, random weights are rounded to 4 bits;
    of a model that is loaded already the products must be packed (see ``quantised_model``).
    policy "fcfs", "priority" or "shortest"; prefix_caching, chunked_prefill, cuda_graphs, run_ahead (None: on a GPU),
    freeze_gc (None: on a GPU; see quiet.py), preemption "recompute" or "swap" (with host_blocks), batching
    "continuous", "static" or "bucketed": each can be turned off and measured. ops: operators to use in place of the
    engine's, by name (see ops.py).
    seed: of random weights, and of requests that bring none. trace: record every decision in ``llm.trace``.

    Raises LabError for a model that is not there or that no kernel serves, and for settings out of range.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | tuple[Model, Tokenizer | None] = "smollm2-135m",
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        max_num_seqs: int = 8,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_batched_tokens: int = 512,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        cuda_graphs: bool = True,
        run_ahead: bool | None = None,
        freeze_gc: bool | None = None,
        preemption: str = "recompute",
        host_blocks: int = 0,
        batching: str = "continuous",
        quantization: str | None = None,
        ops: Mapping[str, Callable] | None = None,
        seed: int = 0,
        memory_share: float = 0.9,
        trace: bool = True,
        progress: Callable[[str], None] | None = print,
    ):
        check_quantization(quantization)
        settings = dict(
            max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens, policy=policy, preemption=preemption,
            chunked_prefill=chunked_prefill, host_blocks=host_blocks, batching=batching,
        )  # fmt: skip
        # What is wrong here should not wait for a model to be read.
        SchedulerOptions(**settings, **({} if max_model_len is None else {"max_model_len": max_model_len}))
        check_switches(
            ("run_ahead", "freeze_gc"), prefix_caching=prefix_caching, cuda_graphs=cuda_graphs, trace=trace,
            run_ahead=run_ahead, freeze_gc=freeze_gc,
        )  # fmt: skip
        check_share(memory_share)
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
            raise LabError(f"seed must be a whole number of 64 bits, got {seed!r}")
        if ops is not None and not isinstance(ops, Mapping):
            raise LabError(f"ops must be a dict of operators by name, got {ops!r:.60}")
        if isinstance(model, tuple):
            self.model, self.tokenizer = model
            if quantization is not None and not self.model.weights.packed:
                raise LabError(
                    f"quantization={quantization!r} was asked for, and the weights of this model are not packed; "
                    f"labkit.engine.quantised_model packs what rtn, awq or gptq returned"
                )
        else:
            self.model, self.tokenizer = load(model, dtype, device, seed, progress, quantization)
        self.config = self.model.config
        self.runner = Runner(
            self.model, block_size, num_blocks, max_num_seqs, max_batched_tokens, max_model_len, cuda_graphs, ops,
            host_blocks, memory_share, seed,
        )  # fmt: skip
        self.max_model_len = self.runner.max_model_len
        self.pool = BlockPool(self.runner.kv.num_blocks, block_size, prefix_caching)
        self.trace = Trace() if trace else None
        eos, longest = self.config.eos_token_ids, self.max_model_len
        self.scheduler = Scheduler(self.pool, trace=self.trace, eos_token_ids=eos, max_model_len=longest, **settings)
        cuda = self.model.device.type == "cuda"
        run_ahead = cuda if run_ahead is None else run_ahead
        self.engine = Engine(self.scheduler, self.runner, self.tokenizer, run_ahead)
        if cuda if freeze_gc is None else freeze_gc:
            freeze_while_alive(self)

    # ---- whole texts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """A completion for each prompt, in their order; other requests of this engine go on meanwhile.

        prompts: texts or lists of token ids, mixed as you like, or a single one. params, priority: one for all, or one
        each. progress: a bar, on a terminal. Raises LabError, before anything runs, for a prompt or parameters that
        cannot run; and when a step has failed, once all prompts that can be completed are.
        """
        prompts = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else _several(prompts)
        each = _one_each("params", params if params is not None else SamplingParams(), SamplingParams, len(prompts))
        ranks = _one_each("priority", priority, int, len(prompts))
        lives: list[Live] = []
        try:
            for place, prompt in enumerate(prompts):
                try:
                    lives.append(self.engine.add(self._ids(prompt), each[place], ranks[place]))
                except LabError as error:
                    raise LabError(f"prompt {place}: {error}" if len(prompts) > 1 else str(error)) from error
            self._finish(lives, progress)
        finally:
            for live in lives:  # a refusal or an interrupt must not leave its neighbours in the engine
                self.engine.abort(live.request.id)
        for live in lives:
            _raise_for(live)
        return [live.completion() for live in lives]

    def chat(
        self, messages: Sequence[dict], params: SamplingParams | None = None, stream: bool = False
    ) -> Completion | Iterator[str]:
        """The answer to a conversation ({"role", "content"} each), through the model's chat template; ``stream``: its
        text piece by piece. Raises LabError if the model has no template."""
        if self.tokenizer is None:
            raise LabError("this model has no tokenizer, so it has no chat template; pass token ids to generate")
        ids = self.tokenizer.chat(messages)
        return self.stream(ids, params) if stream else self.generate([ids], params, progress=False)[0]

    # ---- piece by piece

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text pieces as they become certain. The request is queued at once; several streams may be read by turns.
        Closing the iterator aborts the request. Raises LabError as generate does."""
        live = self.engine.add(self._ids(prompt), params if params is not None else SamplingParams())
        pieces = self._stream(live)
        next(pieces)  # into its ``try``: a generator that has not begun is closed, or forgotten, without ``finally``
        return pieces

    def _stream(self, live: Live) -> Iterator[str]:
        try:
            yield ""  # taken by ``stream``
            while True:
                pieces, live.fresh = live.fresh, []
                yield from filter(None, pieces)
                if live.done and not live.fresh:
                    break
                if not live.done:
                    self.engine.step()
            _raise_for(live)
        finally:
            self.engine.abort(live.request.id)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0) -> int:
        """Queue a request -> its id, for ``step`` and ``abort``."""
        params = params if params is not None else SamplingParams()
        return self.engine.add(self._ids(prompt), params, priority).request.id

    def step(self) -> list[Completion]:
        """Run one step -> completions of the requests that ended in it."""
        return [live.completion() for live in self.engine.step() if live.done]

    def abort(self, request_id: int) -> bool:
        """End a request wherever it is; its blocks go back to the pool -> whether it was there."""
        return self.engine.abort(request_id)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise LabError("this model has no tokenizer: give its prompts as lists of token ids")
        return self.tokenizer.encode(prompt)

    def _finish(self, lives: list[Live], progress: bool) -> None:
        from tqdm import tqdm

        bar = tqdm(total=len(lives), unit="request", disable=None if progress else True)  # None: only on a terminal
        with bar:
            waiting, tokens = list(lives), 0
            while waiting:
                self.engine.step()
                left = [live for live in waiting if not live.done]
                if len(left) < len(waiting):
                    tokens += sum(len(live.token_ids) for live in waiting if live.done)
                    bar.set_postfix_str(f"{tokens} tokens")
                    bar.update(len(waiting) - len(left))
                waiting = left


def _is_ids(prompts) -> bool:
    """Whether this is one prompt's token ids and not several prompts."""
    if getattr(prompts, "ndim", None) == 1:
        return True
    return isinstance(prompts, (list, tuple)) and bool(prompts) and all(type(p) is int for p in prompts)


def _several(prompts) -> list:
    try:
        return list(prompts)
    except TypeError as error:
        raise LabError(f"prompts must be a text, a list of token ids, or a list of those, got {prompts!r}") from error


def _one_each(name: str, given, kind: type, count: int) -> list:
    if isinstance(given, kind):
        return [given] * count
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(given) != count or not all(isinstance(p, kind) for p in given):
        raise LabError(f"{name} must be one {kind.__name__}, or a list of {count}, one for each prompt")
    return given


def _raise_for(live: Live) -> None:
    if live.error is not None:
        what = f"{type(live.error).__name__}: {live.error}"
        raise LabError(f"a step that request {live.request.id} was in failed ({what})") from live.error

"""The bytes and FLOPs of one step of a decoder: what has to cross device memory, and what has to be computed.

The model is Llama's: per layer a QKV projection with grouped heads, attention, an output projection and a gated MLP;
RMSNorm before each half and once at the end; an output head. Counting rules:

* Weights are read once a step, however many tokens it holds. Of the input embedding one row a token is read, not the
  table. RMSNorm's vectors and the embedding rows are counted at ``activation_bytes`` a value.
* The KV cache: every token that is attended to is read once for its own sequence, and each new token is written.
  Sequences are taken to share nothing.
* Activations pass from one operator to the next through memory, and are read and written there, only if the tensor is
  larger than ``on_chip_bytes``. A smaller one is still in L2 when its reader comes. In decoding all of them are.
* A multiply-add is two FLOPs. Attention is causal: token i attends to itself and what came before, so a prompt of P
  tokens has P(P+1)/2 pairs of query and key, about half the square. Scores and weighted sum cost 4 FLOPs a pair, head
  and dimension.
* Norms, rotary embedding and SiLU are counted as "elementwise": 5, 3 and 5 FLOPs a value.
* Not counted: softmax's exponentials, biases, sampling, block tables, partial results of split attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kernels.op import Cost
from labkit.errors import LabError

# The smallest L2 of the data-centre GPUs in the catalogue (A100, 40 MB); H100 has 50, H200 60.
ON_CHIP_BYTES = 40_000_000


class ModelShape(Protocol):
    """What the counts need to know of a model. ``matmul_params``: every weight a token is multiplied with, the output
    head included and the embedding table not."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    matmul_params: int


class Flops(NamedTuple):
    """FLOPs of a step by what does them."""

    projections: int
    attention: int
    lm_head: int
    elementwise: int


class _Part(NamedTuple):
    """One operator over all layers. ``tensors``: bytes of each activation that it reads or writes, in one layer."""

    name: str
    kind: str
    layers: int
    weight_bytes: float
    kv_bytes: float
    tensors: tuple[float, ...]
    flops: float

    def activation_bytes(self, on_chip_bytes: float) -> float:
        return self.layers * sum(t for t in self.tensors if t > on_chip_bytes)


@dataclass(frozen=True)
class StepCost:
    """Bytes and FLOPs of one step. ``tokens``: tokens the step computes; a decode step emits as many."""

    phase: str
    batch: int
    tokens: int
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    flops: Flops

    @property
    def kv_bytes(self) -> int:
        """The cache read, and the new tokens written."""
        return self.kv_read_bytes + self.kv_write_bytes

    @property
    def cost(self) -> Cost:
        """All of it: least traffic in bytes, and FLOPs."""
        return Cost(self.weight_bytes + self.kv_bytes + self.activation_bytes, sum(self.flops))

    def least_s(self, bandwidth_gb_s: float, tflops: float | None = None) -> float:
        """Least seconds a step, traffic and arithmetic overlapped perfectly; without ``tflops``, traffic alone."""
        if not bandwidth_gb_s > 0 or (tflops is not None and not tflops > 0):
            raise LabError(f"StepCost: rates must be positive, got {bandwidth_gb_s} GB/s and {tflops} TFLOP/s.")
        memory_s = self.cost.bytes / (bandwidth_gb_s * 1e9)
        return memory_s if tflops is None else max(memory_s, self.cost.flops / (tflops * 1e12))

    def tokens_per_s(self, bandwidth_gb_s: float, tflops: float | None = None) -> float:
        """Upper bound on tokens a second of the whole batch: emitted ones when decoding, prompt tokens in prefill."""
        return self.tokens / self.least_s(bandwidth_gb_s, tflops)

    def table(self) -> str:
        """Bytes and shares with fixed rounding, as text that a notebook can compare."""
        rows = [("weights", self.weight_bytes), ("KV cache", self.kv_bytes), ("activations", self.activation_bytes)]
        total = self.cost.bytes
        lines = [f"{'moved per step':<16}{'bytes':>8}{'share':>11}"]
        lines += [f"{name:<16}{size / 1e9:>6.2f} GB{100 * size / total:>9.1f} %" for name, size in rows]
        return "\n".join(lines)


def kv_bytes_per_token(config: ModelShape, kv_bytes: float = 2) -> float:
    """Bytes one cached token holds: K and V, every layer, every KV head, ``kv_bytes`` a value."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes


def decode_step(
    config: ModelShape,
    batch: int,
    context: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    *,
    lm_head_bytes: float | None = None,
    activation_bytes: float = 2,
    on_chip_bytes: float = ON_CHIP_BYTES,
) -> StepCost:
    """One new token for each of ``batch`` sequences.

    context: tokens each sequence attends to, the new one included. weight_bytes: bytes per weight, with its share of
    scales and zero points: 2 for bf16; (4 + 16/64) / 8 = 0.53 for 4 bits with a 16-bit scale for each group of 64;
    (4 + 20/128) / 8 = 0.52 with a scale and a 4-bit zero point for each group of 128. lm_head_bytes: the same for the
    output head, which quantised models often keep in 16 bits; by default as the others.
    """
    parts = _parts(config, batch, 1, context, weight_bytes, kv_bytes, lm_head_bytes, activation_bytes)
    return _total("decode", config, batch, 1, context, kv_bytes, parts, on_chip_bytes)


def prefill_step(
    config: ModelShape,
    batch: int,
    prompt: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    *,
    cached: int = 0,
    lm_head_bytes: float | None = None,
    activation_bytes: float = 2,
    on_chip_bytes: float = ON_CHIP_BYTES,
) -> StepCost:
    """``prompt`` new tokens for each of ``batch`` sequences, after ``cached`` tokens whose K and V exist already.

    A chunk of a chunked prefill is the same with ``cached`` counting the chunks before it. Logits are computed for the
    last token of each sequence only. Keys and values are read once, which holds while a head's K and V fit in L2.
    """
    if cached < 0:
        raise LabError(f"prefill_step: cached is {cached}; it counts tokens and cannot be negative.")
    parts = _parts(config, batch, prompt, cached + prompt, weight_bytes, kv_bytes, lm_head_bytes, activation_bytes)
    return _total("prefill", config, batch, prompt, cached + prompt, kv_bytes, parts, on_chip_bytes)


def operators(
    config: ModelShape,
    batch: int,
    context: int,
    phase: str = "decode",
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    *,
    lm_head_bytes: float | None = None,
    activation_bytes: float = 2,
) -> list[tuple[str, Cost]]:
    """(name, Cost) of each operator over all layers, each judged alone: its inputs and outputs all cross memory.

    phase: "decode" (one new token at ``context``) or "prefill" (``context`` new tokens). The sum is the step with
    ``on_chip_bytes=0``. RoPE includes writing K and V to the cache.
    """
    if phase not in ("decode", "prefill"):
        raise LabError(f"operators: phase is {phase!r}; it must be 'decode' or 'prefill'.")
    new = 1 if phase == "decode" else context
    parts = _parts(config, batch, new, context, weight_bytes, kv_bytes, lm_head_bytes, activation_bytes)
    return [
        (p.name, Cost(round(p.weight_bytes) + round(p.kv_bytes) + round(p.activation_bytes(0)), round(p.flops)))
        for p in parts
    ]


def crossover_tokens(config: ModelShape, weight_bytes: float = 2, kv_bytes: float = 2) -> int:
    """Cached tokens in the whole batch from which a decode step reads at least as many bytes of KV as of weights.

    Batch size does not enter: every cached token is read once a step, by the sequence that owns it.
    """
    per_token = kv_bytes_per_token(config, kv_bytes)
    return -int(-config.matmul_params * weight_bytes // per_token)


def _parts(
    c: ModelShape,
    batch: int,
    new: int,
    context: int,
    weight_bytes: float,
    kv_bytes: float,
    lm_head_bytes: float | None,
    activation_bytes: float,
) -> list[_Part]:
    """Operators in the order they run. ``new`` tokens a sequence are computed; the last of them sees ``context``."""
    for name, value in (("batch", batch), ("new tokens", new), ("context", context)):
        if value < 1:
            raise LabError(f"A step needs at least one sequence and one token; {name} is {value}.")
    sizes = (("weight_bytes", weight_bytes), ("kv_bytes", kv_bytes), ("activation_bytes", activation_bytes))
    for name, value in (*sizes, ("lm_head_bytes", lm_head_bytes)):
        if value is not None and not value > 0:
            raise LabError(f"{name} is {value}; it must be a positive number of bytes a value, such as 2 or 0.53.")
    hidden, inner, layers = c.hidden_size, c.intermediate_size, c.num_layers
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    head_weights = hidden * c.vocab_size
    layer_weights = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner
    if layers * layer_weights + head_weights != c.matmul_params:
        raise LabError(
            f"The model's sizes give {layers * layer_weights + head_weights:,} multiplied weights, but matmul_params "
            f"says {c.matmul_params:,}; these counts hold for a dense Llama-like decoder only."
        )
    tokens = batch * new
    # The i-th of the new tokens attends to context - new + i tokens: sum over i of that.
    pairs = batch * (new * (context - new) + new * (new + 1) // 2)
    kv_token = kv_bytes_per_token(c, kv_bytes)

    def rows(*widths: int, count: int = tokens) -> tuple[float, ...]:
        return tuple(count * width * activation_bytes for width in widths)

    def linear(name: str, width_in: int, width_out: int) -> _Part:
        weights = width_in * width_out * layers
        return _Part(
            name, "projections", layers, weights * weight_bytes, 0, rows(width_in, width_out), 2 * tokens * weights
        )

    def elementwise(name, times, tensors, flops, weights=0.0, kv=0.0) -> _Part:
        return _Part(name, "elementwise", times, weights, kv, tensors, flops)

    norms = 2 * layers + 1
    head_bytes = weight_bytes if lm_head_bytes is None else lm_head_bytes
    return [
        elementwise("embedding", 1, rows(hidden), 0, weights=tokens * hidden * activation_bytes),
        # Residual add and norm in one pass: read both, write both.
        elementwise(
            "norms", norms, rows(*[hidden] * 4), 5 * norms * tokens * hidden, weights=norms * hidden * activation_bytes
        ),
        linear("qkv_proj", hidden, q + 2 * kv),
        elementwise("rope", layers, rows(q + kv, q, kv), 3 * layers * tokens * (q + kv), kv=tokens * kv_token),
        _Part("attention", "attention", layers, 0, batch * context * kv_token, rows(q, q), 4 * layers * pairs * q),
        linear("o_proj", q, hidden),
        linear("gate_up", hidden, 2 * inner),
        elementwise("silu_mul", layers, rows(2 * inner, inner), 5 * layers * tokens * inner),
        linear("down", inner, hidden),
        _Part(
            "lm_head",
            "lm_head",
            1,
            head_weights * head_bytes,
            0,
            rows(hidden, c.vocab_size, count=batch),
            2 * batch * head_weights,
        ),
    ]


def _total(
    phase: str, c: ModelShape, batch: int, new: int, context: int, kv_bytes: float, parts: list[_Part], on_chip: float
) -> StepCost:
    flops = {kind: sum(round(p.flops) for p in parts if p.kind == kind) for kind in Flops._fields}
    kv_token = kv_bytes_per_token(c, kv_bytes)
    return StepCost(
        phase=phase,
        batch=batch,
        tokens=batch * new,
        weight_bytes=sum(round(p.weight_bytes) for p in parts),
        kv_read_bytes=round(batch * context * kv_token),
        kv_write_bytes=round(batch * new * kv_token),
        activation_bytes=sum(round(p.activation_bytes(on_chip)) for p in parts),
        flops=Flops(**flops),
    )

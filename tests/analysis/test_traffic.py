"""Bytes and FLOPs of a step: against published sizes, against brute-force counting, and against themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.op import Cost
from labkit.analysis import Roofline, crossover_tokens, decode_step, kv_bytes_per_token, operators, prefill_step
from labkit.errors import LabError


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool = False

    @property
    def matmul_params(self) -> int:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv) + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size


LLAMA_3_8B = Shape(32, 4096, 14336, 32, 8, 128, 128_256)
QWEN_7B_MHA = Shape(32, 4096, 11008, 32, 32, 128, 151_936)
TINY = Shape(2, 24, 40, 4, 2, 8, 50)  # q width 32 differs from hidden 24


def test_llama_3_8b_decode():
    step = decode_step(LLAMA_3_8B, batch=1, context=512)
    assert LLAMA_3_8B.matmul_params == 7_504_658_432  # 8.03 billion less the 0.53 billion of the input embedding
    assert round(step.weight_bytes / 1e9, 2) == 15.01
    assert step.kv_read_bytes == 512 * 131_072 and step.kv_write_bytes == 131_072
    assert round(step.kv_bytes / 1e9, 2) == 0.07
    assert round(step.cost.bytes / 1e9, 2) == 15.08
    assert round(step.tokens_per_s(4550)) == 302


def test_table():
    assert decode_step(LLAMA_3_8B, 1, 512).table() == (
        "moved per step     bytes      share\n"
        "weights          15.01 GB     99.6 %\n"
        "KV cache          0.07 GB      0.4 %\n"
        "activations       0.00 GB      0.0 %"
    )


def test_shares_add_up():
    table = prefill_step(LLAMA_3_8B, 4, 4096).table()
    assert sum(float(line.split()[-2]) for line in table.splitlines()[1:]) == pytest.approx(100, abs=0.2)


def test_decode_flops_are_two_a_weight_and_four_a_pair():
    step = decode_step(LLAMA_3_8B, batch=3, context=1000)
    head = 4096 * 128_256
    assert step.flops.projections == 2 * 3 * (LLAMA_3_8B.matmul_params - head)
    assert step.flops.lm_head == 2 * 3 * head
    assert step.flops.attention == 3 * 32 * 32 * 4 * 128 * 1000
    assert step.flops.elementwise < 0.001 * step.flops.projections
    assert step.cost.flops == sum(step.flops)


def test_batch_shares_weights_and_nothing_else():
    one, eight = decode_step(LLAMA_3_8B, 1, 512), decode_step(LLAMA_3_8B, 8, 512)
    assert eight.kv_bytes == 8 * one.kv_bytes and eight.cost.flops == 8 * one.cost.flops
    assert eight.weight_bytes - one.weight_bytes == 7 * 4096 * 2  # seven more rows of the embedding


def test_one_embedding_row_a_token_is_read_not_the_table():
    small, large = Shape(2, 24, 40, 4, 2, 8, 50), Shape(2, 24, 40, 4, 2, 8, 51)
    grown = decode_step(large, 1, 4).weight_bytes - decode_step(small, 1, 4).weight_bytes
    assert grown == 24 * 2  # one more column of the output head; the embedding table adds nothing
    assert prefill_step(TINY, 1, 9).weight_bytes - prefill_step(TINY, 1, 8).weight_bytes == 24 * 2


def test_weights_by_hand():
    """TINY in bf16: projections and head, five norm vectors of 24, one embedding row of 24."""
    layer = 24 * (32 + 16 + 16) + 32 * 24 + 3 * 24 * 40
    assert decode_step(TINY, 1, 1).weight_bytes == 2 * (2 * layer + 24 * 50 + 5 * 24 + 24)


@pytest.mark.parametrize("batch, prompt, cached", [(1, 1, 0), (2, 7, 0), (3, 5, 11), (1, 1, 6)])
def test_attention_flops_against_a_mask(batch, prompt, cached):
    mask = torch.ones(prompt, cached + prompt).tril(diagonal=cached)
    pairs = int(mask.sum())
    step = prefill_step(TINY, batch, prompt, cached=cached)
    assert step.flops.attention == batch * pairs * 4 * TINY.head_dim * TINY.num_heads * TINY.num_layers


@pytest.mark.parametrize("batch, prompt, cached", [(1, 1, 0), (2, 7, 3)])
def test_matrix_flops_against_torch_s_counter(batch, prompt, cached):
    """torch's own FLOP counter on the model's products, run on meta tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    c, tokens = TINY, batch * prompt
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    with FlopCounterMode(display=False) as counter:
        for _ in range(c.num_layers):
            for wide_in, wide_out in (
                (c.hidden_size, q + 2 * kv),
                (q, c.hidden_size),
                (c.hidden_size, 2 * c.intermediate_size),
                (c.intermediate_size, c.hidden_size),
            ):
                torch.empty(tokens, wide_in, device="meta") @ torch.empty(wide_in, wide_out, device="meta")
    step = prefill_step(c, batch, prompt, cached=cached)
    assert step.flops.projections == counter.get_total_flops()
    assert step.flops.lm_head == 2 * batch * c.hidden_size * c.vocab_size


def test_causal_half():
    step = prefill_step(LLAMA_3_8B, 1, 4096)
    square = 4 * 4096**2 * 32 * 128 * 32
    assert step.flops.attention / square == pytest.approx(0.5, rel=1e-3)


def test_chunks_of_a_prefill_do_the_work_of_the_whole():
    whole = prefill_step(LLAMA_3_8B, 1, 4096)
    chunks = [prefill_step(LLAMA_3_8B, 1, 1024, cached=done) for done in range(0, 4096, 1024)]
    assert sum(c.flops.attention for c in chunks) == whole.flops.attention
    assert sum(c.flops.projections for c in chunks) == whole.flops.projections
    assert sum(c.kv_write_bytes for c in chunks) == whole.kv_write_bytes
    assert sum(c.weight_bytes for c in chunks) > 3.9 * whole.weight_bytes  # what chunking costs
    assert sum(c.kv_read_bytes for c in chunks) == 131_072 * (1024 + 2048 + 3072 + 4096)


def test_a_decode_step_is_a_prefill_of_one_token():
    decode, prefill = decode_step(TINY, 2, 9), prefill_step(TINY, 2, 1, cached=8)
    assert decode.cost == prefill.cost and decode.flops == prefill.flops and decode.tokens == prefill.tokens == 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("config", [TINY, LLAMA_3_8B, QWEN_7B_MHA], ids=["tiny", "llama", "mha"])
@pytest.mark.parametrize("weight_bytes", [2, 0.53])
def test_operators_add_up_to_the_step(config, phase, weight_bytes):
    parts = operators(config, 2, 33, phase, weight_bytes)
    make = decode_step if phase == "decode" else prefill_step
    assert sum((cost for _, cost in parts), Cost(0, 0)) == make(config, 2, 33, weight_bytes, on_chip_bytes=0).cost


def test_operators_stand_where_the_roofline_expects_them():
    parts = dict(operators(LLAMA_3_8B, 1, 4096))
    assert {"qkv_proj", "attention", "o_proj", "gate_up", "down", "norms", "lm_head"} <= set(parts)
    assert parts["gate_up"].intensity == pytest.approx(1.0, rel=0.01)  # two FLOPs for each two-byte weight
    assert parts["attention"].intensity == pytest.approx(4.0, rel=0.01)  # four query heads share a KV head
    roof = Roofline(4800, {"bf16": 989.4})
    assert {roof.bound_by(cost, "bf16") for cost in parts.values()} == {"memory"}
    prefill = dict(operators(LLAMA_3_8B, 1, 4096, "prefill"))
    assert roof.bound_by(prefill["gate_up"], "bf16") == roof.bound_by(prefill["attention"], "bf16") == "compute"
    assert roof.bound_by(prefill["norms"], "bf16") == "memory"


def test_intensity_of_a_projection_grows_with_the_batch():
    intensities = [dict(operators(LLAMA_3_8B, batch, 512))["gate_up"].intensity for batch in (1, 8, 64)]
    assert intensities == pytest.approx([1, 8, 64], rel=0.05)


def test_activations_are_counted_once_they_do_not_fit_on_chip():
    assert decode_step(LLAMA_3_8B, 64, 512).activation_bytes == 0
    # 512 tokens: the widest tensor, gate and up, has 512 * 28672 * 2 = 29 MB; 1024 tokens: 59 MB, in 32 layers twice.
    assert prefill_step(LLAMA_3_8B, 1, 512).activation_bytes == 0
    assert prefill_step(LLAMA_3_8B, 1, 1024).activation_bytes == 32 * 2 * 1024 * 28_672 * 2
    assert prefill_step(LLAMA_3_8B, 1, 1024, on_chip_bytes=60_000_000).activation_bytes == 0


def test_four_bit_weights_with_scales_and_a_sixteen_bit_head():
    full = decode_step(LLAMA_3_8B, 1, 512)
    quantised = decode_step(LLAMA_3_8B, 1, 512, weight_bytes=0.53)
    assert quantised.weight_bytes / full.weight_bytes == pytest.approx(0.53 / 2, rel=1e-3)
    mixed = decode_step(LLAMA_3_8B, 1, 512, weight_bytes=0.53, lm_head_bytes=2)
    assert mixed.weight_bytes - quantised.weight_bytes == pytest.approx(1.47 * 4096 * 128_256, rel=1e-6)
    assert isinstance(mixed.cost.bytes, int) and mixed.flops == full.flops


def test_eight_bit_cache_halves_its_traffic():
    assert decode_step(LLAMA_3_8B, 4, 999, kv_bytes=1).kv_bytes * 2 == decode_step(LLAMA_3_8B, 4, 999).kv_bytes


def test_bound_takes_the_slower_of_memory_and_arithmetic():
    step = prefill_step(LLAMA_3_8B, 1, 8192)
    by_flops = 8192 / (step.cost.flops / 720e12)
    assert step.tokens_per_s(4550, 720) == pytest.approx(by_flops)
    assert step.tokens_per_s(4550) == pytest.approx(8192 / (step.cost.bytes / 4550e9))
    decode = decode_step(LLAMA_3_8B, 1, 512)
    assert decode.tokens_per_s(4550, 720) == decode.tokens_per_s(4550)
    assert decode.least_s(4550) == pytest.approx(1 / 301.8, rel=1e-3)


def test_bytes_of_a_cached_token():
    assert kv_bytes_per_token(LLAMA_3_8B) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes_per_token(QWEN_7B_MHA) == 524_288


def test_crossover():
    assert crossover_tokens(LLAMA_3_8B) == pytest.approx(114_000, rel=0.01)

    class MhaWith15GB(Shape):
        matmul_params = 7_700_000_000  # 15.4 GB in bf16

    assert crossover_tokens(MhaWith15GB(32, 4096, 11008, 32, 32, 128, 151_936)) == pytest.approx(29_400, rel=0.001)


@pytest.mark.parametrize("weight_bytes, kv_bytes", [(2, 2), (0.53, 2), (0.53, 1), (2, 1)])
def test_crossover_is_the_first_token_at_which_kv_reaches_the_weights(weight_bytes, kv_bytes):
    tokens = crossover_tokens(LLAMA_3_8B, weight_bytes, kv_bytes)
    assert isinstance(tokens, int)
    weights = LLAMA_3_8B.matmul_params * weight_bytes
    per_token = kv_bytes_per_token(LLAMA_3_8B, kv_bytes)
    assert (tokens - 1) * per_token < weights <= tokens * per_token


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: decode_step(TINY, 0, 5), "batch is 0"),
        (lambda: decode_step(TINY, 1, 0), "context is 0"),
        (lambda: prefill_step(TINY, 1, 0), "new tokens is 0"),
        (lambda: prefill_step(TINY, 1, 5, cached=-1), "cached is -1"),
        (lambda: decode_step(TINY, 1, 5, weight_bytes=0), "weight_bytes is 0"),
        (lambda: decode_step(TINY, 1, 5, kv_bytes=float("nan")), "kv_bytes is nan"),
        (lambda: decode_step(TINY, 1, 5, lm_head_bytes=-2), "lm_head_bytes is -2"),
        (lambda: operators(TINY, 1, 5, "encode"), "phase is 'encode'"),
        (lambda: decode_step(TINY, 1, 5).tokens_per_s(0), "positive"),
        (lambda: decode_step(TINY, 1, 5).tokens_per_s(1, 0), "positive"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(LabError, match=words):
        call()


def test_a_model_that_is_no_dense_llama_is_refused():
    class Sparse(Shape):
        matmul_params = 123

    with pytest.raises(LabError, match="matmul_params says 123"):
        decode_step(Sparse(2, 24, 40, 4, 2, 8, 50), 1, 5)

"""Rope and the scatter to the paged cache in one launch: what stands between the qkv product and attention.

``rope`` turns keys in place and ``scatter`` reads them again to write them to the cache. Nobody else needs the turned
keys: attention reads the cache. So here queries are turned in place, keys are turned on their way to the cache, and
values are copied. For a token with 8 kv heads that is one write and one read of 8 heads less; at batch 1, where both
kernels move kilobytes, it is one launch less in each layer.

    q               [tokens, heads, head_dim]     any token and head stride: views of a fused qkv
    k, v            [tokens, kv_heads, head_dim]  unchanged
    positions       [tokens], int32 or int64
    table           [max_positions, rope_dim], fp32: half cosines, then half sines (``rope.rope_table``)
    k_cache, v_cache  [num_blocks, kv_heads, block_size, head_dim], q's dtype
    slots           [tokens], int32 or int64: block * block_size + offset; -1 stores nothing (q is turned all the same)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import kv_cache, rope
from kernels.launch import arch, vector
from kernels.op import Case, Cost, Op

LAUNCH = rope.LAUNCH


def rope_scatter_reference(q, k, v, positions, table, k_cache, v_cache, slots) -> torch.Tensor:
    """The definition: ``rope``, then ``scatter``. Turns q in place, fills the caches, and returns q."""
    q, k = rope.rope_reference(q, k.clone(), positions, table)
    kv_cache.scatter_reference(k, v, k_cache, v_cache, slots)
    return q


_VARYING = [
    *("tokens", "heads", "kv_heads", "half_v", "rest_v", "q_token_v", "q_head_v", "k_token_v", "k_head_v"),
    *("v_token_v", "v_head_v", "kc_block_v", "kc_head_v", "kc_slot_v", "vc_block_v", "vc_head_v", "vc_slot_v"),
]


@triton.jit(do_not_specialize=_VARYING)
def _rope_scatter_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, table_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    tokens, heads, kv_heads,
    half_v,  # this, the rest of a head that is not turned, and all strides in units of VEC
    rest_v,
    q_token_v, q_head_v, k_token_v, k_head_v, v_token_v, v_head_v,
    kc_block_v, kc_head_v, kc_slot_v, vc_block_v, vc_head_v, vc_slot_v,
    BLOCK_SIZE: tl.constexpr,
    VEC: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,  # tokens and heads a program handles
    HALF: tl.constexpr,  # power of two, at least half
    REST: tl.constexpr,  # power of two, at least the rest; 0 if whole heads are turned
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half = half_v * VEC
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]  # queries, then keys, then values
    cols = tl.arange(0, HALF)[None, None, :]
    there = (token < tokens) & (head < heads + 2 * kv_heads)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    is_q, is_v = head < heads, head >= heads + kv_heads
    token = token.to(tl.int64)  # offsets pass 2**31
    k_head = (head - heads).to(tl.int64)
    v_head = k_head - kv_heads
    q_at = q_ptr + token * (q_token_v * VEC) + head.to(tl.int64) * (q_head_v * VEC)
    k_at = k_ptr + token * (k_token_v * VEC) + k_head * (k_head_v * VEC)
    v_at = v_ptr + token * (v_token_v * VEC) + v_head * (v_head_v * VEC)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kc_at = k_cache_ptr + block * (kc_block_v * VEC) + k_head * (kc_head_v * VEC) + offset * (kc_slot_v * VEC)
    vc_at = v_cache_ptr + block * (vc_block_v * VEC) + v_head * (vc_head_v * VEC) + offset * (vc_slot_v * VEC)
    source = tl.where(is_q, q_at, tl.where(is_v, v_at, k_at))
    target = tl.where(is_q, q_at, tl.where(is_v, vc_at, kc_at))
    stored = there & (is_q | (slot >= 0))
    mask = there & (cols < half)
    a = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + half + cols, mask=mask, other=0.0).to(tl.float32)
    turned = mask & (head < heads + kv_heads)
    cos_at = tl.broadcast_to(table_ptr + position * (2 * half) + cols, (TOKENS, HEADS, HALF))
    cos = tl.load(cos_at, mask=turned, other=1.0)  # a value is turned by the angle 0
    sin = tl.load(cos_at + half, mask=turned, other=0.0)
    first = tl.where(is_v, a, a * cos - b * sin)  # selected: 0 * inf would be NaN
    second = tl.where(is_v, b, b * cos + a * sin)
    tl.store(target + cols, first.to(q_ptr.dtype.element_ty), mask=stored & (cols < half))
    tl.store(target + half + cols, second.to(q_ptr.dtype.element_ty), mask=stored & (cols < half))
    if REST:
        cols = tl.arange(0, REST)[None, None, :]
        mask = stored & (head >= heads) & (cols < rest_v * VEC)
        tl.store(target + 2 * half + cols, tl.load(source + 2 * half + cols, mask=mask), mask=mask)


def rope_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Turns q in place, writes turned k and v into the caches, and returns q. Shapes as in the module's head.

    Raises ValueError for shapes, dtypes or devices that do not fit; ``rope`` and ``scatter`` name them. Neither
    positions nor slots are checked: that would wait for the GPU.
    """
    rope._check(q, k, positions, table)
    kv_cache._check(k, v, k_cache, v_cache, slots)
    if k_cache.dtype != q.dtype:
        raise ValueError(f"rope_scatter: the caches must have q's dtype {q.dtype}, got {k_cache.dtype}")
    (tokens, heads, dim), kv_heads, half = q.shape, k.shape[1], table.shape[1] // 2
    every = heads + 2 * kv_heads
    if not (tokens and every and dim):
        return q
    padded = triton.next_power_of_2(max(half, 1))
    rows = max(1, LAUNCH.block_bytes // (padded * q.element_size()))
    take = min(max(1, rows // LAUNCH.tokens), triton.next_power_of_2(every))
    rest = dim - 2 * half
    strides = [*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]]
    vec = vector(q.element_size(), half, rest, *strides)
    overlap = arch(q.device) >= 90
    _rope_scatter_kernel[(triton.cdiv(tokens, rows // take), triton.cdiv(every, take))](
        q, k, v, positions, table, k_cache, v_cache, slots, tokens, heads, kv_heads,
        half // vec, rest // vec, *(s // vec for s in strides),
        BLOCK_SIZE=k_cache.shape[2], VEC=vec, TOKENS=rows // take, HEADS=take, HALF=padded,
        REST=triton.next_power_of_2(rest) if rest else 0, OVERLAP=overlap, num_warps=LAUNCH.num_warps,
        launch_pdl=overlap,
    )  # fmt: skip
    return q


def rope_scatter_cost(q, k, v, positions, table, k_cache, v_cache, slots) -> Cost:
    """Turned queries read and written, keys and values of the stored tokens read and written, indices, table rows.

    3 FLOPs a turned element. Counts the stored tokens: waits for the GPU.
    """
    (tokens, heads, dim), kv_heads, rope_dim = q.shape, k.shape[1], table.shape[1]
    stored = int((slots >= 0).sum())
    elements = 2 * tokens * heads * rope_dim + 4 * stored * kv_heads * dim
    indices = positions.numel() * positions.element_size() + slots.numel() * slots.element_size()
    rows = min(tokens, table.shape[0]) * rope_dim * 4
    turned = rope_dim * (tokens * heads + stored * kv_heads)
    return Cost(elements * q.element_size() + indices + rows, 3 * turned)


def _case(name, tokens, heads, kv_heads, dim, rope_dim=None, block_size=16, skip=(), index=torch.int64) -> Case:
    """q, k and v are views of one qkv; slots in random order."""

    def make(device, dtype, generator):
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        blocks = tokens // block_size + 2
        k_cache, v_cache = torch.zeros(2, blocks, kv_heads, block_size, dim, dtype=dtype, device=device)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[list(skip)] = -1
        turned = dim if rope_dim is None else rope_dim
        table = rope.rope_table(10_000.0 ** -(torch.arange(0, turned, 2).float() / max(turned, 1)), 300)
        positions = torch.randint(0, 300, (tokens,), generator=generator)
        return {
            "q": q, "k": k, "v": v, "positions": positions.to(device, index), "table": table.to(device),
            "k_cache": k_cache, "v_cache": v_cache, "slots": slots.to(device, index),
        }  # fmt: skip

    return Case(name, make)


def _infinite_values(device, dtype, generator):
    inputs = _case("", 3, 2, 1, 16).make(device, dtype, generator)
    inputs["v"][1] = float("inf")
    return inputs


OP = Op(
    name="rope_scatter",
    reference=rope_scatter_reference,
    triton=rope_scatter,
    cost=rope_scatter_cost,
    cases=(
        _case("no tokens", 0, 2, 1, 64),
        _case("one token", 1, 4, 1, 64),
        _case("a batch of llama heads", 5, 8, 2, 128),
        _case("9 and 3 heads of 64", 21, 9, 3, 64),
        _case("padding is turned and not stored", 9, 2, 2, 64, skip=(0, 4, 8)),
        _case("partial: 6 of 11", 5, 3, 2, 11, rope_dim=6),
        _case("partial: 32 of 128", 3, 4, 2, 128, rope_dim=32),
        _case("half a head no power of two", 3, 4, 2, 96, block_size=4),
        _case("int32 positions and slots", 5, 2, 2, 64, index=torch.int32),
        _case("more heads than a program takes", 3, 40, 40, 16),
        Case("infinite values stay infinite", _infinite_values),
    ),
    mutates=("q", "k_cache", "v_cache"),
)

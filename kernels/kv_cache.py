"""Scatter new keys and values into the paged KV cache.

A page of the cache holds ``block_size`` tokens, and in it each KV head's rows lie together, so that attention reads one
head's page as one run. New tokens come packed, [tokens, kv_heads, head_dim]; ``slots`` says where each goes:

    slot = block * block_size + offset      -1: a padding token, which is not stored
    k_cache[block, head, offset] = k[token, head], v_cache likewise

Every element is read and written once: 4 accesses of head_dim elements for each KV head and token, in runs of
head_dim. Attention over a page of 4096 tokens reads 2048 times as much, so what counts here is the launch: one for keys
and values together.

    k, v              [tokens, kv_heads, head_dim], any token and head stride: views of a fused qkv
    k_cache, v_cache  [num_blocks, kv_heads, block_size, head_dim], any strides, last dimension contiguous
    slots             [tokens], int64 or int32
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, vector
from kernels.op import Case, Cost, Op


@dataclass(frozen=True)
class Launch:
    """How the new rows are cut into programs."""

    block_bytes: int  # of keys, and as much of values: several heads of a token, and several tokens if heads are few
    num_warps: int


# Measured on an H200, 64k tokens of 8 x 128 in bf16, as shares of torch's copy: 16 bytes of keys and of values a thread
# get 0.935 to 0.939, in blocks of 2 or 4 KB alike; with half the threads idle 0.87. With 3 heads of 64, one token a
# program (384 bytes) gets 0.60 and four 0.87: a quarter of the lanes stand for the fourth head that is not there.
LAUNCH = Launch(block_bytes=2048, num_warps=4)


def scatter_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    debug: bool = False,
) -> None:
    """Writes k and v into the caches, rounded to their dtype; negative slots are left out."""
    kept = slots >= 0
    slot = slots[kept].long()
    block, offset = slot // k_cache.shape[2], slot % k_cache.shape[2]
    k_cache[block, :, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, :, offset] = v[kept].to(v_cache.dtype)


_VARYING = [
    *("tokens", "heads", "dim_v", "k_token_v", "k_head_v", "v_token_v", "v_head_v"),
    *("kc_block_v", "kc_head_v", "kc_slot_v", "vc_block_v", "vc_head_v", "vc_slot_v"),
]


@triton.jit(do_not_specialize=_VARYING)
def _scatter_kernel(
    k_ptr,  # [tokens, heads, dim]
    v_ptr,  # [tokens, heads, dim]
    k_cache_ptr,  # [num_blocks, heads, BLOCK_SIZE, dim]
    v_cache_ptr,  # [num_blocks, heads, BLOCK_SIZE, dim]
    slots_ptr,  # [tokens]
    tokens,
    heads,
    dim_v,  # this and all strides in units of VEC
    k_token_v,
    k_head_v,
    v_token_v,
    v_head_v,
    kc_block_v,
    kc_head_v,
    kc_slot_v,
    vc_block_v,
    vc_head_v,
    vc_slot_v,
    BLOCK_SIZE: tl.constexpr,
    VEC: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens and heads a program handles
    HEADS: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least dim
):
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = (tl.program_id(1) * HEADS + row % HEADS).to(tl.int64)[:, None]
    cols = tl.arange(0, DIM)[None, :]
    # int64 from here on: slot * stride passes 2**31 in any cache worth having
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)[:, None]
    token = token.to(tl.int64)[:, None]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    mask = (slot >= 0) & (head < heads) & (cols < dim_v * VEC)
    k = tl.load(k_ptr + token * (k_token_v * VEC) + head * (k_head_v * VEC) + cols, mask=mask)
    v = tl.load(v_ptr + token * (v_token_v * VEC) + head * (v_head_v * VEC) + cols, mask=mask)
    k_at = block * (kc_block_v * VEC) + head * (kc_head_v * VEC) + offset * (kc_slot_v * VEC)
    v_at = block * (vc_block_v * VEC) + head * (vc_head_v * VEC) + offset * (vc_slot_v * VEC)
    tl.store(k_cache_ptr + k_at + cols, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + v_at + cols, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def _check(k, v, k_cache, v_cache, slots) -> None:
    if k.dim() != 3 or v.shape != k.shape:
        raise ValueError(
            f"scatter: k and v must both be [tokens, kv_heads, head_dim], got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k_cache.dim() != 4 or v_cache.shape != k_cache.shape or k_cache.shape[1::2] != k.shape[1:]:
        raise ValueError(
            f"scatter: k_cache and v_cache must both be [num_blocks, {k.shape[1]}, block_size, {k.shape[2]}] for k "
            f"{tuple(k.shape)}, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if slots.shape != k.shape[:1] or slots.dtype not in (torch.int64, torch.int32) or not slots.is_contiguous():
        raise ValueError(
            f"scatter: slots must be contiguous int64 or int32 [{k.shape[0]}], "
            f"got {slots.dtype} {list(slots.shape)} with strides {slots.stride()}"
        )
    for name, t in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dtype not in DTYPES:
            raise ValueError(f"scatter: {name} must be float32, float16 or bfloat16, got {t.dtype}")
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(f"scatter: {name}'s last dimension must be contiguous (stride 1), got {t.stride(-1)}")
    if v.dtype != k.dtype or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"scatter: k and v, and both caches, must be alike in dtype, got {k.dtype} and {v.dtype}, "
            f"{k_cache.dtype} and {v_cache.dtype}"
        )
    for name, t in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slots", slots)):
        if t.device != k.device:
            raise ValueError(f"scatter: {name} must be on k's device {k.device}, got {t.device}")


def _check_slots(slots: torch.Tensor, capacity: int) -> None:
    kept = slots[slots != -1]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < capacity:
        raise ValueError(
            f"scatter: slots run from {int(kept.min())} to {int(kept.max())}; the cache has 0 to {capacity - 1}, "
            "and -1 means skip"
        )
    if kept.unique().numel() != kept.numel():
        raise ValueError("scatter: two tokens have the same slot, so which of them is kept is undefined")


def scatter_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    debug: bool = False,
    **launch,
) -> None:
    """Writes k, v [tokens, kv_heads, head_dim] into the caches at ``slots``, rounded to the caches' dtype.

    Shapes as in the module's head. Keywords replace fields of ``LAUNCH``. Raises ValueError for shapes, dtypes or
    devices that do not fit. Slots are not checked, since that waits for the GPU: one past the cache writes foreign
    memory, and of two tokens with one slot either may stay. ``debug=True`` waits, and raises ValueError for both.
    """
    _check(k, v, k_cache, v_cache, slots)
    if debug:
        _check_slots(slots, k_cache.shape[0] * k_cache.shape[2])
    if not k.numel():
        return
    tokens, heads, dim = k.shape
    settings = replace(LAUNCH, **launch) if launch else LAUNCH
    size, padded = k.element_size(), triton.next_power_of_2(dim)
    rows = max(1, settings.block_bytes // (padded * size))
    take = min(rows, triton.next_power_of_2(heads))
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    vec = vector(min(size, k_cache.element_size()), dim, *strides)
    _scatter_kernel[(triton.cdiv(tokens, rows // take), triton.cdiv(heads, take))](
        k, v, k_cache, v_cache, slots, tokens, heads, dim // vec, *(s // vec for s in strides),
        BLOCK_SIZE=k_cache.shape[2], VEC=vec, TOKENS=rows // take, HEADS=take, DIM=padded,
        num_warps=settings.num_warps,
    )  # fmt: skip


def scatter_cost(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    debug: bool = False,
) -> Cost:
    """Each stored token's keys and values read and written once, and all slots read. Counts the stored: waits."""
    elements = 2 * int((slots >= 0).sum()) * k.shape[1] * k.shape[2]
    moved = elements * (k.element_size() + k_cache.element_size())
    return Cost(bytes=moved + slots.numel() * slots.element_size(), flops=0)


def _case(
    name, tokens, heads, dim, block_size=16, blocks=None, fused=False, cache_dtype=None, skip=(), index=torch.int64,
    interleaved=False,
):  # fmt: skip
    """Slots in random order. ``interleaved``: a block's keys and values lie side by side, so pages are not."""
    blocks = blocks or tokens // block_size + 2

    def make(device, dtype, generator):
        qkv = torch.randn(tokens, 2 * heads + 1, dim, generator=generator).to(device, dtype)
        k, v = qkv[:, 1 : heads + 1], qkv[:, heads + 1 :]
        if not fused:
            k, v = k.contiguous(), v.contiguous()
        shape = (blocks, 2, heads, block_size, dim) if interleaved else (2, blocks, heads, block_size, dim)
        cache = torch.zeros(shape, dtype=cache_dtype or dtype, device=device)
        k_cache, v_cache = cache.unbind(1 if interleaved else 0)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[list(skip)] = -1
        return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots.to(device, index)}

    return Case(name, make)


OP = Op(
    name="scatter",
    reference=scatter_reference,
    triton=scatter_triton,
    cost=scatter_cost,
    cases=(
        _case("no tokens", 0, 2, 64),
        _case("one token, one element", 1, 1, 1, block_size=1, blocks=1),
        _case("every slot of the cache, permuted", 64, 2, 8, blocks=4),
        _case("3 heads of 64, views of a fused qkv", 21, 3, 64, fused=True),
        _case("padding tokens are skipped", 9, 2, 64, skip=(0, 4, 8)),
        _case("nothing but padding", 3, 2, 64, skip=(0, 1, 2)),
        _case("heads and head size no powers of two", 5, 7, 80, block_size=4, fused=True),
        _case("odd head size", 5, 2, 5),
        _case("block size no power of two", 10, 2, 32, block_size=12),
        _case("more heads than a program takes", 3, 40, 16),
        _case("fp32 cache", 5, 2, 64, cache_dtype=torch.float32),
        _case("fp16 cache", 5, 2, 64, cache_dtype=torch.float16),
        _case("int32 slots", 5, 2, 64, index=torch.int32),
        _case("keys and values of a block interleaved", 20, 3, 16, block_size=4, interleaved=True),
    ),
    mutates=("k_cache", "v_cache"),
)

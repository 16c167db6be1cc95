"""Rotary position embedding (Su et al. 2021) of queries and keys, in place, in one launch.

Each pair (i, i + half) of a head's first ``rope_dim`` elements, half = rope_dim / 2, is turned by an angle that grows
with the token's position (the layout of GPT-NeoX and Llama):

    out[i]        = x[i] * cos - x[i + half] * sin        angle = position * inv_freq[i]
    out[i + half] = x[i + half] * cos + x[i] * sin

In place every turned element is read and written once, and elements past ``rope_dim`` are not touched. A chain of
elementwise kernels with concatenation moves about five times as much.

The cosines come from a table, not from the kernel. A row of it is 4 * rope_dim bytes a token, 2.5 % of what 32 query
and 8 key heads of 128 move in 16-bit, and every layer reads the same rows, from L2. Computing them takes some 40
instructions each, and a slow path with local memory for angles above 10^5: a thread that turns 8 pairs grows from 160
instructions to 1440. Measured on an H200 over 16 cuts, computing got 0.63 to 0.93 of torch's copy for those heads and
at most 0.77 for 9 and 3 heads of 64; the table gets 0.93 and 0.84.

    q          [tokens, heads, head_dim]     any token and head stride: views of a fused qkv
    k          [tokens, kv_heads, head_dim]
    positions  [tokens], int32 or int64, any order, repeats allowed
    table      [max_positions, rope_dim], fp32: half cosines, then half sines (``rope_table``)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, vector
from kernels.op import Case, Cost, Op, wide


@dataclass(frozen=True)
class Launch:
    """How the heads of the tokens, queries then keys, are cut into programs."""

    block_bytes: int  # of first halves, and as much of second halves
    tokens: int  # a program's at least, while there are heads enough to fill it
    num_warps: int


# Measured on an H200 in bf16, as shares of torch's copy, counting q and k alone: 32 + 8 heads of 128 get 0.93; 9 + 3 of
# 64, which fill a program's tile of 16 heads to three quarters, 0.84. A thread then has one 16-byte load of each half.
# At least one token a program: 0.92 and 0.84, four: 0.91 and 0.81. With one token and q or k alone in a program (384 or
# 1152 bytes) the small heads got 0.57.
LAUNCH = Launch(block_bytes=2048, tokens=2, num_warps=4)


def rope_table(inv_freq: torch.Tensor, max_positions: int) -> torch.Tensor:
    """inv_freq: [half], radians a position -> [max_positions, 2 * half] fp32, cosines then sines, on its device.

    Angles are fp32 products, as in the implementations models were trained with. bf16 would not do: it holds no odd
    number above 256.
    """
    positions = torch.arange(max_positions, device=inv_freq.device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q and k in place, computed in fp32 (fp64 for fp64), and returns them."""
    half = table.shape[1] // 2
    cos, sin = table[positions.long()][:, None].split(half, dim=-1)
    for x in (q, k):
        a, b = x[..., :half], x[..., half : 2 * half]
        wide_a, wide_b = wide(a), wide(b)
        first, second = wide_a * cos - wide_b * sin, wide_b * cos + wide_a * sin
        a.copy_(first)
        b.copy_(second)
    return q, k


_VARYING = ["tokens", "heads", "all_heads", "half_v", "q_token_v", "q_head_v", "k_token_v", "k_head_v"]


@triton.jit(do_not_specialize=_VARYING)
def _rope_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_ptr,  # [tokens, all_heads - heads, head_dim]
    positions_ptr,  # [tokens]
    table_ptr,  # [max_positions, 2 * half]
    tokens,
    heads,
    all_heads,
    half_v,  # this and all strides in units of VEC
    q_token_v,
    q_head_v,
    k_token_v,
    k_head_v,
    VEC: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens and heads a program handles
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # power of two, at least half
):
    half = half_v * VEC
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    cols = tl.arange(0, HALF)[None, None, :]
    mask = (token < tokens) & (head < all_heads) & (cols < half)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    token, head = token.to(tl.int64), head.to(tl.int64)  # offsets pass 2**31
    in_q = q_ptr + token * (q_token_v * VEC) + head * (q_head_v * VEC)
    in_k = k_ptr + token * (k_token_v * VEC) + (head - heads) * (k_head_v * VEC)
    at = tl.where(head < heads, in_q, in_k) + cols
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    # A thread loads the cosines for its own elements, over and over from L1. Loaded once for all heads, they reach the
    # threads through shared memory and a barrier, which costs more.
    cos_at = tl.broadcast_to(table_ptr + position * (2 * half) + cols, (TOKENS, HEADS, HALF))
    cos = tl.load(cos_at, mask=mask, other=0.0)
    sin = tl.load(cos_at + half, mask=mask, other=0.0)
    tl.store(at, (a * cos - b * sin).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(at + half, (b * cos + a * sin).to(q_ptr.dtype.element_ty), mask=mask)


def _check(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3:
            raise ValueError(f"rope: {name} must be [tokens, heads, head_dim], got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"rope: {name} must be float32, float16 or bfloat16, got {x.dtype}")
        if x.stride(2) != 1 and x.shape[2] > 1:
            raise ValueError(f"rope: {name}'s last dimension must be contiguous (stride 1), got stride {x.stride(2)}")
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2] or k.dtype != q.dtype:
        raise ValueError(
            f"rope: k must have q's tokens, head_dim and dtype; q is {tuple(q.shape)} {q.dtype}, "
            f"k is {tuple(k.shape)} {k.dtype}"
        )
    if (
        positions.shape != q.shape[:1]
        or positions.dtype not in (torch.int32, torch.int64)
        or not (positions.is_contiguous())
    ):
        raise ValueError(
            f"rope: positions must be contiguous int32 or int64 [{q.shape[0]}], "
            f"got {positions.dtype} {list(positions.shape)} with strides {positions.stride()}"
        )
    if table.dim() != 2 or table.shape[1] % 2 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            "rope: table must be contiguous float32 [max_positions, rope_dim] with an even rope_dim (see rope_table), "
            f"got {table.dtype} {list(table.shape)} with strides {table.stride()}"
        )
    if table.shape[1] > q.shape[2]:
        raise ValueError(f"rope: table turns {table.shape[1]} elements of a head, but head_dim is {q.shape[2]}")
    for name, t in (("k", k), ("positions", positions), ("table", table)):
        if t.device != q.device:
            raise ValueError(f"rope: {name} must be on q's device {q.device}, got {t.device}")


def rope_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    debug: bool = False,
    **launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim] in place and returns them.

    Shapes as in the module's head. Keywords replace fields of ``LAUNCH``. Raises ValueError for shapes, dtypes or
    devices that do not fit. A position outside the table reads foreign memory; ``debug=True`` waits for the GPU and
    raises ValueError for it instead.
    """
    _check(q, k, positions, table)
    tokens, heads, kv_heads, half = q.shape[0], q.shape[1], k.shape[1], table.shape[1] // 2
    if debug and tokens and not 0 <= int(positions.min()) <= int(positions.max()) < table.shape[0]:
        raise ValueError(
            f"rope: positions run from {int(positions.min())} to {int(positions.max())}, the table holds "
            f"0 to {table.shape[0] - 1}"
        )
    if tokens and half and heads + kv_heads:
        settings = replace(LAUNCH, **launch) if launch else LAUNCH
        padded = triton.next_power_of_2(half)
        rows = max(1, settings.block_bytes // (padded * q.element_size()))
        take = min(max(1, rows // settings.tokens), triton.next_power_of_2(heads + kv_heads))
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        vec = vector(q.element_size(), half, *strides)
        _rope_kernel[(triton.cdiv(tokens, rows // take), triton.cdiv(heads + kv_heads, take))](
            q, k, positions, table, tokens, heads, heads + kv_heads, half // vec, *(s // vec for s in strides),
            VEC=vec, TOKENS=rows // take, HEADS=take, HALF=padded, num_warps=settings.num_warps,
        )  # fmt: skip
    return q, k


def rope_cost(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, debug: bool = False
) -> Cost:
    """Turned elements read and written once, positions once, a table row a token; 3 FLOPs an element."""
    tokens, rope_dim = q.shape[0], table.shape[1]
    turned = tokens * (q.shape[1] + k.shape[1]) * rope_dim
    rows = min(tokens, table.shape[0]) * rope_dim * 4
    return Cost(2 * turned * q.element_size() + positions.numel() * positions.element_size() + rows, 3 * turned)


def _case(name, tokens, heads, kv_heads, head_dim, rope_dim=None, positions=None, fused=False, index=torch.int64):
    """``fused``: q and k are views of one qkv whose values part holds NaN."""

    def make(device, dtype, generator):
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
        qkv[:, heads + kv_heads :] = float("nan")
        qkv = qkv.to(device, dtype)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if not fused:
            q, k = q.contiguous(), k.contiguous()
        turned = rope_dim or head_dim
        inv_freq = 10_000.0 ** -(torch.arange(0, turned, 2).float() / turned)
        at = torch.randint(0, 300, (tokens,), generator=generator) if positions is None else torch.tensor(positions)
        table = rope_table(inv_freq, int(at.max()) + 1 if tokens else 1)
        return {"q": q, "k": k, "positions": at.to(device, index), "table": table.to(device)}

    return Case(name, make)


OP = Op(
    name="rope",
    reference=rope_reference,
    triton=rope_triton,
    cost=rope_cost,
    cases=(
        _case("no tokens", 0, 2, 1, 64),
        _case("one token", 1, 1, 1, 2),
        _case("random positions, grouped heads", 7, 8, 2, 64),
        _case("views of a fused qkv", 5, 9, 3, 64, fused=True),
        _case("partial: 6 of 10", 5, 3, 2, 10, rope_dim=6),
        _case("partial: 64 of 128, fused", 3, 5, 1, 128, rope_dim=64, fused=True),
        _case("half a head no power of two", 3, 4, 2, 96, fused=True),
        _case("positions fall, repeat, and pass 2^17", 5, 4, 1, 8, positions=(140_000, 131_073, 7, 7, 0)),
        _case("int32 positions", 3, 2, 2, 64, index=torch.int32),
        _case("more key heads than query heads", 3, 2, 5, 64),
        _case("wide heads", 2, 2, 1, 256),
    ),
    mutates=("q", "k"),
)

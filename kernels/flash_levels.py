"""FlashAttention in four levels, for reading and timing side by side. All compute the same, on the simplest shape.

    attention_levelN(q, k, v) -> out        q, k, v, out [heads, S, head_dim], contiguous, fp32, fp16 or bf16, causal

    level 0  three kernels, scores in memory          reads and writes S*S scores a head: bandwidth decides
    level 1  one kernel, online softmax               scores stay on chip; the output is normalised after every tile
    level 2  FlashAttention-2's order                 normalised once at the end, exp2 with the scale folded in
    level 3  ``kernels.flash_attention``              masks only where needed, heavy rows first, any lengths, any GPU

``heads`` is batch times heads. Levels 1 and 2 differ in a few lines, so that a diff shows what FlashAttention-2
changed: a division of acc in every tile became one at the end, and exp(scale * s - m) one multiply-add and one EX2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.flash_attention import flash_attention


@triton.jit
def _scores_kernel(
    q_ptr,  # [heads, S, D]
    k_ptr,  # [heads, S, D]
    s_ptr,  # [heads, S, S] fp32
    S,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + head * S * D + rows[:, None] * D + dims[None, :], mask=rows[:, None] < S, other=0.0)
    k = tl.load(k_ptr + head * S * D + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    s = tl.where(cols[None, :] <= rows[:, None], s, float("-inf"))
    inside = (rows[:, None] < S) & (cols[None, :] < S)
    tl.store(s_ptr + head * S * S + rows[:, None].to(tl.int64) * S + cols[None, :], s, mask=inside)


@triton.jit
def _softmax_kernel(
    s_ptr,  # [heads * S, S] fp32, overwritten
    S,
    BLOCK: tl.constexpr,  # at least S
):
    row = s_ptr + tl.program_id(0).to(tl.int64) * S
    cols = tl.arange(0, BLOCK)
    s = tl.load(row + cols, mask=cols < S, other=float("-inf"))
    p = tl.exp(s - tl.max(s, 0))
    tl.store(row + cols, p / tl.sum(p, 0), mask=cols < S)


@triton.jit
def _output_kernel(
    p_ptr,  # [heads, S, S] fp32
    v_ptr,  # [heads, S, D]
    out_ptr,  # [heads, S, D]
    S,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, S, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < S) & (cols[None, :] < S)
        p = tl.load(p_ptr + head * S * S + rows[:, None].to(tl.int64) * S + cols[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + head * S * D + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * S * D + rows[:, None] * D + dims[None, :], out, mask=rows[:, None] < S)


@triton.jit
def _level1_kernel(
    q_ptr,  # [heads, S, D]
    k_ptr,  # [heads, S, D]
    v_ptr,  # [heads, S, D]
    out_ptr,  # [heads, S, D]
    S,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    base = tl.program_id(1).to(tl.int64) * S * D
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * D + dims[None, :], mask=rows[:, None] < S, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, min(S, (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + base + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
        v = tl.load(v_ptr + base + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.where(cols[None, :] <= rows[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        worth = l * tl.exp(m - m_new)  # what was summed so far, in units of the new maximum
        l = worth + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * worth[:, None], input_precision=PRECISION) / l[:, None]
        m = m_new
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + rows[:, None] * D + dims[None, :], out, mask=rows[:, None] < S)


@triton.jit
def _level2_kernel(
    q_ptr,  # [heads, S, D]
    k_ptr,  # [heads, S, D]
    v_ptr,  # [heads, S, D]
    out_ptr,  # [heads, S, D]
    S,
    unit,  # scale * log2(e)
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    base = tl.program_id(1).to(tl.int64) * S * D
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * D + dims[None, :], mask=rows[:, None] < S, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, min(S, (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + base + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
        v = tl.load(v_ptr + base + cols[:, None] * D + dims[None, :], mask=cols[:, None] < S, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(cols[None, :] <= rows[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + rows[:, None] * D + dims[None, :], out, mask=rows[:, None] < S)


def _settings(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    """Tiles for these inputs. Raises ValueError unless all are [heads, S, head_dim], contiguous and alike."""
    for x, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3 or t.shape != q.shape or t.dtype != q.dtype or t.device != q.device or not t.is_contiguous():
            raise ValueError(
                f"{name}: {x} must be a contiguous [heads, S, head_dim] tensor like q {q.dtype} {tuple(q.shape)}, "
                f"got {t.dtype} {tuple(t.shape)} with strides {t.stride()}"
            )
    if q.shape[2] not in (32, 64, 128):
        raise ValueError(f"{name}: head_dim must be 32, 64 or 128, got {q.shape[2]}")
    if q.dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "PRECISION": "ieee", "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": 128, "BLOCK_N": 32, "PRECISION": None, "num_warps": 8, "num_stages": 2}


def attention_level0(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores, softmax, output: three kernels, and an fp32 [heads, S, S] in memory between them.

    q, k, v: [heads, S, head_dim] -> the same. Raises ValueError as all levels do, and for S past 65 536.
    """
    settings = _settings("attention_level0", q, k, v)
    heads, s, d = q.shape
    if s > 65536:
        raise ValueError(f"attention_level0: S must be at most 65536, since a row of scores is held at once, got {s}")
    out, scores = torch.empty_like(q), torch.empty(heads, s, s, device=q.device, dtype=torch.float32)
    rows, cols = triton.cdiv(s, settings["BLOCK_M"]), triton.cdiv(s, settings["BLOCK_N"])
    if q.numel():
        _scores_kernel[(rows, cols, heads)](q, k, scores, s, d**-0.5, D=d, **settings)
        _softmax_kernel[(heads * s,)](scores, s, BLOCK=triton.next_power_of_2(s), num_warps=8)
        _output_kernel[(rows, heads)](scores, v, out, s, D=d, **settings)
    return out


def attention_level1(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One kernel with online softmax, normalised after every tile. q, k, v: [heads, S, head_dim] -> the same."""
    settings = _settings("attention_level1", q, k, v)
    heads, s, d = q.shape
    out = torch.empty_like(q)
    if q.numel():
        _level1_kernel[(triton.cdiv(s, settings["BLOCK_M"]), heads)](q, k, v, out, s, d**-0.5, D=d, **settings)
    return out


def attention_level2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Level 1 with one division a row and base-2 exponentials. q, k, v: [heads, S, head_dim] -> the same."""
    settings = _settings("attention_level2", q, k, v)
    heads, s, d = q.shape
    out, unit = torch.empty_like(q), d**-0.5 * math.log2(math.e)
    if q.numel():
        _level2_kernel[(triton.cdiv(s, settings["BLOCK_M"]), heads)](q, k, v, out, s, unit, D=d, **settings)
    return out


def attention_level3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``flash_attention`` on one sequence, its portable kernel. q, k, v: [heads, S, head_dim] -> the same."""
    _settings("attention_level3", q, k, v)
    out = torch.empty_like(q)
    flash_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), out=out.transpose(0, 1), path="portable")
    return out


LEVELS = (attention_level0, attention_level1, attention_level2, attention_level3)

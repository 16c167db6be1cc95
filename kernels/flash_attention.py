"""Attention without the score matrix, for packed sequences of any lengths (FlashAttention-2, arXiv 2307.08691).

    out[i] = sum over keys j of softmax(scale * q[i] . k[j]) * v[j]        lse[i] = log of the sum of exponentials

The scores of S tokens are S*S numbers a head; written to memory and read back they would be the whole cost (at S = 4096
and D = 128, 32 MB a head in 16-bit against 4 MB of q, k, v and out). So a program keeps BLOCK_M query rows, walks over
the keys in tiles of BLOCK_N, and keeps for each row a running maximum m, the sum l of exp(s - m), and the unnormalised
output acc. When a tile raises the maximum, what was summed before is worth exp(m_old - m_new) of it:

    m_new = max(m, max of tile)     alpha = exp(m - m_new)     p = exp(s - m_new)
    l = alpha * l + sum of p        acc = alpha * acc + p @ v  and at the end  out = acc / l,  lse = m + log(l)

It computes in base 2, exp(x) = 2**(x * log2(e)), with log2(e) folded into the scale: one multiply-add and one EX2 a
score. Work is 4*D FLOPs a visible (query, key) pair, memory traffic q, k, v and out once; a causal sequence of 4096
tokens has an intensity of thousands of FLOP a byte, so arithmetic decides.

Layout: tokens of all sequences one after the other; sequence i owns the rows cu_seqlens[i] to cu_seqlens[i + 1].

    q, out [tokens, heads, head_dim]     k, v [tokens_k, kv_heads, head_dim]     lse [heads, tokens] fp32, natural log

The last query of a sequence sees its last key (bottom-right alignment), so a prompt may continue a cached prefix. A row
that sees no key gives out 0 and lse -inf. On Hopper, ``kernels.flash_hopper`` takes the common cases over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import flash_hopper
from kernels.launch import DTYPES
from kernels.op import Case, Cost, Op

LOG2_E = math.log2(math.e)
PATHS = ("hopper", "portable")


def flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, a sequence at a time, in fp32 (fp64 for fp64 inputs). Arguments as ``flash_attention``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=wide, device=q.device)
    for q_start, q_end, k_start, k_end in _spans(q, k, cu_seqlens_q, cu_seqlens_k):
        group = q.shape[1] // k.shape[1]
        queries = q[q_start:q_end].to(wide).transpose(0, 1)
        keys, values = (x[k_start:k_end].to(wide).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores.masked_fill_(~visible(q_end - q_start, k_end - k_start, causal, window, q.device), -math.inf)
        lse[:, q_start:q_end] = torch.logsumexp(scores, -1)
        anchor = lse[:, q_start:q_end, None]
        weights = torch.exp(scores - anchor.masked_fill(anchor == -math.inf, 0.0))
        out[q_start:q_end] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out, lse


def visible(q_len: int, k_len: int, causal: bool, window: int | None, device="cpu") -> torch.Tensor:
    """[q_len, k_len], True where a query sees a key. Query i stands at position i + k_len - q_len of the sequence."""
    position = torch.arange(q_len, device=device)[:, None] + k_len - q_len
    key = torch.arange(k_len, device=device)[None, :]
    seen = key <= position if causal else torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    return seen if window is None else seen & (key > position - window)


def _spans(q, k, cu_seqlens_q, cu_seqlens_k):
    """(q_start, q_end, k_start, k_end) of each sequence, as Python integers."""
    if cu_seqlens_q is None:
        return [(0, q.shape[0], 0, k.shape[0])]
    cq, ck = cu_seqlens_q.tolist(), (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()
    return list(zip(cq, cq[1:], ck, ck[1:], strict=False))


@triton.jit
def _tanh(x):
    """tanh from one exponential: it saturates instead of overflowing. A series near 0, where 1 - 2/(e + 1) cancels."""
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # 2 * log2(e)
    square = x * x
    near = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - 0.0539682540 * square)))
    return tl.where(square < 0.02, near, far)


@triton.jit
def _walk(
    acc,  # [BLOCK_M, BLOCK_D] fp32, unnormalised output
    m,  # [BLOCK_M] fp32, running maximum of the scaled scores, in units of log2
    l,  # [BLOCK_M] fp32, running sum of 2**(s - m)
    q,  # [BLOCK_M, BLOCK_D]
    k_ptr,  # this sequence's and head's [k_len, HEAD_DIM]
    v_ptr,  # the same
    stride_kt,
    stride_vt,
    first,  # keys first to stop, in tiles of BLOCK_N
    stop,
    position,  # [BLOCK_M], the last key a row sees under a causal mask
    k_len,
    window,
    unit,  # scores times this are in units of log2
    softcap,  # in units of log2
    per_softcap,  # scale / softcap
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRESCALE: tl.constexpr,
    MASKED: tl.constexpr,  # this stretch holds keys that some row does not see
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(first, stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        cols = start + offs_n
        # start * stride passes 2**31 in long sequences; within a tile int32 is enough
        k_tile = k_ptr + start.to(tl.int64) * stride_kt + offs_n[:, None] * stride_kt + offs_d[None, :]
        v_tile = v_ptr + start.to(tl.int64) * stride_vt + offs_n[:, None] * stride_vt + offs_d[None, :]
        if MASKED or BLOCK_D != HEAD_DIM:
            # rows behind the sequence are another sequence's, or nobody's: 0 * NaN would be NaN, so they must read as 0
            keep = (cols < k_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_tile, mask=keep, other=0.0)
            v = tl.load(v_tile, mask=keep, other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = unit
        if SOFTCAP:
            s = softcap * _tanh(s * per_softcap)
            factor = 1.0
        elif PRESCALE:
            s = s * unit
            factor = 1.0
        if MASKED:
            seen = cols[None, :] < k_len
            if CAUSAL:
                seen = seen & (cols[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (cols[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        anchor = m_new
        if MASKED:
            anchor = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
        p = tl.exp2(s * factor - anchor[:, None])
        alpha = tl.exp2(m - anchor)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit
def _flash_attention_kernel(
    q_ptr,  # [tokens, heads, HEAD_DIM]
    k_ptr,  # [tokens_k, heads / GROUP, HEAD_DIM]
    v_ptr,  # [tokens_k, heads / GROUP, HEAD_DIM]
    out_ptr,  # [tokens, heads, HEAD_DIM]
    lse_ptr,  # [heads, tokens]
    cu_q_ptr,  # [seqs + 1], not read unless VARLEN
    cu_k_ptr,  # [seqs + 1]
    num_seqs,
    tokens,
    tokens_k,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    window,
    unit,
    softcap,
    per_softcap,
    VARLEN: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRESCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot = tl.program_id(0)
    head = tl.program_id(1)
    # Sequence i owns the slots from cu[i] // BLOCK_M + i on. That is at least one slot for each of its row blocks, so
    # the grid follows from the number of tokens and sequences alone, and the host never has to know a length.
    q_start = 0 * slot
    q_len = q_start + tokens  # sums, so that a length of 1, which Triton takes for a constant, has the same type
    k_start = 0 * slot
    k_len = k_start + tokens_k
    last_slot = tl.num_programs(0) - 1
    if VARLEN:
        low = 0
        high = num_seqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_q_ptr + middle) // BLOCK_M + middle <= slot:
                low = middle
            else:
                high = middle
        q_start = tl.load(cu_q_ptr + low)
        q_end = tl.load(cu_q_ptr + low + 1)
        k_start = tl.load(cu_k_ptr + low)
        q_len = q_end - q_start
        k_len = tl.load(cu_k_ptr + low + 1) - k_start
        last_slot = q_end // BLOCK_M + low
    # under a causal mask the last rows have the most keys: they go first, so that short programs fill the end
    row = (last_slot - slot) * BLOCK_M
    if row >= q_len:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    live = (row + offs_m < q_len)[:, None]
    if BLOCK_D != HEAD_DIM:
        live = live & (offs_d < HEAD_DIM)[None, :]
    q_ptr += (q_start + row).to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    k_ptr += k_start.to(tl.int64) * stride_kt + (head // GROUP).to(tl.int64) * stride_kh
    v_ptr += k_start.to(tl.int64) * stride_vt + (head // GROUP).to(tl.int64) * stride_vh
    q = tl.load(q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :], mask=live, other=0.0)

    shift = k_len - q_len
    position = row + offs_m + shift
    # the keys that some row sees are [first, stop); those that every row sees, [inner, outer), need no mask
    first = 0
    stop = k_len
    inner = 0
    outer = k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = min(k_len, max(row + BLOCK_M + shift, 0))
        outer = min(outer, max(row + shift + 1, 0) // BLOCK_N * BLOCK_N)
    if WINDOW:
        first = max(row + shift - window + 1, 0) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(max(row + BLOCK_M + shift - window, 0), BLOCK_N) * BLOCK_N
        outer = max(inner, outer)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        acc, m, l = _walk(
            acc, m, l, q, k_ptr, v_ptr, stride_kt, stride_vt, first, min(inner, stop), position, k_len, window, unit,
            softcap, per_softcap, CAUSAL, WINDOW, SOFTCAP, PRESCALE, True, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
    acc, m, l = _walk(
        acc, m, l, q, k_ptr, v_ptr, stride_kt, stride_vt, inner, min(outer, stop), position, k_len, window, unit,
        softcap, per_softcap, CAUSAL, WINDOW, SOFTCAP, PRESCALE, False, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
    )  # fmt: skip
    acc, m, l = _walk(
        acc, m, l, q, k_ptr, v_ptr, stride_kt, stride_vt, outer, stop, position, k_len, window, unit,
        softcap, per_softcap, CAUSAL, WINDOW, SOFTCAP, PRESCALE, True, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
    )  # fmt: skip

    l = tl.where(l == 0, 1.0, l)  # a row that saw nothing: acc is 0, m is -inf, and so they stay; NaN stays NaN
    acc = acc / l[:, None]
    lse = (m + tl.log2(l)) * 0.6931471805599453
    tl.store(lse_ptr + head.to(tl.int64) * tokens + q_start + row + offs_m, lse, mask=row + offs_m < q_len)
    out_ptr += (q_start + row).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m[:, None] * stride_ot + offs_d[None, :], out, mask=live)


@dataclass(frozen=True)
class Launch:
    """Tile and warps of the portable kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For 16-bit inputs by padded head size; all fit the 101 376 bytes that every architecture has. Eight warps a tile: with
# four, several architectures spill (head size 128: 900 bytes on sm_90, 564 on sm_100). Measured on an H200 (bf16,
# causal, batch 4, 32 heads over 8, S 4096, head size 128): 445 TFLOP/s; 393 with 128 keys a tile and two stages.
LAUNCH = {64: Launch(128, 64, 8, 3), 128: Launch(128, 64, 8, 3), 256: Launch(64, 32, 8, 2)}
# A window and a softcap together need three stretches and a tanh: smaller tiles, or sm_100 and sm_120 spill.
LAUNCH_SMALL = {64: Launch(128, 64, 8, 3), 128: Launch(64, 32, 8, 2), 256: Launch(64, 32, 8, 2)}
# fp32 goes through FMA, not tensor cores: small tiles, since both operands of a product lie in registers.
LAUNCH_FP32 = {64: Launch(16, 32, 4, 1), 128: Launch(16, 32, 8, 1), 256: Launch(16, 16, 8, 1)}


def _launch(dtype: torch.dtype, block_d: int, small: bool = False) -> Launch:
    """The tile for inputs of ``dtype``; each fits the shared memory of every architecture in ``kernels.launch``."""
    return (LAUNCH_FP32 if dtype == torch.float32 else LAUNCH_SMALL if small else LAUNCH)[block_d]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences: (out [tokens, heads, head_dim], lse [heads, tokens] fp32, natural log).

    q: [tokens, heads, head_dim]; k, v: [tokens_k, kv_heads, head_dim], fp32, fp16 or bf16, any strides with a
    contiguous last dimension; query head h reads key head h // (heads / kv_heads); head_dim is at most 256.
    cu_seqlens_q, cu_seqlens_k: [seqs + 1] int32 on q's device, rising from 0 to tokens and to tokens_k; no value is
    checked, since that would wait for the GPU. None for q means one sequence; None for k means q's.
    ``scale`` defaults to head_dim**-0.5. ``window`` W: a query sees itself and the W - 1 keys before it (causal only).
    ``softcap`` c: scores become c * tanh(score / c). ``out``: written there if given. ``path``: "hopper" or "portable";
    by default Hopper's kernel where it applies (see ``kernels.flash_hopper.supports``).

    Raises ValueError for arguments that do not fit these descriptions or each other.
    """
    if out is None and q.dim() == 3:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seqs = _check(q, k, v, out, cu_seqlens_q, cu_seqlens_k, causal, window, softcap)
    tokens, heads, head_dim = q.shape
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if not tokens:
        return out, lse
    scale = head_dim**-0.5 if scale is None else float(scale)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if path is None:
        hopper = flash_hopper.supports(q, k, v, out, scale, window, softcap)
    elif path not in PATHS:
        raise ValueError(f"flash_attention: path must be one of {', '.join(PATHS)}, got {path!r}")
    else:
        hopper = path == "hopper"
        if hopper and not flash_hopper.supports(q, k, v, out, scale, window, softcap):
            raise ValueError(f"flash_attention: path 'hopper' needs {flash_hopper.NEEDS}")
    if hopper:
        flash_hopper.launch(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, scale)
    else:
        _launch_portable(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqs, causal, scale, window, softcap)
    return out, lse


def _launch_portable(q, k, v, out, lse, cu_q, cu_k, seqs, causal, scale, window, softcap) -> None:
    tokens, heads, head_dim = q.shape
    block_d = max(64, triton.next_power_of_2(head_dim))
    launch = _launch(q.dtype, block_d, window is not None and bool(softcap))
    varlen = cu_q is not None
    slots = tokens // launch.block_m + seqs if varlen else triton.cdiv(tokens, launch.block_m)
    precision = "ieee" if q.dtype == torch.float32 else None  # Triton's default would round fp32 to TF32
    _flash_attention_kernel[(slots, heads)](
        q,
        k,
        v,
        out,
        lse,
        cu_q if varlen else q,
        cu_k if varlen else q,
        seqs,
        tokens,
        k.shape[0],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        window or 0,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        scale / softcap if softcap else 0.0,
        VARLEN=varlen,
        GROUP=heads // k.shape[1],
        CAUSAL=causal,
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        PRESCALE=scale <= 0,  # the maximum of the raw scores is then not that of the scaled ones
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_D=block_d,
        HEAD_DIM=head_dim,
        PRECISION=precision,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _check(q, k, v, out, cu_q, cu_k, causal, window, softcap) -> int:
    """The number of sequences. Raises ValueError naming the argument, what it was and what it must be."""

    def refuse(name, was, must):
        raise ValueError(f"flash_attention: {name} must {must}, got {was}")

    for name, x, what in (("q", q, "heads"), ("k", k, "kv_heads"), ("v", v, "kv_heads"), ("out", out, "heads")):
        if x.dim() != 3:
            refuse(name, f"shape {tuple(x.shape)}", f"be [tokens, {what}, head_dim]")
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            refuse(name, x.dtype, "be float32, float16 or bfloat16" if x is q else f"have q's dtype {q.dtype}")
        if x.device != q.device:
            refuse(name, x.device, f"be on q's device {q.device}")
        if x.stride(2) != 1 and x.shape[2] > 1:
            refuse(name, f"stride {x.stride(2)}; call .contiguous() first", "have a contiguous last dimension")
    tokens, heads, head_dim = q.shape
    if not 0 < head_dim <= 256:
        refuse("q", f"head_dim {head_dim}", "have a head_dim of 1 to 256")
    if k.shape[1] == 0 or heads % k.shape[1]:
        refuse("q", f"{heads} heads over {k.shape[1]}", "have a multiple of k's heads")
    if k.shape[2] != head_dim:
        refuse("k", f"head_dim {k.shape[2]}", f"have q's head_dim {head_dim}")
    if v.shape != k.shape:
        refuse("v", tuple(v.shape), f"have k's shape {tuple(k.shape)}")
    if out.shape != q.shape:
        refuse("out", tuple(out.shape), f"have q's shape {tuple(q.shape)}")
    if window is not None and (window < 0 or not causal):
        refuse("window", f"{window} with causal={causal}", "be 0 or more keys, and needs causal=True")
    if softcap is not None and not softcap > 0:
        refuse("softcap", softcap, "be positive, or None for none")
    if cu_q is None:
        if cu_k is not None:
            refuse("cu_seqlens_q", "None beside a cu_seqlens_k", "be given where cu_seqlens_k is")
        return 1
    for name, cu, others in (("cu_seqlens_q", cu_q, cu_q), ("cu_seqlens_k", cu_q if cu_k is None else cu_k, cu_q)):
        if cu.dim() != 1 or cu.dtype != torch.int32 or cu.numel() < 2 or cu.shape != others.shape:
            refuse(name, f"{cu.dtype} {tuple(cu.shape)}", f"be int32 [seqs + 1], as long as cu_seqlens_q ({len(cu_q)})")
        if cu.device != q.device or not cu.is_contiguous():
            refuse(name, f"{cu.device}, stride {cu.stride(0)}", f"be contiguous and on q's device {q.device}")
    return cu_q.numel() - 1


def flash_attention_cost(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *, causal=True, scale=None, window=None, softcap=None
) -> Cost:
    """q, k, v and out once, and 4 bytes of lse a row; 4*D FLOPs for each pair of a query and a key it sees.

    Waits for the GPU where cu_seqlens are given, because the pairs depend on the lengths.
    """
    pairs = 0
    for q_start, q_end, k_start, k_end in _spans(q, k, cu_seqlens_q, cu_seqlens_k):
        q_len, k_len = q_end - q_start, k_end - k_start
        if not causal:
            pairs += q_len * k_len
            continue
        seen = (torch.arange(q_len) + k_len - q_len + 1).clamp(min=0)
        pairs += int((seen if window is None else seen.clamp(max=window)).sum())
    moved = (2 * q.numel() + k.numel() + v.numel()) * q.element_size() + 4 * q.shape[0] * q.shape[1]
    return Cost(bytes=moved, flops=4 * q.shape[2] * pairs * q.shape[1])


def _case(
    name: str,
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...] | None = None,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    fused: bool = False,
    large: float = 1.0,
    poison: bool = False,
    **options,
) -> Case:
    """``fused``: q, k, v are slices of one [tokens, heads + 2 * kv_heads, head_dim]. ``large`` multiplies q.

    ``poison``: the last sequence is NaN, which must not reach the others. One sequence alone gets no cu_seqlens.
    """
    k_lens = q_lens if k_lens is None else k_lens

    def make(device, dtype, generator):
        def random(tokens, n):
            return torch.randn(tokens, n, head_dim, generator=generator)

        q, k, v = random(sum(q_lens), heads), random(sum(k_lens), kv_heads), random(sum(k_lens), kv_heads)
        q = q * large
        if poison:
            q[q.shape[0] - q_lens[-1] :], k[k.shape[0] - k_lens[-1] :] = math.nan, math.nan
            v[v.shape[0] - k_lens[-1] :] = math.nan
        if fused:
            q, k, v = torch.cat([q, k, v], 1).to(device, dtype).split([heads, kv_heads, kv_heads], 1)
        inputs = {"q": q.to(device, dtype), "k": k.to(device, dtype), "v": v.to(device, dtype), **options}
        if len(q_lens) > 1:
            inputs["cu_seqlens_q"] = _cumulated(q_lens, device)
            if k_lens != q_lens:
                inputs["cu_seqlens_k"] = _cumulated(k_lens, device)
        return inputs

    return Case(name, make)


def _cumulated(lengths: tuple[int, ...], device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


CASES = (
    _case("one token", (1,)),
    _case("no tokens", (0,)),
    _case("lengths about a tile", (63, 64, 65, 127, 129), heads=1),
    _case("lengths about sixteen", (1, 2, 15, 16, 17), kv_heads=2),
    _case("empty sequences first, in the middle and last", (0, 5, 0, 0, 70, 0)),
    _case("only empty sequences", (0, 0, 0)),
    _case("queries without keys", (3, 70, 2), (0, 0, 2)),
    _case("keys without queries", (0, 5), (40, 5)),
    _case("a prompt behind a cached prefix", (1, 40, 130), (131, 168, 131), heads=1),
    _case("more queries than keys: the first see nothing", (70, 140), (3, 65), heads=1),
    _case("no causal mask", (5, 66), (131, 1), causal=False),
    _case("groups of 7, head size 80", (33,), heads=7, head_dim=80),
    _case("groups of 5, head size 96", (17, 20), heads=5, head_dim=96),
    _case("groups of 6, head size 128", (66,), heads=12, kv_heads=2, head_dim=128),
    _case("a group of 24", (3, 9), heads=24),
    _case("head size 256", (40,), head_dim=256, heads=1),
    _case("slices of a fused qkv", (20, 47), fused=True, head_dim=128, heads=4, kv_heads=2),
    _case("a window of one: only itself", (70,), window=1, heads=1),
    _case("a window of none: nothing is seen", (70,), window=0, heads=1),
    _case("a window of 50 over several tiles", (40, 260), window=50, heads=1),
    _case("a window wider than the sequence", (70,), window=1000, heads=1),
    _case("window and softcap together", (130,), window=70, softcap=20.0, heads=1),
    _case("softcap far past exp's range", (66,), softcap=2.0, large=300.0, heads=1),
    _case("a gentle softcap", (66,), softcap=50.0, heads=1),
    _case("logits beyond 50 000", (66,), large=8000.0, heads=1, scale=1.0),
    _case("scale 0: the mean of what is seen", (70,), scale=0.0, heads=1),
    _case("a negative scale", (70,), scale=-0.2, heads=1),
    _case("NaN of another sequence stays there", (40, 30), poison=True),
)

OP = Op("flash_attention", flash_attention_reference, flash_attention, flash_attention_cost, CASES)

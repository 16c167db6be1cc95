"""FlashAttention for Hopper: a warp that loads, two warpgroups that compute, tensor cores that never wait for softmax.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128
BILLION: gl.constexpr = gl.constexpr(2**30)


@gluon.jit
def _tile(position, cu_q_ptr, cu_k_ptr, num_seqs, slots, SECTION: gl.constexpr, BLOCK_M: gl.constexpr):
    """Where the tile at this position of the schedule lies."""
    section = position // (slots * SECTION)
    rest = position % (slots * SECTION)
    slot = rest // SECTION
    head = section * SECTION + rest % SECTION
    low = slot * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_q_ptr + middle) // BLOCK_M + middle <= slot:
            low = middle
        else:
            high = middle
    q_start = gl.load(cu_q_ptr + low)
    q_end = gl.load(cu_q_ptr + low + 1)
    k_start = gl.load(cu_k_ptr + low)
    q_len = q_end - q_start
    k_len = gl.load(cu_k_ptr + low + 1) - k_start
    first_slot = q_start // BLOCK_M + low
    next_slot = q_end // BLOCK_M + low + 1
    row = (next_slot - 1 - slot) * BLOCK_M
    return head, q_start, q_len, k_start, k_len, row


@gluon.jit
def _blocks(row, q_len, k_len, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    end = k_len
    if CAUSAL:
        end = gl.minimum(k_len, row + BLOCK_M + k_len - q_len)
    return gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _load_kv(desc, smem, full, empty, count, k_start, k_len, row, column, STAGES: gl.constexpr):
    slot = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc, [BILLION, k_start + k_len, BILLION - k_len + row, column], full.index(slot), smem.index(slot)
    )


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    cu_q_ptr, cu_k_ptr, num_seqs, slots, positions,
    GROUP: gl.constexpr, SECTION: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):
    count = 0
    tiles = 0
    step = gl.num_programs(0)
    rounds = gl.cdiv(positions, step)
    for r in range(rounds):
        position = r * step + gl.program_id(0)
        if r % 2 == 1:
            position = r * step + step - 1 - gl.program_id(0)
        if position < positions:
            head, q_start, q_len, k_start, k_len, row = _tile(
                position, cu_q_ptr, cu_k_ptr, num_seqs, slots, SECTION, BLOCK_M
            )
            if row < q_len:
                n = _blocks(row, q_len, k_len, CAUSAL, BLOCK_M, BLOCK_N)
                column = head // GROUP * HEAD_DIM
                mbarrier.wait(q_empty, (tiles & 1) ^ 1)
                mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [q_start + row, head * HEAD_DIM], q_full, q_smem.index(0))
                tma.async_copy_global_to_shared(
                    q_desc, [q_start + row + BLOCK_M // 2, head * HEAD_DIM], q_full, q_smem.index(1)
                )
                _load_kv(k_desc, k_smem, k_full, k_empty, count, k_start, k_len, (n - 1) * BLOCK_N, column, STAGES)
                for i in range(1, n):
                    _load_kv(
                        k_desc, k_smem, k_full, k_empty, count + i, k_start, k_len, (n - 1 - i) * BLOCK_N, column, STAGES
                    )
                    _load_kv(
                        v_desc, v_smem, v_full, v_empty, count + i - 1, k_start, k_len, (n - i) * BLOCK_N, column, STAGES
                    )
                _load_kv(v_desc, v_smem, v_full, v_empty, count + n - 1, k_start, k_len, column * 0, column, STAGES)
                count += n
                tiles += 1


@gluon.jit
def _mask(s, block, rows, shift, k_len, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    cols = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    if CAUSAL:
        last = gl.minimum(rows + shift, k_len - 1)
        return gl.where(cols[None, :] <= last[:, None], s, float("-inf"))
    else:
        return gl.where((cols < k_len)[None, :], s, float("-inf"))


@gluon.jit
def _softmax(s, m, scale_log2, MASKED: gl.constexpr):
    """Online softmax of one tile."""
    m_new = gl.maximum(m, gl.max(s, 1))
    anchor = m_new
    if MASKED:
        anchor = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - (anchor * scale_log2)[:, None])
    alpha = gl.exp2((m - anchor) * scale_log2)
    return p, m_new, alpha


@gluon.jit
def _scores(q, k_smem, slot, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start q @ k^T on the tensor cores."""
    k = k_smem.index(slot).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    ROWS: gl.constexpr = q.shape[0]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _steps(
    start, stop, count, n, acc, p, m, l, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, mine, other, turns,
    rows, shift, k_len, scale_log2,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):
    for i in range(start, stop):
        k_slot = (count + i) % STAGES
        v_slot = (count + i - 1) % STAGES
        if PINGPONG:
            mbarrier.wait(mine, turns & 1)
            turns += 1
        s_token = _scores(q, k_smem, k_slot, S_LAYOUT, BLOCK_N, HEAD_DIM)
        mbarrier.wait(v_full.index(v_slot), ((count + i - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_smem.index(v_slot).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(other, count=1)
        s = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        if MASKED:
            s = _mask(s, n - 1 - i, rows, shift, k_len, CAUSAL, BLOCK_N)
        p32, m, alpha = _softmax(s, m, scale_log2, MASKED)
        l = l * alpha + gl.sum(p32, 1)
        mbarrier.wait(v_full.index(v_slot), ((count + i - 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(p32.to(p.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return acc, p, m, l, turns


@gluon.jit
def _consumer(
    WG: gl.constexpr, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    out_ptr, lse_ptr, stride_ot, stride_oh, stride_lh, cu_q_ptr, cu_k_ptr, num_seqs, slots, positions, scale_log2,
    SECTION: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    M_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    mine = turn.index(WG)
    other = turn.index(1 - WG)
    q = q_smem.index(WG)
    count = 0
    tiles = 0
    turns = 0
    step = gl.num_programs(0)
    rounds = gl.cdiv(positions, step)
    for r in range(rounds):
        position = r * step + gl.program_id(0)
        if r % 2 == 1:
            position = r * step + step - 1 - gl.program_id(0)
        if position < positions:
            head, q_start, q_len, k_start, k_len, tile_row = _tile(
                position, cu_q_ptr, cu_k_ptr, num_seqs, slots, SECTION, BLOCK_M
            )
            if tile_row < q_len:
                n = _blocks(tile_row, q_len, k_len, CAUSAL, BLOCK_M, BLOCK_N)
                row = tile_row + WG * ROWS
                rows = row + gl.arange(0, ROWS, M_LAYOUT)
                shift = k_len - q_len
                full = k_len // BLOCK_N
                if CAUSAL:
                    full = gl.minimum(full, gl.maximum(row + shift + 1, 0) // BLOCK_N)
                masked = gl.maximum(n - full, 1)

                mbarrier.wait(q_full, tiles & 1)
                slot = count % STAGES
                mbarrier.wait(k_full.index(slot), (count // STAGES) & 1)
                if PINGPONG:
                    mbarrier.wait(mine, turns & 1)
                    turns += 1
                s_token = _scores(q, k_smem, slot, S_LAYOUT, BLOCK_N, HEAD_DIM)
                if PINGPONG:
                    mbarrier.arrive(other, count=1)
                s = warpgroup_mma_wait(0, deps=[s_token])
                mbarrier.arrive(k_empty.index(slot), count=1)
                s = _mask(s, n - 1, rows, shift, k_len, CAUSAL, BLOCK_N)
                m = gl.full([ROWS], float("-inf"), gl.float32, M_LAYOUT)
                p32, m, alpha = _softmax(s, m, scale_log2, True)
                l = gl.sum(p32, 1)
                p = gl.convert_layout(p32.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
                acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
                acc, p, m, l, turns = _steps(
                    1, masked, count, n, acc, p, m, l, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    mine, other, turns, rows, shift, k_len, scale_log2,
                    S_LAYOUT, O_LAYOUT, CAUSAL, True, BLOCK_N, HEAD_DIM, STAGES, PINGPONG,
                )
                acc, p, m, l, turns = _steps(
                    masked, n, count, n, acc, p, m, l, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    mine, other, turns, rows, shift, k_len, scale_log2,
                    S_LAYOUT, O_LAYOUT, CAUSAL, False, BLOCK_N, HEAD_DIM, STAGES, PINGPONG,
                )
                mbarrier.arrive(q_empty, count=1)
                slot = (count + n - 1) % STAGES
                mbarrier.wait(v_full.index(slot), ((count + n - 1) // STAGES) & 1)
                acc_token = warpgroup_mma(p, v_smem.index(slot).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
                lse = gl.where(l > 0, m * scale_log2 + gl.log2(l), float("-inf")) * 0.6931471805599453
                inverse = gl.where(l > 0, 1.0 / l, 0.0)
                gl.store(lse_ptr + head.to(gl.int64) * stride_lh + q_start + rows, lse, mask=rows < q_len)
                acc = warpgroup_mma_wait(0, deps=[acc_token])
                mbarrier.arrive(v_empty.index(slot), count=1)
                acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
                out = gl.convert_layout(acc.to(dtype), STORE)
                o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
                o_cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE))
                base = out_ptr + (q_start + row).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                gl.store(base + o_rows[:, None] * stride_ot + o_cols[None, :], out, mask=(o_rows < q_len - row)[:, None])
                count += n
                tiles += 1


@gluon.jit
def flash_hopper_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, num_seqs, slots, positions,
    stride_ot, stride_oh, stride_lh, scale_log2,
    GROUP: gl.constexpr, SECTION: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    if PINGPONG:
        mbarrier.arrive(turn.index(0), count=1)
    gl.warp_specialize(
        [
            (_consumer, (0, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                out_ptr, lse_ptr, stride_ot, stride_oh, stride_lh, cu_q_ptr, cu_k_ptr, num_seqs, slots, positions,
                scale_log2, SECTION, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, PINGPONG)),
            (_consumer, (1, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                out_ptr, lse_ptr, stride_ot, stride_oh, stride_lh, cu_q_ptr, cu_k_ptr, num_seqs, slots, positions,
                scale_log2, SECTION, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, PINGPONG)),
            (_producer, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty, cu_q_ptr, cu_k_ptr, num_seqs, slots, positions,
                GROUP, SECTION, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )

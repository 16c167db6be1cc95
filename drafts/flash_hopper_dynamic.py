"""FlashAttention for Hopper (sm_90): one warp loads, warpgroups compute, and they take turns on the tensor cores.

The arithmetic is ``kernels.flash_attention``'s. For a tile of 64 query rows a warpgroup and 128 keys at head size 128,
the two products take 1024 cycles on the tensor cores of an SM, and the 8192 exponentials 512 on its special function
units, with as many instructions again around them. Done one after the other, the tensor cores would idle a third of
the time. So, as in FlashAttention-3 (arXiv 2407.08608):

- A producer warp starts all loads (TMA, into a ring of STAGES key and value tiles) and needs hardly any registers;
  setmaxnreg gives them to the warpgroups that compute.
- Each warpgroup issues the scores of tile i and the output of tile i - 1 together, then passes the turn. While it
  exponentiates, the next warpgroup has the tensor cores.
- Probabilities never leave registers: they are the A operand of the second product.
- Only tiles that the diagonal or a sequence's end crosses are masked, in a loop of their own.
- The grid is one program an SM. Programs draw tiles from a counter, those with the most keys of a sequence first, so
  that all end together; the loads of the next tile start under the arithmetic of this one.

TMA fills what lies outside a tensor with zeros, but sequences are packed: what follows one is the next. The descriptors
of k, v and out therefore have a dimension more than the tensor, over the same tokens. A tile is addressed from the
sequence's end backwards, [end of the sequence, LIMIT - length + row], so that the dimension's limit LIMIT falls on the
end of the sequence: rows behind it read as zeros and are not written. The two coordinates sum to LIMIT rows too many; a
first dimension whose stride is 2**34 elements minus a row takes them back, LIMIT * 2**34 elements being 0 modulo 2**64
bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.launch import arch

LIMIT = gl.constexpr(2**30)
ROWS = gl.constexpr(64)  # query rows a warpgroup: one m64 product
FIELDS = gl.constexpr(8)  # what is said of a tile: head, q_start, q_len, k_start, k_len, row; a power of two
NEEDS = (
    "a GPU of compute capability 9.0, float16 or bfloat16, a head_dim of 64 or 128, no window or softcap, a scale above "
    "0, heads side by side (stride head_dim), token strides and addresses at multiples of 16 bytes, and at least one key"
)


@dataclass(frozen=True)
class Launch:
    consumers: int  # warpgroups that compute; a tile has 64 rows for each
    block_n: int
    stages: int
    registers: int  # a thread of the computing warpgroups


# Head size 128: two warpgroups, since a thread holds 64 scores, 64 outputs and 32 packed probabilities.
LAUNCH = {64: Launch(2, 128, 2, 240), 128: Launch(2, 128, 2, 240)}


@gluon.jit
def _find(
    position,
    cu_q_ptr,
    cu_k_ptr,
    num_seqs,
    tokens,
    tokens_k,
    slots,
    heads,
    VARLEN: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """The tile at ``position`` of the schedule. Its row is not below q_len if the slot is unused."""
    # Sequence i owns the slots from cu[i] // BLOCK_M + i on, at least one for each of its row blocks; heads turn fastest
    slot = position // heads
    head = position % heads
    q_start = 0 * slot
    q_len = q_start + tokens
    k_start = 0 * slot
    k_len = k_start + tokens_k
    last_slot = slots - 1
    if VARLEN:
        low = 0 * slot
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
        last_slot = q_end // BLOCK_M + low
    return head, q_start, q_len, k_start, k_len, (last_slot - slot) * BLOCK_M


@gluon.jit
def _next(position, positions, counter_ptr, places, VARLEN: gl.constexpr, BLOCK_M: gl.constexpr):
    """The first used tile from ``position`` on; one at ``positions`` or behind it means that none is left."""
    cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads = places
    head, q_start, q_len, k_start, k_len, row = _find(
        gl.minimum(position, positions - 1), cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads, VARLEN, BLOCK_M
    )  # fmt: skip
    while (row >= q_len) & (position < positions):
        position = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        head, q_start, q_len, k_start, k_len, row = _find(
            gl.minimum(position, positions - 1), cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads, VARLEN,
            BLOCK_M,
        )  # fmt: skip
    head = gl.where(position < positions, head, -1)
    return head, q_start, q_len, k_start, k_len, row


@gluon.jit
def _tiles_of_keys(row, q_len, k_len, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many key tiles a tile of queries needs, at least one: rows that see nothing come out of a masked tile."""
    stop = k_len
    if CAUSAL:
        stop = gl.minimum(k_len, row + BLOCK_M + k_len - q_len)
    return gl.maximum((stop + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _publish(tile_smem, tile_full, tiles, head, q_start, q_len, k_start, k_len, row):
    first = tiles % 2 * FIELDS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile_smem.index(first + 0).store(gl.full([1], head, gl.int32, layout))
    tile_smem.index(first + 1).store(gl.full([1], q_start, gl.int32, layout))
    tile_smem.index(first + 2).store(gl.full([1], q_len, gl.int32, layout))
    tile_smem.index(first + 3).store(gl.full([1], k_start, gl.int32, layout))
    tile_smem.index(first + 4).store(gl.full([1], k_len, gl.int32, layout))
    tile_smem.index(first + 5).store(gl.full([1], row, gl.int32, layout))
    mbarrier.arrive(tile_full.index(tiles % 2), count=1)


@gluon.jit
def _field(tile_smem, i):
    return gl.max(tile_smem.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _read(tile_smem, tile_full, tiles):
    mbarrier.wait(tile_full.index(tiles % 2), (tiles // 2) & 1)
    i = tiles % 2 * FIELDS
    return (
        _field(tile_smem, i), _field(tile_smem, i + 1), _field(tile_smem, i + 2), _field(tile_smem, i + 3),
        _field(tile_smem, i + 4), _field(tile_smem, i + 5),
    )  # fmt: skip


@gluon.jit
def _load(desc, ring, i, k_start, k_len, row, column, STAGES: gl.constexpr):
    """Start loading the i-th tile that ever passes this ring, once its place is free."""
    smem, full, empty = ring
    place = i % STAGES
    mbarrier.wait(empty.index(place), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(place), desc.block_type.nbytes)
    where = [LIMIT, k_start + k_len, LIMIT - k_len + row, column]
    tma.async_copy_global_to_shared(desc, where, full.index(place), smem.index(place))


@gluon.jit
def _producer(
    loads,
    VARLEN: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, tile_smem, tile_full, counter_ptr, positions, places = loads
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    q_smem, q_full, q_empty = q_ring
    done = 0  # key tiles so far
    tiles = 0
    head, q_start, q_len, k_start, k_len, row = _next(
        gl.program_id(0), positions, counter_ptr, places, VARLEN, BLOCK_M
    )
    _publish(tile_smem, tile_full, tiles, head, q_start, q_len, k_start, k_len, row)
    while head >= 0:
        ahead = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        head_, q_start_, q_len_, k_start_, k_len_, row_ = _next(ahead, positions, counter_ptr, places, VARLEN, BLOCK_M)
        for i in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(i), (tiles & 1) ^ 1)
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
            where = [q_start + row + i * ROWS, head * HEAD_DIM]
            tma.async_copy_global_to_shared(q_desc, where, q_full.index(i), q_smem.index(i))
        # every q_empty says that its warpgroup is past the start of the last tile, so that tile's fields may be replaced
        _publish(tile_smem, tile_full, tiles + 1, head_, q_start_, q_len_, k_start_, k_len_, row_)
        n = _tiles_of_keys(row, q_len, k_len, CAUSAL, BLOCK_M, BLOCK_N)
        column = head // GROUP * HEAD_DIM
        _load(k_desc, k_ring, done, k_start, k_len, (n - 1) * BLOCK_N, column, STAGES)
        for i in range(1, n):
            _load(k_desc, k_ring, done + i, k_start, k_len, (n - 1 - i) * BLOCK_N, column, STAGES)
            _load(v_desc, v_ring, done + i - 1, k_start, k_len, (n - i) * BLOCK_N, column, STAGES)
        _load(v_desc, v_ring, done + n - 1, k_start, k_len, 0 * n, column, STAGES)
        done += n
        tiles += 1
        head, q_start, q_len, k_start, k_len, row = head_, q_start_, q_len_, k_start_, k_len_, row_


@gluon.jit
def _mask(s, tile, rows, shift, k_len, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """-inf for keys that a row does not see."""
    cols = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    last = gl.minimum(rows + shift, k_len - 1) if CAUSAL else rows * 0 + k_len - 1
    return gl.where(cols[None, :] <= last[:, None], s, float("-inf"))


@gluon.jit
def _softmax(s, m, unit, MASKED: gl.constexpr):
    """p = 2**(unit * (s - max)), the new maximum of the raw scores, and what sums so far are still worth."""
    m_new = gl.maximum(m, gl.max(s, 1))
    anchor = m_new
    if MASKED:
        anchor = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
    p = gl.exp2(s * unit - (anchor * unit)[:, None])
    return p, m_new, gl.exp2((m - anchor) * unit)


@gluon.jit
def _scores(q, k_smem, place, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start q @ k^T on the tensor cores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = k_smem.index(place).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    return warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, v_smem, place, acc, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start acc + p @ v."""
    a = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))  # stays in registers
    return warpgroup_mma(a, v_smem.index(place).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)


@gluon.jit
def _steps(
    first,
    stop,
    done,
    n,
    acc,
    p,
    alpha,
    m,
    l,
    turns,
    q,
    k_ring,
    v_ring,
    mine,
    other,
    rows,
    shift,
    k_len,
    unit,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles first to stop, counted from the last keys back. Tile i - 1 enters acc while tile i is scored."""
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    for i in range(first, stop):
        k_place = (done + i) % STAGES
        v_place = (done + i - 1) % STAGES
        mbarrier.wait(k_full.index(k_place), ((done + i) // STAGES) & 1)
        mbarrier.wait(mine, turns & 1)
        turns += 1
        s = _scores(q, k_smem, k_place, BLOCK_N, HEAD_DIM)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        mbarrier.wait(v_full.index(v_place), ((done + i - 1) // STAGES) & 1)
        acc = _weighted(p, v_smem, v_place, acc, BLOCK_N, HEAD_DIM)
        mbarrier.arrive(other, count=1)
        s, acc = warpgroup_mma_wait(0, deps=[s, acc])
        mbarrier.arrive(k_empty.index(k_place), count=1)
        mbarrier.arrive(v_empty.index(v_place), count=1)
        if MASKED:
            s = _mask(s, n - 1 - i, rows, shift, k_len, CAUSAL, BLOCK_N)
        p, m, alpha = _softmax(s, m, unit, MASKED)
        l = l * alpha + gl.sum(p, 1)
    return acc, p, alpha, m, l, turns


@gluon.jit
def _consumer(
    ME: gl.constexpr,  # which of the warpgroups
    shared,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_ring, k_ring, v_ring, turn, tile_smem, tile_full, o_smem, out_desc, lse_ptr, tokens, unit = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    M_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    mine = turn.index(ME)
    other = turn.index((ME + 1) % CONSUMERS)
    q = q_smem.index(ME)
    done = 0
    tiles = 0
    turns = 0
    head, q_start, q_len, k_start, k_len, tile_row = _read(tile_smem, tile_full, tiles)
    while head >= 0:
        n = _tiles_of_keys(tile_row, q_len, k_len, CAUSAL, CONSUMERS * ROWS, BLOCK_N)
        row = tile_row + ME * ROWS
        rows = row + gl.arange(0, ROWS, M_LAYOUT)
        shift = k_len - q_len
        whole = k_len // BLOCK_N  # tiles that every row sees
        if CAUSAL:
            whole = gl.minimum(whole, gl.maximum(row + shift + 1, 0) // BLOCK_N)
        masked = gl.minimum(gl.maximum(n - whole, 1), n)

        mbarrier.wait(q_full.index(ME), tiles & 1)
        mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
        mbarrier.wait(mine, turns & 1)
        turns += 1
        s = _scores(q, k_smem, done % STAGES, BLOCK_N, HEAD_DIM)
        mbarrier.arrive(other, count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(done % STAGES), count=1)
        s = _mask(s, n - 1, rows, shift, k_len, CAUSAL, BLOCK_N)
        m = gl.full([ROWS], float("-inf"), gl.float32, M_LAYOUT)
        p, m, alpha = _softmax(s, m, unit, True)
        l = gl.sum(p, 1)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
        acc, p, alpha, m, l, turns = _steps(
            1, masked, done, n, acc, p, alpha, m, l, turns, q, k_ring, v_ring, mine, other, rows, shift, k_len, unit,
            CAUSAL, True, BLOCK_N, HEAD_DIM, STAGES,
        )  # fmt: skip
        acc, p, alpha, m, l, turns = _steps(
            masked, n, done, n, acc, p, alpha, m, l, turns, q, k_ring, v_ring, mine, other, rows, shift, k_len, unit,
            CAUSAL, False, BLOCK_N, HEAD_DIM, STAGES,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(ME), count=1)
        done += n
        place = (done - 1) % STAGES
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.wait(v_full.index(place), ((done - 1) // STAGES) & 1)
        acc = _weighted(p, v_smem, place, acc, BLOCK_N, HEAD_DIM)
        l = gl.where(l == 0, 1.0, l)  # a row that saw nothing: acc is 0, m is -inf, and so they stay; NaN stays NaN
        lse = (m * unit + gl.log2(l)) * 0.6931471805599453
        gl.store(lse_ptr + head.to(gl.int64) * tokens + q_start + rows, lse, mask=rows < q_len)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(place), count=1)
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O_LAYOUT))[:, None]
        tma.store_wait(0)  # the last tile's output has left o_smem
        o_smem.index(ME).reshape([ROWS, HEAD_DIM]).store(acc.to(q_smem.dtype))
        fence_async_shared()
        where = [LIMIT, q_start + q_len, LIMIT - q_len + row, head * HEAD_DIM]
        tma.async_copy_shared_to_global(out_desc, where, o_smem.index(ME))
        tiles += 1
        head, q_start, q_len, k_start, k_len, tile_row = _read(tile_smem, tile_full, tiles)
    tma.store_wait(0)


@gluon.jit
def _ring(dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, readers: gl.constexpr):
    """Shared memory for shape[0] tiles, with a barrier each for "full" and for "empty" (``readers`` say so)."""
    smem = gl.allocate_shared_memory(dtype, shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [shape[0], 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [shape[0], 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(shape[0]):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return smem, full, empty


@gluon.jit
def flash_hopper_kernel(
    q_desc,  # [tokens, heads * HEAD_DIM]
    k_desc,  # [., ., LIMIT, kv_heads * HEAD_DIM]
    v_desc,
    out_desc,  # [., ., LIMIT, heads * HEAD_DIM]
    lse_ptr,  # [heads, tokens]
    counter_ptr,  # [1], 0 at launch
    cu_q_ptr,  # [seqs + 1], not read unless VARLEN
    cu_k_ptr,
    num_seqs,
    tokens,
    tokens_k,
    slots,
    heads,
    unit,  # scale * log2(e)
    VARLEN: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = q_desc.layout
    K_LAYOUT: gl.constexpr = k_desc.layout
    PARTS: gl.constexpr = 4 if CONSUMERS == 3 else CONSUMERS  # shapes are powers of two
    q_ring = _ring(dtype, [PARTS, ROWS, HEAD_DIM], Q_LAYOUT, 1)
    k_ring = _ring(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], K_LAYOUT, CONSUMERS)
    v_ring = _ring(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], K_LAYOUT, CONSUMERS)
    o_smem = gl.allocate_shared_memory(dtype, [PARTS, 1, 1, ROWS, HEAD_DIM], out_desc.layout)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    turn = gl.allocate_shared_memory(gl.int64, [PARTS, 1], one)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    positions = slots * heads
    places = (cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads)
    shared = (q_ring, k_ring, v_ring, turn, tile_smem, tile_full, o_smem, out_desc, lse_ptr, tokens, unit)
    loads = (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, tile_smem, tile_full, counter_ptr, positions, places)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, shared, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
                (_consumer, (1, shared, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
                (_producer, (loads, VARLEN, GROUP, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, shared, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
                (_consumer, (1, shared, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
                (_consumer, (2, shared, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
                (_producer, (loads, VARLEN, GROUP, CAUSAL, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def supports(q, k, v, out, scale: float, window: int | None, softcap: float | None) -> bool:
    """Whether ``launch`` can take these tensors of ``flash_attention``; ``NEEDS`` says in words what it needs."""
    head_dim = q.shape[2]
    if not q.is_cuda or arch(q.device) != 90 or q.dtype == torch.float32 or head_dim not in LAUNCH:
        return False
    if window is not None or softcap or scale <= 0 or not k.shape[0]:
        return False
    for x in (q, k, v, out):
        if (x.stride(1) != head_dim and x.shape[1] > 1) or x.stride(0) % 8 or x.data_ptr() % 16:
            return False
    return True


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _by_token(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x [tokens, heads, head_dim] as [tokens, heads * head_dim], in boxes of ``rows`` tokens of one head."""
    shape = [rows, x.shape[2]]
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], shape, _layout(shape, x.dtype))


def _from_the_end(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """The same, addressed from a sequence's end: [LIMIT, end of the sequence, LIMIT - length + row, column]."""
    limit, stride = LIMIT.value, x.stride(0)
    shape = [1, 1, rows, x.shape[2]]
    return TensorDescriptor(
        x,
        [2**31 - 1, 2**31 - 1, limit, x.shape[1] * x.shape[2]],
        [2**34 - stride, stride, stride, 1],
        shape,
        _layout(shape, x.dtype),
    )


def _layout(shape: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def launch(
    q: torch.Tensor,  # [tokens, heads, head_dim]
    k: torch.Tensor,  # [tokens_k, kv_heads, head_dim]
    v: torch.Tensor,
    out: torch.Tensor,  # [tokens, heads, head_dim]
    lse: torch.Tensor,  # [heads, tokens]
    cu_q: torch.Tensor | None,  # [seqs + 1]
    cu_k: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """Fill ``out`` and ``lse``. The arguments are ``flash_attention``'s, checked, and ``supports`` holds for them."""
    tokens, heads, head_dim = q.shape
    launch = LAUNCH[head_dim]
    rows = ROWS.value
    block_m = launch.consumers * rows
    varlen = cu_q is not None
    seqs = cu_q.numel() - 1 if varlen else 1
    slots = tokens // block_m + seqs if varlen else triton.cdiv(tokens, block_m)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    flash_hopper_kernel[(min(_sms(q.device), slots * heads),)](
        _by_token(q, rows),
        _from_the_end(k, launch.block_n),
        _from_the_end(v, launch.block_n),
        _from_the_end(out, rows),
        lse,
        counter,
        cu_q if varlen else counter,
        cu_k if varlen else counter,
        seqs,
        tokens,
        k.shape[0],
        slots,
        heads,
        scale * math.log2(math.e),
        VARLEN=varlen,
        GROUP=heads // k.shape[1],
        CAUSAL=causal,
        CONSUMERS=launch.consumers,
        BLOCK_N=launch.block_n,
        HEAD_DIM=head_dim,
        STAGES=launch.stages,
        REGISTERS=launch.registers,
        num_warps=4,
    )

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
- The grid is one program an SM, and each goes through many tiles, so that the next tile loads under the arithmetic of
  this one. The producer draws tiles from a counter that all programs share, one ahead, and publishes them to the
  warpgroups in shared memory. A sequence's tiles with the most keys come first, and a program that falls behind draws
  fewer, so that all end at about the same time. On an H200 with torch 2.11 and Triton 3.6 (bf16, causal, 32 query and
  8 key heads of size 128, one sequence of 16384 tokens) this makes 669 TFLOP/s. It was 645 when program i of n took
  tiles i, 2n - 1 - i, 2n + i, ..., without a counter. At head size 64 the two make 459 and 446.

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
ROWS = gl.constexpr(64)  # query rows of a warpgroup: one m64 product
CONSUMERS = gl.constexpr(2)  # warpgroups that compute: a thread holds 64 scores, 64 outputs and 32 packed probabilities
BLOCK_M = gl.constexpr(128)  # ROWS * CONSUMERS
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
FIELDS = gl.constexpr(8)  # room for a tile's head, q_start, q_len, k_start, k_len and row; a power of two
REGISTERS = gl.constexpr(240)  # a thread of theirs; with 24 for the producer's warpgroup these are all an SM has
HEAD_DIMS = (64, 128)
NEEDS = (
    "a GPU of compute capability 9.0, float16 or bfloat16, a head_dim of 64 or 128, no window or softcap, a scale over "
    "0, heads side by side (stride head_dim), token strides and addresses at multiples of 16 bytes, and a key"
)


@gluon.jit
def _find(position, schedule, VARLEN: gl.constexpr):
    """The tile at a position. Its head is -1 behind the last position, its row not below q_len in an unused slot."""
    _, cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads = schedule
    # Sequence i owns the slots from cu[i] // BLOCK_M + i on, at least one for each of its row blocks.
    slot = gl.minimum(position // heads, slots - 1)
    head = gl.where(position < slots * heads, position % heads, -1)
    q_start = 0 * slot
    q_len = q_start + tokens
    k_start = 0 * slot
    k_len = k_start + tokens_k
    last_slot = q_start + slots - 1
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
def _draw(schedule):
    """A position that no other program has. The first positions are the programs' numbers, and need no draw."""
    return gl.num_programs(0) + gl.atomic_add(schedule[0], 1, sem="relaxed")


@gluon.jit
def _next(position, schedule, VARLEN: gl.constexpr):
    """The tile at this position or, if its slot is unused, at the next that this program draws."""
    head, q_start, q_len, k_start, k_len, row = _find(position, schedule, VARLEN)
    while (row >= q_len) & (head >= 0):
        head, q_start, q_len, k_start, k_len, row = _find(_draw(schedule), schedule, VARLEN)
    return head, q_start, q_len, k_start, k_len, row


@gluon.jit
def _publish(board, tiles, tile):
    """Tell the consumers this program's tile number ``tiles``."""
    fields, told = board
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(6):
        fields.index(tiles % 2 * FIELDS + i).store(gl.full([1], tile[i], gl.int32, layout))
    mbarrier.arrive(told.index(tiles % 2), count=1)


@gluon.jit
def _published(board, tiles):
    """This program's tile number ``tiles``, once the producer has told it."""
    fields, told = board
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told.index(tiles % 2), (tiles // 2) & 1)
    return [gl.max(fields.index(tiles % 2 * FIELDS + i).load(layout), 0) for i in (0, 1, 2, 3, 4, 5)]


@gluon.jit
def _tiles_of_keys(row, q_len, k_len, CAUSAL: gl.constexpr):
    """How many key tiles a tile of queries needs, at least one: rows that see nothing come out of a masked tile."""
    stop = k_len
    if CAUSAL:
        stop = gl.minimum(k_len, row + BLOCK_M + k_len - q_len)
    return gl.maximum((stop + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _load(desc, ring, i, k_start, k_len, row, column):
    """Start loading the i-th tile that ever passes this ring, once its place is free."""
    smem, full, empty = ring
    place = i % STAGES
    mbarrier.wait(empty.index(place), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(place), desc.block_type.nbytes)
    where = [LIMIT, k_start + k_len, LIMIT - k_len + row, column]
    tma.async_copy_global_to_shared(desc, where, full.index(place), smem.index(place))


@gluon.jit
def _producer(
    loads, board, schedule, VARLEN: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr
):
    q_desc, k_desc, v_desc, q_ring, k_ring, v_ring = loads
    q_smem, q_full, q_empty = q_ring
    done = 0  # key tiles so far
    tiles = 0
    tile = _next(gl.program_id(0), schedule, VARLEN)
    _publish(board, 0, tile)
    while tile[0] >= 0:
        ahead = _next(_draw(schedule), schedule, VARLEN)
        head, q_start, q_len, k_start, k_len, row = tile
        for i in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(i), (tiles & 1) ^ 1)
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
            where = [q_start + row + i * ROWS, head * HEAD_DIM]
            tma.async_copy_global_to_shared(q_desc, where, q_full.index(i), q_smem.index(i))
        # The board has room for two tiles: this tile's successor replaces its predecessor. A warpgroup gives back a
        # tile's queries after all its warps have read the tile's fields, and the loop above has just waited until both
        # gave back the predecessor's. So nobody reads what is overwritten, and no barrier gets two phases ahead.
        _publish(board, tiles + 1, ahead)
        n = _tiles_of_keys(row, q_len, k_len, CAUSAL)
        column = head // GROUP * HEAD_DIM
        # a step of the consumers takes keys i and values i - 1
        _load(k_desc, k_ring, done, k_start, k_len, (n - 1) * BLOCK_N, column)
        for i in range(1, n):
            _load(k_desc, k_ring, done + i, k_start, k_len, (n - 1 - i) * BLOCK_N, column)
            _load(v_desc, v_ring, done + i - 1, k_start, k_len, (n - i) * BLOCK_N, column)
        _load(v_desc, v_ring, done + n - 1, k_start, k_len, 0 * n, column)
        done += n
        tiles += 1
        tile = ahead


@gluon.jit
def _mask(s, tile, seen, CAUSAL: gl.constexpr):
    """-inf for keys that a row does not see."""
    rows, shift, k_len = seen
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
def _scores(q, k_smem, place, HEAD_DIM: gl.constexpr):
    """Start q @ k^T on the tensor cores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = k_smem.index(place).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    return warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, v_smem, place, acc, HEAD_DIM: gl.constexpr):
    """Start acc + p @ v."""
    a = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))  # stays in registers
    return warpgroup_mma(a, v_smem.index(place).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)


@gluon.jit
def _steps(
    first, stop, done, n, state, mine, seen, unit, CAUSAL: gl.constexpr, MASKED: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Tiles first to stop, counted from the last keys back. Tile i - 1 enters acc while tile i is scored."""
    acc, p, alpha, m, l, turns = state
    q, k_ring, v_ring, my_turn, others_turn = mine
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    for i in range(first, stop):
        k_place = (done + i) % STAGES
        v_place = (done + i - 1) % STAGES
        mbarrier.wait(k_full.index(k_place), ((done + i) // STAGES) & 1)
        mbarrier.wait(my_turn, turns & 1)
        turns += 1
        s = _scores(q, k_smem, k_place, HEAD_DIM)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        mbarrier.wait(v_full.index(v_place), ((done + i - 1) // STAGES) & 1)
        acc = _weighted(p, v_smem, v_place, acc, HEAD_DIM)
        mbarrier.arrive(others_turn, count=1)
        s, acc = warpgroup_mma_wait(0, deps=[s, acc])
        mbarrier.arrive(k_empty.index(k_place), count=1)
        mbarrier.arrive(v_empty.index(v_place), count=1)
        if MASKED:
            s = _mask(s, n - 1 - i, seen, CAUSAL)
        p, m, alpha = _softmax(s, m, unit, MASKED)
        l = l * alpha + gl.sum(p, 1)
    return acc, p, alpha, m, l, turns


@gluon.jit
def _consumer(ME: gl.constexpr, shared, board, unit, lse_ptr, tokens, CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Warpgroup ME: its rows of every tile that the producer publishes."""
    q_ring, k_ring, v_ring, passed, o_smem, out_desc = shared
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    M_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    mine = (q_smem.index(ME), k_ring, v_ring, passed.index(ME), passed.index((ME + 1) % CONSUMERS))
    q, _, _, my_turn, others_turn = mine
    done = 0
    tiles = 0
    turns = 0
    head, q_start, q_len, k_start, k_len, tile_row = _published(board, 0)
    while head >= 0:
        n = _tiles_of_keys(tile_row, q_len, k_len, CAUSAL)
        row = tile_row + ME * ROWS
        rows = row + gl.arange(0, ROWS, M_LAYOUT)
        shift = k_len - q_len
        seen = (rows, shift, k_len)
        whole = k_len // BLOCK_N  # tiles that every row sees
        if CAUSAL:
            whole = gl.minimum(whole, gl.maximum(row + shift + 1, 0) // BLOCK_N)
        masked = gl.minimum(gl.maximum(n - whole, 1), n)

        mbarrier.wait(q_full.index(ME), tiles & 1)
        mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
        mbarrier.wait(my_turn, turns & 1)
        turns += 1
        s = _scores(q, k_smem, done % STAGES, HEAD_DIM)
        mbarrier.arrive(others_turn, count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(done % STAGES), count=1)
        s = _mask(s, n - 1, seen, CAUSAL)
        m = gl.full([ROWS], float("-inf"), gl.float32, M_LAYOUT)
        p, m, alpha = _softmax(s, m, unit, True)
        l = gl.sum(p, 1)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
        state = _steps(1, masked, done, n, (acc, p, alpha, m, l, turns), mine, seen, unit, CAUSAL, True, HEAD_DIM)
        acc, p, alpha, m, l, turns = _steps(masked, n, done, n, state, mine, seen, unit, CAUSAL, False, HEAD_DIM)
        mbarrier.arrive(q_empty.index(ME), count=1)
        done += n
        place = (done - 1) % STAGES
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.wait(v_full.index(place), ((done - 1) // STAGES) & 1)
        acc = _weighted(p, v_smem, place, acc, HEAD_DIM)
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
        head, q_start, q_len, k_start, k_len, tile_row = _published(board, tiles)
    tma.store_wait(0)


@gluon.jit
def _barriers(n: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _ring(dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, readers: gl.constexpr):
    """Shared memory for shape[0] tiles, with a barrier each for "full" and for "empty" (``readers`` say so)."""
    smem = gl.allocate_shared_memory(dtype, shape, layout)
    return smem, _barriers(shape[0], 1), _barriers(shape[0], readers)


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
    HEAD_DIM: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = q_desc.layout
    K_LAYOUT: gl.constexpr = k_desc.layout
    q_ring = _ring(dtype, [CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT, 1)
    k_ring = _ring(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], K_LAYOUT, CONSUMERS)
    v_ring = _ring(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], K_LAYOUT, CONSUMERS)
    o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], out_desc.layout)
    fields = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    board = (fields, _barriers(2, 1))
    passed = _barriers(CONSUMERS, 1)
    mbarrier.arrive(passed.index(0), count=1)
    schedule = (counter_ptr, cu_q_ptr, cu_k_ptr, num_seqs, tokens, tokens_k, slots, heads)
    shared = (q_ring, k_ring, v_ring, passed, o_smem, out_desc)
    loads = (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)
    gl.warp_specialize(
        [
            (_consumer, (0, shared, board, unit, lse_ptr, tokens, CAUSAL, HEAD_DIM)),
            (_consumer, (1, shared, board, unit, lse_ptr, tokens, CAUSAL, HEAD_DIM)),
            (_producer, (loads, board, schedule, VARLEN, GROUP, CAUSAL, HEAD_DIM)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def supports(q, k, v, out, scale: float, window: int | None, softcap: float | None) -> bool:
    """Whether ``launch`` can take these tensors of ``flash_attention``; ``NEEDS`` says in words what it needs."""
    head_dim = q.shape[2]
    if not q.is_cuda or arch(q.device) != 90 or q.dtype == torch.float32 or head_dim not in HEAD_DIMS:
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
    shape = [1, 1, rows, x.shape[2]]
    limits = [2**31 - 1, 2**31 - 1, LIMIT.value, x.shape[1] * x.shape[2]]
    strides = [2**34 - x.stride(0), x.stride(0), x.stride(0), 1]
    return TensorDescriptor(x, limits, strides, shape, _layout(shape, x.dtype))


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
    varlen = cu_q is not None
    seqs = cu_q.numel() - 1 if varlen else 1
    slots = tokens // BLOCK_M.value + seqs if varlen else triton.cdiv(tokens, BLOCK_M.value)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)  # on the stream, so a CUDA graph zeroes it as well
    flash_hopper_kernel[(min(_sms(q.device), slots * heads),)](
        _by_token(q, ROWS.value),
        _from_the_end(k, BLOCK_N.value),
        _from_the_end(v, BLOCK_N.value),
        _from_the_end(out, ROWS.value),
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
        HEAD_DIM=head_dim,
        num_warps=4,
    )

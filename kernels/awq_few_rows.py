"""Up to 8 rows times a matrix of 2 to 8 bits: ``kernels.awq_linear`` where reading the weights is all there is to do.

The product of 8 rows is one column of the tensor cores' smallest instruction (16 x 8 x 16), so w is its left operand,
16 rows at a time, and the rows of x that are missing cost nothing. What must be fast is the way of the weights:

- A program has 16 rows of w; its WARPS warps divide them along k, a tile of 128 columns each in turn. So 4096 rows are
  256 programs of 8 warps, enough to keep every SM reading, and no sum has to pass through memory.
- A lane loads 16 bytes: its own words of four products. They never see shared memory.
- All of a warp's first four tiles are asked for before the kernel before has ended (programmatic dependent launch, as
  in ``kernels.gemv``). Of 4096 columns these are all there are: the weights of a whole product are on their way, and
  only then x is waited for.

Norm, activation and addition are done as in ``kernels.gemv``: x is multiplied by gamma and rounded on its way to the
tensor cores, and the sums are divided by its root mean square at the end.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import arch, shared_limit
from kernels.paged_cache import sm_count

MAX_ROWS = 8
COLS = 8  # of the tensor cores' instruction: rows of x


# --------------------------------------------------------------------------------------------- codes to numbers


def magic_of(bits: int, dtype: torch.dtype) -> int:
    """What ``assembly`` adds to each code: the number whose last place counts in ones."""
    return 1024 if dtype == torch.float16 else 0 if bits == 8 else 128


@cache
def assembly(bits: int, dtype: torch.dtype) -> str:
    """PTX that turns a word of codes into pairs of numbers, ``magic_of`` + code, each exact.

    Operands behind the numbers: the word; for three bits, of which the word holds the lower two, that of third bits.
    """
    code = 2 if bits == 3 else bits
    pairs = 16 // code
    word, third = f"${2 * pairs}", f"${2 * pairs + 1}"
    magic, mask = (f"0x{n * 0x10001:08X}" for n in (0x6400 if dtype == torch.float16 else 0x4300, (1 << code) - 1))
    lines = ["{ .reg .b32 r, s, t; .reg .f32 f, g;"]
    for i in range(pairs):
        if bits == 8 and dtype == torch.bfloat16:  # 8 bits fill a bf16; in fp32 there is room beside 2^23
            lines += [f"prmt.b32 s, {word}, 0x4B000000, {0x7540 + i}; prmt.b32 t, {word}, 0x4B000000, {0x7542 + i};"]
            lines += ["mov.b32 f, s; mov.b32 g, t; add.f32 f, f, 0fCB000000; add.f32 g, g, 0fCB000000;"]
            lines += ["cvt.rn.bf16x2.f32 r, g, f;"]
        else:
            lines += [f"shr.b32 s, {word}, {code * i}; lop3.b32 r, s, {mask}, {magic}, 0xEA;"]  # s & mask | magic
        if bits == 3:
            lines += [f"shl.b32 t, {third}, 2; shr.b32 t, t, {i}; lop3.b32 r, t, 0x00040004, r, 0xEA;"]
        lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, r;"]
    return "\n".join(lines) + " }"


def types_of(bits: int, dtype: torch.dtype) -> tuple:
    """The types of the numbers that a word's assembly gives."""
    return ({torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype],) * (32 // (2 if bits == 3 else bits))


@gluon.jit
def _numbers(
    words, third, ASM: gl.constexpr, TYPES: gl.constexpr, CODE: gl.constexpr, THREE: gl.constexpr,
    WARPS: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """As ``awq_linear._numbers``: int32 [WARPS, ROWS, 4, WORDS] -> [WARPS, ROWS, TILE]."""
    if CODE == 8:
        a, b, c, d = gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1)
        q = gl.join(gl.join(a, b), gl.join(c, d)).permute(0, 1, 3, 5, 2, 4)
    elif CODE == 4:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1
        )  # fmt: skip
        q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        q = q.permute(0, 1, 3, 6, 5, 2, 4)
    else:
        if THREE:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, third],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        low = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        high = gl.join(gl.join(gl.join(i, j), gl.join(k, l)), gl.join(gl.join(m, n), gl.join(o, p)))
        q = gl.join(low, high).permute(0, 1, 3, 7, 6, 5, 2, 4)
    return q.reshape(WARPS, ROWS, TILE)


# --------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _ask(
    ring, at, number, ends, tiles, block, step, n, padded, warp, row, deep, THREE: gl.constexpr, GATED: gl.constexpr, STEPS: gl.constexpr,
    WARPS: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr, TILES_A_GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of the program's ``number``-th step, a tile a warp, to its place in the ring: one group."""
    words_ring, more_ring, scale_ring = ring
    words_at, more_at, scale_at = at
    place = number % STAGES
    first = number % STEPS * WARPS  # the first warp's tile
    pass_ = number // STEPS
    groups = gl.cdiv(tiles, TILES_A_GROUP)
    rows = (block + pass_ // (1 + GATED) * step) * ROWS + pass_ % (1 + GATED) * n
    live = (number < ends) & (deep + first < tiles)
    async_copy.async_copy_global_to_shared(words_ring.index(place), words_at + (first * 16 + rows * tiles) * (4 * WORDS), mask=live)
    if THREE:
        async_copy.async_copy_global_to_shared(more_ring.index(place), more_at + (first * 16 + rows * tiles) * 4, mask=live)
    of_scale = scale_at + ((warp + first) // TILES_A_GROUP * 16 + rows * groups + row)
    async_copy.async_copy_global_to_shared(scale_ring.index(place), of_scale, mask=(number < ends) & (warp + first < tiles))
    async_copy.commit_group()


@gluon.jit
def _multiply(
    total, ring, number, x, sums, live, of_thread, ASM: gl.constexpr, TYPES: gl.constexpr, MAGIC: gl.constexpr,
    CODE: gl.constexpr, THREE: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    TILE: gl.constexpr, WORDS_LAYOUT: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """total + scale * ((numbers - MAGIC - zero) . x), of a tile a warp. live: [WARPS, 1], whether the warp has one."""
    words_ring, more_ring, scale_ring = ring
    words = words_ring.index(number % STAGES).load(WORDS_LAYOUT)
    scale = scale_ring.index(number % STAGES).load(gl.SliceLayout(2, SUMS))
    third = words
    if THREE:
        third = more_ring.index(number % STAGES).load(WORDS_LAYOUT) >> (8 * of_thread)
    q = _numbers(words, third, ASM, TYPES, CODE, THREE, WARPS, ROWS, TILE)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    part = mma_v2(q, x, gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS))
    zero = (scale & -65536).to(gl.float32, bitcast=True) + MAGIC
    # A warp without a tile has multiplied what the ring held before: finite numbers, and nothing of them is kept.
    scale = gl.where(live, scale, 0).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return total + gl.expand_dims(scale, 2) * (part - gl.expand_dims(zero, 2) * sums)


@gluon.jit
def _bring_x(
    x_smem, x_ptr, gamma_ptr, m, k, stride_x, eps, NORM: gl.constexpr, ALONE: gl.constexpr, STEPS: gl.constexpr,
    WARPS: gl.constexpr, COLS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """x, times gamma, to shared memory, [STEPS, WARPS, COLS, TILE] or without COLS if ALONE; zeros past k, and past m the
    last row again. -> 1 / sqrt(mean(x^2) + eps) [COLS], or ones."""
    LANES: gl.constexpr = TILE // 8
    HEIGHT: gl.constexpr = 1 if ALONE else COLS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    col = gl.expand_dims(gl.expand_dims(gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    ks = gl.expand_dims(gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    ks = ks + warp * TILE
    at = x_ptr + (gl.minimum(col, m - 1) * stride_x + ks)
    squares = gl.zeros([WARPS, HEIGHT, TILE], gl.float32, layout)
    for step in range(STEPS):
        inside = ks < k - step * WARPS * TILE
        x = gl.load(at + step * WARPS * TILE, mask=inside & (col >= 0), other=0.0)
        if NORM:
            squares += x.to(gl.float32) * x.to(gl.float32)
        if gamma_ptr is not None:
            x = x * gl.load(gamma_ptr + step * WARPS * TILE + ks, mask=inside, other=0.0)
        if ALONE:
            x = x.reshape(WARPS, TILE)
        x_smem.index(step).store(x)
    return gl.rsqrt(gl.sum(gl.sum(squares, 2), 0) / k + eps)


@gluon.jit
def _x_of(x_smem, step, ALONE: gl.constexpr, WARPS: gl.constexpr, COLS: gl.constexpr, TILE: gl.constexpr, SUMS: gl.constexpr):
    """x of a step as the tensor cores' right operand, [WARPS, TILE, COLS]."""
    right: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    if ALONE:
        x = gl.expand_dims(x_smem.index(step).load(gl.SliceLayout(2, right)), 2).broadcast_to((WARPS, TILE, COLS))
    else:
        x = x_smem.index(step).permute((0, 2, 1)).load(right)
    return x


@gluon.jit
def _sums_of(x, WARPS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, TILE: gl.constexpr, SUMS: gl.constexpr):
    """The sums of x's rows, as often as there are rows of w: a product with ones, so that they come where they are
    needed."""
    ones = gl.full([WARPS, ROWS, TILE], 1.0, x.dtype, gl.DotOperandLayout(0, SUMS, 2))
    return mma_v2(ones, x, gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS))


@gluon.jit
def _row_sums(total, first, inverse, bias_ptr, n, NORM: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Add up the warps' shares of k -> [ROWS, COLS], normalised and biased."""
    y = gl.sum(total, 0)
    if NORM:
        y = y * gl.expand_dims(inverse, 0)
    if bias_ptr is not None:
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        y += gl.expand_dims(gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32), 1)
    return y


@gluon.jit
def _few_rows_kernel(
    x_ptr,  # [m, k], row stride stride_x
    words_ptr, more_ptr, scale_ptr,  # as in kernels/awq_linear.py
    gamma_ptr,  # [k], or None
    bias_ptr,  # [n], or [2 n] if GATED; or None
    residual_ptr,  # [m, n], or None
    out_ptr,  # [m, n]
    m, n, k, padded, stride_x,
    eps,
    NORM: gl.constexpr, GATED: gl.constexpr,
    ALONE: gl.constexpr,  # m is 1
    KEEP: gl.constexpr,  # x stays in registers
    STEPS: gl.constexpr,  # tiles a warp has of each row
    WARPS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, TILE: gl.constexpr, WORDS: gl.constexpr,
    CODE: gl.constexpr, TILES_A_GROUP: gl.constexpr,
    WORDS_LAYOUT: gl.constexpr,  # [WARPS, ROWS, 4, WORDS], see words_layout
    STAGES: gl.constexpr,
    ASM: gl.constexpr,
    TYPES: gl.constexpr,  # of the numbers that come of a word
    MAGIC: gl.constexpr,  # what is in them beside the code
    OVERLAP: gl.constexpr,
):  # fmt: skip
    THREE: gl.constexpr = more_ptr is not None
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], instr_shape=[1, 16, 8])
    block = gl.program_id(0)
    step = gl.num_programs(0)
    blocks = gl.cdiv(n, ROWS)
    tiles = gl.cdiv(k, TILE)
    ends = gl.cdiv(blocks - block, step) * ((1 + GATED) * STEPS)

    # w: the first steps are asked for at once
    flat: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS_LAYOUT))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))
    of_four: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS_LAYOUT)))
    four = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=of_four), 0), 1), 3)
    of_thread = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=of_word), 0), 1), 2)
    deep = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, flat)), 1)
    at = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat)), 0)
    at = gl.expand_dims(gl.expand_dims((at // 16 * tiles + deep) * 16 + at % 16, 2), 3)
    at = at * 4 + four
    deep = gl.expand_dims(gl.expand_dims(deep, 2), 3) + gl.zeros_like(at + of_thread)
    few: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [WARPS, 1], [1, 0])
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, few)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, few)), 0)
    warp = warp + gl.zeros_like(row)
    row = row // 16 * gl.cdiv(tiles, TILES_A_GROUP) * 16 + row % 16
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS, 4, WORDS], plain)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    more_ring = words_ring  # stands for nothing, but where there are three bits
    more_at = words_ptr
    if THREE:
        more_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS, 4, WORDS], plain)
        more_at = more_ptr + (at + gl.zeros_like(of_thread))
    ring = (words_ring, more_ring, scale_ring)
    at = (words_ptr + (at * WORDS + of_thread), more_at, scale_ptr)
    # fmt: off
    for number in gl.static_range(STAGES - 1):
        _ask(ring, at, number, ends, tiles, block, step, n, padded, warp, row, deep, THREE, GATED, STEPS, WARPS, ROWS, WORDS,
             TILES_A_GROUP, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # from here on x and the residual are there, and out may be written

    # x
    if ALONE:
        x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, TILE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, COLS, TILE], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    inverse = _bring_x(x_smem, x_ptr, gamma_ptr, m, k, stride_x, eps, NORM, ALONE, STEPS, WARPS, COLS, TILE)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    xs = ()
    ys = ()
    if KEEP:
        for i in gl.static_range(STEPS):
            x = _x_of(x_smem, i, ALONE, WARPS, COLS, TILE, SUMS)
            xs = xs + (x,)
            ys = ys + (_sums_of(x, WARPS, ROWS, COLS, TILE, SUMS),)

    own = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS))), 1)
    store: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [0, 1])
    out_row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, store)), 1)
    col = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, store)), 0)
    number = 0
    while block + number // ((1 + GATED) * STEPS) * step < blocks:
        first = (block + number // ((1 + GATED) * STEPS) * step) * ROWS
        gate = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
        for half in gl.static_range(1 + GATED):
            total = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
            if KEEP:
                for i in gl.static_range(STEPS):
                    async_copy.wait_group(STAGES - 2)
                    total = _multiply(total, ring, number, xs[i], ys[i], own + i * WARPS < tiles, of_thread, ASM, TYPES, MAGIC, CODE,
                                      THREE, WARPS, ROWS, COLS, TILE, WORDS_LAYOUT, STAGES, SUMS)
                    _ask(ring, at, number + STAGES - 1, ends, tiles, block, step, n, padded, warp, row, deep, THREE, GATED, STEPS,
                         WARPS, ROWS, WORDS, TILES_A_GROUP, STAGES)
                    number += 1
            else:
                for i in range(STEPS):
                    async_copy.wait_group(STAGES - 2)
                    x = _x_of(x_smem, i, ALONE, WARPS, COLS, TILE, SUMS)
                    y = _sums_of(x, WARPS, ROWS, COLS, TILE, SUMS)
                    total = _multiply(total, ring, number, x, y, own + i * WARPS < tiles, of_thread, ASM, TYPES, MAGIC, CODE,
                                      THREE, WARPS, ROWS, COLS, TILE, WORDS_LAYOUT, STAGES, SUMS)
                    _ask(ring, at, number + STAGES - 1, ends, tiles, block, step, n, padded, warp, row, deep, THREE, GATED, STEPS,
                         WARPS, ROWS, WORDS, TILES_A_GROUP, STAGES)
                    number += 1
            if half < GATED:
                gate = total
        # fmt: on
        y = _row_sums(gate if GATED else total, first, inverse, bias_ptr, n, NORM, ROWS, SUMS)
        if GATED:
            up = _row_sums(total, first, inverse, None if bias_ptr is None else bias_ptr + n, n, NORM, ROWS, SUMS)
            y = y / (1.0 + gl.exp(-y)) * up
        y = gl.convert_layout(y, store)
        kept = (first + out_row < n) & (col < m)
        at_out = col * n + first + out_row
        if residual_ptr is not None:
            y += gl.load(residual_ptr + at_out, mask=kept, other=0.0).to(gl.float32)
        gl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=kept)


def words_layout(warps: int, rows: int, words: int) -> gl.DistributedLinearLayout:
    """Who has which word of [warps, rows, 4, words]: a lane's place is that of its numbers in the left operand.

    Lanes: 2 bits of the thread of four, then 3 of the row; registers: the words, then further eights of rows.
    """
    registers = [[0, 0, 0, 1 << i] for i in range(words.bit_length() - 1)]
    registers += [[0, 8 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    of_warps = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, 4, words])


# --------------------------------------------------------------------------------------------- launch


@cache
def settings(bits: int, words: int, third: bool, dtype: torch.dtype, tile: int, warps: int, rows: int, cols: int) -> dict:
    """The kernel's constants for weights of one kind."""
    return {
        "WARPS": warps, "ROWS": rows, "COLS": cols, "TILE": tile, "WORDS": words, "CODE": 2 if third else bits,
        "WORDS_LAYOUT": words_layout(warps, rows, words), "ASM": assembly(bits, dtype),
        "TYPES": types_of(bits, dtype), "MAGIC": magic_of(bits, dtype), "num_warps": warps,
    }  # fmt: skip


WARPS, ROWS, STAGES = 8, 16, 8


def _shape(x: torch.Tensor, weight) -> tuple[int, bool, int]:
    """(tiles a warp has, whether x stays in registers, bytes of shared memory) of a launch."""
    steps = triton.cdiv(weight.words.shape[1], WARPS)
    alone = x.shape[0] == 1
    words = 4 * weight.words.shape[-1] * (1 + (weight.more is not None))
    ring = STAGES * WARPS * ROWS * 4 * (words + 1)
    return steps, steps <= 4, ring + steps * WARPS * weight.tile * x.element_size() * (1 if alone else COLS) + 8192


def takes(x: torch.Tensor, weight, gated: bool) -> bool:
    """Whether ``few_rows`` runs: up to MAX_ROWS rows that fit into shared memory, and blocks of w that do not straddle
    gate and up."""
    if not x.is_cuda or x.shape[0] > MAX_ROWS or (gated and weight.n // 2 % ROWS):
        return False
    return _shape(x, weight)[2] <= shared_limit(x.device)


def few_rows(x, weight, bias, residual, eps, gamma, gated, out) -> torch.Tensor:
    """``awq_linear`` for rows for which ``takes`` holds, its arguments checked."""
    w, n, m = weight, weight.n // (1 + gated), x.shape[0]
    overlap = arch(x.device) >= 90
    steps, keep, _ = _shape(x, w)
    _few_rows_kernel[(min(triton.cdiv(n, ROWS), sm_count(x.device)),)](
        x, w.words, w.more, w.scales, gamma, bias, residual, out, m, n, w.k, 16 * w.words.shape[0], x.stride(0),
        0.0 if eps is None else eps, NORM=eps is not None, GATED=gated, ALONE=m == 1, KEEP=keep, STEPS=steps,
        TILES_A_GROUP=-(-w.group // w.tile), STAGES=STAGES,
        **settings(w.stored_bits, w.words.shape[-1], w.more is not None, w.dtype, w.tile, WARPS, ROWS, COLS),
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return out

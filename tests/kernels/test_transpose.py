"""The Gluon transpose: bank conflicts of the three layouts, compiled code, errors; values on a GPU only."""

from __future__ import annotations

import re

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import transpose
from kernels.transpose import OP, TILES, VARIANTS, Cost, _transpose_kernel, layouts, shared_bytes
from labkit.measure.compile import ARCHITECTURES, compile_kernel

INTS = ("rows_v", "cols_v", "x_stride_v", "out_stride_v", "tiles_m", "tiles_n")


def _settings(variant: str, tile: str, size: int) -> dict:
    t = TILES[tile]
    vec = 16 // size if t.wide else 1
    m, n = t.rows_v * vec, t.cols_v * vec
    read, write, shared = layouts(variant, vec, m, n, t.num_warps)
    return {"VEC": vec, "M": m, "N": n, "GROUP": t.group, "READ": read, "WRITE": write, "SHARED": shared}


def _compiled(variant: str, tile: str, dtype: str, size: int, arch: str):
    signature = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **dict.fromkeys(INTS, "i32")}
    return compile_kernel(
        _transpose_kernel, signature, _settings(variant, tile, size), arch,
        num_warps=TILES[tile].num_warps, divisible_by_16=("x_ptr", "out_ptr"),
    )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_the_fast_tile_moves_16_bytes_a_thread(arch, dtype, size):
    for variant in VARIANTS if arch == "sm_90" else ("swizzled",):
        c = _compiled(variant, "fast", dtype, size, arch)
        assert c.spills == c.stack_bytes == 0, str(c)
        assert c.count("LDG") == c.count("LDG.128") > 0 and c.count("STG") == c.count("STG.128") > 0, str(c)
        t = TILES["fast"]
        assert (
            abs(c.shared_bytes - shared_bytes(variant, 16 // size, t.rows_v * 16 // size, t.cols_v * 16 // size, size))
            <= 16
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_teaching_tile_loads_one_element_an_access(arch, variant):
    c = _compiled(variant, "teaching", "fp32", 4, arch)
    assert c.spills == 0 and c.count("LDS") == 32 // TILES["teaching"].num_warps  # a warp takes 8 of the 32 columns
    assert c.count("LDS.64") == c.count("LDS.128") == c.count("LDSM") == 0


@gluon.jit
def _conflicts_kernel(out_ptr, M: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, SHARED: gl.constexpr):
    loaded: gl.constexpr = gl.distributed_type(gl.float32, [M, N], COLUMNS)
    kept: gl.constexpr = gl.shared_memory_descriptor_type(gl.float32, [M, N], SHARED, [M, N])
    gl.store(out_ptr, 7000 + gl.bank_conflicts(loaded, kept))


def _wavefronts(variant: str, vec: int, m: int, n: int, size: int, num_warps: int) -> tuple[int, int]:
    """(accesses, wavefronts) of the column loads of one tile, counted lane by lane from the layouts' definitions.

    One wavefront a distinct word of the busiest of 32 banks, as Nsight Compute counts them.
    """
    _, write, shared = layouts(variant, vec, m, n, num_warps)
    accesses = wavefronts = 0
    n_lanes, m_lanes = write.threads_per_warp
    for base_n in range(0, n, n_lanes):  # all positions of a warp, whichever warp takes them
        for base_m in range(0, m, m_lanes * vec):
            for j in range(vec):  # a lane's vec elements are vec loads: they lie in different rows
                words: dict[int, set] = {}
                for lane in range(32):
                    row = base_m + lane % m_lanes * vec + j
                    at = _offset(shared, row, base_n + lane // m_lanes, n) * size // 4
                    words.setdefault(at % 32, set()).add(at)
                accesses += 1
                wavefronts += max(map(len, words.values()))
    return accesses, wavefronts


def _offset(shared, row: int, col: int, n: int) -> int:
    """Elements from the start of the tile: swizzling XORs the column's vector with the row's phase; padding adds."""
    if isinstance(shared, gl.PaddedSharedLayout):
        flat = row * n + col
        return flat + sum(flat // every * extra for every, extra in shared.interval_padding_pairs)
    phase = row // shared.per_phase % shared.max_phase
    return row * n + (col // shared.vec ^ phase) * shared.vec + col % shared.vec


def test_wavefronts_of_the_teaching_tile_are_those_the_hardware_counted():
    """Recorded with Nsight Compute on an H200: 1024 load wavefronts, 992 of them conflicts; else 32 and 0."""
    counted = {variant: _wavefronts(variant, 1, 32, 32, 4, 4) for variant in VARIANTS}
    assert counted == {"plain": (32, 1024), "padded": (32, 32), "swizzled": (32, 32)}


@pytest.mark.parametrize("size", [2, 4])
def test_the_fast_tile_has_no_conflicts(size):
    vec = 16 // size
    m, n = TILES["fast"].rows_v * vec, TILES["fast"].cols_v * vec
    for variant in ("padded", "swizzled"):
        accesses, wavefronts = _wavefronts(variant, vec, m, n, size, TILES["fast"].num_warps)
        assert wavefronts == accesses, variant
    accesses, wavefronts = _wavefronts("plain", vec, m, n, size, TILES["fast"].num_warps)
    assert wavefronts == 8 * accesses  # 8 lanes down the rows meet in one bank


@pytest.mark.parametrize(("variant", "conflicts"), [("plain", 31), ("swizzled", 0)])
def test_triton_agrees(variant, conflicts):
    """gl.bank_conflicts, for the layout that loads columns; it cannot take padded layouts."""
    _, write, shared = layouts(variant, 1, 32, 32, 4)
    turned = (list(reversed(part)) for part in (write.size_per_thread, write.threads_per_warp, write.warps_per_cta))
    columns = gl.BlockedLayout(*turned, [0, 1])  # WRITE as it lies over the tile before the transposition
    c = compile_kernel(_conflicts_kernel, {"out_ptr": "*i32"}, {"M": 32, "N": 32, "COLUMNS": columns, "SHARED": shared})
    assert re.search(rf"\b{7000 + conflicts};", c.ptx), c.ptx


@pytest.mark.parametrize(
    ("x", "how", "message"),
    [
        (torch.zeros(4), {}, r"x must be \[rows, cols\], got shape \(4,\)"),
        (torch.zeros(4, 4, dtype=torch.int8), {}, r"x must be float32, float16 or bfloat16, got torch\.int8"),
        (torch.zeros(4, 6).t(), {}, r"x's columns must be contiguous \(stride 1\), got stride 6"),
        (torch.zeros(4, 4), {"variant": "swirled"}, r"variant must be one of plain, padded, swizzled .* got 'swirled'"),
        (
            torch.zeros(4, 4),
            {"tile": "huge"},
            r"variant must be .* tile one of teaching, fast, got 'swizzled' and 'huge'",
        ),
        (
            torch.zeros(4, 6),
            {"out": torch.zeros(4, 6)},
            r"out must be contiguous \(6, 4\) torch\.float32 on cpu, got \(4, 6\)",
        ),
        (
            torch.zeros(4, 6),
            {"rows_v": 128, "cols_v": 128},
            r"a swizzled tile of 512 x 512 needs 1048576 bytes .* has 101376",
        ),
    ],
)
def test_bad_input_is_named(x, how, message):
    with pytest.raises(ValueError, match=f"^transpose: {message}"):
        OP.triton(x, **how)


def test_cost():
    assert OP.cost(torch.zeros(3, 5, dtype=torch.float16)) == Cost(bytes=60, flops=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_and_tile(variant, tile, dtype):
    for shape in ((1, 1), (64, 96), (129, 67), (1000, 264)):
        x = torch.randn(shape, device="cuda").to(dtype)
        out = torch.full(shape[::-1], float("nan"), device="cuda", dtype=dtype)
        assert torch.equal(transpose.transpose_triton(x, out=out, variant=variant, tile=tile), x.t())


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB of free GPU memory")
    x = torch.empty(2**16 + 8, 2**15, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)
    out = OP.triton(x)
    assert torch.equal(out[:, -8:], x[-8:].t()) and torch.equal(out[-8:], x[:, -8:].t())

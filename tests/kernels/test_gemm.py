"""The product's levels: tensor cores, pipelines and tiles that fit, on every architecture; errors by name."""

from __future__ import annotations

import pytest
import torch

from kernels import gemm
from kernels.gemm import LEVELS, OP, _persistent_kernel, _tiled_kernel, launch_for
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import ARCHITECTURES, compile_kernel

# the instruction that multiplies matrices, and the one that copies to shared memory in the background
TENSOR_CORE = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}
BACKGROUND = {"sm_90": "LDGSTS", "sm_100": "LDGSTS"}


def _launch(level: str, arch: str, element_size: int = 2):
    limit = SHARED_BYTES[int(arch[3:])]
    return next(t for t in LEVELS[level] if t.shared_bytes(element_size) <= limit)


def _compiled(level: str, arch: str, dtype: str = "bf16"):
    t = _launch(level, arch, 4 if dtype == "fp32" else 2)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "GROUP": t.group}
    constexprs = blocks | {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    if level == "persistent":
        tiles = ([t.block_m, t.block_k], [t.block_k, t.block_n], [t.block_m, t.block_n])
        names = ("a_desc", "b_desc", "c_desc")
        signature = {name: f"tensordesc<{dtype}{shape}>" for name, shape in zip(names, tiles, strict=True)}
        return compile_kernel(_persistent_kernel, signature | dict.fromkeys("mnk", "i32"), constexprs, arch, **options)
    signature = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{dtype}")
    signature |= dict.fromkeys(("m", "n", "k", "stride_am", "stride_bk"), "i32")
    return compile_kernel(_tiled_kernel, signature, constexprs, arch, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("level", ["tiled", "pipelined"])
def test_the_tiled_levels_use_tensor_cores_and_the_pipelined_one_loads_ahead(level, arch):
    c = _compiled(level, arch)
    assert c.spills == 0 and c.stack_bytes == 0, str(c)
    assert c.shared_bytes <= SHARED_BYTES[int(arch[3:])]
    assert c.count(TENSOR_CORE.get(arch, "HMMA")) > 0, c.stats.summary()
    assert (c.count("LDGSTS.128") > 0) == (level == "pipelined"), c.stats.summary()


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_the_persistent_level_lets_the_tma_unit_fetch_its_tiles(arch):
    c = _compiled("persistent", arch)
    assert c.spills == 0 and c.shared_bytes <= SHARED_BYTES[int(arch[3:])], str(c)
    assert c.count("UTMALDG") > 0 and c.count("UTMASTG") > 0 and c.count("LDG") == 0, c.stats.summary()


def test_the_largest_tile_that_fits_is_taken():
    assert _launch("pipelined", "sm_90").block_n == 256 and _launch("pipelined", "sm_80").block_n == 256
    assert _launch("pipelined", "sm_89").block_n == 128


def test_what_fits_nowhere_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(gemm, "fits", lambda *_: False)
    with pytest.raises(ValueError, match=r"smallest pipelined tile needs 32768 bytes of shared memory, cpu has 101376"):
        launch_for("pipelined", 4, torch.device("cpu"))


A = torch.zeros(8, 16)


@pytest.mark.parametrize(
    ("a", "b", "level", "message"),
    [
        (A[0], A, "tiled", r"a must be a matrix, got shape \(16,\)"),
        (A, A, "tiled", "a has 16 columns and b 8 rows"),
        (A, A.t(), "tiled", r"b's columns must be contiguous \(stride 1\), got stride 16"),
        (A, torch.zeros(16, 4).half(), "tiled", "got torch.float32 on cpu and torch.float16 on cpu"),
        (A.int(), A.int(), "tiled", "must both be float32, float16 or bfloat16"),
        (A, torch.zeros(16, 4), "fast", "level must be one of naive, tiled, pipelined, persistent, got 'fast'"),
        (A, torch.zeros(16, 5), "persistent", "b's rows must start at multiples of 16 bytes; got a row stride of 5"),
    ],
)
def test_bad_input_is_named(a, b, level, message):
    with pytest.raises(ValueError, match=message):
        OP.triton(a, b, level)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_multiplies_large_matrices(level):
    m, n, k = (512, 768, 264) if level == "naive" else (2048, 3072, 1032)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    error = (OP.triton(a, b, level).double() - exact).norm() / exact.norm()
    assert error < 4e-3

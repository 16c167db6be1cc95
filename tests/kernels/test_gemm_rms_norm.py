"""The folded norm: equal to norm, then product; compiled with tensor cores everywhere; errors by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from triton.experimental.gluon import language as gl

from kernels import gemm_rms_norm as page
from kernels import gemm_rms_norm_hopper as hopper
from kernels.gemm_rms_norm import LAUNCH, OP, fold_norm_weight
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import ARCHITECTURES, compile_kernel
from tests.kernels import gluon_on_threads
from tests.kernels.gluon_on_threads import load_on_threads


@pytest.mark.parametrize("m", [1, 70])
def test_it_equals_norm_then_product(m):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, 96, generator=generator), torch.randn(40, 96, generator=generator)
    gamma = 1 + 0.3 * torch.randn(96, generator=generator)
    want = F.linear(F.rms_norm(x, (96,), gamma, 1e-5), w)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got = OP.triton(x.to(device), fold_norm_weight(w, gamma).to(device), 1e-5).cpu()
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter; on a GPU the operator's cases take this way")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (17, 72, 200), (70, 136, 96)])
def test_descriptors_give_the_same(m, n, k):
    x, w, out = torch.randn(m, k), torch.randn(n, k), torch.full((m, n), float("nan"))
    page._launch(x, w, out, 1e-5, tma=True)
    assert torch.allclose(out, OP.reference(x, w, 1e-5), rtol=1e-4, atol=1e-4)


def on_threads(m, n, k, edit=str, sms=3):
    """(what Hopper's kernel writes, what is right), its barriers and copies played by CPU threads."""
    module = load_on_threads(hopper, edit)
    module._sms = lambda device: sms
    x, w, out = torch.randn(m, k), torch.randn(n, k), torch.full((m, n), float("nan"))
    module.launch(x, w, out, 1e-5)
    return out, OP.reference(x, w, 1e-5)


@pytest.mark.parametrize(
    ("m", "n", "k", "sms"), [(1, 8, 8, 3), (130, 300, 64, 3), (200, 520, 1000, 2), (129, 100, 260, 132)]
)
def test_hoppers_barriers_let_every_tile_through(m, n, k, sms):
    got, want = on_threads(m, n, k, sms=sms)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


FREED = "            mbarrier.arrive(empty.index(done % STAGES), count=1)"
MULTIPLIED = "            acc = warpgroup_mma_wait(0, deps=[acc])\n"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (MULTIPLIED + FREED, FREED + "\n" + MULTIPLIED),
        ("mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)"),
        ("((done // STAGES) & 1) ^ 1", "((done // STAGES) & 1)"),
        ("squares += _squares(x)\n            ahead", "ahead"),
    ],
)
def test_a_flaw_in_the_protocol_is_seen(right, wrong, monkeypatch):
    monkeypatch.setattr(gluon_on_threads, "TIMEOUT_S", 1.0)
    source = Path(hopper.__file__).read_text()
    assert right in source

    def seen() -> bool:
        try:
            got, want = on_threads(200, 520, 1000, lambda text: text.replace(right, wrong), sms=2)
        except (TimeoutError, AssertionError):
            return True
        return not torch.allclose(got, want, rtol=1e-4, atol=1e-4)

    assert any(seen() for _ in range(5))


def test_statistics_of_a_tile_would_be_another_norm():
    """The shortcut of normalising the result's tile is wrong as soon as a row spans two tiles."""
    x, w = torch.randn(4, 64), torch.randn(256, 64)
    y = x @ w.t()
    whole = F.rms_norm(y, (256,))
    tiles = torch.cat([F.rms_norm(t, (128,)) for t in y.split(128, -1)], -1)
    assert (whole - tiles).abs().max() > 0.01


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", LAUNCH)
def test_every_launch_compiles_without_spills(rows, arch):
    limit = SHARED_BYTES[int(arch[3:])]
    if rows > page.FEW_ROWS and int(arch[3:]) in page.ASYNCHRONOUS:
        return  # not launched there
    t = next(t for t in LAUNCH[rows] if t.shared_bytes(2) <= limit)
    tma = int(arch[3:]) >= 90
    if tma:
        boxes = {"x_desc": (t.block_m, t.block_k), "w_desc": (t.block_n, t.block_k), "out_desc": (t.block_m, t.block_n)}
        kernel, signature = page._descriptor_kernel, {name: f"tensordesc<bf16{list(b)}>" for name, b in boxes.items()}
    else:
        kernel, signature = page._pointer_kernel, dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*bf16")
        signature |= dict.fromkeys(("stride_xm", "stride_wn"), "i32")
    signature |= dict.fromkeys(("m", "n", "k"), "i32") | {"eps": "fp32"}
    signature = {name: signature[name] for name in kernel.arg_names if name in signature}
    constexprs = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "GROUP": t.group}
    c = compile_kernel(
        kernel, signature, constexprs | {"PRECISION": "tf32"}, arch, num_warps=t.num_warps, num_stages=t.num_stages
    )
    assert c.spills == 0 and c.stack_bytes == 0 and c.shared_bytes <= limit, str(c)
    assert c.count("HMMA") > 0, "tensor cores, and none that run asynchronously"
    assert c.count("UTMALDG" if tma else "LDGSTS.128") > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("columns", hopper.STAGES)
def test_machine_code_of_hoppers_kernel(dtype, columns):
    kind = gl.bfloat16 if dtype == "bf16" else gl.float16

    def box(*shape):
        return f"tensordesc<{dtype}{list(shape)},{gl.NVMMASharedLayout.get_default_for(list(shape), kind)!r}>"

    rows, depth = hopper.ROWS.value, hopper.BLOCK_K.value
    signature = {"x_desc": box(rows, depth), "w_desc": box(columns, depth), "out_desc": box(rows, columns)}
    signature |= dict.fromkeys(("m", "n", "k"), "i32") | {"eps": "fp32"}
    constexprs = {"BLOCK_N": columns, "STAGES": hopper.STAGES[columns]}
    c = compile_kernel(hopper.gemm_rms_norm_hopper_kernel, signature, constexprs, "sm_90", num_warps=4)
    assert c.spills == 0 and c.stack_bytes == 0 and c.shared_bytes <= SHARED_BYTES[90], str(c)
    # each of two warpgroups multiplies at two places, the loop and the last step, with x from registers
    assert c.count("HGMMA") == 2 * 2 * depth // 16 == len(re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", c.sass))
    assert len(re.findall(r"WARPGROUP\.DEPBAR", c.sass)) == 4, "waited for once a step, not after every instruction"
    assert c.count("LDSM") == 2 * 2 * rows * depth * 2 // (128 * 16), "x is read from shared memory once a step"
    assert c.count("UTMALDG") == 3 and c.count("UTMASTG") == 2 and not c.count("LDG.128")


X = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OP.triton(X[0], X), r"x must be a matrix, got shape \(16,\)"),
        (lambda: OP.triton(X, torch.zeros(4, 8)), "equally many columns, at least 1; got 16 and 8"),
        (lambda: OP.triton(X[:, :0], X[:, :0]), "got 0 and 0"),
        (lambda: OP.triton(X, torch.zeros(16, 4).t()), "w's columns must be contiguous"),
        (lambda: OP.triton(X, X.half()), "got torch.float32 on cpu and torch.float16 on cpu"),
        (lambda: fold_norm_weight(X, torch.ones(4)), r"got \(4, 16\) and \(4,\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 16, 40, 65, 200, 2048, 2053])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (520, 72), (301, 4101), (8, 8)])
def test_large_products(m, n, k, dtype):
    x = torch.randn(m, k, device="cuda", dtype=dtype) * (1 + torch.arange(m, device="cuda") % 7)[:, None].to(dtype)
    w = torch.randn(n, k, device="cuda", dtype=dtype) / 64
    exact = OP.reference(x.double(), w.double())
    for _ in range(3):
        got = OP.triton(x, w)
        assert (got.double() - exact).norm() / exact.norm() < 4e-3
        assert ((got.double() - exact).norm(dim=1) / exact.norm(dim=1)).max() < 2e-2, "a row has another's scale"

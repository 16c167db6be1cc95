"""Hopper's product with 4 bits: its numbers bit for bit, its barriers on threads, its machine code, on a GPU all."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import torch
from triton.experimental.gluon import language as gl

from kernels import awq_linear_hopper as hopper
from kernels import awq_numbers_hopper
from kernels.awq_packed import repack
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import compile_kernel
from tests.kernels import gluon_on_threads, ptx_on_tensors
from tests.kernels.awq_weights import weight
from tests.kernels.gluon_on_threads import Descriptor, Product, load_on_threads

DTYPES = [torch.bfloat16, torch.float16]


# --------------------------------------------------------------------------------------------- codes to numbers


def inline_asm(assembly, constraints, arguments, dtype, is_pure, pack):
    outputs = ptx_on_tensors.run(assembly, constraints, [a.as_subclass(torch.Tensor) for a in arguments])
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "torch.int32": torch.int32}
    outputs = [out.contiguous().view(kinds[str(kind)]) for out, kind in zip(outputs, dtype, strict=True)]
    return [gluon_on_threads._tensor(out) for out in outputs]


def numbers_on_tensors():
    """kernels.awq_numbers_hopper with its assembly interpreted. Layouts say where values are, not which."""
    module = load_on_threads(awq_numbers_hopper)
    language = module.gl
    language.inline_asm_elementwise = inline_asm
    language.join = lambda a, b: torch.stack([a, b], -1)
    language.split = lambda x: x.unbind(-1)
    language.expand_dims = lambda x, axis: x.unsqueeze(axis)
    language.convert_layout = lambda x, layout, assert_trivial: x
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [2.0**-24, 3e-5, 0.01, 1.7, 900.0])
def test_numbers_are_what_would_be_written_out(scale, dtype):
    """Every code with every zero point, and scales of all 11 bits."""
    module, codes = numbers_on_tensors(), hopper.settings(dtype, 64, 2)["CODES"]
    w = repack(
        torch.arange(128, dtype=torch.uint8).remainder(16).expand(64, 128).contiguous(),
        scale * (1 + torch.arange(64)[:, None] / 64),
        (torch.arange(64)[:, None] % 16).to(torch.uint8), 4, dtype,
    )  # fmt: skip
    low, high = module.halves(w.words[:4].view(4, 16, 16), codes)
    scales = module.pairs_of_scales(w.scales[:4], codes)
    got = torch.cat([module.numbers(half, scales, codes, None) for half in (low, high)], 1)
    assert got.dtype == dtype and torch.equal(got.as_subclass(torch.Tensor), w.dequantise(dtype))


# --------------------------------------------------------------------------------------------- barriers


def finish(product, outstanding):
    """A chain of products with all but the last ``outstanding`` multiplied; operands are read now."""
    if not isinstance(product, Product):
        return product
    product.acc = finish(product.acc, max(outstanding - 1, 0))
    return product if outstanding else product.result()


def wait(outstanding, deps):
    time.sleep(random.choice(gluon_on_threads.READ_S))
    return finish(deps[0], outstanding)


class DeepBoxes(Descriptor):
    """Boxes of three dimensions."""

    def rows(self, where):
        if len(where) == 2:
            yield from super().rows(where)
        else:
            for i in range(self.block_shape[0]):
                for row, start, columns in super().rows([where[0] + i, *where[1:]]):
                    yield i * self.block_shape[1] + row, start, columns


def load(pointer, mask, other):
    at = torch.where(mask, pointer.offset, 0).long()
    return torch.where(mask, pointer.flat[at], other).as_subclass(gluon_on_threads.Tensor)


def on_threads(m, n, k, group, dtype, block_m, bias=True, edit=str, sms=3, stages=None):
    """(what the kernel writes, what is right), its barriers and copies played by CPU threads."""
    module, numbers = load_on_threads(hopper, edit), numbers_on_tensors()
    module.sm_count = lambda device: sms
    module.warpgroup_mma_wait = wait
    module.STAGES = dict(hopper.STAGES) if stages is None else {block_m: stages}
    module.TensorDescriptor = DeepBoxes
    module.gl.load = load
    for name in ("halves", "pairs_of_scales", "numbers"):
        setattr(module, name, getattr(numbers, name))
    x, w = torch.randn(m, k + 8).to(dtype)[:, :k], weight(n, k, group, dtype)
    bias = torch.randn(n).to(dtype) if bias else None
    out = torch.full((m, n), float("nan"), dtype=dtype)
    assert module.awq_linear_hopper(x, w, bias, out, block_m) is out
    want = x.float() @ w.dequantise(dtype).float().t()
    return out.float(), want if bias is None else want + bias.float()


def close(got, want, dtype) -> bool:
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
    return torch.allclose(got, want, rtol=unit, atol=unit * 1e-2)


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "block_m", "sms"),
    [
        (1, 8, 128, 128, 64, 3),
        (70, 264, 384, 128, 64, 3),
        (200, 72, 256, 256, 128, 2),
        (300, 136, 1024, 512, 128, 132),
        (520, 200, 768, 128, 256, 3),
        (64, 1600, 256, 128, 64, 2),
    ],
)
def test_barriers_let_every_tile_through(m, n, k, group, block_m, sms):
    dtype = random.choice(DTYPES)
    got, want = on_threads(m, n, k, group, dtype, block_m, bias=m % 100 == 0, sms=sms)
    assert close(got, want, dtype)


WAITED = "                acc = warpgroup_mma_wait(1, deps=[acc])\n"
FREED = "                mbarrier.arrive(empty.index(2 * done % X), count=1)\n"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),  # none
        (WAITED + FREED, FREED + WAITED),
        (WAITED + FREED, WAITED.replace("(1,", "(2,") + FREED),
        ("mbarrier.init(x_empty.index(i), count=2)", "mbarrier.init(x_empty.index(i), count=1)"),
        ("mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)"),
        ("((step // STAGES[0]) & 1) ^ 1", "((step // STAGES[0]) & 1)"),
        ("((done // STAGES) & 1) ^ 1", "((done // STAGES) & 1)"),
        ("    _send_words(descs, codes, done, 0, 0, tiles_a_group, STAGES[1])\n", ""),
        ("tile // tiles_a_group, 0", "tile, 0"),
        ("                if tile > 0:", "                if tile > 1:"),
    ],
)
def test_a_flaw_in_the_protocol_is_seen(right, wrong, monkeypatch):
    """In rings of few places, where what is freed is overwritten at once."""
    monkeypatch.setattr(gluon_on_threads, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(gluon_on_threads, "READ_S", (0.0, 0.003))
    assert right in Path(hopper.__file__).read_text()

    def edit(text: str) -> str:
        return text.replace(right, wrong) if right else text

    def seen() -> bool:
        try:
            got, want = on_threads(130, 200, 1024, 256, torch.float16, 64, edit=edit, sms=2, stages=(3, 2))
        except (TimeoutError, AssertionError):
            return True
        return not close(got, want, torch.float16)

    assert any(seen() for _ in range(5)) == (right != wrong)


# --------------------------------------------------------------------------------------------- machine code


def compiled(dtype, block_m, tiles, bias):
    kinds = {"bf16": gl.bfloat16, "fp16": gl.float16, "i32": gl.int32}

    def box(kind, *shape):
        layout = gl.NVMMASharedLayout.get_default_for(list(shape), kinds[kind])
        return f"tensordesc<{kind}{list(shape)},{layout!r}>"

    signature = {
        "x_desc": box(dtype, block_m, 64),
        "words_desc": box("i32", 4, 16, 16),
        "scale_desc": box("i32", 4, 1, 16),
    }
    signature |= {"out_desc": box(dtype, block_m, 64)} | ({"bias_ptr": f"*{dtype}"} if bias else {})
    signature |= dict.fromkeys(("m", "n", "k", "tiles_a_group"), "i32")
    constexprs = hopper.settings({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], block_m, tiles)
    constexprs = constexprs if bias else constexprs | {"bias_ptr": None}
    return compile_kernel(hopper.awq_linear_hopper_kernel, signature, constexprs, "sm_90", num_warps=4)


def written_while_read(sass: str) -> list[str]:
    """Instructions that write a register of a product on its way: of its left operand, or of its sums."""
    on_their_way, these, found = [], set(), []
    for line in sass.splitlines():
        parsed = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([\w.]+) ?(.*?) ?;", line)
        if not parsed:
            continue
        op, operands = parsed.groups()
        registers = [int(r) for r in re.findall(r"\bR(\d+)", operands)]
        if op.startswith("HGMMA"):
            sums, left = registers[:2]
            these |= {*range(left, left + 4), *range(sums, sums + int(re.search(r"64x(\d+)x", op)[1]) // 2)}
            if "gsb0" in operands:  # the last of a group
                on_their_way, these = [*on_their_way, these], set()
        elif op.startswith("WARPGROUP.DEPBAR"):
            left = int(re.search(r"gsb0, 0x(\d+)", operands)[1])
            on_their_way = on_their_way[len(on_their_way) - left :] if left else []
        elif re.match(r"R\d+\b", operands):
            width = 4 if ".128" in op else 2 if ".64" in op or "CS2R" in op or "WIDE" in op else 1
            written = set(range(registers[0], registers[0] + width))
            if any(written & group for group in (*on_their_way, these)):
                found.append(line)
    return found


@pytest.mark.parametrize("tiles", [32, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("block_m", hopper.STAGES)
def test_machine_code(block_m, dtype, tiles):
    c = compiled(dtype, block_m, tiles, bias=tiles == 3)
    assert c.spills == 0 and c.stack_bytes == 0 and c.shared_bytes <= SHARED_BYTES[90], str(c)
    a_loop = 2 - tiles % 2  # tiles of words
    # each of two warpgroups: 8 instructions a tile, and w from registers
    assert c.count("HGMMA") == 2 * 8 * a_loop == len(re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", c.sass))
    assert len(re.findall(r"WARPGROUP\.DEPBAR", c.sass)) == 2 * 2 * a_loop, "waited for once a product"
    assert not written_while_read(c.sass)
    assert c.count("LDS.128") == 2 * 2 * (a_loop + 1), "words: 16 bytes for each of two rows"
    assert c.count("LDSM") == 0 and c.count("STSM.16.MT88.4") == 2 * block_m // 16, "only the output is stored, turned"
    assert c.count("UTMALDG") == 2 * 4 + 2 and c.count("UTMASTG") == 2
    assert c.count("LDG") == (2 * 2 if tiles == 3 else 0), "bias only"


# --------------------------------------------------------------------------------------------- launch


def test_tiles_are_the_widest_that_keep_all_sms_at_work():
    assert hopper.block_m_of(4096, 4096, 132) == 256
    assert hopper.block_m_of(512, 4096, 132) == 128  # 128 programs; with 256 rows 64
    assert hopper.block_m_of(512, 6144, 132) == 256  # 96 programs; with 128 rows 192 in two turns
    assert hopper.block_m_of(128, 4096, 132) == 64
    assert hopper.block_m_of(128, 28672, 132) == 128  # 224 programs in two turns; with 64 rows 448 in four


def test_what_is_not_taken(monkeypatch):
    monkeypatch.setattr(hopper, "arch", lambda device: 90)
    x, bf16 = torch.zeros(16, 256, dtype=torch.bfloat16), torch.bfloat16
    w = weight(64, 256, 128, bf16)
    assert hopper.takes(x, w)
    assert not hopper.takes(x.half(), w) and not hopper.takes(x[:0], w) and not hopper.takes(x.t(), w)
    assert not hopper.takes(torch.zeros(16, 260, dtype=bf16)[:, :256], w), "rows at multiples of 8 bytes"
    assert not hopper.takes(x, weight(60, 256, 128, bf16)), "rows of the output at multiples of 8 bytes"
    assert not hopper.takes(x, weight(64, 256, 64, bf16)) and not hopper.takes(x, weight(64, 256, 256, bf16, bits=3))
    assert not hopper.takes(x.float(), weight(64, 256, 128, torch.float32))
    monkeypatch.setattr(hopper, "arch", lambda device: 100)
    assert not hopper.takes(x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 128, 512, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(4096, 4096, 128), (28672, 4096, 128), (4096, 14336, 256), (72, 384, 384), (1000, 640, 128)]
)
def test_large_products(n, k, group, m, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")
    w = weight(n, k, group, dtype, device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    assert hopper.takes(x, w)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = x.float() @ w.dequantise().t() + bias.float()
    for block_m in (None, *hopper.STAGES):
        out = [torch.full((m, n), float("nan"), device="cuda", dtype=dtype) for _ in range(2)]
        for o in out:
            hopper.awq_linear_hopper(x, w, bias, o, block_m)
        assert torch.equal(*out), "two calls differ"
        error = (out[0].float() - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.max() < (4e-3 if dtype == torch.bfloat16 else 1e-3), block_m

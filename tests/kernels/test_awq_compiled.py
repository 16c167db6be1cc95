"""The W4 kernels ahead of time: every launch as it would be made, for every architecture that can make it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from kernels import awq_few_rows, awq_one_row, awq_some_rows
from kernels.launch import SHARED_BYTES
from labkit.measure.compile import ARCHITECTURES, Compiled, compile_kernel
from tests.kernels.awq_weights import KINDS, weight

BF16, FP16 = torch.bfloat16, torch.float16
TYPES = {BF16: "bf16", FP16: "fp16", torch.int32: "i32", torch.float32: "fp32"}
GPUS = [int(arch[3:]) for arch in ARCHITECTURES]
UNLIKE = [80, 86, 90, 120]  # one of each kind: 89 is to the compiler what 86 is, and 100 multiplies as 90 does


class Launch:
    """Stands where a kernel stands and compiles what it is launched with."""

    def __init__(self, kernel, gpu: int):
        self.kernel, self.gpu = kernel, gpu

    def __getitem__(self, grid):
        def launch(*args, num_warps, launch_pdl=False, maxnreg=None, **constants):
            assert launch_pdl == constants.get("OVERLAP", False) and launch_pdl <= (self.gpu >= 90)
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            signature, divisible = {}, []
            for name, value in given.items():
                if value is None or value is True or (isinstance(value, int) and value == 1):
                    constants[name] = value  # as Triton would
                elif isinstance(value, torch.Tensor):
                    signature[name] = f"*{TYPES[value.dtype]}"
                    divisible.append(name)
                else:
                    signature[name] = "i32" if isinstance(value, int) else "fp32"
                    if isinstance(value, int) and value % 16 == 0:
                        divisible.append(name)
            self.compiled = compile_kernel(
                self.kernel, signature, constants, f"sm_{self.gpu}",
                num_warps=num_warps, maxnreg=maxnreg, divisible_by_16=divisible,
            )  # fmt: skip

        return launch


@pytest.fixture
def compiled(monkeypatch):
    """compiled(gpu, module, kernel, call): what ``call`` would run on that GPU; nothing spills or is too large."""

    settings = awq_some_rows._settings  # assembly is for GPUs
    monkeypatch.setattr(awq_some_rows, "_settings", lambda w, device: settings(w, torch.device("cuda")))

    def run(gpu: int, module, kernel: str, call) -> Compiled:
        launch = Launch(getattr(module, kernel), gpu)
        monkeypatch.setattr(module, kernel, launch)
        for name, value in (("arch", gpu), ("sm_count", 132), ("shared_limit", SHARED_BYTES[gpu])):
            monkeypatch.setattr(module, name, lambda device, value=value: value, raising=False)
        call()
        monkeypatch.setattr(module, kernel, launch.kernel)
        c = launch.compiled
        assert c.spills == c.stack_bytes == 0 and c.shared_bytes <= SHARED_BYTES[gpu], str(c)
        return c

    return run


def inputs(m, n, k, dtype, bits=4, group=128, around="") -> dict:
    """Arguments of one_row and few_rows. around: of n(orm), g(amma), b(ias), r(esidual), G(ated)."""
    shapes = dict(x=(m, k), out=(m, n), g=k, b=n, r=(m, n))
    t = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    w, gated = weight(n, k, group, dtype, bits), "G" in around
    if gated:
        t["out"] = t["r"] = torch.zeros(m, n // 2, dtype=dtype)
    options = [t[name] if name in around else None for name in "br"]
    return dict(x=t["x"], weight=w, bias=options[0], residual=options[1], eps=1e-5 if "n" in around else None,
                gamma=t["g"] if "g" in around else None, gated=gated, out=t["out"])  # fmt: skip


def loop(c: Compiled) -> SimpleNamespace:
    """The instructions of the loop that multiplies, by stem."""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
    code = [(int(m[1], 16), m[2], m[3]) for m in map(line.search, c.sass.splitlines()) if m]
    found = []
    for at, op, rest in code:
        back = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if back and int(back[1], 16) < at:
            body = [op.split(".") for a, op, _ in code if int(back[1], 16) <= a <= at]
            if any(op[0].endswith("MMA") for op in body):
                found.append(body)
    assert found, "no loop multiplies"
    return SimpleNamespace(count=lambda *parts: sum(set(parts) <= set(op) for op in max(found, key=len)))


# --------------------------------------------------------------------------------------------- one row

# k and what stands around the product: 1, 2, 3, 4, 6 and 7 tiles a warp.
ONE_ROW = [
    (2048, ""), (4096, "ngG"), (4096, "ngbrG"), (4096, "br"), (6144, "nG"), (8192, "ngG"), (8192, "r"), (8192, "ng"),
    (11008, "r"), (14336, "r"), (14336, "ngb"),
]  # fmt: skip


def assert_good_one_row(gpu, k, around, bits, compiled, **options):
    dtype = BF16 if len(around) % 2 else FP16
    arguments = inputs(1, 64, k, dtype, bits, around=around)
    c = compiled(gpu, awq_one_row, "_one_row_kernel", lambda: awq_one_row.one_row(**arguments, **options))
    gated, w = "G" in around, arguments["weight"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awq_one_row, "arch", lambda device: gpu)
        patch.setattr(awq_one_row, "sm_count", lambda device: 132)
        s = options.get("settings") or awq_one_row._settings(arguments["x"], w, gated)
    steps, turns = awq_one_row.walk_of(k // 128, gated, s)
    assert c.shared_bytes <= awq_one_row.shared_bytes(steps, s)
    tiles = steps * turns * (1 + gated)
    assert c.count("IMMA") == 4 * (tiles + steps) and c.count("HMMA") == 0, "w is multiplied as bytes, and x summed up"
    loads = c.count("LDG.E.64") if bits < 4 else c.count("LDG.E.128")
    assert loads == (4 if bits == 8 else 2) * (s.deep + tiles), "words come in loads as wide as a thread's"
    assert c.count("LDS.128") >= 2 * steps, "digits are read 16 bytes at a time"
    return c


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("k", "around"), ONE_ROW)
def test_one_row(compiled, k, around, gpu):
    assert_good_one_row(gpu, k, around, 4, compiled)


@pytest.mark.parametrize("gpu", UNLIKE)
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize(("k", "around"), ONE_ROW)
def test_one_row_of_other_bits(compiled, k, around, bits, gpu):
    assert_good_one_row(gpu, k, around, bits, compiled)


@pytest.mark.parametrize("settings", [(16, 2), (8, 2, 2), (8, 4, 2)], ids=str)
def test_one_row_with_other_settings(compiled, settings):
    settings = awq_one_row.Settings(*settings)
    c = assert_good_one_row(90, 4096, "ng", 4, compiled, settings=settings)
    assert c.registers <= 128


def test_which_rows_are_taken(monkeypatch):
    taken = {}
    monkeypatch.setattr(awq_one_row, "sm_count", lambda device: 132)
    for gpu in GPUS:
        monkeypatch.setattr(awq_one_row, "arch", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(awq_one_row, "shared_limit", lambda device, gpu=gpu: SHARED_BYTES[gpu])
        for k in (4096, 8192, 14336, 28672):
            w, x = weight(64, k, 128, FP16), torch.zeros(1, k).half()
            taken[gpu, k] = [awq_one_row.takes(x, w, gated) for gated in (False, True)]
    for gpu in GPUS:
        assert taken[gpu, 4096] == taken[gpu, 8192] == [True, True]
        assert taken[gpu, 14336] == [True, False] and taken[gpu, 28672] == [False, False]
    x = torch.zeros(1, 256).half()
    assert awq_one_row.takes(x, weight(24, 256, 256, FP16), False)
    assert not awq_one_row.takes(x, weight(40, 256, 128, FP16), True), "gate and up share a block"
    assert not awq_one_row.takes(x, weight(64, 256, 64, FP16), False)
    assert all(awq_one_row.takes(x, weight(64, 256, 128, FP16, bits=bits), False) for bits in (2, 3, 8))
    assert not awq_one_row.takes(torch.zeros(2, 256).half(), weight(64, 256, 128, FP16), False)


# --------------------------------------------------------------------------------------------- few rows

# Rows, tiles of each warp, and what stands around the product.
FEW_ROWS = [(8, 4, "ngG"), (3, 8, "r"), (1, 2, "ngbrG"), (1, 8, "ngG"), (5, 1, "")]


def assert_good_few_rows(gpu, m, steps, around, kind, dtype, compiled):
    bits, group = kind
    arguments = inputs(m, 64, steps * 8 * group, dtype, bits, group, around)
    w = arguments["weight"]
    estimate = awq_few_rows._shape(m, w)[2]
    if estimate > SHARED_BYTES[gpu]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(awq_few_rows, "shared_limit", lambda device: SHARED_BYTES[gpu])
            assert not awq_few_rows.takes(arguments["x"], w, "G" in around)
        return
    c = compiled(gpu, awq_few_rows, "_few_rows_kernel", lambda: awq_few_rows.few_rows(**arguments))
    assert c.shared_bytes <= estimate
    assert c.count("HMMA") > 0 and c.count("IMMA") == 0
    words = w.words.shape[-1] * (1 if w.more is None else 2)
    places = 7 + (1 + ("G" in around)) * (steps if steps <= 4 else 1)  # of code that asks for a step
    copies = sum(c.count(f"LDGSTS.E{width}") for width in (".128", ".64")) if words % 2 == 0 else c.count("LDGSTS")
    assert copies >= places, "words come by asynchronous copies as wide as a thread's"
    if words % 4 == 0 and w.more is None:
        assert c.count("LDGSTS.E.128") == places * 2 * words // 4, "of 16 bytes"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", FEW_ROWS, ids=str)
def test_few_rows(compiled, shape, gpu):
    dtype = [BF16, FP16][(GPUS.index(gpu) + FEW_ROWS.index(shape)) % 2]
    assert_good_few_rows(gpu, *shape, (4, 128), dtype, compiled)


@pytest.mark.parametrize("gpu", UNLIKE)
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_assert_good_few_rows_other_weights(compiled, kind, gpu):
    turn = KINDS.index(kind) + 7 * UNLIKE.index(gpu)
    assert_good_few_rows(gpu, *FEW_ROWS[turn % 5], kind, [BF16, FP16][turn // 2 % 2], compiled)


def test_how_few_rows_are_taken(monkeypatch):
    def taken(gpu, m, k, kind=(4, 128), gated=False, n=64):
        monkeypatch.setattr(awq_few_rows, "shared_limit", lambda device: SHARED_BYTES[gpu])
        return awq_few_rows.takes(torch.zeros(m, k).half(), weight(n, k, kind[1], FP16, kind[0]), gated)

    for gpu in GPUS:
        much = SHARED_BYTES[gpu] > 150_000
        assert taken(gpu, 1, 4096) and taken(gpu, 1, 8192) and taken(gpu, 8, 4096) == much
        assert taken(gpu, 8, 8192) == (SHARED_BYTES[gpu] > 200_000) and not taken(gpu, 8, 14_336)
    assert taken(90, 8, 4096, (8, 128)) and not taken(90, 8, 8192, (8, 128)) and not taken(90, 9, 128)
    assert taken(90, 2, 128, gated=True) and not taken(90, 2, 128, gated=True, n=40)


# --------------------------------------------------------------------------------------------- some rows

# m and n: every launch of the table.
SOME_ROWS = [(16, 4096), (16, 8192), (32, 4096), (64, 4096), (64, 8192), (128, 4096)]


def assert_good_some_rows(gpu, m, n, splits, kind, dtype, compiled):
    t = awq_some_rows.launch_of(m, n, gpu)
    bits, group = kind
    w = weight(t.block_n, 16 * group, group, dtype, bits)
    x, bias, out = (torch.zeros(shape, dtype=dtype) for shape in ((m, w.k), w.n, (m, w.n)))
    splits = min(splits, awq_some_rows.most_splits(t, w, gpu))
    call = lambda: awq_some_rows.some_rows(x, w, bias, out, splits=splits, launch=t)  # noqa: E731
    c = compiled(gpu, awq_some_rows, "_linear_kernel", call)
    assert c.shared_bytes <= awq_some_rows.shared_bytes(t, w, gpu)
    body, threads = loop(c), 32 * t.num_warps
    copied = 16 * w.words.shape[-1] * t.block_n, 2 * w.tile * t.block_m  # bytes of words and of x
    if min(copied) >= 16 * threads and w.words.shape[-1] >= 4:
        assert body.count("LDGSTS", "128") == sum(copied) // (16 * threads), "words and x come in copies of 16 bytes"
    if gpu == 90:
        assert c.count("HGMMA") > 0 == c.count("HMMA")
        assert c.count("HGMMA") == len(re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", c.sass)), "numbers come from registers"
        # Those of 3 bits pass through shared memory.
        assert body.count("STS") == (2 * t.block_n * w.tile // (16 * threads) if w.more is not None else 0)
        assert body.count("STSM") == 0
    else:
        assert c.count("UTCHMMA" if gpu == 100 else "HMMA") > 0


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("m", "n"), SOME_ROWS)
@pytest.mark.parametrize("splits", [1, 8])
def test_some_rows(compiled, m, n, splits, gpu):
    dtype = [BF16, FP16][(GPUS.index(gpu) + m // 16) % 2]
    assert_good_some_rows(gpu, m, n, splits, (4, 128), dtype, compiled)


@pytest.mark.parametrize("gpu", UNLIKE)
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_assert_good_some_rows_other_weights(compiled, kind, gpu):
    turn = KINDS.index(kind) + 7 * UNLIKE.index(gpu)
    assert_good_some_rows(gpu, *SOME_ROWS[turn % 6], 1 << turn % 4, kind, [BF16, FP16][turn // 2 % 2], compiled)


def test_splits_fill_the_sms_and_never_outnumber_the_tiles(monkeypatch):
    page, device = awq_some_rows, torch.device("cuda", 0)
    monkeypatch.setattr(page, "sm_count", lambda device: 132)

    def splits(gpu, m, n, k):
        monkeypatch.setattr(page, "arch", lambda device: gpu)
        monkeypatch.setattr(page, "shared_limit", lambda device: SHARED_BYTES[gpu])
        w = SimpleNamespace(n=n, words=torch.empty(1, k // 128, 16, 4, 4, device="meta"), more=None, tile=128)
        return page.splits_of(m, w, page.launch_of(m, n, gpu), device)

    wanted = {
        (16, 4096, 4096): 8, (16, 28672, 4096): 1, (64, 4096, 4096): 4, (128, 4096, 4096): 4, (128, 1024, 4096): 4,
        (16, 4096, 512): 2, (16, 4096, 256): 1, (64, 1024, 4096): 8,
    }  # fmt: skip
    assert {at: splits(90, *at) for at in wanted} == wanted
    assert splits(80, 64, 1024, 4096) == splits(120, 128, 512, 4096) == 4, "what synchronous cores add up in registers"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_writing_out(compiled, kind):
    bits, group = kind
    dtype, gpu = [BF16, FP16][KINDS.index(kind) % 2], GPUS[KINDS.index(kind) % 6]
    w = weight(64, 2 * group, group, dtype, bits)
    c = compiled(gpu, awq_some_rows, "_write_out_kernel", lambda: awq_some_rows.write_out(w))
    assert c.count("STG.E.128") > 0, "rows are written 16 bytes a thread"

"""kernels.awq_small_batch on the CPU: x as operand in the interpreter, the product on tensors, and both compiled."""

from __future__ import annotations

import pytest
import torch

from kernels import awq_numbers, awq_operand, awq_small_batch
from kernels.awq_operand import operand
from kernels.awq_small_batch import NUMBERS, NUMBERS_FORM, takes
from kernels.launch import SHARED_BYTES
from tests.kernels import ptx_on_tensors
from tests.kernels.awq_weights import weight
from tests.kernels.gluon_on_tensors import load_on_tensors
from tests.kernels.test_awq_compiled import GPUS, Launch, inputs, loop
from tests.kernels.test_awq_numbers import AROUND, DTYPES, product, random_words

BF16, FP16 = torch.bfloat16, torch.float16


def test_a_word_gives_1024_plus_codes_or_16_codes():
    words = random_words(20_000)
    words[:3] = torch.tensor([0, -1, 0x75316420])
    got = ptx_on_tensors.run(NUMBERS.value, NUMBERS_FORM.value, [words])
    for i, out in enumerate(got):
        pair, half = divmod(i, 2)
        codes = (words >> (4 * pair + 16 * half)) & 15
        assert torch.equal(out.contiguous().view(FP16).float(), 1024 + codes.float() * (16 if pair % 2 else 1)), i


# --------------------------------------------------------------------------------------------- x


def columns_of(packed: torch.Tensor) -> torch.Tensor:
    """The operand in the order of x, as it is stored: [cols, tiles * 128]."""
    # tile, eight, word, column, thread, pair, side -> eight, column, tile, word, pair, thread, side
    return packed.permute(1, 3, 0, 2, 5, 4, 6).reshape(packed.shape[1] * 8, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("around", [{}, {"eps": 1e-5}, {"gamma": 1}, {"eps": 1e-6, "gamma": 1}], ids=str)
@pytest.mark.parametrize(("m", "k", "tiles", "cols"), [(1, 128, 8, 8), (3, 200, 4, 8), (16, 4736, 48, 16)])
def test_operand(m, k, tiles, cols, around, dtype):
    torch.manual_seed(m)
    x = (torch.randn(m, k + 8) * 10.0 ** (torch.arange(m) - m // 2)[:, None].clamp(-4, 4)).to(dtype)[:, 8:]
    gamma = torch.randn(k).to(dtype) if "gamma" in around else None
    packed, sums, factor = operand(x, tiles, cols, around.get("eps"), gamma)
    stored = columns_of(packed)[:m].double()
    odd = torch.arange(tiles * 128) % 16 >= 8
    q = stored * torch.where(odd, 16.0, 1.0)
    want = x.double() if gamma is None else x.double() * gamma.double()
    scale = torch.ones(m, 1).double()
    if "eps" in around:
        scale = (x.double().square().mean(1, keepdim=True) + around["eps"]).rsqrt()
    got = (q * factor[:m, None].double())[:, :k]
    largest = (want * scale).abs().amax(1, keepdim=True)
    # gamma may need more than fp16's 11 bits, and x times it is rounded to fp32 first
    assert (
        (got - want * scale).abs() <= (want * scale).abs() * (1e-6 if gamma is None else 2**-11) + largest * 2**-25
    ).all()
    assert (stored.abs().amax(1) < 2**15).all() and (q.abs().amax(1) >= 2**14).all()
    assert not q[:, k:].any(), "past k are zeros"
    assert torch.allclose(sums[:, 0, :m].double(), 1024 * stored.view(m, tiles, 128).sum(2).t(), rtol=0, atol=64)
    assert torch.allclose(sums[:, 1, :m].double(), q.view(m, tiles, 128).sum(2).t(), rtol=0, atol=1)


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, float("inf"), float("nan")])
def test_operand_of_extreme_rows(value):
    """A row of zeros or of numbers next to 0 stays finite; one that is not finite does not become so."""
    x = torch.full((2, 256), 1.0).bfloat16()
    x[0, 7] = value
    x[1] = value
    packed, _, factor = operand(x, 2, 8, None, None)
    odd = torch.arange(256) % 16 >= 8
    got = columns_of(packed)[:2].float() * torch.where(odd, 16.0, 1.0) * factor[:2, None]
    assert torch.equal(got.isfinite(), x.float().isfinite()) or not got[:, 7].isfinite().any()
    if torch.tensor(value).isfinite():
        assert (got - x.float()).abs().max() <= max(abs(value), 1.0) * 2**-20


# --------------------------------------------------------------------------------------------- the product


@pytest.fixture
def small_batch(monkeypatch):
    module = load_on_tensors(awq_small_batch, awq_numbers)
    monkeypatch.setattr(module, "operand", operand)
    return module.small_batch


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "settings"),
    [
        (2, 64, 128, 128, None),
        (3, 160, 1152, 1152, None),
        (8, 96, 3200, 128, (8, 2, 16, 3)),
        (5, 96, 4096, 256, (8, 2, 32, 2)),
        (9, 96, 2304, 128, (4, 3, 32, 2)),
        (16, 192, 2048, 2048, (16, 1, 16, 1)),
    ],
)
def test_small_batch(small_batch, m, n, k, group, settings, around):
    """In fp32, where the end rounds nothing: what is left is the rounding of x to fp16, of which bf16 has no need."""
    if settings and "gated" in around:
        settings = (*settings[:2], 32, settings[3])

    def run(x, w, **options):
        return small_batch(x, w, **options, settings=settings)

    torch.manual_seed(1)
    got, want = product(run, m, n, k, (4, group), torch.float32, around)
    assert (got - want).norm() / want.norm() <= 5e-4


def test_which_products_are_a_small_batch():
    x = torch.zeros(8, 256).half()
    assert takes(x, weight(24, 256, 256, FP16), False) and takes(x[:2], weight(64, 256, 128, FP16), True)
    assert not takes(x[:1], weight(64, 256, 128, FP16), False), "one row has a kernel of its own"
    assert not takes(torch.zeros(17, 256).half(), weight(64, 256, 128, FP16), False)
    assert not takes(x, weight(40, 256, 128, FP16), True), "gate and up share a block"
    x = torch.zeros(16, 8192).half()
    assert takes(x[:, :4096], weight(64, 4096, 128, FP16), False) and takes(x[:8], weight(64, 8192, 128, FP16), False)
    assert not takes(x, weight(64, 8192, 128, FP16), False), "there kernels.awq_some_rows is faster"
    x = x[:8, :256]
    assert not takes(x, weight(64, 256, 64, FP16), False) and not takes(x, weight(64, 256, 128, FP16, bits=3), False)


# --------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("m", "n", "k", "around"), [(8, 4096, 4096, ""), (2, 96, 14336, "r"), (8, 4096, 4096, "ngG"), (16, 4096, 4096, ""),
                                (16, 28672, 4096, ""), (9, 4096, 4096, "ngbrG")],
)  # fmt: skip
def test_small_batch_compiled(monkeypatch, m, n, k, around, gpu):
    dtype = BF16 if m % 2 else FP16
    launches = {}
    for module, name in ((awq_small_batch, "_small_batch_kernel"), (awq_operand, "_operand_kernel")):
        launches[name] = Launch(getattr(module, name), gpu)
        monkeypatch.setattr(module, name, launches[name])
        monkeypatch.setattr(module, "arch", lambda device: gpu)
    monkeypatch.setattr(awq_small_batch, "sm_count", lambda device: 132)
    awq_small_batch.small_batch(**inputs(m, n, k, dtype, around=around))
    for launch in launches.values():
        c = launch.compiled
        assert c.shared_bytes <= SHARED_BYTES[gpu], str(c)
    assert launches["_operand_kernel"].compiled.spills == 0
    c = launches["_small_batch_kernel"].compiled
    cols, tiles = 8 if m <= 8 else 16, loop(c).count("HMMA") // (8 * (1 if m <= 8 else 2))
    warps, per_sm = awq_small_batch.plan(cols, n, k, "G" in around)[:2]
    if gpu == 90:
        assert c.registers * 32 * warps * per_sm <= 65536, (
            f"{c.registers} registers: {per_sm} programs do not fit an SM"
        )
    assert loop(c).count("LDG", "128") >= 2 * tiles + 4 * cols // 8 * -(-k // 128 // warps), "pieces of 16 bytes"

"""Codes to numbers and x to digits: the W4 kernels' inline assembly and arithmetic, bit for bit, on the CPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from kernels import awq_bytes, awq_digits, awq_few_rows, awq_numbers, awq_one_row
from kernels.awq_linear import OP, repack
from kernels.awq_numbers import assembly, magic_of
from kernels.awq_packed import BITS
from tests.kernels import ptx_on_tensors
from tests.kernels.awq_weights import KINDS, parts, weight
from tests.kernels.gluon_on_tensors import Copies, load_on_tensors

DTYPES = [torch.bfloat16, torch.float16]


# --------------------------------------------------------------------------------------------- assembly


def random_words(*shape):
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_word_gives_magic_plus_each_code_pair_after_pair(bits, dtype):
    words, third = random_words(20_000), random_words(20_000)
    words[:4] = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
    code = 2 if bits == 3 else bits
    inputs = [words, third] if bits == 3 else [words]
    constraints = ",".join(["=h"] * (32 // code) + ["r"] * len(inputs))
    got = ptx_on_tensors.run(assembly(bits, dtype), constraints, inputs)
    magic = magic_of(bits, dtype)
    for i, out in enumerate(got):
        at = code * (i // 2) + 16 * (i % 2)
        want = (words >> at) & ((1 << code) - 1)
        if bits == 3:
            want = want | ((third >> (i // 8 * 8 + i // 2 % 4 + 16 * (i % 2))) & 1) << 2
        assert torch.equal(out.contiguous().view(dtype).float(), want.float() + magic), i
    assert torch.tensor(float(magic + 2**bits - 1)).to(dtype) == magic + 2**bits - 1, "the largest is exact"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_magic_and_zero_point_is_exact_in_16_bits(dtype):
    for bits in (2, 3, 4, 8):
        codes = torch.arange(1 << bits, dtype=torch.float32)
        numbers, zeros = (codes + magic_of(bits, dtype)).to(dtype)[:, None], (codes + magic_of(bits, dtype)).to(dtype)
        assert torch.equal((numbers - zeros).float(), codes[:, None] - codes)


BYTES = {
    2: (awq_bytes.BYTES_OF_2.value, awq_bytes.FORM_OF_2.value),
    3: (awq_bytes.BYTES_OF_3.value, awq_bytes.FORM_OF_3.value),
    4: (awq_bytes.BYTES.value, awq_bytes.FORM.value),
    8: (awq_bytes.BYTES_OF_8.value, awq_bytes.FORM_OF_8.value),
}


@pytest.mark.parametrize("bits", BITS)
def test_bytes_of_four_words(bits):
    code = 2 if bits == 3 else bits
    words, third = ([random_words(10_000) for _ in range(4)] for _ in range(2))
    got = ptx_on_tensors.run(*BYTES[bits], words + (third if bits == 3 else []))
    assert len(got) == 4 * (8 // code)
    for c, j in itertools.product(range(len(got)), range(4)):
        s, i = c // 4, c % 4
        want = (words[i] >> (8 * j + code * s)) & ((1 << code) - 1)
        if bits == 3:
            want = want | ((third[i] >> (8 * j + 4 * (i % 2) + s)) & 1) << 2
        byte = got[c].contiguous().view(torch.int8).view(-1, 4)[:, j]
        assert torch.equal(byte.int(), want - (128 if bits == 8 else 0))


def test_an_output_that_is_written_before_the_last_input_is_read_has_a_register_of_its_own():
    with pytest.raises(AssertionError, match="may be the same register"):
        ptx_on_tensors.run(BYTES[4][0], BYTES[4][1].replace("&", ""), [random_words(2)] * 4)


def test_planes_of_four_integers():
    """-2^23 to 2^23 in digits from -128 to 127, the integers of a word from its lowest byte up."""
    q = torch.randint(-(2**22), 2**22 + 1, (4, 10_000), dtype=torch.int32)
    q[0, :4] = torch.tensor([2**22, -(2**22), -32896, 32639])
    planes = ptx_on_tensors.run(awq_digits.PLANES.value, awq_digits.PLANES_FORM.value, list(q + 0x808080))
    digits = torch.stack(planes).view(torch.int8).view(3, -1, 4).long()
    assert torch.equal((digits * torch.tensor([1, 256, 65536])[:, None, None]).sum(0).t(), q.long())


# --------------------------------------------------------------------------------------------- digits


def digits_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """awq_one_row's arithmetic: x fp32 -> (unit, digits int64 [len(x), 3]), each from -128 to 127."""
    largest = x.abs().max().clamp(min=1e-30)
    per_unit = 4194304 / largest
    q = (x * per_unit + 12582912.0).view(torch.int32) - 0x4B400000
    q = (q + 0x808080) ^ 0x808080
    octets = q[:, None] >> torch.tensor([0, 8, 16, 24]) & 255
    assert not octets[:, 3].any(), "no digit is lost"
    digits = octets[:, :3].to(torch.uint8).view(torch.int8)
    return largest * (1.0 / 4194304), digits.long()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0, 1, 4])
def test_digits_hold_x_to_a_unit(spread, dtype):
    x = torch.randn(200_000) * 10 ** (torch.rand(200_000) - 0.5).mul(spread)
    x = x.to(dtype).float()
    unit, digits = digits_of(x)
    got = unit.double() * (digits * torch.tensor([1, 256, 65536])).sum(1)
    error = (got - x.double()).abs().max() / x.abs().max()
    assert error <= 2**-22, "half a unit for rounding, and less for the division and product in fp32"
    assert error >= 2**-25, "the bound is tight to a few bits"


def test_digits_at_the_ends():
    top = 4194304
    q = torch.tensor([top, -top, 0, 1, -1, 127, 128, -128, -129, 32767, 32768, -32768, -32769, top - 1, top - 32896])
    unit, digits = digits_of(q / top)
    assert unit == 2**-22 and torch.equal((digits * torch.tensor([1, 256, 65536])).sum(1), q)
    assert digits[-1].tolist() == [-128, -128, 64], "the most negative digits there are beside a sum of one sign"
    assert not digits_of(torch.zeros(5))[1].any()


def test_sums_of_a_tile_stay_beside_the_counter():
    """128 codes up to 15 times digits down to -128, and zero points times the sums of digits, both below 2^18."""
    worst = 128 * 15 * 128
    assert worst < 2**18
    for s in (-worst, -1, 0, 1, worst):
        counted = torch.tensor(0x4B400000 + s, dtype=torch.int32).view(torch.float32)
        assert counted == 12582912 + s, "an integer added to the bits is added to the number"
        for z in (-worst, worst):
            assert counted - (torch.tensor(float(z)) + 12582912.0) == s - z, "nor is anything rounded from there"
    far = 2**22 + 1
    assert torch.tensor(0x4B400000 + far, dtype=torch.int32).view(torch.float32) != 12582912 + far, "but not for ever"


# --------------------------------------------------------------------------------------------- the kernels on tensors

AROUND = [{}, {"eps": 1e-5}, {"eps": 1e-5, "gamma": 1}, {"bias": 1, "residual": 1}, {"gated": True},
          {"eps": 1e-5, "gamma": 1, "bias": 1, "residual": 1, "gated": True}]  # fmt: skip


def product(run, m, n, k, kind, dtype, around):
    """(what the kernel writes, its definition in fp64); x is a part of wider rows."""
    x, w = torch.randn(m, k + 24)[:, 8 : 8 + k].to(dtype), weight(n, k, kind[1], dtype, kind[0])
    columns = n // 2 if around.get("gated") else n
    shapes = {"bias": (n,), "gamma": (k,), "residual": (m, columns)}
    options = {name: torch.randn(shapes[name]).to(dtype) if name in shapes else v for name, v in around.items()}
    x = x.as_strided(x.shape, x.stride())
    out = torch.full((m, columns), float("nan"), dtype=dtype)
    given = {"bias": None, "residual": None, "eps": None, "gamma": None, "gated": False} | options
    assert run(x, w, **given, out=out) is out
    exact = {name: t.double() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    return out.double(), OP.reference(x.double(), w, **exact)


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(32, 128, 128), (96, 1024, 256), (64, 3200, 128), (32, 6144, 128), (160, 8192, 8192), (64, 9216, 384)],
)
def test_one_row_is_exact_to_the_digits(n, k, group, bits, around):
    """In fp32, where nothing is rounded at the end: 1 to 5 tiles a warp."""
    one_row = load_on_tensors(awq_one_row, awq_bytes, awq_digits, awq_numbers)
    got, want = product(one_row.one_row, 1, n, k, (bits, group), torch.float32, around)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)


def test_the_largest_sums_are_exact():
    """Codes 15 and the most negative digits: 128 columns sum to -243 840, and only the scaling rounds."""
    one_row = load_on_tensors(awq_one_row, awq_bytes, awq_digits, awq_numbers)
    q = torch.full((1, 256), 4194304 - 32896)
    q[0, 7] = 4194304
    x, out = q / 4194304, torch.empty(1, 64)
    for zero in (0, 15):
        w = repack(torch.full((64, 256), 15, dtype=torch.uint8), torch.ones(64, 2),
                   torch.full((64, 2), zero, dtype=torch.uint8), 4, torch.float32)  # fmt: skip
        one_row.one_row(x, w, None, None, None, None, False, out)
        want = (15 - zero) * q.sum().double() / 4194304
        assert (out - want).abs().max() <= want * 2**-22


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize(
    ("m", "steps", "kind"),
    [(1, 1, (4, 128)), (8, 2, (3, 128)), (3, 4, (2, 64)), (1, 5, (8, 32)), (8, 5, (4, 32)), (2, 3, (8, 128))],
)
def test_few_rows(m, steps, kind, around):
    few_rows = load_on_tensors(awq_few_rows, awq_numbers)
    dtype = DTYPES[(m + steps) % 2]
    k = (8 * steps - 3) * kind[1]  # some warps have no last tile
    got, want = product(few_rows.few_rows, m, 160, k, kind, dtype, around)
    assert (got - want).norm() / want.norm() < (6e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("kind", [*KINDS, (4, 72), (4, 96)], ids=str)
def test_few_rows_of_every_weight(kind):
    few_rows = load_on_tensors(awq_few_rows, awq_numbers)
    k = 72 if kind[1] == 72 else 1152
    got, want = product(few_rows.few_rows, 5, 56, k, kind, torch.float16, {"eps": 1e-5})
    assert (got - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("wait_group(STAGES - 2)", "wait_group(STAGES - 1)"),
        ("number + STAGES - 1", "number + STAGES"),
        ("first = number % STEPS * WARPS", "first = number % STEPS"),
        ("turn // (1 + GATED)", "turn"),
        ("(warp + first) // GROUP * 16", "(warp + first) * 16"),
        ("live = inside & (deep + first < tiles)", "live = inside"),
        ("                    number += 1", "                    number += 2"),
    ],
)
def test_a_flaw_in_the_ring_is_seen(right, wrong):
    """In gated products of 5 steps a block, so that the ring of 8 goes around in the midst of them.

    The last step is not full, and words end with the last row: what is read too far lies outside.
    """
    with open(awq_few_rows.__file__) as source:
        assert right in source.read()

    def seen() -> bool:
        flawed = load_on_tensors(awq_few_rows, awq_numbers, edit=lambda s: s.replace(right, wrong) if right else s)
        try:
            got, want = product(flawed.few_rows, 3, 256, 38 * 128, (4, 256), torch.float16, {"gated": True})
        except AssertionError as error:
            assert re.search("outside its tensor", str(error))
            return True
        return not (got - want).norm() / want.norm() < 1e-3

    assert any(seen() for _ in range(3)) == (right != wrong)


def test_the_first_steps_are_all_asked_for_before_x_is_waited_for(monkeypatch):
    few_rows = load_on_tensors(awq_few_rows, awq_numbers)
    asked = []
    few_rows.gdc_wait = lambda: asked.append(len(few_rows.async_copy.groups))
    assert isinstance(few_rows.async_copy, Copies)
    product(few_rows.few_rows, 1, 48, 1024, (4, 128), torch.float16, {})
    assert asked == [7] * 3, "of every program"


def test_parts_are_random_enough():
    codes, scales, zeros = parts(64, 256, 128, 3)
    assert codes.unique().tolist() == zeros.unique().tolist() == list(range(8)) and len(scales.unique()) > 50

"""awq_linear beyond the operator test: how weights lie in memory, what is refused, what runs without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import skinny_gemm
from kernels.awq_linear import OP, awq_linear, awq_linear_triton
from kernels.awq_packed import BITS, PackedWeight, repack, tile_of
from kernels.awq_some_rows import write_out
from kernels.op import Cost
from tests.kernels.awq_weights import KINDS, parts, weight

# --------------------------------------------------------------------------------------------- layout


def words_of(codes: dict[int, int], bits: int, group: int = 128) -> PackedWeight:
    """A row of 256 codes that are zero but for those in ``codes``, by column."""
    row = torch.zeros(1, 256, dtype=torch.uint8)
    for column, code in codes.items():
        row[0, column] = code
    return repack(row, torch.ones(1, 256 // group), None, bits, torch.float16)


def test_a_word_of_4_bits_spelled_out():
    """Thread 1's first word holds columns 2, 3, 10, 11, 18, 19, 26, 27: even ones from bit 0, odd ones from bit 16."""
    w = words_of({2: 0x1, 10: 0x2, 18: 0x3, 26: 0x4, 3: 0x5, 11: 0x6, 19: 0x7, 27: 0x8}, 4)
    assert w.words.shape == (8, 2, 16, 4, 4), "128 / 16 blocks of rows, tiles, rows, threads, words"
    assert w.words[0, 0, 0, 1, 0].item() & 0xFFFFFFFF == 0x8765_4321
    assert w.words.count_nonzero() == 1
    # The next word begins 32 columns on, the next tile 128 columns on.
    w = words_of({32 + 2: 0x9, 128 + 3 * 32 + 6: 0xA, 128 + 3 * 32 + 7: 0xB}, 4)
    assert w.words[0, 0, 0, 1, 1] == 0x9 and w.words[0, 1, 0, 3, 3] == 0xB_000A and w.words.count_nonzero() == 2


def test_words_of_8_2_and_3_bits_spelled_out():
    w = words_of({0: 0x12, 8: 0x34, 1: 0x56, 9: 0x78, 16: 0x9A}, 8)
    assert w.words.shape[-1] == 8 and w.words[0, 0, 0, 0, 0] == 0x7856_3412 and w.words[0, 0, 0, 0, 1] == 0x9A
    w = words_of({2: 1, 10: 2, 58: 3, 3: 2, 59: 1, 66: 3}, 2)  # 64 columns a word, 14 bits from column 2 to 58
    assert w.words.shape[-1] == 2 and w.words[0, 0, 0, 1, 0] == 0x4002_C009 and w.words[0, 0, 0, 1, 1] == 3
    w = words_of({2: 0b101, 3: 0b110, 66: 0b100}, 3)  # the lower two bits, and in words of their own the third
    assert w.words[0, 0, 0, 1, 0] == 0x0002_0001 and w.words[0, 0, 0, 1, 1] == 0
    assert w.more.shape[-1] == 1 and w.more[0, 0, 0, 1, 0] == 0x0001_0011


def test_a_scale_spelled_out():
    codes = torch.zeros(17, 256, dtype=torch.uint8)
    scales, zeros = torch.full((17, 2), 2.0), torch.zeros(17, 2, dtype=torch.uint8)
    scales[16, 1], zeros[16, 1] = 1.0, 9
    w = repack(codes, scales, zeros, 4, torch.bfloat16)
    assert w.scales.shape == (8, 2, 16)
    assert w.scales[1, 1, 0] == 0x4110_3C00, "9.0 as bf16, 1.0 as fp16: row 16 is the second block's first"
    assert w.scales[0, 0, 0] == 0x0000_4000 and not w.scales[1, :, 1:].any(), "rows past the last have scale 0"


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("n", [1, 16, 70])
@pytest.mark.parametrize(("bits", "group", "k"), [
    *((bits, group, 768) for bits in BITS for group in (32, 64, 96, 128, 256, 768)),
    *((bits, k, k) for bits in BITS for k in (1, 72, 200)),
])  # fmt: skip
def test_packing_gives_back_codes_scales_and_zero_points(bits, group, k, n, symmetric):
    codes, scales, zeros = parts(n, k, group, bits)
    w = repack(codes, scales, None if symmetric else zeros, bits, torch.float16)
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    spread = lambda t: t.float().repeat_interleave(group, 1)  # noqa: E731
    assert torch.equal(w.dequantise(), (codes.float() - spread(zeros)) * spread(scales))
    ones = repack(codes, torch.ones_like(scales), torch.zeros_like(zeros), bits, torch.float16)
    assert torch.equal(ones.dequantise(), codes.float())
    assert torch.equal(w.dequantise(torch.bfloat16), w.dequantise().bfloat16())

    # The same from the page's description, a code at a time.
    tile, stored = w.tile, 2 if w.more is not None else w.stored_bits
    r, c = torch.arange(n)[:, None], torch.arange(k)[None, :]
    pairs = 16 // stored

    def field(words, pairs, width):
        at = c % tile
        word = words[r // 16, c // tile, r % 16, at // 2 % 4, at // (8 * pairs)]
        return (word >> (at // 8 % pairs * width + 16 * (at % 2))) & ((1 << width) - 1)

    got = field(w.words, pairs, stored)
    if w.more is not None:
        at = c % tile
        third = w.more[r // 16, c // tile, r % 16, at // 2 % 4, 0]
        got = got | ((third >> (at // 32 % 2 * 8 + at // 64 * 4 + at // 8 % 4 + 16 * (at % 2))) & 1) << 2
    assert torch.equal(got, codes.int())
    assert (w.shape, w.n, w.k, w.bits, w.group, w.device.type) == ((n, k), n, k, bits, group, "cpu")


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_nothing_lies_past_the_last_row_and_bytes_are_counted(bits, group):
    w = weight(40, 512, group, torch.float16, bits)
    for t in (w.words, w.more, w.scales):
        assert t is None or not t.movedim(2 if t.dim() == 5 else -1, 1).flatten(0, 1)[40:].any()
    assert len(w.words) * 16 % 128 == 0, "no tile of a kernel ends beyond the words"
    stored = {(3, 64): 4, (2, 64): 2}.get((bits, group), bits)
    assert w.stored_bits == stored and w.nbytes == 128 * 512 * stored // 8 + 128 * 512 // group * 4


def test_tiles_and_cost():
    assert [tile_of(768, group) for group in (32, 64, 96, 128, 192, 256, 384, 768)] == [
        32,
        64,
        32,
        128,
        64,
        128,
        128,
        128,
    ]
    assert tile_of(72, 72) == tile_of(1, 1) == 32
    w, x = weight(32, 256, 128, torch.float16), torch.zeros(3, 256).half()
    stored = 32 * 256 // 2 + 32 * 2 * 20 // 8
    assert OP.cost(x, w) == Cost(bytes=stored + 2 * 3 * (256 + 32), flops=2 * 3 * 32 * 256)
    residual = torch.zeros(3, 16).half()
    assert OP.cost(x, w, residual=residual, gated=True).bytes == stored + 2 * 3 * (256 + 16 + 16)


# --------------------------------------------------------------------------------------------- refusals

CODES, SCALES = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "bits", "dtype", "message"),
    [
        (CODES, SCALES, None, 5, torch.float16, r"codes of \(2, 3, 4, 8\) bits .* got 5 and torch\.float16"),
        (CODES, SCALES, None, 4, torch.float64, r"got 4 and torch\.float64"),
        (CODES[0], SCALES, None, 4, torch.float16, r"codes \[n, k\], scales \[n, k / group\]; got \[64\], \[4, 2\]"),
        (CODES, SCALES[:3], None, 4, torch.float16, r"got \[4, 64\], \[3, 2\]"),
        (CODES[:, :0], SCALES, None, 4, torch.float16, r"got \[4, 0\], \[4, 2\]"),
        (CODES, torch.ones(4, 3), None, 4, torch.float16, "3 groups do not divide 64 columns"),
        (CODES, SCALES, CODES[:, :1], 4, torch.float16, r"or zeros \[4, 1\] differ from scales"),
        (CODES + 16, SCALES, None, 4, torch.float16, r"codes must be uint8 below 16, got torch\.uint8 up to 16"),
        (CODES.int(), SCALES, None, 4, torch.float16, r"codes must be uint8 below 16, got torch\.int32"),
        (CODES, SCALES, CODES[:, :2] + 4, 2, torch.float16, "zeros must be uint8 below 4, got torch.uint8 up to 4"),
        (CODES, SCALES * 7e4, None, 4, torch.float16, "scales must be finite in float16"),
        (CODES, SCALES * float("nan"), None, 4, torch.float16, "scales must be finite in float16"),
        (CODES, torch.ones(4, 4), None, 4, torch.float16, r"multiples of 32 \(or a whole row\), got 16 for rows of 64"),
        (torch.zeros(4, 96, dtype=torch.uint8), SCALES, None, 4, torch.float16, "got 48 for rows of 96"),
    ],
)  # fmt: skip
def test_weights_that_are_refused(codes, scales, zeros, bits, dtype, message):
    with pytest.raises(ValueError, match=f"^awq_linear: .*{message}"):
        repack(codes, scales, zeros, bits, dtype)


X, W = torch.zeros(2, 64).half(), weight(6, 64, 32, torch.float16)


@pytest.mark.parametrize("product", [awq_linear, awq_linear_triton])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[0], r"x must be \[m, 64\] for a weight \[6, 64\], got \[64\]"),
        (X[:, :32], r"x must be \[m, 64\] for a weight \[6, 64\], got \[2, 32\]"),
        (X.bfloat16(), r"x must be torch\.float16 on cpu as the weight is, got torch\.bfloat16 on cpu"),
        (X.to("meta"), r"x must be torch\.float16 on cpu as the weight is, got torch\.float16 on meta"),
        (torch.zeros(64, 2).half().t(), r"x's columns must be contiguous \(stride 1\), got stride 2"),
    ],
)
def test_rows_that_are_refused(product, x, message):
    with pytest.raises(ValueError, match=f"^awq_linear: {message}"):
        product(x, W)


@pytest.mark.parametrize("product", [awq_linear, awq_linear_triton])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(3).half()}, r"bias must be contiguous torch\.float16 \[6\] on cpu, got .* \[3\]"),
        ({"bias": torch.zeros(6)}, r"bias must be contiguous torch\.float16 \[6\] on cpu, got torch\.float32 \[6\]"),
        ({"residual": torch.zeros(2, 6).half(), "gated": True}, r"residual must be contiguous .* \[2, 3\]"),
        ({"residual": torch.zeros(6, 2).half().t()}, r"residual must .* \[2, 6\] with strides \(1, 2\)"),
        ({"gamma": torch.zeros(1, 64).half()}, r"gamma must be contiguous torch\.float16 \[64\] .* got .* \[1, 64\]"),
        ({"out": torch.zeros(2, 6).half().to("meta")}, r"out must be contiguous .* on cpu, got .* on meta"),
    ],
)
def test_other_arguments_that_are_refused(product, options, message):
    with pytest.raises(ValueError, match=f"^awq_linear: {message}"):
        product(X, W, **options)


@pytest.mark.parametrize("product", [awq_linear, awq_linear_triton])
def test_a_gated_weight_has_an_even_number_of_rows(product):
    with pytest.raises(ValueError, match="^awq_linear: a gated weight holds gate and up, .* even .*; got 5"):
        product(X, weight(5, 64, 32, torch.float16), gated=True)


def test_float32_is_for_cpus():
    x, w = torch.randn(2, 64), weight(6, 64, 32, torch.float32)
    torch.testing.assert_close(awq_linear(x, w), x @ w.dequantise().t())
    with FakeTensorMode(), pytest.raises(ValueError, match="on a GPU x must be float16 or bfloat16, got .*32"):
        words, scales = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (w.words, w.scales))
        on_gpu = dataclasses.replace(w, words=words, scales=scales)
        awq_linear_triton(torch.empty(2, 64, device="cuda"), on_gpu)


# --------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
@pytest.mark.parametrize(("bits", "group"), [*KINDS, (4, 96), (4, 72)])
def test_what_is_written_out_is_what_codes_stand_for(bits, group):
    w = weight(40, 72 if group == 72 else 384, group, torch.float16, bits)
    assert torch.equal(write_out(w), w.dequantise(torch.float16))
    out = torch.empty_like(w.dequantise(torch.float16))
    assert write_out(w, out) is out and torch.equal(out, w.dequantise(torch.float16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter; on a GPU other kernels run")
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_every_split_gives_the_same_and_leaves_the_counters_at_zero(splits):
    x, w, bias = torch.randn(20, 1000).half(), weight(72, 1000, 1000, torch.float16), torch.randn(72).half()
    got = awq_linear_triton(x, w, bias=bias, splits=splits)
    torch.testing.assert_close(got, OP.reference(x, w, bias=bias), rtol=2e-3, atol=2e-3)
    assert all(not counters.any() for counters in skinny_gemm._arrived.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter; on a GPU other kernels run")
@pytest.mark.parametrize(
    "given", [("gamma",), ("eps", "gamma"), ("eps", "residual"), ("eps", "gamma", "residual", "bias")]
)
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_not_fused_is_done_by_other_kernels(given, gated):
    x, w = torch.randn(3, 128).half(), weight(24, 128, 128, torch.float16)
    options = {"gamma": torch.randn(128), "residual": torch.randn(3, 12 if gated else 24), "bias": torch.randn(24)}
    options = {name: t.half() for name, t in options.items() if name in given}
    options |= {"eps": 1e-5} if "eps" in given else {}
    want = OP.reference(x, w, gated=gated, **options)
    out = options.get("residual", torch.empty_like(want))  # the output may be the residual
    assert awq_linear_triton(x, w, gated=gated, out=out, **options) is out
    torch.testing.assert_close(out, want, rtol=4e-3, atol=4e-3)


def test_no_rows_give_no_rows():
    assert awq_linear_triton(X[:0], W).shape == awq_linear(X[:0], W).shape == (0, 6)

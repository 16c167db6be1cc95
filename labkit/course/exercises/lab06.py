"""Lab 06: bytes of a step, a group's grid, the search for a scale, and eight codes in a word."""

from __future__ import annotations

import torch

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab06 as answers

# --- 06.1


def _step(name, products, head, bits, group) -> Trial:
    return Trial(name, lambda: dict(products=products, head=head, bits=bits, group=group))


def _bytes(rule):
    """The answer by another rule: rule(products, head, bits, group) -> bytes."""

    def fits(i, got, want):
        guess = rule(**i)
        return abs(got - guess) <= 1e-6 * abs(guess)

    return fits


# --- 06.2


def _group(name, bits, make) -> Trial:
    def inputs():
        random = torch.Generator().manual_seed(bits)
        return {"w": make(lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)), "bits": bits}

    return Trial(name, inputs)


def _rounded(
    w,
    bits,
    steps=None,
    zero_inside=True,
    together=False,
    whole=True,
    near=torch.round,
    clamp=True,
    ones=True,
    from_low=False,
):
    """(codes, scale, zero) by the answer's rule, or with one part of it replaced."""
    top, dims = 2**bits - 1, (0, 1) if together else (1,)
    low, high = w.amin(dims, keepdim=True), w.amax(dims, keepdim=True)
    if zero_inside:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / (top if steps is None else steps)).expand(len(w), 1)
    if ones:
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale).round() if whole else -low / scale
    zero = zero.clamp(0, top) if clamp else zero
    codes = near(w / scale) + zero if whole else near(w / scale + zero)
    codes = near((w - low) / scale) if from_low else codes
    return codes.clamp(0, top) if clamp else codes, scale, zero


def _with(**rule):
    def fits(i, got, want):
        guess = _rounded(**i, **rule)
        return all(
            g.shape == e.shape and torch.allclose(g.double(), e, 1e-9, 1e-12) for g, e in zip(got, guess, strict=True)
        )

    return fits


def _other_scale_of_zeros(i, got, want):
    """All is right but the scale of groups of zeros, which is another number than 1."""
    zeros = (i["w"] == 0).all(1)
    same = [torch.allclose(g.double(), e, 1e-6, 1e-12) for g, e in zip(got[::2], want[::2], strict=True)]
    return (
        all(same)
        and bool(zeros.any())
        and torch.allclose(got[1][~zeros].double(), want[1][~zeros], 1e-6, 1e-12)
        and bool((got[1][zeros].isfinite() & (got[1][zeros] != 1)).all())
    )


def _not_finite(i, got, want):
    return any(not bool(torch.isfinite(part).all()) for part in got)


# --- 06.3


def _round_to(bits, group):
    """A rounding for the search: w [out, in] -> w as it comes back."""

    def rounding(w):
        codes, scale, zero = _rounded(w.reshape(-1, group), bits)
        return ((codes - zero) * scale).view_as(w)

    return rounding


def _layer(name, seed, bits=3, group=16, loud=(3,), outputs=24, inputs=32, tokens=40, shift=0.0) -> Trial:
    """Random weights, and inputs of which the channels ``loud`` are 30 to 60 times as large as the others. shift: added
    to all inputs; with one, the mean of x is positive in each channel, and smaller than that of |x|."""

    def make():
        random = torch.Generator().manual_seed(seed)
        w = torch.randn(outputs, inputs, generator=random, dtype=torch.float64)
        x = torch.randn(tokens, inputs, generator=random, dtype=torch.float64)
        x = (x + shift) * (0.2 + torch.rand(inputs, generator=random, dtype=torch.float64))
        for n, channel in enumerate(loud):
            x[:, channel] *= 30 * (n + 1)
        return {"w": w, "x": x, "rounding": _round_to(bits, group)}

    return Trial(name, make)


def _on_the_grid(name) -> Trial:
    """Weights that rounding to 3 bits leaves as they are, so that r = 0 has no error at all."""

    def make():
        random = torch.Generator().manual_seed(0)
        w = torch.randint(-3, 5, (24, 32), generator=random).double()
        w[:, ::16], w[:, 1::16] = -3, 4  # the ends of each group's grid: its step is 1
        x = torch.randn(40, 32, generator=random, dtype=torch.float64)
        return {"w": w, "x": x * torch.linspace(0.1, 3, 32, dtype=torch.float64), "rounding": _round_to(3, 16)}

    return Trial(name, make)


def _small_where_loud(name, seed=5) -> Trial:
    """Weights that are small where the inputs are large. With this seed r = 19/20 has the least error of the twenty,
    and r = 1 would have an eighth less."""

    def make():
        random = torch.Generator().manual_seed(seed)
        w = torch.randn(24, 32, generator=random, dtype=torch.float64)
        x = torch.randn(40, 32, generator=random, dtype=torch.float64)
        x *= torch.linspace(0.1, 3, 32, dtype=torch.float64)
        return {"w": w / x.abs().mean(0) ** 1.5, "x": x, "rounding": _round_to(3, 16)}

    return Trial(name, make)


TWENTY = tuple(i / 20 for i in range(20))


def _searched(w, x, rounding, of=None, level=True, back=True, by_weights=False, inside=False, exponents=TWENTY):
    """The answer with one part replaced: what the powers are taken of, levelling, division, the error looked at, the
    mean before the power, the exponents."""
    mean = x.abs().mean(0) if of is None else of(x, w)
    wanted, best = x @ w.t(), None
    for r in exponents:
        scale = (x.abs() ** r).mean(0) if inside else mean**r
        scale = scale / (scale.max() * scale.min()).sqrt() if level else scale
        changed = rounding(w * scale) / scale if back else rounding(w * scale)
        loss = ((changed - w) if by_weights else x @ changed.t() - wanted).square().mean()
        if best is None or loss < best[0]:
            best = loss, scale, r
    return best


def _found(**rule):
    return lambda i, got, want: torch.allclose(got.double(), _searched(**i, **rule)[1], 1e-9, 1e-12)


def _other_exponents(i, got, want):
    """The ends moved by one or two, or twenty steps from 0 to 1."""
    ranges = [range(first, last) for first in (0, 1, 2) for last in (18, 19, 20, 21)]
    tried = [[n / 20 for n in numbers] for numbers in ranges] + [[n / 19 for n in range(20)]]
    return any(_found(exponents=exponents)(i, got, want) for exponents in tried)


def _other_level(i, got, want):
    """The right scale, but for a factor that all channels share."""
    factor = got.double() / want
    return torch.allclose(factor, factor[0].expand_as(factor), 1e-9, 0.0)


def _is_ratio(i, got, want):
    return not isinstance(got, torch.Tensor) and abs(got - _searched(**i)[2]) < 1e-9


# --- 06.4


def _codes(name, rows, columns, seed=0, codes=None) -> Trial:
    def make():
        if codes is not None:
            return {"codes": torch.tensor(codes, dtype=torch.uint8)}
        random = torch.Generator().manual_seed(seed)
        return {"codes": torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)}

    return Trial(name, make)


def _words(codes, order=answers.ORDER, from_top=False):
    """int64 words: nibble i holds column order[i], counted from the lowest bits or from the highest."""
    eights = codes.long().unflatten(1, (-1, 8))[..., list(order)]
    shifts = 4 * torch.arange(8)
    return (eights << (shifts.flip(0) if from_top else shifts)).sum(-1)


def _packed(**rule):
    """Other words, as int32 or not: compared modulo 2^32."""
    return lambda i, got, want: torch.equal(got.long() % 2**32, _words(i["codes"], **rule))


_INVERSE = tuple(answers.ORDER.index(column) for column in range(8))


def _across(i, got, want):
    rows, columns = i["codes"].shape
    return got.shape == (rows // 8, columns) and got.shape != want.shape


def _narrow(i, got, want):
    eights = i["codes"].unflatten(1, (-1, 8))[..., list(answers.ORDER)]
    shifts = (4 * torch.arange(8)).to(torch.uint8)
    return torch.equal(got.long(), torch.where(shifts < 8, eights << shifts.clamp(max=7), 0).long().sum(-1))


EXERCISES = (
    Exercise(
        "06.1",
        "The bytes of a step",
        answers.weight_bytes,
        trials=(
            _step("Llama-3-8B, 4 bits in groups of 128", 6_979_321_856, 525_336_576, 4, 128),
            _step("the same in groups of 64", 6_979_321_856, 525_336_576, 4, 64),
            _step("3 bits", 6_979_321_856, 525_336_576, 3, 128),
            _step("8 bits", 6_979_321_856, 525_336_576, 8, 128),
            _step("SmolLM2, 2 bits in groups of 64", 106_168_320, 28_311_552, 2, 64),
            _step("without a head", 106_168_320, 0, 4, 32),
        ),
        hints=(
            Hint(
                "those are bits: a byte has 8.",
                _bytes(lambda products, head, bits, group: products * (bits + (16 + bits) / group) + 16 * head),
            ),
            Hint(
                "the codes are in bits, and the head in bytes: divide the codes by 8.",
                _bytes(lambda products, head, bits, group: products * (bits + (16 + bits) / group) + 2 * head),
            ),
            Hint(
                "the head is not quantised: 2 bytes each.",
                _bytes(lambda products, head, bits, group: (products + head) * (bits + (16 + bits) / group) / 8),
            ),
            Hint(
                "the head is read in every step, too.",
                _bytes(lambda products, head, bits, group: products * (bits + (16 + bits) / group) / 8),
            ),
            Hint(
                "each group has a scale and a zero point beside its codes.",
                _bytes(lambda products, head, bits, group: products * bits / 8 + 2 * head),
            ),
            Hint(
                "each group has a zero point, too, of `bits` bits.",
                _bytes(lambda products, head, bits, group: products * (bits + 16 / group) / 8 + 2 * head),
            ),
            Hint(
                "a scale and a zero point serve a whole group: divide by its size.",
                _bytes(lambda products, head, bits, group: products * (bits + 16 + bits) / 8 + 2 * head),
            ),
            Hint(
                "only the scale has 16 bits; a zero point is a code, as the weights are.",
                _bytes(lambda products, head, bits, group: products * (bits + (16 + 16) / group) / 8 + 2 * head),
            ),
            Hint(
                "a zero point does not always have 4 bits: look at `bits`.",
                _bytes(lambda products, head, bits, group: products * (bits + (16 + 4) / group) / 8 + 2 * head),
            ),
        ),
    ),
    Exercise(
        "06.2",
        "A group on its grid",
        answers.quantise_groups,
        trials=(
            _group("4 bits, two groups around 0", 4, lambda randn: randn(2, 16)),
            _group("3 bits, groups of other sizes of values", 3, lambda randn: randn(3, 8) * randn(3, 1).exp()),
            _group("values from 3 to 5", 4, lambda randn: 3 + 2 * torch.sigmoid(randn(2, 16))),
            _group("values from -5 to -3", 4, lambda randn: -3 - 2 * torch.sigmoid(randn(2, 16))),
            _group("a constant group", 4, lambda randn: torch.full((1, 8), 0.25, dtype=torch.float64)),
            _group("both ends half a step off", 4, lambda randn: torch.tensor([[-5.5, 1.0, 3.0, 9.5]]).double()),
            _group("a group of zeros", 4, lambda randn: torch.stack([torch.zeros(8).double(), randn(8)])),
        ),
        hints=(
            Hint("rounding can lead one code past the end: clamp to 0 ... 2^bits - 1.", _with(clamp=False)),
            Hint(
                "`bits` bits count from 0 to 2^bits - 1: that is one step less than codes.",
                lambda i, got, want: (
                    _with(steps=2 ** i["bits"])(i, got, want) or _with(steps=2 ** i["bits"], clamp=False)(i, got, want)
                ),
            ),
            Hint(
                "a group on one side of 0: let its grid reach 0, or its zero point falls outside the codes.",
                lambda i, got, want: (
                    _with(zero_inside=False)(i, got, want) or _with(zero_inside=False, clamp=False)(i, got, want)
                ),
            ),
            Hint("each row is a group, with a scale of its own.", _with(together=True)),
            Hint("the zero point is stored as a code: make it a whole number.", _with(whole=False)),
            Hint(
                "take the nearest code, with round().",
                lambda i, got, want: _with(near=torch.floor)(i, got, want) or _with(near=torch.trunc)(i, got, want),
            ),
            Hint(
                "you rounded against low, but the grid begins at -zero * scale, with the rounded zero point.",
                lambda i, got, want: (
                    _with(from_low=True)(i, got, want) or _with(from_low=True, zero_inside=False)(i, got, want)
                ),
            ),
            Hint("a group of zeros has scale 1, and not the least scale that you allow.", _other_scale_of_zeros),
            Hint("a group of zeros spans nothing: dividing by its scale gives NaN. Take scale 1.", _not_finite),
        ),
    ),
    Exercise(
        "06.3",
        "The search for a scale",
        answers.best_scale,
        trials=(
            _layer("inputs that are mostly positive", 29, shift=0.6),
            _layer("one loud channel", 1),
            _layer("two of them, 4 bits", 2, bits=4, loud=(3, 20)),
            _layer("groups of 8", 3, group=8, loud=(9,)),
            _layer("no loud channel", 4, loud=()),
            _on_the_grid("weights that lie on the grid"),
            _small_where_loud("small weights where inputs are large"),
        ),
        tolerance=1e-9,
        hints=(
            Hint("return the scale, one value for each channel, and not the exponent.", _is_ratio, form=True),
            Hint("take the mean of |x|, not of x: signs cancel.", _found(of=lambda x, w: x.mean(0))),
            Hint("take the mean of |x|, not its largest value.", _found(of=lambda x, w: x.abs().amax(0))),
            Hint("what counts is how large the inputs are, not the weights.", _found(of=lambda x, w: w.abs().mean(0))),
            Hint(
                "first the mean of |x| over the tokens, then the power: the other way round is another number.",
                _found(inside=True),
            ),
            Hint(
                "divide by the root of largest times smallest.",
                lambda i, got, want: _found(level=False)(i, got, want) or _other_level(i, got, want),
            ),
            Hint("divide the rounded weights by the scale again before you compare.", _found(back=False)),
            Hint("what counts is the error of x @ w.T, not of w.", _found(by_weights=True)),
            Hint("look at the ends of your search: the exponents are 0, 1/20, ... 19/20.", _other_exponents),
        ),
    ),
    Exercise(
        "06.4",
        "Eight codes in a word",
        answers.pack,
        trials=(
            _codes("columns 0 to 7 hold 0 to 7", 1, 8, codes=[list(range(8))]),
            _codes("two words a row", 3, 16, seed=1),
            _codes("a word above 2^31", 1, 8, codes=[[15] * 8]),
            _codes("16 rows, 24 columns", 16, 24, seed=2),
        ),
        tolerance=0.0,
        hints=(
            Hint("that is the natural order; nibble i holds column ORDER[i].", _packed(order=range(8))),
            Hint(
                "the other way round: nibble i holds column ORDER[i], not nibble ORDER[i] column i.",
                _packed(order=_INVERSE),
            ),
            Hint("nibble 0 is the lowest: bits 0 to 3.", _packed(from_top=True)),
            Hint("AWQ packs along a row: eight neighbouring columns share a word.", _across),
            Hint("uint8 has eight bits: widen the codes before you shift them.", _narrow),
            Hint("a word is an int32: what reaches 2^31 is negative there.", _packed(), form=True),
        ),
    ),
)

"""Lab 03: the time of a chain, a row-wise RMSNorm in Triton, and the norm folded around a product."""

from __future__ import annotations

import torch
import triton

from labkit.course.exercise import Exercise, Hint, Trial
from labkit.hardware import is_live
from solutions import lab03 as answers


def _near(got, guess, tolerance=5e-3) -> bool:
    """Numbers or tensors of one shape that differ by at most ``tolerance`` of the largest value."""
    got, guess = torch.as_tensor(got).cpu().double(), torch.as_tensor(guess).cpu().double()
    return got.shape == guess.shape and bool((got - guess).abs().max() <= tolerance * guess.abs().max())


# --- 03.1


def _work(name, operators, elements, element_bytes, launch_us, gb_s, fused=False) -> Trial:
    inputs = {"operators": operators, "elements": elements, "element_bytes": element_bytes}
    return Trial(name, lambda: {**inputs, "launch_us": launch_us, "gb_s": gb_s, "fused": fused})


def _parts(i) -> tuple[float, float, int]:
    """Microseconds of one launch and of one kernel's traffic, and the number of kernels."""
    traffic = 2 * i["elements"] * i["element_bytes"] / (i["gb_s"] * 1e3)
    return i["launch_us"], traffic, 1 if i["fused"] else i["operators"]


def _chain(formula):
    return lambda i, got, want: abs(got / formula(*_parts(i)) - 1) < 1e-6


# --- 03.2


def _rows(name, rows, width, scale=1.0, shift=0.0, eps=1e-5, dtype=torch.float16, zero_row=False) -> Trial:
    """The rows lie at the head of a longer buffer, so that a load past the last one reads 7s, not foreign memory."""

    def make():
        generator = torch.Generator().manual_seed(width)
        padding = 1 + triton.next_power_of_2(width) // width
        buffer = torch.full((rows + padding, width), 7.0)
        buffer[:rows] = torch.randn(rows, width, generator=generator) * scale + shift
        if zero_row:
            buffer[1] = 0
        weight = 1 + 0.5 * torch.randn(width, generator=generator)
        device = "cuda" if is_live() else "cpu"
        return {"x": buffer.to(device, dtype)[:rows], "weight": weight.to(device, dtype), "eps": eps}

    return Trial(name, make)


def _normed(i, square_sum=None, count=None, weight=True):
    """RMSNorm of a trial's x with one ingredient replaced."""
    x = i["x"].float()
    total = x.square().sum(-1, keepdim=True) if square_sum is None else square_sum
    out = x * torch.rsqrt(total / (count or x.shape[1]) + i["eps"])
    return out * i["weight"].float() if weight else out


def _block(i) -> int:
    return triton.next_power_of_2(i["x"].shape[1])


def _without_mask(i):
    """The squares of BLOCK neighbours: a row, and the head of what follows it."""
    rows, width = i["x"].shape
    reach = i["x"].as_strided((rows, _block(i)), (width, 1))
    return _normed(i, reach.float().square().sum(-1, keepdim=True))


def _filled_with_ones(i):
    return _normed(i, i["x"].float().square().sum(-1, keepdim=True) + _block(i) - i["x"].shape[1])


def _layer_norm(i):
    x = i["x"].float()
    return torch.nn.functional.layer_norm(x, x.shape[1:], i["weight"].float(), None, i["eps"])


def _eps_outside(i):
    x = i["x"].float()
    return x / (x.square().mean(-1, keepdim=True).sqrt() + i["eps"]) * i["weight"].float()


# --- 03.3


def _linear(name, m, n, k, scale=1.0, shift=0.0, eps=1e-5) -> Trial:
    def make():
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(m, k, generator=generator) * scale + shift
        w = torch.randn(n, k, generator=generator) / k**0.5
        return {"x": x, "w": w, "gamma": 1 + 0.5 * torch.randn(k, generator=generator), "eps": eps}

    return Trial(name, make)


def _scale(i, squares) -> torch.Tensor:
    return torch.rsqrt(squares.mean(-1, keepdim=True) + i["eps"])


def _from_the_mean(i, got) -> bool:
    mean = i["x"].mean(-1, keepdim=True)
    nan = got[1].isnan()
    return bool(nan.any() and (nan == (mean + i["eps"] < 0)).all()) or _near(got[1], _scale(i, mean.square()))


EXERCISES = (
    Exercise(
        "03.1",
        "What a chain takes",
        answers.chain_us,
        trials=(
            _work("8 operators on 64 Mi floats, apart", 8, 2**26, 4, 1.0, 4000.0),
            _work("the same, fused", 8, 2**26, 4, 1.0, 4000.0, fused=True),
            _work("5 operators on one token's 4096 halves, apart", 5, 4096, 2, 2.5, 1000.0),
            _work("3 operators where launches and traffic weigh alike", 3, 2**20, 2, 4.0, 1000.0),
        ),
        hints=(
            Hint(
                "every operator reads the tensor and writes it: its bytes count twice.",
                _chain(lambda launch, traffic, kernels: kernels * (launch + traffic / 2)),
            ),
            Hint(
                "1 GB/s is 1000 bytes a microsecond.",
                lambda i, got, want: any(
                    abs(got / (k * (launch + traffic * factor)) - 1) < 1e-6
                    for launch, traffic, k in [_parts(i)]
                    for factor in (1e3, 1e-3, 1e6)
                ),
            ),
            Hint(
                "each operator that stands alone is launched: count its fixed cost each time.",
                _chain(lambda launch, traffic, kernels: launch + kernels * traffic),
            ),
            Hint(
                "apart, each operator moves the whole tensor again: multiply the traffic by their number.",
                _chain(lambda launch, traffic, kernels: kernels * launch + traffic),
            ),
            Hint(
                "the two costs add: the next kernel starts when the one before it has ended.",
                _chain(lambda launch, traffic, kernels: max(kernels * launch, kernels * traffic)),
            ),
            Hint(
                "fused, the chain is one kernel: one launch, one read, one write.",
                lambda i, got, want: i["fused"] and abs(got / (want * i["operators"]) - 1) < 1e-6,
            ),
        ),
    ),
    Exercise(
        "03.2",
        "RMSNorm, a row a program",
        answers.rms_norm_rows,
        trials=(
            _rows("4 rows of 64", 4, 64),
            _rows("one column", 3, 1),
            _rows("1000 columns in a block of 1024", 3, 1000),
            _rows("values around 3", 4, 576, shift=3.0),
            _rows("a row of zeros, eps 1e-6", 3, 100, eps=1e-6, zero_row=True),
            _rows("values of 300: squares pass fp16's range", 2, 300, scale=300.0),
            _rows("values so small that eps decides", 2, 300, scale=1e-3, eps=1e-5),
            _rows("fp32, no rows in between", 1, 2049, dtype=torch.float32),
        ),
        tolerance=2e-3,
        hints=(
            Hint(
                "a row of zeros gives 0 * infinity: eps keeps the root's argument above 0.",
                lambda i, got, want: bool(got[i["x"].abs().sum(-1) == 0].isnan().any()),
            ),
            Hint("multiply by weight, column by column.", lambda i, got, want: _near(got, _normed(i, weight=False))),
            Hint(
                "RMSNorm subtracts no mean: it divides by the root of the mean square.",
                lambda i, got, want: _near(got, _layer_norm(i)),
            ),
            Hint(
                "the mean is over the row's width, not over BLOCK.",
                lambda i, got, want: _near(got, _normed(i, count=_block(i))),
            ),
            Hint(
                "lanes past the row's end read the row below: mask the load with cols < width, other=0.0.",
                lambda i, got, want: _block(i) != i["x"].shape[1] and _near(got, _without_mask(i)),
            ),
            Hint(
                "lanes past the row's end add something to the sum: what they hold must be 0 when it is taken.",
                lambda i, got, want: _block(i) != i["x"].shape[1] and _near(got, _filled_with_ones(i)),
            ),
            Hint(
                "300 squared is more than fp16 can hold: convert to tl.float32 before you square.",
                lambda i, got, want: bool(i["x"].abs().max() > 256 and not got.any()),
            ),
            Hint(
                "eps belongs under the root, beside the mean square.",
                lambda i, got, want: _near(got, _eps_outside(i)),
            ),
        ),
    ),
    Exercise(
        "03.3",
        "Fold the norm around the product",
        answers.fold_norm,
        trials=(
            _linear("3 rows, a square w", 3, 40, 40),
            _linear("n is not k", 5, 24, 64),
            _linear("x around 3", 4, 16, 32, shift=3.0),
            _linear("small x: eps counts", 2, 8, 16, scale=1e-3),
        ),
        tolerance=1e-5,
        hints=(
            Hint(
                "gamma has one value for each of x's k columns, and they meet w's columns, not its rows.",
                lambda i, got, want: _near(got[0], i["gamma"][:, None] * i["w"]),
            ),
            Hint("the first result is w with gamma multiplied in.", lambda i, got, want: _near(got[0], i["w"])),
            Hint(
                "the statistic is of x as it comes, before gamma.",
                lambda i, got, want: _near(got[1], _scale(i, (i["x"] * i["gamma"]).square())),
            ),
            Hint(
                "square first, then take the mean: the mean of x itself says nothing about its size.",
                lambda i, got, want: _from_the_mean(i, got),
            ),
            Hint(
                "no mean is subtracted: that is LayerNorm's variance.",
                lambda i, got, want: _near(
                    got[1], torch.rsqrt(i["x"].var(-1, keepdim=True, unbiased=False) + i["eps"])
                ),
            ),
            Hint(
                "the product is multiplied by scale: give the reciprocal of the root.",
                lambda i, got, want: _near(got[1], 1 / want[1]),
            ),
        ),
    ),
)

"""Group-wise integer formats: how a matrix of weights becomes small integers and a few scales.

A row of w [out, in] is cut into groups of ``group`` neighbours. Each group has one scale s and, where the format is
asymmetric, one zero point z, and stores b-bit codes q:

    asymmetric   w' = (q - z) * s    s = (max - min) / (2^b - 1),   z = -min / s rounded,   q in 0 .. 2^b - 1
    symmetric    w' = (q - 2^(b-1)) * s    s = max |w| / (2^(b-1) - 1),   q in 0 .. 2^b - 1 (the lowest one unused)

min and max include 0. The reference of AWQ (llm-awq, ``pseudo_quantize_tensor``) takes those of the values alone; a
group from 3 to 5 then has its zero point clamped to 0 and comes back as 2.0 throughout, and a constant one as nothing.

Scales are rounded to fp16, in which they are stored, before codes are chosen: what ``dequantise`` gives is what a
kernel will compute with, and not something slightly better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.errors import LabError

BITS = (2, 3, 4, 8)
TINY = 2.0**-14  # the smallest normal fp16; a smaller scale would be flushed to 0 by some GPUs


@dataclass(frozen=True)
class Format:
    """bits: 2, 3, 4 or 8. group: weights that share a scale, along a row; -1: the whole row."""

    bits: int = 4
    group: int = 128
    symmetric: bool = False

    def __post_init__(self):
        if type(self.bits) is not int or self.bits not in BITS:
            raise LabError(f"there are formats of {', '.join(map(str, BITS))} bits, not of {self.bits!r}")
        if type(self.group) is not int or (self.group != -1 and self.group < 1):
            raise LabError(f"a group is a number of weights from 1 up, or -1 for a whole row; got {self.group!r}")

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def width(self, in_features: int) -> int:
        """Weights a group has in rows of ``in_features``. Raises LabError if groups do not divide the row."""
        if self.group == -1:
            return in_features
        if in_features % self.group:
            fitting = [g for g in (32, 64, 96, 128, 192, 256) if in_features % g == 0]  # kernels read no smaller
            would = f"of the usual ones {', '.join(map(str, fitting))} would" if fitting else "use -1, the whole row"
            raise LabError(f"groups of {self.group} do not divide a row of {in_features} weights; {would}")
        return self.group

    def bits_per_weight(self, in_features: int) -> float:
        """Bits stored for each weight: its code, and its share of a 16-bit scale and of a zero point of ``bits``."""
        return self.bits + (16 + (0 if self.symmetric else self.bits)) / self.width(in_features)

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {kind}, groups of {'a row' if self.group == -1 else self.group}"


@dataclass
class Quantised:
    """codes: uint8 [out, in]; scales: fp32 [out, in / group], values that fp16 holds; zeros: uint8 like scales, or None
    if the format is symmetric."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: Format

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """-> [out, in]: (code - zero) * scale, in fp32, rounded to ``dtype`` at the end."""
        out, groups = self.scales.shape
        codes = self.codes.view(out, groups, -1).float()
        zeros = 2.0 ** (self.format.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        return ((codes - zeros) * self.scales[..., None]).view(out, -1).to(dtype)


def grid(w: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """w: fp32 [..., group] -> (scale, zero), fp32 [..., 1] each: the grid that spans each group's values and 0.

    For a symmetric format zero is 2^(bits-1) throughout.
    """
    if fmt.symmetric:
        scale = w.abs().amax(-1, keepdim=True) / (2 ** (fmt.bits - 1) - 1)
    else:
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / fmt.top
    scale = scale.half().float()
    # A group of zeros, or of values below what the format can tell from 0: any scale will do that is no subnormal.
    scale = scale.clamp(min=TINY)
    if fmt.symmetric:
        return scale, torch.full_like(scale, 2.0 ** (fmt.bits - 1))
    return scale, (-low / scale).round().clamp(0, fmt.top)


def encode(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The nearest codes, still fp32. Clamped: rounding of scale and zero can leave the ends half a step outside."""
    low = 1 if fmt.symmetric else 0
    return ((w / scale).round() + zero).clamp(low, fmt.top)


def quantise(w: torch.Tensor, fmt: Format) -> Quantised:
    """Round-to-nearest: w [out, in] -> its codes. Raises LabError for NaN or infinite weights, another rank, scales
    that fp16 cannot hold, or groups that do not divide a row."""
    if w.dim() != 2:
        raise LabError(f"a matrix [out, in] can be quantised, got shape {list(w.shape)}")
    if not torch.isfinite(w).all():
        row = int((~torch.isfinite(w)).any(1).nonzero()[0])
        raise LabError(f"the weights hold NaN or infinity, first in row {row}: they cannot be quantised")
    groups = w.float().unflatten(1, (-1, fmt.width(w.shape[1])))
    scale, zero = grid(groups, fmt)
    if not torch.isfinite(scale).all():
        raise LabError(f"the largest weight, {w.abs().max():.3g}, needs a scale beyond fp16's 65504 in {fmt}")
    codes = encode(groups, scale, zero, fmt).to(torch.uint8).flatten(1)
    zeros = None if fmt.symmetric else zero[..., 0].to(torch.uint8)
    return Quantised(codes, scale[..., 0], zeros, fmt)


def fake(w: torch.Tensor, fmt: Format) -> torch.Tensor:
    """w as it comes back from the format, in w's dtype: [out, in]. What quantise would give, without keeping codes."""
    groups = w.float().unflatten(1, (-1, fmt.width(w.shape[1])))
    scale, zero = grid(groups, fmt)
    return ((encode(groups, scale, zero, fmt) - zero) * scale).flatten(1).to(w.dtype)

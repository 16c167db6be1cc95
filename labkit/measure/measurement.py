"""What a measurement says: a time with its spread, the work done in it, and the ceiling it is held against."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from labkit.errors import LabError

CEILINGS = ("copy", "read", "matmul")


@dataclass(frozen=True)
class Ceilings:
    """The best this GPU was seen to do: a 1 GiB copy (bytes read plus written), a 1 GiB read, cuBLAS bf16 8192^3."""

    copy_gb_s: float
    read_gb_s: float
    matmul_tflop_s: float


def duration(us: float) -> str:
    """Microseconds in the unit that suits them, with fixed rounding: 4.87 us, 498.7 us, 12.35 ms, 3.21 s."""
    if us < 100:
        return f"{us:.2f} us"
    if us < 10_000:
        return f"{us:.1f} us"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


@dataclass(frozen=True)
class Measurement:
    """``us``: median, ``us_low`` and ``us_high``: quartiles, all in microseconds of one call.

    ``bytes`` and ``flops``: the least work of one call, or None if no cost was given. ``ceiling``: what bounds memory
    traffic here: "copy" for work that reads and writes, "read" for work that almost only reads; "matmul" marks work
    that arithmetic is expected to bound.
    """

    id: str
    us: float
    us_low: float
    us_high: float
    repeats: int
    bytes: int | None
    flops: int | None
    method: str
    source: str
    ceiling: str
    ceilings: Ceilings

    def _per_us(self, name: str) -> float:
        amount = getattr(self, name)
        if amount is None:
            raise LabError(
                f"{self.id} was measured without a cost: give measure() cost=Cost(bytes, flops) of one call."
            )
        return amount / self.us

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second, of the least traffic the work needs."""
        return self._per_us("bytes") / 1e3

    @property
    def tflop_s(self) -> float:
        """10^12 floating-point operations a second."""
        return self._per_us("flops") / 1e6

    @property
    def shares(self) -> dict[str, float]:
        """Share of each applicable ceiling, by its name."""
        memory = "read" if self.ceiling == "read" else "copy"
        bandwidth = self.ceilings.read_gb_s if memory == "read" else self.ceilings.copy_gb_s
        return {memory: self.gb_s / bandwidth, "matmul": self.tflop_s / self.ceilings.matmul_tflop_s}

    @property
    def bound(self) -> str:
        """The ceiling that allows the least: "copy", "read" or "matmul"."""
        return max(self.shares, key=self.shares.get)

    @property
    def roofline_share(self) -> float:
        """max(bytes / bandwidth ceiling, flops / matmul ceiling) / time: 1 is the measured roofline."""
        return self.shares[self.bound]

    def __str__(self) -> str:
        parts = [self.id, f"{duration(self.us)} [{duration(self.us_low)} to {duration(self.us_high)}]"]
        if self.bytes:
            parts.append(f"{self.gb_s:.0f} GB/s")
        if self.flops and self.bound == "matmul":
            parts.append(f"{self.tflop_s:.1f} TFLOP/s")
        if self.bytes or self.flops:
            parts.append(f"{100 * self.roofline_share:.1f} % of {self.bound}")
        return "  ".join([*parts, f"({self.source})"])


@dataclass(frozen=True)
class Reading:
    """A figure that is no duration of a callable: a clock, a power, a link's bandwidth; or a series of them."""

    id: str
    values: tuple[float, ...]
    unit: str
    source: str

    @property
    def value(self) -> float:
        """The value, or a series' median."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        of = f" (median of {len(self.values)})" if len(self.values) > 1 else ""
        return f"{self.id}  {self.value:.4g} {self.unit}{of}  ({self.source})"

"""The roofline: how fast work can go when memory and arithmetic each have a ceiling.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
CACM 52(4), 2009. Work that does I FLOPs for each byte it moves reaches at most min(I * bandwidth, peak).

Units are in the names. GB/s and TFLOP/s are decimal, so GB/s * FLOP/B / 1000 = TFLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.op import Cost
from labkit.errors import LabError
from labkit.hardware.spec import DeviceSpec, dtype_key


@dataclass(frozen=True)
class Point:
    """One measured operator: the least work it needs, and the time it took in microseconds."""

    name: str
    cost: Cost
    us: float
    dtype: str = "bf16"

    def __post_init__(self):
        if not self.us > 0:
            raise LabError(f"Point {self.name!r}: it took {self.us} us; a measured time must be positive.")

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.cost.intensity

    @property
    def tflop_s(self) -> float:
        """Achieved arithmetic rate: FLOPs / us = MFLOP/s; 10^6 of those are one TFLOP/s."""
        return self.cost.flops / self.us / 1e6

    @property
    def gb_s(self) -> float:
        """Achieved traffic, as far as the least traffic goes: bytes / us = MB/s; 10^3 of those are one GB/s."""
        return self.cost.bytes / self.us / 1e3

    def share(self, roofline: Roofline) -> float:
        """Least possible time over the time taken: 1.0 is on the roof."""
        return roofline.least_us(self.cost, self.dtype) / self.us


class Roofline:
    """One bandwidth and any number of arithmetic ceilings.

    bandwidth_gb_s: device memory, 10^9 bytes a second. ceilings: dtype -> TFLOP/s, such as {"fp32": 67, "bf16": 989}.
    device: a name for titles. Measured ceilings judge better than a data sheet's, which ``from_spec`` gives.
    """

    def __init__(self, bandwidth_gb_s: float, ceilings: Mapping[str, float], device: str = ""):
        if not (math.isfinite(bandwidth_gb_s) and bandwidth_gb_s > 0):
            raise LabError(f"Roofline: bandwidth_gb_s is {bandwidth_gb_s}; it must be a positive number of GB/s.")
        if bad := {k: v for k, v in ceilings.items() if not (math.isfinite(v) and v > 0)}:
            raise LabError(f"Roofline: each ceiling must be a positive number of TFLOP/s, got {bad}.")
        if not ceilings:
            raise LabError("Roofline: give at least one ceiling, such as {'bf16': 989.4} in TFLOP/s.")
        self.bandwidth_gb_s = float(bandwidth_gb_s)
        self.ceilings = {dtype_key(k): float(v) for k, v in ceilings.items()}
        self.device = device

    @classmethod
    def from_spec(cls, spec: DeviceSpec) -> Roofline:
        """The data sheet's roof: FP32 on CUDA cores and every dense tensor rate. Raises LabError if it is unknown."""
        if spec.bandwidth_gb_s is None:
            raise LabError(
                f"{spec.name}: its memory bandwidth is unknown; measure a copy and build Roofline with that."
            )
        ceilings = dict(spec.tensor_tflops)
        if spec.fp32_tflops is not None:
            ceilings = {"fp32": spec.fp32_tflops, **ceilings}
        return cls(spec.bandwidth_gb_s, ceilings, spec.name)

    def ceiling(self, dtype: str) -> float:
        """Peak rate in TFLOP/s for a dtype."""
        key = dtype_key(dtype)
        if key not in self.ceilings:
            raise LabError(f"Roofline: no ceiling for {key}; it has {', '.join(self.ceilings)}.")
        return self.ceilings[key]

    def attainable(self, intensity: float, dtype: str) -> float:
        """Highest rate in TFLOP/s at ``intensity`` FLOP per byte."""
        if not intensity >= 0:
            raise LabError(f"Roofline: intensity is {intensity} FLOP/B; it cannot be negative.")
        return min(intensity * self.bandwidth_gb_s / 1e3, self.ceiling(dtype))

    def ridge(self, dtype: str) -> float:
        """Intensity in FLOP per byte from which arithmetic, not memory, sets the limit."""
        return self.ceiling(dtype) * 1e3 / self.bandwidth_gb_s

    def memory_us(self, cost: Cost) -> float:
        """Time to move the bytes: bytes / (GB/s) = ns, over 1000."""
        return cost.bytes / self.bandwidth_gb_s / 1e3

    def compute_us(self, cost: Cost, dtype: str) -> float:
        """Time to do the FLOPs: FLOPs / (TFLOP/s) = ps, over 10^6."""
        return cost.flops / self.ceiling(dtype) / 1e6

    def least_us(self, cost: Cost, dtype: str) -> float:
        """Least time in microseconds, with traffic and arithmetic overlapped perfectly."""
        return max(self.memory_us(cost), self.compute_us(cost, dtype))

    def bound_by(self, cost: Cost, dtype: str) -> str:
        """ "memory" or "compute": which takes longer. On the ridge itself, "compute"."""
        return "memory" if self.memory_us(cost) > self.compute_us(cost, dtype) else "compute"

    def share(self, cost: Cost, us: float, dtype: str) -> float:
        """Least possible time over the time taken: 1.0 is on the roof."""
        return Point("", cost, us, dtype).share(self)

    def curve(self, dtype: str, low: float = 0.1, high: float = 10_000.0) -> tuple[list[float], list[float]]:
        """Intensities and attainable TFLOP/s at the corners of the roof between two intensities, for a log-log plot."""
        if not 0 < low < high:
            raise LabError(f"Roofline: a curve runs from a positive intensity to a larger one, got {low} to {high}.")
        corners = sorted({low, min(max(self.ridge(dtype), low), high), high})
        return corners, [self.attainable(i, dtype) for i in corners]

    def __repr__(self) -> str:
        roofs = ", ".join(f"{k} {v:.0f} TFLOP/s (ridge {self.ridge(k):.0f} FLOP/B)" for k, v in self.ceilings.items())
        return f"Roofline({self.device or 'unnamed'}: {self.bandwidth_gb_s:.0f} GB/s, {roofs})"

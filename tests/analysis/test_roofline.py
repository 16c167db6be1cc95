"""The roofline's arithmetic in its units, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.op import Cost
from labkit.analysis import Point, Roofline
from labkit.errors import LabError
from labkit.hardware import DeviceSpec, catalogue

# 1000 GB/s and 100 TFLOP/s meet at 100 FLOP/B.
ROOF = Roofline(1000, {"bf16": 100, "fp32": 10}, "round numbers")


def test_ridge_is_flops_over_bytes():
    assert ROOF.ridge("bf16") == 100.0  # 100e12 FLOP/s over 1000e9 B/s
    assert ROOF.ridge("fp32") == 10.0
    assert Roofline(4800, {"bf16": 989.4}).ridge("bf16") == pytest.approx(206.1, abs=0.05)


@pytest.mark.parametrize(
    "intensity, tflops", [(0, 0), (1, 1.0), (50, 50.0), (100, 100.0), (1000, 100.0), (math.inf, 100.0)]
)
def test_attainable(intensity, tflops):
    assert ROOF.attainable(intensity, "bf16") == tflops  # 1 FLOP/B * 1000e9 B/s = 1e12 FLOP/s


def test_times_by_hand():
    cost = Cost(bytes=2_000_000_000, flops=500_000_000_000)  # 2 GB at 1000 GB/s: 2 ms; 0.5 TFLOP at 100: 5 ms
    assert ROOF.memory_us(cost) == pytest.approx(2000)
    assert ROOF.compute_us(cost, "bf16") == pytest.approx(5000)
    assert ROOF.least_us(cost, "bf16") == pytest.approx(5000)
    assert ROOF.least_us(cost, "fp32") == pytest.approx(50_000)
    assert ROOF.bound_by(cost, "bf16") == "compute"
    assert ROOF.bound_by(Cost(2_000_000_000, 1), "bf16") == "memory"


def test_bound_agrees_with_the_ridge():
    for flops in (99, 100, 101):
        expected = "memory" if flops < 100 else "compute"
        assert ROOF.bound_by(Cost(1, flops), "bf16") == expected


def test_point_by_hand():
    point = Point("copy", Cost(bytes=8_000_000_000, flops=4_000_000_000_000), us=16_000)
    assert point.gb_s == pytest.approx(500)  # 8 GB in 16 ms
    assert point.tflop_s == pytest.approx(250)  # 4 TFLOP in 16 ms
    assert point.intensity == 500
    assert point.share(ROOF) == pytest.approx(40_000 / 16_000)  # faster than the roof: the caller sees it
    slow = Point("slow", Cost(1_000_000, 0), us=4)  # 1 MB at 1000 GB/s: 1 us
    assert slow.share(ROOF) == ROOF.share(slow.cost, 4, "bf16") == pytest.approx(0.25)


def test_work_without_bytes_or_without_flops():
    assert ROOF.bound_by(Cost(0, 10), "bf16") == "compute" and Cost(0, 10).intensity == math.inf
    assert ROOF.bound_by(Cost(10, 0), "bf16") == "memory"


def test_from_spec_takes_every_ceiling():
    roof = Roofline.from_spec(catalogue.find("H200"))
    assert roof.device == "NVIDIA H200" and roof.bandwidth_gb_s == 4800
    assert set(roof.ceilings) == {"fp32", "fp16", "bf16", "tf32", "fp8", "int8"}
    assert roof.ceiling(torch.bfloat16) == 989.4 and roof.ceiling("float32") == pytest.approx(66.9, abs=0.05)


@pytest.mark.parametrize("spec", catalogue.specs(), ids=lambda s: s.name)
def test_spec_and_roofline_agree_on_the_ridge(spec):
    assert Roofline.from_spec(spec).ridge("bf16") == pytest.approx(spec.ridge("bf16"))


def test_curve_has_its_corner_on_the_ridge():
    assert ROOF.curve("bf16", 1, 1000) == ([1, 100.0, 1000], [1.0, 100.0, 100.0])
    assert ROOF.curve("bf16", 200, 1000) == ([200, 1000], [100.0, 100.0])
    assert ROOF.curve("bf16", 1, 10) == ([1, 10], [1.0, 10.0])


def test_errors_say_what_is_needed():
    with pytest.raises(LabError, match="no ceiling for fp8; it has bf16, fp32"):
        ROOF.attainable(1, "fp8")
    with pytest.raises(LabError, match="cannot be negative"):
        ROOF.attainable(-1, "bf16")
    for bandwidth in (0, -1, math.nan, math.inf):
        with pytest.raises(LabError, match="GB/s"):
            Roofline(bandwidth, {"bf16": 1})
    with pytest.raises(LabError, match="TFLOP/s"):
        Roofline(1, {"bf16": 0})
    with pytest.raises(LabError, match="at least one ceiling"):
        Roofline(1, {})
    with pytest.raises(LabError, match="positive"):
        Point("x", Cost(1, 1), 0)
    with pytest.raises(LabError, match="bandwidth is unknown"):
        Roofline.from_spec(DeviceSpec(name="Mystery"))
    with pytest.raises(LabError, match="to a larger one"):
        ROOF.curve("bf16", 10, 1)


def test_repr_is_stable():
    expected = "round numbers: 1000 GB/s, bf16 100 TFLOP/s (ridge 100 FLOP/B), fp32 10 TFLOP/s (ridge 10 FLOP/B)"
    assert repr(ROOF) == f"Roofline({expected})"

"""The one test every operator passes: poisoned outputs, guarded memory, FlashAttention's error rule."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.op import Case, Cost, Op
from tests.kernels.harness import all_ops, compare

OPS = all_ops()
RUNS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{str(dtype)[6:]}-{case.name}")
    for op in OPS.values()
    for dtype in op.dtypes
    for case in op.cases
]
ON_CPU = [p for p in RUNS if p.values[0].interpreted and p.values[2] != torch.bfloat16]  # the interpreter's bf16 is off


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, on inputs meant to overflow
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are compiled, not interpreted")
@pytest.mark.parametrize(("op", "case", "dtype"), ON_CPU)
def test_interpreted_kernel_matches_the_definition(op, case, dtype, monkeypatch):
    compare(op, case, dtype, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case", "dtype"), RUNS)
def test_kernel_matches_the_definition(op, case, dtype, monkeypatch):
    compare(op, case, dtype, "cuda", monkeypatch)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_cost_counts_whole_bytes_and_flops(op):
    for case in op.cases:
        cost = op.cost(**case.make("cpu", op.dtypes[0], torch.Generator().manual_seed(0)))
        assert type(cost.bytes) is int and type(cost.flops) is int and cost.bytes >= 0 and cost.flops >= 0, case.name


# The harness itself must refuse what is wrong. Each kernel below has one flaw.


def _double(x):
    return 2 * x


def _inputs(device, dtype, generator):
    return {"x": torch.randn(64, generator=generator).to(device, dtype)}


def _leaves_one_out(x):
    out = torch.empty_like(x)
    out[:-1] = 2 * x[:-1]
    return out


def _writes_past_the_end(x):
    out = torch.empty(64, dtype=x.dtype, device=x.device)
    out.as_strided((65,), (1,), out.storage_offset()).fill_(0)
    return out.copy_(2 * x)


def _reads_past_the_end(x):
    behind = x.as_strided((1,), (1,), x.storage_offset() + 64)
    return 2 * x + 0 * behind


def _changes_its_input(x):
    return x.mul_(2).clone()


def _is_slightly_off(x):
    return 2.02 * x


def _returns_another_dtype(x):
    return 2 * x.double()


GOOD = Op("double", _double, _double, lambda x: Cost(1, 1), (Case("plain", _inputs),))


def test_the_harness_accepts_a_right_kernel(monkeypatch):
    compare(GOOD, GOOD.cases[0], torch.float16, "cpu", monkeypatch)
    in_place = dataclasses.replace(GOOD, reference=lambda x: x.mul_(2), triton=lambda x: x.mul_(2), mutates=("x",))
    compare(in_place, GOOD.cases[0], torch.float16, "cpu", monkeypatch)


@pytest.mark.parametrize(
    "flawed",
    [
        _leaves_one_out,
        _writes_past_the_end,
        _reads_past_the_end,
        _changes_its_input,
        _is_slightly_off,
        _returns_another_dtype,
    ],
)
def test_the_harness_refuses(flawed, monkeypatch):
    with pytest.raises(AssertionError):
        compare(dataclasses.replace(GOOD, triton=flawed), GOOD.cases[0], torch.float16, "cpu", monkeypatch)

"""The benchmark's table: shares, peers, goals; and that its rows' costs are those of the operators themselves."""

import json

import pytest
import torch

from kernels import awq_linear, gemm, rms_norm, silu_mul, transpose
from kernels.op import Cost
from labkit.errors import LabError
from labkit.measure import Ceilings, Measurement, bench
from labkit.measure.measure import _check as check_id

TOP = Ceilings(copy_gb_s=4000.0, read_gb_s=4400.0, matmul_tflop_s=700.0)
TIMES = {
    "bench/norm/8x8": 100.0,
    "bench/norm/8x8/slow": 250.0,
    "bench/norm/8x8/fast": 125.0,
    "bench/attention/S8": 50.0,
    "bench/attention/S8/cuDNN": 40.0,
}


@pytest.fixture(autouse=True)
def replay(monkeypatch):
    def measure(id, fn, cost, *, inputs, ceiling, method):
        if id not in TIMES:
            raise LabError(f"there is no {id}")
        t = TIMES[id]
        return Measurement(id, t, t, t, 9, cost.bytes, cost.flops, method, "recorded: X", ceiling, TOP)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "ceilings", lambda: TOP)


def norm(**change):
    peers = dict.fromkeys(("slow", "fast", "absent"), lambda: None)
    return bench.Row("norm", "8x8", Cost(380_000_000, 0), lambda: (), lambda: None, peers, **change)


def attention(goal):
    cost = Cost(1, 30 * 10**9)
    peers = {"cuDNN": lambda: None}
    return bench.Row("attention", "S8", cost, lambda: (), lambda: None, peers, "matmul", goal, "cuDNN")


def test_share_best_peer_and_goal():
    result = bench.run([norm(goal=0.95)])[0]
    assert result.share == pytest.approx(0.95) and result.reached
    assert result.best_peer == "fast" and result.ratio == 1.25
    assert set(result.peers) == {"slow", "fast"}, "a peer that is not there is left out"
    assert bench.run([norm(goal=0.96)])[0].reached is False
    assert bench.run([norm()])[0].reached is None


def test_a_row_that_was_not_recorded_is_left_out_and_named(monkeypatch):
    said, new = [], bench.Row("new", "8x8", Cost(1, 0), lambda: (), lambda: None)
    assert [r.row.operator for r in bench.run([new, norm()], said.append)] == ["norm"]
    assert said[0] == "bench/new/8x8 left out: there is no bench/new/8x8"
    monkeypatch.setattr(bench, "is_live", lambda: True)
    with pytest.raises(LabError):
        bench.run([new])


def test_a_goal_against_a_peer_compares_times():
    result = bench.run([attention(1.0)])[0]
    assert result.ratio == 0.8 and result.reached is False
    assert bench.run([attention(0.8)])[0].reached is True


def test_the_table_ends_in_json_and_the_exit_code_counts(capsys):
    assert bench.bench([norm(goal=0.95), attention(0.8)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "95% of copy: reached" in out[2] and "3800 GB/s" in out[2] and "95.0% copy" in out[2]
    assert "0.80 x cuDNN: reached" in out[3] and "600 TFLOP/s" in out[3]
    rows = json.loads(out[-1])["rows"]
    assert [r["operator"] for r in rows] == ["norm", "attention"] and rows[0]["peers_us"]["fast"] == 125
    assert bench.bench([attention(1.0)]) == 1


def test_costs_of_the_rows_are_those_of_the_operators(monkeypatch):
    """Counted here from shapes; each operator's own cost counts from tensors."""
    from labkit.measure import bench_kernels

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    monkeypatch.setattr(bench_kernels, "_randn", empty)
    found = {row.operator + row.shape: row for row in bench_kernels.rows()}
    assert len(found) == len(bench_kernels.rows()) > 20
    ids = [row.id(peer) for row in found.values() for peer in (None, *row.peers)]
    assert len(set(ids)) == len(ids)
    for id in ids:
        check_id(id)
    costs = {
        "rms_norm": rms_norm.rms_norm_cost,
        "add_rms_norm": rms_norm.add_rms_norm_cost,
        "silu_mul": silu_mul.silu_mul_cost,
        "transpose": transpose.transpose_cost,
        "gemm": gemm.gemm_cost,
    }
    for row in found.values():
        if row.operator in costs:
            exact = costs[row.operator](*row.inputs())
            assert row.cost.bytes == pytest.approx(exact.bytes, rel=1e-3), row.id()
            assert row.cost.flops == pytest.approx(exact.flops, rel=0.5), row.id()


def test_operands_of_the_quantised_rows_mean_the_same_matrix(monkeypatch):
    """tinygemm's words and scales as torch's CUDA kernel reads them: byte, then (code - 8) * scale + zero."""
    from labkit.measure import bench_quant

    seen = {}

    def on_cpu(name):
        make = getattr(torch, name)
        return lambda *a, device, **k: make(*a, **k)

    for name in ("randn", "randint", "rand"):
        monkeypatch.setattr(torch, name, on_cpu(name))
    monkeypatch.setattr(
        bench_quant.torch.ops.aten, "_convert_weight_to_int4pack", lambda pairs, _: seen.setdefault("pairs", pairs)
    )
    x, packed, full, _, both, layer = bench_quant._Operands(3, 256, 512).all()
    pairs = seen["pairs"]
    codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1).float()
    scales, zeros = (t.t().repeat_interleave(128, 1).float() for t in both.unbind(-1))
    torch.testing.assert_close((codes - 8) * scales + zeros, full.float(), rtol=0.02, atol=2e-3)
    assert layer is None and x.shape == (3, 512)
    exact = awq_linear.awq_linear_cost(x, packed)
    assert bench_quant.cost(3, 256, 512) == exact

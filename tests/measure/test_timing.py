"""Timing on a simulated GPU, whose times are known, and on a real one, where there is one."""

from __future__ import annotations

import pytest
import torch

from labkit.errors import LabError
from labkit.measure.timing import Timing, copies_for, quartiles, repeats_for, time_cuda
from tests.measure.fakes import FakeGpu


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))


def test_median_and_quartiles():
    t = Timing((1.0, 2.0, 3.0, 4.0, 100.0), "events", True)
    assert (t.us, t.us_low, t.us_high, t.repeats) == (3.0, 2.0, 4.0, 5)
    assert quartiles((7.0,)) == (7.0, 7.0)
    assert quartiles((1.0, 2.0)) == (1.25, 1.75)


def test_repeats_fill_the_budget_within_bounds():
    assert repeats_for(1e6) == 10 and repeats_for(1.0) == 500 and repeats_for(2000.0) == 100
    assert copies_for(10_000.0) == 1 and copies_for(1.0) == 1000 and copies_for(100.0) == 20


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("launch_us", [5.0, 80.0, 400.0])
def test_events_time_the_kernel_not_its_launch(flush, launch_us):
    gpu = FakeGpu()
    t = time_cuda(gpu.work(launch_us, 12.0), flush=flush, gpu=gpu)
    assert t.us == pytest.approx(12.0, abs=0.5) and t.starved == 0
    assert bool(gpu.flushes) == flush


def test_events_see_cold_data_only_with_a_flush():
    gpu = FakeGpu()
    assert time_cuda(gpu.work(5.0, 12.0, cold_us=8.0), gpu=gpu).us == pytest.approx(20.0, abs=0.5)
    assert time_cuda(gpu.work(5.0, 12.0, cold_us=8.0), flush=False, gpu=gpu).us == pytest.approx(12.0, abs=0.5)


def test_the_hosts_pace_counts_when_a_call_is_long():
    gpu = FakeGpu()
    t = time_cuda(gpu.work(launch_us=5000.0, kernel_us=100.0), gpu=gpu, repeats=20)
    assert t.us == pytest.approx(5100.0, rel=0.05) and t.starved == 20


def test_wall_holds_launch_and_synchronisation_and_wall_no_sync_the_launch_alone():
    gpu = FakeGpu()
    fn = gpu.work(7.0, 500.0)
    assert time_cuda(fn, method="wall", gpu=gpu).us == pytest.approx(512.0, abs=1)
    assert time_cuda(fn, method="wall_no_sync", gpu=gpu).us == pytest.approx(7.0)


def test_graph_divides_the_replay_by_its_copies():
    gpu = FakeGpu()
    t = time_cuda(gpu.work(7.0, 1.5), method="graph", flush=False, gpu=gpu)
    assert t.us == pytest.approx(1.5, rel=0.02) and t.method == "graph" and t.repeats == 20


def test_graph_takes_turns_over_several_callables():
    gpu = FakeGpu()
    fns = [gpu.work(7.0, us) for us in (1.0, 2.0, 6.0)]
    assert time_cuda(fns, method="graph", copies=10, gpu=gpu).us == pytest.approx(3.0, rel=0.1)
    assert gpu.captured == 12  # 10, rounded up to whole rounds


def test_without_warm_up_the_first_sample_holds_compilation():
    gpu = FakeGpu()
    kernel = gpu.work(5.0, 10.0)
    calls = []

    def fn():
        if not calls:
            gpu.host += 30_000.0
        calls.append(1)
        kernel()

    t = time_cuda(fn, method="wall", warmup=0, repeats=5, gpu=gpu)
    assert len(calls) == 5 and t.samples[0] > 30_000 and t.us < 50
    calls.clear()
    assert max(time_cuda(fn, method="wall", repeats=5, gpu=gpu).samples) < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "clock"}, "must be one of events, graph, wall, wall_no_sync"),
        ({"repeats": 0}, "must be at least 1"),
        ({"warmup": -1}, "must be 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(LabError, match=message):
        time_cuda(lambda: None, gpu=FakeGpu(), **options)


def test_a_callable_that_cannot_be_captured_is_named():
    gpu = FakeGpu()

    def syncs():
        if gpu.recording:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(LabError, match=r"cannot be captured .*stream is capturing\).*method='events'"):
        time_cuda(syncs, method="graph", gpu=gpu)


@pytest.mark.gpu
class TestOnTheGpu:
    def setup_method(self):
        self.x = torch.randn(2**26, device="cuda")
        self.out = torch.empty_like(self.x)

    def copy(self):
        self.out.copy_(self.x)

    def test_methods_agree_on_a_long_kernel(self):
        events = time_cuda(self.copy).us
        assert events > 2 * self.x.nbytes / 10e12 * 1e6  # no GPU copies at 10 TB/s
        assert time_cuda(self.copy, method="graph").us == pytest.approx(events, rel=0.1)
        assert events * 0.95 < time_cuda(self.copy, method="wall").us < events + 100
        assert time_cuda(self.copy, method="wall_no_sync").us < events / 2

    def test_a_small_working_set_is_faster_without_the_flush(self):
        x = torch.randn(2**21, device="cuda")  # 8 MB: fits in any L2 we know of, twice
        out = torch.empty_like(x)
        cold = time_cuda(lambda: torch.add(x, 1, out=out), flush=True)
        warm = time_cuda(lambda: torch.add(x, 1, out=out), flush=False)
        assert warm.us < cold.us and cold.starved <= cold.repeats // 10

    def test_a_graph_hides_the_launches_of_short_kernels(self):
        x = torch.randn(1024, device="cuda")
        assert time_cuda(lambda: x.mul_(1.0), method="graph", flush=False).us < 3.0
        assert time_cuda(lambda: x.mul_(1.0), method="wall").us > 5.0

    def test_a_synchronising_callable_cannot_be_captured_and_the_gpu_goes_on(self):
        with pytest.raises(LabError, match="cannot be captured"):
            time_cuda(lambda: self.x.sum().item(), method="graph")
        assert time_cuda(self.copy).us > 0

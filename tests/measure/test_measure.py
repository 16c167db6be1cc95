"""``measure`` and ``reading``: replay without a GPU, and the live path on a simulated one."""

from __future__ import annotations

import pytest
import torch

import labkit.measure.measure  # noqa: F401  (the package's attribute of that name is the function)
from kernels.op import Cost
from labkit.errors import LabError
from labkit.measure import Reading, ceilings, measure, reading, recorded, recording, recording_path
from labkit.measure.timing import Timing
from tests.measure.fakes import CEILINGS, WHO, FakeGpu, result

module = __import__("sys").modules["labkit.measure.measure"]


def never(*_):
    pytest.fail("nothing may run when replaying")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Own home, own folder of recordings."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LABKIT_RECORDED_GPU", raising=False)
    monkeypatch.delenv("LABKIT_RECORD", raising=False)
    monkeypatch.setattr(module, "RECORDINGS", tmp_path)
    return tmp_path


@pytest.fixture
def replay(own, monkeypatch):
    monkeypatch.setattr(module, "is_live", lambda: False)
    path = own / "nvidia-h200.json"
    recording.write(path, WHO, CEILINGS, result())
    recording.write(path, WHO, CEILINGS, Reading("01/power", (650.0, 690.0, 700.0), "W", "live"))
    return path


@pytest.fixture
def live(own, monkeypatch):
    """A live tier whose GPU is simulated."""
    gpu = FakeGpu()
    monkeypatch.setattr(module, "is_live", lambda: True)
    monkeypatch.setattr(module, "_session", lambda: module._Session(dict(WHO), CEILINGS))
    original = module.time_cuda
    monkeypatch.setattr(module, "time_cuda", lambda *a, **k: original(*a, **k, gpu=gpu))
    monkeypatch.setattr(module, "CudaGpu", lambda: gpu)
    return gpu


def test_replay_calls_nothing_and_is_exact(replay):
    m = measure("01/copy/1GiB", never, Cost(10**9, 0), inputs=never)
    assert m.us == 500.0 and m.gb_s == pytest.approx(2000) and m.source == "recorded: NVIDIA H200, 2026-11-30"
    assert m == measure("01/copy/1GiB", never) == recorded("01/copy/1GiB")
    assert ceilings() == CEILINGS
    power = reading("01/power", never, "W")
    assert power.value == 690.0 and power == recorded("01/power")
    assert recording_path() == replay


def test_replay_of_something_else_is_refused(replay):
    with pytest.raises(LabError, match=r"no measurement '01/copy/1GB'.*nearest are 01/copy/1GiB"):
        measure("01/copy/1GB", never)
    with pytest.raises(LabError, match=r"recorded for 1000000000 bytes and 0 FLOPs, but this call counts 7 and 1"):
        measure("01/copy/1GiB", never, Cost(7, 1))
    with pytest.raises(LabError, match=r"no reading '01/copy/1GiB'"):
        reading("01/copy/1GiB", never, "us")
    with pytest.raises(LabError, match=r"recorded in 'W', not in 'kW'"):
        reading("01/power", never, "kW")


def test_replay_of_another_method_is_refused(replay):
    """A launch that is not waited for and the work itself are two figures."""
    recording.write(replay, WHO, CEILINGS, result("00/async", method="wall_no_sync"))
    for method in ("auto", "wall_no_sync"):
        assert measure("00/async", never, method=method).method == "wall_no_sync"
    with pytest.raises(
        LabError, match=r"00/async was recorded with method='wall_no_sync', but this call asks for 'wall': .* GPU only"
    ):
        measure("00/async", never, method="wall")


def test_replay_sees_a_recording_that_was_replaced(replay):
    assert measure("01/copy/1GiB", never).us == 500.0
    recording.write(replay, WHO, CEILINGS, result(us=480.0))
    assert measure("01/copy/1GiB", never).us == 480.0


def test_no_recording_at_all(own, monkeypatch):
    monkeypatch.setattr(module, "is_live", lambda: False)
    with pytest.raises(LabError, match=r"no recording nvidia-h200\.json; take it again with `labkit record`"):
        measure("01/copy/1GiB", never)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "two words"}, "id is a name"),
        ({"ceiling": "sky"}, "ceiling is 'sky'"),
        ({"method": "x"}, "method is 'x'"),
        ({"cost": (10**9, 0)}, r"cost is \(1000000000, 0\); it must be Cost\(bytes, flops\)"),
    ],
)
def test_bad_options_are_named_on_every_tier(replay, options, message):
    with pytest.raises(LabError, match=message):
        measure(**{"id": "01/copy/1GiB", "fn": never, **options})


def test_live_is_timed_and_kept(live, own, monkeypatch):
    target = own / "new.json"
    monkeypatch.setenv("LABKIT_RECORD", str(target))
    m = measure("01/x", live.work(5.0, 40.0), Cost(10**8, 7), ceiling="read")
    assert m.us == pytest.approx(40.0, abs=0.5) and m.method == "events" and m.source == "live: NVIDIA H200"
    assert (m.bytes, m.flops, m.roofline_share) == (10**8, 7, pytest.approx(2500 / 4500, rel=0.02))
    for path in (target, own / "home" / "measurements" / "nvidia-h200.json"):
        kept = recording.load(path).measurement("01/x")
        assert (kept.us, kept.bytes, kept.ceiling) == (pytest.approx(m.us, abs=1e-4), 10**8, "read")
    assert reading("01/w", lambda: [1, 2.5], "W").values == (1.0, 2.5)
    assert recording.load(target).reading("01/w").values == (1.0, 2.5)


def test_live_without_whole_provenance_still_measures_but_cannot_record(live, own, monkeypatch):
    monkeypatch.setattr(module, "_session", lambda: module._Session({**WHO, "driver": None}, CEILINGS))
    assert measure("01/x", live.work(5.0, 40.0)).us > 0
    assert not (own / "home" / "measurements").exists()
    monkeypatch.setenv("LABKIT_RECORD", str(own / "new.json"))
    with pytest.raises(LabError, match="01/x cannot be recorded: .*driver"):
        measure("01/x", live.work(5.0, 40.0))


def test_a_home_that_cannot_be_written_costs_one_line_and_no_measurement(live, own, monkeypatch, capsys):
    (own / "file").touch()
    monkeypatch.setenv("LABKIT_HOME", str(own / "file"))
    module._say_once.cache_clear()
    for id in ("01/x", "01/y"):
        assert measure(id, live.work(5.0, 40.0)).us > 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("measurements are not kept: ")
    assert str(own / "file" / "measurements") in out and "LABKIT_HOME" in out


def test_a_recording_that_was_asked_for_and_cannot_be_written_is_an_error(live, own, monkeypatch):
    (own / "file").touch()
    monkeypatch.setenv("LABKIT_RECORD", str(own / "file" / "new.json"))
    with pytest.raises(LabError, match="01/x cannot be recorded: LABKIT_RECORD is .*new.json, which cannot be written"):
        measure("01/x", live.work(5.0, 40.0))


def test_inputs_are_built_once_and_handed_over(live):
    built = []
    kernel = live.work(5.0, 40.0)

    def inputs():
        built.append(1)
        return torch.zeros(3), 2.0

    def fn(x, alpha):
        assert x.shape == (3,) and alpha == 2.0
        kernel()

    measure("01/x", fn, inputs=inputs)
    assert len(built) == 1


def test_short_work_is_timed_in_a_graph_over_rotated_inputs(live):
    made = []

    def inputs():
        made.append(torch.empty(2**21, dtype=torch.uint8))  # 2 MiB: 60 of them are twice a 60 MiB L2
        return made[-1]

    kernel, used = live.work(5.0, 2.0), set()

    def fn(x):
        used.add(x.data_ptr())
        kernel()

    m = measure("01/short", fn, inputs=inputs)
    assert m.method == "graph" and m.us == pytest.approx(2.0, rel=0.05) and len(made) == len(used) == 60


def test_inputs_that_a_call_leaves_alone_do_not_push_the_others_out_of_l2(live):
    """Of 32 MiB a call reads 2: two sets would stay in a cache of 60 MiB, so there are 60."""
    made = []

    def inputs():
        made.append(1)
        return torch.empty(2**21, dtype=torch.uint8), torch.empty(30 * 2**20, dtype=torch.uint8)

    kernel = live.work(5.0, 2.0)
    assert measure("01/short", lambda x, _: kernel(), Cost(2**21, 0), inputs=inputs).method == "graph"
    assert len(made) == 60


def test_large_inputs_of_which_little_moves_are_not_made_many_times(live):
    """A gather from 10 GiB: 60 of them would be made, where 8 GiB may be."""
    made = []

    class Table(torch.Tensor):
        def numel(self):
            return 10 * 2**30

    def inputs():
        made.append(1)
        return torch.zeros(1, dtype=torch.uint8).as_subclass(Table)

    gather = live.work(5.0, 2.0)
    assert measure("01/short", lambda table: gather(), Cost(2**21, 0), inputs=inputs).method == "events"
    with pytest.raises(LabError, match=r"01/short: inputs\(\) makes 10737418240 .* do not fit into half of the free"):
        measure("01/short", lambda table: gather(), Cost(2**21, 0), inputs=inputs, method="graph")
    assert len(made) == 2


def test_short_work_without_inputs_stays_with_events(live):
    assert measure("01/short", live.work(5.0, 2.0)).method == "events"
    assert measure("01/short", live.work(5.0, 2.0), flush=False).method == "graph"
    with pytest.raises(LabError, match=r"01/short: a graph with flush=True .* give inputs="):
        measure("01/short", live.work(5.0, 2.0), method="graph")
    with pytest.raises(LabError, match=r"01/short: inputs\(\) makes 4 bytes"):
        measure("01/short", live.work(5.0, 2.0), method="graph", inputs=lambda: torch.zeros(1))


def test_what_raises_is_named(live):
    def broken():
        raise RuntimeError("illegal memory access")

    with pytest.raises(LabError, match="01/x: the measured function raised RuntimeError: illegal memory access"):
        measure("01/x", broken)
    with pytest.raises(LabError, match="01/w: the reading raised RuntimeError"):
        reading("01/w", broken, "W")
    with pytest.raises(LabError, match=r"01/w: the reading returned nan"):
        reading("01/w", lambda: float("nan"), "W")
    with pytest.raises(LabError, match=r"01/w: the reading returned \[\]"):
        reading("01/w", lambda: [], "W")


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0])
def test_impossible_times_are_named(live, monkeypatch, bad):
    monkeypatch.setattr(module, "time_cuda", lambda *a, **k: Timing((1.0, bad), "events", True))
    with pytest.raises(LabError, match="01/x: a time was not a positive number"):
        measure("01/x", lambda: None)


@pytest.mark.gpu
class TestOnTheGpu:
    def test_the_ceilings_are_plausible_and_a_copy_reaches_its_own(self, own, monkeypatch):
        monkeypatch.setenv("LABKIT_COMMIT", "test")
        top = ceilings()
        assert 0.9 * top.copy_gb_s < top.read_gb_s < 1.5 * top.copy_gb_s
        n = 2**29
        m = measure(
            "test/copy",
            lambda x, out: out.copy_(x),
            Cost(4 * n, 0),
            inputs=lambda: (torch.randn(n, device="cuda").half(), torch.empty(n, device="cuda").half()),
        )
        assert 0.9 < m.roofline_share <= 1.05 and m.bound == "copy"

    def test_stream_kernels_reach_torchs_copy(self, own, monkeypatch):
        from kernels import stream

        monkeypatch.setenv("LABKIT_COMMIT", "test")
        n = 2**29
        x, y, out = (torch.empty(n, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(3))
        best = measure("test/torch", lambda: out.copy_(x), stream.COPY.cost(x)).gb_s
        copy = measure("test/copy", lambda: stream.copy_triton(x, out=out), stream.COPY.cost(x)).gb_s
        triad = measure(
            "test/triad", lambda: stream.triad_triton(x, y, 2.0, out=out), stream.TRIAD.cost(x, y, 2.0)
        ).gb_s
        read = measure("test/read", lambda: stream.read_triton(x), stream.READ.cost(x), ceiling="read").gb_s
        assert copy >= 0.97 * best and triad >= 0.97 * best and read >= 0.97 * best

    def test_provenance_is_whole_and_recordings_can_be_written(self, own, monkeypatch):
        monkeypatch.setenv("LABKIT_COMMIT", "test")
        module._session.cache_clear()
        target = own / "new.json"
        monkeypatch.setenv("LABKIT_RECORD", str(target))
        x = torch.randn(2**24, device="cuda")
        m = measure("test/mul", lambda: x.mul_(1.0), Cost(2 * x.nbytes, x.numel()))
        assert recording.load(target).measurement("test/mul").us == pytest.approx(m.us, abs=1e-4)

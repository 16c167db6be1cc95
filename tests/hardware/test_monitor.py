"""The monitor samples what is there, says once what is not, and decodes every clock reason."""

from __future__ import annotations

import sys
import time

import pytest

from labkit.errors import LabError
from labkit.hardware import Monitor
from labkit.hardware.monitor import CLOCK_REASONS, SLOWING, Sample, clock_reasons
from tests.hardware.fakes import FakeNvml, NVMLError


def run(nvml, seconds=0.0, interval_s=0.005) -> Monitor:
    with Monitor(nvml=nvml, interval_s=interval_s) as monitor:
        time.sleep(seconds)
    return monitor


def test_units():
    monitor = run(FakeNvml())
    first = monitor.samples[0]
    assert (first.power_w, first.temperature_c, first.sm_mhz, first.memory_mhz) == (350.0, 45, 1755, 3201)
    assert (first.utilisation_percent, first.memory_used_bytes, first.energy_j) == (97, 754_820_096, 1000.0)
    assert first.reasons == ("software power cap",) and monitor.message is None


def test_samples_at_the_interval_and_at_both_ends():
    assert len(run(FakeNvml(), seconds=0.0, interval_s=60).samples) == 2
    monitor = run(FakeNvml(), seconds=0.1, interval_s=0.01)
    assert 5 <= len(monitor.samples) <= 14
    times = [s.t_s for s in monitor.samples]
    assert times == sorted(times) and times[-1] >= 0.1


def test_a_slow_counter_does_not_make_samples_pile_up():
    def slow():
        time.sleep(0.03)
        return 300_000

    assert len(run(FakeNvml(nvmlDeviceGetPowerUsage=slow), seconds=0.12, interval_s=0.001).samples) <= 7


def test_energy_comes_from_the_counter():
    reading = iter(range(5_000_000, 9_000_000, 1_500))  # 1.5 J more at every reading
    monitor = run(FakeNvml(nvmlDeviceGetTotalEnergyConsumption=lambda: next(reading)), seconds=0.03)
    summary = monitor.summary()
    assert summary.energy_source == "counter"
    assert summary.energy_j == pytest.approx(1.5 * (len(monitor.samples) - 1))


def test_energy_is_integrated_from_power_where_the_counter_is_missing():
    monitor = run(FakeNvml(broken=["nvmlDeviceGetTotalEnergyConsumption"]))
    monitor.samples = [Sample(0.0, power_w=100.0), Sample(1.0, power_w=300.0), Sample(1.5), Sample(3.0, power_w=300.0)]
    summary = monitor.summary()
    assert summary.energy_source == "integrated power"
    assert summary.energy_j == pytest.approx(200.0 + 600.0)  # trapezoids over [0, 1] and [1, 3]


def test_no_energy_without_counter_and_power():
    monitor = run(FakeNvml(absent=["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"]))
    summary = monitor.summary()
    assert summary.energy_j is None and summary.energy_source is None and summary.mean_power_w is None
    assert monitor.message == "This GPU does not report: power, energy counter."


@pytest.mark.parametrize("how", ["broken", "absent"])
@pytest.mark.parametrize(
    "function, word",
    [
        ("nvmlDeviceGetPowerUsage", "power"),
        ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetMemoryInfo", "memory used"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clock event reasons"),
    ],
)
def test_one_missing_counter_is_said_once_and_the_rest_is_read(how, function, word):
    monitor = run(FakeNvml(**{how: [function]}), seconds=0.02)
    assert monitor.message == f"This GPU does not report: {word}."
    assert all(s.sm_mhz == 1755 for s in monitor.samples)
    assert str(monitor.summary())


def test_reasons_under_their_older_name():
    nvml = FakeNvml(absent=["nvmlDeviceGetCurrentClocksEventReasons"], nvmlDeviceGetCurrentClocksThrottleReasons=0x60)
    assert run(nvml).samples[0].reasons == ("software thermal slowdown", "hardware thermal slowdown")


def test_every_bit_has_its_word():
    """The bits as pynvml names them, in its own order."""
    names = {
        "GpuIdle": "idle",
        "ApplicationsClocksSetting": "application clocks setting",
        "SwPowerCap": "software power cap",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "software thermal slowdown",
        "HwThermalSlowdown": "hardware thermal slowdown",
        "HwPowerBrakeSlowdown": "hardware power brake",
        "DisplayClockSetting": "display clock setting",
    }
    pynvml = pytest.importorskip("pynvml")
    for name, word in names.items():
        assert clock_reasons(getattr(pynvml, f"nvmlClocksEventReason{name}")) == (word,)
    assert clock_reasons(0) == ()
    everything = sum(CLOCK_REASONS)
    assert clock_reasons(everything) == tuple(CLOCK_REASONS.values()) and everything == 0x7FF
    assert clock_reasons(0x804) == ("software power cap", "unknown reason 0x800")
    assert {"idle", "application clocks setting", "display clock setting"}.isdisjoint(SLOWING)


def test_summary_counts_slowed_samples_and_lists_reasons():
    monitor = run(FakeNvml())
    monitor.samples = [
        Sample(0.0, power_w=100.0, temperature_c=40, sm_mhz=1980, reasons=("idle",)),
        Sample(1.0, power_w=700.0, temperature_c=71, sm_mhz=1410, reasons=("software power cap",)),
        Sample(2.0, power_w=700.0, temperature_c=70, sm_mhz=1500, reasons=("software power cap", "sync boost")),
        Sample(3.0, power_w=500.0, temperature_c=66, sm_mhz=1980, reasons=()),
    ]
    summary = monitor.summary()
    assert summary.slowed_share == 0.5 and summary.reasons == ("idle", "software power cap", "sync boost")
    assert (summary.mean_power_w, summary.max_power_w, summary.max_temperature_c) == (500.0, 700.0, 71)
    assert (summary.min_sm_mhz, summary.mean_sm_mhz, summary.max_sm_mhz) == (1410, 1717.5, 1980)
    assert "slowed 50% of samples" in str(summary) and "4 samples in 3.0 s" in str(summary)


@pytest.mark.parametrize("reason", ["nvml", "binding", "gpu"])
def test_without_nvml_one_message_and_no_exception(reason, monkeypatch):
    if reason == "binding":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monitor, words = run(None), "pip install nvidia-ml-py"
    elif reason == "nvml":
        monitor, words = run(FakeNvml(start_error=NVMLError("Driver Not Loaded"))), "Driver Not Loaded"
    else:
        monitor, words = run(FakeNvml(uuids=())), "no GPU 0"
    assert monitor.samples == [] and words in monitor.message and monitor.message.count(".") <= 2
    assert str(monitor.summary()) == "0 samples in 0.0 s: no counter could be read"


def test_nvml_is_closed_and_the_thread_ends_even_if_the_work_fails():
    nvml = FakeNvml()
    with pytest.raises(ZeroDivisionError), Monitor(nvml=nvml, interval_s=0.001) as monitor:
        assert nvml.opened == 1
        1 / 0  # noqa: B018
    assert nvml.opened == 0 and len(monitor.samples) >= 2 and monitor._thread is None


def test_can_be_used_again():
    monitor = run(FakeNvml())
    with monitor:
        assert len(monitor.samples) >= 1
    assert monitor.samples[0].t_s < 0.05


def test_a_gpu_that_disappears_midway_leaves_gaps_not_errors():
    nvml = FakeNvml()
    with Monitor(nvml=nvml, interval_s=0.002) as monitor:
        nvml.broken.add("nvmlDeviceGetPowerUsage")
        time.sleep(0.02)
    assert monitor.samples[0].power_w == 350.0 and monitor.samples[-1].power_w is None


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_bad_interval(interval):
    with pytest.raises(LabError, match="interval_s"):
        Monitor(interval_s=interval)

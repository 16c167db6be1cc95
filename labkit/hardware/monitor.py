"""What the GPU does while a kernel runs: power, temperature, clocks and the reasons why clocks fell, through NVML."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields

from labkit.errors import LabError
from labkit.hardware.nvml import open_device

# nvml.h, nvmlClocksEventReason*. The bits are part of NVML's interface and the same in every version.
CLOCK_REASONS = {
    0x001: "idle",
    0x002: "application clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability voltage limit",
}
# The reasons that take speed away from a busy GPU; idling and a clock somebody chose do not count.
SLOWING = frozenset(CLOCK_REASONS.values()) - {"idle", "application clocks setting", "display clock setting"}


def clock_reasons(mask: int) -> tuple[str, ...]:
    """The set bits in words, lowest first; an unknown bit reads "unknown reason 0x...". 0: nothing holds the clock."""
    words = [word for bit, word in CLOCK_REASONS.items() if mask & bit]
    rest = mask & ~sum(CLOCK_REASONS)
    return (*words, *([f"unknown reason {rest:#x}"] if rest else []))


@dataclass(frozen=True)
class Sample:
    """One reading. ``t_s``: seconds since the monitor started. ``None``: this GPU has no such counter."""

    t_s: float
    power_w: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    utilisation_percent: float | None = None  # share of time in which some kernel ran: no measure of how well
    memory_used_bytes: int | None = None
    energy_j: float | None = None  # since the driver was loaded
    reasons: tuple[str, ...] | None = None


# The counter behind each field of Sample, as a learner would call it.
_COUNTERS = {
    "power_w": "power",
    "temperature_c": "temperature",
    "sm_mhz": "SM clock",
    "memory_mhz": "memory clock",
    "utilisation_percent": "utilisation",
    "memory_used_bytes": "memory used",
    "energy_j": "energy counter",
    "reasons": "clock event reasons",
}


@dataclass(frozen=True)
class Summary:
    """Over the samples of one run. ``energy_source``: "counter", "integrated power" or None. Lists are sorted."""

    seconds: float
    samples: int
    mean_power_w: float | None = None
    max_power_w: float | None = None
    max_temperature_c: float | None = None
    min_sm_mhz: float | None = None
    mean_sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    mean_utilisation_percent: float | None = None
    max_memory_used_bytes: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    reasons: tuple[str, ...] = ()
    slowed_share: float | None = None

    def __str__(self) -> str:
        forms = [
            ("power", self.mean_power_w, "{:.0f} W mean"),
            ("power", self.max_power_w, "{:.0f} W max"),
            ("temperature", self.max_temperature_c, "{:.0f} C max"),
            ("SM clock", self.min_sm_mhz, "{:.0f} MHz min"),
            ("SM clock", self.mean_sm_mhz, "{:.0f} MHz mean"),
            ("energy", self.energy_j, f"{{:.0f}} J ({self.energy_source})"),
            ("slowed", self.slowed_share, "{:.0%} of samples"),
        ]
        known = [f"{name} {form.format(value)}" for name, value, form in forms if value is not None]
        why = f"; clock reasons: {', '.join(self.reasons)}" if self.reasons else ""
        return f"{self.samples} samples in {self.seconds:.1f} s: {', '.join(known) or 'no counter could be read'}{why}"


class Monitor:
    """Samples NVML in a thread while the ``with`` block runs.

        with Monitor(interval_s=0.1) as monitor:
            work()
        print(monitor.summary())

    ``message`` is None, or one sentence that says what could not be read; nothing here raises for a missing counter.
    The first sample is taken on entry and the last on exit, so that a short block has two.
    """

    def __init__(self, index: int = 0, interval_s: float = 0.1, nvml=None, uuid=None):
        if not interval_s > 0:
            raise LabError(
                f"Monitor: interval_s is {interval_s}; it must be a positive number of seconds, such as 0.1."
            )
        self.index, self.interval_s = index, interval_s
        self.samples: list[Sample] = []
        self.message: str | None = None
        self._nvml, self._uuid = nvml, uuid
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        self.samples, self.message = [], None
        self._stop.clear()
        self._gpu = open_device(self.index, nvml=self._nvml, uuid=self._uuid if self._uuid else self._cuda_uuid())
        self._start = time.perf_counter()
        if self._gpu.problem:
            self.message = f"No samples: {self._gpu.problem}"
            return self
        self.samples.append(self._read())
        missing = [word for field, word in _COUNTERS.items() if getattr(self.samples[0], field) is None]
        if missing:
            self.message = f"This GPU does not report: {', '.join(missing)}."
        self._thread = threading.Thread(target=self._run, name="nvml-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.samples.append(self._read())
        self._gpu.close()

    def _cuda_uuid(self):
        """CUDA's device of this index may be another one of NVML's; ask torch if it already holds a GPU."""
        if self._nvml is not None:
            return None
        import sys

        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return None
        return getattr(torch.cuda.get_device_properties(self.index), "uuid", None)

    def _run(self) -> None:
        due = self._start + self.interval_s
        while not self._stop.wait(max(0.0, due - time.perf_counter())):
            self.samples.append(self._read())
            # A slow read skips its missed ticks: catching up would sample the same moment twice.
            now = time.perf_counter()
            due += self.interval_s * (1 + max(0, int((now - due) / self.interval_s)))

    def _read(self) -> Sample:
        ask = self._gpu.ask
        power_mw = ask("nvmlDeviceGetPowerUsage")
        energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption")
        mask = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # the name before driver 535
            mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        rates = ask("nvmlDeviceGetUtilizationRates")
        memory = ask("nvmlDeviceGetMemoryInfo")
        return Sample(
            t_s=time.perf_counter() - self._start,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            sm_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            memory_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
            utilisation_percent=None if rates is None else rates.gpu,
            memory_used_bytes=None if memory is None else memory.used,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            reasons=None if mask is None else clock_reasons(mask),
        )

    def summary(self) -> Summary:
        """Means, extremes, energy and the clock reasons seen; every figure None that no sample holds."""
        samples = list(self.samples)
        if not samples:
            return Summary(seconds=0.0, samples=0)
        columns = {f.name: [v for s in samples if (v := getattr(s, f.name)) is not None] for f in fields(Sample)}
        energy, source = _energy(samples)
        seen = columns["reasons"]
        return Summary(
            seconds=samples[-1].t_s - samples[0].t_s,
            samples=len(samples),
            mean_power_w=_mean(columns["power_w"]),
            max_power_w=max(columns["power_w"], default=None),
            max_temperature_c=max(columns["temperature_c"], default=None),
            min_sm_mhz=min(columns["sm_mhz"], default=None),
            mean_sm_mhz=_mean(columns["sm_mhz"]),
            max_sm_mhz=max(columns["sm_mhz"], default=None),
            mean_utilisation_percent=_mean(columns["utilisation_percent"]),
            max_memory_used_bytes=max(columns["memory_used_bytes"], default=None),
            energy_j=energy,
            energy_source=source,
            reasons=tuple(sorted({word for words in seen for word in words})),
            slowed_share=sum(not SLOWING.isdisjoint(words) for words in seen) / len(seen) if seen else None,
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _energy(samples: list[Sample]) -> tuple[float | None, str | None]:
    """Joules between first and last sample: the counter's difference, else power integrated by the trapezoid rule."""
    first, last = samples[0].energy_j, samples[-1].energy_j
    if first is not None and last is not None:
        return last - first, "counter"
    powers = [(s.t_s, s.power_w) for s in samples if s.power_w is not None]
    if len(powers) < 2:
        return None, None
    pairs = zip(powers, powers[1:], strict=False)
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in pairs), "integrated power"

"""A simulated GPU with its own clocks, and a recording to replay."""

from __future__ import annotations

from labkit.measure.measurement import Ceilings, Measurement


class FakeGpu:
    """Host and device each have a clock in microseconds; the device works through a queue, the host runs ahead of it.

    ``cold_us``: what the first call after a flush takes longer on the device.
    """

    name = "fake"
    l2_bytes = 60 * 2**20

    def __init__(self):
        self.host = self.device = 0.0
        self.cold = False
        self.flushes = self.spins = self.captured = 0
        self.recording = False

    def work(self, launch_us: float, kernel_us: float, cold_us: float = 0.0):
        """A callable that takes the host ``launch_us`` and the device ``kernel_us``."""

        def fn():
            if self.recording:
                self.captured += 1
                self.graph_us += kernel_us
                return
            self.host += launch_us
            self._queue(kernel_us + (cold_us if self.cold else 0.0))
            self.cold = False

        return fn

    def _queue(self, us: float) -> None:
        self.device = max(self.device, self.host) + us

    def now_us(self):
        return self.host

    def free_bytes(self):
        return 2**34

    def sync(self):
        self.host = max(self.host, self.device) + 5.0

    def flush(self):
        self.flushes += 1
        self.host += 3.0
        self._queue(60.0)
        self.cold = True

    def spin(self, us):
        self.spins += 1
        self.host += 3.0
        self._queue(us)

    def mark(self):
        self.host += 1.0
        self._queue(0.0)
        return self.device

    def reached(self, mark):
        return mark <= self.host

    def between_us(self, start, end):
        return end - start

    def capture(self, calls):
        self.recording, self.graph_us = True, 0.0
        for call in calls:
            call()
        self.recording = False
        total = self.graph_us

        def replay():
            self.host += 8.0
            self._queue(total)

        return replay


WHO = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "clocks_mhz": {"sm": 1980, "mem": 3201, "max_sm": 1980},
    "power_limit_w": 700.0,
    "date": "2026-11-30",
    "commit": "0123abc",
}
CEILINGS = Ceilings(copy_gb_s=4000.0, read_gb_s=4500.0, matmul_tflop_s=700.0)


def result(id="01/copy/1GiB", us=500.0, bytes=10**9, flops=0, **fields) -> Measurement:
    """A measurement as it would come from a GPU."""
    values = dict(us_low=us * 0.99, us_high=us * 1.01, repeats=50, method="events", source="live", ceiling="copy")
    return Measurement(id=id, us=us, bytes=bytes, flops=flops, ceilings=CEILINGS, **{**values, **fields})

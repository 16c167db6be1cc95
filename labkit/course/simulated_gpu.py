"""A GPU's queue in a few lines: enough to show what a host clock sees, and to grade timers without a GPU.

The host pays ``launch_us`` to put a kernel into the queue and goes on; the device runs the queue in order,
``kernel_us`` each. The very first launch also keeps the host for ``first_us``, as compilation and module loading do.
"""

from __future__ import annotations


class SimulatedGPU:
    """All times in microseconds of simulated time; nothing is slept."""

    def __init__(self, kernel_us: float, launch_us: float = 5.0, first_us: float = 0.0):
        self.kernel_us, self.launch_us, self.first_us = kernel_us, launch_us, first_us
        self._host = 0.0  # the host's clock
        self._idle_at = 0.0  # when the device will have finished what is queued
        self.launches: list[tuple[float, float, float]] = []  # (host start, device start, device end)

    def now(self) -> float:
        """Read the host's clock."""
        return self._host

    def launch(self) -> None:
        """Queue one kernel; returns as soon as it is queued."""
        queued = self._host
        self._host += self.launch_us + (0.0 if self.launches else self.first_us)
        start = max(self._host, self._idle_at)
        self._idle_at = start + self.kernel_us
        self.launches.append((queued, start, self._idle_at))

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._host = max(self._host, self._idle_at)

"""The machine around the GPU, behind one class, so that a test can put another machine in its place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import sys
from functools import cached_property
from pathlib import Path

from labkit.hardware.nvml import open_device
from labkit.paths import home


class Machine:
    """Questions to this machine and its Python. Each may fail in its own way; whoever asks decides what that means."""

    python = sys.version_info
    home = property(lambda self: home())
    recordings = Path(__file__).parents[1] / "recordings"
    ours = Path(__file__).parents[2] / "kernels"

    def module(self, name: str):
        return importlib.import_module(name)

    def origin(self, name: str) -> Path | None:
        """Where ``import name`` finds it, without importing it."""
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        return Path(places[0]) if places else None

    @cached_property
    def gpu(self):
        return open_device(0)

    def torch_sees_gpu(self) -> bool:
        return self.module("torch").cuda.is_available()

    def profiler_parameters(self) -> str | None:
        path = Path("/proc/driver/nvidia/params")
        return path.read_text() if path.is_file() else None

    def is_root(self) -> bool:
        return hasattr(os, "geteuid") and os.geteuid() == 0

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def free_disk_bytes(self, path: Path) -> int:
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def memory_bytes(self) -> tuple[int, int]:
        """Available and total."""
        memory = self.module("psutil").virtual_memory()
        return memory.available, memory.total

    def port_is_free(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

"""Weights from safetensors files to the device, in four ways, and what each costs in time and in host memory.

The bytes of a tensor lie in the file as they will lie on the device (see safetensors_file.py), so there is nothing to
parse, and the only question is how they travel:

    read     the whole file is read into memory, and each tensor is copied out of it: a second copy of a file's weights
             lies in host memory while they are copied
    mmap     the file is mapped, and each tensor is copied out of the mapping: its pages come when they are touched
    pinned   mapped too, and copied in chunks through two page-locked buffers. A GPU fetches from page-locked memory by
             itself, so one chunk crosses the bus while the next is copied into the other buffer. From ordinary memory
             the driver copies into such a buffer of its own first, one after the other
    direct   safetensors' own loader makes the tensors on the device

All give the same tensors, each with memory of its own.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from labkit.engine.safetensors_file import map_file, places, tensor_at, weight_files
from labkit.errors import LabError
from labkit.quant.checkpoint import enter

WAYS = ("read", "mmap", "pinned", "direct")
CHUNK_BYTES = 16 << 20  # of each of the two buffers: long enough for a copy at full rate, short enough to start soon


class Stager:
    """Copies host tensors to a device through two buffers in turn. On CUDA they are page-locked and the copies out of
    them run while the host fills the other one; elsewhere they are ordinary memory, and nothing overlaps."""

    def __init__(self, device: str | torch.device, chunk_bytes: int = CHUNK_BYTES):
        self.device = torch.device(device)
        self.pinned = self.device.type == "cuda"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self.pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers] if self.pinned else []
        self._turn = 0

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """source: on the host; out: of its shape, on the device; converted there if its dtype is another. The host may
        change ``source`` at once; ``out`` is there for work of the current stream."""
        as_it_is = out.dtype == source.dtype and out.is_contiguous()
        target = out if as_it_is else torch.empty(source.shape, dtype=source.dtype, device=self.device)
        there, here = (t.reshape(-1).view(torch.uint8) for t in (target, source))
        for start in range(0, here.numel(), len(self._buffers[0])):
            self._send(here[start : start + len(self._buffers[0])], there[start : start + len(self._buffers[0])])
        if not as_it_is:
            out.copy_(target)

    def _send(self, here: torch.Tensor, there: torch.Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        if self.pinned:
            self._sent[turn].synchronize()  # the copy out of this buffer, two chunks ago, must have ended
        buffer = self._buffers[turn][: len(here)]
        buffer.copy_(here)
        there.copy_(buffer, non_blocking=True)
        if self.pinned:
            self._sent[turn].record(torch.cuda.current_stream(self.device))


def load_tensors(folder: str | Path, how: str = "mmap", device: str | torch.device = "cpu", say=None) -> dict:
    """{name: tensor} of a folder's safetensors files, on ``device``, in one of the four WAYS.

    say: gets a line where a way cannot be gone as it is meant (pinned, without CUDA). Raises LabError for an unknown
    way, a device that is not there, a folder or file that is missing, and a file that is cut short or damaged, by name,
    before anything is loaded.
    """
    if how not in WAYS:
        raise LabError(f"there is no way {how!r} of loading weights; there are {', '.join(WAYS)}")
    device = as_device(device)
    files, owners = {path: places(path) for path in weight_files(folder)}, {}
    for path, held in files.items():
        enter(owners, path, held)
    stager = None
    if how == "pinned":
        stager = Stager(device)
        if not stager.pinned and say is not None:
            say(not_pinned(device))
    tensors: dict[str, torch.Tensor] = {}
    for path, held in files.items():
        if how == "direct":
            tensors |= _direct(path, device)
            continue
        data = _read(path) if how == "read" else map_file(path)
        for name, place in held.items():
            source = tensor_at(data, place)
            tensors[name] = out = torch.empty(place.shape, dtype=place.dtype, device=device)
            if stager is None:
                out.copy_(source)
            else:
                stager.copy(source, out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tensors


def as_device(device: str | torch.device) -> torch.device:
    """Raises LabError for what is no device, a device that is not there, and kinds that this engine does not run on."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LabError(f"{device!r} is no device; use 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LabError("device 'cuda' was asked for and torch finds no CUDA GPU; use device='cpu'")
    if device.type not in ("cpu", "cuda"):
        raise LabError(f"device {str(device)!r} is not supported; use 'cpu' or 'cuda'")
    return device


def not_pinned(device: torch.device) -> str:
    return f"on {device} there is no page-locked memory to copy from: the two buffers are ordinary memory"


def _read(path: Path) -> torch.Tensor:
    data = torch.empty(path.stat().st_size, dtype=torch.uint8)
    left = memoryview(data.numpy())
    with open(path, "rb", buffering=0) as file:
        while len(left):
            got = file.readinto(left)  # the system reads at most 2 GiB a call
            if not got:
                raise LabError(f"{path} became shorter while it was read")
            left = left[got:]
    return data


def _direct(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(path, device=str(device))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise LabError(f"{path} cannot be loaded to {device} by safetensors ({error})") from error
    if device.type != "cpu":
        return tensors
    # On a CPU it may hand out views of the mapped file: pages that are read when the model first runs, and a model
    # that changes if the file does. A copy is what the other ways give.
    return {name: tensor.clone() for name, tensor in tensors.items()}


# ---- what a way costs


@dataclass(frozen=True)
class Loading:
    """What it took to load a folder's weights, in a process of its own. Peaks are bytes of host memory beyond what the
    process held before.

    peak_host_bytes: of all memory that is resident (VmHWM). What counts in it: pages of a mapped file count while they
    are mapped (peak_file_bytes), though they are the page cache's, are shared with all who map the file, and are taken
    back when memory is short. Memory of its own (peak_anon_bytes) is not. Page-locked memory is counted by most
    drivers as shared (peak_shared_bytes). On a CPU the tensors themselves are memory of the process.
    note: what was not as asked for, or "".
    """

    how: str
    device: str
    seconds: float
    bytes: int  # of the tensors
    peak_host_bytes: int
    peak_anon_bytes: int
    peak_file_bytes: int
    peak_shared_bytes: int
    note: str = ""

    @property
    def gb_s(self) -> float:
        return self.bytes / self.seconds / 1e9


RESIDENT = {"RssAnon": "peak_anon_bytes", "RssFile": "peak_file_bytes", "RssShmem": "peak_shared_bytes"}
SAMPLE_S = 0.001


def measure_loading(
    folder: str | Path, how: str = "mmap", device: str | torch.device = "cpu", cold: bool = False
) -> Loading:
    """Load a folder's weights in a process of its own and say what it took.

    The process has made its imports, and on CUDA its context, before the clock starts. cold: ask the system first to
    drop the files' pages from its cache, so that they come from the disk; where others use the files it does not.
    Raises LabError as load_tensors does, and where there is no /proc to read (on anything but Linux).
    """
    if not Path("/proc/self/status").exists():
        raise LabError("the memory of a process is read from /proc, which is there on Linux only")
    if how not in WAYS:
        raise LabError(f"there is no way {how!r} of loading weights; there are {', '.join(WAYS)}")
    for path in weight_files(folder):
        places(path)
        if cold:
            _forget(path)
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit.engine.staging", str(folder), how, str(device)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    with process:
        if process.stdout.readline():  # it is ready
            before = peaks = resident(process.pid)
            process.stdin.write("go\n")
            process.stdin.flush()
            # From outside: a thread of the process itself would wait for Python's lock while tensors are made.
            while not select.select([process.stdout], [], [], SAMPLE_S)[0]:
                peaks = {kind: max(peaks[kind], now) for kind, now in resident(process.pid).items()}
        last = process.stdout.readline()
        if last:
            peaks = {kind: max(peaks[kind], now) for kind, now in resident(process.pid).items()}
        _, said = process.communicate()
    if not last or process.returncode:
        raise LabError(f"loading {folder} by {how!r} to {device} failed: {(said.strip().splitlines() or ['?'])[-1]}")
    more = {name: peaks[kind] - before[kind] for kind, name in RESIDENT.items()}
    return Loading(how, str(device), **json.loads(last), **more)


def resident(pid: int | str) -> dict[str, int]:
    """Bytes of a process that are in memory now: of its own, of mapped files, shared."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {kind: 1024 * int(found[1]) if (found := re.search(rf"{kind}:\s+(\d+)", text)) else 0 for kind in RESIDENT}


def _forget(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _high_water() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def _child(folder: str, how: str, device: str) -> None:
    """The measured process: a line when it is ready, one with the figures when it has loaded, then it waits for the
    end of its input, since a process that has ended has no memory to look at."""
    notes: list[str] = []
    torch.zeros(1, device=device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from what is held now
    except OSError:
        pass  # it stays where the imports left it, and a peak below that shows as nothing
    print("ready", flush=True)
    sys.stdin.readline()
    before, start = _high_water(), time.perf_counter()
    tensors = load_tensors(folder, how, device, notes.append)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "bytes": sum(t.nbytes for t in tensors.values()), "note": "; ".join(notes)}
    print(json.dumps(found | {"peak_host_bytes": _high_water() - before}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _child(*sys.argv[1:])

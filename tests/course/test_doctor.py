"""The doctor on machines that lack one thing each: the right status, the way out, and never an exception."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.course import doctor as module
from labkit.course.doctor import doctor, print_doctor
from labkit.engine.fetch import BUILTIN
from labkit.hardware.host import Machine
from labkit.hardware.nvml import NvmlDevice, open_device
from tests.hardware.fakes import FakeNvml

GIB = 2**30
NO_PTXAS = SimpleNamespace(__version__="3.6.0", __file__="/x/__init__.py")


def built(version, cuda):
    """A torch module of that version, built for that CUDA."""
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))


class Laptop(Machine):
    """A healthy machine without a GPU; tests change one attribute at a time."""

    python = (3, 12, 4)
    gpu = NvmlDevice(problem="NVML does not start (Driver Not Loaded): there is no NVIDIA driver here.")
    cuda = False
    absent: tuple[str, ...] = ()
    profiler = None
    root = False
    programs = ("ncu",)
    disk, ram, port = 80 * GIB, (12 * GIB, 16 * GIB), True
    kernels = Machine.ours / "__init__.py"

    def __init__(self, folder: Path):
        self.folder = folder
        self.recordings = folder / "recordings"
        self.recordings.mkdir()
        self.torch = built("2.13.0+cpu", None)
        tool = folder / "triton/backends/nvidia/bin/ptxas"
        tool.parent.mkdir(parents=True)
        tool.touch(mode=0o755)
        self.triton = SimpleNamespace(__version__="3.7.1", __file__=str(folder / "triton/__init__.py"))
        self.record("nvidia-h200", gpu="NVIDIA H200", driver="580.65.06", date="2026-01-02")
        (folder / "models").mkdir()
        with open(folder / "models" / BUILTIN["smollm2-135m"].file, "wb") as file:
            file.truncate(BUILTIN["smollm2-135m"].size)  # sparse: right size, wrong content

    def record(self, name, **provenance):
        (self.recordings / f"{name}.json").write_text(json.dumps({"provenance": provenance}))

    @property
    def home(self):
        return self.folder

    def module(self, name):
        if name in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return {"torch": self.torch, "triton": self.triton}[name]

    def origin(self, name):
        if name == "kernels":
            return self.kernels
        return None if name in self.absent else Path(f"/site/{name}/__init__.py")

    def torch_sees_gpu(self):
        self.module("torch")
        return self.cuda

    def profiler_parameters(self):
        return self.profiler

    def is_root(self):
        return self.root

    def which(self, program):
        return program if program in self.programs else None

    def free_disk_bytes(self, path):
        return self.disk

    def memory_bytes(self):
        return self.ram

    def port_is_free(self, port):
        return self.port


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    monkeypatch.delenv("LABKIT_TIER", raising=False)
    monkeypatch.delenv("LABKIT_RECORDED_GPU", raising=False)
    return Laptop(tmp_path)


@pytest.fixture
def workstation(laptop):
    laptop.gpu = open_device(0, nvml=FakeNvml())
    laptop.cuda = True
    laptop.torch = built("2.11.0+cu130", "13.0")
    laptop.profiler = "RmProfilingAdminOnly: 0\n"
    return laptop


def line(machine, name, full=False):
    return next(found for found in doctor(full, machine) if found.name == name)


def test_healthy_machines_have_nothing_to_complain_of(laptop):
    assert {found.status for found in doctor(machine=laptop)} == {"ok"}


def test_healthy_workstation(workstation):
    assert {found.status for found in doctor(machine=workstation)} == {"ok"}
    assert line(workstation, "GPU").finding == "NVIDIA H200"
    assert line(workstation, "driver").finding == "580.65.06, supports CUDA 13.0"
    assert line(workstation, "GPU memory").finding == "139.7 of 140.4 GiB free"


def test_no_gpu_is_fine_and_said_plainly(laptop, capsys):
    assert print_doctor(machine=laptop) == 0
    out = capsys.readouterr().out
    assert "none, and none is needed" in out
    assert (
        out.splitlines()[-1]
        == "The labs can run here: recorded tier (no GPU: interpreter, replayed measurements); 0 warnings."
    )


def test_live_summary(workstation, capsys):
    assert print_doctor(machine=workstation) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The labs can run here: live tier (GPU); 0 warnings."


@pytest.mark.parametrize(
    "name, change, status, words",
    [
        ("Python", {"python": (3, 10, 14)}, "missing", "3.10.14; 3.11 or newer"),
        ("torch", {"absent": ("torch",)}, "missing", "No module named 'torch'"),
        (
            "torch",
            {"torch": built("2.6.0", "12.4")},
            "warn",
            "2.6.0",
        ),
        ("Triton", {"absent": ("triton",)}, "missing", "No module named 'triton'"),
        (
            "Triton",
            {"triton": NO_PTXAS},
            "warn",
            "without ptxas",
        ),
        ("Triton", {"triton": SimpleNamespace(__version__="3.2.0", __file__="/x/__init__.py")}, "warn", "from 3.6"),
        ("kernels package", {"kernels": None}, "missing", "not found"),
        ("kernels package", {"kernels": Path("/site/kernels/__init__.py")}, "missing", "/site/kernels"),
        ("disk", {"disk": GIB // 2}, "warn", "0.5 GiB free"),
        ("memory", {"ram": (GIB, 16 * GIB)}, "warn", "1.0 of 16.0 GiB"),
        ("Jupyter", {"absent": ("ipywidgets", "jupyterlab")}, "missing", "jupyterlab, ipywidgets"),
        ("port", {"port": False}, "warn", "8888 is taken"),
    ],
)
def test_one_thing_is_wrong(laptop, name, change, status, words, capsys):
    for attribute, value in change.items():
        setattr(laptop, attribute, value)
    found = line(laptop, name)
    assert found.status == status and words in found.finding and found.todo
    assert print_doctor(machine=laptop) == (1 if status == "missing" else 0)
    if status == "missing":
        assert name in capsys.readouterr().out.splitlines()[-1]


def test_namespace_package_is_seen_too(laptop):
    laptop.kernels = Path("/site/kernels")
    assert line(laptop, "kernels package").status == "missing"


def test_gpu_that_torch_cannot_use(workstation):
    workstation.cuda = False
    assert line(workstation, "GPU").status == "warn" and "torch cannot use it" in line(workstation, "GPU").finding
    workstation.torch = built("2.13.0+cpu", None)
    assert "torch is a CPU build" in line(workstation, "GPU").finding


def test_gpu_without_nvml(workstation):
    workstation.gpu = NvmlDevice(problem="NVML's Python binding is not installed: pip install nvidia-ml-py.")
    assert "pip install nvidia-ml-py" in line(workstation, "GPU").finding


def test_forced_recorded_tier_is_mentioned(workstation, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_TIER", "recorded")
    assert "stays unused" in line(workstation, "GPU").finding
    print_doctor(machine=workstation)
    assert "recorded tier" in capsys.readouterr().out


def test_a_live_tier_that_cannot_be_is_missing(laptop, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_TIER", "live")
    found = line(laptop, "GPU")
    assert found.status == "missing" and found.finding == "LABKIT_TIER=live asks for a GPU, but none is here"
    assert found.todo.startswith("Unset LABKIT_TIER")
    assert print_doctor(machine=laptop) == 1
    assert "Missing: GPU" in capsys.readouterr().out.splitlines()[-1]


def test_a_live_tier_says_why_the_gpu_cannot_be_used(workstation, monkeypatch):
    monkeypatch.setenv("LABKIT_TIER", "live")
    assert line(workstation, "GPU").status == "ok"
    workstation.cuda = False
    found = line(workstation, "GPU")
    assert found.status == "missing" and "NVIDIA H200 is here, but torch cannot use it" in found.finding
    assert "CUDA_VISIBLE_DEVICES" in found.todo and "Unset LABKIT_TIER" in found.todo


def test_a_tier_that_does_not_exist_is_missing(laptop, monkeypatch):
    monkeypatch.setenv("LABKIT_TIER", "turbo")
    found = line(laptop, "GPU")
    assert found.status == "missing" and "'turbo'" in found.finding and "live or recorded" in found.todo


@pytest.mark.parametrize(
    "number, cuda, status",
    [(13000, "13.0", "ok"), (12040, "13.0", "warn"), (12020, "12.8", "ok"), (13000, "12.8", "ok")],
)
def test_driver_and_cuda(workstation, number, cuda, status):
    """Within a major version a newer toolkit runs on an older driver; across one it does not."""
    workstation.gpu = open_device(0, nvml=FakeNvml(nvmlSystemGetCudaDriverVersion=number))
    workstation.torch.version.cuda = cuda
    assert line(workstation, "driver").status == status


def test_driver_that_hides_its_cuda_version(workstation):
    workstation.gpu = open_device(0, nvml=FakeNvml(broken=["nvmlSystemGetCudaDriverVersion"]))
    assert line(workstation, "driver").status == "warn"


def test_gpu_in_use(workstation):
    memory = SimpleNamespace(total=80 * GIB, free=10 * GIB, used=70 * GIB)
    workstation.gpu = open_device(0, nvml=FakeNvml(nvmlDeviceGetMemoryInfo=memory))
    assert line(workstation, "GPU memory").status == "warn"


@pytest.mark.parametrize(
    "parameters, root, programs, status, words",
    [
        ("RmProfilingAdminOnly: 1\n", False, ("ncu",), "warn", "administrator only; ncu found"),
        ("RmProfilingAdminOnly: 1\n", True, ("ncu",), "ok", "root may read"),
        ("RmProfilingAdminOnly: 0\n", False, ("ncu",), "ok", "every user"),
        ("RmProfilingAdminOnly: 0\n", False, (), "warn", "ncu is not found"),
        ("NVreg_RestrictProfilingToAdminUsers=1\n", False, (), "warn", "administrator only; ncu not found"),
        (None, False, (), "ok", "no driver parameters"),
    ],
)
def test_profiler(workstation, parameters, root, programs, status, words):
    workstation.profiler, workstation.root, workstation.programs = parameters, root, programs
    found = line(workstation, "profiler")
    assert found.status == status and words in found.finding
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.todo) == ("administrator" in words)


class TestModel:
    def file(self, machine):
        return machine.folder / "models" / BUILTIN["smollm2-135m"].file

    def test_absent(self, laptop):
        self.file(laptop).unlink()
        assert line(laptop, "model").status == "missing" and "labkit model smollm2-135m" in line(laptop, "model").todo

    def test_cut_short(self, laptop):
        self.file(laptop).write_bytes(b"GGUF")
        assert "4 bytes, expected 98,362,432" in line(laptop, "model").finding

    def test_altered_content_shows_only_in_full(self, laptop):
        assert line(laptop, "model").status == "ok"
        assert (
            line(laptop, "model", full=True).status == "missing"
            and "altered" in line(laptop, "model", full=True).finding
        )


class TestRecordings:
    def test_none(self, laptop, workstation):
        (laptop.recordings / "nvidia-h200.json").unlink()
        assert line(workstation, "recordings").status == "warn"  # a GPU measures for itself
        laptop.cuda = False
        assert line(laptop, "recordings").status == "missing"

    def test_without_provenance(self, laptop):
        laptop.record("nvidia-h200", gpu="NVIDIA H200", driver="")
        found = line(laptop, "recordings")
        assert found.status == "missing" and "nvidia-h200.json lacks driver, date" in found.finding

    def test_one_that_was_chosen_and_is_not_there(self, laptop, monkeypatch):
        monkeypatch.setenv("LABKIT_RECORDED_GPU", "unknown")
        found = line(laptop, "recordings")
        assert found.status == "missing" and "LABKIT_RECORDED_GPU is 'unknown'" in found.finding
        assert "recordings here: nvidia-h200" in found.finding

    @pytest.mark.parametrize("text", ["{", "[]", '{"provenance": null}'])
    def test_damaged_beside_a_good_one(self, laptop, text):
        (laptop.recordings / "nvidia-l4.json").write_text(text)
        found = line(laptop, "recordings")
        assert found.status == "warn" and "nvidia-l4.json lacks readable content" in found.finding


def test_home_that_cannot_be_written(laptop, monkeypatch):
    monkeypatch.setattr(module.os, "access", lambda path, mode: mode != module.os.W_OK)
    found = line(laptop, "disk")
    assert found.status == "missing" and "is not a writable folder: this user may not write" in found.finding
    assert "LABKIT_HOME" in found.todo


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_home_that_is_a_file(laptop, tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    laptop.folder = file / below
    found = line(laptop, "disk")
    assert found.status == "missing" and f"is not a writable folder: {file} is a file" in found.finding
    assert "LABKIT_HOME" in found.todo and print_doctor(machine=laptop) == 1


def test_home_that_is_relative(laptop, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", "course")
    monkeypatch.setattr(Laptop, "home", Machine.home)
    for name in ("disk", "model"):
        found = line(laptop, name)
        assert found.status == "missing" and "set it to an absolute path" in found.finding


def test_never_raises(laptop, capsys):
    """Every question fails in a different way; each becomes a line, and the table is printed."""

    class Broken(Laptop):
        def __getattribute__(self, name):
            if name in ("python", "home", "recordings", "gpu", "ours"):
                raise OSError(f"{name}\nis broken")
            return object.__getattribute__(self, name)

        def fail(self, *args):
            raise RuntimeError("")

        module = origin = torch_sees_gpu = profiler_parameters = memory_bytes = port_is_free = fail

    machine = object.__new__(Broken)
    lines = doctor(True, machine)
    assert len(lines) == len(module._CHECKS) and all(found.status == "warn" for found in lines)
    assert all("could not be checked: " in found.finding and "\n" not in found.finding for found in lines)
    assert print_doctor(True, machine) == 0
    assert "RuntimeError" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["healthy", "everything missing"])
def test_table_fits_in_a_hundred_columns(laptop, kind, capsys):
    if kind != "healthy":
        laptop.absent = ("torch", "triton", "jupyterlab")
        laptop.kernels = Path("/a/very/long/path" * 12 + "/kernels/__init__.py")
        laptop.python, laptop.disk, laptop.port = (3, 9, 0), 1, False
        (laptop.recordings / "nvidia-h200.json").write_text("{")
    print_doctor(machine=laptop)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(text) <= 100 for text in lines)
    width = 2 + max(len(found.name) for found in doctor(machine=laptop))
    rows = [text for text in lines[:-1] if not text.startswith(" ")]
    assert [text[:9].strip() for text in rows[: len(module._CHECKS)]] == [f.status for f in doctor(machine=laptop)]
    assert all(text[9 + width] != " " and text[8 + width] == " " for text in rows[: len(module._CHECKS)])


class TestThisMachine:
    """The real questions, wherever the tests run."""

    def test_answers(self):
        machine = Machine()
        assert importlib.import_module("kernels").__file__ == str(machine.origin("kernels"))
        assert machine.origin("no_such_package_anywhere") is None
        assert machine.free_disk_bytes(Path("/no/such/folder")) > 0
        available, total = machine.memory_bytes()
        assert 0 < available <= total
        assert machine.port_is_free(0)

    def test_taken_port(self):
        import socket

        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            assert not Machine().port_is_free(server.getsockname()[1])

    def test_has_the_course_s_kernels(self):
        assert line(Machine(), "kernels package").status == "ok"
        assert line(Machine(), "Triton").status == "ok"
        assert line(Machine(), "torch").status == "ok"

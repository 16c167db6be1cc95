"""The GPU's lock between two processes, and within one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from labkit.errors import LabError
from labkit.measure import lock
from labkit.measure.lock import exclusive

HOLD = textwrap.dedent("""
    import sys
    from labkit.measure.lock import exclusive
    with exclusive("GPU-test"):
        print("held", flush=True)
        sys.stdin.readline()
""")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))


@pytest.fixture
def holder(own_home):
    """Another process that holds the lock until its stdin gets a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_waits_and_says_so_once(holder, capsys):
    released = []

    def release():
        released.append(True)
        holder.communicate("\n")

    timer = threading.Timer(0.5, release)
    timer.start()
    with exclusive("GPU-test", timeout_s=20):
        assert released
    timer.join()
    assert capsys.readouterr().out == "waiting: another process is timing on this GPU (GPU-test)\n"


def test_waiting_too_long_says_what_to_do(holder, monkeypatch):
    monkeypatch.setenv("LABKIT_LOCK_TIMEOUT", "0.2")
    with pytest.raises(LabError, match=r"GPU-test for 0\.2 s.*nvidia-smi.*LABKIT_LOCK_TIMEOUT"), exclusive("GPU-test"):
        pytest.fail("two processes held one lock")


def test_another_gpu_does_not_wait(holder, capsys):
    with exclusive("GPU-other", timeout_s=0):
        assert capsys.readouterr().out == ""


def test_a_timing_inside_a_timing_does_not_wait_for_itself(capsys):
    with exclusive("GPU-test"), exclusive("GPU-test", timeout_s=0):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("home", ["a file", "read-only"])
def test_without_a_writable_home_the_lock_lies_among_the_temporary_files(home, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(temporary))
    if home == "a file":
        (tmp_path / "home").touch()
    else:
        monkeypatch.setattr(lock.os, "access", lambda p, mode: p.is_relative_to(temporary))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    with exclusive("GPU-test"):
        assert [p.name for p in temporary.glob("*/*.lock")] == ["GPU-test.lock"]
    monkeypatch.setattr(lock.os, "access", lambda p, mode: False)
    with pytest.raises(LabError, match="Neither .*home/locks nor .* can be written; set LABKIT_HOME"):
        lock.lock_folder()


def test_a_timeout_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("LABKIT_LOCK_TIMEOUT", "soon")
    with pytest.raises(LabError, match="LABKIT_LOCK_TIMEOUT is 'soon'"), exclusive("GPU-test"):
        pass

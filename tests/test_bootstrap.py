"""Set-up says in one line what is missing, and does nothing twice."""

import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from labkit import bootstrap

ROOT = Path(__file__).resolve().parent.parent


def refused(call, *args, **kwargs):
    with pytest.raises(bootstrap.Missing):
        call(*args, **kwargs)


def test_an_old_python_is_named(capsys):
    refused(bootstrap.check_python, (3, 9, 18))
    assert capsys.readouterr().err == (
        "labkit setup: Python 3.11 or newer is needed, this is 3.9.18: "
        "install one and run `make lab PYTHON=python3.12`.\n"
    )


def test_the_file_itself_runs_on_an_old_python():
    """Syntax newer than Python 3.8's would hide that line behind a SyntaxError."""
    import ast

    tree = ast.parse((ROOT / "labkit/bootstrap.py").read_text(), feature_version=(3, 8))
    assert any(getattr(node, "name", "") == "check_python" for node in tree.body)


def test_a_missing_venv_module_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    refused(bootstrap.check_venv_module)
    assert re.search(r"sudo apt install python3\.\d+-venv", capsys.readouterr().err)


def test_too_little_disk_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**10, 9 * 10**9, 10**9))
    refused(bootstrap.check_disk, tmp_path / "not" / "yet", 4.0)
    assert "4 GB of disk are needed under" in (err := capsys.readouterr().err) and "1.0 GB are free" in err


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying ... Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\n"
         "ERROR: No matching distribution found for torch==2.13.0", "cannot be reached"),
        ("ERROR: Could not find a version that satisfies the requirement torch==2.13.0", "is not offered to this pip"),
        ("error: something else", "an installation step failed (error: something else)"),
    ],
)  # fmt: skip
def test_a_failed_install_is_explained(stderr, line):
    assert line in bootstrap.explain(stderr)


def test_a_failing_command_ends_the_set_up_in_one_line(capfd):
    refused(bootstrap.run, sys.executable, "-c", "import sys; sys.exit('No space left on device')")
    assert "labkit setup: the disk is full. What is already installed stays" in capfd.readouterr().err


def test_a_port_that_was_asked_for_and_is_taken_is_refused(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(bootstrap.free_port, str(port))
        assert f"port {port} is taken: choose another with `make lab PORT={port + 1}`" in capsys.readouterr().err
    assert bootstrap.free_port(str(port)) == port


@pytest.mark.parametrize("port", ["abc", "-1", "99999", "0", "80.5"])
def test_a_port_that_is_none_is_named(port, capsys):
    refused(bootstrap.free_port, port)
    assert f"PORT is {port!r}; it must be a number from 1 to 65535" in capsys.readouterr().err


def test_targets_that_need_the_environment_say_so(tmp_path):
    for name in ("Makefile", "labkit"):
        (tmp_path / name).symlink_to(ROOT / name)
    for target in ("doctor", "lint", "gpu-test"):
        done = subprocess.run(["make", target], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode and "run make setup first" in done.stdout, done
    done = subprocess.run(["make", "setup", "PYTHON=python2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "Python 3.11 or newer is needed" in done.stdout


def test_an_environment_of_another_python_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    assert bootstrap.made_by() == ""
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.4\n")
    assert bootstrap.made_by() == "3.12"


def pinned(lines):
    return {m[1].lower(): m[2] for line in lines if (m := re.match(r"([\w.-]+)==(\S+)", line.strip()))}


def test_conda_gets_the_same_pins():
    pip = pinned((ROOT / "constraints.txt").read_text().splitlines())
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = pinned(next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict)))
    assert conda == pip and len(pip) > 50
    assert pip["torch"] == "2.13.0" and pip["triton"] == "3.7.1"


def test_every_pin_takes_the_oldest_python_the_project_takes():
    """A pin that asks for 3.11.5 sends pip on 3.11.2 through every version of everything, for minutes and in vain."""
    pins = pinned((ROOT / "constraints.txt").read_text().splitlines())
    checked = 0
    for name, version in pins.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform
        if found.version == version and (needs := found.metadata["Requires-Python"]):
            assert "3.11.0" in SpecifierSet(needs), f"{name} {version} needs Python {needs}"
            checked += 1
    assert checked > 100


def test_every_dependency_is_pinned_and_says_why():
    text = (ROOT / "pyproject.toml").read_text()
    rows = re.findall(r'^  "([\w-]+)[>=]=?[\d.]+",(.*)$', text, re.M)
    pins = pinned((ROOT / "constraints.txt").read_text().splitlines())
    assert len(rows) > 20
    for name, comment in rows:
        assert name.lower() in pins, f"{name} is not in constraints.txt"
        assert re.match(r"\s+# .{10,}", comment), f"pyproject.toml does not say why {name} is there"


def test_make_help_lists_the_targets():
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("lab", "test", "gpu-test", "record", "doctor", "clean"):
        assert re.search(rf"^{target} +\S", out, re.M), out

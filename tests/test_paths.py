"""Where the course keeps its files: one folder, whatever the working directory."""

from pathlib import Path

import pytest

from labkit.errors import LabError
from labkit.paths import home, replace_file


def test_the_default_and_the_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_HOME", raising=False)
    assert home() == tmp_path / ".cache" / "labkit"
    monkeypatch.setenv("LABKIT_HOME", "~/course")
    assert home() == tmp_path / "course"
    monkeypatch.setenv("LABKIT_HOME", "/data/course")
    assert home() == Path("/data/course")


@pytest.mark.parametrize("relative", ["course", "./course", "../course"])
def test_a_relative_folder_would_follow_the_working_directory_and_is_refused(monkeypatch, tmp_path, relative):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_HOME", relative)
    with pytest.raises(
        LabError, match=f"LABKIT_HOME is '{relative}', .*; set it to an absolute path, such as {tmp_path}"
    ):
        home()


def test_a_user_who_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", "~nobody-of-that-name/course")
    with pytest.raises(LabError, match="~nobody-of-that-name/course cannot be resolved"):
        home()


def test_a_file_is_replaced_as_a_whole(monkeypatch, tmp_path):
    path = tmp_path / "new" / "file.json"
    replace_file(path, "one")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "half\ud800")
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]

import json
import multiprocessing
import os

import pytest

from labkit.course import progress
from labkit.course.predict import number, predict, score
from labkit.errors import LabError
from labkit.measure import Ceilings, Measurement


def test_what_is_kept_comes_back():
    progress.keep("checks", "01.2", {"passed": True})
    assert progress.load()["checks"]["01.2"]["passed"] is True
    assert set(progress.load()) == set(progress.SECTIONS)


@pytest.mark.parametrize("damage", ["{", "[]", '{"checks": 3}', "\0\0"])
def test_a_damaged_file_is_set_aside_not_overwritten(damage, capsys):
    path = progress.progress_file()
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    progress.keep("checks", "01.2", {"passed": True})
    assert progress.load()["checks"]["01.2"]["passed"]
    aside = list(path.parent.glob("ada.damaged-*.json"))
    assert len(aside) == 1 and aside[0].read_text() == damage
    assert "could not be read" in capsys.readouterr().out


def _keep_many(worker):
    for i in range(10):
        progress.keep("predictions", f"{worker}.{i}", {"value": i, "unit": ""})


def test_notebooks_writing_at_once_lose_nothing():
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_keep_many, range(4))
    assert len(progress.load()["predictions"]) == 40


def test_learners_are_kept_apart(monkeypatch):
    progress.keep("checks", "01.2", {"passed": True})
    monkeypatch.setenv("LABKIT_LEARNER", "../grace")  # a name is no path
    assert progress.load()["checks"] == {}
    assert progress.progress_file().parent == progress.home() / "progress"


def test_a_disk_that_takes_nothing_is_told_not_raised(monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress, "replace_file", full)
    progress.keep("checks", "01.2", {"passed": True})
    assert "No space left" in capsys.readouterr().out


def test_a_crash_while_writing_leaves_the_old_file(monkeypatch):
    progress.keep("checks", "01.1", {"passed": True})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        progress.keep("checks", "01.2", {"passed": True})
    files = list(progress.progress_file().parent.glob("ada.json*"))
    assert list(json.loads(progress.progress_file().read_text())["checks"]) == ["01.1"]
    assert not [f for f in files if f.suffix == ".part"]


def test_no_guess_is_said_and_kept_out(capsys):
    guess = predict("01.x", None, "GB/s")
    score(guess, 12.0)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "01.x  no prediction yet: put a number in place of None (GB/s)",
        "01.x  measured 12.0 GB/s; no prediction to set beside it",
    ]
    assert progress.load()["predictions"] == {} and progress.load()["scores"] == {}


@pytest.mark.parametrize(
    ("value", "measured", "verdict"),
    [(100, 110, "close"), (100, 75, "right order"), (100, 290, "right order"), (1, 4.55, "far off"), (0, 3, "far off")],
)
def test_a_guess_is_scored_by_its_ratio(value, measured, verdict, capsys):
    score(predict("01.x", value, "GB/s"), measured)
    assert verdict in capsys.readouterr().out
    kept = progress.load()["scores"]["01.x"]
    assert kept["guess"] == value and kept["measured"] == measured


@pytest.mark.parametrize("value", ["12", -1, float("nan"), float("inf"), True, [1]])
def test_a_guess_must_be_a_number(value):
    with pytest.raises(LabError, match="needs a number of at least 0"):
        predict("01.x", value)


def test_the_guess_s_unit_chooses_the_quantity(capsys):
    m = Measurement(
        id="t", us=500.0, us_low=490.0, us_high=510.0, repeats=10, bytes=2 * 10**9, flops=10**12, method="events",
        source="test", ceiling="copy", ceilings=Ceilings(8000.0, 9000.0, 4000.0),
    )  # fmt: skip
    expected = {"us": "500", "ms": "0.500", "GB/s": "4 000", "TB/s": "4.00", "TFLOP/s": "2 000", "%": "50.0"}
    for unit, value in expected.items():
        score(predict("01.x", 1.0, unit), m)
        assert f"measured {value} {unit}" in capsys.readouterr().out
    with pytest.raises(LabError, match="predict in one of us, ms"):
        score(predict("01.x", 1.0, "furlongs"), m)


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.55, "4.55"), (302.2, "302"), (114441, "114 441"), (0.01234, "0.0123"), (0, "0"), (99.96, "100.0")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text

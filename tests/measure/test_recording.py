"""Recordings: what is refused, what a write keeps, and how results read."""

from __future__ import annotations

import copy
import json

import pytest

from labkit.errors import LabError
from labkit.hardware import RECORDINGS
from labkit.measure import recording
from labkit.measure.measurement import Reading
from labkit.measure.provenance import CLOCKS, FIELDS
from tests.measure.fakes import CEILINGS, WHO, result


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    path = tmp_path / "nvidia-h200.json"
    recording.write(path, WHO, CEILINGS, result())
    recording.write(path, WHO, CEILINGS, result("01/read/1GiB", 250.0, flops=5, ceiling="read"))
    recording.write(path, WHO, CEILINGS, Reading("01/clock", (1980.0, 1975.0, 1965.0), "MHz", "live"))
    return path


def edited(path, change, rehash=True):
    """``path`` after ``change(data)``, with a fitting hash, so that only the change itself is refused."""
    data = json.loads(path.read_text())
    change(data)
    if rehash:
        who = {n: v for n, v in data["provenance"].items() if n != "sha256"}
        parts = [who, *(data.get(n, {}) for n in ("ceilings", "measurements", "readings"))]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        data["provenance"]["sha256"] = recording.hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(data))
    return path


def test_what_was_written_is_read_back(file):
    record = recording.load(file)
    m = record.measurement("01/copy/1GiB")
    assert (m.us, m.us_low, m.us_high, m.repeats, m.bytes, m.flops) == (500.0, 495.0, 505.0, 50, 10**9, 0)
    assert m.source == "recorded: NVIDIA H200, 2026-11-30" and m.ceilings == CEILINGS
    assert record.measurement("01/read/1GiB").ceiling == "read"
    assert record.measurement("01/read/1GiB", ceiling="copy").ceiling == "copy"
    assert record.reading("01/clock").values == (1980.0, 1975.0, 1965.0)


@pytest.mark.parametrize("name", [*FIELDS, "sha256"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_each_field_of_the_provenance_is_needed(file, name, how):
    change = (
        (lambda d: d["provenance"].pop(name)) if how == "absent" else (lambda d: d["provenance"].update({name: ""}))
    )
    edited(file, change, rehash=False)
    with pytest.raises(LabError, match="sha256" if name == "sha256" else rf"does not say its .*{name}"):
        recording.load(file)


@pytest.mark.parametrize("clock", CLOCKS)
def test_each_clock_is_needed(file, clock):
    with pytest.raises(LabError, match=rf"clocks_mhz\.{clock}"):
        recording.load(edited(file, lambda d: d["provenance"]["clocks_mhz"].update({clock: None})))


def first(data):
    return data["measurements"]["01/copy/1GiB"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("provenance"), "has no provenance"),
        (lambda d: d.pop("readings"), "has no readings"),
        (lambda d: d["provenance"].update(date="yesterday"), "does not say its date"),
        (lambda d: d["provenance"].update(power_limit_w=0), "does not say its power_limit_w"),
        (lambda d: d["ceilings"].pop("read_gb_s"), "needs positive numbers for copy_gb_s, read_gb_s"),
        (lambda d: d["ceilings"].update(copy_gb_s=float("nan")), "needs positive numbers"),
        (lambda d: first(d).update(us=float("nan")), "time that is not a positive number for 01/copy/1GiB"),
        (lambda d: first(d).update(us=0.0), "time that is not a positive number"),
        (lambda d: first(d).update(us_low=-1.0), "time that is not a positive number"),
        (lambda d: first(d).update(us=float("inf")), "time that is not a positive number"),
        (lambda d: first(d).update(us="500"), "time that is not a positive number"),
        (lambda d: first(d).update(us_low=501.0), "median outside its quartiles"),
        (lambda d: first(d).update(repeats=0), "no repeats"),
        (lambda d: first(d).update(bytes=-1), "bytes or flops"),
        (lambda d: first(d).update(ceiling="sky"), "unknown ceiling"),
        (lambda d: first(d).pop("method"), "other fields"),
        (lambda d: d["readings"]["01/clock"].update(values=[]), "no values for 01/clock"),
        (lambda d: d["readings"]["01/clock"].update(values=[float("nan")]), "not a finite number"),
        (lambda d: d["readings"]["01/clock"].pop("unit"), "other fields"),
    ],
)
def test_impossible_content_is_refused(file, change, message):
    data = json.loads(file.read_text())
    keep = copy.deepcopy(data["provenance"])
    data = {**data, "provenance": keep}
    file.write_text(json.dumps(data))
    try:
        edited(file, change)
    except KeyError:  # there is no provenance left to hold a hash
        edited(file, change, rehash=False)
    with pytest.raises(LabError, match=message):
        recording.load(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: first(d).update(us=501.0),
        lambda d: d["ceilings"].update(copy_gb_s=4001.0),
        lambda d: d["readings"]["01/clock"]["values"].append(1.0),
        lambda d: d["provenance"].update(gpu="NVIDIA B200"),
        lambda d: d["provenance"].update(date="2026-12-24"),
        lambda d: d["provenance"]["clocks_mhz"].update(sm=1000),
    ],
)
def test_a_figure_or_its_provenance_edited_by_hand_is_refused(file, change):
    again = "was changed after it was made.*the shipped one comes back with `git checkout labkit/recordings`"
    with pytest.raises(LabError, match=again):
        recording.load(edited(file, change, rehash=False))


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.json")), ids=lambda p: p.stem)
def test_the_shipped_recordings_are_valid(path):
    assert recording.load(path).measurements


def test_an_unwritable_home_does_not_keep_a_recording_from_being_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "file"))
    recording.write(tmp_path / "new.json", WHO, CEILINGS, result())
    assert recording.load(tmp_path / "new.json").measurement("01/copy/1GiB").us == 500.0


def test_broken_and_missing_files_are_named(tmp_path):
    with pytest.raises(LabError, match=r"no recording gone\.json"):
        recording.load(tmp_path / "gone.json")
    (tmp_path / "half.json").write_text('{"provenance": ')
    with pytest.raises(LabError, match=r"half\.json cannot be read"):
        recording.load(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(LabError, match="has no provenance"):
        recording.load(tmp_path / "list.json")


def test_an_unknown_id_names_the_nearest(file):
    with pytest.raises(LabError, match=r"no measurement '01/copy/2GiB'.*nearest are 01/copy/1GiB"):
        recording.load(file).measurement("01/copy/2GiB")
    with pytest.raises(LabError, match=r"no reading 'xyz'.*it holds 1"):
        recording.load(file).reading("xyz")


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "triton"])
def test_another_machine_starts_anew_and_says_so(file, capsys, field):
    recording.write(file, {**WHO, field: "other"}, CEILINGS, result("02/new"))
    assert set(recording.load(file).measurements) == {"02/new"} and not recording.load(file).readings
    assert capsys.readouterr().out == f"nvidia-h200.json starts anew: {field} is now other\n"


def test_another_day_does_not(file, capsys):
    recording.write(file, {**WHO, "date": "2026-12-01", "python": "3.13.0"}, CEILINGS, result(us=490.0))
    record = recording.load(file)
    assert record.provenance["date"] == "2026-12-01" and len(record.measurements) == 2
    assert record.measurement("01/copy/1GiB").us == 490.0 and capsys.readouterr().out == ""


def test_an_invalid_file_starts_anew(file, capsys):
    file.write_text("{")
    recording.write(file, WHO, CEILINGS, result())
    assert set(recording.load(file).measurements) == {"01/copy/1GiB"}
    assert "starts anew" in capsys.readouterr().out


@pytest.mark.parametrize(("who", "bad"), [({"driver": None}, "driver"), ({"commit": ""}, "commit")])
def test_nothing_is_written_without_provenance(file, who, bad):
    before = file.read_text()
    with pytest.raises(LabError, match=f"cannot be recorded.*{bad}"):
        recording.write(file, {**WHO, **who}, CEILINGS, result("02/new"))
    assert file.read_text() == before


def test_an_impossible_result_is_not_written(file):
    before = file.read_text()
    with pytest.raises((LabError, ValueError)):
        recording.write(file, WHO, CEILINGS, result("02/new", us=float("nan")))
    assert file.read_text() == before and not list(file.parent.glob("*.part"))


def test_rates_and_shares():
    m = result(us=500.0, bytes=10**9, flops=2 * 10**9)
    assert m.gb_s == pytest.approx(2000) and m.tflop_s == pytest.approx(4)
    assert m.bound == "copy" and m.roofline_share == pytest.approx(0.5)
    assert result(us=500.0, ceiling="read").roofline_share == pytest.approx(2000 / 4500)
    product = result(us=1000.0, bytes=10**8, flops=350 * 10**9, ceiling="matmul")
    assert product.bound == "matmul" and product.roofline_share == pytest.approx(0.5)


def test_without_a_cost_there_is_a_time_but_no_rate():
    m = result(bytes=None, flops=None)
    assert "GB/s" not in str(m) and "500.0 us" in str(m)
    with pytest.raises(LabError, match="01/copy/1GiB was measured without a cost"):
        m.gb_s  # noqa: B018


def test_results_print_with_fixed_rounding():
    assert str(result(us=498.7654)) == (
        "01/copy/1GiB  498.8 us [493.8 us to 503.8 us]  2005 GB/s  50.1 % of copy  (live)"
    )
    assert "4.88 us" in str(result(us=4.8765)) and "12.35 ms" in str(result(us=12_345.6))
    assert "3.20 s" in str(result(us=3.2e6)) and "350.0 TFLOP/s" in str(result(us=1e3, flops=350 * 10**9))
    assert str(Reading("a", (3.0, 1.0, 2.0), "W", "live")) == "a  2 W (median of 3)  (live)"

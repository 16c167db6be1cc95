"""A recording: measurements taken on one GPU, with their provenance, to be replayed where there is none.

    {"provenance":   {gpu, driver, cuda, torch, triton, python, clocks_mhz {sm, mem, max_sm}, power_limit_w, date,
                      commit, sha256},
     "ceilings":     {copy_gb_s, read_gb_s, matmul_tflop_s},
     "measurements": {id: {us, us_low, us_high, repeats, bytes, flops, method, ceiling}},
     "readings":     {id: {values, unit}}}

``sha256`` is that of everything else in the file, so that a figure, a GPU's name or a date edited by hand is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from labkit.errors import LabError
from labkit.measure import provenance as origin
from labkit.measure.lock import lock_folder
from labkit.measure.measurement import CEILINGS, Ceilings, Measurement, Reading
from labkit.paths import replace_file

_AGAIN = "take it again with `labkit record` on a GPU; the shipped one comes back with `git checkout labkit/recordings`"
_TIMES = ("us", "us_low", "us_high")


@dataclass(frozen=True)
class Recording:
    """A valid recording. ``where`` is its file, for messages."""

    provenance: dict
    ceilings: Ceilings
    measurements: dict[str, dict]
    readings: dict[str, dict]
    where: str = ""

    @property
    def source(self) -> str:
        return f"recorded: {self.provenance['gpu']}, {self.provenance['date']}"

    def measurement(self, id: str, ceiling: str | None = None) -> Measurement:
        """The measurement ``id``, held against ``ceiling`` (default: as recorded). Raises LabError if it is unknown."""
        entry = dict(self._entry(id, self.measurements, "measurement"))
        entry["ceiling"] = ceiling or entry["ceiling"]
        return Measurement(id=id, source=self.source, ceilings=self.ceilings, **entry)

    def reading(self, id: str) -> Reading:
        """The reading ``id``. Raises LabError if it is unknown."""
        entry = self._entry(id, self.readings, "reading")
        return Reading(id, tuple(entry["values"]), entry["unit"], self.source)

    def _entry(self, id: str, entries: dict[str, dict], what: str) -> dict:
        if id in entries:
            return entries[id]
        near = difflib.get_close_matches(id, entries, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else f"it holds {len(entries)}, none with a similar name"
        raise LabError(f"There is no {what} {id!r} in the recording of {self.provenance['gpu']}; {hint}.")


def digest(who: dict, ceilings: dict, measurements: dict, readings: dict) -> str:
    """SHA-256 of what was measured and where (``who``: the provenance), independent of the file's layout."""
    who = {name: value for name, value in who.items() if name != "sha256"}
    parts = [who, ceilings, measurements, readings]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: Path) -> Recording:
    """Read and validate. Raises LabError for a file that is missing, broken, edited, or without whole provenance."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"There is no recording {path.name}; {_AGAIN}.") from None
    except (OSError, ValueError) as error:
        raise LabError(f"The recording {path.name} cannot be read ({error}); {_AGAIN}.") from None
    return parse(data, path.name)


def parse(data: object, name: str) -> Recording:
    """Validate a recording's content; ``name`` is its file's, for messages. Raises LabError."""
    parts = data if isinstance(data, dict) else {}
    if absent := [
        p for p in ("provenance", "ceilings", "measurements", "readings") if not isinstance(parts.get(p), dict)
    ]:
        raise LabError(f"The recording {name} has no {' and no '.join(absent)}; {_AGAIN}.")
    who = parts["provenance"]
    if bad := origin.missing(who):
        raise LabError(f"The recording {name} does not say its {', '.join(bad)}; {_AGAIN}.")
    ceilings, measurements, readings = parts["ceilings"], parts["measurements"], parts["readings"]
    names = [f.name for f in dataclasses.fields(Ceilings)]
    if set(ceilings) != set(names) or not all(_positive(ceilings[n]) for n in names):
        raise LabError(f"The recording {name} needs positive numbers for {', '.join(names)}; {_AGAIN}.")
    for id, entry in measurements.items():
        if problem := _measurement_problem(entry):
            raise LabError(f"The recording {name} has {problem} for {id}; {_AGAIN}.")
    for id, entry in readings.items():
        if problem := _reading_problem(entry):
            raise LabError(f"The recording {name} has {problem} for {id}; {_AGAIN}.")
    if who.get("sha256") != digest(who, ceilings, measurements, readings):
        raise LabError(f"The recording {name} was changed after it was made: its sha256 does not fit; {_AGAIN}.")
    return Recording(who, Ceilings(**ceilings), measurements, readings, name)


def _positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _measurement_problem(entry: object) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {*_TIMES, "repeats", "bytes", "flops", "method", "ceiling"}:
        return "other fields than us, us_low, us_high, repeats, bytes, flops, method and ceiling"
    if not all(_positive(entry[t]) for t in _TIMES):
        return "a time that is not a positive number"
    if not entry["us_low"] <= entry["us"] <= entry["us_high"]:
        return "a median outside its quartiles"
    if not _count(entry["repeats"]) or not entry["repeats"]:
        return "no repeats"
    if not all(entry[n] is None or _count(entry[n]) for n in ("bytes", "flops")):
        return "bytes or flops that are no counts"
    if entry["ceiling"] not in CEILINGS or not isinstance(entry["method"], str):
        return "an unknown ceiling or method"
    return None


def _reading_problem(entry: object) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"values", "unit"} or not isinstance(entry["unit"], str):
        return "other fields than values and unit"
    values = entry["values"]
    if not isinstance(values, list) or not values:
        return "no values"
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        return "a value that is not a finite number"
    return None


def entry_of(result: Measurement | Reading) -> dict:
    """What the file keeps of a result."""
    if isinstance(result, Reading):
        return {"values": list(result.values), "unit": result.unit}
    names = (*_TIMES, "repeats", "bytes", "flops", "method", "ceiling")
    return {n: round(v, 4) if isinstance(v := getattr(result, n), float) else v for n in names}


def write(path: Path, who: dict, ceilings: Ceilings, result: Measurement | Reading) -> None:
    """Put ``result`` into the recording at ``path``, beside what it holds from the same GPU, driver, torch and triton.

    Otherwise the recording starts anew, and a line says so. The file is replaced as a whole, under a lock. Raises
    LabError if ``who``, this machine's provenance, is not whole, and OSError if the file cannot be written.
    """
    if bad := origin.missing(who):
        raise LabError(
            f"{result.id} cannot be recorded: this machine does not tell its {', '.join(bad)}. "
            "NVML gives clocks, driver and power limit; LABKIT_COMMIT can name the commit."
        )
    with FileLock(lock_folder() / f"recording-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}.lock"):
        measurements, readings = {}, {}
        if path.is_file():
            try:
                old = load(path)
            except LabError as error:
                print(f"{path.name} starts anew: {error}")
            else:
                changed = [n for n in origin.SAME if old.provenance[n] != who[n]]
                if changed:
                    print(f"{path.name} starts anew: {', '.join(f'{n} is now {who[n]}' for n in changed)}")
                else:
                    measurements, readings = old.measurements, old.readings
        (readings if isinstance(result, Reading) else measurements)[result.id] = entry_of(result)
        top = {k: round(v, 3) for k, v in dataclasses.asdict(ceilings).items()}
        who = {n: who[n] for n in origin.FIELDS}
        data = {
            "provenance": {**who, "sha256": digest(who, top, measurements, readings)},
            "ceilings": top,
            "measurements": dict(sorted(measurements.items())),
            "readings": dict(sorted(readings.items())),
        }
        parse(data, path.name)  # what is written can be read back
        replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")

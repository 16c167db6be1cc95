"""Predict before you measure: a guess is kept, then stands beside what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from labkit.course import progress
from labkit.errors import LabError

#: a measurement's property for each unit a guess may be written in, and the factor from the property to the unit
_UNITS = {
    "us": ("us", 1.0),
    "ms": ("us", 1e-3),
    "s": ("us", 1e-6),
    "GB/s": ("gb_s", 1.0),
    "TB/s": ("gb_s", 1e-3),
    "TFLOP/s": ("tflop_s", 1.0),
    "%": ("roofline_share", 100.0),
}


@dataclass(frozen=True)
class Guess:
    """A learner's prediction; ``value`` is None as long as none was made."""

    id: str
    value: float | None
    unit: str


def number(value: float) -> str:
    """Three significant digits, with thin groups for large numbers: 0.0123, 4.55, 302, 114 441."""
    return rounded(value, 3)


def rounded(value: float, significant: int) -> str:
    """``value`` with so many significant digits, never cutting digits before the point."""
    try:
        value = float(value)
    except OverflowError:  # a whole number beyond 1e308
        return f"about 10^{len(str(abs(value))) - 1}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".replace(",", " ")


def predict(id: str, value: float | None = None, unit: str = "") -> Guess:
    """Keep a guess. ``None`` means not made yet: a line says so and everything runs on.

    Raises LabError if ``value`` is not a finite number of at least zero.
    """
    if value is None:
        print(f"{id}  no prediction yet: put a number in place of None" + (f" ({unit})" if unit else ""))
        return Guess(id, None, unit)
    if not _is_guess(value):
        needs = f"a number of at least 0{f' in {unit}' if unit else ''}, or None"
        raise LabError(f"Prediction {id}: got {value!r}, needs {needs}.")
    progress.keep("predictions", id, {"value": value, "unit": unit})
    print(f"{id}  you predict {number(value)} {unit}".rstrip())
    return Guess(id, float(value), unit)


def _is_guess(value) -> bool:
    """A real number that is finite as a float, and not negative."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf
    except OverflowError:
        return False


def score(guess: Guess, measurement, what: str = "measured") -> None:
    """Print guess and measurement side by side and keep the ratio measured / guessed.

    ``measurement``: a Measurement (the guess's unit chooses the quantity), a Reading, or a number in the guess's unit.
    """
    if not isinstance(guess, Guess):
        raise LabError(f"score() needs what predict() returned, got {type(guess).__name__}.")
    value = _in_unit(measurement, guess)
    if guess.value is None:
        print(f"{guess.id}  {what} {number(value)} {guess.unit}; no prediction to set beside it".replace(" ;", ";"))
        return
    ratio = value / guess.value if guess.value else math.inf
    off = max(ratio, 1 / ratio) if ratio > 0 else math.inf  # of another sign, or nothing: far off
    verdict = "close" if off <= 1.25 else "right order" if off <= 3 else "far off: find out why"
    print(
        f"{guess.id}  you {number(guess.value)}, {what} {number(value)} {guess.unit}: ratio {number(ratio)}, {verdict}"
    )
    kept = {"guess": guess.value, "measured": value, "unit": guess.unit}
    progress.keep("scores", guess.id, kept | {"ratio": ratio if math.isfinite(ratio) else None})


def _in_unit(measurement, guess: Guess) -> float:
    if isinstance(measurement, Real) and math.isfinite(measurement):
        return float(measurement)
    if hasattr(measurement, "us"):
        if guess.unit not in _UNITS:
            raise LabError(
                f"Prediction {guess.id} is in {guess.unit!r}, but {measurement.id} was timed: "
                f"predict in one of {', '.join(_UNITS)}, or give score() the number itself."
            )
        name, factor = _UNITS[guess.unit]
        return getattr(measurement, name) * factor
    if hasattr(measurement, "value"):
        if measurement.unit != guess.unit:
            raise LabError(
                f"Prediction {guess.id} is in {guess.unit!r}, but {measurement.id} is in {measurement.unit!r}."
            )
        return float(measurement.value)
    kind = type(measurement).__name__
    raise LabError(f"Prediction {guess.id}: cannot score against a {kind}; give a measurement or a number.")

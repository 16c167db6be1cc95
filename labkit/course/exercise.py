"""What an exercise is, and the register of all of them.

An exercise is judged on ``trials``: inputs on which the learner's function must agree with the worked answer. Its
``hints`` recognise common mistakes by what they return. ``labkit/course/exercises/lab01.py`` holds those of lab 01, and
``solutions/lab01.py`` the worked answers.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from labkit.errors import LabError


class Todo(NotImplementedError):
    """Raised by an exercise's stub; its check then says "not tried yet"."""


@dataclass(frozen=True)
class Trial:
    """One set of inputs. ``make()`` returns fresh keyword arguments, so that no trial sees what another one changed."""

    name: str
    make: Callable[[], dict]


@dataclass(frozen=True)
class Hint:
    """``text`` is given if ``fits(inputs, got, want)`` is true for a trial that failed.

    ``form``: it speaks of a result's kind or dtype, or of a changed argument, and only where that is what is wrong. The
    others speak of values: right ones in the wrong dtype are none of theirs.
    """

    text: str
    fits: Callable[[dict, object, object], bool]
    form: bool = False


@dataclass(frozen=True)
class Exercise:
    """``tolerance`` is relative: |got - want| <= tolerance * |want| for numbers and for each tensor's largest value.

    ``in_place``: the arguments the function is meant to change; lists and tensors among the others must stay.
    """

    id: str
    title: str
    answer: Callable
    trials: tuple[Trial, ...]
    hints: tuple[Hint, ...] = ()
    tolerance: float = 1e-6
    time_limit_s: float = 20.0
    in_place: tuple[str, ...] = ()
    parameters: tuple[str, ...] = field(default=())

    def __post_init__(self):
        if not self.parameters:
            object.__setattr__(self, "parameters", tuple(inspect.signature(self.answer).parameters))


def exercises_of(lab: str) -> dict[str, Exercise]:
    """The exercises of one lab ("01"), by id."""
    module = importlib.import_module(f"labkit.course.exercises.lab{lab}")
    return {exercise.id: exercise for exercise in module.EXERCISES}


def find(exercise_id: str) -> Exercise:
    """Look an exercise up. Raises LabError with the nearest ids if there is none."""
    match = re.fullmatch(r"(\d\d)\.\d+\w*", str(exercise_id))
    known: dict[str, Exercise] = {}
    if match:
        try:
            known = exercises_of(match[1])
        except ModuleNotFoundError:
            known = {}
    if exercise_id in known:
        return known[exercise_id]
    near = difflib.get_close_matches(str(exercise_id), known, n=3, cutoff=0.3) or list(known)
    raise LabError(
        f"There is no exercise {exercise_id!r}; ids look like '01.2' (lab 01, exercise 2)."
        + (f" Did you mean {' or '.join(near)}?" if near else "")
    )

"""The grader is tested: every worked answer passes, every wrong one is refused with the hint that fits."""

import importlib

import pytest

from labkit.course.check import judge
from labkit.course.exercise import exercises_of, find
from tests.course.wrong import lab00, lab01, lab02, lab03, lab04, lab05, lab06, lab07, lab08

LABS = {
    "00": lab00,
    "01": lab01,
    "02": lab02,
    "03": lab03,
    "04": lab04,
    "05": lab05,
    "06": lab06,
    "07": lab07,
    "08": lab08,
}
EXERCISES = {id: e for lab in LABS for id, e in exercises_of(lab).items()}
WRONG = [(id, fn, hint) for module in LABS.values() for id, rows in module.WRONG.items() for fn, hint in rows]


@pytest.mark.parametrize("id", EXERCISES)
def test_the_worked_answer_passes_and_is_the_solutions_own(id):
    exercise = EXERCISES[id]
    assert judge(exercise, exercise.answer).passed
    module = importlib.import_module(f"solutions.lab{id[:2]}")
    assert getattr(module, exercise.answer.__name__) is exercise.answer


@pytest.mark.parametrize(("id", "fn", "hint"), WRONG, ids=[f"{id}-{fn.__name__}" for id, fn, _ in WRONG])
def test_a_wrong_answer_is_refused_with_the_hint_that_fits(id, fn, hint):
    report = judge(find(id), fn)
    assert report.attempted and not report.passed
    assert (hint in report.hint) if hint else report.hint == "", report


def test_every_exercise_has_wrong_answers_and_every_hint_is_reached():
    reached = {id: set() for id in EXERCISES}
    for id, fn, _ in WRONG:
        reached[id].add(judge(find(id), fn).hint)
    for id, exercise in EXERCISES.items():
        assert len(reached[id]) >= 2, f"{id} needs wrong answers"
        assert not {h.text for h in exercise.hints} - reached[id], f"a hint of {id} is never given"

"""The grader: what a learner's function may do, and what the learner reads then."""

import inspect
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from labkit.course import progress
from labkit.course.check import check, difference, judge, solution, use
from labkit.course.exercise import Exercise, Hint, Todo, Trial, find
from labkit.errors import LabError


def double(x):
    return x * 2


TENSOR = Exercise("99.1", "double", double, (Trial("three", lambda: {"x": torch.arange(3.0)}),), time_limit_s=1.0)
NUMBER = Exercise(
    "99.2",
    "double",
    double,
    (Trial("one", lambda: {"x": 1.0}), Trial("ten", lambda: {"x": 10.0})),
    hints=(Hint("that is the square.", lambda i, got, want: got == i["x"] ** 2 and got != want),),
)


def judged(exercise, fn):
    report = judge(exercise, fn)
    assert not report.passed
    return " | ".join(report.lines)


def test_the_answer_passes_and_a_stub_is_not_an_attempt():
    assert judge(TENSOR, lambda x: x + x).passed

    def stub(x):
        raise Todo

    report = judge(NUMBER, stub)
    assert (report.passed, report.attempted, report.lines) == (False, False, ("99.2  not tried yet",))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda y: y, r"got <lambda>\(y\), needs double\(x\)"),
        (lambda: 1, r"needs double\(x\)"),
        (lambda a, b: a, r"needs double\(x\)"),
        ("double", r"got a str, needs the function double\(x\)"),
        (lambda x: None, r"returned nothing \(is a return missing\?\), expected a tensor \[3\] of float32"),
        (lambda x: [0, 2, 4], r"returned a list, expected a tensor"),
        (lambda x: (2 * x)[:2], r"shape is \[2\], expected \[3\]"),
        (lambda x: (2 * x).double(), r"dtype is float64, expected float32"),
        (lambda x: 2 * x / (x - 1), r"value \[1\] is inf, expected 2\.00"),
        (lambda x: 2 * x * (x / x), r"1 of 3 values are NaN"),
        (lambda x: 2.1 * x, r"value \[2\] is 4\.20, expected 4\.00"),
        (lambda x: x.nothing, r"raised AttributeError: 'Tensor' .* attribute 'nothing', line 1 of your function"),
        (lambda x: 1 / 0, r"raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_is_said(fn, text):
    assert re.search(text, judged(TENSOR, fn))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: float("nan"), "returned NaN"),
        (lambda x: "2", "returned a str, expected a number"),
        (lambda x: True, "returned a bool, expected a number"),
        (lambda x: x, "got 1.00, expected 2.00"),
        (lambda x: 2 + 0j, "returned a complex, expected a number"),
    ],
)
def test_numbers_are_judged_as_numbers(fn, text):
    assert text in judged(NUMBER, fn)
    assert judge(NUMBER, lambda x: torch.tensor(2.0 * x)).passed


def test_a_hint_fits_the_mistake_and_only_that():
    assert judge(NUMBER, lambda x: x * x).hint == "that is the square."
    assert judge(NUMBER, lambda x: x + 1).hint == ""


def test_hints_speak_of_values_or_of_form_where_that_is_what_is_wrong():
    """Right values in the wrong dtype, or in the caller's tensor, are no matter for hints about values."""
    always = tuple(Hint(text, lambda i, got, want: True, form=text == "form") for text in ("values", "form"))
    exercise = replace(TENSOR, hints=always)
    assert judge(exercise, lambda x: x + 1).hint == "values"
    for form in (lambda x: (2 * x).double(), lambda x: [0, 2, 4], lambda x: None, lambda x: x.mul_(2)):
        assert judge(exercise, form).hint == "form"
        assert judge(replace(exercise, hints=always[:1]), form).hint == ""


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_list_may_come_as_a_tuple_an_array_or_a_tensor(kind):
    assert difference(kind([1, 2]), [1, 2], 0.0) == "" and difference(kind([[1], [2]]), [[1], [2]], 0.0) == ""
    assert difference(kind([1, 3]), [1, 2], 0.0) == "value 1: got 3, expected 2"
    assert "expected 2 values" in difference(kind([1]), [1, 2], 0.0)
    assert difference(kind([1.0, 2.0]), [1, 2], 0.0) == "value 0: returned a float, expected an int"
    assert difference({1, 2}, [1, 2], 0.0) == "returned a set, expected a list of 2 values"


def test_a_function_that_never_returns_is_stopped_even_if_it_swallows_exceptions():
    def endless(x):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass

    start = time.monotonic()
    assert "stopped after 1 s without an answer" in judged(TENSOR, endless)
    assert time.monotonic() - start < 5


def test_checking_works_outside_the_main_thread():
    got = []
    thread = threading.Thread(target=lambda: got.append(judge(TENSOR, double)))
    thread.start()
    thread.join()
    assert got[0].passed


def test_a_function_that_changes_its_argument_is_told_so():
    assert "changed its argument x; work on a copy" in judged(TENSOR, lambda x: x.mul_(2))
    assert judge(replace(TENSOR, in_place=("x",)), lambda x: x.mul_(2)).passed
    assert "value [2] is 0, expected 4.00" in judged(TENSOR, lambda x: x.zero_())


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: 2.0004 * x, "got 2.0004, expected 2.0000"),
        (lambda x: 10**400, "got about 10^400, expected 2.00"),
        (lambda x: sys.exit(), "raised SystemExit"),
        (lambda x: np.float32(3), "got 3.00, expected 2.00"),
    ],
)
def test_odd_answers_get_a_sentence_too(fn, text):
    assert text in judged(NUMBER, fn)


class Rude(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def test_an_exception_or_a_value_that_cannot_be_printed_is_survived():
    def rude(x):
        raise Rude

    assert "raised Rude" in judged(NUMBER, rude)
    assert "<list>" in difference([Rude()], [1, 2], 1e-6)


def test_a_bare_except_cannot_keep_a_function_running():
    def stubborn(x):
        while True:
            try:
                time.sleep(0.01)
            except:  # noqa: E722
                pass

    start = time.monotonic()
    assert "stopped after 1 s" in judged(TENSOR, stubborn)
    assert time.monotonic() - start < 5 and sys.gettrace() is None


def test_check_prints_keeps_and_use_hands_out_what_passed(capsys):
    answer = find("01.1").answer

    def mine(bus_bits, gbit_per_pin):
        return gbit_per_pin * bus_bits / 8

    assert use("01.1", mine) is answer, "not checked yet"
    assert check("01.1", mine).passed
    assert use("01.1", mine) is mine
    assert use("01.1", lambda bus_bits, gbit_per_pin: 0) is answer, "another function than the one that passed"
    assert not check("01.1", lambda bus_bits, gbit_per_pin: 0).passed
    assert progress.load()["checks"]["01.1"]["passed"] is False
    assert "01.1  RTX 4090: 384 bits, 21 Gbit/s: passed" in capsys.readouterr().out


@pytest.mark.parametrize("id", ["01.9", "77.1", "1.1", "", "x"])
def test_an_unknown_exercise_is_named(id):
    with pytest.raises(LabError, match=f"no exercise {id!r}"):
        check(id, double)


def test_a_solution_shows_its_kernel_too(capsys):
    solution("03.2")
    out = capsys.readouterr().out
    assert "@triton.jit\ndef rms_norm_row_kernel" in out and out.index("rms_norm_row_kernel") < out.index(
        "def rms_norm_rows"
    )


def test_a_solution_can_be_read(capsys):
    solution("01.2")
    assert inspect.getsource(find("01.2").answer) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.1, False),
        ([1, 2], (1, 2), True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"b": 1}, {"a": 1.0}, False),
        ("x", "x", True),
        (1, True, False),
        (torch.tensor([float("-inf"), 1.0]), torch.tensor([float("-inf"), 1.0]), True),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_difference(got, want, same):
    assert (difference(got, want, 1e-6) == "") is same

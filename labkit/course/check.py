"""The grader: runs a learner's function against the worked answer and says, in one line a trial, what it found."""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch

from labkit.course import progress
from labkit.course.exercise import Exercise, Todo, find
from labkit.course.predict import number, rounded
from labkit.errors import LabError

_passed: dict[str, Callable] = {}  # exercise id -> the very function that passed in this session


@dataclass(frozen=True)
class Report:
    """``attempted`` is False while the stub still raises ``Todo``; ``hint`` is "" if none fits."""

    id: str
    passed: bool
    attempted: bool
    hint: str = ""
    lines: tuple[str, ...] = ()

    def _ipython_display_(self) -> None:
        """The lines have been printed; a cell that ends in a check shows nothing more."""


class _Form(str):
    """What is wrong with a result's kind or dtype, or with an argument, and not with values."""


class _Overtime(BaseException):
    """Not an Exception, so that a learner's ``except Exception`` inside a loop cannot swallow it."""


def check(exercise_id: str, fn: Callable) -> Report:
    """Judge ``fn`` and print one stable line a trial. Whatever ``fn`` does (raise, hang, return NaN), this returns.

    Raises LabError only for an unknown exercise id.
    """
    report = judge(find(exercise_id), fn)
    for line in report.lines:
        print(line)
    if report.hint:
        print(f"{exercise_id}  hint: {report.hint}")
    if report.passed:
        _passed[exercise_id] = fn
    if report.attempted:
        progress.keep("checks", exercise_id, {"passed": report.passed})
    return report


def judge(exercise: Exercise, fn: Callable) -> Report:
    """``check`` without printing or keeping anything."""
    id = exercise.id
    problem = _signature_problem(exercise, fn)
    if problem:
        return Report(id, False, True, lines=(f"{id}  {problem}",))
    lines, failed, hint = [], 0, ""
    for trial in exercise.trials:
        want = exercise.answer(**trial.make())
        inputs = trial.make()
        given = trial.make()
        try:
            with _time_limit(exercise.time_limit_s, fn):
                got = fn(**inputs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # a kernel's error belongs to the function that launched it
        except Todo:
            return Report(id, False, False, lines=(f"{id}  not tried yet",))
        except _Overtime:
            lines.append(
                f"{id}  {trial.name}: stopped after {exercise.time_limit_s:g} s without an answer; "
                "look for a loop that never ends"
            )
            return Report(id, False, True, lines=tuple(lines))
        except (Exception, SystemExit) as error:  # the learner's code may raise anything
            lines.append(f"{id}  {trial.name}: raised {_where(error, fn)}")
            failed += 1
            continue
        problem = difference(got, want, exercise.tolerance) or _changed(inputs, given, exercise.in_place)
        if problem:
            failed += 1
            lines.append(f"{id}  {trial.name}: {problem}")
            hints = (h for h in exercise.hints if h.form == isinstance(problem, _Form))
            hint = hint or next((h.text for h in hints if _fits(h, trial.make(), got, want)), "")
        else:
            lines.append(f"{id}  {trial.name}: passed")
    return Report(id, not failed, True, hint, tuple(lines))


def difference(got, want, tolerance: float) -> str:
    """Why ``got`` is not ``want``, in words; "" if it is. Numbers and tensors may differ by ``tolerance``, relative.

    Where a float is wanted, a tensor of one serves; where a list is, so do a tuple, an array and a tensor.
    """
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, tolerance)
    if isinstance(want, bool | str) or want is None:
        same = type(got) is type(want) and got == want
        return "" if same else f"got {_short(got)}, expected {want!r}"
    if isinstance(want, int | float):
        if isinstance(got, torch.Tensor) and got.numel() == 1 and isinstance(want, float):
            got = got.item()
        kind = Integral if isinstance(want, int) else Real
        if isinstance(got, bool) or not isinstance(got, kind):
            return _Form(f"returned {_kind(got)}, expected {'an int' if isinstance(want, int) else 'a number'}")
        if isinstance(got, Integral) and abs(got) > 1e300:
            return f"got {number(got)}, expected {number(want)}"
        if math.isnan(got):
            return "returned NaN, expected a finite number"
        return "" if abs(got - want) <= tolerance * abs(want) else _apart(got, want)
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return f"returned {_short(got)}, expected a dict with the keys {sorted(want)}"
        return next((type(d)(f"{k}: {d}") for k in want if (d := difference(got[k], want[k], tolerance))), "")
    if isinstance(want, list | tuple):
        if isinstance(got, torch.Tensor | np.ndarray) and got.ndim:
            got = got.tolist()
        if not isinstance(got, list | tuple):
            return _Form(f"returned {_kind(got)}, expected a list of {len(want)} values")
        if len(got) != len(want):
            return f"returned {_short(got)}, expected {len(want)} values"
        pairs = enumerate(zip(got, want, strict=True))
        return next((type(d)(f"value {i}: {d}") for i, (g, w) in pairs if (d := difference(g, w, tolerance))), "")
    raise TypeError(f"an exercise's answer of type {type(want).__name__} cannot be compared")


def _apart(got, want, says: str = "got") -> str:
    """Both numbers, with as many digits as it takes to tell them apart."""
    if isinstance(want, int):
        return f"{says} {got}, expected {want}"
    digits = next((d for d in range(3, 17) if rounded(got, d) != rounded(want, d)), 17)
    return f"{says} {rounded(got, digits)}, expected {rounded(want, digits)}"


def _changed(inputs: dict, given: dict, in_place: tuple[str, ...]) -> str:
    """Which argument the function changed although it may not; "" if none. Lists and tensors are looked at."""
    for name, before in given.items():
        if name not in in_place and isinstance(before, list | torch.Tensor) and difference(inputs[name], before, 0.0):
            return _Form(f"changed its argument {name}; work on a copy")
    return ""


def _tensor_difference(got, want: torch.Tensor, tolerance: float) -> str:
    if not isinstance(got, torch.Tensor):
        return _Form(f"returned {_kind(got)}, expected a tensor {list(want.shape)} of {_dtype(want)}")
    if got.shape != want.shape:
        return f"shape is {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype != want.dtype:
        return _Form(f"dtype is {_dtype(got)}, expected {_dtype(want)}")
    if not want.numel():
        return ""
    g, w = got.detach().cpu().double(), want.detach().cpu().double()
    nans = (g.isnan() & ~w.isnan()).sum().item()
    if nans:
        return f"{nans} of {g.numel()} values are NaN"
    unequal = (g - w).nan_to_num(nan=0.0, posinf=math.inf, neginf=math.inf).abs()
    unequal[g == w] = 0.0  # equal infinities
    finite = w[w.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    worst = unequal.max().item()
    if worst <= tolerance * scale:
        return ""
    index = tuple(int(i) for i in torch.unravel_index(unequal.argmax(), unequal.shape))
    return _apart(g[index].item(), w[index].item(), f"value {list(index)} is")


def _signature_problem(exercise: Exercise, fn) -> str:
    needs = f"{exercise.answer.__name__}({', '.join(exercise.parameters)})"
    if not callable(fn):
        return f"got {_kind(fn)}, needs the function {needs}"
    try:
        signature = inspect.signature(fn)
        signature.bind(**dict.fromkeys(exercise.parameters))
    except (TypeError, ValueError):
        try:
            given = f"{getattr(fn, '__name__', 'function')}({', '.join(inspect.signature(fn).parameters)})"
        except (TypeError, ValueError):
            given = _kind(fn)
        return f"the parameters do not fit: got {given}, needs {needs}"
    return ""


@contextlib.contextmanager
def _time_limit(seconds: float, fn):
    """Raise _Overtime in the body after ``seconds``. Needs the main thread, where notebooks run; elsewhere no limit.

    A bare ``except:`` in a loop swallows what a signal raises. So the next line of the learner's file raises too, and
    that is the first line of the handler.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    own = getattr(getattr(inspect.unwrap(fn), "__code__", None), "co_filename", None)

    def trace(frame, event, _):
        # a line of the handler, not the exception that leads there: what is raised in a handler leaves the try
        if event == "line" and frame.f_code.co_filename == own:
            raise _Overtime
        return trace

    def stop(_, frame):
        sys.settrace(trace)
        while frame is not None:
            if frame.f_code.co_filename == own:
                frame.f_trace = trace
            frame = frame.f_back
        raise _Overtime

    tracing = sys.gettrace()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, should the first one be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(tracing)
        signal.signal(signal.SIGALRM, before)


def _fits(hint, inputs, got, want) -> bool:
    try:
        return bool(hint.fits(inputs, got, want))
    except Exception:  # a hint looks at whatever the learner returned; if it cannot, it does not fit
        return False


def _where(error: Exception, fn) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    text = _said(error, str).strip().split("\n")[0]
    place = f", line {lines[-1] - code.co_firstlineno + 1} of your function" if lines else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _kind(value) -> str:
    return "nothing (is a return missing?)" if value is None else f"a {type(value).__name__}"


def _said(value, how) -> str:
    """str or repr of something the learner made, which may itself raise."""
    try:
        return how(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _short(value) -> str:
    text = _said(value, repr)
    return text if len(text) <= 60 else text[:57] + "..."


def use(exercise_id: str, fn: Callable) -> Callable:
    """``fn`` if it passed its check in this session, else the worked answer, so that the notebook runs on."""
    exercise = find(exercise_id)
    if _passed.get(exercise_id) is fn:
        print(f"{exercise_id}  your {exercise.answer.__name__} is used from here on")
        return fn
    print(f"{exercise_id}  the worked answer stands in for {exercise.answer.__name__} until yours passes")
    return exercise.answer


def solution(exercise_id: str) -> None:
    """Print the worked answer, after the kernels and helpers of its own module that it uses."""
    answer = inspect.unwrap(find(exercise_id).answer)
    named = (answer.__globals__.get(name) for name in answer.__code__.co_names)
    parts = [inspect.unwrap(getattr(value, "fn", value)) for value in named if callable(value)]
    own = [
        part for part in parts if getattr(part, "__module__", None) == answer.__module__ and inspect.isfunction(part)
    ]
    try:
        print("\n\n".join(inspect.getsource(part) for part in [*own, answer]))
    except OSError as error:
        raise LabError(f"The source of exercise {exercise_id}'s answer cannot be read: {error}.") from error

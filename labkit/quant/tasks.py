"""Small tasks with one right answer, which rounded weights spoil before fluent text does.

A sum has to be right in every digit, and a value that is looked up is copied exactly or not at all. Each task shows the
form in a few examples first, since a small model does not follow instructions reliably, and is answered greedily.
All numbers come from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from labkit.errors import LabError
from labkit.quant.quality import Estimate, wilson

NAMES = (
    *("amber", "basket", "candle", "dolphin", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orange", "pencil", "quarry", "ribbon", "saddle", "tunnel", "velvet", "window"),
)


@dataclass(frozen=True)
class Task:
    """prompt ends where the answer begins; answer: what the model's next line has to be, without spaces around it."""

    kind: str
    prompt: str
    answer: str


def addition(n: int, seed: int = 0, digits: int = 2, shots: int = 4) -> list[Task]:
    """n sums of two numbers of ``digits`` digits."""
    _check_least("digits", digits, 1)
    low, high = 10 ** (digits - 1), 10**digits - 1
    return _arithmetic("addition", "+", n, seed, (low, high), shots)


def multiplication(n: int, seed: int = 0, high: int = 12, shots: int = 4) -> list[Task]:
    """n products of two numbers from 2 to ``high``."""
    _check_least("high", high, 2)
    return _arithmetic("multiplication", "*", n, seed, (2, high), shots)


def recall(n: int, seed: int = 0, pairs: int = 8, digits: int = 4, shots: int = 2) -> list[Task]:
    """n questions for one of ``pairs`` numbers, each of which got a name some lines above; ``shots`` others are asked
    for and answered first."""
    _check(n, shots)
    _check_least("digits", digits, 1)
    if not shots < pairs <= len(NAMES):
        raise LabError(f"recall with {shots} examples takes {shots + 1} to {len(NAMES)} pairs, got {pairs}")
    rng, tasks = Random(seed), []
    for _ in range(n):
        names = rng.sample(NAMES, pairs)
        lines = [f"{name}: {rng.randrange(10 ** (digits - 1), 10**digits)}" for name in names]
        *examples, asked = rng.sample(lines, shots + 1)
        question, answer = asked.split(" ")
        tasks.append(Task("recall", "\n".join([*lines, "", *examples, question]), answer))
    return tasks


def score(complete: Callable[[str, int], str], tasks: Sequence[Task]) -> Estimate:
    """Share of tasks answered exactly, with Wilson's interval; n counts tasks.

    complete(prompt, max_tokens): the text a model adds to ``prompt``, greedily; for one that engine.load gave:

        lambda prompt, n: tokenizer.decode(generate_cached(model, tokenizer.encode(prompt), n).token_ids, True)

    What counts is its first line without
    spaces around it: "42" is not answered by "42 apples" or "421". Raises LabError if there are no tasks.
    """
    if not tasks:
        raise LabError("there is nothing to score: the list of tasks is empty")
    # A token is at least a character here, so a few more than the answer has show whether the model stops after it.
    right = sum(first_line(complete(task.prompt, len(task.answer) + 4)) == task.answer for task in tasks)
    share = right / len(tasks)
    return Estimate(share, *wilson(share, len(tasks)), len(tasks))


def first_line(text: str) -> str:
    """ " 42\\nNext" -> "42"."""
    return text.split("\n", 1)[0].strip()


def _arithmetic(kind: str, sign: str, n: int, seed: int, between: tuple[int, int], shots: int) -> list[Task]:
    _check(n, shots)
    rng, tasks = Random(seed), []
    for _ in range(n):
        pairs = [(rng.randint(*between), rng.randint(*between)) for _ in range(shots + 1)]
        results = [a + b if sign == "+" else a * b for a, b in pairs]
        lines = [f"{a} {sign} {b} =" for a, b in pairs]
        shown = "".join(f"{line} {result}\n" for line, result in zip(lines[:-1], results[:-1], strict=True))
        tasks.append(Task(kind, shown + lines[-1], str(results[-1])))
    return tasks


def _check_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LabError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _check(n: int, shots: int) -> None:
    if not isinstance(n, int) or not isinstance(shots, int) or n < 1 or shots < 0:
        raise LabError(f"at least one task and no fewer than 0 examples are needed, got n={n}, shots={shots}")

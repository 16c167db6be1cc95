"""Tasks: right answers, seeds, exact scoring; and that the embedded model leaves room to lose."""

from __future__ import annotations

import re

import pytest

from labkit.engine import generate_cached, load
from labkit.errors import LabError
from labkit.quant.blocks import copy_of
from labkit.quant.formats import Format
from labkit.quant.rtn import rtn
from labkit.quant.tasks import NAMES, Task, addition, multiplication, recall, score


@pytest.mark.parametrize(("make", "sign"), [(addition, "+"), (multiplication, "*")])
def test_sums_and_products_are_right_and_so_are_the_examples(make, sign):
    for task in make(50, seed=1, shots=3):
        *shown, asked = task.prompt.split("\n")
        assert len(shown) == 3 and asked.endswith(" =")
        for line in (*shown, f"{asked} {task.answer}"):
            a, found, b, _, result = line.split()
            assert found == sign and int(result) == (int(a) + int(b) if sign == "+" else int(a) * int(b))


def test_recall_asks_for_what_it_showed():
    for task in recall(50, seed=2, pairs=6, digits=3, shots=2):
        table, questions = task.prompt.split("\n\n")
        values = dict(line.split(": ") for line in table.split("\n"))
        *examples, asked = questions.split("\n")
        assert len(values) == 6 and all(re.fullmatch(r"\d{3}", v) for v in values.values())
        assert len(examples) == 2 and all(values[name] == v for name, v in (e.split(": ") for e in examples))
        assert asked.endswith(":") and values[asked[:-1]] == task.answer
        assert asked[:-1] not in questions[: -len(asked)], "an example must not give the answer away"


@pytest.mark.parametrize("make", [addition, multiplication, recall])
def test_the_seed_decides(make):
    assert make(20, seed=5) == make(20, seed=5) != make(20, seed=6)
    assert make(20, seed=5)[:7] == make(7, seed=5)  # more tasks, the same ones first
    assert len({t.prompt for t in make(200, seed=0)}) == 200


def test_digits_are_as_asked():
    numbers = [int(x) for t in addition(200, digits=3) for x in re.findall(r"(\d+) \+ (\d+)", t.prompt)[-1]]
    assert 100 <= min(numbers) and max(numbers) <= 999 and max(numbers) - min(numbers) > 800
    factors = {int(x) for t in multiplication(300, high=5) for x in re.findall(r"\d+(?= \*| =)", t.prompt)}
    assert factors == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("reply", "right"),
    [(" 42", 1), ("42\n3 + 5", 1), (" 42 \nx", 1), ("42 apples", 0), ("421", 0), ("4", 0), ("", 0), ("\n42", 0)],
)
def test_only_the_exact_answer_counts(reply, right):
    assert score(lambda prompt, n: reply, [Task("addition", "40 + 2 =", "42")]).value == right


def test_the_score_is_a_share_with_wilsons_interval():
    tasks = addition(40, seed=3)
    known = {t.prompt: t.answer for t in tasks[:30]}
    found = score(lambda prompt, n: known.get(prompt, "?"), tasks)
    assert (found.value, found.n) == (0.75, 40)
    assert (found.low, found.high) == pytest.approx((0.5981, 0.8581), abs=1e-4)
    none = score(lambda prompt, n: "?", tasks)
    assert none.value == none.low == 0 and 0.05 < none.high < 0.12


def test_a_model_has_room_to_show_that_it_does_not_stop():
    def longer(prompt, n):  # the answer and on, a character a token
        return (known[prompt] + "0000000")[:n]

    tasks = recall(5)
    known = {t.prompt: t.answer for t in tasks}
    assert score(longer, tasks).value == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: addition(0), r"at least one task .* got n=0, shots=4"),
        (lambda: recall(3, pairs=2, shots=2), rf"with 2 examples takes 3 to {len(NAMES)} pairs, got 2"),
        (lambda: recall(3, pairs=40), r"got 40"),
        (lambda: recall(3, shots=-1), r"shots=-1"),
        (lambda: addition(2.5), r"got n=2\.5"),
        (lambda: addition(3, digits=0), r"digits must be a whole number of at least 1, got 0"),
        (lambda: recall(3, digits=0), r"digits must be a whole number of at least 1, got 0"),
        (lambda: multiplication(3, high=1), r"high must be a whole number of at least 2, got 1"),
        (lambda: score(lambda p, n: "", []), r"nothing to score: the list of tasks is empty"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(LabError, match=message):
        call()


@pytest.mark.model
def test_the_real_model_can_lose_what_two_bits_take_from_it():
    model, tokenizer = load("smollm2-135m", progress=None)
    tasks = {"recall": recall(12, seed=1), "multiplication": multiplication(12, seed=1, high=9)}

    def complete(prompt, n):
        return tokenizer.decode(generate_cached(model, tokenizer.encode(prompt), n).token_ids, True)

    for kind, some in tasks.items():
        assert 0.25 <= score(complete, some).value < 1, kind
    model = copy_of(model)
    rtn(model, Format(2, 64))
    assert score(complete, tasks["recall"]).value == 0

"""Texts: enough of them, no sentence in both parts, true answers; cutting into blocks; refusals that name numbers."""

from __future__ import annotations

import json
import re
from datetime import date

import pytest
import torch

from labkit.engine import load
from labkit.errors import LabError
from labkit.quant.calibrate import DOMAINS, TEXTS, builtin, calibration_tokens, read_jsonl
from labkit.quant.queries import KINDS, business_queries, money, percent, rounded

NEEDED = {"calibration": 9000, "evaluation": 6000}


class Letters:
    """A tokenizer with a token for each character; 0 ends a text."""

    special_tokens = {"eos_token": "<end>"}

    class backend:
        @staticmethod
        def token_to_id(name):
            return {"<end>": 0}.get(name)

    def encode(self, text, allow_special=True):
        assert not allow_special, "a text is no place for special tokens"
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm2-135m", progress=None)[1]


def sentences(texts):
    return {s.strip() for text in texts for s in re.split(r"(?<=[.?!])\s+", text)}


@pytest.mark.model
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("part", NEEDED)
def test_there_is_enough_text(tokenizer, domain, part):
    blocks = calibration_tokens(builtin(domain, part), tokenizer)
    assert blocks.shape[0] == NEEDED[part] // 512 or blocks.numel() >= NEEDED[part]
    assert sum(len(tokenizer.encode(t)) for t in builtin(domain, part)) >= NEEDED[part]
    end = tokenizer.encode(tokenizer.special_tokens["eos_token"])
    assert len(end) == 1 and int((blocks == end[0]).sum()) >= 20  # real boundaries between texts


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_parts_share_no_sentence_and_repeat_no_text(domain):
    calibration, evaluation = builtin(domain, "calibration"), builtin(domain, "evaluation")
    assert not sentences(calibration) & sentences(evaluation)
    assert len({*calibration, *evaluation}) == len(calibration) + len(evaluation)
    parts = {row["part"] for row in read_jsonl(TEXTS / f"{domain}.jsonl")}
    assert parts == set(NEEDED), "a line of another part would never be read"


def test_prose_is_paragraphs_on_many_subjects():
    texts = builtin("prose", "calibration") + builtin("prose", "evaluation")
    assert len(texts) >= 60 and all(140 <= len(t.split()) <= 260 for t in texts)
    assert len({t.split(".")[0] for t in texts}) == len(texts)


def test_the_stored_queries_are_what_the_generator_gives():
    for part, n, seed in (("calibration", 72, 1), ("evaluation", 48, 2)):
        stored = builtin("business", part)
        made = business_queries(n, seed)
        assert [t for t in stored if t in made] == made and len(stored) >= n + 10


def test_queries_come_from_their_seed_and_all_kinds_come_up():
    assert business_queries(36, 3) == business_queries(36, 3) != business_queries(36, 4)
    assert len(set(business_queries(600, 5))) == 600
    assert sum(t.startswith("Table sales_") for t in business_queries(10 * len(KINDS), 6)) == 10
    with pytest.raises(LabError, match="at least one query must be asked for, got 0"):
        business_queries(0)


def cents(text):
    return [round(100 * float(x.replace(",", ""))) for x in re.findall(r"EUR ([\d,]+\.\d\d)", text)]


def test_the_answers_are_right():
    """Read back from the text alone, and reckoned anew."""
    seen = dict.fromkeys(("invoice", "quarters", "table", "overdue", "ledger", "margin"), 0)
    for text in business_queries(40 * len(KINDS), 8):
        if m := re.match(r"Invoice \S+, dated (\S+): (\d+) .* each, (\d+)% VAT, payable within (\d+) days", text):
            price, net, tax, total = cents(text)
            assert net == int(m[2]) * price and total == net + tax and abs(tax * 100 - net * int(m[3])) <= 50
            due = re.search(r"is due on (\S+)\.", text)[1]
            assert (date.fromisoformat(due) - date.fromisoformat(m[1])).days == int(m[4])
            seen["invoice"] += 1
        elif m := re.search(r"revenue \d+: .*How did Q(\d) \d+ compare with Q(\d) at", text):
            *q, change, year = cents(text)
            new, old = q[int(m[1]) - 1], q[int(m[2]) - 1]
            assert change == abs(new - old) and year == sum(q) and ("rose" in text) == (new >= old)
            assert abs(float(re.search(r"or ([\d.]+)%", text)[1]) - 100 * abs(new / old - 1)) <= 0.0501
            assert q[int(re.search(r"was Q(\d)", text)[1]) - 1] == max(q)
            seen["quarters"] += 1
        elif m := re.match(r"Table sales_\d+ .*?: (.*?)\. Query: .* > (\d+); Result: (.*)", text):
            rows = [r.split(", ", 2) for r in m[1].split("; ")]
            chosen = [r for r in rows if int(r[1]) > int(m[2])]
            assert [name for name, _, _ in rows if name in m[3]] == [name for name, _, _ in chosen]
            if chosen:
                orders = int(re.search(r"([\d,]+) orders", m[3])[1].replace(",", ""))
                assert orders == sum(int(r[1]) for r in chosen)
                assert cents(m[3]) == [sum(cents(r[2])[0] for r in chosen)]
            else:
                assert f"has {max(int(r[1]) for r in rows)} orders" in m[3]
            seen["table"] += 1
        elif m := re.search(r"was due on (\S+) and .* paid it on (\S+)\. .* at (\d+)% .* came (\d+) days late", text):
            amount, fee, total = cents(text)
            late = (date.fromisoformat(m[2]) - date.fromisoformat(m[1])).days
            assert late == int(m[4]) and total == amount + fee
            assert abs(fee - amount * int(m[3]) / 100 * late / 365) <= 0.501
            seen["overdue"] += 1
        elif m := re.match(r"Ledger: (.*?)\. What is the status of invoice (\d+)\?.* is (\w+); of the four", text):
            rows = {r.split(" | ")[0]: r.split(" | ")[1:] for r in m[1].split("; ")}
            assert rows[m[2]][2] == m[3]
            assert cents(text)[-1] == sum(cents(a)[0] for _, a, s in rows.values() if s != "paid")
            seen["ledger"] += 1
        elif m := re.search(r"a markup of ([\d.]+)% on cost, and a margin of ([\d.]+)%", text):
            cost, price, profit = cents(text)
            assert profit == price - cost
            assert abs(float(m[1]) - 100 * profit / cost) <= 0.0501 >= abs(float(m[2]) - 100 * profit / price)
            seen["margin"] += 1
    assert all(count == 40 for count in seen.values()), seen


def test_money_and_percent():
    assert money(123456789) == "EUR 1,234,567.89" and money(5, "USD") == "USD 0.05" and money(-150) == "-EUR 1.50"
    assert percent(1, 3) == "33.3%" and percent(2, 3) == "66.7%" and percent(-1, 8) == "-12.5%"
    assert percent(1, 2000) == "0.1%" and percent(-1, 90000) == "0.0%"  # half away from zero; no minus zero
    assert [rounded(n, 4) for n in (1, 2, 3, 6)] == [0, 1, 1, 2]


def test_blocks_hold_the_texts_in_order_with_the_end_token_between():
    blocks = calibration_tokens(["abc", "", "defg"], Letters(), length=4)
    assert blocks.dtype == torch.int64 and blocks.tolist() == [[97, 98, 99, 0], [100, 101, 102, 103]]
    assert calibration_tokens(["abc", "def"], Letters(), length=5).tolist() == [[97, 98, 99, 0, 100]]

    class Endless(Letters):
        special_tokens = {}

    assert calibration_tokens(["abc", "def"], Endless(), length=3).tolist() == [[97, 98, 99], [100, 101, 102]]


def test_of_many_blocks_evenly_spaced_ones_are_taken():
    text = "".join(chr(1000 + i) for i in range(100))
    got = calibration_tokens([text], Letters(), samples=3, length=10)
    assert got[:, 0].tolist() == [1000, 1040, 1090]
    assert calibration_tokens([text], Letters(), samples=99, length=10).shape == (10, 10)
    assert calibration_tokens([text], Letters(), samples=1, length=10).shape == (1, 10)


def test_own_text_comes_from_a_file(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('\ufeff{"text": "ab\u2028c", "more": 1}\n\n{"text": "de"}\n', encoding="utf-8")
    want = [[97, 98, 0x2028, 99, 0, 100, 101]]
    assert calibration_tokens(path, Letters(), length=7).tolist() == want
    assert calibration_tokens(str(path), Letters(), length=7).tolist() == want


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"own\.jsonl, line 3 is no JSON"),
        ("[" * 100_000, r"own\.jsonl, line 3 is no JSON"),
        ('["a"]', r'line 3 needs a string under "text"'),
        (json.dumps({"text": 5}), r'line 3 needs a string under "text"'),
        (json.dumps({"Text": "a"}), r'line 3 needs a string under "text", such as .*: \{"Text": "a"\}'),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "ab"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(LabError, match=message):
        calibration_tokens(path, Letters(), length=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: calibration_tokens([], t), r"has 0 tokens in 0 texts, and one block needs 512: give more text$"),
        (lambda t: calibration_tokens([" ", ""], t), r"has 0 tokens in 2 texts"),
        (lambda t: calibration_tokens(["abc", "de"], t, length=7), r"has 6 tokens in 2 texts, and one block needs 7"),
        (lambda t: calibration_tokens("no/such.jsonl", t), r"no/such\.jsonl cannot be read \(No such file.* list of"),
        (lambda t: calibration_tokens("~nosuchuser/x.jsonl", t), r"~nosuchuser/x\.jsonl cannot be read"),
        (lambda t: calibration_tokens(["a", 3], t), r"texts are strings, got int: 3"),
        (lambda t: calibration_tokens(None, t), r"a JSONL file's path or a list of texts, got None"),
        (lambda t: calibration_tokens(5, t), r"a JSONL file's path or a list of texts, got 5"),
        (lambda t: calibration_tokens(["a"], None), r"by the model's tokenizer, and this model came without one"),
        (lambda t: calibration_tokens(["a"], t, samples=0), r"samples must be a whole number of at least 1, got 0"),
        (lambda t: calibration_tokens(["a"], t, length=2.0), r"length must be a whole number of at least 1, got 2\.0"),
        (lambda t: builtin("poems", "evaluation"), r"prose, business in the parts .*, not of 'poems' in 'evaluation'"),
        (lambda t: builtin("prose", "test"), r"not of 'prose' in 'test'"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(LabError, match=message):
        call(Letters())


def test_another_encoding_is_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"text": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(LabError, match="is no UTF-8 text"):
        read_jsonl(path)


def test_the_texts_are_shipped():
    import tomllib

    root = TEXTS.parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["labkit"]
    shipped = {path for pattern in data for path in (root / "labkit").glob(pattern)}
    assert {TEXTS / f"{domain}.jsonl" for domain in DOMAINS} <= shipped

"""Claims as tests: the course's claims about inference, each decided by evidence a notebook computed.

``claims.json`` holds the claims in the course's own words. They go back to two field articles on running language
models on one GPU (S0 and S1). A notebook calls ``claim`` with what it found; the ledger shows verdict and evidence.
"""

from __future__ import annotations

import json
import textwrap
from functools import cache
from importlib.resources import files

from labkit.course import progress
from labkit.errors import LabError

WIDTH = 100  # of a printed line: the pages show as many characters, and break longer lines inside of words
VERDICTS = {True: "holds", False: "refuted", None: "open"}
_decided: dict[str, tuple[str, str]] = {}  # in this process, in the order they were decided


@cache
def claims() -> dict[str, dict]:
    """All claims by id: ``claim`` (its words), ``lab`` (where it is tested), ``expected`` (what the authors found)."""
    return {row["id"]: row for row in json.loads(files("labkit.course").joinpath("claims.json").read_text("utf-8"))}


def claim(claim_id: str, holds: bool | None, evidence: str) -> None:
    """Enter a verdict in the ledger, and print it with the claim's words and the evidence.

    ``holds=None``: it cannot be decided as it stands; evidence says why.

    Raises LabError for an unknown claim, a verdict that is not a truth value, or missing evidence.
    """
    row = claims().get(claim_id)
    if row is None:
        raise LabError(f"There is no claim {claim_id!r}; they are named like S0-01 and S1-150, see claims.json.")
    if holds is not None and type(holds).__name__ not in ("bool", "bool_"):  # numpy has a bool of its own
        raise LabError(f"Claim {claim_id}: holds must be True, False or None, got a {type(holds).__name__}.")
    holds = None if holds is None else bool(holds)
    if not isinstance(evidence, str) or not evidence.strip():
        raise LabError(f"Claim {claim_id}: a verdict needs its evidence in words and numbers.")
    verdict = VERDICTS[holds]
    _decided[claim_id] = (verdict, evidence)
    progress.keep("claims", claim_id, {"verdict": verdict, "evidence": evidence})
    print(f'{claim_id}  {verdict}: "{row["claim"]}"')
    print(textwrap.fill(evidence, WIDTH, initial_indent="    ", subsequent_indent="    "))


class Ledger:
    """The verdicts of this session as a table; ``verdicts`` maps a claim's id to (verdict, evidence)."""

    def __init__(self, verdicts: dict[str, tuple[str, str]]):
        self.verdicts = verdicts

    def __repr__(self) -> str:
        if not self.verdicts:
            return "No claim decided yet in this notebook."
        counts = {v: sum(1 for got, _ in self.verdicts.values() if got == v) for v in VERDICTS.values()}
        return f"{len(self.verdicts)} claims: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n)

    def _repr_markdown_(self) -> str:
        if not self.verdicts:
            return repr(self)
        rows = [
            f"| {id} | {_cell(claims()[id]['claim'])} | **{verdict}** | {_cell(evidence)} |"
            for id, (verdict, evidence) in self.verdicts.items()
        ]
        return "\n".join([f"{self!r}", "", "| claim | what it says | verdict | evidence |", "|---|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("$", "\\$").replace("\n", " ")


def ledger() -> Ledger:
    """The claims decided so far in this notebook, with their evidence."""
    return Ledger(dict(_decided))

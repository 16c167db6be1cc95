"""Text for calibration and for evaluation, as blocks of tokens.

Two domains come with the project, each in a part to calibrate with and a part to evaluate on that share no sentence:
"prose", plain paragraphs on many subjects, and "business", queries full of amounts, dates and percentages. Own text
comes as a file of JSON lines, each an object with a "text".
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from labkit.errors import LabError

TEXTS = Path(__file__).with_name("texts")
DOMAINS = ("prose", "business")
PARTS = ("calibration", "evaluation")


def builtin(domain: str, part: str) -> list[str]:
    """The project's texts of a domain ("prose", "business") and part ("calibration", "evaluation").

    Raises LabError for another name.
    """
    if domain not in DOMAINS or part not in PARTS:
        raise LabError(
            f"there are texts of the domains {', '.join(DOMAINS)} in the parts {', '.join(PARTS)}, "
            f"not of {domain!r} in {part!r}"
        )
    return [row["text"] for row in read_jsonl(TEXTS / f"{domain}.jsonl") if row["part"] == part]


def read_jsonl(path: str | Path) -> list[dict]:
    """The objects of a JSONL file, each with a string "text"; empty lines are passed over.

    Raises LabError for a file that cannot be read, and for the first line that is no such object, by its number.
    """
    path = Path(os.path.expanduser(path))  # Path's own raises RuntimeError where there is no such user
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON may hold a bare U+2028
    except OSError as error:
        raise LabError(
            f"{path} cannot be read ({error.strerror}); give a JSONL file, or a list of texts for texts themselves"
        ) from error
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is no UTF-8 text ({error}); save it as UTF-8") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path}, line {number} is no JSON ({error}); each line holds one object") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise LabError(f'{path}, line {number} needs a string under "text", such as {{"text": "…"}}: {line:.60}')
        rows.append(row)
    return rows


def calibration_tokens(
    source: str | Path | Sequence[str], tokenizer, samples: int = 128, length: int = 512
) -> torch.Tensor:
    """-> int64 [blocks, length], at most ``samples`` blocks, for calibration or evaluation.

    source: a JSONL file's path, or texts. They are joined with the tokenizer's end token between them (nothing, if it
    has none) and cut into blocks; tokens after the last whole block are left out. Of more than ``samples`` blocks,
    evenly spaced ones are taken, so that the end of the text counts as much as its beginning. What looks like a special
    token in a text is read as ordinary text.
    Raises LabError for text that does not fill one block, with both numbers, a source that is neither, or a model
    without a tokenizer.
    """
    for name, value in (("samples", samples), ("length", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LabError(f"{name} must be a whole number of at least 1, got {value!r}")
    if tokenizer is None:
        raise LabError("text is cut into tokens by the model's tokenizer, and this model came without one")
    if not isinstance(source, str | Path | Sequence):
        raise LabError(f"calibration text is a JSONL file's path or a list of texts, got {source!r:.60}")
    if isinstance(source, str | Path):
        texts, where = [row["text"] for row in read_jsonl(source)], str(source)
    else:
        texts, where = list(source), "the text"
        if not_text := [t for t in texts if not isinstance(t, str)]:
            raise LabError(f"texts are strings, got {type(not_text[0]).__name__}: {not_text[0]!r:.60}")
    end, ids = _end(tokenizer), []
    for text in texts:
        if text.strip():
            ids += (end if ids else []) + tokenizer.encode(text, allow_special=False)
    blocks = len(ids) // length
    if not blocks:
        raise LabError(
            f"{where} has {len(ids)} tokens in {len(texts)} texts, and one block needs {length}: give more text"
        )
    cut = torch.tensor(ids[: blocks * length], dtype=torch.int64).view(blocks, length)
    return cut[torch.linspace(0, blocks - 1, min(blocks, samples)).round().long()]


def _end(tokenizer) -> list[int]:
    """The end token, as a list of one; empty if the tokenizer has none."""
    name = tokenizer.special_tokens.get("eos_token")
    id = None if name is None else tokenizer.backend.token_to_id(name)
    return [] if id is None else [id]

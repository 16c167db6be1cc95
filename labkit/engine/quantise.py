"""One call from a model to an AWQ checkpoint of it: what ``labkit quantise`` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.engine.awq_folder import is_awq, save_awq
from labkit.engine.loader import load, model_folder, read_config, read_json
from labkit.errors import LabError
from labkit.quant.awq import awq
from labkit.quant.calibrate import builtin, calibration_tokens, read_jsonl
from labkit.quant.checkpoint import OLD_AWQ, OLD_GPTQ, check_layout, new_folder
from labkit.quant.formats import Format
from labkit.quant.gptq import gptq
from labkit.quant.rtn import rtn

FORMAT = Format(4, 64)  # 64 divides what 128 does, and SmolLM2's 576 as well
LENGTH = 512  # tokens of a calibration block, where the model has as many positions
METHODS = {"awq": awq, "gptq": gptq, "rtn": rtn}


def quantise_folder(
    source: str | Path,
    folder: str | Path,
    fmt: Format = FORMAT,
    method: str = "awq",
    calibration: str | Path | Sequence[str] | None = None,
    progress: Callable[[str], None] | None = print,
) -> Path:
    """Quantise a model and write it with its tokenizer as an AWQ checkpoint -> the folder, which ``load`` reads.

    source: a built-in name, a GGUF file or a Hugging Face folder. method: of METHODS; all are written in the same
    layout. calibration: a JSONL file's path or texts; None: the project's prose. The folder appears when it is whole,
    or not at all. What can be refused before the model is loaded is; raises LabError as ``load``, the method and
    ``save_awq`` do, for an unknown method, text for one that reads none, and a source that is quantised already.
    """
    if method not in METHODS:
        raise LabError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
    if method == "rtn" and calibration is not None:
        raise LabError("rtn rounds to the nearest and reads no text: leave the calibration text out, or take awq")
    check_layout(fmt)
    new_folder(folder)
    if isinstance(calibration, str | Path):
        calibration = [row["text"] for row in read_jsonl(calibration)]  # once: it may be a pipe
    where = model_folder(source, progress)
    read_config(where)  # says what a folder that is no model lacks
    known = is_awq(read_json(where / "config.json")) or (where / OLD_AWQ).is_file()
    if known or (where / OLD_GPTQ).is_file():
        kind = "an AWQ" if known else "a GPTQ"
        raise LabError(f"{where} is {kind} checkpoint already: quantise the model that it was made from")
    model, tokenizer = load(where, progress=progress)
    if method == "rtn":
        report = rtn(model, fmt)
    else:
        text = builtin("prose", "calibration") if calibration is None else calibration
        tokens = calibration_tokens(text, tokenizer, length=min(LENGTH, model.config.max_positions))
        report = METHODS[method](model, fmt, tokens, progress=progress is not None)
    return save_awq(model, report, folder, None if tokenizer is None else where)

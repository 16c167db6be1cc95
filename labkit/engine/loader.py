"""One call from a name, a file, a folder or a shape to a model that runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from labkit.engine.awq_folder import is_awq, load_awq
from labkit.engine.config import ModelConfig
from labkit.engine.fetch import BUILTIN, fetch_model
from labkit.engine.gguf import converted_folder
from labkit.engine.model import Model
from labkit.engine.packed import check_packable, check_quantization, round_and_pack
from labkit.engine.staging import as_device
from labkit.engine.tokenizer import Tokenizer
from labkit.engine.weights import load_weights, random_weights
from labkit.errors import LabError
from labkit.quant.checkpoint import OLD_AWQ, OLD_GPTQ

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    source: str | Path | ModelConfig = "smollm2-135m",
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] | None = print,
    quantization: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """(model, tokenizer) from a built-in name, a GGUF file, a Hugging Face folder (plain or AWQ), or a ModelConfig.

    A ModelConfig gets random weights from ``seed`` and no tokenizer. ``progress`` gets a line when something slow
    starts: a download, a conversion. quantization "awq": the products of an AWQ folder stay packed, random weights are
    rounded to 4 bits; None: an AWQ folder is dequantised.
    Raises LabError for a source that is none of these or is damaged, an unknown dtype or quantization, one that the
    source does not have, or a device that is not there. The converted copy of a GGUF file is made again if it is
    damaged.
    """
    dtype, device = _dtype(dtype), as_device(device)
    check_quantization(quantization)
    if quantization is not None:
        check_packable(dtype, device)
    if isinstance(source, ModelConfig):
        pack = None if quantization is None else round_and_pack
        return Model(source, random_weights(source, dtype, device, seed, pack)), None
    folder = model_folder(source, progress, quantization)
    config = read_config(folder)
    # Older checkpoints tell their format in a file of its own, whose name tells the method.
    old, gptq = ((folder / name).is_file() for name in (OLD_AWQ, OLD_GPTQ))
    if old or gptq or is_awq(read_json(folder / "config.json")):
        read = partial(load_awq, packed=quantization is not None)
    else:
        _refuse_plain(quantization, f"the weights of {folder} are not quantised")
        read = load_weights
    model = Model(config, read(folder, config, dtype, device))
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise LabError(f"{folder}: {tokenizer.vocab_size} tokens in tokenizer.json, {config.vocab_size} in config.json")
    return model, tokenizer


def read_config(folder: Path) -> ModelConfig:
    """The shape in ``folder``'s config.json. Where a generation_config.json lists end tokens, those hold: chat models
    end a turn with a token that config.json may not name."""
    try:
        hf = read_json(folder / "config.json")
        config = ModelConfig.from_hf({**hf, "quantization_config": None} if is_awq(hf) else hf)
        extra = folder / "generation_config.json"
        eos = read_json(extra).get("eos_token_id") if extra.exists() else None
        if eos is not None:
            config = replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    except (TypeError, AttributeError) as error:
        raise LabError(f"a JSON file of {folder} holds a value of the wrong kind ({error})") from error
    return config


def read_json(path: Path):
    """What a JSON file of a model folder holds. Raises LabError, with the path, for one that is none or not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LabError(f"{path.parent} has no {path.name}, so it is no Hugging Face model folder") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read ({error}); see that you may read it, or get it again") from error
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise LabError(f"{path} cannot be read as JSON ({error}); it may be incomplete: get it again") from error


def _refuse_plain(quantization: str | None, what: str) -> None:
    if quantization is not None:
        raise LabError(
            f"quantization={quantization!r} runs weights that are quantised already, and {what}; make a "
            f"checkpoint with `labkit quantise MODEL FOLDER` (in Python: labkit.engine.save_awq), and load that folder"
        )


def model_folder(source: str | Path, progress=print, quantization: str | None = None) -> Path:
    """The Hugging Face folder of a built-in name, a GGUF file (converted first) or a folder. Raises LabError as
    ``load`` does."""
    if not isinstance(source, str | Path):
        raise LabError(f"load takes a model's name, a path or a ModelConfig, got {source!r}")
    if source in BUILTIN:
        _refuse_plain(quantization, f"the built-in {source!r} is converted to fp32")
        return converted_folder(fetch_model(source, progress), progress)
    path = Path(os.path.expanduser(source))  # os.path calls what no path can be "not there", where Path would raise
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        _refuse_plain(quantization, f"the file {path} is converted to fp32")
        return converted_folder(path, progress)
    raise LabError(
        f"{str(source)!r} is no built-in model ({', '.join(sorted(BUILTIN))}), and no GGUF file or model folder here"
    )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        return dtype
    raise LabError(f"dtype {str(dtype)!r} is not supported; choose one of {', '.join(DTYPES)}")

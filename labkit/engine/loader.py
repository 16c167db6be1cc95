"""One call from a name, a file, a folder or a shape to a model that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from labkit.engine.awq_folder import is_awq, load_awq
from labkit.engine.config import ModelConfig
from labkit.engine.fetch import BUILTIN, fetch_model
from labkit.engine.gguf import converted_folder
from labkit.engine.model import Model
from labkit.engine.tokenizer import Tokenizer
from labkit.engine.weights import load_weights, random_weights
from labkit.errors import LabError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    source: str | Path | ModelConfig = "smollm2-135m",
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] | None = print,
) -> tuple[Model, Tokenizer | None]:
    """(model, tokenizer) from a built-in name, a GGUF file, a Hugging Face folder (plain or AWQ), or a ModelConfig.

    A ModelConfig gets random weights from ``seed`` and no tokenizer. ``progress`` gets a line when something slow
    starts: a download, a conversion. Raises LabError for a source that is none of these or is damaged, an unknown
    dtype, or a device that is not there. The converted copy of a GGUF file is made again if it is damaged.
    """
    dtype, device = _dtype(dtype), _device(device)
    if isinstance(source, ModelConfig):
        return Model(source, random_weights(source, dtype, device, seed)), None
    folder = _folder(source, progress)
    config = read_config(folder)
    old = (folder / "quant_config.json").is_file()  # where older AWQ checkpoints tell their format
    read = load_awq if old or is_awq(_read_json(folder / "config.json")) else load_weights
    model = Model(config, read(folder, config, dtype, device))
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise LabError(f"{folder}: {tokenizer.vocab_size} tokens in tokenizer.json, {config.vocab_size} in config.json")
    return model, tokenizer


def read_config(folder: Path) -> ModelConfig:
    """The shape in ``folder``'s config.json. Where a generation_config.json lists end tokens, those hold: chat models
    end a turn with a token that config.json may not name."""
    try:
        hf = _read_json(folder / "config.json")
        config = ModelConfig.from_hf({**hf, "quantization_config": None} if is_awq(hf) else hf)
        extra = folder / "generation_config.json"
        eos = _read_json(extra).get("eos_token_id") if extra.exists() else None
        if eos is not None:
            config = replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    except FileNotFoundError as error:
        raise LabError(f"{folder} has no config.json, so it is no Hugging Face model folder") from error
    except (TypeError, AttributeError) as error:
        raise LabError(f"a JSON file of {folder} holds a value of the wrong kind ({error})") from error
    return config


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise LabError(f"{path} cannot be read as JSON ({error}); it may be incomplete: get it again") from error


def _folder(source: str | Path, progress) -> Path:
    if not isinstance(source, str | Path):
        raise LabError(f"load takes a model's name, a path or a ModelConfig, got {source!r}")
    if source in BUILTIN:
        return converted_folder(fetch_model(source, progress), progress)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
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


def _device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LabError(f"{device!r} is no device; use 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LabError("device 'cuda' was asked for and torch finds no CUDA GPU; use device='cpu'")
    if device.type not in ("cpu", "cuda"):
        raise LabError(f"device {str(device)!r} is not supported; use 'cpu' or 'cuda'")
    return device

"""A safetensors file, read by hand.

8 bytes          n, the length of the header (little-endian)
n bytes          the header, JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, offsets from its end on
the rest         the tensors' bytes
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.errors import LabError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A tensor of a file: its bytes are [begin, end) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder: those its index lists, or model.safetensors.

    Raises LabError for a folder that is not there or cannot be read, an index that is none or names no files, or a file
    that is missing.
    """
    try:
        return _weight_files(Path(folder))
    except OSError as error:
        raise LabError(f"{folder} cannot be read ({error}); see that you may read it, or get it again") from error


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise LabError(f"there is no folder {folder}")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LabError(f"{index} is no safetensors index ({error!r})") from error
        if not names or not all(isinstance(name, str) for name in names):
            raise LabError(f"{index} is no safetensors index: its weight_map names no files")
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise LabError(f"{folder} has no {name}, where its weights should be")
    return [folder / name for name in names]


def places(path: Path) -> dict[str, Place]:
    """What a safetensors file holds, by name. Raises LabError, with the file's name, if it cannot be read, is something
    else, cut short, or holds a dtype that is not among DTYPES. As safetensors has it, the tensors lie one behind the
    other, without gaps."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            text = file.read(length) if length <= size - 8 else None
    except OSError as error:
        raise LabError(f"{path} cannot be read ({error}); see that you may read it, or get it again") from error
    if text is None:
        raise LabError(f"{path} is no safetensors file, or cut short: it has {size} bytes and no whole header")
    try:
        header = json.loads(text)
        about = header.pop("__metadata__", None)
        if not isinstance(about, dict | None) or not all(isinstance(value, str) for value in (about or {}).values()):
            raise ValueError(f"__metadata__: {about!r:.60}")
        raw = {name: _entry(t) for name, t in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from error
    if unknown := next((kind for kind, *_ in raw.values() if kind not in DTYPES), None):
        raise LabError(f"{path} holds tensors of dtype {unknown!r}; {', '.join(DTYPES)} can be loaded")
    base = 8 + length
    found = {name: Place(DTYPES[kind], shape, base + a, base + b) for name, (kind, shape, a, b) in raw.items()}
    end = base
    for name, place in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.end - place.begin != math.prod(place.shape) * place.dtype.itemsize:
            raise LabError(f"{path} is damaged: the place of {name} does not fit its shape {list(place.shape)}")
        if place.begin != end:
            raise LabError(
                f"{path} is damaged: the place of {name} does not fit, as it begins at {place.begin - base} and what "
                f"lies before it ends at {end - base}"
            )
        end = place.end
    if end != size:
        raise LabError(f"{path} is cut short or damaged: it has {size} bytes, and its header promises {end}")
    return found


def _entry(about: dict) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) that the header tells of a tensor. Raises ValueError, TypeError or KeyError where it
    tells something else."""
    dtype, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if not isinstance(dtype, str) or any(type(n) is not int for n in (*shape, begin, end)) or min(shape, default=0) < 0:
        raise ValueError(f"{about}")
    if math.prod(n or 1 for n in shape) >= 1 << 60:  # beside a size of 0 no length tells against it, and torch fails
        raise ValueError(f"{about}")
    return dtype, shape, begin, end


def map_file(path: Path) -> torch.Tensor:
    """The file's bytes, uint8, mapped: a page is read when it is first touched. Writing to them does not reach the
    file. The mapping ends with the last tensor that looks at it."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def tensor_at(data: torch.Tensor, place: Place) -> torch.Tensor:
    """A view of a file's bytes, or a copy where the place is not aligned to the dtype."""
    part = data[place.begin : place.end]
    if (data.data_ptr() + place.begin) % place.dtype.itemsize:
        part = part.clone()
    return part.view(place.dtype).view(place.shape)

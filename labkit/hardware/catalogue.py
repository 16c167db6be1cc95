"""The catalogue of GPUs: figures from public documents, each GPU with its source, in ``catalogue.json``."""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path

from labkit.errors import LabError
from labkit.hardware.spec import DeviceSpec

_FILE = Path(__file__).with_name("catalogue.json")


@cache
def _load() -> tuple[dict, tuple[DeviceSpec, ...]]:
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    limits = data["architectures"]
    specs = tuple(
        DeviceSpec(**{**gpu, "aliases": tuple(gpu["aliases"])}, **limits[gpu["compute_capability"]])
        for gpu in data["gpus"]
    )
    return limits, specs


def specs() -> tuple[DeviceSpec, ...]:
    """Every GPU of the catalogue, oldest architecture first."""
    return _load()[1]


def names() -> list[str]:
    """The GPUs' names as torch and NVML report them."""
    return [spec.name for spec in specs()]


def limits(compute_capability: str) -> dict:
    """Per-SM limits of an architecture ("9.0"); an empty dict for one that the catalogue does not hold."""
    return dict(_load()[0].get(compute_capability, {}))


def slug(name: str) -> str:
    """The name of a GPU's recording file without its ending: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _key(name: str) -> str:
    """Case, spaces, dashes, vendor words and a MIG profile do not tell GPUs apart."""
    name = re.sub(r"\bmig\b.*$", "", name.lower())
    return re.sub(r"[^a-z0-9]|nvidia|geforce|rtx", "", name)


def find(name: str) -> DeviceSpec:
    """The GPU of that name. Case, spaces, dashes, "NVIDIA", "GeForce" and "RTX" are ignored; "4090" is enough.

    Raises LabError for a name that fits none, naming the nearest, or several, naming them.
    """
    if not isinstance(name, str):
        raise LabError(f"A GPU is asked for by its name, a text such as 'H200' or 'RTX 4090'; got {name!r}.")
    key = _key(name)
    for spec in specs():
        if key in {_key(n) for n in (spec.name, slug(spec.name), *spec.aliases)}:
            return spec
    several = [s.name for s in specs() if key and any(_key(n).startswith(key) for n in (s.name, *s.aliases))]
    if len(several) > 1:
        raise LabError(f"{name!r} fits several GPUs of the catalogue: {', '.join(several)}. Name one of them.")
    known = {_key(n): s.name for s in specs() for n in (s.name, *s.aliases)}
    near = list(dict.fromkeys(known[k] for k in difflib.get_close_matches(key, known, n=4, cutoff=0.4)))
    raise LabError(f"No GPU {name!r} in the catalogue; the nearest are {', '.join(near or names())}.")

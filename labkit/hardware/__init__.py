"""What the machine is: a catalogue of GPUs with sources, the live probe, the NVML monitor."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from labkit.errors import LabError
from labkit.hardware import catalogue
from labkit.hardware.monitor import Monitor
from labkit.hardware.probe import Difference, Probe, probe
from labkit.hardware.spec import DeviceSpec
from labkit.hardware.tier import is_live

RECORDINGS = Path(__file__).parent.parent / "recordings"
DEFAULT_RECORDED_GPU = "NVIDIA H200"

__all__ = [
    "DEFAULT_RECORDED_GPU",
    "RECORDINGS",
    "DeviceSpec",
    "Difference",
    "Monitor",
    "Probe",
    "catalogue",
    "device",
    "is_live",
    "probe",
    "recorded_gpu",
]


def recorded_gpu(folder: Path | None = None) -> str:
    """The GPU whose recording is replayed: the default, or ``$LABKIT_RECORDED_GPU`` if ``folder`` holds its recording.

    Raises LabError for a GPU that the catalogue does not know or that has no recording.
    """
    wanted = os.environ.get("LABKIT_RECORDED_GPU")
    if not wanted:
        return DEFAULT_RECORDED_GPU
    folder = folder or RECORDINGS
    have = ", ".join(sorted(path.stem for path in folder.glob("*.json"))) or "none"
    try:
        name = catalogue.find(wanted).name
    except LabError as error:
        raise LabError(
            f"LABKIT_RECORDED_GPU is {wanted!r}, which does not name one GPU of the catalogue; "
            f"recordings here: {have}. Set it to one of these, or unset it."
        ) from error
    if not (folder / f"{catalogue.slug(name)}.json").is_file():
        raise LabError(
            f"LABKIT_RECORDED_GPU names {name}, but there is no recording {catalogue.slug(name)}.json; "
            f"recordings here: {have}. Unset it, or take one on that GPU with `labkit record`."
        )
    return name


@cache
def _live_spec() -> DeviceSpec:
    found = probe()
    return replace(found.spec, remarks=(*map(str, found.differences), *found.notes))


def device() -> DeviceSpec:
    """The GPU the figures belong to: the probed one on the live tier, otherwise the one of the recording."""
    return _live_spec() if is_live() else catalogue.find(recorded_gpu())

"""The course's shared package. ``import labkit as lab``; names are loaded when they are first used.

Loading lazily keeps ``import labkit.engine`` free of matplotlib and ipywidgets, and lets ``lab.setup()`` choose the
tier before any kernel is imported.
"""

from __future__ import annotations

import importlib

_WHERE = {
    "setup": "labkit.course.session",
    "device": "labkit.hardware",
    "is_live": "labkit.hardware",
    "Monitor": "labkit.hardware",
    "reading": "labkit.measure",
    "recorded": "labkit.measure",
    "ceilings": "labkit.measure",
    "compile_kernel": "labkit.measure",
    "ncu": "labkit.measure",
    "predict": "labkit.course.predict",
    "score": "labkit.course.predict",
    "number": "labkit.course.predict",
    "Todo": "labkit.course.exercise",
    "check": "labkit.course.check",
    "use": "labkit.course.check",
    "solution": "labkit.course.check",
    "claim": "labkit.course.claims",
    "ledger": "labkit.course.claims",
    "show": "labkit.course.style",
    "Explorer": "labkit.course.explore",
    "Roofline": "labkit.analysis",
    "Point": "labkit.analysis",
    "decode_step": "labkit.analysis",
    "prefill_step": "labkit.analysis",
    "operators": "labkit.analysis",
    "crossover_tokens": "labkit.analysis",
    "bank_access": "labkit.analysis",
    "column_access": "labkit.analysis",
    "row_access": "labkit.analysis",
    "padded": "labkit.analysis",
    "swizzled": "labkit.analysis",
    "wavefronts": "labkit.analysis",
    "coalescing": "labkit.analysis",
    "strided": "labkit.analysis",
    "row_requests": "labkit.analysis",
    "lane_efficiency": "labkit.analysis",
    "occupancy": "labkit.analysis",
    "waves": "labkit.analysis",
    "LabError": "labkit.errors",
}
_RENAMED = {
    "gpu": ("labkit.hardware.catalogue", "find"),
    "models": ("labkit.engine.presets", "MODELS"),
    "doctor": ("labkit.course.doctor", "print_doctor"),
}

__all__ = sorted({"measure", *_WHERE, *_RENAMED})


def __getattr__(name: str):
    if name == "measure":  # a package that can be called; the import below sets it on this module
        return importlib.import_module("labkit.measure")
    if name in _RENAMED:
        module, attribute = _RENAMED[name]
    elif name in _WHERE:
        module, attribute = _WHERE[name], name
    else:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__():
    return __all__

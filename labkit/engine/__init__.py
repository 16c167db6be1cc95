"""The mini-engine. Names load on first use, so that importing the package costs nothing."""

import sys
from importlib import import_module
from types import ModuleType

_HOMES = {
    "MODELS": "presets",
    "ModelConfig": "config",
    "KVCache": "cache",
    "Model": "model",
    "Tokenizer": "tokenizer",
    "TokenStream": "tokenizer",
    "Generation": "loops",
    "generate_cached": "loops",
    "generate_recompute": "loops",
    "fetch_model": "fetch",
    "verify_model": "fetch",
    "load": "loader",
    "quantised_model": "packed",
    "save_awq": "awq_folder",
    "load_tensors": "staging",
    "measure_loading": "staging",
    "LLM": "llm",
    "SamplingParams": "request",
    "Completion": "core",
    "Request": "request",
    "BlockPool": "pool",
    "Scheduler": "scheduler",
    "Runner": "runner",
    "Trace": "trace",
    "TraceView": "trace_view",
    "CostModel": "simulate",
    "simulate": "simulate",
    "Arrival": "arrivals",
    "poisson_load": "arrivals",
    "gamma_load": "arrivals",
    "on_off_load": "arrivals",
    "replayed_load": "arrivals",
    "with_lengths": "arrivals",
    "with_priorities": "arrivals",
}
__all__ = sorted(_HOMES)


class _Package(ModuleType):
    """Python binds a submodule to its package when it is imported: ``labkit.engine.simulate`` would then be the module
    simulate.py and no longer the function ``simulate``. The names above win."""

    def __setattr__(self, name: str, value) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return __all__

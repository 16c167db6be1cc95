"""The mini-engine. Names load on first use, so that importing the package costs nothing."""

from importlib import import_module

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
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return __all__

"""Fixtures of the engine's tests: the embedded model, transformers as the oracle, and an empty home."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the oracle reads local files only

import pytest
import torch


@pytest.fixture(scope="session")
def smollm():
    """(model, tokenizer) of the embedded model, as a learner gets it."""
    from labkit.engine import load

    return load("smollm2-135m", progress=None)


@pytest.fixture(scope="session")
def oracle(smollm):
    """The same file read and run by transformers. It asks for ``smollm`` first, which fetches the file."""
    from transformers import AutoModelForCausalLM

    from labkit.engine import fetch_model

    path = fetch_model("smollm2-135m", progress=None)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """An empty $LABKIT_HOME."""
    home = tmp_path / "home"
    monkeypatch.setenv("LABKIT_HOME", str(home))
    return home

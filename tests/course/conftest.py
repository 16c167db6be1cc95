import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Each test has a progress file of its own."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_LEARNER", "ada")
    return tmp_path

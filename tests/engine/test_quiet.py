"""The garbage collector is held off while an engine lives, and no longer."""

import gc

import pytest

from labkit.engine.quiet import freeze_while_alive


class Owner:
    pass


@pytest.fixture
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_are_set_aside_until_the_last_owner_is_gone(thawed):
    first, second = Owner(), Owner()
    freeze_while_alive(first)
    held = gc.get_freeze_count()
    assert held > 1000
    freeze_while_alive(second)
    del first
    assert gc.get_freeze_count() > held - 1000
    del second
    assert gc.get_freeze_count() == 0


def test_what_became_garbage_meanwhile_is_collected_afterwards(thawed):
    ring, gone = Owner(), []
    ring.itself, ring.witness = ring, type("Witness", (), {"__del__": lambda self: gone.append(1)})()
    owner = Owner()
    freeze_while_alive(owner)
    del ring
    gc.collect()
    assert not gone, "frozen"
    del owner
    gc.collect()
    assert gone

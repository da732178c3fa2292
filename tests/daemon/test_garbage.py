"""The garbage collector during and after a round."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from slurm_migbatch.daemon.garbage import uncollected


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def test_the_collector_is_disabled_for_the_block_only() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_was_disabled_before_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_many_new_objects_are_frozen() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        site = [[number] for number in range(200_000)]
    assert gc.get_freeze_count() >= before + len(site)


def test_few_new_objects_are_not_frozen() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        site = [[number] for number in range(1000)]
    assert (gc.get_freeze_count(), len(site)) == (before, 1000)

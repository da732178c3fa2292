"""The garbage collector during and after a round."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_migbatch.config import load
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon import main
from slurm_migbatch.daemon.garbage import collect_all, uncollected


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


@pytest.mark.slow
def test_a_collector_that_was_disabled_before_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_many_new_objects_are_frozen() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        site = [[number] for number in range(200_000)]
    assert gc.get_freeze_count() >= before + len(site)


@pytest.mark.slow
def test_few_new_objects_are_not_frozen() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        site = [[number] for number in range(1000)]
    assert (gc.get_freeze_count(), len(site)) == (before, 1000)


@pytest.mark.slow
def test_objects_that_survive_are_frozen_again() -> None:
    before = [[number] for number in range(1000)]
    gc.freeze()
    after = [[number] for number in range(1000)]
    collect_all()
    assert gc.get_freeze_count() >= len(before) + len(after)
    assert not any(thing is before or thing is after for thing in gc.get_objects())


class EndlessTerm:
    """The role of a migbatchd that is always active."""

    active, number = True, 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        """Do nothing."""


class LargeSite:
    """A service that knows a large site, and is part of a reference cycle as the real one is."""

    def __init__(self, when_ready: Callable[[], None]) -> None:
        self.when_ready, self.itself = when_ready, self

    async def run(self, stop: asyncio.Event, _ready: Callable[[], None]) -> None:
        with uncollected():
            self.site = [[number] for number in range(200_000)]
        self.when_ready()
        await stop.wait()


@pytest.mark.slow
def test_a_service_is_freed_after_a_reload_though_its_objects_were_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, path = tmp_path / "migbatch.db", tmp_path / "migbatch.toml"
    database.touch()
    path.write_text(f'[store]\nurl = "sqlite:///{database}"\n')
    services: list[weakref.ref[LargeSite]] = []

    def when_ready() -> None:
        os.kill(os.getpid(), signal.SIGHUP if len(services) < 3 else signal.SIGTERM)

    def compose(*_: object) -> LargeSite:
        service = LargeSite(when_ready)
        services.append(weakref.ref(service))
        return service

    monkeypatch.setattr(main, "compose", compose)
    monkeypatch.setattr(main, "keeper_of", lambda _: EndlessTerm())
    monkeypatch.setattr(logs, "setup", lambda _: None)
    asyncio.run(main.serve(load(path), str(path)))
    assert [service() for service in services[:-1]] == [None, None]

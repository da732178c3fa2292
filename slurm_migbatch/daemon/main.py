"""Serve until SIGTERM, and with another configuration after SIGHUP: the program `migbatchd`.

It runs as root or as SlurmUser: `scontrol update NodeName=` needs either, slurmctld (as SlurmUser) must reach the
submit socket, and munge accepts node messages for either. It drops no privileges; the unit file selects the user.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from slurm_migbatch.config import Config, ConfigError, load
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.compose import compose, keeper_of
from slurm_migbatch.daemon.garbage import collect_all
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.daemon.standby import Standby
from slurm_migbatch.daemon.tasks import cancel, run_forever
from slurm_migbatch.daemon.term import TermKeeper
from slurm_migbatch.node.auth import AuthError, UsedCredentials
from slurm_migbatch.node.notify import notify
from slurm_migbatch.store.engines import sqlite_file
from slurm_migbatch.store.errors import StoreError

log = logging.getLogger(__name__)


async def serve(config: Config, path: str) -> None:
    """Run one service after the other, or the standby, according to the term, until SIGTERM."""
    keeper = keeper_of(config)
    control = _Control(asyncio.get_running_loop())
    keeper.on_change = control.turn.set
    services = _Services(config, path, keeper, control.turn)
    control.on_reload = services.reload
    watching = asyncio.create_task(run_forever("the term", keeper.run))
    try:
        while True:
            try:
                await services.running.run(control.turn, services.ready)
            except OSError as error:
                await services.go_back(error)
                continue
            control.turn.clear()
            if control.ending:
                break
            if not keeper.active:
                await asyncio.to_thread(keeper.resign)
            await services.advance()
        await _hand_over(services.running, None)
    finally:
        await cancel(watching)
        await asyncio.to_thread(keeper.close)
        notify("STOPPING=1")


class _Services:
    """The running service or standby, and the one that a reload has composed.

    A reload composes the next service with the new configuration, and if that succeeds ends the running one cleanly;
    the next one gets the old configuration again if addresses or sockets of the new one cannot be used. Submissions are
    answered meanwhile: the process of the old service continues until that of the next one is ready.
    """

    def __init__(self, config: Config, path: str, keeper: TermKeeper, turn: asyncio.Event) -> None:
        self._config, self._path, self._keeper, self._turn = config, path, keeper, turn
        self._used = UsedCredentials()  # a reload must not make a credential valid once more
        self.running = compose(config, keeper, self._used)
        self._replaced: Config | None = None  # by a reload, if anything
        self._following: _Composed | None = None

    def reload(self) -> None:
        """Compose the next service, if the configuration can be used, and let the running one end."""
        composed = _compose_again(self._path, self._config, self._keeper, self._used)
        if composed is None:
            return
        self._following = composed
        if isinstance(self.running, Service):
            self.running.submit.leave()
        self._turn.set()

    def ready(self) -> None:
        """Say that the running service listens."""
        notify("READY=1\nSTATUS=serving")
        if self._replaced is not None:
            log.info("configuration reloaded", extra={"path": self._path})

    async def advance(self) -> None:
        """Replace the service that has ended by the next one."""
        ready, self._following, self._replaced = self._following, None, None
        if ready is not None:
            self._config, self._replaced = ready.config, self._config
        if ready is not None and ready.term == _term(self._keeper):
            await self._replace(ready.service)
        else:  # one that was composed before this migbatchd became active or standby cannot be used
            await self._replace(self._composed())

    async def go_back(self, error: OSError) -> None:
        """Return to the configuration before the reload, with which the service cannot run; raise `error` if none."""
        if self._replaced is None:
            raise error
        log.error("the new configuration is not applied: %s", error.strerror or error)
        logs.setup(self._replaced.daemon.log_level)
        self._config, self._replaced = self._replaced, None
        await self._replace(self._composed())

    def _composed(self) -> Service | Standby:
        return compose(self._config, self._keeper, self._used)

    async def _replace(self, service: Service | Standby) -> None:
        before, self.running = self.running, service
        await _hand_over(before, service)
        del before
        collect_all()


class _Composed(NamedTuple):
    """A service, its configuration, and the term for which it was composed."""

    service: Service | Standby
    config: Config
    term: tuple[bool, int]


def _term(keeper: TermKeeper) -> tuple[bool, int]:
    return keeper.active, keeper.number


def _compose_again(path: str, old: Config, keeper: TermKeeper, used: UsedCredentials) -> _Composed | None:
    """Compose a service with the configuration at `path`; None if that cannot be done, for a reason that is logged."""
    notify("RELOADING=1")
    composed = None
    try:
        config = _reloaded(path, old)
        file = sqlite_file(config.store.url)
        if file is not None and not file.exists():  # the next service would create another one
            raise StoreError(f"{file} was moved or deleted: put it back, or restart migbatchd to begin a new record")
        Scraping.of(config)  # monitoring keeps the old token
        composed = _Composed(compose(config, keeper, used), config, _term(keeper))
        logs.setup(config.daemon.log_level)
    except (ConfigError, AuthError, StoreError) as error:
        log.error("the new configuration is not applied: %s", str(error).replace("\n", "; "))
    finally:
        if composed is None:
            notify("READY=1")
    return composed


async def _hand_over(before: Service | Standby, after: Service | Standby | None) -> None:
    """Let the process that answers submissions continue for the next service; end it if there is none."""
    if not isinstance(before, Service):
        return
    if isinstance(after, Service):
        after.submit.succeed(before.submit)
    else:
        await before.submit.close()


class _Control:
    """Requests by signals."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turn = asyncio.Event()
        self.ending = False
        self.on_reload: Callable[[], None] = lambda: None
        loop.add_signal_handler(signal.SIGTERM, self.end, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self.end, "SIGINT")
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def end(self, name: str) -> None:
        log.info("stopping on %s", name)
        self.ending = True
        self.turn.set()

    def reload(self) -> None:
        self.on_reload()


def _reloaded(path: str, old: Config) -> Config:
    """Return the configuration at `path`, with the keys of the old one that need a restart. Raises ConfigError."""
    config = load(path)
    if config.daemon.run_dir != old.daemon.run_dir:
        log.warning("[daemon] run_dir = %r takes effect after a restart of migbatchd", config.daemon.run_dir)
        config = replace(config, daemon=replace(config.daemon, run_dir=old.daemon.run_dir))
    if config.store.url != old.store.url:
        log.warning("[store] url takes effect after a restart of migbatchd")
        config = replace(config, store=replace(config.store, url=old.store.url))
    return config

"""Serve until SIGTERM, and with another configuration after SIGHUP: what the program `migbatchd` runs.

It runs as root or as SlurmUser: `scontrol update NodeName=` needs either, slurmctld (as SlurmUser) must reach the
submit socket, and munge accepts node messages for either. It drops no privileges; the unit file picks the user.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from slurm_migbatch.config import Config, ConfigError, load
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.compose import compose
from slurm_migbatch.daemon.sdnotify import notify
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import AuthError
from slurm_migbatch.store.errors import StoreError

log = logging.getLogger(__name__)


async def serve(config: Config, path: str, make: Callable[[Config], Service] = compose) -> None:
    """Run one service after the other: a reload ends one cleanly and starts the next with the new configuration."""
    loop = asyncio.get_running_loop()
    control = _Control()
    loop.add_signal_handler(signal.SIGTERM, control.end, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, control.end, "SIGINT")
    loop.add_signal_handler(signal.SIGHUP, control.reload)
    service = make(config)
    while True:
        control.turn.clear()
        await service.run(control.turn, lambda: notify("READY=1\nSTATUS=serving"))
        if control.ending:
            notify("STOPPING=1")
            return
        wanted = _reloaded(path, config)
        try:
            service, config = make(wanted), wanted
        except (AuthError, StoreError) as error:
            log.error("the configuration is not taken over: %s", error)
            service = make(config)


class _Control:
    def __init__(self) -> None:
        self.turn = asyncio.Event()
        self.ending = False

    def end(self, name: str) -> None:
        log.info("stopping on %s", name)
        self.ending = True
        self.turn.set()

    def reload(self) -> None:
        notify("RELOADING=1")
        self.turn.set()


def _reloaded(path: str, old: Config) -> Config:
    try:
        config = load(path)
    except ConfigError as error:
        log.error("the configuration is not taken over: %s", str(error).replace("\n", "; "))
        return old
    if config.daemon.run_dir != old.daemon.run_dir:
        log.warning("run_dir changes at the next start only")
    logs.setup(config.daemon.log_level)
    log.info("configuration read again", extra={"path": path})
    return config

"""Compose the service from a configuration: the only module that names the concrete components."""

from __future__ import annotations

import logging
import sys
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from slurm_migbatch.config import Config
from slurm_migbatch.config.marks import marks
from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.daemon.ended import HistoryClient, PyslurmHistoryClient, SlurmrestdHistoryClient
from slurm_migbatch.daemon.facts import slurm_uids
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.daemon.standby import Standby
from slurm_migbatch.daemon.term import TermKeeper
from slurm_migbatch.node.auth import AuthError, Signer, UsedCredentials, make_signer
from slurm_migbatch.node.notify import notify
from slurm_migbatch.slurm.users import name_of
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.queries import identity

log = logging.getLogger(__name__)

_UPGRADE_S: Final = 3600
"""Seconds that the migration of a record may take at the start."""


def keeper_of(config: Config) -> TermKeeper:
    """Create the component that decides whether this migbatchd is active.

    Raises:
        StoreError: the database cannot be used and waiting would not help.
    """
    url = config.store.url
    _check_store(url)
    shared = not url.startswith("sqlite")
    return TermKeeper(_commands(config.cluster), (lambda: open_store(url)) if shared else None)


def compose(config: Config, keeper: TermKeeper, used: UsedCredentials) -> Service | Standby:
    """Create the service for `config`, or its standby; `used`: the credentials that the services before have accepted.

    Raises:
        AuthError: the authentication is missing or not safe.
        StoreError: the database cannot be used and waiting would not help.
    """
    database_marks = _marks(config)
    client, signer, term = client_of(config.cluster), signer_of(config, used), keeper.number
    keeper.slurm = _commands(config.cluster)
    if not keeper.active:
        return Standby(config, keeper, client.settings, database_marks)
    client.before_change = keeper.check
    return Service(
        config,
        client=client,
        open_store=lambda: open_store(config.store.url, term=term),
        signer=signer,
        activity=keeper,
        marks=database_marks,
        scraping=_scraping(config),
    )


def _scraping(config: Config) -> Scraping:
    """Return the access to metrics: this host's alone if the token for others cannot be used, as slices do not depend
    on monitoring, and a standby would notice only when it has to take over.
    """
    try:
        return Scraping.of(config)
    except AuthError as error:
        log.error("other hosts cannot read metrics before migbatchd is reloaded: %s", error)
        return Scraping()


def _commands(cluster: ClusterConfig) -> HistoryClient:
    """Create the keeper's client: scontrol, whatever lists the queue."""
    return HistoryClient(*cluster.commands)


def client_of(cluster: ClusterConfig) -> HistoryClient:
    """Create the client of Slurm: slurmrestd if configured, pyslurm if it works on this host, else Slurm's commands."""
    if cluster.backend == "slurmrestd":
        address, token, user = cluster.slurmrestd, cluster.slurmrestd_token, name_of(cluster.slurm_user)
        rest_client = SlurmrestdHistoryClient(*cluster.commands, address=address, token_file=token, user=user)
        if why := rest_client.probe():  # retried at every query: a site may have no commands to fall back on
            log.warning("cannot use slurmrestd, so the state of Slurm is unknown: %s", why)
        else:
            log.info("using slurmrestd at %s with API version v0.0.%d", cluster.slurmrestd, rest_client.api.version)
        return rest_client
    if cluster.backend != "cli":
        client = PyslurmHistoryClient(*cluster.commands, python=(cluster.pyslurm_python or sys.executable,))
        why = client.probe()
        if not why:
            log.info("using pyslurm to list the queue")
            return client
        client.close()
        level = logging.WARNING if cluster.backend == "pyslurm" else logging.INFO
        log.log(level, "using Slurm's commands to list the queue, because pyslurm cannot be used: %s", why)
    return HistoryClient(*cluster.commands)


def _marks(config: Config) -> dict[str, str]:
    """Return the marks of a configuration whose database several hosts can use; raises as `_check_store` does."""
    database = "" if config.store.url.startswith("sqlite") else _check_store(config.store.url)
    return marks(config, database) if database else {}


def _check_store(url: str) -> str:
    """Return the identity of the database; empty if it does not answer yet."""
    try:
        with open_store(url, upgrading=_announce_upgrade) as store:
            return store.read(identity)
    except StoreError as error:
        if not isinstance(error.__cause__, SQLAlchemyError):
            raise
        return ""  # locked, full or not started yet: the store writer waits for it and reports it


def _announce_upgrade() -> None:
    """Have systemd wait: it would kill this process after the usual time for a start, and the next one likewise."""
    log.info("migrating the record of an older release, which takes long if it is large")
    notify(f"EXTEND_TIMEOUT_USEC={_UPGRADE_S * 1_000_000}\nSTATUS=migrating the record")


def signer_of(config: Config, used: UsedCredentials) -> Signer:
    """Create the signer, which authenticates the controller to nodes and accepts messages of root and SlurmUser.

    None of the credentials in `used` is accepted again.
    """
    api = config.node_api
    uids = slurm_uids(config)
    try:
        return make_signer(api.auth, munge_socket=api.munge_socket, token_file=api.token_file, uids=uids, used=used)
    except AuthError as error:
        raise AuthError(f"[node_api]: {error}") from None

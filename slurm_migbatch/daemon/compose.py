"""Puts the service together from a configuration: the only place that names the real parts."""

from __future__ import annotations

import logging

from sqlalchemy.exc import SQLAlchemyError

from slurm_migbatch.config import Config
from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.daemon.ended import HistoryClient, PyslurmHistoryClient
from slurm_migbatch.daemon.facts import slurm_uids
from slurm_migbatch.daemon.history import open_history
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import AuthError, Signer, make_signer
from slurm_migbatch.store.errors import StoreError

log = logging.getLogger(__name__)


def compose(config: Config) -> Service:
    """Make the service for `config`.

    Raises:
        AuthError: the means of authentication is missing or not safe.
        StoreError: the database cannot be used and waiting would not help.
    """
    _check_store(config.store.url)
    return Service(
        config,
        client=client_of(config.cluster),
        open_store=lambda: open_history(config.store.url),
        signer=signer_of(config),
    )


def client_of(cluster: ClusterConfig) -> HistoryClient:
    """Make the client of Slurm: pyslurm where it works here, else Slurm's commands, which show the same."""
    if cluster.backend != "cli":
        client = PyslurmHistoryClient(cluster.slurm_bin or None, cluster.slurm_conf or None, cluster.timeout_s)
        why = client.probe()
        if not why:
            log.info("pyslurm looks at the queue")
            return client
        client.close()
        level = logging.WARNING if cluster.backend == "pyslurm" else logging.INFO
        log.log(level, "Slurm's commands look at the queue, because pyslurm cannot be used: %s", why)
    return HistoryClient(cluster.slurm_bin or None, cluster.slurm_conf or None, cluster.timeout_s)


def _check_store(url: str) -> None:
    try:
        open_history(url).close()
    except StoreError as error:
        if not isinstance(error.__cause__, SQLAlchemyError):
            raise
        # locked, full or not started yet: the store writer waits for it and says so


def signer_of(config: Config) -> Signer:
    """Make the signer, which proves to nodes that it is the controller and accepts messages of root and SlurmUser."""
    api = config.node_api
    uids = slurm_uids(config)
    try:
        return make_signer(api.auth, munge_socket=api.munge_socket, token_file=api.token_file, uids=uids)
    except AuthError as error:
        raise AuthError(f"[node_api]: {error}") from None

"""Puts the service together from a configuration: the only place that names the real parts."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.facts import slurm_uids
from slurm_migbatch.daemon.history import open_history
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import AuthError, Signer, make_signer
from slurm_migbatch.store.errors import StoreError


def compose(config: Config) -> Service:
    """The service for `config`.

    Raises:
        AuthError: the means of authentication is missing or not safe.
        StoreError: the database cannot be used and waiting would not help.
    """
    _check_store(config.store.url)
    cluster = config.cluster
    return Service(
        config,
        client=HistoryClient(cluster.slurm_bin or None, cluster.slurm_conf or None, cluster.timeout_s),
        open_store=lambda: open_history(config.store.url),
        signer=signer_of(config),
    )


def _check_store(url: str) -> None:
    try:
        open_history(url).close()
    except StoreError as error:
        if not isinstance(error.__cause__, SQLAlchemyError):
            raise
        # locked, full or not started yet: the store writer waits for it and says so


def signer_of(config: Config) -> Signer:
    """Who proves to nodes that it is the controller, and believes root's and SlurmUser's messages."""
    api = config.node_api
    uids = slurm_uids(config)
    try:
        return make_signer(api.auth, munge_socket=api.munge_socket, token_file=api.token_file, uids=uids)
    except AuthError as error:
        raise AuthError(f"[node_api]: {error}") from None

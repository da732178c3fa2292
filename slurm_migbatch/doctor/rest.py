"""Check that migbatchd can use slurmrestd if `[cluster] backend` names it: token, socket or URL, API version."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.doctor.programs import Reader, closed_to
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, Finding
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.restaddress import RestAddress
from slurm_migbatch.slurm.slurmrestd import SlurmrestdClient
from slurm_migbatch.slurm.users import name_of

_SUBJECT: Final = "slurmrestd"
_ANSWER_S: Final = 20.0


def check_rest(config: Config, daemon: Reader | None) -> Iterator[Finding]:
    """Check that slurmrestd answers migbatchd's user with the same requests; nothing with another backend."""
    cluster = config.cluster
    if cluster.backend != "slurmrestd":
        return
    if os.geteuid() != 0 and (daemon is None or daemon.uid != os.geteuid()):
        text = "only root and migbatchd's user can test it"
        yield Finding(UNKNOWN, _SUBJECT, text, "run migbatch doctor as root")
        return
    problems = [*_token(cluster, daemon), *_socket(cluster, daemon)]
    yield from problems or _answers(cluster, daemon)


def _token(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    """Check who can read the token; slurmrestd decides whether it is valid."""
    path = cluster.slurmrestd_token
    if not path:
        return
    name = daemon.name if daemon else "migbatchd's user"
    command = f"scontrol token username={cluster.slurm_user} lifespan=... > {path}"
    try:
        status = Path(path).stat()
    except OSError as error:
        yield Finding(FAIL, _SUBJECT, f"[cluster] slurmrestd_token {path}: {error.strerror}", f"umask 077; {command}")
        return
    if status.st_mode & 0o077:
        text = (
            f"{path} (mode {stat.S_IMODE(status.st_mode):04o}): others can act as {cluster.slurm_user} with this token"
        )
        yield Finding(FAIL, _SUBJECT, text, f"chmod 600 {path}; migbatchd rejects it until then")
    elif daemon is None:
        return
    elif closed := closed_to(path, daemon, 0o4):
        text = f"migbatchd's user {name} cannot read the token {path}: {closed}"
        yield Finding(
            FAIL, _SUBJECT, text, f"chown {name} {path}; chmod 600 {path}; and allow {name} to enter its directory"
        )
    elif status.st_uid not in (0, daemon.uid):
        text = f"{path} belongs neither to {name}, migbatchd's user, nor to root: migbatchd rejects it"
        yield Finding(FAIL, _SUBJECT, text, f"chown {name} {path}")


def _socket(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    """Check who may connect to a socket; root, which runs this, always may."""
    path = RestAddress.parse(cluster.slurmrestd).path
    if path and daemon is not None and Path(path).exists() and (closed := closed_to(path, daemon, 0o2)):
        text = f"migbatchd's user {daemon.name} cannot connect to {path}: {closed}"
        yield Finding(FAIL, _SUBJECT, text, f"make the socket writable for {daemon.name}, by group or mode")


def _answers(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    commands = (cluster.slurm_bin or None, cluster.slurm_conf or None, min(cluster.timeout_s, _ANSWER_S))
    address, token, user = cluster.slurmrestd, cluster.slurmrestd_token, name_of(cluster.slurm_user)
    owners = [daemon.uid if daemon else Path(token).stat().st_uid] if token else []
    client = SlurmrestdClient(*commands, address=address, token_file=token, user=user, owners=owners)
    try:
        version = client.api.version
        refusal = client.probe()
    except SlurmError as error:
        refusal = str(error)
    if refusal:
        yield Finding(
            FAIL, _SUBJECT, refusal, "see docs/install.md, Slurm's REST API; until then migbatchd makes no decisions"
        )
        return
    note = "" if token else f", without a token, as user {os.geteuid()}"
    yield Finding(OK, _SUBJECT, f"{address} answers with API version v0.0.{version}{note}")

"""Whether migbatchd can ask slurmrestd where `[cluster] backend` names it: token, socket or URL, API version."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.doctor.programs import Reader, closed_to
from slurm_migbatch.node.findings import BAD, GOOD, UNKNOWN, Finding
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.restaddress import RestAddress
from slurm_migbatch.slurm.slurmrestd import SlurmrestdClient

_SUBJECT: Final = "slurmrestd"
_ANSWER_S: Final = 20.0


def check_rest(config: Config, daemon: Reader | None) -> Iterator[Finding]:
    """Check that slurmrestd answers migbatchd, by asking it as migbatchd does; nothing with another backend.

    Args:
        config: of migbatchd.
        daemon: who migbatchd runs as; None where that is not known.
    """
    cluster = config.cluster
    if cluster.backend != "slurmrestd":
        return
    if os.geteuid() != 0 and (daemon is None or daemon.uid != os.geteuid()):
        text = "whether it answers migbatchd only root and migbatchd's user can try"
        yield Finding(UNKNOWN, _SUBJECT, text, "run migbatch doctor as root")
        return
    wrong = [*_token(cluster, daemon), *_socket(cluster, daemon)]
    yield from wrong or _answers(cluster, daemon)


def _token(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    """Check who can read the token; what it is worth slurmrestd says."""
    path = cluster.slurmrestd_token
    if not path:
        return
    name = daemon.name if daemon else "migbatchd's user"
    new = f"scontrol token username={cluster.slurm_user} lifespan=... > {path}"
    try:
        status = Path(path).stat()
    except OSError as error:
        yield Finding(BAD, _SUBJECT, f"[cluster] slurmrestd_token {path}: {error.strerror}", f"umask 077; {new}")
        return
    if status.st_mode & 0o077:
        text = (
            f"{path} (mode {stat.S_IMODE(status.st_mode):04o}): others can act as {cluster.slurm_user} with this token"
        )
        yield Finding(BAD, _SUBJECT, text, f"chmod 600 {path}; migbatchd refuses it until then")
    elif daemon is None:
        return
    elif closed := closed_to(path, daemon, 0o4):
        text = f"migbatchd runs as {name}, who cannot read its token {path}: {closed}"
        yield Finding(BAD, _SUBJECT, text, f"chown {name} {path}; chmod 600 {path}; and let {name} into its directory")
    elif status.st_uid not in (0, daemon.uid):
        text = f"{path} belongs neither to {name}, as whom migbatchd runs, nor to root: migbatchd refuses it"
        yield Finding(BAD, _SUBJECT, text, f"chown {name} {path}")


def _socket(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    """Check who may connect to a socket; root, who asks here, always may."""
    path = RestAddress.parse(cluster.slurmrestd).path
    if path and daemon is not None and Path(path).exists() and (closed := closed_to(path, daemon, 0o2)):
        text = f"migbatchd runs as {daemon.name}, who may not connect to {path}: {closed}"
        yield Finding(BAD, _SUBJECT, text, f"let {daemon.name} write to the socket, by its group or mode")


def _answers(cluster: ClusterConfig, daemon: Reader | None) -> Iterator[Finding]:
    commands = (cluster.slurm_bin or None, cluster.slurm_conf or None, min(cluster.timeout_s, _ANSWER_S))
    address, token, user = cluster.slurmrestd, cluster.slurmrestd_token, cluster.slurm_user
    owners = [daemon.uid if daemon else Path(token).stat().st_uid] if token else []
    client = SlurmrestdClient(*commands, address=address, token_file=token, user=user, owners=owners)
    try:
        version = client.api.version
        refusal = client.probe()
    except SlurmError as error:
        refusal = str(error)
    if refusal:
        yield Finding(BAD, _SUBJECT, refusal, "see docs/install.md, Slurm's REST API; until then nothing is decided")
        return
    asked = "" if token else f", asked without a token, as user {os.geteuid()}"
    yield Finding(GOOD, _SUBJECT, f"{address} answers in version v0.0.{version} of its API{asked}")

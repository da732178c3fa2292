"""Check who can change or read the files that root and slurmctld use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slurm_migbatch.config import Config
from slurm_migbatch.doctor.programs import Reader, unreadable
from slurm_migbatch.node.auth import AuthError, make_signer
from slurm_migbatch.node.conf import insecure
from slurm_migbatch.node.findings import FAIL, OK, Finding
from slurm_migbatch.store.engines import has_password


def check_paths(config: Config, slurm_user: Reader | None) -> Iterator[Finding]:
    """Check that only root and slurmctld's user can change these files, and that SlurmUser can read them."""
    for path in (config.path, config.submit.table):
        if not path or not Path(path).exists():
            continue
        reason = insecure(path, slurm_user.uid if slurm_user else 0)
        if path == config.path and has_password(config.store.url) and not unreadable(path, None):
            text = "every user of this host can read the password of [store] url"
            yield Finding(
                FAIL, path, text, f"chmod 600 {path}, which must belong to migbatchd's user; change the password"
            )
        elif reason:
            yield Finding(FAIL, path, reason, f"slurmctld and root use it: chown root {path}; chmod go-w {path}")
        else:
            yield Finding(OK, path, "safe")
    if slurm_user is None:
        text = f"this host has no user {config.cluster.slurm_user}"
        yield Finding(FAIL, "SlurmUser", text, "set [cluster] slurm_user in migbatch.toml to SlurmUser of slurm.conf")
        return
    closed = [*_closed(config, slurm_user)]
    yield from closed or [Finding(OK, "SlurmUser", f"{slurm_user.name} can read slurmctld's files")]


def _closed(config: Config, slurm_user: Reader) -> Iterator[Finding]:
    for path in (config.submit.table, str(Path(config.submit.socket).parent)):
        if Path(path).exists() and (closed := unreadable(path, slurm_user)):
            text = f"{slurm_user.name} cannot read {path}, which slurmctld needs: {closed}"
            yield Finding(FAIL, "SlurmUser", text, f"chmod a+rX {closed.partition(' ')[0]}")


def check_tokens(config: Config, daemon: Reader | None) -> Iterator[Finding]:
    """Check the tokens with which other hosts read metrics and charts; `daemon`: see `check_credentials`."""
    if config.node_api.metrics_token_file:
        yield _token("[node_api] metrics_token_file", Path(config.node_api.metrics_token_file), daemon)
    if config.report.page and config.report.token_file:
        yield _token("[report] token_file", Path(config.report.token_file), daemon)


def _token(key: str, path: Path, daemon: Reader | None) -> Finding:
    name = daemon.name if daemon else "root"
    advice = f"openssl rand -hex 32 > {path}; chmod 600 {path}; chown {name} {path}; systemctl reload migbatchd"
    try:
        status = path.stat()
    except OSError as error:
        return Finding(FAIL, str(path), f"{key}: {error.strerror}", advice)
    if status.st_mode & 0o077 or (daemon is not None and status.st_uid != daemon.uid):
        return Finding(FAIL, str(path), f"{key} must be readable by {name} only, or migbatchd rejects it", advice)
    return Finding(OK, str(path), f"{key} is private")


def check_credentials(config: Config, daemon: Reader | None) -> Iterator[Finding]:
    """Check that migbatchd, run by this user if known, can authenticate itself and nodes."""
    api = config.node_api
    advice = "systemctl enable --now munge, with the cluster's /etc/munge/munge.key"
    if api.auth == "token":
        path = Path(api.token_file)
        advice = f"openssl rand -hex 32 > {path}; chmod 600 {path}; then a key for each node: migbatch node key NODE"
        if path.exists() and path.stat().st_mode & 0o077:
            yield Finding(FAIL, str(path), "other users can read the nodes' secret", f"{advice} again")
            return
        if path.exists() and daemon is not None and path.stat().st_uid != daemon.uid:
            text = f"does not belong to {daemon.name}, migbatchd's user, so migbatchd rejects it"
            yield Finding(FAIL, str(path), text, f"chown {daemon.name} {path}")
            return
    try:
        signer = make_signer(
            api.auth,
            munge_socket=api.munge_socket,
            token_file=api.token_file,
            uids=(os.geteuid(),),
            owner=daemon.uid if daemon is not None else None,
        )
        signer.verify(signer.sign(b"", "doctor"), b"", "doctor")
    except AuthError as error:
        yield Finding(FAIL, "credentials", str(error), advice)
    else:
        yield Finding(OK, "credentials", f"{api.auth} works")

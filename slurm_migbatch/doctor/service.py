"""Check that migbatchd answers: submissions, queries, nodes and monitoring."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.doctor.health import DaemonState, health_url, url_of
from slurm_migbatch.doctor.queries import check_answers
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.submit.service import reserved

_START: Final = "start migbatchd (systemctl start migbatchd), or restart it if it runs"


def check_service(config: Config, local_state: DaemonState) -> Iterator[Finding]:
    """Check that migbatchd answers on all its interfaces; `local_state` is its health."""
    user_socket = Path(config.submit.socket)
    for path in (reserved(user_socket), user_socket):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.settimeout(2)
                probe.connect(str(path))
            yield Finding(OK, "submit socket", str(path))
        except PermissionError:  # the socket reserved for slurmctld, which this user cannot open
            continue
        except OSError as error:
            text = f"{path}: {error.strerror or error}"
            yield Finding(FAIL, "submit socket", text, f"{_START}; until then slurmctld uses the compiled table")
    yield from check_query(config)
    if local_state.silent:
        url = health_url(config)
        text = f"{url} is not migbatchd" if local_state.other_program else f"{url}: {local_state.silent}"
        advice = "another program uses the [node_api] port" if local_state.other_program else _START
        yield Finding(FAIL, "node API", text, advice)
    for part, text in local_state.checks.items():
        yield Finding(OK if text == "ok" else FAIL, f"migbatchd: {part}", text, "" if text == "ok" else "see its log")


def check_query(config: Config) -> Iterator[Finding]:
    """Check that the service for user queries listens, and that it is this one."""
    if not config.query.enabled:
        advice = "migacct and migbatch why do not work on login nodes"
        yield Finding(WARN, "query service", "is disabled ([query] enabled)", advice)
        return
    url = url_of(config.query.listen, config.query.port)
    advice = "check migbatchd's log: the port may be in use ([query] port), or munge may be missing"
    yield from check_answers(url, advice, "stop it, or change [query] port and login.conf")

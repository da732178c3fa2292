"""Query the health of a migbatchd on this host or on another controller."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.query.client import connection_to

_PATH: Final = "/healthz"
_ANSWER_S: Final = 5.0
_MOST: Final = 1 << 20


@dataclass(frozen=True)
class DaemonState:
    """Health of a migbatchd.

    Attributes:
        silent: why there is no answer; empty if there is one.
        other_program: another program answers instead.
        standby: why it is on standby; empty if it is the active one.
        marks: of its configuration.
        checks: its components, each with "ok" or the error.
    """

    silent: str = ""
    other_program: bool = False
    standby: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)


def url_of(listen: str, port: int, path: str = "") -> str:
    """Return the URL of a service of migbatchd: on another host, or on this one if it listens on all addresses."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def health_url(config: Config) -> str:
    """Return the URL of the health of this host's migbatchd."""
    return url_of(config.node_api.listen, config.node_api.port, _PATH)


def ask(url: str) -> DaemonState:
    """Query the health of the migbatchd at a `url_of`, without any proxy from the environment."""
    try:
        with closing(connection_to(url, _ANSWER_S)) as connection:
            connection.request("GET", _PATH)
            body = connection.getresponse().read(_MOST)
        answer = json.loads(body)
        checks, marks = _texts(answer["checks"]), _texts(answer.get("marks", {}))
        return DaemonState(standby=str(answer.get("standby", "")), marks=marks, checks=checks)
    except OSError as error:
        return DaemonState(silent=error.strerror or str(error))
    except (http.client.HTTPException, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return DaemonState(silent="the server is not migbatchd", other_program=True)


def _texts(answer: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in answer.items()}


def ask_local(config: Config) -> DaemonState:
    """Query the migbatchd of this host."""
    return ask(health_url(config))

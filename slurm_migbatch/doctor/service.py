"""Whether migbatchd answers: submissions, questions, nodes and monitoring."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from slurm_migbatch.config import Config
from slurm_migbatch.doctor.queries import check_answers
from slurm_migbatch.node.findings import BAD, GOOD, ODD, Finding
from slurm_migbatch.submit.service import reserved


def url_of(listen: str, port: int, path: str = "") -> str:
    """Return the URL of a service of migbatchd: on another host, or on this one where it listens everywhere."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def service_url(config: Config, path: str) -> str:
    """Return migbatchd's URL on the controller host for monitoring ("/healthz")."""
    return url_of(config.node_api.listen, config.node_api.port, path)


def fetch(url: str) -> bytes:
    """Fetch what migbatchd answers at a `service_url`; raises OSError, HTTPError where it refuses."""
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - always http
        body: bytes = answer.read()
    return body


def check_service(config: Config) -> Iterator[Finding]:
    """Check that migbatchd answers on both sides."""
    everybodys = Path(config.submit.socket)
    for path in (reserved(everybodys), everybodys):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.settimeout(2)
                probe.connect(str(path))
            yield Finding(GOOD, "submit socket", str(path))
        except PermissionError:  # slurmctld's, and somebody else asks
            continue
        except OSError as error:
            text = f"{path}: {error.strerror or error}"
            yield Finding(BAD, "submit socket", text, "start migbatchd; until then slurmctld uses the compiled table")
    yield from check_query(config)
    url = service_url(config, "/healthz")
    try:
        body = fetch(url)
    except urllib.error.HTTPError as error:
        body = error.read()
    except (OSError, ValueError) as error:
        yield Finding(
            BAD, "node API", f"{url}: {getattr(error, 'reason', error)}", "start migbatchd (systemctl start migbatchd)"
        )
        return
    try:
        checks = json.loads(body)["checks"]
    except (ValueError, KeyError, TypeError):
        yield Finding(BAD, "node API", f"{url} is not migbatchd", "another program listens on [node_api] port")
        return
    for part, text in checks.items():
        yield Finding(GOOD if text == "ok" else BAD, f"migbatchd: {part}", text, "" if text == "ok" else "see its log")


def check_query(config: Config) -> Iterator[Finding]:
    """Check that the service for users' questions listens, and that it is this one."""
    if not config.query.enabled:
        yield Finding(
            ODD, "query service", "is off ([query] enabled)", "users on login nodes cannot ask migacct and why"
        )
        return
    url = url_of(config.query.listen, config.query.port)
    advice = "look for query in migbatchd's log: the port may be taken ([query] port), or munge be missing"
    yield from check_answers(url, advice, "end it, or set [query] port and login.conf")

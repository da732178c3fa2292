"""Client of the query service: sends a query signed by munge, and accepts only answers signed by the controller.

The standard library only: this runs on login nodes.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

from slurm_migbatch.mig.text import printable
from slurm_migbatch.node.auth import SIGNATURE_HEADER, AuthError, Signer, headers, response_payload
from slurm_migbatch.query.login import Servers
from slurm_migbatch.query.protocol import MAX_ANSWER, PATH, Answer, AnswerError
from slurm_migbatch.query.questions import Question, write
from slurm_migbatch.values import replace

_CONNECT_S = 5.0
_ANSWER_S = 90.0
#: seconds for which a busy service is retried
_PATIENCE_S = 30.0
_PAUSE_S = 0.5
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")


class NoAnswer(RuntimeError):
    """No service has answered; the message says why and what to ask the administrator."""


class _Unreachable(Exception):
    """This service cannot be reached; the next may answer."""


class _Busy(Exception):
    """This service is busy."""


def ask(question: Question, servers: Servers, signer: Signer) -> Answer:
    """Query one service after the other.

    If one refuses, the others are tried too: on a host whose migbatchd is down, anybody may answer at its port.

    Raises:
        NoAnswer: none answers; one may have refused, or its answer was not signed by the controller.
        QuestionError: the query is out of bounds.
    """
    body = write(replace(question, zone=_zone()))
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        failures: list[tuple[str, Exception]] = []
        refusal: NoAnswer | None = None
        for url in servers.urls:
            try:
                return _ask(url, body, signer)
            except (_Unreachable, _Busy) as error:
                failures.append((url, error))
            except NoAnswer as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        if any(isinstance(error, _Busy) for _, error in failures) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            continue
        why = "; ".join(f"{url}: {error}" for url, error in failures)
        raise NoAnswer(
            f"no answer from migbatch's query service ({why}); ask the administrator whether migbatchd runs there "
            f"with [query] enabled, and whether this host can reach its port (from {servers.source})"
        )


def _zone() -> str:
    """Return the time zone that the user has set (TZ), else ""; for a file, its name in the time zone database."""
    zone = os.environ.get("TZ", "").removeprefix(":")
    return "" if zone == "/etc/localtime" else zone.removeprefix("/usr/share/zoneinfo/")


def _ask(url: str, body: bytes, signer: Signer) -> Answer:
    host = socket.gethostname().partition(".")[0]
    node = host if _NAME.fullmatch(host) else "login"
    try:
        proof, credential = headers(signer, "POST", PATH, node, body)
    except AuthError as error:
        raise NoAnswer(f"{error}; this command authenticates by munge, which must run on this host") from None
    status, text, signature = _post(url, body, {**proof, "Content-Type": "application/json"})
    if status in (429, 503):
        raise _Busy(_error_text(text))
    if status != 200:
        raise NoAnswer(f"{url} refused: {status} {_error_text(text)}")
    try:
        signer.verify(signature, response_payload(credential, text), node)
        return Answer.read(text)
    except AuthError as error:
        raise NoAnswer(
            f"the answer of {url} does not come from the controller ({error}); tell the administrator"
        ) from None
    except AnswerError as error:
        raise NoAnswer(f"{url}: {error}") from None


def _post(url: str, body: bytes, fields: dict[str, str]) -> tuple[int, bytes, str]:
    connection = connection_to(url, _CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        # a service that refuses does not read the whole query first; its answer says why
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", PATH, body, fields)
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER + 1)
        if len(text) > MAX_ANSWER:
            raise NoAnswer(f"{url}: the answer is too long")
        return answer.status, text, answer.getheader(SIGNATURE_HEADER, "")
    except (OSError, http.client.HTTPException) as error:
        raise _Unreachable(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
    finally:
        connection.close()


def connection_to(url: str, timeout: float) -> http.client.HTTPConnection:
    """Return a connection to the host of a URL, not yet open. `timeout`: seconds for each step."""
    parts = urlsplit(url)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return connection_type(parts.hostname or "", parts.port, timeout=timeout)


def _error_text(text: bytes) -> str:
    """Return the text of an unsigned error without characters that could control a terminal."""
    import json

    try:
        message = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text[:200].decode("utf-8", "replace")
    return printable(message[:500])

"""Check that the service for user queries answers. Standard library only: login nodes run this too."""

from __future__ import annotations

import http
import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

from slurm_migbatch.node.findings import FAIL, OK, Finding
from slurm_migbatch.query.client import connection_to
from slurm_migbatch.query.protocol import GREETING, PATH

#: start of the answer of a standby migbatchd
STANDBY = b'{"error":"this migbatchd is on standby'
_MOST = 65536


def check_answers(url: str, advice: str, other_program: str) -> Iterator[Finding]:
    """Check that the query service listens at a URL such as http://ctl1:6831, and that it is this one. `advice` and
    `other_program` say what to do if there is no answer, or another program answers.
    """
    parts = urlsplit(url)
    connection = connection_to(url, 5)
    address = f"{parts.hostname} port {parts.port}"
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        status, body = response.status, response.read(_MOST)
    except (OSError, http.client.HTTPException) as error:
        text = f"no answer from {address}: {getattr(error, 'strerror', None) or error}"
        yield Finding(FAIL, "query service", text, advice)
        return
    finally:
        connection.close()
    if status == http.HTTPStatus.OK and body == GREETING:
        yield Finding(OK, "query service", address)
    elif status == http.HTTPStatus.SERVICE_UNAVAILABLE and body.startswith(STANDBY):
        yield Finding(OK, "query service", f"{address}: that migbatchd is on standby")
    else:
        yield Finding(FAIL, "query service", f"another program answers at {address}", other_program)

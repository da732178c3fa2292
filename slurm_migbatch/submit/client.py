"""Send requests to the running submit service, for `migbatch explain` and tests."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.request import Answer, JobRequest, RequestError

_TIMEOUT_S: Final = 10.0


class ServiceUnavailable(RuntimeError):
    """The service cannot be reached or does not answer; the message says what to check."""


def ask(path: Path, request: JobRequest) -> Answer:
    """Return the service's answer to one request.

    Raises ServiceUnavailable, and RequestError if the request is invalid.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_TIMEOUT_S)
        try:
            client.connect(str(path))
            client.sendall(protocol.encode(request.to_fields()))
            reply = client.recv(protocol.MAX_REQUEST)
        except OSError as error:
            raise ServiceUnavailable(
                f"no answer from the submit service at {path} ({error}): is migbatchd running on this host?"
            ) from None
    if not reply:
        raise RequestError("the submit service closed the connection: too many requests, or it is stopping")
    return protocol.decode_answer(reply)

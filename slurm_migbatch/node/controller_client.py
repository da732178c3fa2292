"""Requests of a node to the controller: signed, bounded, and believed only when the answer is signed too."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from slurm_migbatch.node.auth import SIGNATURE_HEADER, AuthError, Signer, headers, response_payload

MAX_ANSWER = 8 << 20


class ControllerError(RuntimeError):
    """The controller cannot be reached, refuses, or cannot prove that it is the controller; try again later."""


class ControllerClient:
    """The controller's node API at `url` (`http://host:port`) as `node`. One connection a request; safe in threads."""

    def __init__(self, url: str, signer: Signer, node: str, *, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or "localhost"
        self._port = parts.port
        self._base = parts.path.rstrip("/")
        self._signer = signer
        self._node = node
        self._timeout = timeout
        self._connections: set[http.client.HTTPConnection] = set()

    def interrupt(self) -> None:
        """Break off the requests that are waiting; they raise ControllerError."""
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def post(self, path: str, message: Mapping[str, object], *, patience: float = 0.0) -> bytes:
        """Post a message and return the answer's body; it may take `patience` seconds more. Raises ControllerError."""
        body = json.dumps(message, separators=(",", ":")).encode()
        path = self._base + path
        try:
            proof, credential = headers(self._signer, "POST", path, self._node, body)
        except AuthError as error:
            raise ControllerError(str(error)) from error
        connection = self._connect(self._timeout + patience)
        self._connections.add(connection)
        try:
            # a controller that refuses does not read the whole body first; its answer says why
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", path, body, {**proof, "Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER + 1)
            signature = answer.getheader(SIGNATURE_HEADER, "")
            status = answer.status
        except (OSError, http.client.HTTPException) as error:
            raise ControllerError(f"controller {self._host}: {error or type(error).__name__}") from error
        finally:
            self._connections.discard(connection)
            connection.close()
        if len(text) > MAX_ANSWER:
            raise ControllerError(f"controller {self._host}: the answer is too long")
        if status != 200:
            raise ControllerError(f"controller {self._host}: {status} {text[:200].decode('utf-8', 'replace')}")
        try:
            self._signer.verify(signature, response_payload(credential, text), self._node)
        except AuthError as error:
            raise ControllerError(f"the answer does not come from the controller: {error}") from error
        return text

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

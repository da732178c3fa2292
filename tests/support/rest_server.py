"""A fake slurmrestd on a unix socket, with answers set by the test."""

from __future__ import annotations

import json
import socketserver
from http.server import BaseHTTPRequestHandler
from typing import Any

#: status and body by path without its query, with or without the version; a body that is not text is sent as JSON
Answers = dict[str, tuple[int, Any]]
PARTITIONS = {"partitions": [{"name": "gpu", "priority": {"tier": 1}}], "errors": []}


class RestServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    answers: Answers
    headers: list[dict[str, str]]


class RestHandler(BaseHTTPRequestHandler):
    server: Any  # with answers and headers

    def _answer(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        versioned = self.path.partition("?")[0].removeprefix("/slurm/")
        named = (versioned, versioned.partition("/")[2])
        answers = self.server.answers
        status, body = next((answers[name] for name in named if name in answers), (404, "Unable to find requested URL"))
        if callable(body):
            body = body()
        text = (body if isinstance(body, str) else json.dumps(body)).encode("utf-8", "surrogateescape")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

    def address_string(self) -> str:
        return ""

    def log_message(self, format: str, *args: object) -> None:
        pass

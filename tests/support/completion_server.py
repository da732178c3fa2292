"""A small server of OpenAI's API that streams tokens in real time, like an inference engine.

Prompts are read one after the other, with a fixed time per token; then tokens follow at a rate that decreases with the
number of concurrent requests. The test chooses which requests it refuses, what it reports and where streams break off.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class CompletionServer:
    """The server's behaviour, and the requests that it received.

    `forms`: its paths. `words`: the accepted request fields beyond those of the first API; others are refused with 422.
    `usage`: whether it reports token counts. `most`: concurrent requests that it accepts; others get 503. `broken`: the
    stream of every so many requests breaks off in the middle (0: never).
    """

    prompt_token_s: float = 0.0002
    token_s: float = 0.004
    places: int = 64
    forms: tuple[str, ...] = ("completions", "chat/completions")
    words: tuple[str, ...] = ("ignore_eos", "stream_options")
    usage: bool = True
    most: int = 1000
    broken: int = 0
    models: tuple[str, ...] = ("tiny",)
    owner: str = "vllm"
    longest: int | None = None
    key: str = ""
    ends_after: int = 10**9
    silent: bool = False
    seen: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    peak: int = 0
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prefill: threading.Lock = field(default_factory=threading.Lock)
    _running: int = 0

    @contextmanager
    def running(self) -> Iterator[CompletionServer]:
        """Listen on a port of the loopback while the context is open."""
        state = self

        class Handler(_Handler):
            server_state = state

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def enter(self, order: dict[str, Any]) -> int:
        """Register a request; return its number, 0 if there are too many."""
        with self._lock:
            self.seen.append(order)
            if self._running >= self.most:
                return 0
            self._running += 1
            self.peak = max(self.peak, self._running)
            return len(self.seen)

    def leave(self) -> None:
        """End a request."""
        with self._lock:
            self._running -= 1

    def read_prompt(self, tokens: int) -> None:
        """Read a prompt, one at a time."""
        with self._prefill:
            time.sleep(tokens * self.prompt_token_s)

    def tokens(self, count: int) -> Iterator[int]:
        """Yield tokens at their rate, a tenth slower for each other request in progress."""
        for number in range(count):
            if number:
                time.sleep(self.token_s * (1.0 + 0.1 * (self._running - 1)))
            yield number


class _Handler(BaseHTTPRequestHandler):
    server_state: CompletionServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise several tokens arrive at once

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        state = self.server_state
        if not self.path.endswith("/models"):
            self._answer(404, {"error": {"message": "no such path"}})
            return
        data = [
            {"id": name, "object": "model", "owned_by": state.owner, "max_model_len": state.longest}
            for name in state.models
        ]
        self._answer(200, {"object": "list", "data": data})

    def do_POST(self) -> None:
        state = self.server_state
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        form = self.path.removeprefix("/v1/")
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            self._answer(401, {"error": {"message": "a key is needed"}})
            return
        if form not in state.forms:
            self._answer(404, {"detail": "Not Found"})
            return
        known = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", *state.words}
        if unknown := set(order) - known:
            self._answer(422, {"detail": f"unexpected {sorted(unknown)}"})
            return
        number = state.enter(order)
        if not number:
            self._answer(503, {"error": {"message": "too many requests"}})
            return
        try:
            self._stream(order, number, chat=form != "completions")
        except OSError:
            self.close_connection = True  # the client has disconnected
        finally:
            state.leave()

    def _stream(self, order: dict[str, Any], number: int, *, chat: bool) -> None:
        state = self.server_state
        prompt = order["messages"][0]["content"] if chat else order["prompt"]
        with state._lock:
            state.prompts.append(prompt)
        inputs = len(prompt.split()) + 3
        outputs = order["max_tokens"] if order.get("ignore_eos") else min(order["max_tokens"], state.ends_after)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        state.read_prompt(inputs)
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for token in state.tokens(0 if state.silent else outputs):
            if state.broken and number % state.broken == 0 and token == outputs // 2:
                self.close_connection = True
                self.wfile.flush()
                return
            last = "length" if token == outputs - 1 else None
            text = {"delta": {"content": f" {token}"}} if chat else {"text": f" {token}"}
            self._event({"choices": [{"index": 0, "finish_reason": last, **text}]})
        if state.usage and order.get("stream_options"):
            usage = {"prompt_tokens": inputs, "completion_tokens": outputs}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

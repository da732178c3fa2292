"""Stream completions from a server with OpenAI's API: find its request form, and time the tokens.

Requests ask for a stream (server-sent events), for a fixed number of tokens, and for the
counts of tokens; servers that reject these options are asked without them. This runs on compute nodes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from slurm_migbatch.mig.text import printable

FORMS: Final = ("completions", "chat/completions")
WISHES: Final[Sequence[Mapping[str, Any]]] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)
"""Options beyond OpenAI's first API, in several forms; the first that a server accepts is used."""
NOT_THERE: Final = (404, 405, 501)
NOT_SO: Final = (400, 422)
_LONGEST_LINE: Final = 1 << 20
_LONGEST_BODY: Final = 1 << 22
_PROBE: Final = 4
_MOST_SAID: Final = 200
_OWNERS: Final = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "library": "ollama", "tensorrt_llm": "trtllm",
    "trtllm": "trtllm", "transformers": "transformers",
}  # fmt: skip
"""Engines by the text in `owned_by`, in the form of `engine=`."""


class ServerError(Exception):
    """A request that failed; the message says how. `status`: of HTTP, 0 if there was no response."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Cancelled(Exception):
    """The request was cancelled by this client."""


@dataclass(frozen=True)
class Answered:
    """One request: when it was sent, when its first and its last token came (seconds of one clock), and how many
    tokens it had as input (None: not reported) and as output.
    """

    sent: float
    first: float
    last: float
    inputs: int | None
    outputs: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds of each further token; None if there was only one."""
        return (self.last - self.first) / (self.outputs - 1) if self.outputs > 1 else None

    @property
    def whole(self) -> float:
        """Seconds from end to end."""
        return self.last - self.sent


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server. `path` is the part before `/completions`."""

    host: str
    port: int
    path: str
    secure: bool

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Read a URL, with or without its `/v1`; raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write it as http://localhost:8000")
        if parts.username or parts.password:
            raise ValueError("give the key in the environment variable OPENAI_API_KEY")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, parts.port or (443 if secure else 80), path, secure)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.path}"


class ServerConnection:
    """One connection to a server, reused between requests; used by one thread, but any thread may `cut` it."""

    def __init__(self, address: ServerAddress, key: str, timeout: float) -> None:
        self._address, self._key, self._timeout = address, key, timeout
        self._connection: http.client.HTTPConnection | None = None
        self._cut = False

    def get(self, path: str) -> Any:
        """Return the answer to a GET; raises ServerError."""
        answer = self._request("GET", path, None)
        body = self._body(answer)
        if answer.status != 200:
            raise self._refused(answer.status, body)
        return _json(body)

    def post(self, path: str, order: Mapping[str, Any]) -> http.client.HTTPResponse:
        """Send a request and return the beginning of its answer; raises ServerError."""
        answer = self._request("POST", path, json.dumps(order).encode())
        if answer.status != 200:
            raise self._refused(answer.status, self._body(answer))
        return answer

    def lines(self, answer: http.client.HTTPResponse) -> Any:
        """Yield the lines of a stream as they come; raises ServerError."""
        try:
            while line := answer.readline(_LONGEST_LINE):
                yield line
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from None
        if self._cut:  # cutting the connection ends the stream without an error
            raise Cancelled

    def cut(self) -> None:
        """Abort the current request, from any thread."""
        self._cut = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        reused = self._connection is not None
        while True:
            if self._cut:
                raise Cancelled
            connection = self._connection or self._open()
            try:
                connection.request(method, f"{self._address.path}/{path}", body, headers)
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # a server may close an idle connection; that is not a failure of the request
                if reused and isinstance(error, (ConnectionError, http.client.BadStatusLine)) and not self._cut:
                    reused = False
                    continue
                raise self._broken(error) from None

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read(_LONGEST_BODY)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None

    def _open(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.secure else http.client.HTTPConnection
        self._connection = kind(self._address.host, self._address.port, timeout=self._timeout)
        return self._connection

    def _broken(self, error: Exception) -> Exception:
        self.close()
        if self._cut:
            return Cancelled()
        text = "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return ServerError(f"{self._address}: {_excerpt(text)}")

    def _refused(self, status: int, body: bytes) -> ServerError:
        self.close()
        text = body.decode("utf-8", "replace")
        with contextlib.suppress(ServerError, KeyError, TypeError, AttributeError):
            answer = _json(body)
            text = str(
                (answer.get("error") or {}).get("message") or answer.get("message") or answer.get("detail") or text
            )
        return ServerError(f"status {status}: {_excerpt(text)}", status)


@dataclass(frozen=True)
class RunningServer:
    """A server that answers: the model's name there, the engine (empty: unknown), the longest sequence
    (None: unknown), and the request form.
    """

    address: ServerAddress
    name: str
    engine: str = ""
    longest: int | None = None
    form: str = FORMS[0]
    wishes: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="", repr=False)

    def line(self, timeout: float) -> ServerConnection:
        """Return a new connection, with a timeout in seconds."""
        return ServerConnection(self.address, self.key, timeout)

    def ask(self, line: ServerConnection, prompt: str, outputs: int) -> Answered:
        """Generate this many tokens from a prompt; raises ServerError and Cancelled."""
        sent = time.perf_counter()
        order = {"model": self.name, "max_tokens": outputs, "temperature": 0, "stream": True, **self.wishes}
        if self.form == "completions":
            order["prompt"] = prompt
        else:
            order["messages"] = [{"role": "user", "content": prompt}]
        stream = line.lines(line.post(self.form, order))
        return _timed(stream, sent, outputs, line)


def find(address: ServerAddress, name: str | None, key: str, timeout: float) -> RunningServer:
    """Return the server at an address: its model and request form. `name`: of several models the one to use.

    Raises:
        ServerError: there is no answer, or not in a known form.
    """
    line = ServerConnection(address, key, timeout)
    try:
        model = _model(line, name)
        served = RunningServer(
            address,
            str(model.get("id") or name),
            _OWNERS.get(str(model.get("owned_by") or "").lower(), ""),
            _longest(model),
            key=key,
        )
        return _with_working_form(served, line)
    finally:
        line.close()


def _model(line: ServerConnection, name: str | None) -> Mapping[str, Any]:
    try:
        answer = line.get("models")
        models = [model for model in answer.get("data", []) if isinstance(model, Mapping) and model.get("id")]
    except ServerError as error:
        if name is None or error.status not in NOT_THERE:
            raise
        return {"id": name}
    except AttributeError:
        models = []
    chosen = [model for model in models if name in (None, model["id"])]
    if len(chosen) == 1:
        return chosen[0]
    if name is not None and not chosen:
        return {"id": name}  # an alias, or an adapter that is loaded on request
    names = ", ".join(_excerpt(str(model["id"])) for model in models[:8])
    raise ServerError(f"it serves {len(models)} models ({names}): select one with --served-name")


def _longest(model: Mapping[str, Any]) -> int | None:
    """Return the longest sequence: `max_model_len` of vLLM and SGLang, `n_ctx` of a slot of llama.cpp."""
    meta = model.get("meta")
    for length in (model.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, Mapping) else None):
        if isinstance(length, int) and length > 0:
            return length
    return None


def _with_working_form(served: RunningServer, line: ServerConnection) -> RunningServer:
    last: ServerError | None = None
    for form in FORMS:
        for wishes in WISHES:
            candidate = RunningServer(
                served.address, served.name, served.engine, served.longest, form, wishes, served.key
            )
            try:
                candidate.ask(line, "one two three", _PROBE)
                return candidate
            except ServerError as error:
                last = error
                if error.status in NOT_SO:
                    continue
                if error.status in NOT_THERE:
                    break
                raise
    raise last or ServerError("it accepts no request")


def _timed(stream: Any, sent: float, outputs: int, line: ServerConnection) -> Answered:
    first = last = 0.0
    chunks, usage, ended = 0, None, False
    for raw in stream:
        now = time.perf_counter()
        if not raw.startswith(b"data:"):
            continue
        data = raw[5:].strip()
        if data == b"[DONE]":
            ended = True  # read to the end of the body, so that the connection can be reused
            continue
        event = _json(data)
        if not isinstance(event, Mapping) or event.get("error"):
            line.close()
            error = event.get("error") if isinstance(event, Mapping) else event
            raise ServerError(f"its stream was interrupted: {_excerpt(str(error))}")
        usage = event.get("usage") or usage
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            continue
        last, ended = now, ended or choices[0].get("finish_reason") is not None
        if _is_token(choices[0]):
            chunks += 1
            first = first or now
        if chunks > 4 * outputs + 64:
            line.close()
            raise ServerError(f"it generates more than the requested {outputs} tokens")
    if chunks and not ended:
        raise ServerError("its stream was interrupted")
    if not chunks:
        raise ServerError("its stream had no token: does it stream (text/event-stream)?")
    inputs, generated = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Answered(sent, first, last, inputs, generated or chunks)


def _is_token(choice: Mapping[str, Any]) -> bool:
    """Return whether a chunk has a token. Its text may be empty (part of a character); a chunk with a role has none."""
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        content = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        return bool(content) or ("role" not in delta and choice.get("finish_reason") is None)
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _excerpt(text: str) -> str:
    """Return a server's text for a message: printable, in one line, shortened."""
    line = " ".join(text.split())
    return printable(line[:_MOST_SAID])


def _count(usage: Any, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and count > 0 else None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(f"its answer is not JSON: {_excerpt(data[:80].decode('utf-8', 'replace'))}") from None

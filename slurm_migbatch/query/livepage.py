"""The page of charts for browsers: read-only, on loopback unless configured otherwise, within PrivateData.

Holders of the token see all runs. Without it, requests from this host see what PrivateData shows to everyone, and
requests from elsewhere see nothing. Without the token a Host header that is not one of this host's names is refused;
otherwise a web site could let its own name resolve to the loopback address and read the page (DNS rebinding).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.gate import Refused
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.node.auth import read_private
from slurm_migbatch.query.protocol import Answer
from slurm_migbatch.query.questions import PageQuestion, QuestionError, write

ALL: Final = "/all"
"""The path under which a browser is asked for the token."""
_EVERYTHING, _NOBODY = 0, 65534
_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
#: seconds after which a browser retries
_REFRESH_S: Final = 300


class LivePage:
    """The application behind the browser port."""

    def __init__(self, config: Config, ask: Callable[[int, bytes], Awaitable[bytes]]) -> None:
        """Set up. `ask` answers a query of a user id. Raises AuthError if the token is missing or not safe."""
        report = config.report
        token = read_private(report.token_file) if report.token_file else b""
        self._rule = Scraping(token, "pictures are", "[report] token_file")
        self._days, self._ask = report.days, ask
        # drawing a page takes seconds and half a gigabyte: one at a time
        self._turn = asyncio.Lock()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(routes=[Route("/", self._page, methods=["GET"]), Route(ALL, self._page, methods=["GET"])])

    async def _page(self, request: Request) -> Response:
        try:
            uid = self._asker(request)
            question = write(self._question(request))
            if self._turn.locked() and uid == _NOBODY:
                raise Refused(503, "another page is being drawn; try again in a few seconds", 5)
            async with self._turn:
                answer = Answer.read(await self._ask(uid, question))
        except QuestionError as error:
            return _text(400, str(error))
        except Refused as refused:
            return _text(refused.status, str(refused))
        if answer.error:
            return _text(400 if answer.code == 2 else 500, answer.error)
        return Response(answer.out, headers={**_HEADERS, "Refresh": str(_REFRESH_S)}, media_type="text/html")

    def _asker(self, request: Request) -> int:
        if self._rule.has_token(request.headers):
            return _EVERYTHING
        self._rule.check(request.client.host if request.client else "", request.headers)
        if request.scope["path"] == ALL or "authorization" in request.headers:
            raise Refused(401, f"send the token of {self._rule.key}, as a password or as Authorization: Bearer TOKEN")
        if _hostname(request) not in _HOSTS:
            raise Refused(403, "without the token this page is available at localhost or 127.0.0.1 only")
        return _NOBODY

    def _question(self, request: Request) -> PageQuestion:
        parameters = request.query_params
        return PageQuestion(
            accounts=_words(parameters.getlist("account")),
            partitions=_words(parameters.getlist("partition")),
            nodes=parameters.get("nodes", ""),
            start=parameters.get("start", f"now-{self._days}days"),
            end=parameters.get("end", "now"),
        )


def _hostname(request: Request) -> str | None:
    """Return the name in the Host header; None for one that is no name, which Starlette takes for this host's."""
    host = request.headers.get("host")
    try:
        return request.url.hostname if host is None else urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _words(values: Iterable[str]) -> tuple[str, ...]:
    """Return the names in values that may be lists, as the options of the command are."""
    return tuple([name for value in values for name in value.split(",") if name])


def _text(status: int, sentence: str) -> Response:
    challenge = (
        {"WWW-Authenticate": 'Basic realm="migbatch: any user name, the token as password"'} if status == 401 else {}
    )
    return PlainTextResponse(sentence + "\n", status, {**_HEADERS, **challenge})

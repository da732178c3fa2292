"""The report page for browsers: off by default, on loopback, obeys PrivateData, the token shows everything."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from slurm_migbatch.config import Config, loads
from slurm_migbatch.node.auth import AuthError, MungeSigner
from slurm_migbatch.query.client import ask
from slurm_migbatch.query.livepage import LivePage
from slurm_migbatch.query.protocol import Answer
from slurm_migbatch.query.questions import PageQuestion, ShowQuestion
from slurm_migbatch.testbed.ports import PortBook
from tests.support.browser import browser
from tests.support.query_site import ALICE, SECRETS, QueryProcess, as_user, query_process
from tests.support.waiting import eventually

TOKEN = "0123456789abcdef" * 2
HERE = ("127.0.0.1", "localhost:6832")


class Service:
    """The page with an answerer that records the queries of each user."""

    def __init__(self, config: Config, answer: Answer | None = None) -> None:
        self.asked: list[tuple[int, dict[str, object]]] = []
        self._answer = answer or Answer(0, "<!doctype html>\n")
        self.app = LivePage(config, self._ask).app()

    async def _ask(self, uid: int, body: bytes) -> bytes:
        self.asked.append((uid, json.loads(body)))
        return self._answer.write()

    def get(self, target: str = "/", place: tuple[str, str] = HERE, authorization: str = "", method: str = "GET"):
        """Return (status, headers, text)."""
        path, _, query = target.partition("?")
        headers = [(b"host", place[1].encode())]
        headers += [(b"authorization", authorization.encode())] if authorization else []
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": headers, "client": (place[0], 4000), "server": ("127.0.0.1", 6832), "scheme": "http",
            "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start = sent[0]
        fields = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], fields, b"".join(part.get("body", b"") for part in sent[1:]).decode()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return loads(f"[report]\npage = true\ntoken_file = '{path}'\n")


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"me:{token}".encode()).decode()


def test_page_is_off_and_on_loopback_by_default():
    assert Config().report.page is False
    assert Config().report.listen == "127.0.0.1"


def test_local_request_without_a_token_is_answered_as_user_nobody(config):
    service = Service(config)
    status, headers, text = service.get("/?account=chemistry&start=2026-10-01&end=2026-11-01")
    assert (status, text) == (200, "<!doctype html>\n")
    assert headers["cache-control"] == "no-store"
    ((uid, question),) = service.asked
    assert uid == 65534
    assert question == {"ask": "page", "accounts": ["chemistry"], "start": "2026-10-01", "end": "2026-11-01"}
    service.get("/?account=chemistry,physics&account=cs&partition=gpu,")
    assert service.asked[-1][1]["accounts"] == ["chemistry", "physics", "cs"]
    assert service.asked[-1][1]["partitions"] == ["gpu"]


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", basic(TOKEN)], ids=["bearer", "password"])
@pytest.mark.parametrize("place", [HERE, ("10.0.0.7", "ctl:6832")], ids=["here", "elsewhere"])
def test_request_with_the_token_is_answered_as_root(config, place, given):
    service = Service(config)
    assert service.get("/all", place, given)[0] == 200
    assert service.asked[0][0] == 0


@pytest.mark.parametrize(
    ("target", "place", "given", "status"),
    [
        ("/", ("10.0.0.7", "ctl:6832"), "", 401),
        ("/", ("10.0.0.7", "localhost"), "Bearer wrong", 401),
        ("/", HERE, basic("wrong"), 401),
        ("/", HERE, "Basic !", 401),
        ("/all", HERE, "", 401),
        ("/", ("127.0.0.1", "rebound.example:6832"), "", 403),
        ("/", ("127.0.0.1", "["), "", 403),
        ("/", ("127.0.0.1", "[::1"), "", 403),
        ("/?account=%00", HERE, "", 400),
        ("/elsewhere", HERE, "", 404),
    ],
)
def test_invalid_and_unauthorized_requests_are_refused(config, target, place, given, status):
    service = Service(config)
    found, headers, _ = service.get(target, place, given)
    assert found == status
    assert ("www-authenticate" in headers) is (status == 401)
    assert service.asked == []


def test_page_is_read_only(config):
    service = Service(config)
    assert service.get(method="POST")[0] == 405
    assert service.asked == []


def test_without_a_token_file_only_local_requests_are_answered():
    service = Service(loads("[report]\npage = true\n"))
    assert service.get("/", ("10.0.0.7", "ctl:6832"), "Bearer ")[0] == 403
    assert service.get("/all")[0] == 401
    assert service.get()[0] == 200


def test_failed_answer_is_an_http_error_with_its_message(config):
    assert Service(config, Answer(2, error="the window ends before it begins")).get()[0] == 400
    status, _, text = Service(config, Answer(1, error="cannot read the record")).get()
    assert (status, text) == (500, "cannot read the record\n")


def test_token_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(AuthError):
        Service(loads(f"[report]\npage = true\ntoken_file = '{path}'\n"))


# -- the service as a process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[QueryProcess, int]]:
    """The service of a site whose jobs are private, and the port of its page."""
    home = tmp_path_factory.mktemp("page")
    token = home / "page-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    book = PortBook()
    port = book.take()
    try:
        with query_process(home, "jobs", {"page": True, "port": port, "token_file": str(token)}) as running:
            eventually(lambda: "serving browsers" in running.log)
            yield running, port
    finally:
        book.release()


def fetched(port: int, path: str, **headers: str) -> str:
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=60) as answer:
        return answer.read().decode()


def test_private_jobs_are_counted_only_with_the_token(service):
    _, port = service
    assert "The record has no matching data." in fetched(port, "/")
    shown = fetched(port, "/all", Authorization=f"Bearer {TOKEN}")
    assert "The record has no matching data." not in shown
    assert "1g.10gb" in shown
    assert not any(secret in shown for secret in SECRETS)


@pytest.mark.slow
def test_queries_are_answered_while_the_page_has_no_token_and_no_port(tmp_path):
    """On the controller's host any user could take the port before migbatchd does."""
    token = tmp_path / "page-token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with query_process(tmp_path, "", {"page": True, "port": port, "token_file": str(token)}) as running:

            def answered() -> bool:
                return ask(ShowQuestion("7"), running.servers, MungeSigner(running.munge, frozenset({0}))).code == 0

            eventually(lambda: "the page of charts is not served: the token file" in running.log)
            assert answered()
            token.chmod(0o600)
            eventually(
                lambda: f"the page of charts is not served: cannot listen on 127.0.0.1 port {port}" in running.log
            )
            assert answered()
            other.close()
            eventually(lambda: "serving browsers" in running.log)
            assert answered()


def test_remote_user_gets_a_page_of_their_own_runs(service):
    running, _ = service
    question = PageQuestion(start="now-1days", end="now")
    mine = as_user(ALICE, lambda: ask(question, running.servers, MungeSigner(running.munge, frozenset({0}))))
    assert mine.out.startswith("<!doctype html>")
    assert "a7" in mine.out
    assert ">a8<" not in mine.out
    assert "Only your own runs" in mine.out


@pytest.mark.browser
def test_browser_draws_the_page(service, tmp_path):
    with browser(tmp_path) as chromium:
        page = chromium.page()
        page.send("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {TOKEN}"})
        page.show(f"http://127.0.0.1:{service[1]}/all")
        assert page.run("document.querySelectorAll('.chart .main-svg').length") > 0
        assert [text for text in page.complaints if "404" not in text] == []  # the browser requests an icon

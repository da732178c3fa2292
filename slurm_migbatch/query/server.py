"""The query service: a separate process, so that no user query blocks migbatchd.

It is a child of migbatchd, at low priority. stdin delivers one line of JSON,
`{"config": "<migbatch.toml>", "level": ...}`, and is closed when the process must exit; lines of JSON go out on stdout:
`{"serving": <port>}` once, `{"answers": {...}}` about every second while there are any.

munge authenticates the user before a byte of the query is read. The resources of a user are limited: one query
runs at a time and few answers may be unread; others are refused (429), and the client tries again. Queries run in
separate processes (`worker`), which are killed if one takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pwd
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slurm_migbatch.config import Config, loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.children import ONE_THREAD
from slurm_migbatch.daemon.credentials import CredentialThreads
from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.gate import ApiLimits, Caller, Gate, Refused
from slurm_migbatch.daemon.listening import Listening
from slurm_migbatch.daemon.log import FaultReporter, RateLimitedLog
from slurm_migbatch.daemon.server import ApiServer, ConnectionBounds
from slurm_migbatch.daemon.tasks import cancel, run_forever
from slurm_migbatch.node.auth import AuthError, MungeSigner, Signer
from slurm_migbatch.query.livepage import LivePage
from slurm_migbatch.query.protocol import GREETING, PATH
from slurm_migbatch.query.questions import MAX_QUESTION, QuestionError, read

log = logging.getLogger(__name__)

#: connections of one user with a running query or an unread answer
_HELD_PER_USER: Final = 2
#: queries that may wait for a worker, one per user
_WAITING: Final = 64
#: queries after which a worker is replaced
_QUESTIONS: Final = 200
#: connections of browsers
_BROWSERS: Final = ConnectionBounds(64, 32, 32, 5.0)
_BODY_S: Final = 5.0
#: accounts that are looked up at a time, of one address one
_LOOKUPS: Final = 8
_NICE: Final = 10
_PAUSE_S: Final = 1.0
_STATISTICS_S: Final = 1.0


class Workers:
    """Worker processes, each running one query at a time."""

    def __init__(self, start: bytes, count: int, patience_s: float, most_bytes: int) -> None:
        """`start`: the first line for each; `patience_s`: timeout of a query in seconds."""
        self._start, self._patience_s = start, patience_s
        self._most = 2 * most_bytes + (1 << 20)  # JSON writes some characters as two
        self._free_workers = asyncio.Semaphore(count)
        self._idle: list[Process] = []
        self._all: dict[Process, int] = {}  # with the number of queries that each has answered
        self.waiting = 0

    async def ask(self, uid: int, body: bytes) -> bytes:
        """Return the answer to a query. Raises Refused."""
        if self.waiting >= _WAITING:
            raise Refused(503, "too many queries are waiting; try again later", 2)
        self.waiting += 1
        try:
            await asyncio.wait_for(self._free_workers.acquire(), self._patience_s)
        except asyncio.TimeoutError:
            raise Refused(503, "other queries are still running; try again later", 2) from None
        finally:
            self.waiting -= 1
        try:
            return await self._work(uid, body)
        finally:
            self._free_workers.release()

    def close(self) -> None:
        """Terminate all workers."""
        for process in list(self._all):
            self._kill(process)

    async def _work(self, uid: int, body: bytes) -> bytes:
        while self._idle and self._idle[-1].returncode is not None:
            self._kill(self._idle.pop())
        process = self._idle.pop() if self._idle else await self._new()
        try:
            answer = await asyncio.wait_for(self._exchange(process, uid, body), self._patience_s)
        except asyncio.TimeoutError:
            self._kill(process)
            raise Refused(504, f"the query takes longer than {self._patience_s:g} s; request less data") from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            log.warning("a query process has died: %r", error)
            self._kill(process)
            await asyncio.sleep(_PAUSE_S)
            raise Refused(500, "the query failed; see migbatchd's log") from None
        except BaseException:  # the client has disconnected; what is left in the pipes belongs to no query
            self._kill(process)
            raise
        self._all[process] += 1
        if self._all[process] < _QUESTIONS:
            self._idle.append(process)
        else:  # frees the memory it holds
            self._kill(process)
        return answer

    async def _exchange(self, process: Process, uid: int, body: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"uid": uid, "question": body.decode()}).encode() + b"\n")
        await process.stdin.drain()
        size = int(await process.stdout.readexactly(8), 16)
        if size > self._most:
            raise ValueError(f"an answer of {size} bytes")
        return await process.stdout.readexactly(size)

    async def _new(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slurm_migbatch.query.worker"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            env={**os.environ, **ONE_THREAD},
        )
        self._all[process] = 0
        assert process.stdin is not None
        process.stdin.write(self._start)
        return process

    def _kill(self, process: Process) -> None:
        """Terminate a worker and the commands that it has started."""
        self._all.pop(process, None)
        if process.returncode is not None:  # its number may be another's
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class QueryService:
    """The application behind the port."""

    def __init__(self, config: Config, start: bytes, signer: Signer) -> None:
        query = config.query
        self._trusted = {0, os.geteuid()}
        self._limited_log = RateLimitedLog(log)
        self._threads = CredentialThreads("query-auth", checking=2)
        self._accounts = CredentialThreads("query-account", checking=_LOOKUPS)
        self._workers = Workers(start, query.workers, query.question_s, query.answer_mb << 20)
        self._asking: set[int] = set()
        self._held: Counter[int] = Counter()
        #: answers by status
        self.answers: Counter[int] = Counter()
        advice = ("a query was refused", "caused by the user or his host unless it persists")
        limits = ApiLimits(body_bytes=MAX_QUESTION, body_s=_BODY_S)
        gate = Gate(signer, limits, self._threads, self._authorise, self._limited_log, advice)
        handler = gate.guard(self._answer, lambda _path, status: self.answers.update((status,)))
        bounds = ConnectionBounds(query.max_connections, min(128, query.max_connections // 2), 32, 5.0)
        routes = [Route(PATH, handler, methods=["POST"]), Route(PATH, _greet, methods=["GET"])]
        self.api = ApiServer(Starlette(routes=routes), query.port, bounds, "query")
        #: for browsers, if enabled
        self.page: ApiServer | None = None

    async def serve_page(self, config: Config, settings: Callable[[], Mapping[str, str]]) -> None:
        """Serve the page for browsers once its token and its port can be used; queries are answered meanwhile."""
        fault = FaultReporter("the page of charts is not served", "queries are answered", log)
        while self.page is None:
            try:
                page = ApiServer(LivePage(config, self._workers.ask).app(), config.report.port, _BROWSERS, "report")
                Listening(page, config.report.listen, settings, "browsers", "report").begin()
            except (AuthError, OSError) as error:
                await asyncio.sleep(fault.failed(getattr(error, "strerror", None) or error))
            else:
                self.page = page
        fault.succeeded()

    async def stop(self) -> None:
        """Stop answering."""
        await self.api.stop()
        if self.page is not None:
            await self.page.stop()
        self._workers.close()
        self._threads.close()
        self._accounts.close()

    async def _authorise(self, caller: Caller) -> str:
        """Return the name to count a user by; refuse uids without an account: a user namespace has thousands.

        A directory service may take long over each of them: one of an address is looked up at a time.
        """
        if not await self._accounts.check(caller.link, partial(_has_account, caller.uid)):
            raise Refused(403, f"uid {caller.uid} has no account on the controller host")
        return f"uid {caller.uid}"

    async def _answer(self, caller: Caller, body: bytes) -> Response:
        try:
            read(body)
        except QuestionError as error:
            raise Refused(400, str(error)) from None
        self._hold(caller)
        if caller.uid in self._asking and caller.uid not in self._trusted:
            raise Refused(429, f"a query of uid {caller.uid} is already running", 1)
        self._asking.add(caller.uid)
        try:
            answer = await self._workers.ask(caller.uid, body)
        finally:
            self._asking.discard(caller.uid)
        return Response(answer, headers={"Connection": "close"}, media_type="application/json")

    def _hold(self, caller: Caller) -> None:
        """Count the connection until it is closed: an unread answer takes memory."""
        uid = caller.uid
        if self._held[uid] >= _HELD_PER_USER and uid not in self._trusted:
            raise Refused(429, f"{_HELD_PER_USER} answers to uid {uid} have not been read yet", 1)
        if caller.link is None:
            return
        self._held[uid] += 1

        def closed() -> None:
            self._held[uid] -= 1
            if not self._held[uid]:
                del self._held[uid]

        caller.link.when_closed(closed)


async def _greet(_: Request) -> Response:
    return Response(GREETING, headers={"Connection": "close"}, media_type="application/json")


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


async def serve(config: Config, start: bytes) -> None:
    """Serve until stdin ends.

    Raises:
        AuthError: munge cannot be used.
        OSError: the port is not available.
    """
    service = QueryService(config, start, MungeSigner(config.node_api.munge_socket, None))
    slurm = HistoryClient(*config.cluster.commands)
    listening = Listening(service.api, config.query.listen, slurm.settings, "users", "query")
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _when_ended, ended)
    try:
        listening.begin()
        _send({"serving": service.api.port})
        tasks = [
            asyncio.create_task(run_forever("addresses", listening.follow)),
            asyncio.create_task(_report_answers(service)),
        ]
        if config.report.page:
            tasks.append(asyncio.create_task(service.serve_page(config, slurm.settings)))
        await ended.wait()
        await cancel(*tasks)
    finally:
        await service.stop()


def _when_ended(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set()


async def _report_answers(service: QueryService) -> None:
    reported: Counter[int] = Counter()
    while True:
        await asyncio.sleep(_STATISTICS_S)
        if service.answers != reported:
            reported = service.answers.copy()
            _send({"answers": {str(status): count for status, count in reported.items()}})


def _send(message: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # migbatchd is gone, and stdin will end
        os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Serve until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # migbatchd gets them too, and closes our stdin for an orderly exit
    first = b""
    while not first.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        first += byte
    start = json.loads(first)
    logs.setup(start["level"])
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    try:
        asyncio.run(serve(loads(start["config"]), first))
    except (RuntimeError, OSError) as error:
        log.error("user queries are not answered: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()

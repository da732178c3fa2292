"""The query service as a process: queries of users over the network, and attempts of attackers."""

from __future__ import annotations

import http.client
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.node.auth import AuthError, MungeSigner, digest_of, request_payload
from slurm_migbatch.query.client import NoAnswer, ask
from slurm_migbatch.query.login import Servers
from slurm_migbatch.query.protocol import PATH, Answer
from slurm_migbatch.query.questions import Question, RunsQuestion, ShowQuestion, UsageQuestion, WasteQuestion, write
from tests.support.query_site import ALICE, BOB, SECRETS, QueryProcess, as_user, query_process
from tests.support.waiting import PATIENCE_S, eventually

MIB = 1 << 20
#: a uid that no account of this machine has
NOBODY_AT_ALL = 3_000_000_123


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueryProcess]:
    """A service on a site without PrivateData, for tests that do not change it."""
    with query_process(tmp_path_factory.mktemp("query")) as running:
        yield running


class Signer:
    """munge as another user."""

    scheme = "munge"

    def __init__(self, service: QueryProcess, uid: int) -> None:
        self._uid, self._munge = uid, MungeSigner(service.munge, service.servers.uids)

    def sign(self, payload: bytes, node: str) -> str:
        return str(as_user(self._uid, lambda: self._munge.sign(payload, node)))

    def verify(self, credential: str, payload: bytes, node: str) -> Any:
        return self._munge.verify(credential, payload, node)


def answer_to(service: QueryProcess, uid: int, question: Question) -> Answer:
    return ask(question, service.servers, Signer(service, uid))


def post(service: QueryProcess, body: bytes, fields: dict[str, str], path: str = PATH) -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
    with closing(link), suppress(BrokenPipeError, ConnectionResetError):
        link.request("POST", path, body, fields)
        with closing(link.getresponse()) as answer:
            return answer.status, answer.read().decode()
    return 0, "closed"


# -- which user sees what ----------------------------------------------------------------------------------------


def test_user_sees_all_jobs_but_not_the_texts_of_other_users(service: QueryProcess) -> None:
    out = answer_to(service, ALICE, RunsQuestion(jobs="7,8", delimiter="|", header=False, long=True)).out
    own, other = out.splitlines()
    assert own.startswith("7|") and other.startswith("8|")
    assert all(f"{word}7" in own for word in SECRETS[::2])
    assert not any(word in other for word in SECRETS)
    assert "|bin|a8|gpu|mig:auto|" in other and "|COMPLETED|" in other
    shown = answer_to(service, BOB, ShowQuestion("7")).out
    assert "daemon/a7" in shown and not any(word in shown for word in SECRETS)
    assert "secretmodel7 fits" in answer_to(service, ALICE, ShowQuestion("7")).out
    assert "secretname8" in answer_to(service, 0, ShowQuestion("8")).out, "root"


def test_without_a_selection_a_user_sees_only_their_own_jobs(service: QueryProcess) -> None:
    out = answer_to(service, BOB, RunsQuestion(start="now-1hour", columns="jobid", header=False)).out
    assert out.split() == ["8"]


def test_private_jobs_look_like_missing_jobs(tmp_path: Path) -> None:
    with query_process(tmp_path, "jobs") as service:
        for question in (
            RunsQuestion(jobs="7", header=False),
            RunsQuestion(users=("daemon",), header=False),
            RunsQuestion(nodes="n1", users=("1",), header=False),
        ):
            answer = answer_to(service, BOB, question)
            assert (answer.code, answer.out, answer.err, answer.error) == (0, "", (), "")
        for account in ("a7", "nosuch"):
            answer = answer_to(service, BOB, RunsQuestion(accounts=(account,), allusers=True, header=False))
            warning = f"migacct: warning: no run visible to you has the account '{account}'"
            assert (answer.code, answer.out, answer.err, answer.error) == (0, "", (warning,), "")
        hidden, missing = (answer_to(service, BOB, ShowQuestion(job)) for job in ("7", "77"))
        assert hidden == Answer(missing.code, error=missing.error.replace("77", "7"))
        assert "secretname7" in answer_to(service, ALICE, ShowQuestion("7")).out


def test_usage_is_summed_by_the_service(service: QueryProcess) -> None:
    asked = UsageQuestion(by="user", start="now-1hour", delimiter="|", header=False)
    assert [line.split("|")[:2] for line in answer_to(service, BOB, asked).out.splitlines()] == [
        ["daemon", "2"],
        ["bin", "1"],
    ]
    assert answer_to(service, BOB, UsageQuestion(by="colour")).code == 2


def test_waste_is_shown_only_for_own_jobs(service: QueryProcess) -> None:
    assert answer_to(service, ALICE, WasteQuestion("7")).out.startswith("Job:          7\n")
    assert "or it is not yours" in answer_to(service, BOB, WasteQuestion("7")).error


def test_everything_is_private_if_slurm_does_not_report_privatedata(tmp_path: Path) -> None:
    with query_process(tmp_path) as service:
        (tmp_path / "config").unlink()
        asked = RunsQuestion(allusers=True, start="now-1hour", columns="jobid", header=False)
        assert answer_to(service, BOB, asked).out.split() == ["8"]


def test_unreadable_record_is_reported_without_its_path(tmp_path: Path) -> None:
    with query_process(tmp_path) as service:
        (tmp_path / "migbatch.db").unlink()
        answer = answer_to(service, ALICE, RunsQuestion())
        assert answer.code == 1 and "cannot read the record at the moment" in answer.error
        assert str(tmp_path) not in answer.error
        assert "migbatch.db" in service.log


# -- credentials -------------------------------------------------------------------------------------------------


def test_each_question_needs_its_own_credential(service: QueryProcess) -> None:
    body = write(RunsQuestion())
    assert post(service, body, {})[0] == 401
    fields, _ = service.proof(body, ALICE)
    assert post(service, body, fields)[0] == 200
    status, text = post(service, body, fields)
    assert (status, "used before" in text) == (401, True), "replayed"
    fields, _ = service.proof(body, ALICE)
    other = write(RunsQuestion(allusers=True))
    status, text = post(service, other, fields)
    assert (status, "does not match the signature" in text) == (401, True)
    fields, _ = service.proof(body, ALICE)
    status, text = post(service, other, {**fields, "X-Migbatch-Digest": digest_of(other)})
    assert (status, "another message" in text) == (401, True)
    fields, _ = service.proof(body, ALICE)
    assert post(service, body, {**fields, "X-Migbatch-Node": "elsewhere"})[0] == 401
    fields, _ = service.proof(body, 0, "/node/v1/plan")
    assert post(service, body, fields)[0] == 401, "made for the node API"
    for wrong in ("MUNGE:AAAA:", "x" * 5000, "", "\x7f"):
        fields = {**service.proof(body, ALICE)[0], "Authorization": f"MigBatch munge {wrong}"}
        assert post(service, body, fields)[0] in (400, 401)


def test_signature_of_an_answer_is_not_valid_for_another_message(service: QueryProcess) -> None:
    """The controller's signature of an answer is not valid for a plan, nor for another answer."""
    body = write(RunsQuestion())
    fields, _ = service.proof(body, ALICE)
    link = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
    link.request("POST", PATH, body, fields)
    answer = link.getresponse()
    answer.read()
    signature = answer.getheader("X-Migbatch-Signature", "")
    link.close()
    payload = request_payload("POST", "/node/v1/plan", "login", digest_of(body))
    with pytest.raises(AuthError, match="another message"):
        MungeSigner(service.munge).verify(signature, payload, "login")


def test_uid_without_an_account_is_refused(service: QueryProcess) -> None:
    """A user namespace gives a user 65,536 uids, and the limits would apply to each of them separately."""
    body = write(RunsQuestion())
    fields, _ = service.proof(body, NOBODY_AT_ALL)
    status, text = post(service, body, fields)
    assert (status, "no account" in text) == (403, True)


def test_answer_that_the_controller_did_not_sign_is_refused(service: QueryProcess) -> None:
    """Another program listens on the controller's port while the service is down."""
    forged = Answer(0, "all is well\n").write()
    made: list[str] = [""]

    def serve(listener: socket.socket) -> None:
        for _ in range(3):
            link, _ = listener.accept()
            with closing(link):
                link.recv(65536)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(forged)}\r\nX-Migbatch-Signature: {made[0]}\r\n\r\n"
                link.sendall(head.encode() + forged)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        servers = Servers((f"http://127.0.0.1:{listener.getsockname()[1]}",), frozenset({0}), service.munge)
        for signature in ("", "x", as_user(BOB, lambda: MungeSigner(service.munge).sign(forged, "login"))):
            made[0] = signature
            with pytest.raises(NoAnswer, match="does not come from the controller"):
                ask(RunsQuestion(), servers, Signer(service, ALICE))
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("status", ["404 Not Found", "200 OK"])
def test_stranger_at_the_port_of_one_controller_does_not_keep_users_from_the_next(
    service: QueryProcess, status: str
) -> None:
    def serve(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with closing(link):
            link.recv(65536)
            link.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}".encode())

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        urls = (f"http://127.0.0.1:{listener.getsockname()[1]}", *service.servers.urls)
        servers = Servers(urls, service.servers.uids, service.munge)
        assert ask(RunsQuestion(), servers, Signer(service, ALICE)).code == 0
        thread.join(PATIENCE_S)


# -- bounds ------------------------------------------------------------------------------------------------------


def test_malformed_questions_are_refused(service: QueryProcess) -> None:
    for body in (b"", b"[]", b"{}", b'{"ask":"runs","db":"sqlite:////etc/passwd"}', b'{"ask":"runs","jobs":["7"]}',
                 b'{"ask":"show","job":"' + b"7" * 65 + b'"}', b"[" * 60000, b'{"ask":"runs","jobs":"\\ud800"}',
                 b"9" * 50000, b"\xff\xfe", b'{"ask":"runs","time_style":"%1000000000d"}',
                 '{"ask":"show","job":"7"}'.encode("utf-16"), '{"ask":"show","job":"7"}'.encode("utf-32")):  # fmt: skip
        fields, _ = service.proof(body, ALICE)
        assert post(service, body, fields)[0] == 400, body[:60]
    assert "Traceback" not in service.log
    assert "has died" not in service.log, "no process of queries was ended for them"


def test_body_that_is_too_large_or_has_no_length_is_refused(service: QueryProcess) -> None:
    body = b" " * (65536 + 1)
    fields, _ = service.proof(body, ALICE)
    assert post(service, body, fields)[0] == 413
    fields, _ = service.proof(b"", ALICE)
    assert post(service, b"", {**fields, "Transfer-Encoding": "chunked"})[0] in (400, 411)
    assert post(service, b"", fields, "/healthz")[0] == 404
    assert post(service, b"", fields, "/metrics")[0] == 404


@pytest.mark.slow
def test_slow_sender_times_out_and_does_not_block_others(service: QueryProcess) -> None:
    body = write(RunsQuestion())
    fields, _ = service.proof(body, BOB)
    lines = [f"{name}: {value}" for name, value in {**fields, "Host": "x", "Content-Length": str(len(body))}.items()]
    with closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) as link:
        link.sendall("\r\n".join([f"POST {PATH} HTTP/1.1", *lines, "", ""]).encode() + body[:5])
        assert answer_to(service, BOB, ShowQuestion("8")).code == 0
        answer = link.makefile("rb").read()
    assert b"408" in answer.splitlines()[0]


@pytest.mark.slow
def test_silent_connections_are_closed_and_do_not_block_others(service: QueryProcess) -> None:
    with ExitStack() as stack:
        silent = []
        for number in range(300):
            link = stack.enter_context(closing(socket.socket()))
            link.settimeout(PATIENCE_S)
            with suppress(OSError):
                link.bind((f"127.0.0.{2 + number % 20}", 0))
                link.connect(("127.0.0.1", service.port))
                silent.append(link)
                if number % 2:
                    link.sendall(b"POST /query/v1/ask HTTP/1.1\r\nX-Slow: ")
        assert answer_to(service, ALICE, ShowQuestion("7")).code == 0
        for link in silent:
            with suppress(ConnectionError):
                assert link.recv(1024) == b"", "closed, not answered"
    assert len(service.log) < 20_000
    assert "Traceback" not in service.log


def test_unauthenticated_bodies_use_little_memory(service: QueryProcess) -> None:
    def peak_mib() -> int:
        text = Path(f"/proc/{service.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) // 1024

    answer_to(service, ALICE, ShowQuestion("7"))
    before = peak_mib()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\nX-Migbatch-Node: n1\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(100):
            link = stack.enter_context(closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)))
            with suppress(OSError):
                link.sendall(head.encode() + secrets.token_bytes(60000))
        assert answer_to(service, ALICE, ShowQuestion("7")).code == 0
    assert peak_mib() - before < 32


def test_kernel_kills_processes_for_queries_first_when_memory_is_short(service: QueryProcess) -> None:
    """slurmctld may be the largest process of the host, and a user's query may take 2 GiB."""

    def oom_score(pid: str) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    answer_to(service, ALICE, ShowQuestion("7"))
    served_by = str(service.process.pid)
    children = Path(f"/proc/{served_by}/task/{served_by}/children").read_text().split()
    assert children and all(oom_score(child) == 1000 > oom_score(served_by) for child in children)


SLOW_SQUEUE = "#!/bin/sh\nexec sleep {seconds}\n"


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[QueryProcess]:
    """A site whose queue and nodes are never listed, with one worker and a short time limit."""
    with query_process(tmp_path, workers=1, question_s=3.0) as service:
        squeue, scontrol = tmp_path / "bin" / "squeue", tmp_path / "bin" / "scontrol"
        squeue.write_text(SLOW_SQUEUE.format(seconds=_seconds(service)))
        squeue.chmod(0o755)
        first, rest = scontrol.read_text().split("\n", 1)
        hangs = f'case "$*" in *"show node"*) exec sleep {_seconds(service)};; esac'
        scontrol.write_text(f"{first}\n{hangs}\n{rest}")
        yield service


@pytest.mark.slow
def test_question_that_takes_too_long_is_ended_with_its_commands(stuck: QueryProcess) -> None:
    body = b'{"ask":"why","job":"7"}'
    fields, _ = stuck.proof(body, ALICE)
    status, text = post(stuck, body, fields)
    assert (status, "longer than 3 s" in text) == (504, True)
    fields, _ = stuck.proof(body, ALICE)
    asked = threading.Thread(target=post, args=(stuck, body, fields))
    asked.start()
    eventually(lambda: any(_command(entry) == ["sleep", _seconds(stuck)] for entry in Path("/proc").iterdir()))
    fields, _ = stuck.proof(body, ALICE)
    status, text = post(stuck, body, fields)
    assert (status, "already running" in text) == (429, True), "one at a time"
    asked.join(PATIENCE_S)
    assert answer_to(stuck, BOB, ShowQuestion("8")).code == 0, "another process has taken the place"
    eventually(lambda: not any(_command(entry) == ["sleep", _seconds(stuck)] for entry in Path("/proc").iterdir()))


def _seconds(service: QueryProcess) -> str:
    """A time to sleep that distinguishes this service's commands from others."""
    return f"3000{service.port}"


def _command(entry: Path) -> list[str]:
    with suppress(OSError):
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def test_size_of_an_answer_is_limited(tmp_path: Path) -> None:
    with query_process(tmp_path, answer_mb=1) as service:
        wide = ",".join(["jobid%9999"] * 300)
        answer = answer_to(service, ALICE, RunsQuestion(allusers=True, jobs="7,8,9", columns=wide))
        assert answer.code == 1 and "longer than 1 MB" in answer.error
        assert answer_to(service, ALICE, ShowQuestion("7")).code == 0


def test_unread_answers_count_towards_the_limit_of_their_user(tmp_path: Path) -> None:
    with query_process(tmp_path) as service:
        wide = write(RunsQuestion(allusers=True, jobs="7,8,9", columns=",".join(["jobid%9999"] * 300)))
        body = write(ShowQuestion("7"))
        for _ in range(
            5
        ):  # a connection is closed a few seconds after an answer that nobody reads, here maybe too early
            first, second, proof = [service.proof(asked, ALICE)[0] for asked in (wide, wide, body)]
            with unread(service, first, wide), unread(service, second, wide):
                status, text = post(service, body, proof)
                if status != 200:
                    assert answer_to(service, BOB, ShowQuestion("8")).code == 0
                    break
        assert (status, "have not been read yet" in text) == (429, True)
        eventually(lambda: post(service, body, service.proof(body, ALICE)[0])[0] == 200)


@contextmanager
def unread(service: QueryProcess, fields: Mapping[str, str], wide: bytes) -> Iterator[None]:
    """An answer of which only the beginning is read; `fields`: headers with a proof."""
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(PATIENCE_S)
        link.connect(("127.0.0.1", service.port))
        lines = [f"{name}: {value}" for name, value in {**fields, "Host": "x"}.items()]
        head = "\r\n".join([f"POST {PATH} HTTP/1.1", *lines, f"Content-Length: {len(wide)}", "", ""])
        link.sendall(head.encode() + wide)
        assert link.recv(12) == b"HTTP/1.1 200"
        yield


# -- the commands ------------------------------------------------------------------------------------------------


def migacct(uid: int, conf: Path, *arguments: str, module: str = "migacct") -> subprocess.CompletedProcess[str]:
    start = f"from slurm_migbatch.cli.{module} import main; main()"
    environment = {"PATH": "/usr/bin:/bin", "MIGBATCH_LOGIN_CONF": str(conf), "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [sys.executable, "-c", f"import os, sys\nos.setuid({uid})\n{start}", *arguments],
        capture_output=True, text=True, check=False, env=environment, cwd="/", timeout=PATIENCE_S,
    )  # fmt: skip


def test_login_node_needs_only_login_conf(service: QueryProcess) -> None:
    conf = service.home / "login.conf"
    conf.write_text(f"Servers=http://127.0.0.1:1, http://127.0.0.1:{service.port}\nMungeSocket={service.munge}\n")
    conf.chmod(0o644)
    done = migacct(0, conf, "-j", "7", "-n", "-X", "-o", "jobid,jobname%20")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["7", "secretname7"], "")
    done = migacct(0, conf, "show", "77", module="main")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("migbatch: error: job 77 is not in the record")
    conf.write_text(f"Servers=http://127.0.0.1:1\nMungeSocket={service.munge}\n")
    done = migacct(0, conf, "-j", "7")
    assert (done.returncode, done.stdout) == (1, "")
    assert "http://127.0.0.1:1: Connection refused" in done.stderr and "ask the administrator" in done.stderr
    assert done.stderr.count("\n") == 1

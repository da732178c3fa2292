"""The service over its socket: real clients, the real shim, hostile peers, a slow record."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.client import ServiceUnavailable, ask
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.request import Accept, JobRequest, Pass, Present, Refuse, RequestError
from slurm_migbatch.submit.service import PER_USER, SubmitService, new_id
from tests.support.directories import open_to_users
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import LATER, Shim
from tests.support.submit_running import running

USER = 1001


ASK = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(sys.argv[2])
link.send(bytes.fromhex(sys.argv[3]))
os.write(1, link.recv(65536))
"""


@pytest.fixture
def decisions() -> list[SubmitDecision]:
    return []


@pytest.fixture
def service(chooser: Chooser, decisions: list[SubmitDecision]) -> Iterator[SubmitService]:
    made = SubmitService(SITE, chooser, decisions.append, clock=lambda: 1700000000.0)
    yield made
    made.close()


@pytest.fixture
def address(tmp_path: Path, service: SubmitService) -> Iterator[Path]:
    path = tmp_path / "submit.sock"
    with running(path, service):
        yield path


def auto(uid: int = USER, **fields: object) -> JobRequest:
    return JobRequest(uid, partition="gpu", tres_per_node="gres/mig:auto", **fields)


def test_a_decision_is_answered_and_recorded(
    address: Path, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    answer = ask(address, auto(comment="migbatch: model=bert-large slo=1s"))
    assert isinstance(answer, Accept)
    service.close()
    (decision,) = decisions
    assert f"#{decision.id}]" in answer.changes["comment"]
    assert decision.granted == "mig:1g.10gb:1" and decision.ts == 1700000000.0 and decision.reason == "fits"
    row = decision.to_dict()
    assert row["asked"] == {"tres_per_node": "gres/mig:auto", "comment": "migbatch: model=bert-large slo=1s"}
    assert row["hints"] == {"model": "bert-large", "slo_us": 1_000_000}
    assert row["candidates"][0]["ok"] and row["predictor"] == "prior"


def test_shim_uses_the_answer_of_the_service(tmp_path: Path, address: Path, decisions: list[SubmitDecision]) -> None:
    with Shim(tmp_path, socket=str(address)) as shim:
        answer = shim(auto(comment="migbatch: model=bert-large batch=32 slo=200ms"))
        assert isinstance(answer, Accept) and "1g.20gb" in answer.changes["tres_per_node"]
        assert not answer.changes["comment"].endswith(
            "#auto]"
        )  # a decision id: the shim alone, without table, knows no model
        odd = shim(auto(comment="ma\xf1ana 100% [x]\n"))
        assert odd.changes["comment"].startswith("ma\xf1ana 100% [x]\n [mig:1g.10gb:1#")
        assert isinstance(shim(JobRequest(USER, tres_per_node="gres/mig:1g")), Refuse)
        now = Present(True, "gpu", "gres/mig:2g.20gb:1", comment="a [mig:2g.20gb:1#old]")
        assert shim(JobRequest(USER, comment="b", now=now)).changes == {"comment": "b [mig:2g.20gb:1#old]"}


def test_shim_uses_the_answer_about_several_partitions(
    tmp_path: Path, address: Path, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    with Shim(tmp_path, socket=str(address)) as shim:
        answer = shim(JobRequest(USER, partition="cpu,gpu", tres_per_node="gres/mig:auto"))
    assert isinstance(answer, Accept) and answer.changes["partition"] == "gpu"
    service.close()
    assert [answer.changes["comment"].endswith(f"#{decision.id}]") for decision in decisions] == [True]


@pytest.mark.parametrize("init", ["", LATER], ids=["5.1", "later"])
def test_shim_answers_from_the_table_without_the_service(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    monkeypatch.setenv("LUA_INIT", init)
    with Shim(tmp_path, socket=str(tmp_path / "nobody.sock"), table=str(table)) as shim:
        answer = shim(auto(comment="migbatch: model=bert-large batch=32 slo=200ms"))
        assert answer.changes["comment"].endswith("slo=200ms [mig:1g.20gb:1#auto]")


def test_shim_without_service_and_table_grants_the_default_profile(tmp_path: Path) -> None:
    with Shim(tmp_path, socket=str(tmp_path / "nobody.sock")) as shim:
        answer = shim(auto(comment="migbatch: batch=32 slo=200ms"))
        assert answer.changes["comment"].endswith("[mig:1g.10gb:1#auto]")
        assert "the job names no model and no memory" in answer.message
        refused = shim(auto(comment="migbatch: model=bert-large batch=32 slo=200ms"))
        assert isinstance(refused, Refuse) and "add mem=" in refused.sentence
        with_memory = shim(auto(comment="migbatch: model=bert-large mem=15gb"))
        assert with_memory.changes["comment"].endswith("[mig:1g.20gb:1#auto]")
        assert shim(JobRequest(USER, tres_per_node="gres:gpu:1")).changes["tres_per_node"] == "gres:mig:7g.80gb:1"
        for bad in ("mig:1g", "mig:none", "mig:5g.5gb", "MIG:auto"):
            assert isinstance(shim(JobRequest(USER, tres_per_node=f"gres:{bad}")), Refuse)


def test_a_hanging_service_delays_one_submission_only(tmp_path: Path, table: Path) -> None:
    path = tmp_path / "deaf.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen(8)
        with Shim(tmp_path, socket=str(path), table=str(table), deadline_ms=50) as shim:
            for _ in range(5):
                assert isinstance(shim(auto()), Accept)
            deaf.setblocking(False)
            calls = 0
            while True:
                try:
                    deaf.accept()[0].close()
                    calls += 1
                except BlockingIOError:
                    break
            assert calls == 1


@pytest.mark.parametrize("reply", [b"", b"garbage", b"verdict=maybe\n\n", b"verdict=accept\nset_priority=99\n\n"])
def test_invalid_answer_of_the_service_is_ignored(tmp_path: Path, table: Path, reply: bytes) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as odd:
        odd.bind(str(path))
        odd.listen(8)

        def send_requests() -> None:
            client = odd.accept()[0]
            client.recv(65536)
            if reply:
                client.send(reply)
            client.close()

        thread = threading.Thread(target=send_requests)
        thread.start()
        with Shim(tmp_path, socket=str(path), table=str(table)) as shim:
            assert shim(auto()).changes["comment"] == "[mig:1g.10gb:1#auto]"
        thread.join(5)


def test_the_shim_keeps_its_connection_and_finds_a_new_service(
    tmp_path: Path, service: SubmitService, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, accepted = tmp_path / "submit.sock", []
    monkeypatch.setattr("slurm_migbatch.submit.server.peer_uid", lambda link: accepted.append(link.fileno()) or 0)
    with Shim(tmp_path, socket=str(path)) as shim:
        for round_ in (1, 2):
            with running(path, service):
                for _ in range(5):
                    assert not shim(auto()).changes["comment"].endswith("#auto]")
            assert len(accepted) == round_
            assert shim(auto()).changes["comment"].endswith("#auto]")  # nobody serves


@pytest.mark.slow
def test_a_late_answer_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """It comes after the shim has decided by itself; the next request must not find it."""
    path = tmp_path / "slow.sock"
    answers = [protocol.encode_answer(Accept({"comment": f"answer {n} [mig:1g.10gb:1]"}, "")) for n in range(3)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as slow:
        slow.bind(str(path))
        slow.listen(8)
        with Shim(tmp_path, socket=str(path), deadline_ms=2000, rest_s=0) as shim:
            results: list[object] = []
            asking = threading.Thread(target=lambda: results.extend(shim(auto()).changes["comment"] for _ in range(3)))
            asking.start()
            first = slow.accept()[0]
            first.recv(65536)
            first.send(answers[0])
            first.recv(65536)  # the second request is answered once the shim has given up
            second = slow.accept()[0]
            with suppress(OSError):
                first.send(answers[1])
            second.recv(65536)
            second.send(answers[2])
            asking.join(120)
            first.close()
            second.close()
    assert results == ["answer 0 [mig:1g.10gb:1]", "[mig:1g.10gb:1#auto]", "answer 2 [mig:1g.10gb:1]"]


def test_a_peer_that_hangs_up_does_not_kill_the_shim(tmp_path: Path, table: Path) -> None:
    """No SIGPIPE may reach slurmctld: the shim sends to a peer that has closed already."""
    path = tmp_path / "gone.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(8)
        stop = threading.Event()

        def hang_up() -> None:
            listener.settimeout(0.05)
            while not stop.is_set():
                try:
                    listener.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with Shim(tmp_path, socket=str(path), table=str(table)) as shim:
                for _ in range(50):
                    assert isinstance(shim(auto()), Accept)
        finally:
            stop.set()
            thread.join(5)


def test_only_root_may_ask_for_another_user(service: SubmitService, decisions: list[SubmitDecision]) -> None:
    def verdict(uid: int, peer: int) -> str:
        return protocol.decode(service.handle(protocol.encode(auto(uid).to_fields()), peer))["verdict"]

    assert verdict(USER, 0) == "accept"
    assert verdict(USER, USER) == "accept"  # advice for himself
    assert verdict(USER, USER + 1) == "error"
    assert verdict(0, USER) == "error"
    service.close()
    assert len(decisions) == 1  # advice is not recorded


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\n",
        b"\n\n",
        b"uid=1\n",
        b"kind=submit\n\n",
        b"uid=1\nuid=2\n\n",
        b"uid=-1\n\n",
        b"uid=1e9\n\n",
        b"uid=99999999999\n\n",
        b"uid=1\ncolour=red\n\n",
        b"uid=1\nnow_uid=0\n\n",
        b"uid=1\nkind=delete\n\n",
        b"uid=1\nUID=2\n\n",
        b"\xff=1\n\n",
        b"uid=1\n" + b"comment=" + b"A" * 70000 + b"\n\n",
        b"now=1\nuid=1\n\n",
    ],
)
def test_malformed_requests_are_answered_with_an_error(service: SubmitService, message: bytes) -> None:
    assert protocol.decode(service.handle(message))["verdict"] == "error"


@given(st.binary(max_size=300))
def test_any_bytes_are_answered(chooser: Chooser, message: bytes) -> None:
    service = SERVICES.setdefault("one", SubmitService(SITE, chooser))
    assert protocol.decode(service.handle(message))["verdict"] in ("error", "pass", "accept", "refuse")


SERVICES: dict[str, SubmitService] = {}


def test_exception_in_the_chooser_is_answered_with_an_error(chooser: Chooser, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Chooser):
        def choose(self, *_: object) -> object:
            raise ZeroDivisionError

    service = SubmitService(SITE, Broken(chooser.predictor))
    assert protocol.decode(service.handle(protocol.encode(auto().to_fields())))["verdict"] == "error"
    assert "a submit request failed" in caplog.text
    service.close()


def test_decisions_are_recorded_after_the_answers(chooser: Chooser, caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def record(decision: SubmitDecision) -> None:
        seen.append(decision)
        raise OSError("disk full")

    service = SubmitService(SITE, chooser, record)
    message = protocol.encode(auto().to_fields())
    for _ in range(20):
        service.handle(message)
    assert seen == []
    service.close()
    assert len(seen) == 20 and "cannot record decision" in caplog.text


def test_oldest_unrecorded_decisions_are_dropped_beyond_the_limit(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_migbatch.submit.service.MOST_UNRECORDED", 5)
    seen: list[SubmitDecision] = []
    service = SubmitService(SITE, chooser, seen.append)
    answers = [service.handle(protocol.encode(auto().to_fields())) for _ in range(8)]
    service.close()
    assert service.statistics.dropped_records == 3
    assert all(decision.id.encode() in answer for decision, answer in zip(seen, answers[3:], strict=True))


def test_idle_clients_do_not_block_others(address: Path) -> None:
    idle = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    try:
        for client in idle:
            client.connect(str(address))
        assert isinstance(ask(address, auto()), Accept)
    finally:
        for client in idle:
            client.close()


def test_an_ordinary_user_may_hold_few_connections(tmp_path: Path, address: Path) -> None:
    """Run as another user: more than PER_USER open connections are closed at once."""
    tmp_path.chmod(0o755)
    for parent in address.parents:
        if stat.S_IMODE(parent.stat().st_mode) & 0o5 != 0o5:
            parent.chmod(0o755)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = b"E"
        try:
            os.setgid(USER)
            os.setuid(USER)
            clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(PER_USER + 3)]
            for client in clients:
                client.connect(str(address))
            closed, end = 0, time.monotonic() + 60
            while closed < 3 and time.monotonic() < end:
                time.sleep(0.2)
                closed = 0
                for client in clients:
                    client.setblocking(False)
                    with suppress(BlockingIOError):
                        closed += client.recv(10) == b""
            code = str(closed).encode()
        finally:
            os.write(writing, code)
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"3"
    os.close(reading)


def test_user_with_a_number_above_two_billion_is_recognised(address: Path) -> None:
    """A directory service may give such numbers, which the kernel reports without a sign."""
    open_to_users(address.parent)
    argv = [sys.executable, "-c", ASK, str(3 * 10**9), str(address), protocol.encode(auto(3 * 10**9).to_fields()).hex()]
    assert b"verdict=accept" in subprocess.run(argv, check=True, capture_output=True).stdout


def test_the_socket_is_replaced_and_removed(tmp_path: Path, service: SubmitService) -> None:
    path = tmp_path / "submit.sock"
    path.touch()
    with running(path, service):
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()
    with pytest.raises(ServiceUnavailable, match="is migbatchd running"):
        ask(path, auto())


texts = st.text(alphabet=st.characters(max_codepoint=255), max_size=40)


@given(st.builds(JobRequest, st.integers(0, 2**31), user=texts, comment=texts, extra=texts, tres_per_node=texts))
def test_requests_are_unchanged_by_encoding_and_decoding(request_: JobRequest) -> None:
    assert JobRequest.from_fields(protocol.decode(protocol.encode(request_.to_fields()))) == request_


@given(st.builds(Present, st.booleans(), comment=texts, tres_per_node=texts))
def test_updates_are_unchanged_by_encoding_and_decoding(now: Present) -> None:
    asked = JobRequest(1, comment="x", now=now)
    assert JobRequest.from_fields(protocol.decode(protocol.encode(asked.to_fields()))) == asked


@given(
    st.one_of(
        st.builds(Pass, texts),
        st.builds(Refuse, texts, st.just("code")),
        st.builds(Accept, st.dictionaries(st.sampled_from(["comment", "tres_per_node"]), texts), texts),
    )
)
def test_answers_are_unchanged_by_encoding_and_decoding(answer: object) -> None:
    assert protocol.decode_answer(protocol.encode_answer(answer)) == answer


def test_error_answer_raises_an_exception_in_the_client() -> None:
    with pytest.raises(RequestError, match="uid is missing"):
        protocol.decode_answer(protocol.encode({"verdict": "error", "message": "uid is missing"}))


def test_decision_ids_are_unique_and_have_eight_lower_case_characters() -> None:
    names = {new_id() for _ in range(1000)}
    assert len(names) == 1000 and all(len(name) == 8 and name.isalnum() and name == name.lower() for name in names)

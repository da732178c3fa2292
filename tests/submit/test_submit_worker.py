"""What the answering process does between answers: none of it can block, and nothing is lost at the end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slurm_migbatch.daemon.submit_worker import DecisionRecorder, IdleTasks, Output
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.submit.service import SubmitService
from tests.support.gpu_kinds import SITE


class Pipe:
    """The pipe to migbatchd, whose reads the test controls."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.output = Output(self.writing)

    def lines(self, kind: str, count: int, *, flush: bool = True) -> list[dict[str, object]]:
        """The messages of one kind, once there are `count`; with `flush` the rest is written meanwhile."""
        text, end = b"", time.monotonic() + 120
        while True:
            rows = [json.loads(line) for line in text.split(b"\n")[:-1]]
            found = [row[kind] for row in rows if kind in row]
            if len(found) >= count:
                return found
            assert time.monotonic() < end, f"{len(found)} of {count}"
            text += os.read(self.reading, 65536)
            if flush:
                self.output.flush()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.reading)
    os.close(made.writing)


@pytest.fixture
def decide(chooser: Chooser) -> Callable[..., SubmitDecision]:
    def make(uid: int, user: str = "") -> SubmitDecision:
        seen: list[SubmitDecision] = []
        service = SubmitService(SITE, chooser, seen.append)
        asked = JobRequest(uid, user=user, partition="gpu", tres_per_node="gres/mig:auto")
        service.handle(protocol.encode(asked.to_fields()))
        service.close()
        return seen[0]

    return make


def test_output_does_not_block_while_migbatchd_does_not_read(pipe: Pipe) -> None:
    for number in range(2000):
        pipe.output.send({"line": {"number": number, "text": "x" * 200}})
    assert pipe.output.flush() > 100_000
    assert [row["number"] for row in pipe.lines("line", 2000)] == list(range(2000))
    assert pipe.output.flush() == 0


def test_waiting_output_is_written_at_close(pipe: Pipe) -> None:
    for number in range(2000):
        pipe.output.send({"line": {"number": number, "text": "x" * 200}})
    closing = threading.Thread(target=pipe.output.close)
    closing.start()
    assert len(pipe.lines("line", 2000, flush=False)) == 2000
    closing.join(120)
    assert not closing.is_alive()


def test_output_to_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    output = Output(writing)
    os.close(reading)
    output.send({"line": 1})
    output.close()
    os.close(writing)


def test_decisions_are_recorded_with_user_names(pipe: Pipe, decide: Callable[..., SubmitDecision]) -> None:
    recorder = DecisionRecorder(pipe.output)
    for decision in (decide(1001, "ann"), replace(decide(1001), uid=0), replace(decide(1001), uid=4_000_000_000)):
        recorder.take(decision)
    recorder.close(120)
    assert {row["user"] for row in pipe.lines("decision", 3)} == {"ann", "root", "4000000000"}


def test_slow_directory_service_delays_only_users_that_it_looks_up(
    pipe: Pipe, decide: Callable[..., SubmitDecision], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, asked = threading.Event(), []

    def getpwuid(uid: int) -> object:
        asked.append(uid)
        release.wait(120)
        return SimpleNamespace(pw_name=f"user{uid}")

    monkeypatch.setattr("slurm_migbatch.daemon.submit_worker.pwd.getpwuid", getpwuid)
    recorder = DecisionRecorder(pipe.output)
    for _ in range(3):
        recorder.take(decide(1001))
    recorder.take(decide(1002, "bob"))
    assert [row["user"] for row in pipe.lines("decision", 1)] == ["bob"]
    release.set()
    recorder.close(120)
    assert [row["user"] for row in pipe.lines("decision", 3)] == ["user1001"] * 3
    assert asked == [1001]


def test_idle_tasks_send_decisions_and_return_the_next_delay(pipe: Pipe, chooser: Chooser) -> None:
    recorder = DecisionRecorder(pipe.output)
    service = SubmitService(SITE, chooser, recorder.take)
    idle_tasks = IdleTasks(service, pipe.output)
    message = protocol.encode(JobRequest(1001, user="ann", partition="gpu", tres_per_node="gres/mig:auto").to_fields())
    for _ in range(5):
        service.handle(message)
    while idle_tasks() is not None:
        pass
    assert len(pipe.lines("decision", 5)) == 5
    service.handle(message)
    assert 0 < (idle_tasks() or 0) <= 1.0  # the next statistics come a second after the last
    recorder.close(120)


def test_decisions_wait_while_migbatchd_does_not_read(pipe: Pipe, chooser: Chooser) -> None:
    recorded: list[SubmitDecision] = []
    service = SubmitService(SITE, chooser, recorded.append)
    pipe.output.send({"line": "x" * (3 << 20)})
    service.handle(protocol.encode(JobRequest(1001, partition="gpu", tres_per_node="gres/mig:auto").to_fields()))
    idle_tasks = IdleTasks(service, pipe.output)
    assert 0 < (idle_tasks() or 0) < 1 and recorded == []
    pipe.lines("line", 1)
    idle_tasks()
    assert len(recorded) == 1

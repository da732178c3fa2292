"""The child process in which pyslurm runs: whatever it does, requests get an answer, or an error in time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_migbatch.slurm import pyslurm as backend
from slurm_migbatch.slurm.client import OTHERS, JobRow, SlurmError
from slurm_migbatch.slurm.dependencies import MOST
from slurm_migbatch.slurm.order import in_order
from slurm_migbatch.slurm.pyslurm import PyslurmClient
from slurm_migbatch.slurm.pyslurm_worker import JOB, _short

SOURCE = f"""
import os, signal, time
__version__ = "25.11.2"
class PyslurmError(Exception): pass
class RPCError(PyslurmError): pass
class Job: {"; ".join(f"{name} = None" for name in JOB)}
class Found(list):
    def values(self): return iter(self)
class Jobs:
    @staticmethod
    def load(): return jobs()
class Partitions:
    @staticmethod
    def load(): return Found()
def jobs(): return Found()
"""

Make = Callable[..., PyslurmClient]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[PyslurmClient] = []

    def client(more: str = "", timeout: float = 60.0) -> PyslurmClient:
        (tmp_path / "pyslurm.py").write_text(SOURCE + more)
        for name in ("squeue", "scontrol"):
            (tmp_path / name).write_text('#!/bin/sh\n[ "$1" != --version ] || echo slurm 25.11.2\n')
            (tmp_path / name).chmod(0o755)
        made.append(PyslurmClient(tmp_path, None, timeout, python=("env", f"PYTHONPATH={tmp_path}", sys.executable)))
        return made[-1]

    yield client
    for opened in made:
        opened.close()


def pid(client: PyslurmClient) -> int:
    process = client.worker._process
    assert process is not None
    return process.pid


def test_one_process_answers_many_requests(make: Make) -> None:
    client = make()
    assert client.probe() == ""
    first = pid(client)
    assert client.jobs() == []
    assert pid(client) == first


def test_a_bounded_number_of_dependencies_is_sent_and_kept() -> None:
    texts = [f"{job}(unfulfilled)" for job in range(1001, 13_001)]
    depends = {"afterok": texts, "afterany": texts, "satisfy": "all"}
    sent = _short(depends)
    assert all(len(value) <= 65 for value in sent.values())
    assert backend._after(sent) == backend._after(depends) == (OTHERS, *range(1001, 1001 + MOST))
    assert backend._after(_short({"afterok": texts[:2], "after": [7]})) == (7, 1001, 1002)
    assert backend._after(_short(None)) == ()


def test_process_is_replaced_after_many_requests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ASKED_OFTEN", 2)
    client = make()
    seen = []
    for _ in range(4):
        client.jobs()
        seen.append(pid(client))
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def jobs(): time.sleep(600)", r"did not answer within 0\.5 s"),
        ("def jobs(): os.kill(os.getpid(), signal.SIGSEGV)", "ended on signal 11"),
        ("def jobs(): os._exit(3)", "ended with exit code 3"),
        ("def jobs(): raise RPCError('Unable to contact slurm controller')", "Unable to contact slurm controller"),
    ],
)
def test_failed_request_is_an_error_and_the_next_one_succeeds(
    make: Make, more: str, message: str, tmp_path: Path
) -> None:
    client = make(more, timeout=60.0)
    assert client.probe() == ""
    if "sleep" in more:
        client._timeout = 0.5
    with pytest.raises(SlurmError, match=message):
        client.jobs()
    client._timeout = 60.0
    (tmp_path / "pyslurm.py").write_text(SOURCE)
    for cache in tmp_path.glob("__pycache__/*"):
        cache.unlink()
    client.close()
    assert client.jobs() == []


def test_hanging_process_is_killed(make: Make) -> None:
    client = make("def jobs(): time.sleep(600)")
    assert client.probe() == ""
    child = pid(client)
    client._timeout = 0.2
    with pytest.raises(SlurmError):
        client.jobs()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("raise ImportError('libslurmfull.so: cannot open')", "cannot open"),
        ("os._exit(1)", "exit code 1"),
        ("del Job.gres_per_node", "does not provide gres_per_node"),
        ("class Partitions:\n    def load(): raise RPCError('Protocol version has an unexpected size')", "Protocol"),
    ],
)
def test_probe_says_why_pyslurm_cannot_be_used(make: Make, more: str, message: str) -> None:
    assert message in make(more).probe()


def test_probe_reports_missing_pyslurm_or_python(tmp_path: Path) -> None:
    client = PyslurmClient(tmp_path, None, 60.0, python=("env", "PYTHONSAFEPATH=1", sys.executable, "-S"))
    assert "No module named" in client.probe()
    assert "cannot be started" in PyslurmClient(tmp_path, None, 60.0, python=(str(tmp_path / "none"),)).probe()


def test_output_that_pyslurm_prints_is_not_taken_for_an_answer(make: Make) -> None:
    client = make(
        "def jobs():\n    print('{\"ok\": 5}', flush=True)\n    os.write(1, b'gres mig\\n')\n    return Found()"
    )
    assert client.jobs() == []


def test_jobs_are_in_the_order_of_squeue() -> None:
    rows = [
        JobRow(1, partition="train", priority=90),
        JobRow(2, partition="gpu", priority=10),
        JobRow(3, partition="train,gpu", priority=20),
        JobRow(4, partition="gpu", priority=10, array_job=4, array_task="1-3"),
        JobRow(9, partition="gpu", priority=10, array_job=4, array_task="7"),
        JobRow(8, partition="gpu", priority=10, array_job=4, array_task="0", state="RUNNING"),
        JobRow(5, partition="gpu", priority=10),
    ]
    assert [row.job_id for row in in_order(rows, {"gpu": 10, "train": 1})] == [3, 2, 8, 9, 4, 5, 1]
    requeued = [JobRow(1, submit=200.0), JobRow(2, submit=100.0), JobRow(3, submit=100.0), JobRow(4, "x", priority=1)]
    assert [row.job_id for row in in_order(requeued, {})] == [4, 2, 3, 1]

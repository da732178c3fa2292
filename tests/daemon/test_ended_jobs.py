"""How jobs have ended, from squeue's listing of them."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.queries import JobId, RunFilter

NAME = 'a "b"\t|\n%s über'
SHOWN = {
    "JobID": "21", "ArrayJobID": "20", "ArrayTaskID": "3", "HetJobID": "0", "RestartCnt": "0", "UserID": "1001",
    "UserName": "DOM\\alice", "Account": "phys-dept.1", "Partition": "GPU-Long.a100", "State": "FAILED",
    "SubmitTime": "1000", "StartTime": "1001", "EndTime": "1002", "TimeLimit": "1:00:00", "NodeList": "rack1n[01-02]",
    "NumNodes": "2", "tres-per-node": "gres/mig:1g.10gb:1", "Name": NAME, "Comment": "mine [mig:1g.10gb:1#7fq3k]",
    "GroupID": "1002", "QOS": "high.prio-1", "WCKey": "w:k", "exit_code": "256",
}  # fmt: skip


class Squeue(HistoryClient):
    """The client of a squeue that lists a job, and another one; `shown` replaces some of their fields.

    Like Slurm's it refuses a state that its release does not know; this one knows none but `all`.
    """

    def __init__(self, **shown: str) -> None:
        super().__init__()
        self.shown = {**SHOWN, **shown}

    def _run(self, program: str, *arguments: str) -> str:
        assert program == "squeue" and "--jobs=7,21,21" in arguments
        unknown = [word for word in arguments if word.startswith("--states=") and word != "--states=all"]
        if unknown:
            raise SlurmError(f"squeue: error: Invalid job state specified: {unknown}")
        columns = re.findall(r"([A-Za-z_-]+):\d+(\x1f[\w-]+)(?:,|\Z)", arguments[-1].removeprefix("--Format="))
        jobs = (self.shown, {**self.shown, "JobID": "22"})
        return "".join("".join(job.get(name, "N/A") + mark for name, mark in columns) + "\n" for job in jobs)


def test_job_that_ended_before_it_was_listed_is_recorded_with_its_name_and_limits(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/x.db") as store:
        rows = Squeue().ended({7, 21})
        assert [row["job_id"] for row in rows] == [21]
        store.upsert_jobs(rows)
        (found,) = store.runs(RunFilter(jobs=(JobId(20, task="3"),)))
    run = found.run
    assert (run["name"], run["user"], run["qos"], run["wckey"], run["gid"]) == (
        NAME, "DOM\\alice", "high.prio-1", "w:k", 1002,
    )  # fmt: skip
    assert (run["comment"], run["time_limit_s"], run["nodes"]) == ("mine", 3600, "rack1n01,rack1n02")
    assert (run["state"], run["exit_code"], run["submitted"], run["started"], run["ended"]) == (
        "FAILED", 1, 1000.0, 1001.0, 1002.0,
    )  # fmt: skip


def test_times_of_ended_jobs_are_read_in_slurms_own_form_too() -> None:
    at = datetime(2026, 9, 21, 14, 13, 20)
    (row,) = Squeue(StartTime=str(int(at.timestamp())), EndTime=at.isoformat()).ended({7, 21})
    assert (row["start"], row["end"]) == (at.timestamp(), at.timestamp())


class Forgetful(HistoryClient):
    """The client of a slurmctld that knows no jobs but 7, and keeps ended ones for `age`."""

    def __init__(self, age: str) -> None:
        super().__init__()
        self.age = age

    def _run(self, program: str, *arguments: str) -> str:
        if program == "scontrol":
            return f"MinJobAge               = {self.age}\n"
        mark = arguments[-1].rpartition(":0")[2]
        return f"7{mark}COMPLETED{mark}\n"


@pytest.mark.parametrize(
    ("age", "lost"), [("300 sec", [9]), ("0 sec", [8, 9]), ("2 sec", []), ("", [])], ids=["usual", "ever", "short", "?"]
)
def test_job_that_slurmctld_should_still_know_was_lost(age: str, lost: list[int]) -> None:
    now = time.monotonic()
    assert sorted(Forgetful(age).lost({7: now, 8: now - 500, 9: now - 10})) == lost
    assert Forgetful(age).lost({}) == []


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "EXPEDITING", "STATE_OF_2030"])
def test_job_in_any_other_state_has_not_ended(state: str) -> None:
    assert Squeue(State=state).ended({7, 21}) == []


@pytest.mark.parametrize("state", ["BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED"])
def test_ends_are_read_whatever_states_this_release_of_slurm_has(state: str) -> None:
    assert [row["state"] for row in Squeue(State=state).ended({7, 21})] == [state]

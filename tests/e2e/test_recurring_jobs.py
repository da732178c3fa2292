"""A job without hints gets what its own runs used, more when it needs more, and a retry when it ran out of memory."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.submit.client import ask
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.script import digest
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.catalog import load
from tests.support.end_to_end import account, holding, shown, until

FIRST_PID = 2**22 + 100
"""Above any pid: the simulated driver keeps such processes until they are ended."""
SCRIPT = """#!/bin/bash
#SBATCH --gres=mig:auto
# run {number}
python3 train.py --epoch {number} --day 2026-01-{number:02d} 2>/dev/null
until test -e $HOME/go.$SLURM_JOB_ID.$(( ${{SLURM_RESTART_COUNT:-0}} )); do sleep 0.2; done
exit $(cat $HOME/go.$SLURM_JOB_ID.$(( ${{SLURM_RESTART_COUNT:-0}} )))
"""
RETRIED = "it ran out of memory, and the job has the hint retry=oom"
PIDS = itertools.count(FIRST_PID)


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    node_conf = {"SampleEvery": "0.3", "ProgressEvery": "1"}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=1, gpus=1, node_conf=node_conf) as running:
        yield running


class Recurring:
    """A job that a user submits repeatedly; `need_gib` is what it really needs."""

    def __init__(self, bed: Cluster, name: str, user: str = "mbalice") -> None:
        self.bed, self.name, self.user = bed, name, user
        self.runs = 0
        self.failed: list[bool] = []
        self.profiles: list[str] = []
        self.busy = {"sm": 0, "dram": 0}  # percent of the slice

    @property
    def script(self) -> str:
        return SCRIPT.format(number=self.runs + 1)

    def submit(self, *options: str) -> tuple[int, str]:
        """Submit the job; return its id and the message to its user."""
        path = self.bed.home(self.user) / self.name
        path.write_text(self.script)
        done = self.bed.run(["sbatch", *options, str(path)], self.user, check=False)
        found = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert found, done.stdout + done.stderr
        return int(found[1]), done.stdout + done.stderr

    def live(self, job: int, need_gib: float, restart: int = 0, task: str = "") -> tuple[str, bool]:
        """Let a running job use the memory it needs, and end as it would; return its profile and whether it ran out.

        `task`: the name of an array's task, as users write it; `job` is the task's own id.
        """
        seen = time.time()
        node, uuid = holding(self.bed, job)
        machine = self.bed.machine(node)
        profile = account(self.bed, task or job, "RUNNING")["profile"]
        memory_mib = load(self.bed.product.state / "catalog.json").view(("gpu",)).offers[profile].memory_mib
        died = need_gib * 1024 > memory_mib
        pid = next(PIDS)
        machine.set_load(uuid, **self.busy)
        machine.start_process(uuid, pid, memory_mib=int(min(need_gib * 1024, memory_mib * 0.97)))
        path = self.bed.node_directory(node) / "run" / "peaks"

        def watched() -> bool:
            """Whether it was sampled for most of the time, as is required at its end."""
            rows = json.loads(path.read_text())["runs"] if path.exists() else {}
            row = rows.get(f"{job}.{restart}", {"watched_s": 0, "mib": {}})
            return uuid in row["mib"] and row["watched_s"] > 0.6 * (time.time() - seen + 4.0)

        until("looks at its memory", watched)
        machine.end_process(pid)
        go = Path(self.bed.home(self.user)) / f"go.{job}.{restart}"
        go.write_text("1\n" if died else "0\n")
        return profile, died

    def run(self, need_gib: float) -> str:
        """Run once, until the service knows of the run; return the message to the user."""
        job, message = self.submit()
        self.bed.wait_job(job, "RUNNING")
        profile, died = self.live(job, need_gib)
        account(self.bed, job, "FAILED" if died else "COMPLETED")
        until("the memory in the record", lambda: account(self.bed, job, "")["measured_memory_mib"] is not None)
        self.runs += 1
        self.failed.append(died)
        self.profiles.append(profile)
        self.known()
        return message

    def known(self) -> None:
        """Wait until the service knows of all runs."""
        wanted = re.compile(rf"\({self.runs} so far\)|last {self.runs} runs|filled its slice")
        until(f"an answer that knows {self.runs} runs", lambda: wanted.search(self.answer_message()) is not None)

    def answer_message(self) -> str:
        uid = self.bed.user(self.user).uid
        fields = {"partition": "gpu", "tres_per_node": "gres:mig:auto", "num_tasks": 1, "batch": 1, "name": self.name}
        request = JobRequest(uid, account="", digest=digest(self.script.encode()), **fields)  # type: ignore[arg-type]
        answer = ask(self.bed.product.state / "submit.sock", request)
        assert isinstance(answer, Accept), answer
        return answer.message


def test_profile_settles_after_three_runs_and_grows_with_the_need(bed: Cluster) -> None:
    job = Recurring(bed, "train.sh")
    messages = [job.run(4.0) for _ in range(3)]
    assert job.profiles == ["1g.10gb"] * 3
    assert "after 3 completed runs of train.sh (0 so far)" in messages[0]
    assert "(2 so far)" in messages[2]
    assert "your last 3 runs of train.sh used at most 4 GiB" in job.run(4.0)
    for gib in (6.0, 9.0, 12.0, 18.0, 24.0, 24.0):
        job.run(gib)
    assert not any(failure and other for failure, other in itertools.pairwise(job.failed)), (job.failed, job.profiles)
    assert not job.failed[-1] and job.profiles[-1] in ("3g.40gb", "4g.40gb"), (job.failed, job.profiles)


def test_profile_follows_the_memory_used_and_not_the_slice_requested_before(bed: Cluster) -> None:
    job = Recurring(bed, "big.sh")
    for _ in range(3):
        number, _ = job.submit("--gres=mig:3g.40gb")
        bed.wait_job(number, "RUNNING")
        assert job.live(number, 14.0)[0] == "3g.40gb"
        account(bed, number)
        job.runs += 1
    job.known()
    assert "your last 3 runs of big.sh used at most 14 GiB" in job.run(14.0)
    assert job.profiles == ["1g.20gb"]


def test_busy_job_is_not_given_a_slower_slice(bed: Cluster) -> None:
    """A job whose memory fits one seventh keeps most of the SMs of three sevenths busy."""
    job = Recurring(bed, "busy.sh")
    job.busy = {"sm": 60, "dram": 10}
    for _ in range(3):
        number, _ = job.submit("--gres=mig:3g.40gb")
        bed.wait_job(number, "RUNNING")
        job.live(number, 4.0)
        account(bed, number)
        job.runs += 1
    job.known()
    program = str(Path(sys.executable).with_name("migacct"))
    columns = ("-n", "-P", "-o", "SMActive,DRAMActive,MaxGPUMem")
    shares = bed.run_here([program, "-a", "-S", "now-2hours", "-j", str(number), *columns]).split("|")
    assert (
        50 <= int(shares[0].rstrip("%")) <= 60 and 8 <= int(shares[1].rstrip("%")) <= 10 and shares[2].strip() == "4G"
    )
    assert "2g.20gb" in (message := job.answer_message()) and "on 1g.10gb they would take longer" in message


def test_migacct_shows_the_energy_of_whole_gpu_jobs_only(bed: Cluster) -> None:
    whole, part = (
        int(bed.run(["sbatch", "--parsable", f"--gres=mig:{name}", "--wrap", "sleep 5"], "mbalice").stdout)
        for name in ("7g.80gb", "1g.10gb")
    )
    for job in (whole, part):
        account(bed, job)
    shown = [str(Path(sys.executable).with_name("migacct")), "-a", "-S", "now-2hours", "-n", "-X", "-P"]
    rows = bed.run_here([*shown, "-j", f"{whole},{part}", "-o", "jobid,consumedenergyraw"]).split()
    joules = dict(line.split("|") for line in rows)
    assert int(joules[str(whole)]) > 0 and joules[str(part)] == ""


def test_job_that_ran_out_of_memory_is_retried_once_on_a_larger_slice(bed: Cluster) -> None:
    """By the hint retry=oom, and its own report or what the driver saw; after the second run its state is final."""
    job = Recurring(bed, "retry.sh")
    number, message = job.submit("--comment=migbatch: retry=oom")
    bed.wait_job(number, "RUNNING")
    assert job.live(number, 15.0) == ("1g.10gb", True)
    if "for the next submission only" in message:
        account(bed, number, "FAILED")
        until("the largest slice for the next one", lambda: "the largest slice once" in job.answer_message())
        return
    until("its second run", lambda: "JobState=RUNNING" in (now := shown(bed, number)) and "Restarts=1" in now)
    assert job.live(number, 15.0, restart=1) == ("7g.80gb", False)
    row = account(bed, number)
    assert row["retyped"] == {"from": "1g.10gb", "to": "7g.80gb", "why": RETRIED}


def test_array_tasks_that_ran_out_of_memory_are_retried_one_by_one(bed: Cluster) -> None:
    """The first task has an id of its own, the last one has that of its array; the one between completes."""
    job = Recurring(bed, "tasks.sh")
    options = ("--array=1-3", "--gres=mig:1g.10gb", "--comment=migbatch: retry=oom max=1g.20gb")
    array, message = job.submit(*options)
    ids: dict[str, int] = {}

    def started() -> bool:
        listed = bed.run(["squeue", "-h", "-t", "RUNNING", f"--jobs={array},{array}", "-O", "ArrayTaskID:0|,JobID:0"])
        ids.update((task, int(number)) for task, number in (line.split("|") for line in listed.stdout.split()))
        return len(ids) == 3

    def again(task: str) -> bool:
        return "JobState=RUNNING" in (now := shown(bed, task)) and "Restarts=1" in now

    until("all tasks", started)
    assert ids["3"] == array
    for task, need_gib in (("2", 4.0), ("1", 15.0), ("3", 15.0)):
        assert job.live(ids[task], need_gib, task=f"{array}_{task}") == ("1g.10gb", need_gib > 10)
    account(bed, f"{array}_2")
    if "for the next submission only" in message:
        assert all(account(bed, f"{array}_{task}", "FAILED")["retyped"] is None for task in ("1", "3"))
        return
    for task in ("1", "3"):
        until("its second run", lambda: again(f"{array}_{task}"))  # noqa: B023 - called at once
        assert job.live(ids[task], 15.0, restart=1, task=f"{array}_{task}") == ("1g.20gb", False)
    for task in ("1", "3"):
        row = account(bed, f"{array}_{task}")
        assert row["retyped"] == {"from": "1g.10gb", "to": "1g.20gb", "why": RETRIED}
    assert account(bed, f"{array}_2")["retyped"] is None
    assert "Restarts=0" in shown(bed, f"{array}_2"), "a completed task is not run again"


def test_runs_of_another_user_with_the_same_script_do_not_count(bed: Cluster) -> None:
    job = Recurring(bed, "train.sh", "mbbob")
    assert "(0 so far)" in job.answer_message()

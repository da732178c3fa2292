"""migacct compared with this Slurm's sacct: accepted times and values, their meaning, and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from slurm_migbatch.slurm.times import TimeFormError, parse_time
from slurm_migbatch.store import models
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.runquery import RunFilter
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.waiting import eventually

FORMS = (
    "12:34", "9:05:07", "1:30pm", "12:15 pm", "0:30am", "6:00:00 AM", "0102", "010225", "010225-13:45", "102", "1/2",
    "01/02-06:07", "01.02.24-06:07", "12/31", "2026-01-02", "2026-01-2", "2026-01-02T03:04", "2026-01-02-03:04:05",
    "2026-01-02 03:04", "2026-01-02T", "2026-02-30", "0230", "today", "tomorrow", "midnight", "noon", "fika", "teatime",
    "tomorrow-noon", "noon tomorrow", "now", "now-2days", "now+1hour", "now - 30 minutes", "now-45", "now-1week",
    "uts1700000000", "12:00-13:00", "today midnight",
    # and text that is not a time
    "foo", "13:00pm", "25:00", "24:00", "12:60", "12:00:60", "12:61:00", "12:30p", "12", "1332", "31/31", "0010",
    "12345", "2026-1-2", "2026-01", "01/02/2026", "2025-01-02T03:04:05Z", "now-", "now2days", "now-2fortnights",
    "now-1w", "now-1min", "now-5h", "now+1month", "today+1", "uts5",
)  # fmt: skip
#: options that sacct refuses (BAD) and accepts (GOOD) without any jobs
BAD = (
    ["-S", "foo"], ["-u", "nosuch"], ["--uid", "4000000"], ["-g", "nosuch"], ["-s", "SLEEPING"], ["-o", "jobid,color"],
    ["-j", "abc"], ["--units", "X"], ["-k", "foo"], ["-c"], ["--bogus"], ["-S"], ["stray"],
    ["-S", "noon", "-E", "midnight"],
)  # fmt: skip
GOOD = (
    ["-L"], ["-M", "all"], ["-A", "nosuch"], ["-W", "nosuch"], ["-r", "nosuch"], ["--name", "a,b"], ["-T"],
    ["-K", "10"],
    ["-k", "5", "-K", "10"], ["-k", "0-1"], ["-g", "root"], ["-j", "999"], ["-a"], ["--allusers", "-D", "-X"],
)  # fmt: skip
#: the words that both print where sacct reports an error in a value
WORDS = re.compile(
    r"Invalid time specification \(pos=\d+\): \S+|Invalid (?:user|group) id: \w+|unrecognized job state value '\w+'|"
    r'Invalid field requested: "\w+"|Bad job/step specified: \w+|Invalid unit type \'\w\'|'
    r"Invalid time limit specification|"
    r"Start time \(\S+\) requested is after end time \(\S+\)|Slurm job completion is disabled"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def accounting(slurm_root: str) -> object:
    """A cluster with slurmdbd."""
    with Cluster(nodes=1, gpus=1, dbd=True, slurm_root=slurm_root) as running:
        yield running


@pytest.fixture
def migacct(tmp_path: Path) -> Run:
    url = f"sqlite:///{tmp_path}/x.db"
    open_store(url).close()

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        start = "from slurm_migbatch.cli.migacct import main; main()"
        environment = {**os.environ, "MIGBATCH_DB": url}
        return subprocess.run([sys.executable, "-c", start, *options], env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slurm
def test_times_have_the_same_meaning_as_in_sacct(accounting: Cluster) -> None:
    """sacct prints how it understood the start time if the end time is earlier."""
    wrong = []
    for form in FORMS:
        errors = accounting.run(["sacct", "-S", form, "-E", "uts1000000"], check=False).stderr
        found = re.search(r"Start time \((\S+)\) requested is after end time", errors)
        assert found or "Invalid time specification" in errors, (form, errors)
        try:
            ours = parse_time(form)
        except TimeFormError:
            ours = None
        theirs = datetime.fromisoformat(found[1]).timestamp() if found else None
        if (ours is None) != (theirs is None) or abs((ours or 0) - (theirs or 0)) > 120:
            wrong.append((form, ours, errors))
    assert wrong == []


@pytest.mark.slurm
@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_options_that_sacct_refuses_are_refused_with_its_message(
    accounting: Cluster, migacct: Run, options: list[str]
) -> None:
    theirs, ours = accounting.run(["sacct", *options], check=False), migacct(*options)
    assert (ours.returncode, theirs.returncode, ours.stdout) == (1, 1, "")
    message = WORDS.search(theirs.stderr)
    assert message is None or message[0] in ours.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("options", GOOD, ids=" ".join)
def test_options_that_sacct_accepts_are_accepted(accounting: Cluster, migacct: Run, options: list[str]) -> None:
    assert (accounting.run(["sacct", *options], check=False).returncode, migacct(*options).returncode) == (0, 0)


@pytest.mark.slurm
def test_sacct_truncates_the_times_of_a_pending_job_to_the_windows_end(accounting: Cluster) -> None:
    """sacct shows the window's end and no elapsed time; test_report_migacct tests the same for migacct."""
    job = accounting.submit("--gres=mig:7g.80gb:1", wrap="true")
    shown = ["-T", "-n", "-P", "-X", "-S", "now-1hour", "-E", "now+1hour", "-o", "start,end,elapsed"]

    def sacct_rows() -> str:
        return accounting.run(["sacct", *shown, "-j", str(job)]).stdout.strip()

    start, end, elapsed = eventually(sacct_rows).split("|")
    assert start == end and elapsed == "00:00:00"


#: states of the jobs of the next test; "" for none
STATES = {"": "", "R": "RUNNING", "PD": "PENDING", "S": "SUSPENDED", "F": "FAILED", "CA": "CANCELLED"}


@pytest.mark.slurm
def test_windows_and_states_select_the_same_jobs_as_sacct(accounting: Cluster, tmp_path: Path) -> None:
    """A job that was suspended and failed, one that was cancelled while it waited, and one that then runs."""
    beside = accounting.submit("-c", "1", wrap="sleep 600")  # else Slurm could start the next job in the suspension
    failed = accounting.submit("-c", "1", wrap="sleep 7; exit 3")
    eventually(lambda: {accounting.job_state(job) for job in (beside, failed)} == {"RUNNING"})
    cancelled, running = (accounting.submit("--exclusive", wrap="sleep 600") for _ in range(2))
    for seconds, command in ((2, ("suspend", failed)), (2, ("resume", failed)), (1.1, ())):
        time.sleep(seconds)  # Slurm's times are whole seconds
        accounting.run(["scontrol", *map(str, command)] if command else ["scancel", str(cancelled)])
    eventually(lambda: accounting.job_state(failed) == "FAILED")
    accounting.run(["scancel", str(beside)])
    numbers = {failed: 1, cancelled: 2, running: 3}

    def sacct(*options: str) -> list[list[str]]:
        command = ["env", "SLURM_TIME_FORMAT=%s", "sacct", "-n", "-P", "-X", "-a", *options]
        return [line.split("|") for line in accounting.run(command).stdout.splitlines()]

    def recorded() -> list[list[str]]:
        # sacct takes a job as pending from `eligible` on, which may be a second after its submission
        fields = "jobid,state,eligible,start,end"
        rows = sacct("-S", "uts1000000", "-j", ",".join(map(str, numbers)), "-o", fields)
        return rows if [row[1].split()[0] for row in rows] == ["FAILED", "CANCELLED", "RUNNING"] else []

    rows = eventually(recorded)
    moments = range(min(int(row[2]) for row in rows) - 1, int(rows[0][4]) + 3)

    def listed(start: int, end: int, state: str) -> list[int]:
        chosen = ["-s", state] if state else []
        found = sacct("-S", f"uts{start}", "-E", f"uts{end}", *chosen, "-o", "jobid")
        return [numbers[int(id)] for (id,) in found if int(id) in numbers]

    # a window of one moment is one second long, so the first of these is a second before the suspension
    suspended = [moment for moment in moments if listed(moment, moment, "S")]
    with open_store(f"sqlite:///{tmp_path}/x.db") as store:
        with Session(store.engine) as session, session.begin():
            for id, state, *times in rows:
                submitted, started, ended = (float(text) if text.isdecimal() else None for text in times)
                run = models.Run(
                    job_id=numbers[int(id)], restart=0, state=state.split()[0], submitted=submitted, ended=ended
                )
                run.started = None if run.state == "CANCELLED" else started
                if run.state == "FAILED":
                    run.suspended, run.resumed = float(suspended[0] + 1), float(suspended[-1])
                session.add(run)
        different = []
        for start in moments:
            for end in {start, start + 1, start + 3, moments[-1]} & set(moments):
                for short, state in STATES.items():
                    wanted = RunFilter(start=start, end=end, states=(state,) if state else ())
                    ours = [row.run["job_id"] for row in store.runs(wanted)]
                    if (theirs := listed(start, end, short)) != ours:
                        different.append((start - moments[0], end - moments[0], short, theirs, ours))
    accounting.run(["scancel", str(running)])
    assert different == [], rows

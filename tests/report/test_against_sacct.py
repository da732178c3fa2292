"""migacct compared with this Slurm's sacct: accepted times and values, their meaning, and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from slurm_migbatch.slurm.times import TimeFormError, parse_time
from slurm_migbatch.store.db import open_store
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

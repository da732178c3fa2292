"""`migbatch loans` with a real record; Slurm's queue and the running service are fakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.cli import asking
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.main import cli
from slurm_migbatch.query import loans as command
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.query.why import describe
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.db import open_store
from slurm_migbatch.workload.loans import loan_hints

COMMENT = "migbatch: role=train signal=usr1 max=3g.40gb [mig:%s:1#loan0001]"


def elastic(job: int, kind: str = "loan", state: str = "PENDING", **more: Any) -> JobRow:
    values = {"user": "alice", "uid": 1001, "account": "ml", "partition": "train", "submit": 50.0, **more}
    return JobRow(job, state=state, gres=f"gres:mig:{kind}:1", comment=COMMENT % kind, **values)


def loan(job: int, state: str = "running", **more: Any) -> dict[str, Any]:
    own = {"job_id": job, "restart": 0, "decided": 100.0, "profile": "1g.10gb", "state": state, "why": "idle on n1"}
    who = {"uid": 1001, "user": "alice", "account": "ml", "partition": "train", "released": 100.5}
    return {**own, **who, **more}


Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    config = tmp_path / "m.toml"
    url = f"sqlite:///{tmp_path}/db"

    def run(
        queue: list[JobRow], rows: list[dict[str, Any]], *arguments: str, dry_run: bool = False, actions: Any = ()
    ) -> Result:
        config.write_text(
            f"[store]\nurl = '{url}'\n[lending]\nenabled = true\npartitions = ['train']\n"
            f"dry_run = {str(dry_run).lower()}\n"
        )
        with open_store(url) as store:
            store.save_loans(rows, actions)
        monkeypatch.setattr(QuerySite, "slurm", lambda self: type("C", (), {"jobs": lambda self: queue})())
        monkeypatch.setattr(command, "waiting", lambda site: ({3: "no GPU has room"}, ()))
        return CliRunner().invoke(cli, ["loans", "-c", str(config), *arguments])

    return run


QUEUE = [
    elastic(1, "1g.10gb", "RUNNING", start=101.0, nodes=("n1",)),
    elastic(2, "1g.10gb", "RUNNING", start=102.0, nodes=("n1",)),
    elastic(3),
    JobRow(4, user="bob", partition="gpu", gres="gres:mig:1g.10gb:1", state="RUNNING"),
]
ROWS = [
    loan(1, started=101.0, node="n1", gpu="GPU-a"),
    loan(2, "signalled", started=102.0, signalled=150.0, node="n1", gpu="GPU-a", why_ended="job 9 needs 3g.40gb"),
    loan(5, "ended", started=90.0, ended=140.0, why_ended="the job is no longer in Slurm", cause="left"),
]


def test_loans_lists_loans_and_waiting_jobs(call: Call) -> None:
    found = json.loads(call(QUEUE, ROWS, "--json").output)["loans"]
    assert [(entry["job"], entry["state"], entry["profile"], entry["since"], entry["why"]) for entry in found] == [
        (1, "running", "1g.10gb", 101.0, "idle on n1"),
        (2, "signalled", "1g.10gb", 150.0, "job 9 needs 3g.40gb"),
        (3, "waiting", "", 50.0, "no GPU has room"),
    ]


def test_ended_loans_are_listed_with_all(call: Call) -> None:
    lines = call(QUEUE, ROWS, "--all", "-P", "-n").output.splitlines()
    assert [line.split("|")[0] for line in lines] == ["5", "1", "2", "3"]
    assert lines[0].split("|")[7:] == ["ended", "0", "the job is no longer in Slurm"]
    assert call(QUEUE, ROWS, "-p").output.splitlines()[0] == "|".join(command.COLUMNS) + "|"


def test_only_the_requested_jobs_are_listed(call: Call) -> None:
    assert [line.split("|")[0] for line in call(QUEUE, ROWS, "-j", "2,3", "-P", "-n").output.splitlines()] == ["2", "3"]
    for wrong in ("x", "²"):
        assert call(QUEUE, ROWS, "-j", wrong).exit_code == 1


def test_loans_of_an_array_are_those_of_its_tasks(call: Call, tmp_path: Path) -> None:
    """Each task that has started has a job id of its own, by which its loan is recorded."""
    task = elastic(21, "1g.10gb", "RUNNING", start=102.0, nodes=("n1",), array_job=20, array_task="1")
    rows = [loan(21, "signalled", started=102.0, signalled=150.0, node="n1", gpu="GPU-a", why_ended="job 9 needs it")]
    rows.append(loan(22, "ended", started=90.0, ended=140.0, why_ended="the job is no longer in Slurm"))
    with open_store(f"sqlite:///{tmp_path}/db") as store:
        ended = {**asdict(elastic(22, "1g.10gb")), "array_job": 20, "array_task": "2", "state": "COMPLETED"}
        store.upsert_jobs([ended])
    found = json.loads(call([*QUEUE, task], [*ROWS, *rows], "--json", "--all", "-j", "20").output)["loans"]
    assert [(entry["job"], entry["jobid"], entry["state"], entry["gpu"], entry["why"]) for entry in found] == [
        (22, "20_2", "ended", "", "the job is no longer in Slurm"),
        (21, "20_1", "signalled", "GPU-a", "job 9 needs it"),
    ]
    beside = [loan(1, "ended", ended=140.0, why_ended="it shares the slice of job 21, not of job 22")]
    found = json.loads(call([*QUEUE[1:], task], beside, "--json", "--all", "-j", "1").output)["loans"]
    assert found[0]["why"] == "it shares the slice of job 20_1, not of job 20_2", "in the queue, and in the record"
    lines = call([*QUEUE, task], [*ROWS, *rows], "-P", "-n", "--all").output.splitlines()
    assert [line.split("|")[0] for line in lines] == ["5", "20_2", "1", "2", "3", "20_1"]


def test_array_task_is_not_its_whole_array(call: Call, tmp_path: Path) -> None:
    """The last task of an array has the array's own id; those that have not started share one row."""
    of_array = {"nodes": ("n1",), "array_job": 20, "start": 102.0}
    tasks = [
        elastic(21, "1g.10gb", "RUNNING", array_task="1", **of_array),
        elastic(22, "1g.10gb", "RUNNING", array_task="2", **of_array),
        elastic(20, array_job=20, array_task="3-9", tasks=7),
    ]
    with open_store(f"sqlite:///{tmp_path}/db") as store:
        store.upsert_jobs([{**asdict(task), "start": 102.0} for task in tasks])
    rows = [loan(21, started=102.0, node="n1", gpu="GPU-a"), loan(22, started=102.0, node="n1", gpu="GPU-b")]
    for named, found in (
        ("20_1", "20_1"),
        ("20_[1-2]", "20_1 20_2"),
        ("20_4", "20_[3-9]"),
        ("20_99", ""),
        ("20_[1,4],3", "20_1 3 20_[3-9]"),
    ):
        lines = call([*QUEUE, *tasks], [*ROWS, *rows], "-j", named, "-P", "-n").output.splitlines()
        assert sorted(line.split("|")[0] for line in lines) == sorted(found.split()), named


def test_malformed_job_list_is_wrong_usage(call: Call) -> None:
    error = call([], [], "-j", "abc").exception
    assert isinstance(error, Failure) and error.code == 2 and "list of jobs" in str(error)


def test_slurms_queue_overrides_an_older_record(call: Call) -> None:
    """migbatchd has died: since then one job has started, one was requeued, one has left the queue."""
    queue = [elastic(1, "1g.10gb", "RUNNING", start=101.0, nodes=("n1",)), elastic(2, restarts=1, reason="BeginTime")]
    rows = [loan(1, "released"), loan(2, started=102.0), loan(3, started=103.0)]
    found = json.loads(call(queue, rows, "--json").output)["loans"]
    assert [(entry["job"], entry["state"], entry["restarts"]) for entry in found] == [
        (2, "ended", 0),
        (3, "ended", 0),
        (1, "running", 0),
        (2, "waiting", 1),
    ]


def test_other_users_loans_are_hidden_by_private_data(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def private(words: str) -> None:
        rights = Rights(1002, private=frozenset(filter(None, words.split(","))))
        monkeypatch.setattr(asking, "_rights", lambda site, named: rights)

    private("")
    assert "5|" in call(QUEUE, ROWS, "--all", "-P").output
    private("usage,accounts")
    found = json.loads(call(QUEUE, ROWS, "--all", "--json").output)["loans"]
    assert [(entry["job"], entry["account"]) for entry in found] == [(1, ""), (2, ""), (3, "")], "the jobs in the queue"
    private("jobs")
    mine = [*QUEUE, elastic(6, user="bob", uid=1002)]
    lines = call(mine, [*ROWS, loan(7, "ended", uid=1002, why_ended="job 1 needs it")], "--all", "-P", "-n").output
    assert [(line.split("|")[0], line.split("|")[-1]) for line in lines.splitlines()] == [
        ("7", "another user's job needs it"),
        ("6", "-"),
    ]


def test_dry_run_shows_what_it_would_do(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    action = {
        "ts": 100.0, "job_id": 3, "restart": 0, "kind": "release", "before": "gres:mig:loan:1",
        "after": "mig:2g.20gb:1", "why": "2g.20gb is idle on n1", "dry_run": True,
    }  # fmt: skip
    out = call(QUEUE, ROWS, "-P", "-n", "-j", "3", dry_run=True, actions=[action]).output
    assert "dry run: would release, gres:mig:loan:1 -> mig:2g.20gb:1 (2g.20gb is idle on n1)" in out
    monkeypatch.setattr(asking, "_rights", lambda site, named: Rights(1002, private=frozenset()))
    out = call(QUEUE, [], "-P", "-n", "-j", "3", dry_run=True, actions=[{**action, "ts": 101.0}]).output
    assert "dry run" not in out and "no GPU has room" in out, "its reason may follow from the user's hints"


def test_control_characters_of_users_are_not_printed(call: Call) -> None:
    out = call([], [loan(1, "ended", ended=120.0, user="al\x1bice", why_ended="\x1b[2J")], "--all").output
    assert "\x1b" not in out


def test_why_shows_the_loan_a_job_needs_and_the_lending_state() -> None:
    row = elastic(3, reason="ReqNodeNotAvail")
    hints = loan_hints(row.comment, row.partition, row.gres, ["train"])
    pairs = dict(describe(row, [row], [], None, "no idle slices", hints))
    assert pairs["Needs"] == "a loan of a slice, at most 3g.40gb"
    assert pairs["Lending"] == "no idle slices"

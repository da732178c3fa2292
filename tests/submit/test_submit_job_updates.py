"""Markers that an update of a pending job writes: slurmctld may refuse the update and keep them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.service import new_id
from slurm_migbatch.submit.shim import JOB_SUBMIT, render
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import LUA, Shim

ONE, TWO = "gres/mig:1g.10gb:1", "gres/mig:2g.20gb:1"


@pytest.mark.parametrize(
    ("now", "comment", "changed"),
    [
        (ONE, "mine [mig:1g.10gb:1#7fq3k2ab]", True),
        (ONE, "mine [mig:1g.10gb:1]", True),
        (None, "mine", True),
        (TWO, "mine [mig:2g.20gb:1#7fq3k2ab]", False),
        (TWO, "mine [mig:2g.20gb:1#chg7fq3k2ab]", True),
        (TWO, "mine [mig:2g.20gb:1#chg]", True),
        (ONE, "mine [mig:2g.20gb:1#chg]", True),
    ],
)
def test_marker_records_that_an_update_changed_the_grant(
    shim: Shim, now: str | None, comment: str, changed: bool
) -> None:
    """Later updates keep this flag, whatever they change: only slurmctld knows which grant it has."""
    present = Present(True, "gpu", now, comment=comment)
    answer = shim(JobRequest(1001, None, tres_per_node=TWO, comment="other", now=present))
    assert isinstance(answer, Accept) and answer.changes["comment"].startswith("other [mig:2g.20gb:1")
    assert shim.changed is changed


def test_update_of_a_running_job_keeps_its_grant_and_changed_flag(shim: Shim) -> None:
    for name, changed in (("7fq3k2ab", False), ("chg7fq3k2ab", True)):
        present = Present(False, "gpu", ONE, comment=f"[mig:1g.10gb:1#{name}]")
        answer = shim(JobRequest(1001, None, comment="other", now=present))
        assert isinstance(answer, Accept) and answer.changes["comment"] == "other [mig:1g.10gb:1#7fq3k2ab]"
        assert shim.changed is changed


@pytest.mark.parametrize("given", [{"min_nodes": "1"}, {"req_nodes": "n1"}, {"min_nodes": "0", "comment": "other"}])
def test_started_job_with_slices_gives_up_no_node(shim: Shim, given: dict[str, str]) -> None:
    """What it has left on such a node would keep its slices, without being counted."""
    nodes = given.pop("min_nodes", "")
    more = {"min_nodes": nodes} if nodes else {}
    for comment, refuses in (("[mig:1g.10gb:1#7fq3k2ab]", True), ("[mig:loan:1#loan7fq3]", True), ("mine", False)):
        update = JobRequest(1001, None, min_nodes=2, now=Present(False, "gpu", ONE, comment=comment), **given)  # type: ignore[arg-type]
        answer = shim(update, **more)
        assert isinstance(answer, Refuse) == refuses, comment
        assert not refuses or "has started cannot be changed" in answer.sentence  # type: ignore[union-attr]


def test_number_of_nodes_of_a_pending_job_may_be_changed(shim: Shim) -> None:
    present = Present(True, "gpu", ONE, comment="[mig:1g.10gb:1#7fq3k2ab]")
    assert not isinstance(shim(JobRequest(1001, None, min_nodes=2, now=present), min_nodes="1"), Refuse)


@pytest.mark.parametrize(
    ("partition", "gres", "told"), [("mixed", TWO, True), ("mixed", ONE, False), ("gpu", TWO, False)]
)
def test_user_who_changes_slices_is_told_that_cpus_and_memory_by_default_stay(
    shim: Shim, partition: str, gres: str, told: bool
) -> None:
    present = Present(True, partition, ONE, comment="[mig:1g.10gb:1#7fq3k2ab]")
    answer = shim(JobRequest(1001, None, tres_per_node=gres, now=present))
    assert not isinstance(answer, Refuse) and ("NumCPUs= and MinMemoryNode=" in answer.message) == told


@pytest.mark.parametrize(
    ("change", "gres", "code"),
    [
        ({"tres_per_node": "mig:9g.90gb"}, "gres:mig:1g.10gb:1", 2072),
        ({"partition": "cpu"}, "gres:mig:1g.10gb:1", 2072),
        ({"req_nodes": "n2"}, "gres:mig:1g.10gb:1", 2014),
        ({"comment": "[mig:7g.80gb:1]"}, "gres:mig:1g.10gb:1", -1),
        ({"tres_per_node": "gres/mig:9g.90gb"}, ONE, -1),
    ],
)
def test_refused_update_has_an_error_code_that_tells_of_the_gres_where_messages_are_dropped(
    shim: Shim, change: dict[str, str], gres: str, code: int
) -> None:
    """Up to 23.02 Slurm shows its own text for the code, and no message."""
    if "tres_per_node" in change and gres != ONE:
        change = {"tres_per_node": f"gres:{change['tres_per_node']}"}
    present = Present(True, "gpu", gres, comment="[mig:1g.10gb:1]")
    assert isinstance(shim(JobRequest(1001, **{"partition": None, **change}, now=present)), Refuse)
    assert shim.code == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tres_per_node": "gres/mig:9g.90gb"}, 2072),
        ({"tres_per_node": "gres/mig:auto", "comment": "migbatch: modle=x"}, 2072),
        ({"tres_per_job": "gres/gpu:3", "min_nodes": 2, "max_nodes": 2}, 2072),
        ({"tres_per_node": "gres/fpga:1", "comment": "[mig:7g.80gb:1]"}, -1),
    ],
)
def test_refused_submission_has_an_error_code_that_tells_of_the_gres(shim: Shim, fields: dict, code: int) -> None:
    """slurmrestd passes no sentence on to its client, only Slurm's text for the code."""
    assert isinstance(shim(JobRequest(1001, partition="gpu", **fields)), Refuse)
    assert shim.code == code


ROOT = 0
LONG = "x" * 1010


@pytest.mark.parametrize(
    ("before", "comment", "gres", "after", "changed"),
    [
        ("mine [mig:1g.10gb:1#7fq3k2ab]", "theirs", None, "theirs [mig:1g.10gb:1#7fq3k2ab]", True),
        ("mine [mig:1g.10gb:1#7fq3k2ab]", "", None, "[mig:1g.10gb:1#7fq3k2ab]", True),
        ("mine [mig:1g.10gb:1#7fq3k2ab]", None, TWO, "mine [mig:1g.10gb:1#7fq3k2ab]", True),
        ("[mig:1g.10gb:1]", "theirs", TWO, "theirs [mig:1g.10gb:1]", True),
        ("mine [mig:1g.10gb:1#chg7fq3k2ab]", None, TWO, None, False),
        ("mine [mig:1g.10gb:1#7fq3k2ab]", None, "", "mine", False),
        ("[mig:1g.10gb:1#7fq3k2ab]", None, "gres/fpga:1", " ", False),
        ("mine [mig:1g.10gb:1]", "theirs", "", None, False),
        ("mine [mig:1g.10gb:1#chg7fq3k2ab]", "mine", None, "mine [mig:1g.10gb:1#7fq3k2ab]", True),
        ("[mig:1g.10gb:1#chg7fq3k2ab]", "", None, "[mig:1g.10gb:1#7fq3k2ab]", True),
        ("mine [mig:1g.10gb:1#loanabc]", "theirs", None, "theirs [mig:1g.10gb:1#loanabc]", False),
        ("[mig:loan:1#loanabc]", "theirs", None, "theirs [mig:loan:1#loanabc]", False),
        ("mine [mig:1g.10gb:1#loanabc]", "theirs", "", None, False),
        # migbatchd itself writes markers, and it alone changes elastic jobs
        ("mine [mig:1g.10gb:1]", "mine [mig:2g.20gb:1]", TWO, None, False),
        ("mine [mig:loan:1#loan]", None, TWO, None, False),
        ("mine [mig:1g.10gb:1#loanabc]", None, "", None, False),
        ("mine", "theirs", None, None, False),
        (None, "theirs", TWO, None, False),
        ("mine [mig:1g.10gb:1]", None, None, None, False),
    ],
)
def test_root_update_leaves_a_marker_that_makes_the_node_ask_slurmctld(
    shim: Shim, before: str | None, comment: str | None, gres: str | None, after: str | None, changed: bool
) -> None:
    """Without the marker the job would run without its slices, or with others than Slurm has allocated."""
    present = Present(True, "gpu", ONE, comment=before)
    answer = shim(JobRequest(ROOT, None, tres_per_node=gres, comment=comment, now=present))
    assert not shim.errors
    if after is None:
        assert isinstance(answer, Pass)
    else:
        assert isinstance(answer, Accept) and answer.changes == {"comment": after}
    assert shim.changed is changed


def test_root_comment_without_room_for_the_marker_is_refused(shim: Shim) -> None:
    present = Present(True, "gpu", ONE, comment="[mig:1g.10gb:1#7fq3k2ab]")
    assert isinstance(shim(JobRequest(ROOT, None, comment=LONG, now=present)), Refuse)


ARRAY = r"""
slurm = { SUCCESS = 0, ERROR = -1, log_user = print, log_error = print }
dofile(arg[1])
local given = { [arg[2]] = arg[3] }
local meta = { _job_desc = {}, __index = given, __newindex = function(_, name, value) rawset(given, name, value) end }
for number = 4, #arg do
  local gres = arg[number]:match("%[mig:([^#]*)")
  local record = { job_id = number, array_job_id = 4, job_state = 0, comment = arg[number] }
  record.tres_per_node = gres and "gres/mig:" .. gres
  assert(slurm_job_modify(setmetatable({}, meta), record, {}, 0) == 0)
  print(given.comment or "")
  given.tres_per_node = nil -- slurmctld takes it from the description of the change
end
"""


@pytest.mark.parametrize(
    ("field", "text", "after"),
    [
        (
            "comment",
            "note",
            [
                "note [mig:1g.10gb:1#chga]",
                "note [mig:2g.20gb:1#chgb]",
                "note",
                "note [mig:loan:1#loanc]",
                "note [mig:1g.10gb:1#chge]",
            ],
        ),
        (
            "tres_per_node",
            "gres/mig:3g.40gb:1",
            [
                "one [mig:1g.10gb:1#chga]",
                "two [mig:2g.20gb:1#b]",
                "three",
                "four [mig:loan:1#loanc]",
                "one [mig:1g.10gb:1#chge]",
            ],
        ),
    ],
)
def test_root_update_of_an_array_keeps_the_marker_of_each_task(
    tmp_path: Path, field: str, text: str, after: list[str]
) -> None:
    """slurmctld passes the same description of the update for each task, with what was written for the task before."""
    shim, driver = tmp_path / "job_submit.lua", tmp_path / "array.lua"
    shim.write_text(render(JOB_SUBMIT, socket="", table="/nonexistent", catalog=SITE, policy=SubmitPolicy()))
    driver.write_text(ARRAY)
    tasks = [
        "one [mig:1g.10gb:1#a]",
        "two [mig:2g.20gb:1#b]",
        "three",
        "four [mig:loan:1#loanc]",
        "one [mig:1g.10gb:1#chge]",
    ]
    made = subprocess.run(
        [LUA, str(driver), str(shim), field, text, *tasks], capture_output=True, text=True, check=True
    )
    assert made.stdout.splitlines() == after


def test_job_that_root_submits_for_a_user_follows_the_rules_for_users(shim: Shim) -> None:
    for more, whose in (({"user_id": "1001"}, "a user's"), ({}, "root's"), ({"user_id": "0"}, "root's")):
        answer = shim(JobRequest(ROOT, tres_per_node="gres/mig:1g.10gb:1", partition="gpu"), **more)
        marked = isinstance(answer, Accept) and answer.changes["comment"] == "[mig:1g.10gb:1]"
        assert marked is (whose == "a user's"), more
    forged = JobRequest(ROOT, tres_per_node="gres/mig:1g.10gb:1", comment="[mig:7g.80gb:1]", partition="gpu")
    assert isinstance(shim(forged, user_id="1001"), Refuse)
    # the uid of an ordinary user counts, whatever user_id says
    assert isinstance(shim(JobRequest(1001, tres_per_node="gres/mig:auto", partition="gpu"), user_id="0"), Accept)


def test_new_decision_id_never_starts_with_chg_or_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([int("chg00000", 36), int("loan0000", 36), int("7fq3k2ab", 36)])
    monkeypatch.setattr("secrets.randbits", lambda _: next(numbers))
    assert new_id() == "7fq3k2ab"


READ = [
    (None, "gres/mig:2g.20gb:1"),
    (None, "gres:mig:2g.20gb:1"),
    (None, "cpu:1,gres/mig:2g.20gb:1,gres/fpga:1"),
    ("gres:mig:1g.10gb:1", "gres:mig:2g.20gb:1,gres:fpga:1"),
]
NOT_READ = [
    (None, "mig:2g.20gb:1"),
    (None, "gres/gpu:0,mig:2g.20gb:1"),
    (None, "mig:2g.20gb:1,gres/gpu:0"),
    (None, "mig:2g.20gb:1,agres/mig:1g.10gb:1"),
    (None, "gres:gpu:0,gres/mig:2g.20gb:1"),
    (None, "xgres:fpga:0,gres/mig:2g.20gb:1"),
    (None, "gres/xgres:fpga:0,gres/mig:2g.20gb:1"),
    ("gres:mig:1g.10gb:1", "gres/mig:2g.20gb:1"),
]


@pytest.mark.parametrize(("now", "gres"), READ)
def test_gres_spellings_that_slurm_reads_are_accepted(shim: Shim, now: str | None, gres: str) -> None:
    for present in (Present(True, "gpu", now), *([] if now else [None])):
        answer = shim(JobRequest(1001, None, tres_per_node=gres, now=present))
        assert isinstance(answer, Accept) and "[mig:2g.20gb:1" in answer.changes["comment"]


@pytest.mark.parametrize(("now", "gres"), NOT_READ)
def test_gres_spellings_that_slurm_does_not_read_are_refused(shim: Shim, now: str | None, gres: str) -> None:
    """Slurm would allocate none for them, and the marker would say otherwise."""
    for present in (Present(True, "gpu", now), *([] if now else [None])):
        answer = shim(JobRequest(1001, None, tres_per_node=gres, now=present))
        assert isinstance(answer, Refuse) and "in an update by Gres=" in answer.sentence


def test_slices_that_slurm_does_not_read_are_refused_in_any_option(shim: Shim) -> None:
    asked = JobRequest(1001, None, tres_per_node="gres/gpu:0", tres_per_job="mig:2g.20gb:1", min_nodes=1, max_nodes=1)
    assert isinstance(shim(asked), Refuse)
    asked = replace(asked, tres_per_node="xgres/fpga:0", tres_per_job="gres/mig:2g.20gb:1")
    assert isinstance(shim(asked), Refuse)

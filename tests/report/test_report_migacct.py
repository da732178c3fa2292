"""migacct as a user sees it: exact output, windows, who sees what, exit codes."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from slurm_migbatch.cli import asking, migacct
from slurm_migbatch.cli.migacctclick import command
from slurm_migbatch.report.columns import COLUMNS
from slurm_migbatch.report.states import CODES
from slurm_migbatch.store.db import open_store
from tests.support.shown_calls import ROOT, section
from tests.support.store_events import Node

NOW = datetime(2026, 3, 14, 12, 0, 0)
MIDNIGHT = datetime(2026, 3, 14).timestamp()
BUCKET = "bert-large/infer/b32/128tok/slo200000us/any"

Cli = Callable[..., tuple[int, str, str]]


def slice_entry(start: int, size: int, profile: str, gpu: str = "GPU-a") -> dict[str, Any]:
    return {
        "gpu": gpu, "profile": profile, "start": start, "size": size, "gi": start + 1, "ci": 0,
        "mig_uuid": f"MIG-{gpu}-{start}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One day of a small cluster: see TABLE."""
    url = f"sqlite:///{tmp_path_factory.mktemp('migacct')}/x.db"
    at = lambda text: MIDNIGHT + sum(int(p) * f for p, f in zip(text.split(":"), (3600, 60, 1), strict=False))  # noqa: E731
    with open_store(url) as store:
        seq = iter(range(1, 100))

        def send(kind: str, ts: float, node: str = "n1", journal: str = "aa", **fields: Any) -> None:
            number = next(seq) if node == "n1" else fields.pop("number")
            store.ingest(node, journal, "b", [{"seq": number, "ts": ts, "kind": kind, **fields}])

        def job(job_id: int, state: str, user: str, uid: int, **fields: Any) -> None:
            base = {"job_id": job_id, "state": state, "user": user, "uid": uid, "account": "ml", "partition": "gpu"}
            store.upsert_jobs([{**base, "restarts": 0, "name": f"job{job_id}", **fields}], now=at("11:00"))

        gpus = [{"uuid": "GPU-a", "index": 0, "minor": 0, "name": "H100", "mig": True, "geometry": {}}]
        send("inventory", at("0:00:01"), gpus=gpus)
        store.record_decisions([{
             "id": "7fq3k", "ts": at("8:59"), "asked": "--gres=mig:auto --comment='migbatch: model=bert-large'",
             "bucket": BUCKET, "chosen": "mig:2g.20gb:1", "source": "service", "message": "because",
             "candidates": [{"profile": "2g.20gb", "latency_ms": 12.34, "throughput_per_s": 2593.2,
                             "memory_mib": 6144}]}])  # fmt: skip
        # 1: yesterday; 2: ordinary job; 3: three slices, running; 4: pending; 5: requeued, failed; 6: array; 9: het job
        job(1, "PENDING", "alice", 1001, submit=at("-10:00"))
        send("start", at("-9:00"), job=1, restart=0, slices=[slice_entry(0, 1, "1g.10gb")], warm=True, elapsed_ms=2.0)
        send("stop", at("-5:00"), job=1, restart=0, slices=[], exit_code=0)
        job(
            2,
            "PENDING",
            "alice",
            1001,
            submit=at("9:00"),
            comment="a paper [mig:2g.20gb:1#7fq3k]",
            time_limit_s=7200,
            gid=0,
            qos="high",
            wckey="*paper",
        )
        two = [slice_entry(0, 2, "2g.20gb")]
        send("start", at("9:01:30"), job=2, restart=0, slices=two, decision="7fq3k", warm=False, elapsed_ms=203.4)
        send("progress", at("10:02"), job=2, restart=0, latency_ms=11.0)
        send("stop", at("10:02:35"), job=2, restart=0, slices=two, exit_code=0, memory_mib=5000)
        job(3, "PENDING", "bob", 1002, submit=at("11:00"), gres="gres:mig:1g.10gb:2,mig:2g.20gb:1")
        three = [slice_entry(2, 1, "1g.10gb"), slice_entry(3, 1, "1g.10gb"), slice_entry(4, 2, "2g.20gb")]
        send("start", at("11:30"), job=3, restart=0, slices=three, warm=True, elapsed_ms=4.0)
        job(4, "PENDING", "bob", 1002, submit=at("11:50"), gres="gres:mig:7g.80gb:1", reason="Resources")
        job(5, "RUNNING", "bob", 1002, submit=at("8:00"), start=at("8:10"), gres="gres:gpu:1")
        job(5, "PENDING", "bob", 1002, submit=at("8:20"), restarts=1)
        five = [slice_entry(0, 8, "7g.80gb", "GPU-n2")]
        send("start", at("8:30"), "n2", "bb", number=1, job=5, restart=1, slices=five, warm=False, elapsed_ms=1.0)
        send("stop", at("8:31"), "n2", "bb", number=2, job=5, restart=1, slices=five, exit_code=3)
        task = {"array_job": 6, "array_task": "1", "nodes": ("c1", "c2")}
        job(7, "RUNNING", "carol", 1003, submit=at("9:00"), start=at("9:30"), **task)
        job(7, "CANCELLED", "carol", 1003, end=at("9:40"), exit_code="0:15")
        job(6, "PENDING", "carol", 1003, submit=at("9:00"), array_job=6, array_task="2-9%4")
        job(10, "RUNNING", "carol", 1003, submit=at("9:00"), start=at("9:30"), het_job=9, name="evil\x1b[2J\nname")
    return url


@pytest.fixture
def cli(database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs migacct as root at noon; `uid` makes it another user."""
    monkeypatch.setenv("MIGBATCH_DB", database)
    for name in ("MIGACCT_FORMAT", "SLURM_TIME_FORMAT", "MIGBATCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(time, "time", NOW.timestamp)

    def call(*arguments: str, uid: int = 0) -> tuple[int, str, str]:
        monkeypatch.setattr(os, "getuid", lambda: uid)
        code = migacct.called(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    yield call


def ids(out: str) -> list[str]:
    """Job ids of `-n -X -o jobid` output."""
    return out.split()


TABLE = """\
JobID            User Partition         Asked             Bucket   Profile      Placement      State ExitCode    Elapsed
------------ -------- --------- ------------- ------------------ --------- -------------- ---------- -------- ----------
2               alice       gpu      mig:auto bert-large/infer/+   2g.20gb       n1:0@0:2  COMPLETED      0:0   01:01:05
3                 bob       gpu mig:1g.10gb:+                    1g.10gb:+ n1:0@2:1,n1:0+    RUNNING      0:0   00:30:00
3.s0                                                               1g.10gb       n1:0@2:1    RUNNING      0:0   00:30:00
3.s1                                                               1g.10gb       n1:0@3:1    RUNNING      0:0   00:30:00
3.s2                                                               2g.20gb       n1:0@4:2    RUNNING      0:0   00:30:00
4                 bob       gpu mig:7g.80gb:1                                                PENDING      0:0   00:00:00
5                 bob       gpu         gpu:1                      7g.80gb  n2:GPU-n2@0:8     FAILED      3:0   00:01:00
6_1             carol       gpu                                                            CANCELLED     0:15   00:10:00
6_[2-9%4]       carol       gpu                                                              PENDING      0:0   00:00:00
9+1             carol       gpu                                                              RUNNING      0:0   02:30:00
"""


def test_default_output_is_the_table(cli: Cli) -> None:
    assert cli() == (0, TABLE, "")


def test_every_line_of_the_default_table_fits_120_columns(cli: Cli) -> None:
    assert max(map(len, cli()[1].splitlines())) <= 120


def test_allocations_option_leaves_out_the_slices(cli: Cli) -> None:
    assert ids(cli("-X", "-n", "-o", "jobid")[1]) == ["2", "3", "4", "5", "6_1", "6_[2-9%4]", "9+1"]


@pytest.mark.parametrize(
    ("options", "out"),
    [
        (["-j", "2", "-P"], f"2|alice|gpu|mig:auto|{BUCKET}|2g.20gb|n1:0@0:2|COMPLETED|0:0|01:01:05\n"),
        (["-j", "2", "-p", "-o", "jobid,state"], "2|COMPLETED|\n"),
        (["-j", "2", "-p", "--delimiter", ";;", "-o", "jobid,state"], "2;;COMPLETED;;\n"),
        (["-j", "2", "-p", "-P", "-o", "jobid,state"], "2|COMPLETED\n"),
        (["-j", "2", "-b"], "2             COMPLETED      0:0\n"),
        (["-j", "2", "-o", "user%-10,state%4,jobid%3"], "alice      COM+ 2\n".replace("2\n", "  2\n")),
        (["-j", "2", "-o", "USER,jobid%-3,User%3"], "   alice 2   al+\n"),
        (["-j", "2", "-o", "elap,exit"], "  01:01:05      0:0\n"),
        (["-j", "2", "-o", "jobid%0,user%"], "2               alice\n"),
        (["-j", "2", "-P", "-o", "predicted,measured"], "12.3ms,2593/s,6G|11ms,4.88G\n"),
        (["-j", "2", "-P", "-o", "predmemory,measmemory", "--noconvert"], "6144M|5000M\n"),
        (["-j", "2", "-P", "-o", "predmemory,measmemory", "--units=g"], "6G|4.88G\n"),
        (["-j", "2", "-P", "-o", "predlatency,predrate,measlatency,measrate"], "12.3ms|2593/s|11ms|\n"),
        (["-j", "2", "-P", "-o", "measitems,prederr,measby"], "||driver,job\n"),
        (["-j", "1", "-P", "-o", "measrate,measitems,prederr,measby"], "|||\n"),
        (["-j", "2", "-P", "-o", "queuewait,queuewaitraw,elapsedraw,timelimit"], "00:01:30|90|3665|02:00:00\n"),
        (["-j", "2", "-P", "-o", "decision,source,warm,setup,restarts"], "7fq3k|service|no|203ms|0\n"),
        (["-j", "2", "-P", "-o", "request"], "--gres=mig:auto --comment='migbatch: model=bert-large'\n"),
        (["-j", "2", "-P", "-o", "jobidraw,uid,account,jobname,slices,nodelist,gpu,miguuid"],
         "2|1001|ml|job2|1|n1|GPU-a|MIG-GPU-a-0\n"),
        (["-j", "2", "-P", "-o", "submit,start,end"], "2026-03-14T09:00:00|2026-03-14T09:01:30|2026-03-14T10:02:35\n"),
        (["-j", "4", "-P", "-o", "submit,start,end,reason,queuewait"],
         "2026-03-14T11:50:00|Unknown|Unknown|Resources|00:10:00\n"),
        (["-j", "3", "-X", "-P", "-o", "jobid,profile,placement,miguuid,nodelist,gpu"],
         "3|1g.10gb:2,2g.20gb|n1:0@2:1,n1:0@3:1,n1:0@4:2|MIG-GPU-a-2,MIG-GPU-a-3,MIG-GPU-a-4|n1|GPU-a\n"),
        (["-j", "3.s2", "-P", "-o", "jobidraw,miguuid,user,start,end,elapsedraw"],
         "3|MIG-GPU-a-2,MIG-GPU-a-3,MIG-GPU-a-4|bob|2026-03-14T11:30:00|Unknown|1800\n"
         "3.s0|MIG-GPU-a-2||2026-03-14T11:30:00|Unknown|1800\n"
         "3.s1|MIG-GPU-a-3||2026-03-14T11:30:00|Unknown|1800\n"
         "3.s2|MIG-GPU-a-4||2026-03-14T11:30:00|Unknown|1800\n"),
        (["-j", "2", "-P", "-o", "qos,gid,group,wckey,comment,timelimitraw"], "high|0|root|*paper|a paper|120\n"),
        (["-j", "3", "-X", "-P", "-o", "timelimit,timelimitraw"], "UNLIMITED|UNLIMITED\n"),
        (["-j", "4", "-P", "-o", "timelimit,timelimitraw"], "|\n"),
        (["-j", "2", "-P", "-o", "slicehours,gpuhours"], "1.02|0.29\n"),
        (["-j", "4", "-P", "-o", "slicehours,gpuhours,qos,group,comment,timelimitraw"], "|||||\n"),
        (["-j", "3", "-P", "-o", "jobid,slicehours,gpuhours"],
         "3|1.50|0.29\n3.s0|0.50|0.07\n3.s1|0.50|0.07\n3.s2|0.50|0.14\n"),
        (["-T", "-X", "-S", "09:30", "-E", "10:00", "-j", "2", "-P", "-o", "start,end,elapsed,slicehours"],
         "2026-03-14T09:30:00|2026-03-14T10:00:00|00:30:00|0.50\n"),
        (["--truncate", "-E", "11:40", "-j", "3,4", "-X", "-P", "-o", "start,end,elapsed"],
         "2026-03-14T11:30:00|2026-03-14T11:40:00|00:10:00\n"),
        # as in sacct, nothing has run after now
        (["-T", "-E", "tomorrow", "-j", "3", "-X", "-P", "-o", "start,end,elapsed,slicehours"],
         "2026-03-14T11:30:00|2026-03-14T12:00:00|00:30:00|1.50\n"),
        (["--truncate", "-j", "4", "-P", "-o", "start,end,elapsed"],
         "2026-03-14T12:00:00|2026-03-14T12:00:00|00:00:00\n"),
        (["-j", "10", "-P", "-o", "jobname"], "evil?[2J?name\n"),
        (["-j", "999"], ""),
    ],
)  # fmt: skip
def test_output_has_the_requested_form(cli: Cli, options: list[str], out: str) -> None:
    assert cli("-n", *options) == (0, out, "")


def test_empty_result_still_has_its_header(cli: Cli) -> None:
    code, out, _ = cli("-j", "999", "-o", "jobid,state")
    assert (code, out) == (0, "JobID             State\n------------ ----------\n")
    assert cli("-j", "999", "-o", "jobid,state", "-P")[1] == "JobID|State\n"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], "2 3 4 5 6_1 6_[2-9%4] 9+1"),
        (["-j", "1,2"], "1 2"),
        (["-j", "1", "-j", "2"], "1 2"),
        (["-j", "6"], "6_1 6_[2-9%4]"),
        (["-j", "6_1"], "6_1"),
        (["-j", "6_[1-3]"], "6_1"),
        (["-j", "6_[2-9%4]"], "6_[2-9%4]"),
        (["-j", "9+1"], "9+1"),
        (["-j", "7"], "6_1"),
        (["-u", "alice"], "2"),
        (["-u", "1002,carol"], "3 4 5 6_1 6_[2-9%4] 9+1"),
        (["-u", "alice", "-a"], "2 3 4 5 6_1 6_[2-9%4] 9+1"),
        (["-a", "-u", "alice"], "2"),
        (["-u", "bob", "-a", "-n", "-u", "alice"], "2 3 4 5"),
        (["-A", "ml,x", "-r", "gpu", "-u", "alice"], "2"),
        (["-A", "x"], ""),
        (["-A", "ML", "-u", "alice"], "2"),
        (["-q", "high,low"], "2"),
        (["--qos", "low"], ""),
        (["--qos", "High"], "2"),
        (["-g", "root"], "2"),
        (["--group", "0", "--gid", "0"], "2"),
        (["-W", "paper"], "2"),
        (["--wckeys", "*paper,other"], "2"),
        (["--name", "job2,job4"], "2 4"),
        (["--name", "job"], ""),
        (["-k", "120"], "2"),
        (["-k", "2:00:00"], "2"),
        (["-k", "119"], ""),
        (["-k", "60", "-K", "0-3"], "2"),
        (["-K", "60", "-j", "2,3"], "2 3"),
        (["-k", "UNLIMITED", "-j", "2,3"], "3"),
        (["-L"], "2 3 4 5 6_1 6_[2-9%4] 9+1"),
        (["-M", "all", "-u", "alice"], "2"),
        (["-S", "yesterday", "-E", "today"], "1"),
        (["-r", "cpu"], ""),
        (["-N", "n[2-9]"], "5"),
        (["-N", "n2,c[2-3]"], "5 6_1"),
        (["-N", "c[3-2000],c2"], "6_1"),
        (["-N", "c"], ""),
        (["-S", "now-2days"], "1 2 3 4 5 6_1 6_[2-9%4] 9+1"),
        (["-S", "03/13", "-E", "midnight"], "1"),
        (["-S", "11:00", "-u", "bob"], "3 4"),
        (["-D", "-j", "5"], "5 5"),
        (["-s", "R"], "3 9+1"),
        (["-s", "PD"], "4 6_[2-9%4]"),
        (["-s", "f,CANCELLED", "-S", "today", "-E", "now"], "5 6_1"),
        (["-s", "CD", "-j", "1,2,5"], "1 2"),
        (["-s", "F", "-S", "08:31"], "5"),
        (["-s", "R", "-S", "08:15", "-E", "09:10"], "2 5"),
        # as in sacct, -D apart: the newest of the selected runs, not of all runs of the job
        (["-s", "RQ", "-S", "today", "-E", "now"], "5"),
        (["-u", "bob", "-E", "08:15"], "5"),
        (["-j", "5", "-E", "08:15"], "5"),
        (["-s", "R,RQ", "-S", "08:00", "-E", "08:31", "-D"], "5 5"),
    ],
)
def test_options_select_the_matching_jobs(cli: Cli, options: list[str], found: str) -> None:
    code, out, _ = cli("-n", "-X", "-o", "jobid", *options)
    assert (code, ids(out)) == (0, found.split())


def test_requeued_runs_are_listed_separately(cli: Cli) -> None:
    assert cli("-n", "-D", "-j", "5", "-P", "-o", "jobid,restarts,state,elapsed")[1] == (
        "5|0|REQUEUED|00:10:00\n5|1|FAILED|00:01:00\n"
    )


def test_ordinary_users_see_their_own_jobs_as_in_sacct(cli: Cli) -> None:
    def seen(*options: str) -> list[str]:
        return ids(cli("-n", "-X", "-o", "jobid", *options, uid=1002)[1])

    assert seen() == ["3", "4", "5"]
    assert seen("-S", "now-2days") == ["3", "4", "5"]
    assert seen("-a") == ["2", "3", "4", "5", "6_1", "6_[2-9%4]", "9+1"]
    assert seen("-u", "alice") == ["2"]
    assert seen("-j", "2") == ["2"]
    assert seen("-N", "n1") == ["2", "3"]


def test_number_that_is_somebodys_name_means_that_user_or_group(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sacct: at some sites students' names, or groups of projects, are numbers."""
    url = f"sqlite:///{tmp_path}/x.db"
    with open_store(url) as store:
        of = {"1001": (5000, 6000), "alice": (1001, 2001), "bob": (1002, 2002)}
        rows = [{"job_id": n, "user": user, "uid": of[user][0], "gid": of[user][1]} for n, user in enumerate(of, 1)]
        store.upsert_jobs([{**row, "restarts": 0, "state": "PENDING", "submit": MIDNIGHT} for row in rows])
    users = {name: pwd.struct_passwd((name, "x", uid, gid, "", "/", "")) for name, (uid, gid) in of.items()}
    groups = {"2001": grp.struct_group(("2001", "x", 6000, [])), "ml": grp.struct_group(("ml", "x", 2002, []))}
    monkeypatch.setattr(pwd, "getpwnam", users.__getitem__)
    monkeypatch.setattr(pwd, "getpwuid", {user.pw_uid: user for user in users.values()}.__getitem__)
    monkeypatch.setattr(grp, "getgrnam", groups.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", {group.gr_gid: group for group in groups.values()}.__getitem__)
    for options, found in (
        (("-u", "1001"), "1"), (("-u", "1002"), "3"), (("-u", "5000,alice"), "1 2"), (("-g", "2001"), "1"),
        (("-g", "2002"), "3"),
    ):  # fmt: skip
        assert ids(cli("--db", url, "-n", "-o", "jobid", *options)[1]) == found.split()
    assert cli("--db", url, "-u", "2001")[2] == "migacct: error: Invalid user id: 2001\n"
    assert cli("--db", url, "-g", "1001")[2] == "migacct: error: Invalid group id: 1001\n"


def test_names_that_are_not_utf_8_select_jobs_and_are_no_error(cli: Cli, tmp_path: Path) -> None:
    """As typed in a terminal with another encoding; the record has a question mark for such a byte."""
    url = f"sqlite:///{tmp_path}/x.db"
    byte = os.fsdecode(b"caf\xe9")
    with open_store(url) as store:
        row = {"restarts": 0, "state": "PENDING", "submit": MIDNIGHT, "user": "alice", "uid": 1001}
        store.upsert_jobs([{"job_id": 1, "name": byte, **row}, {"job_id": 2, "name": "café", **row}])
    for name, found in ((byte, "1|caf?\n"), ("café", "2|café\n"), (os.fsdecode(b"\xff"), "")):
        assert cli("--db", url, "-n", "-P", "-o", "jobid,jobname", "--name", name) == (0, found, "")
    code, out, err = cli("--db", url, "-u", byte)
    assert (code, out) == (1, "") and err.startswith("migacct: error: Invalid user id: caf")


def test_state_option_alone_warns_that_it_means_the_current_moment(cli: Cli) -> None:
    code, out, err = cli("-s", "CD", "-n")
    assert (code, out) == (0, "")
    assert (
        err
        == "migacct: warning: -s alone shows the current moment only; add -S and -E (-S today -E now) for the past\n"
    )
    _, _, err = cli("-s", "CD", "-S", "today", "-n")
    assert (
        err == "migacct: warning: -s with -S but no -E shows one moment only; add -E now for everything since today\n"
    )
    for quiet in (["-s", "CD", "-S", "today", "-E", "now"], ["-s", "CD", "-j", "2"], ["-S", "today"]):
        assert cli("-n", *quiet)[2] == ""


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-S", "foo"], 1, "Invalid time specification (pos=0): foo; write"),
        (["-E", "31/31"], 1, "Invalid time specification (pos=0): 31/31; write"),
        (
            ["-S", "noon", "-E", "midnight"],
            1,
            "Start time (2026-03-14T12:00:00) requested is after end time (2026-03-14T00:00:00); ",
        ),
        (["-u", "alice,nosuch"], 1, "Invalid user id: nosuch"),
        (["-u", "4000000"], 1, "Invalid user id: 4000000"),
        (["-u", "9" * 30], 1, "Invalid user id: 9999"),
        (["-u", "²"], 1, "Invalid user id: ²"),
        (["--uid", "nosuch", "-a"], 1, "Invalid user id: nosuch"),
        (["-g", "nosuch"], 1, "Invalid group id: nosuch"),
        (["--gid", "4000000"], 1, "Invalid group id: 4000000"),
        (["-k", "foo"], 1, "Invalid time limit specification"),
        (["-k", "5", "-K", "foo"], 1, "Invalid time limit specification"),
        (["-c"], 1, "Slurm job completion is disabled: "),
        (["-x", "12,3x"], 1, "-x: '3x' is not an association id; `sacctmgr show associations format=id` lists them"),
        (["-s", "SLEEPING"], 1, "unrecognized job state value 'SLEEPING'; states are BF/BOOT_FAIL"),
        (["-j", "abc"], 1, "Bad job/step specified: abc; write 12"),
        (["-j", "12_[1-99999999]"], 1, "array tasks"),
        (["-N", "n[1-"], 1, "-N: 'n[1-' lacks"),
        (["-o", "jobid,color"], 1, 'Invalid field requested: "color"; -e lists them'),
        (["-o", "jobid%x"], 1, "write its name, name%20"),
        (["-o", "p"], 1, "is ambiguous: Partition, Profile, Placement"),
        (["-o", ","], 1, "no columns"),
        (["--units", "X"], 1, "Invalid unit type 'X'. Possible options are 'KMGTP'"),
        (["--db", "sqlite:////nowhere/x.db"], 1, "no database at /nowhere/x.db: correct --db or MIGBATCH_DB"),
        (["--db", "nonsense"], 1, "not a database URL"),
        (["-Q"], 1, "No such option"),
        (["-S"], 1, "requires an argument"),
        (["stray"], 1, "unexpected extra argument"),
    ],
)
def test_errors_are_one_line_and_have_their_exit_codes(cli: Cli, options: list[str], code: int, message: str) -> None:
    found, out, err = cli(*options)
    assert (found, out) == (code, "")
    assert err.startswith("migacct: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_columns_are_read_from_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIGACCT_FORMAT", "jobid%3,user%5")
    assert cli("-n", "-j", "2")[1] == "  2 alice\n"
    assert cli("-n", "-j", "2", "-o", "+state%9,+warm")[1] == "  2 alice COMPLETED   no\n"
    assert cli("-n", "-j", "2", "-o", "state%9")[1] == "COMPLETED\n"
    monkeypatch.delenv("MIGACCT_FORMAT")
    assert cli("-n", "-j", "2", "-o", "+warm")[1].endswith("01:01:05   no\n")


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        ("standard", "2026-03-14T09:01:30"),
        ("relative", "09:01:30"),
        ("%d.%m. %H:%M", "14.03. 09:01"),
        ("x", "2026-03-14T09:01:30"),
    ],
)
def test_times_follow_slurm_time_format(cli: Cli, monkeypatch: pytest.MonkeyPatch, style: str, shown: str) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", style)
    assert cli("-n", "-P", "-j", "2", "-o", "start")[1] == f"{shown}\n"


def test_nodes_are_a_host_list_as_in_sacct(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/nodes.db"
    facts = {"state": "RUNNING", "user": "alice", "restarts": 0, "start": MIDNIGHT + 60}
    with open_store(url) as store:
        lists = {1: ("n1", "n2", "n3"), 2: ("n2", "n10", "m1"), 3: ("n4",), 4: ()}
        store.upsert_jobs([{"job_id": job, "nodes": nodes, **facts} for job, nodes in lists.items()])
    assert cli("--db", url, "-aXnP", "-o", "nodelist")[1].split("\n") == ["n[1-3]", "m1,n[2,10]", "n4", "", ""]


def test_slices_of_a_node_that_died_were_held_until_the_end_of_the_run(cli: Cli, tmp_path: Path) -> None:
    """The node cannot report their release; if it boots again, the time until then is not the run's."""
    url = f"sqlite:///{tmp_path}/x.db"
    fields = ("slicehours,gpuhours", "jobid,elapsed,elapsedraw,end,slicehours")

    def shown(*options: str) -> list[str]:
        return [cli("--db", url, "-j", "7", "-n", "-P", *options, "-o", columns)[1] for columns in fields]

    with open_store(url) as store:
        node = Node(store)
        node.send(node.start(MIDNIGHT, 7, slice_entry(0, 1, "1g.10gb"), slice_entry(1, 1, "1g.10gb")))
        times = {"submit": MIDNIGHT - 60, "start": MIDNIGHT, "end": MIDNIGHT + 3600}
        store.upsert_jobs([{"job_id": 7, "restarts": 0, "state": "NODE_FAIL", **times}], now=MIDNIGHT + 3600)
        of_slice = "01:00:00|3600|2026-03-14T01:00:00|1.00"
        hours = ["2.00|0.29", "1.00|0.14", "1.00|0.14"]
        details = ["7|01:00:00|3600|2026-03-14T01:00:00|2.00", f"7.s0|{of_slice}", f"7.s1|{of_slice}"]
        expected = ["\n".join([*lines, ""]) for lines in (hours, details)]
        assert shown() == shown("-T") == expected
        (row,) = json.loads(cli("--db", url, "-j", "7", "--json")[1])["jobs"]
        assert (row["slice_hours"], row["gpu_hours"]) == (2.0, pytest.approx(2 / 7))
        node.send(node.event("boot", MIDNIGHT + 6 * 3600, boot_id="boot-2"))
        assert shown() == shown("-T") == expected


def test_json_has_the_jobs_with_their_slices(cli: Cli) -> None:
    code, out, _ = cli("--json", "-j", "2,3")
    document = json.loads(out)
    assert code == 0
    assert document["schema_version"] == 1
    assert document["window"] == {"start_unix_s": 0.0, "end_unix_s": NOW.timestamp()}
    two, three = document["jobs"]
    assert two["job"] == "2"
    assert (two["elapsed_s"], two["queue_wait_s"], two["predicted_memory_mib"], two["setup_ms"]) == (
        3665,
        90,
        6144,
        203.4,
    )
    assert (two["state"], two["exit_code"], two["warm"], two["nodes"]) == ("COMPLETED", 0, False, ["n1"])
    assert (two["started_unix_s"], two["bucket"], two["decision"]) == (MIDNIGHT + 9 * 3600 + 90, BUCKET, "7fq3k")
    assert [(s["profile"], s["placement_start"], s["gpu_index"], s["until_unix_s"]) for s in three["slices"]] == [
        ("1g.10gb", 2, 0, None), ("1g.10gb", 3, 0, None), ("2g.20gb", 4, 0, None),
    ]  # fmt: skip
    assert json.loads(cli("--json", "-j", "999")[1])["jobs"] == []


def test_yaml_is_the_same_document_as_json(cli: Cli) -> None:
    """Read by an independent parser; the output is block style, with texts in double quotes."""
    for wanted in (["-j", "2,3,10"], ["-j", "999"]):
        code, out, _ = cli("--yaml", *wanted)
        assert code == 0
        assert yaml.safe_load(out) == json.loads(cli("--json", *wanted)[1])


def test_yaml_is_in_block_style_with_quoted_texts(cli: Cli) -> None:
    lines = cli("--yaml", "-j", "3")[1].splitlines()
    assert lines[:6] == [
        "schema_version: 1", f"generated_unix_s: {NOW.timestamp()}", "window:", "  start_unix_s: 0.0",
        f"  end_unix_s: {NOW.timestamp()}", "jobs:",
    ]  # fmt: skip
    assert lines[6:8] == ['- job: "3"', "  job_id: 3"]
    assert {"  nodes:", '  - "n1"', "  slices:", '  - node: "n1"', '    gpu_uuid: "GPU-a"'} <= set(lines)
    assert cli("--yaml", "-j", "999")[1].splitlines()[-1] == "jobs: []"


def test_value_that_no_run_has_is_a_warning(cli: Cli) -> None:
    for options, message in (
        (["-A", "ml,nosuch", "-u", "alice", "-r", "cpu"], "no run visible to you has the account 'nosuch'"),
        (["-q", "nosuch"], "no run visible to you has the QOS 'nosuch'"),
        (["-W", "nosuch"], "no run visible to you has the wckey 'nosuch'"),
    ):
        assert cli("-n", *options) == (0, "", f"migacct: warning: {message}\n")
    assert cli("-n", "-q", "high", "-r", "cpu") == (0, "", "")


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm reports that the cluster's name is `one`."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'ClusterName             = one'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_cluster_column_and_option_use_the_name_that_slurm_reports(cli: Cli, named: None) -> None:
    assert cli("-n", "-X", "-j", "2", "-P", "-o", "jobid,cluster") == (0, "2|one\n", "")
    assert cli("-n", "-X", "-j", "2", "-P", "-o", "jobid", "-M", "two,one") == (0, "2\n", "")
    for any_case in ("One", "ALL"):
        assert cli("-n", "-X", "-j", "2", "-P", "-o", "jobid", "-M", any_case) == (0, "2\n", "")
    warning = "migacct: warning: this record only has runs of the cluster one\n"
    assert cli("-n", "-j", "2", "-M", "two") == (0, "", warning)


ASSOCIATIONS = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "-n -P show associations clusters=one" ] || exit 1
printf '%s\\n' '1|root||' '2|root|root|' '3|ml|alice|' '4|ml|bob|gpu' '5|ml|bob|' '6|ml|carol|cpu'
"""


def test_associations_select_runs_by_user_account_and_partition(cli: Cli, named: None, tmp_path: Path) -> None:
    """slurmdbd says what they stand for; runs of one for a partition do not count for the one for all others."""
    (tmp_path / "sacctmgr").write_text(ASSOCIATIONS)
    (tmp_path / "sacctmgr").chmod(0o755)

    def found(*options: str) -> list[str]:
        code, out, err = cli("-a", "-n", "-X", "-P", "-D", "-S", "010100", "-o", "user,account,partition", *options)
        assert (code, err) == (0, "")
        return sorted(set(out.splitlines()))

    assert found() == ["alice|ml|gpu", "bob|ml|gpu", "carol|ml|gpu"]
    assert found("-x", "3") == ["alice|ml|gpu"]
    assert found("-x", "4") == ["bob|ml|gpu"]
    assert found("-x", "5") == found("-x", "6") == found("-x", "1,77") == []
    assert found("-x", "3,4", "-x", "5") == ["alice|ml|gpu", "bob|ml|gpu"]
    assert found("-x", "4", "-q", "high") == []


def test_associations_without_slurmdbd_are_an_error(cli: Cli, named: None, tmp_path: Path) -> None:
    (tmp_path / "sacctmgr").write_text(
        "#!/bin/sh\necho 'You are not running a supported accounting_storage plugin' >&2; exit 1\n"
    )
    (tmp_path / "sacctmgr").chmod(0o755)
    code, out, err = cli("-x", "4")
    assert (code, out) == (1, "")
    assert "not running a supported accounting_storage plugin" in err


def test_json_has_exactly_the_names_of_its_schema_version(cli: Cli) -> None:
    """A name may be added; removing one or changing its meaning needs a new schema_version."""
    document = json.loads(cli("--json", "-j", "2")[1])
    assert set(document) == {"schema_version", "generated_unix_s", "window", "jobs"}
    assert set(document["jobs"][0]) == {
        "job", "job_id", "restarts", "array_job_id", "array_task_id", "het_job_id", "het_job_offset", "uid", "user",
        "account", "partition", "name", "nodes", "state", "reason", "exit_code", "signal", "submitted_unix_s",
        "started_unix_s", "ended_unix_s", "time_limit_s", "asked", "bucket", "decision", "source", "profile",
        "slice_count", "warm", "setup_ms", "predicted_latency_ms", "predicted_throughput_per_s", "predicted_memory_mib",
        "measured_latency_ms", "measured_throughput_per_s", "measured_memory_mib", "measured_items",
        "measured_by", "sm_active", "tensor_active", "dram_active", "consumed_energy_j", "gid", "qos", "wckey",
        "comment", "slice_hours", "gpu_hours", "prediction_error", "elapsed_s", "queue_wait_s", "slices", "retyped",
    }  # fmt: skip
    assert set(document["jobs"][0]["slices"][0]) == {
        "node", "gpu_uuid", "gpu_index", "profile", "placement_start", "placement_size", "gpu_instance_id",
        "compute_instance_id", "mig_uuid", "since_unix_s", "until_unix_s", "outcome",
    }  # fmt: skip


def test_helpformat_lists_all_columns(cli: Cli) -> None:
    code, out, _ = cli("-e")
    assert code == 0
    assert out.splitlines()[0] == "JobID               JobIDRaw            JobName             User"
    assert out.split() == [column.name for column in COLUMNS]


def test_help_names_all_columns_states_options_and_variables(cli: Cli) -> None:
    code, out, _ = cli("-h")
    assert code == 0
    assert cli("--help")[1] == out
    words = out.split()
    for column in COLUMNS:
        assert column.name in words
        assert column.doc.split()[0] in words
    assert all(state in out for state in CODES.values())
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        assert any(option in out for option in parameter.opts)
    for name in ("MIGACCT_FORMAT", "MIGBATCH_DB", "SLURM_TIME_FORMAT", "now[{+|-}", "Exit codes"):
        assert name in out


#: of sacct(1) of Slurm 26.05
SACCT = (
    "-A --accounts", "--array", "-L --allclusters", "-X --allocations", "-a --allusers", "-x --associations",
    "-B --batch-script", "-b --brief", "-M --clusters", "-c --completion", "-C --constraints", "--delimiter",
    "-D --duplicates", "-E --endtime", "--env-vars", "--expand-patterns", "--federation", "-f --file", "-F --flags",
    "-o --format", "-g --gid --group", "-h --help", "-e --helpformat", "-j --jobs", "--json", "--local", "-l --long",
    "--name", "-i --nnodes", "-I --ncpus", "--noconvert", "-N --nodelist", "-n --noheader", "-p --parsable",
    "-P --parsable2", "-r --partition", "-q --qos", "-R --reason", "-S --starttime", "-s --state",
    "-K --timelimit-max", "-k --timelimit-min", "-T --truncate", "-u --uid --user", "--units", "--usage",
    "--use-local-uid", "-v --verbose", "-V --version", "-W --wckeys", "--whole-hetjob", "--yaml",
)  # fmt: skip


def test_options_of_sacct_that_migacct_lacks_are_documented() -> None:
    ours = {"-h", "--help", *(flag for option in migacct.OPTIONS for flag in option.flags)}
    missing = {flags.split()[0] for flags in SACCT if not ours.issuperset(flags.split())}
    differences = section(ROOT / "docs" / "operate.md", "Differences between migacct and sacct")
    named = re.search(r"It has no (.*?)\.\s", differences, re.DOTALL)
    assert named is not None
    assert set(re.findall(r"`(-[^`]+)`", named[1])) == missing


def test_version_and_usage_are_printed(cli: Cli) -> None:
    assert cli("-V")[1].startswith("migacct 0.")
    assert cli("--usage") == (0, "Usage: migacct [OPTIONS]\n", "")


def test_all_and_long_formats_have_their_columns(cli: Cli) -> None:
    header = cli("-j", "999", "-P", "-o", "all")[1]
    assert header == "|".join(column.name for column in COLUMNS) + "\n"
    assert cli("-j", "3", "-P", "-o", "all")[0] == 0
    assert "MigUUID" in cli("-j", "2", "-l")[1]


def test_database_is_named_by_option_variable_or_configuration(
    cli: Cli, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "migbatch.toml"
    config.write_text(f'[store]\nurl = "{database}"\n')
    monkeypatch.delenv("MIGBATCH_DB")
    monkeypatch.setenv("MIGBATCH_CONFIG", str(config))
    assert cli("-n", "-j", "2", "-o", "jobid")[0] == 0
    monkeypatch.setenv("MIGBATCH_DB", "sqlite:////nowhere/env.db")
    assert "/nowhere/env.db" in cli()[2]
    assert "/nowhere/option.db" in cli("--db", "sqlite:////nowhere/option.db")[2]
    monkeypatch.delenv("MIGBATCH_DB")
    config.write_text("[store]\nurl = 3\n")
    code, _, err = cli()
    assert code == 1
    assert f"{config}:2:" in err


def test_database_failure_is_an_error_without_a_traceback(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    with open_store(url) as store, store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE runs RENAME TO elsewhere")
    assert cli("--db", url) == (1, "", "migacct: error: reading the database failed: no such table: runs\n")


WIDE = ("-a", "-S", "2020-01-01", "-o", ",".join(["jobid%3000"] * 20))
START = "from slurm_migbatch.cli.migacct import main; main()"


def test_closed_output_pipe_prints_no_error(database: str) -> None:
    """`migacct | head -1`, with more lines than the pipe holds."""
    command = [sys.executable, "-c", START, "--db", database, *WIDE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 1)
    process.stderr.close()


@pytest.mark.parametrize(("redirection", "shown"), [("2>&-", b""), (">&-", b"migacct: warning: -s alone")])
def test_closed_stdout_or_stderr_is_no_error(database: str, redirection: str, shown: bytes) -> None:
    """A remark must not appear among the lines of the answer."""
    command = [sys.executable, "-c", START, "--db", database, "-n", "-s", "CD"]
    found = subprocess.run(["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command], capture_output=True)
    assert (found.returncode, found.stdout) == (0, b"")
    assert found.stderr.startswith(shown) and found.stderr.count(b"\n") == bool(shown)


@pytest.mark.parametrize("in_memory", [10**9, 0], ids=["in memory", "in a file"])
def test_answer_that_nobody_reads_keeps_no_snapshot_of_the_record(
    database: str, tmp_path: Path, in_memory: int
) -> None:
    """As with `migacct | less`, with more lines than the pipe holds."""
    file = tmp_path / "x.db"
    shutil.copy(database.removeprefix("sqlite:///"), file)
    bounds = f"asking._LINES_AT_ONCE, asking._IN_MEMORY = 1, {in_memory}"
    program = f"from slurm_migbatch.cli import asking; {bounds}; {START}"
    command = [sys.executable, "-c", program, "--db", f"sqlite:///{file}", *WIDE]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        closing(sqlite3.connect(file, isolation_level=None)) as writer,
    ):
        assert process.stdout is not None
        assert process.stdout.read(10)
        writer.execute("UPDATE identity SET made = 1")
        busy, *_ = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert process.poll() is None, "it is still printing"
        process.kill()
    assert not busy


def test_long_answer_is_kept_in_a_temporary_file(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = cli(*WIDE)
    monkeypatch.setattr(asking, "_IN_MEMORY", 10_000)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cli(*WIDE) == lines
    assert list(tmp_path.iterdir()) == [], "it has no name"
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/none")
    code, out, errors = cli(*WIDE)
    assert (code, out) == (1, "")
    assert "cannot keep the answer" in errors and "No such file or directory" in errors


def test_migacct_imports_no_slow_modules(database: str) -> None:
    check = (
        "import sys\n"
        "from slurm_migbatch.cli.migacct import called\n"
        "assert called(['-a', '--db', sys.argv[1]]) == 0\n"
        "slow = {'click', 'dataclasses', 'inspect', 'json', 'slurm_migbatch.config', 'pandas', 'numpy',\n"
        "        'rich', 'sklearn', 'sqlalchemy', 'jinja2', 'pynvml', 'starlette', 'uvicorn',\n"
        "        'asyncio', 'http.client', 'ssl', 'subprocess', 'json.tool', 'slurm_migbatch.slurm.client',\n"
        "        'slurm_migbatch.store.ingest', 'slurm_migbatch.daemon', 'slurm_migbatch.predict'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", check, database], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"

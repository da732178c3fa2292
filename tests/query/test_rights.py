"""Whatever the query and whatever Slurm's PrivateData is: nobody sees other users' texts, or hidden jobs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.config import Config, LendingConfig, StoreConfig
from slurm_migbatch.daemon.messages import read_events
from slurm_migbatch.query.answers import answer
from slurm_migbatch.query.questions import (
    LoansQuestion,
    NodesQuestion,
    Question,
    RunsQuestion,
    ShowQuestion,
    TopQuestion,
    UsageQuestion,
    WasteQuestion,
    WhyQuestion,
)
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.columns import COLUMNS
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.rights import ALL_PRIVATE, Rights
from slurm_migbatch.store.db import open_store
from slurm_migbatch.values import replace
from tests.support.daemon_fakes import gpu
from tests.support.examples import examples

#: user -> uid and the first of the user's three jobs: one has ended, one runs, one is pending
USERS = {"ann": (1001, 41100), "bob": (1002, 42200)}
GPU = gpu(0, uuid="GPU-a")


def words(user: str) -> list[str]:
    """The texts that this user wrote into the jobs."""
    return [f"{user}sjobname", f"{user}scomment", f"{user}smodel", f"{user}swckey"]


def figure(user: str) -> str:
    """A number that was computed from the hints of this user's jobs."""
    return f"7{USERS[user][0]}"


def sharing(user: str) -> str:
    """Why two training jobs of this user share a slice."""
    ends = f"both end {figure(user)} s sooner on average than one after the other"
    return f"beside job {USERS[user][1] + 1} on its 1g.10gb: {ends} (slowed down 1.20 and 1.40 times)"


def queue() -> list[JobRow]:
    rows = []
    for user, (uid, first) in USERS.items():
        mine: dict[str, Any] = {"uid": uid, "user": user, "account": f"{user}sacct", "name": f"{user}sjobname"}
        comment = f"migbatch: role=train max=3g.40gb {user}scomment [mig:loan:1#{user}d]"
        rows += [
            JobRow(first + 1, state="RUNNING", partition="gpu", gres="gres:mig:1g.10gb:1", nodes=("n1",), **mine),
            JobRow(first + 2, partition="train", gres="gres:mig:loan:1", comment=comment, priority=uid, **mine),
            JobRow(first + 3, partition="gpu", gres="gres:mig:1g.10gb:1", reason="Resources",
                   comment=f"{user}scomment [mig:1g.10gb:1#{user}d]", **mine),
        ]  # fmt: skip
    return rows


class PlayedSite(QuerySite):
    """A site whose Slurm and migbatchd give fixed answers, each about all users."""

    def slurm(self) -> Any:
        node = NodeRow("n1", frozenset({"MIXED"}), {"1g.10gb": 7}, {"1g.10gb": 2}, ("gpu",))
        methods = {"jobs": lambda self: queue(), "nodes": lambda self: [node], "settings": lambda self: {}}
        return type("Played", (), methods)()

    def daemon(self, path: str) -> bytes:
        others = ", ".join(f"job {row.job_id}" for row in queue())
        if path == "/v1/waiting":
            reasons = {str(row.job_id): f"behind {others}" for row in queue()}
            more = {str(row.job_id): sharing(row.user) for row in queue()}
            return json.dumps({"waiting": reasons, "in_full": more}).encode()
        if path == "/v1/plans":
            return json.dumps({"plans": {"n1": {"GPU-a": [["1g.10gb", 5, 1]]}}}).encode()
        why = f"reserved on n1 behind {others}"
        pipeline = "; ".join(f"pipeline {row.user}smodel" for row in queue() if path == f"/v1/why/{row.job_id}")
        return json.dumps({"why": why, "in_full": f"{why}; {pipeline}"}).encode()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuerySite]:
    url = f"sqlite:///{tmp_path_factory.mktemp('rights')}/db"
    now = time.time()
    with open_store(url) as store:
        store.ingest("n1", "jx", "b1", [{"seq": 1, "ts": now, "kind": "inventory", "gpus": [GPU]}])
        seq = 1
        for number, (user, (uid, first)) in enumerate(USERS.items()):
            store.record_decisions([{
                    "id": f"{user}d", "ts": now, "uid": uid, "user": user, "partition": "gpu",
                    "asked": f"--gres=mig:auto --comment='{user}scomment'", "hints": {"model": f"{user}smodel"},
                    "bucket": f"{user}smodel/infer", "chosen": "mig:1g.10gb:1", "message": f"{user}smodel",
                    "candidates": [{"profile": "1g.10gb", "ok": False, "why": f"{user}smodel"}], "source": "service",
                }])  # fmt: skip
            for job, ends in ((first, True), (first + 1, False)):
                held = {"gpu": "GPU-a", "profile": "1g.10gb", "start": number, "size": 1, "mig_uuid": f"MIG-{job}"}
                run = {"job": job, "restart": 0, "uid": uid, "user": user, "decision": f"{user}d", "slices": [held]}
                seq += 1
                events: list[dict[str, Any]] = [{"seq": seq, "ts": now, "kind": "start", **run}]
                if ends:
                    seq += 1
                    events.append({"seq": seq, "ts": now, "kind": "stop", "exit_code": 0, **run})
                store.ingest("n1", "jx", "b1", events)
                row = {"job_id": job, "restarts": 0, "uid": uid, "user": user, "account": f"{user}sacct"}
                state = "COMPLETED" if ends else "RUNNING"
                written = {"name": f"{user}sjobname", "comment": f"{user}scomment", "wckey": f"{user}swckey"}
                store.upsert_jobs([{**row, **written, "state": state, "submit": now - 9}])
            lent = {"job_id": first, "restart": 0, "decided": now, "profile": "1g.10gb", "uid": uid, "user": user}
            why = f"job {first + 1} needs it, and job {min(first for _, first in USERS.values()) + 1} too"
            own = {"ts": now, "restart": 0, "dry_run": False, "before": "", "after": "", "job_id": first + 1}
            grows = f"3g.40gb instead of 1g.10gb makes it {figure(user)}.5 times faster"
            kinds = {"signal": why, "retype": f"{user}smodel", "share": sharing(user), "requeue": grows}
            actions = [{**own, "kind": kind, "why": text} for kind, text in kinds.items()]
            over = {**lent, "account": f"{user}sacct", "state": "ended", "ended": now, "why_ended": f"{why}; {grows}"}
            going = {**over, "job_id": first + 1, "state": "running", "ended": None, "why": sharing(user)}
            store.save_loans([over, going], actions)
    lending = LendingConfig(enabled=True, partitions=("train",))
    yield PlayedSite(dataclasses.replace(Config(), store=StoreConfig(url), lending=lending), quiet=True)


def answer_text(site: QuerySite, rights: Rights, question: Question) -> str:
    try:
        reply = answer(question, rights, site)
        return "\n".join([*reply.lines, *reply.remarks])
    except Unanswerable as error:
        return str(error)


JOBS = st.sampled_from([first + n for _, first in USERS.values() for n in range(5)])
SOME_JOBS = st.lists(JOBS, max_size=4).map(lambda jobs: ",".join(map(str, jobs)))
NAMES = st.lists(st.sampled_from([*USERS, "1001", "1002", "root"]), max_size=2).map(tuple)
ACCOUNTS = st.lists(st.sampled_from(["annsacct", "bobsacct", "x"]), max_size=2).map(tuple)
CELLS = st.lists(st.sampled_from([f"{c.name}%80" for c in COLUMNS]), min_size=1).map(",".join)
QUESTIONS: st.SearchStrategy[Question] = st.one_of(
    st.builds(
        RunsQuestion, jobs=SOME_JOBS, users=NAMES, allusers=st.booleans(), accounts=ACCOUNTS, duplicates=st.booleans(),
        nodes=st.sampled_from(["", "n1"]), states=st.sampled_from(["", "R", "CD", "R,CD"]), start=st.just("now-1hour"),
        end=st.just("now+1hour"), columns=CELLS, as_json=st.booleans(), delimiter=st.sampled_from([None, "|"]),
        as_yaml=st.booleans(), truncate=st.booleans(),
    ),
    st.builds(ShowQuestion, job=JOBS.map(str), duplicates=st.booleans(), as_json=st.booleans()),
    st.builds(WhyQuestion, job=JOBS.map(str)),
    st.builds(NodesQuestion, names=st.sampled_from([None, "n1"]), reasons=st.booleans(), as_json=st.booleans()),
    st.builds(
        TopQuestion, names=st.sampled_from([None, "n1"]), user=st.sampled_from(["", *USERS, "1002"]),
        only=st.sampled_from(["", "gpu", "train", "1g.10gb"]),
    ),
    st.builds(LoansQuestion, jobs=st.one_of(st.none(), JOBS.map(str)), over=st.booleans(), as_json=st.booleans()),
    st.builds(
        UsageQuestion, by=st.sampled_from(["", "user", "account", "node,profile", "partition,month"]), users=NAMES,
        accounts=ACCOUNTS, start=st.just("now-1hour"), as_csv=st.booleans(), as_json=st.booleans(),
    ),
    st.builds(
        WasteQuestion, job=st.sampled_from(["", *(str(first) for _, first in USERS.values())]), users=NAMES,
        accounts=ACCOUNTS, start=st.just("now-1hour"), as_csv=st.booleans(), as_json=st.booleans(),
    ),
)  # fmt: skip
PRIVATE = st.sets(st.sampled_from(sorted(ALL_PRIVATE))).map(frozenset)


@settings(max_examples=examples(300))
@given(question=QUESTIONS, private=PRIVATE)
def test_answers_never_contain_other_users_texts_or_private_data(
    site: QuerySite, question: Question, private: frozenset[str]
) -> None:
    """Ann queries; Bob's texts are never shown, his job ids and his account only where they are not private."""
    text = answer_text(site, Rights(1001, private=private), question)
    assert not [word for word in (*words("bob"), figure("bob")) if word in text]
    asked = json.dumps(vars(question))
    first = USERS["bob"][1]
    if "jobs" in private:
        numbers = set(re.findall(r"(?<![\d.])\d+", text))  # a time may contain the digits of a job
        assert not [job for job in range(first, first + 4) if str(job) in numbers and str(job) not in asked]
    if {"jobs", "usage"} <= private:
        assert f"MIG-{first}" not in text
        assert '"user": "bob"' not in text and "bob/" not in text
    if "accounts" in private:
        # the account in the query may be repeated
        assert "bobsacct" not in text.replace("has the account 'bobsacct'", "")
    if isinstance(question, WasteQuestion):
        assert "bob" not in text.replace("Invalid user id: bob", "")
    if "nodes" in private and not isinstance(question, RunsQuestion | ShowQuestion | LoansQuestion):
        assert "n1" not in text


@pytest.mark.parametrize("found", [{"names": ("bobsjobname",)}, {"wckeys": ("bobswckey",)}], ids=["name", "wckey"])
def test_filter_by_another_users_text_finds_no_job(site: QuerySite, found: dict[str, Any]) -> None:
    """Ann may see Bob's runs; by asking for a name, she could find out whether one of them has it."""
    question = RunsQuestion(allusers=True, start="now-1hour", end="now+1hour", columns="user", header=False, **found)
    assert "bob\n" not in answer_text(site, Rights(1001, private=frozenset()), question).replace(" ", "") + "\n"
    assert answer_text(site, Rights(0, everything=True), question).split() == ["bob", "bob"]


@settings(max_examples=examples(60))
@given(question=QUESTIONS)
def test_hidden_job_is_answered_like_a_missing_job(site: QuerySite, question: Question) -> None:
    if isinstance(question, ShowQuestion | WhyQuestion) and int(question.job) >= USERS["bob"][1]:
        missing = replace(question, job="99999")
        rights = Rights(1001, private=ALL_PRIVATE)
        assert answer_text(site, rights, question).replace(question.job, "99999") == answer_text(site, rights, missing)


@pytest.mark.parametrize(
    "rights",
    [
        Rights(0, everything=True),
        Rights(1002, private=ALL_PRIVATE - {"nodes"}),
        Rights(1005, coordinates=frozenset({"bobsacct"}), private=ALL_PRIVATE - {"nodes"}),
    ],
    ids=["root", "owner", "coordinator"],
)
def test_user_with_rights_to_a_job_sees_all_of_it(site: QuerySite, rights: Rights) -> None:
    first = USERS["bob"][1]
    runs = answer_text(
        site, rights, RunsQuestion(jobs=str(first), columns="jobname%20,request%80,bucket%40,account,wckey%20")
    )
    assert all(word in runs for word in words("bob")) and "bobsacct" in runs
    shown = answer_text(site, rights, ShowQuestion(str(first)))
    assert all(word in shown for word in words("bob") if word != "bobswckey")
    assert "bobsmodel" in answer_text(site, rights, WhyQuestion(str(first + 3)))
    assert f'"job": {first + 1}' in answer_text(site, rights, NodesQuestion(as_json=True))
    assert str(first) in answer_text(site, rights, LoansQuestion(over=True))
    page = answer_text(site, rights, TopQuestion())
    assert f'"1g.10gb",{first + 1},' in page and "bobsmodel" in page
    assert "bobsacct" in answer_text(site, rights, UsageQuestion(start="now-1hour"))
    assert f"Job:          {first}" in answer_text(site, rights, WasteQuestion(str(first)))


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_owner_sees_which_slice_his_job_holds_also_while_it_is_suspended(tmp_path: Path, state: str) -> None:
    url, now = f"sqlite:///{tmp_path}/db", time.time()
    held = {"gpu": "GPU-a", "profile": "1g.10gb", "start": 0, "size": 1}
    run = {"kind": "start", "job": 41103, "restart": 0, "uid": 1001, "user": "ann", "slices": [held]}
    with open_store(url) as store:
        store.ingest("n1", "jx", "b1", [{"seq": 1, "ts": now, "kind": "inventory", "gpus": [GPU]}])
        store.ingest("n1", "jx", "b1", [{"seq": 2, "ts": now, **run}])
        mine = {"job_id": 41103, "restarts": 0, "uid": 1001, "user": "ann", "submit": now - 9, "start": now - 8}
        store.upsert_jobs([{**mine, "state": state}])
    site = PlayedSite(dataclasses.replace(Config(), store=StoreConfig(url)), quiet=True)
    for uid, shown in ((1001, True), (1002, False)):
        text = answer_text(site, Rights(uid, private=frozenset({"jobs"})), NodesQuestion(as_json=True))
        assert ('"job": 41103' in text) == shown


@pytest.mark.parametrize("user", ["bob", "DOM\\bob", "pc$bob", "b@bob.org"])
def test_other_users_named_in_node_messages_are_hidden_if_private(tmp_path: Path, user: str) -> None:
    """The reason of a misfit names the users of other slices; not even the job's own user may see them."""
    url, now = f"sqlite:///{tmp_path}/db", time.time()
    full = f"no place beside what is in use. Taken: GPU 0 (GPU-a): 1g.10gb@0:1 by job 42201 of {user}"
    kept = (
        "process 77 of uid 910020001 has nvidia-cap21 open, which is job 42203's of uid 910020002: 1g.10gb@0:1 on GPU-a"
    )
    events: list[dict[str, Any]] = [
        {"kind": "inventory", "gpus": [GPU]},
        {"kind": "misfit", "job": 41103, "restart": 0, "grant": "mig:1g.10gb:1", "reason": full},
        {"kind": "fault", "gpu": "GPU-a", "what": kept, "action": "noted", "drain": False},
    ]
    with open_store(url) as store:
        store.ingest("n1", "jx", "b1", [{"seq": n, "ts": now, **event} for n, event in enumerate(events, 1)])
        mine = {"job_id": 41103, "restarts": 0, "uid": 1001, "user": "ann", "state": "PENDING", "submit": now - 9}
        store.upsert_jobs([mine])
    site = PlayedSite(dataclasses.replace(Config(), store=StoreConfig(url)), quiet=True)
    questions: list[Question] = [
        RunsQuestion(jobs="41103", columns="reason%300", header=False, start="now-1hour"),
        RunsQuestion(jobs="41103", as_json=True, start="now-1hour"),
        ShowQuestion("41103"),
        TopQuestion(),
        NodesQuestion(reasons=True),
        NodesQuestion(as_json=True),
    ]
    for question in questions:
        text, whole = (
            answer_text(site, Rights(uid, uid == 0, private=frozenset({"jobs", "usage"})), question)
            for uid in (1001, 0)
        )
        assert not [word for word in ("42201", "42203", "bob", "910020001", "910020002") if word in text], question
        assert "another user" in text and (("of " in whole and "bob" in whole) or "of uid 910020001" in whole), question


def test_answers_contain_no_control_characters(tmp_path: Path) -> None:
    """Root on a node names its GPUs and its faults, and every user who queries the nodes reads that."""
    url, now, odd = f"sqlite:///{tmp_path}/db", time.time(), "\x1b[2J\x9b\u202e\nn2"
    place = {"gpu": "GPU-a", "profile": "1g.10gb", "start": 0, "size": 1}
    run = {"job": 41103, "restart": 0, "uid": 1001, "user": f"ann{odd}", "account": odd, "partition": odd}
    events: list[dict[str, Any]] = [
        {"kind": "inventory", "gpus": [{**GPU, "name": f"H100{odd}"}]},
        {"kind": "start", **run, "slices": [{**place, "mig_uuid": odd}]},
        {"kind": "misfit", "job": 41104, "restart": 0, "reason": odd},
        {"kind": "fault", "gpu": odd, "what": odd, "action": odd, "drain": False},
        {"kind": "zombie", **place, "reason": odd},
    ]
    with open_store(url) as store:
        store.ingest("n1", "jx", "b1", [{"seq": n, "ts": now, **event} for n, event in enumerate(events, 1)])
    site = PlayedSite(dataclasses.replace(Config(), store=StoreConfig(url)), quiet=True)
    window = {"start": "now-1hour", "end": "now+1hour"}
    everything = ",".join(f"{column.name}%80" for column in COLUMNS)
    for question in (
        RunsQuestion(allusers=True, columns=everything, **window),
        RunsQuestion(allusers=True, as_json=True, **window),
        RunsQuestion(allusers=True, as_yaml=True, **window),
        ShowQuestion("41103"),
        ShowQuestion("41104"),
        NodesQuestion(),
        NodesQuestion(reasons=True),
        NodesQuestion(as_json=True),
        TopQuestion(),
        UsageQuestion(by="user", **window),
        WasteQuestion("41103"),
    ):
        reply = answer(question, Rights(0, everything=True), site)
        assert all(line.isprintable() for line in (*reply.lines, *reply.remarks)), question


def test_malformed_event_fields_do_not_prevent_answers(tmp_path: Path) -> None:
    """Root on a node adds fields of other kinds and types to its events."""
    url, now = f"sqlite:///{tmp_path}/db", time.time()
    odd = {"start": "x", "size": [7], "slices": 7, "zombies": 7, "exit_code": "x", "profile": {}}
    sent: list[dict[str, Any]] = [
        {"kind": "inventory", "gpus": [GPU]},
        {"kind": "misfit", "job": 41103, "restart": 0, "reason": "no room", **odd},
        {"kind": "fault", "gpu": None, "what": "broken", "job": 41103, **odd},
        {"kind": "fault", "gpu": None, "what": "broken", **odd},
    ]
    listed = [{"seq": n, "ts": now, **event} for n, event in enumerate(sent, 1)]
    body = json.dumps({"node": "n1", "journal": "aa", "boot_id": "b1", "events": listed})
    events = read_events("n1", body.encode()).events
    assert [event.kind for event in events] == [event["kind"] for event in sent]
    with open_store(url) as store:
        store.ingest("n1", "aa", "b1", [event.wire for event in events])
    site = PlayedSite(dataclasses.replace(Config(), store=StoreConfig(url)), quiet=True)
    for question in (NodesQuestion(), NodesQuestion(reasons=True), TopQuestion(), ShowQuestion("41103")):
        assert list(answer(question, Rights(0, everything=True), site).lines), question


def test_usage_of_other_users_is_shown_unless_private(site: QuerySite) -> None:
    """Ann queries the usage."""
    by_user = UsageQuestion(by="user", start="now-1hour", delimiter="|", header=False)

    def users(*private: str) -> set[str]:
        lines = answer_text(site, Rights(1001, private=frozenset(private)), by_user).splitlines()
        return {line.partition("|")[0] for line in lines}

    assert users() == {"ann", "bob"}
    assert users("usage") == users("jobs") == {"ann"}
    by_account = replace(by_user, by="account")
    text = answer_text(site, Rights(1001, private=frozenset({"accounts"})), by_account)
    assert text.startswith("annsacct|") and "bobsacct" not in text


def test_waste_is_shown_to_its_user_and_to_operators(site: QuerySite) -> None:
    bobs = str(USERS["bob"][1])
    nobody = Rights(1001, private=frozenset())
    assert "with slices, or it is not yours" in answer_text(site, nobody, WasteQuestion(bobs))
    table = WasteQuestion(start="now-1hour", as_json=True)
    assert json.loads(answer_text(site, nobody, table))["total"]["runs"] == 1
    assert json.loads(answer_text(site, Rights(0, everything=True), table))["total"]["runs"] == 2


def test_named_database_is_read_without_asking_for_rights(tmp_path: Path) -> None:
    """With --db, only the permissions of the file itself count."""
    from slurm_migbatch.cli.asking import _rights

    assert _rights(QuerySite(Config()), named=True).everything


@pytest.mark.parametrize(("uid", "itself"), [(0, True), (1001, False)])
def test_only_root_reads_a_database_on_a_server_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, itself: bool
) -> None:
    """All other users query migbatchd, whether or not they may read the configuration."""
    from slurm_migbatch.cli.asking import _source

    conf = tmp_path / "migbatch.toml"
    conf.write_text('[store]\nurl = "postgresql://migbatch@/migbatch"\n')
    login = tmp_path / "login.conf"
    login.write_bytes(b"\xef\xbb\xbfServers=http://ctl:6831\nSlurmUser=root\n")  # with a byte order mark
    monkeypatch.setenv("MIGBATCH_LOGIN_CONF", str(login))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert isinstance(_source(str(conf), None), QuerySite) is itself

"""The answer to `migbatch top`: the page from a real record; Slurm and migbatchd are fakes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from slurm_migbatch.config import Config, LendingConfig, StoreConfig, SubmitConfig
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.query.answers import answer
from slurm_migbatch.query.questions import NodesQuestion, TopQuestion, WhyQuestion
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.page import FAULTY, LOAN, OFFERED, USED, Page
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import StoredNode
from slurm_migbatch.workload.catalog import GpuKind, MigNode, Partition, SiteCatalog
from tests.support.daemon_fakes import gpu
from tests.support.stores import prepared

NOW = time.time()  # when tests are collected: the ends of jobs below are later than the end of any run
TRAIN = "migbatch: role=train items=1000 signal=usr1 [mig:%s:1#loan0001]"
ALL = Rights(0, everything=True)


def job(number: int, user: str, state: str = "RUNNING", gres: str = "1g.10gb:1", **more: Any) -> JobRow:
    given = {"partition": "gpu", "submit": NOW - 60, "nodes": ("n1",) if state == "RUNNING" else (), **more}
    uid = 1000 + len(user)
    return JobRow(number, user=user, uid=uid, account=f"{user}s", state=state, gres=f"gres/mig:{gres}", **given)


QUEUE = [
    job(11, "ann", start=NOW - 50, end=NOW + 80_000),
    job(12, "bobby", gres="2g.20gb:1", partition="train", comment=TRAIN % "2g.20gb", start=NOW - 50, end=NOW + 90_000),
    job(21, "ann", "PENDING", reason="Resources", priority=9),
    job(22, "bobby", "PENDING", reason="Resources", array_job=22, array_task="1-9", tasks=9),
    job(23, "bobby", "PENDING", "7g.80gb:1", reason="Priority"),
    job(24, "bobby", "PENDING", "loan:1", partition="train", comment=TRAIN % "loan", array_job=24, array_task="3"),
]
NODES = [
    NodeRow("n1", frozenset({"MIXED"}), {"1g.10gb": 3, "2g.20gb": 1, "none": 9, "loan": 1}, {"1g.10gb": 1}, ("gpu",)),
    NodeRow("n2", frozenset({"DOWN"}), {"1g.10gb": 7}, {}, ("gpu",), reason="broken"),
]


class PlayedSite(QuerySite):
    """A site whose Slurm and migbatchd give fixed answers."""

    def slurm(self) -> Any:
        methods = {"jobs": lambda _: QUEUE, "nodes": lambda _: NODES, "settings": lambda _: {"clustername": "hpc"}}
        return type("Played", (), methods)()

    def daemon(self, path: str) -> bytes:
        if path == "/v1/plans":
            slots = [["1g.10gb", 0, 1], ["2g.20gb", 2, 2], ["1g.10gb", 5, 1]]
            return json.dumps({"plans": {"n1": {"GPU-n1": slots}, "n2": {"GPU-n2": slots}}}).encode()
        if path == "/v1/waiting":
            return json.dumps({"waiting": {"24": "no GPU has room"}, "in_full": {}}).encode()
        return json.dumps({"why": "reserved behind job 11", "in_full": ""}).encode()


@pytest.fixture
def site(tmp_path: Path) -> PlayedSite:
    url = f"sqlite:///{tmp_path}/db"
    kind = GpuKind("h100-80gb", geometry("h100-80gb"), 989, 3350, 132)
    node = MigNode("n1", (kind.name,), frozenset({"gpu"}))
    catalog = SiteCatalog({"gpu": Partition("gpu", (kind,))}, {"n1": node})
    (tmp_path / "catalog.json").write_text(json.dumps(catalog.to_dict()))
    with open_store(prepared(url)) as store:
        for node, first in (("n1", 11), ("n2", 0)):
            events: list[dict[str, Any]] = [{"kind": "inventory", "gpus": [gpu(0, uuid=f"GPU-{node}")]}]
            for number, row in enumerate(QUEUE[:2] if first else ()):
                held = {"gpu": "GPU-n1", "profile": "1g.10gb" if not number else "2g.20gb", "start": 2 * number,
                         "size": 1 + number, "mig_uuid": f"MIG-{number}"}  # fmt: skip
                run = {"job": row.job_id, "restart": 0, "uid": row.uid, "user": row.user, "slices": [held]}
                events.append({"kind": "start", **run})
                events.append({"kind": "progress", "job": row.job_id, "restart": 0, "steps": 40, "items": 250})
            place = {"gpu": f"GPU-{node}", "profile": "1g.10gb", "start": 7, "size": 1}
            events.append({"kind": "zombie", **place, "reason": "in use"})
            events.append({"kind": "fault", "gpu": f"GPU-{node}", "what": "fell off the bus", "drain": True})
            store.ingest(node, "j", "b", [{"seq": n, "ts": NOW - 40 + n, **e} for n, e in enumerate(events, 1)])
        store.upsert_jobs([{"job_id": row.job_id, "account": row.account, "state": row.state} for row in QUEUE[:2]])
        lent = {"job_id": 12, "restart": 0, "decided": NOW - 55, "profile": "2g.20gb", "uid": QUEUE[1].uid,
                "user": "bobby", "state": "running", "started": NOW - 50, "node": "n1", "gpu": "GPU-n1",
                "why": "idle on n1"}  # fmt: skip
        act = {"ts": NOW - 5, "job_id": 12, "restart": 0, "kind": "release", "before": "", "after": "",
               "why": "idle on n1"}  # fmt: skip
        store.save_loans([lent], [{**act, "dry_run": False}, {**act, "dry_run": True, "kind": "signal"}])
    base = replace(Config(), store=StoreConfig(url), lending=LendingConfig(enabled=True, partitions=("train",)))
    return PlayedSite(replace(base, submit=SubmitConfig(catalog=str(tmp_path / "catalog.json"))))


Ask = Callable[..., Page]


@pytest.fixture
def ask(site: PlayedSite) -> Ask:
    def page_of(rights: Rights = ALL, **question: Any) -> Page:
        (text,) = answer(TopQuestion(**question), rights, site).lines
        return Page.read(text)

    return page_of


def test_page_lists_gpus_slot_by_slot(ask: Ask) -> None:
    page = ask()
    assert (page.cluster, page.totals) == ("hpc", (2, 1, 2, 16, 3))
    assert [tuple(row) for row in page.profiles] == [("1g.10gb", 1, 2), ("2g.20gb", 1, 1)]
    first, second = page.gpus
    assert [(slot.kind, slot.start, slot.size, slot.job, slot.user) for slot in first.slots] == [
        (USED, 0, 1, 11, "ann"),
        (LOAN, 2, 2, 12, "bobby"),
        (OFFERED, 5, 1, 0, ""),
        (FAULTY, 7, 1, 0, ""),
    ]
    assert (second.state, second.closed, [slot.kind for slot in second.slots]) == ("down", True, [FAULTY])
    assert "fell off the bus" in first.trouble and "broken" in second.trouble


def test_page_names_array_tasks_and_components_as_slurm_does(ask: Ask, site: PlayedSite) -> None:
    with open_store(site.config.store.url) as store:
        array = {"job_id": 11, "state": "RUNNING", "array_job": 9, "array_task": "2"}
        store.upsert_jobs([array, {"job_id": 12, "state": "RUNNING", "het_job": 11, "het_offset": 1}])
    assert [tuple(row) for row in ask().names] == [(11, "9_2"), (12, "11+1")]
    assert [tuple(row) for row in ask(Rights(1003, private=frozenset({"jobs"}))).names] == [(11, "9_2")]


def test_reasons_name_array_tasks_as_slurm_does(site: PlayedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(QUEUE[0], array_job=9, array_task="2")
    played = {"jobs": lambda _: [task, *QUEUE[1:]], "nodes": lambda _: NODES, "settings": lambda _: {}}
    monkeypatch.setattr(PlayedSite, "slurm", lambda self: type("Played", (), played)())
    (text,) = answer(TopQuestion(), ALL, site).lines
    assert [row.why for row in Page.read(text).queue] == ["reserved behind job 9_2"] * 2

    def supply(number: str, uid: int) -> list[str]:
        lines = answer(WhyQuestion(number), Rights(uid, private=frozenset({"jobs"})), site).lines
        return [line.partition(":")[2].strip() for line in lines if line.startswith("Supply:")]

    assert supply("21", QUEUE[0].uid) == ["reserved behind job 9_2"]
    assert supply("23", QUEUE[1].uid) == ["reserved behind another user's job"]


def test_queue_is_grouped_by_requested_slices(ask: Ask) -> None:
    page = ask()
    assert [(row.wants, row.jobs, row.reason, row.why, row.start, row.expected) for row in page.queue] == [
        ("1g.10gb", 10, "Resources", "reserved behind job 11", "now", 0.0),
        ("7g.80gb", 1, "Priority", "reserved behind job 11", "at", NOW + 90_000),
    ]
    assert page.waiting == 12


def test_loans_are_shown_with_their_progress(ask: Ask) -> None:
    running, waiting = ask().loans
    assert (running.job, running.state, running.gpu, running.steps, running.goal) == ("12", "running", "0", 40, 1000)
    assert running.items == 250
    assert (waiting.job, waiting.state, waiting.why) == ("24_3", "waiting", "no GPU has room")


def test_events_are_in_order_and_without_dry_runs(ask: Ask) -> None:
    page = ask()
    assert [row.kind for row in page.events if row.job] == ["start", "start", "release"]
    assert [row.at for row in page.events] == sorted(row.at for row in page.events)
    assert {row.kind for row in page.events} == {"start", "release", "zombie", "fault"}
    assert "1g.10gb cannot be destroyed: in use" in {row.text for row in page.events}


def test_node_with_a_clock_ahead_does_not_hide_events_of_others(ask: Ask, site: PlayedSite) -> None:
    boots = [{"seq": n, "ts": NOW + 1e9 + n, "kind": "boot", "boot_id": f"b{n}"} for n in range(1, 100)]
    with open_store(site.url) as store:
        store.ingest("n3", "j3", "b", boots)
    assert {row.kind for row in ask().events} == {"start", "release", "zombie", "fault"}


def test_page_can_be_limited_to_a_user_profile_partition_or_nodes(ask: Ask) -> None:
    ann = ask(user="ann")
    assert [gpu.node for gpu in ann.gpus] == ["n1"]
    assert ([row.jobs for row in ann.queue], ann.loans, ann.waiting) == ([1], (), 1)
    assert {row.user for row in ann.events} == {"ann"}
    assert [row.wants for row in ask(only="7g.80gb").queue] == ["7g.80gb"]
    assert [loan.job for loan in ask(only="train").loans] == ["12", "24_3"]
    assert [gpu.node for gpu in ask(only="gpu").gpus] == ["n1", "n2"]
    assert [gpu.node for gpu in ask(names="n[2-3]").gpus] == ["n2"]
    assert ask(user="nobody").gpus == ()
    with pytest.raises(Unanswerable, match="--nodes"):
        ask(names="n[")


def test_private_jobs_and_nodes_stay_private(ask: Ask) -> None:
    ann = Rights(QUEUE[0].uid, private=frozenset({"jobs", "usage"}))
    page = ask(ann)
    assert [(slot.kind, slot.job, slot.user) for slot in page.gpus[0].slots][:2] == [(USED, 11, "ann"), (USED, 0, "")]
    assert ([row.jobs for row in page.queue], page.loans) == ([1], ())
    assert {row.job for row in page.events} == {0, 11}
    nowhere = ask(Rights(QUEUE[0].uid, private=frozenset({"nodes"})))
    assert (nowhere.gpus, nowhere.profiles, nowhere.totals.nodes) == ((), (), 0)
    assert "n1" not in nowhere.write()
    assert nowhere.queue[0].why == ""


def texts_of(page: Page) -> str:
    """The page's texts without its numbers, of which a time stamp may have any digits."""

    def texts(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from texts([*value, *value.values()])
        elif isinstance(value, list):
            for part in value:
                yield from texts(part)

    return "\n".join(texts(json.loads(page.write())))


def test_what_a_users_hints_imply_is_shown_to_no_other_user(
    ask: Ask, site: PlayedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "beside job 12 on its 2g.20gb: both end 321 s sooner on average than one after the other"
    shared += " (slowed down 1.20 and 1.40 times)"
    faster = "2g.20gb instead of 1g.10gb makes it 1.7 times faster"
    replies: dict[str, Any] = {
        "/v1/waiting": {"waiting": {}, "in_full": {"24": f"it is about to start {shared}"}},
        "/v1/plans": {"plans": {}},
    }
    tied = "pipeline merger-with-acme: 2 unfinished jobs are predicted to take 1:25:00 at most"
    reply = {"why": "reserved", "in_full": f"reserved; {tied}"}
    monkeypatch.setattr(PlayedSite, "daemon", lambda _, path: json.dumps(replies.get(path, reply)).encode())
    act = {"ts": NOW, "job_id": 12, "restart": 0, "before": "", "after": "", "dry_run": False}
    with open_store(site.url) as store:
        store.save_loans([], [{**act, "kind": "signal", "why": faster}, {**act, "kind": "share", "why": shared}])
    bob, other = Rights(QUEUE[1].uid, private=frozenset()), Rights(4711, private=frozenset())
    own, others = ask(bob), ask(other)
    assert [row.why for row in own.queue] == ["reserved", f"reserved; {tied}"], "the first job of each group decides"
    assert [row.why for row in others.queue] == ["reserved", "reserved"]
    assert (own.loans[1].why, others.loans[1].why) == (
        f"it is about to start {shared}", "it is about to start beside job 12 on its 2g.20gb"
    )  # fmt: skip
    assert {faster, shared} < {row.text for row in own.events}
    assert {row.text for row in others.events} >= {"2g.20gb instead of 1g.10gb", ""}
    for figure in ("merger", "1:25:00", "321", "1.40", "1.7"):
        assert figure in texts_of(own) and figure not in texts_of(others)
    del reply["in_full"]
    reply["why"] = f"reserved; {tied}"
    monkeypatch.setattr(site, "_kept", {})
    assert "merger" not in ask(bob).write() and "merger" not in ask(other).write(), "who may see it is not stated"


def test_page_is_answered_without_slurm_and_migbatchd(site: PlayedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise SlurmError("slurmctld is away")

    def away(*_: Any) -> bytes:
        raise OSError("nobody listens")

    silent = type("Silent", (), {"jobs": refuse, "nodes": refuse, "settings": refuse})()
    monkeypatch.setattr(PlayedSite, "slurm", lambda _: silent)
    monkeypatch.setattr(PlayedSite, "daemon", away)
    reply = answer(TopQuestion(), ALL, site)
    page = Page.read(next(iter(reply.lines)))
    assert [slot.kind for slot in page.gpus[0].slots] == [USED, USED, FAULTY]
    assert page.queue == ()
    assert any("no answer from Slurm" in remark for remark in reply.remarks)
    assert any("no answer from migbatchd" in remark for remark in reply.remarks)


def test_node_that_was_removed_from_slurm_disappears_after_a_day(
    ask: Ask, site: PlayedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held when it was taken away is not in use any more."""

    def shown() -> tuple[set[str], Page]:
        monkeypatch.setattr(site, "_kept", {})
        nodes = json.loads(next(iter(answer(NodesQuestion(as_json=True), ALL, site).lines)))["nodes"]
        return {node["name"] for node in nodes}, ask()

    names, page = shown()
    held = {"gpu": "GPU-n0", "profile": "1g.10gb", "start": 0, "size": 1}
    events = [
        {"seq": 1, "ts": NOW - 40, "kind": "inventory", "gpus": [gpu(0, uuid="GPU-n0")]},
        {"seq": 2, "ts": NOW - 30, "kind": "start", "job": 9, "restart": 0, "slices": [held]},
    ]
    with open_store(site.url) as store:
        store.ingest("n0", "j", "b", events)
        found, more = shown()
        assert found == {"n0", *names} and more.totals.nodes == page.totals.nodes + 1, "it may be in slurm.conf soon"
        with store.engine.begin() as connection:
            connection.execute(update(StoredNode).where(StoredNode.node == "n0").values(seen=NOW - 2 * 86400))
    found, later = shown()
    assert found == names
    assert (later.totals, later.profiles, later.gpus) == (page.totals, page.profiles, page.gpus)


def test_several_viewers_share_one_query_of_slurm(site: PlayedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = []
    played = PlayedSite.slurm
    monkeypatch.setattr(PlayedSite, "slurm", lambda self: queries.append(1) or played(self))
    for uid in range(5):
        answer(TopQuestion(), Rights(uid), site)
    assert len(queries) == 1

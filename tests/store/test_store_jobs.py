"""What Slurm reports about jobs, and decisions: both are joined to the runs that nodes report."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from slurm_migbatch.store import models
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.queries import RunFilter, identity
from slurm_migbatch.store.receipt import NodeReceipt
from tests.support.store_events import Node, job, run_of, slice_entry, states

DECISION: dict[str, Any] = {
    "id": "7fq3k",
    "ts": 40.0,
    "uid": 1001,
    "user": "alice",
    "partition": "gpu",
    "asked": "--gres=mig:auto --comment='migbatch: model=bert-large'",
    "hints": {"model": "bert-large"},
    "bucket": "bert-large/infer/b32/128tok/any/any",
    "candidates": [
        {"profile": "1g.10gb", "latency_ms": 80.0, "throughput_per_s": 10.0, "memory_mib": 9000, "ok": False},
        {"profile": "1g.10gb+me", "latency_ms": 50.0, "throughput_per_s": 20.5, "memory_mib": 9000, "ok": True},
    ],
    "chosen": "mig:1g.10gb.me:1",
    "message": "migbatch: 1g.10gb+me, because",
    "source": "service",
    "predictor": "prior-1",
}
MARKED = "migbatch: model=bert-large [mig:1g.10gb.me:1#7fq3k]"


@pytest.mark.parametrize("state", ["SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"])
def test_job_that_is_held_after_a_requeue_is_pending(store: Store, state: str) -> None:
    store.upsert_jobs([job(7, "RUNNING", start=99.0, nodes=("n1",))])
    store.upsert_jobs([job(7, state, restarts=1, start=150.0, reason="JobHeldUser")], now=151.0)
    run = run_of(store, 7, restart=1).run
    assert (run["state"], run["started"], run["reason"]) == ("PENDING", None, "JobHeldUser")
    store.upsert_jobs([job(7, "CANCELLED", restarts=1, start=300.0, end=300.0)], now=301.0)
    assert run_of(store, 7, restart=1).run["started"] is None


@pytest.mark.parametrize(("state", "nodes", "started"), [("COMPLETED", ("n1",), 99.0), ("CANCELLED", (), None)])
def test_job_that_ended_in_the_second_of_its_start_has_started(
    store: Store, state: str, nodes: tuple[str, ...], started: float | None
) -> None:
    store.upsert_jobs([job(7, gres="")])
    store.upsert_jobs([job(7, state, gres="", start=99.0, end=99.0, nodes=nodes)], now=101.0)
    assert run_of(store, 7).run["started"] == started


def test_job_is_recorded_from_queue_to_end(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, reason="Priority", submit=50.0, start=999.0, time_limit_s=3600)])
    run = run_of(store, 7).run
    assert (run["state"], run["submitted"], run["started"], run["reason"]) == ("PENDING", 50, None, "Priority")
    node.send(node.start(100, 7))
    store.upsert_jobs([job(7, "RUNNING", start=99.0, nodes=("n1",), reason="None")])
    run = run_of(store, 7).run
    assert (run["state"], run["started"], run["reason"], run["time_limit_s"]) == ("RUNNING", 99, "Priority", 3600)
    node.send(node.stop(160, 7, exit_code=0))
    store.upsert_jobs([job(7, "COMPLETING", start=99.0)])
    assert run_of(store, 7).run["state"] == "COMPLETED", "completing is not running again"
    store.upsert_jobs([{"job_id": 7, "state": "CANCELLED", "restarts": 0, "exit_code": "15", "end": 159.0}])
    run = run_of(store, 7).run
    assert (run["state"], run["ended"], run["exit_code"], run["signal"]) == ("CANCELLED", 159, 0, 15)
    assert run["name"] == "train"


def test_slurms_end_state_overrides_the_nodes_report(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7))
    store.upsert_jobs([job(7, "TIMEOUT", start=99.0, end=158.0, exit_code="0:0")])
    node.send(node.stop(160, 7, exit_code=0))
    run = run_of(store, 7)
    assert (run.run["state"], run.run["ended"]) == ("TIMEOUT", 158)
    assert run.slices[0]["until"] == 160


def test_slurms_exit_code_overrides_the_nodes_report(store: Store) -> None:
    """Whatever a node reports later, even one that never had the job."""
    node, other = Node(store), Node(store, "n2", "bb")
    node.send(node.start(100, 7))
    store.upsert_jobs([job(7, "FAILED", start=99.0, end=110.0, exit_code="3:0", nodes=("n1",))])
    node.send(node.stop(111, 7, exit_code=0))
    other.send(other.stop(500, 7, exit_code=137))
    run = run_of(store, 7).run
    assert (run["state"], run["ended"], run["exit_code"], run["signal"]) == ("FAILED", 110, 3, 0)


@pytest.mark.parametrize(
    ("exit_code", "shown"),
    [("0:0", (0, 0)), ("1:0", (1, 0)), ("0:9", (0, 9)), (256, (1, 0)), ("9", (0, 9)), ("x", (None, None))],
)
def test_exit_codes_are_parsed_as_slurm_writes_them(
    store: Store, exit_code: object, shown: tuple[int | None, int | None]
) -> None:
    store.upsert_jobs([job(7, "FAILED by something", exit_code=exit_code)])
    run = run_of(store, 7).run
    assert (run["state"], (run["exit_code"], run["signal"])) == ("FAILED", shown)


def test_jobs_that_leave_the_queue_unseen_are_ended(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(1), job(2, "RUNNING", start=60.0), job(3, "RUNNING", start=60.0), job(4)], live={1, 2, 3, 4})
    node.send(node.start(61, 3))
    store.upsert_jobs([], live={4}, now=200.0)
    assert states(store) == [(1, 0, "CANCELLED"), (2, 0, "UNKNOWN"), (3, 0, "RUNNING"), (4, 0, "PENDING")]
    assert run_of(store, 1).run["ended"] == 200
    # 3 still holds its slice; only its node may say that it does not
    node.send(node.stop(210, 3, exit_code=0))
    # 1 and 2 were missing from one list only (a restart of slurmctld)
    store.upsert_jobs([job(1, "RUNNING", start=190.0), job(2, "RUNNING", start=60.0)], live={1, 2, 4}, now=201.0)
    assert states(store) == [(1, 0, "RUNNING"), (2, 0, "RUNNING"), (3, 0, "COMPLETED"), (4, 0, "PENDING")]
    store.upsert_jobs([job(2, "FAILED", start=60.0, end=198.0, exit_code="1:0")])
    assert states(store) == [(1, 0, "RUNNING"), (2, 0, "FAILED"), (3, 0, "COMPLETED"), (4, 0, "PENDING")]


def test_run_on_a_node_that_is_gone_ends_once_slurm_has_forgotten_its_job(store: Store) -> None:
    """The node died while migbatchd was down: neither Slurm nor the node says how the job ended."""
    gone, other = Node(store), Node(store, "n2", "bb")
    gone.send(gone.event("state", 10, gpus=[], runs=[]), gone.start(61, 7), gone.start(61, 8, slice_entry(1)))
    other.send(other.start(61, 8))
    store.upsert_jobs([job(7, "RUNNING", start=60.0), job(8, "RUNNING", start=60.0)], live={7, 8})
    seen, database = time.time(), store.read(identity)
    assert store.ingest("n1", "aa", "boot-1", [], claim=NodeReceipt(database, 3)).complete
    store.upsert_jobs([], live={8}, now=seen + 600)
    assert states(store) == [(7, 0, "RUNNING"), (8, 0, "RUNNING")], "it may report yet"
    store.upsert_jobs([], live={8}, now=seen + 90_000)
    assert states(store) == [(7, 0, "UNKNOWN"), (8, 0, "RUNNING")]
    run = run_of(store, 7)
    assert run.run["ended"] == run.slices[0]["until"] == pytest.approx(seen, abs=60)
    assert [lease.job for lease in store.leases()] == [8, 8], "Slurm still lists it"
    # it was only unreachable
    receipt = store.ingest("n1", "aa", "boot-1", [gone.stop(900, 7, exit_code=0)], claim=NodeReceipt(database, 3))
    assert not receipt.complete, "it is asked for what it holds"
    run = run_of(store, 7)
    assert (run.run["state"], run.run["ended"], run.slices[0]["until"]) == ("COMPLETED", 900, 900)


def test_nodes_that_are_gone_cost_no_statement_each(store: Store) -> None:
    """Cloud nodes are powered down for days, and removed nodes stay in the record."""
    with Session(store.engine) as session, session.begin():
        session.add_all(models.StoredNode(node=f"cloud{number}", seen=0.0) for number in range(200))
    statements: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    store.upsert_jobs([job(7, "RUNNING", start=60.0)], live={7})
    assert len(statements) < 50


@pytest.mark.parametrize("start", [80.0, 79.0, 140.0], ids=["its end", "an earlier forecast", "a later forecast"])
def test_job_cancelled_before_its_start_has_no_start_time(store: Store, start: float) -> None:
    store.upsert_jobs([job(1)])
    store.upsert_jobs([job(1, "CANCELLED", start=start, end=80.0, exit_code="0:0")])
    run = run_of(store, 1).run
    assert (run["state"], run["started"], run["ended"]) == ("CANCELLED", None, 80)


def test_start_event_reopens_a_job_that_seemed_ended(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7)], live={7})
    store.upsert_jobs([], live=set(), now=90.0)
    node.send(node.start(91, 7))
    run = run_of(store, 7).run
    assert (run["state"], run["ended"]) == ("RUNNING", None)


def test_each_requeue_is_a_separate_run(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, "RUNNING", start=60.0)])
    node.send(node.start(61, 7), node.stop(80, 7, exit_code=143))
    store.upsert_jobs([job(7, "PENDING", restarts=1, submit=81.0)])
    node.send(node.start(90, 7, restart=1))
    assert states(store) == [(7, 0, "REQUEUED"), (7, 1, "RUNNING")]
    assert states(store, RunFilter(duplicates=False)) == [(7, 1, "RUNNING")]


def test_array_and_het_job_ids_are_recorded(store: Store) -> None:
    store.upsert_jobs(
        [
            job(10, array_job=10, array_task="2-5%2"),
            job(11, "RUNNING", array_job=10, array_task="1", start=60.0),
            job(21, "RUNNING", het_job=20, start=60.0),
        ]
    )
    assert run_of(store, 10).run["array_task"] == "2-5%2"
    assert (run_of(store, 11).run["array_job"], run_of(store, 11).run["array_task"]) == (10, "1")
    assert (run_of(store, 21).run["het_job"], run_of(store, 21).run["het_offset"]) == (20, 1)
    # the last task takes the array's own number
    store.upsert_jobs([job(10, "RUNNING", array_job=10, array_task="5", start=70.0)])
    assert run_of(store, 10).run["array_task"] == "5"


def test_time_limit_that_was_lifted_is_unlimited(store: Store) -> None:
    store.upsert_jobs([job(7, time_limit_s=3600)])
    store.upsert_jobs([job(7, time_limit_s=None)])
    assert run_of(store, 7).run["time_limit_s"] == 3600, "Slurm may not have set it"
    store.upsert_jobs([job(7, "RUNNING", start=60.0, time_limit_s=3600)])
    store.upsert_jobs([job(7, "RUNNING", start=60.0, time_limit_s=None)])
    assert run_of(store, 7).run["time_limit_s"] is None
    store.upsert_jobs([job(8, "RUNNING", start=60.0, time_limit_s=3600)])
    store.upsert_jobs([{"job_id": 8, "restarts": 0, "state": "COMPLETED", "end": 90.0}])
    assert run_of(store, 8).run["time_limit_s"] == 3600, "rows of ended jobs lack it"


@pytest.mark.parametrize("first", range(1001, 1005))
def test_long_list_of_array_tasks_ends_after_a_whole_number(store: Store, first: int) -> None:
    tasks = ",".join(map(str, (first % 10 * "1", *range(first, 2000, 2))))
    store.upsert_jobs([job(10, array_job=10, array_task=f"{tasks}%4")])
    kept = run_of(store, 10).run["array_task"]
    listed = kept.removesuffix(",...")
    assert tasks.startswith(f"{listed},") and kept == f"{listed},..." and 250 < len(kept) <= 256
    whole = ",".join(map(str, range(1001, 1052)))
    store.upsert_jobs([job(20, array_job=20, array_task=whole)])
    assert run_of(store, 20).run["array_task"] == whole, "it fits"


@pytest.mark.parametrize(
    "order", [("decision", "job", "start"), ("start", "job", "decision"), ("job", "start", "decision")]
)
def test_decision_is_joined_to_its_run_in_any_order(store: Store, order: tuple[str, ...]) -> None:
    node = Node(store)
    for step in order:
        if step == "decision":
            store.record_decisions([DECISION])
        elif step == "job":
            store.upsert_jobs([job(7, comment=MARKED)])
        else:
            node.send(node.start(100, 7, slice_entry(profile="1g.10gb+me"), decision="7fq3k"))
    run = run_of(store, 7).run
    assert (run["decision"], run["bucket"], run["source"]) == ("7fq3k", DECISION["bucket"], "service")
    assert run["asked"] == DECISION["asked"]
    figures = ("predicted_latency_ms", "predicted_throughput_per_s", "predicted_memory_mib")
    assert [run[name] for name in figures] == [50, 20.5, 9000]


def test_recorded_request_is_that_of_the_last_change_before_the_start(store: Store) -> None:
    store.record_decisions([DECISION, {"id": "new1", "asked": "--gres=mig:7g.80gb"}, {"id": "new2", "asked": "other"}])
    store.upsert_jobs([job(7, comment=MARKED)])
    store.upsert_jobs([job(7, comment="[mig:7g.80gb:1#chgnew1]")])
    store.upsert_jobs([job(7, "RUNNING", comment="[mig:7g.80gb:1#chgnew1]", start=60.0)])
    store.upsert_jobs([job(7, "RUNNING", comment="[mig:7g.80gb:1#chgnew2]", start=60.0)])
    run = run_of(store, 7).run
    assert (run["decision"], run["asked"], run["predicted_latency_ms"]) == ("new1", "--gres=mig:7g.80gb", None)


KEPT = {"id": "7fq3k", "kept": True, "partition": "train", "candidates": [], "message": "", "source": "service"}


def test_new_comment_leaves_the_request_and_why_the_profile_was_chosen(store: Store) -> None:
    """As `scontrol update comment=...` of a pending job, which keeps its slices."""
    store.upsert_jobs([job(7, comment=MARKED)])
    same = {**KEPT, "asked": "--comment='migbatch: model=bert-large' --extra=x", "hints": {"model": "bert-large"}}
    store.record_decisions([{**DECISION, "recurring": "r1"}, same])
    run, decision = run_of(store, 7).run, store.decision("7fq3k")
    assert decision is not None
    assert run["asked"] == decision["asked"] == "--gres=mig:auto --comment='migbatch: model=bert-large' --extra=x"
    assert (run["bucket"], run["predicted_latency_ms"]) == (DECISION["bucket"], 50)
    assert (decision["message"], decision["candidates"]) == (DECISION["message"], DECISION["candidates"])
    assert (decision["partition"], decision["recurring"]) == ("train", "r1")
    assert decision["facts"] == {"predictor": "prior-1"}


def test_other_hints_are_not_those_that_the_profile_was_chosen_by(store: Store) -> None:
    store.upsert_jobs([job(7, comment=MARKED)])
    store.record_decisions([DECISION])
    store.record_decisions([{**KEPT, "asked": "", "hints": {}, "bucket": ""}])
    run, decision = run_of(store, 7).run, store.decision("7fq3k")
    assert decision is not None
    assert (run["asked"], run["bucket"], run["predicted_latency_ms"]) == ("--gres=mig:auto", None, None)
    assert (decision["hints"], decision["candidates"], decision["message"]) == ({}, [], DECISION["message"])
    store.record_decisions([{**KEPT, "id": "gone", "asked": "--comment=hello"}])
    alone = store.decision("gone")
    assert alone is not None and (alone["asked"], alone["facts"]) == ("--comment=hello", {})


def test_without_a_decision_the_request_is_what_slurm_shows(store: Store) -> None:
    store.upsert_jobs([job(7, comment="[mig:x#forged] and more")])
    run = run_of(store, 7).run
    assert (run["asked"], run["decision"]) == ("gres:mig:1g.10gb:1", None)


def test_a_decision_can_be_read_in_full(store: Store) -> None:
    store.record_decisions([DECISION])
    store.record_decisions([{**DECISION, "message": "again"}])
    found = store.decision("7fq3k")
    assert found is not None
    assert found["candidates"] == DECISION["candidates"]
    assert (found["hints"], found["message"]) == ({"model": "bert-large"}, "again")
    assert found["facts"] == {"predictor": "prior-1"}
    assert store.decision("nix") is None
    with pytest.raises(ValueError, match="id"):
        store.record_decisions([{"message": "no id"}])


def test_malformed_decisions_are_kept(store: Store) -> None:
    store.record_decisions(
        [{"id": "a", "candidates": [None, {"profile": None}], "chosen": "mig:2g.20gb:1", "ts": "soon"}]
    )
    store.record_decisions([{"id": "b", "candidates": "none", "asked": "x" * 9999, "message": "\0\ud800"}])
    assert store.decision("b") is not None


def test_malformed_jobs_do_not_block_the_others(store: Store) -> None:
    store.upsert_jobs([{}, {"job_id": "x"}, {"job_id": -1}, {"job_id": 3, "state": None, "submit": "x"}, job(4)])
    assert states(store) == [(3, 0, "PENDING"), (4, 0, "PENDING")]


@pytest.mark.parametrize(
    "added",
    ["[mig-exclude:n1,r1n[02]] [mig:2g.20gb:2#7fq]", "[mig:loan:1#loan1]", "[mig-exclude:n1] [mig:guest:1]"],
)
def test_comment_is_kept_without_the_text_that_the_filter_added(store: Store, added: str) -> None:
    for text in ("", "mine", "migbatch: role=train"):
        store.upsert_jobs([job(7, comment=f"{text} {added}" if text else added)])
        assert (run_of(store, 7).run["comment"] or "") == text


def test_accounting_fields_of_a_job_are_kept(store: Store) -> None:
    store.upsert_jobs([job(7, gid=1001, qos="high", wckey="*paper", comment=MARKED)])
    run = run_of(store, 7).run
    assert (run["gid"], run["qos"], run["wckey"], run["comment"]) == (
        1001,
        "high",
        "*paper",
        "migbatch: model=bert-large",
    )
    store.upsert_jobs([job(7, "RUNNING", start=60.0, gid=1001, qos="low", wckey="", comment="x" * 2000)])
    run = run_of(store, 7).run
    assert (run["gid"], run["qos"], run["wckey"], run["comment"]) == (1001, "low", "*paper", "x" * 1024)
    store.upsert_jobs([{"job_id": 7, "state": "COMPLETED", "restarts": 0}])
    assert run_of(store, 7).run["comment"] == "x" * 1024, "a row without it leaves it unchanged"

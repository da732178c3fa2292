"""Ended runs of recurring jobs, from which the submit filter's histories are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.recurring import RecurringRun, newest_lesson, recurring_runs
from tests.support.store_events import Node, run_of, slice_entry
from tests.support.store_events import job as job_of_alice


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


def decided(store: Store, id: str, recurring: str | None = "key", **more: object) -> None:
    store.record_decisions([{"id": id, "hints": {}, "recurring": recurring, "chosen": "mig:1g.10gb:1", **more}])


def ran(store: Store, job: int, node: Node, decision: str = "d1", **stop: object) -> RecurringRun:
    """A run of a job from its start to its end, as it is then read."""
    newest = store.read(newest_lesson)
    exit_code = stop.pop("exit_code", 0)
    store.upsert_jobs([job_of_alice(job, submit=90.0)])
    node.send(node.start(100, job, decision=decision), node.stop(200, job, exit_code=exit_code, **stop))  # type: ignore[arg-type]
    (row,) = store.read(recurring_runs, newest, 10)
    assert row.number == store.read(newest_lesson)
    assert row.user == "alice"
    return row


def facts_of(store: Store) -> Any:
    return run_of(store, 1).run["measured_facts"] or {}


def test_recurring_run_has_its_figures_and_its_decision(store: Store) -> None:
    node = Node(store)
    decided(store, "d1", hints={"retry": "oom", "max": "3g.40gb"}, engine="vllm", bucket="resnet50/infer/b8/224px")
    activity = {"seconds": 90.0, "sm": 0.5, "tensor": 0.25, "dram": 0.125}
    row = ran(store, 7, node, memory_mib=5000, activity=activity)
    assert (row.recurring, row.job, row.profile, row.ended) == ("key", 7, "1g.10gb", "done")
    assert (row.peak_mib, row.sm, row.dram, row.engine) == (5000.0, 0.5, 0.125, "vllm")
    assert (row.retry, row.high, row.low, row.het, row.slices) == (True, "3g.40gb", "", False, 1)
    assert (row.partition, row.restart, row.work) == ("gpu", 0, "resnet50/infer/b8/224px")


def test_run_on_a_loan_is_not_retried(store: Store) -> None:
    """Lending would give the job a slice of any allowed size again, also one of the same size."""
    node = Node(store)
    for decision, retry in (("loan01234567", False), ("d1", True)):
        decided(store, decision, hints={"role": "train", "retry": "oom"})
        assert ran(store, 7 + retry, node, decision=decision, exit_code=1).retry is retry


def test_end_of_a_recurring_run_is_classified(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    assert ran(store, 1, node, exit_code=1).ended == "failed"
    assert ran(store, 2, node, exit_code=143).ended == "cut"
    for job, exit_code, ended in ((3, 0, "done"), (4, 1, "oom")):  # the job's own report counts if it failed
        store.upsert_jobs([job_of_alice(job)])
        node.send(node.start(300, job, decision="d1"))
        report = node.event("progress", 350, job=job, restart=0, tasks=0, oom=True, final=True)
        node.send(report, node.stop(400, job, exit_code=exit_code))
        assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10)[0].ended == ended


def test_run_that_slurm_stopped_and_requeued_has_not_failed(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    for job, exit_code, ended in ((1, 143, "cut"), (2, 1, "failed")):
        first = ran(store, job, node, exit_code=exit_code)
        store.upsert_jobs([{"job_id": job, "state": "PENDING", "submit": 201.0, "restarts": 1}])
        (again,) = store.read(recurring_runs, first.number, 10)
        assert run_of(store, job).run["state"] == "REQUEUED" and again.ended == ended


def test_later_end_state_returns_the_run_again(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    first = ran(store, 1, node, exit_code=1)
    store.upsert_jobs([{"job_id": 1, "state": "TIMEOUT", "submit": 90.0, "start": 100.0, "end": 200.0}], live=())
    (again,) = store.read(recurring_runs, first.number, 10)
    assert (again.run, again.ended) == (first.run, "done")


def test_figures_of_shared_slices_and_impossible_figures_do_not_count(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    busy = {"seconds": 90.0, "sm": 0.5, "tensor": 0.0, "dram": 0.1}
    assert ran(store, 1, node, memory_mib=5000, activity=busy, shared=True).peak_mib is None
    for number, wrong in enumerate(({"sm": 7}, {"dram": -1}, {"sm": None}, {"seconds": "x"}, [1], "x"), 2):
        figures = {**busy, **wrong} if isinstance(wrong, dict) else wrong
        assert ran(store, number, node, activity=figures).sm is None


def test_runs_that_the_filter_cannot_recognize_have_no_key(store: Store) -> None:
    node = Node(store)
    decided(store, "d1", None)
    assert ran(store, 1, node).recurring == ""
    store.upsert_jobs([job_of_alice(2), job_of_alice(3)])
    node.send(node.start(100, 2), node.stop(200, 2))  # without a decision
    assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10) == []
    decided(store, "d2")
    unlike = [slice_entry(), slice_entry(4, 4, "3g.40gb")]
    node.send(node.start(300, 3, *unlike, decision="d2"), node.stop(400, 3, *unlike))
    assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10)[0].profile is None


def test_energy_is_known_when_every_node_of_the_run_has_reported_it(store: Store) -> None:
    def energy() -> Any:
        return facts_of(store).get("energy_j")

    first, second = Node(store), Node(store, "n2", "bb")
    for node in (first, second):
        node.send(node.start(100, 1))
    first.send(first.stop(200, 1, energy_j=57750))
    assert energy() is None
    second.send(second.stop(200, 1, energy_j=42250))
    assert energy() == 100000


@pytest.mark.parametrize("energy", [None, "a", -1, 2e12, float("nan"), [5], True])
def test_invalid_energy_is_not_recorded(store: Store, energy: Any) -> None:
    node = Node(store)
    node.send(node.start(100, 1), node.stop(200, 1, energy_j=energy))
    assert "energy_j" not in facts_of(store)


def test_activity_of_several_nodes_is_their_weighted_average(store: Store) -> None:
    first, second = Node(store), Node(store, "n2", "bb")
    decided(store, "d1")
    store.upsert_jobs([job_of_alice(1)])
    for node in (first, second):
        node.send(node.start(100, 1, decision="d1"))
    first.send(first.stop(200, 1, activity={"seconds": 100.0, "sm": 0.9, "tensor": 0.0, "dram": 0.2}))
    second.send(second.stop(200, 1, activity={"seconds": 50.0, "sm": 0.3, "tensor": 0.0, "dram": 0.2}))
    (row,) = store.read(recurring_runs, 0, 10)
    assert (row.sm, row.dram) == (pytest.approx(0.7), pytest.approx(0.2))

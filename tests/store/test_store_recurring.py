"""Ended runs of recurring jobs, as the submit filter's histories are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.recurring import RecurringRun, newest_lesson, recurring_runs
from tests.support.store_events import Node, piece, run_of


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
    node.send(node.start(100, job, decision=decision), node.stop(200, job, exit_code=exit_code, **stop))  # type: ignore[arg-type]
    (row,) = store.read(recurring_runs, newest, 10)
    assert row.number == store.read(newest_lesson)
    return row


def facts_of(store: Store) -> Any:
    return run_of(store, 1).run["measured_facts"] or {}


def test_a_run_comes_with_what_it_showed(store: Store) -> None:
    node = Node(store)
    decided(store, "d1", hints={"retry": "oom", "max": "3g.40gb"}, engine="vllm")
    activity = {"seconds": 90.0, "sm": 0.5, "tensor": 0.25, "dram": 0.125}
    row = ran(store, 7, node, memory_mib=5000, activity=activity)
    assert (row.recurring, row.job, row.profile, row.ended) == ("key", 7, "1g.10gb", "done")
    assert (row.peak_mib, row.sm, row.dram, row.engine) == (5000.0, 0.5, 0.125, "vllm")
    assert (row.retry, row.high, row.low, row.het, row.slices) == (True, "3g.40gb", "", False, 1)
    assert (row.partition, row.restart) == ("gpu", 0)


def test_how_it_ended(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    assert ran(store, 1, node, exit_code=1).ended == "failed"
    assert ran(store, 2, node, exit_code=143).ended == "cut"
    for job, exit_code, ended in ((3, 0, "done"), (4, 1, "oom")):  # its own word, where it failed
        node.send(node.start(300, job, decision="d1"))
        said = node.event("progress", 350, job=job, restart=0, tasks=0, oom=True, final=True)
        node.send(said, node.stop(400, job, exit_code=exit_code))
        assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10)[0].ended == ended


def test_what_is_told_later_brings_the_run_once_more(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    first = ran(store, 1, node, exit_code=1)
    store.upsert_jobs([{"job_id": 1, "state": "TIMEOUT", "submit": 90.0, "start": 100.0, "end": 200.0}], live=())
    (again,) = store.read(recurring_runs, first.number, 10)
    assert (again.run, again.ended) == (first.run, "done")


def test_shared_and_absurd_figures_do_not_count(store: Store) -> None:
    node = Node(store)
    decided(store, "d1")
    busy = {"seconds": 90.0, "sm": 0.5, "tensor": 0.0, "dram": 0.1}
    assert ran(store, 1, node, memory_mib=5000, activity=busy, shared=True).peak_mib is None
    for number, wrong in enumerate(({"sm": 7}, {"dram": -1}, {"sm": None}, {"seconds": "x"}, [1], "x"), 2):
        told = {**busy, **wrong} if isinstance(wrong, dict) else wrong
        assert ran(store, number, node, activity=told).sm is None


def test_runs_that_the_filter_cannot_know_again_have_no_key(store: Store) -> None:
    node = Node(store)
    decided(store, "d1", None)
    assert ran(store, 1, node).recurring == ""
    node.send(node.start(100, 2), node.stop(200, 2))  # nobody decided
    assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10) == []
    decided(store, "d2")
    unlike = [piece(), piece(4, 4, "3g.40gb")]
    node.send(node.start(300, 3, *unlike, decision="d2"), node.stop(400, 3, *unlike))
    assert store.read(recurring_runs, store.read(newest_lesson) - 1, 10)[0].profile is None


def test_energy_is_known_when_every_node_of_the_run_has_told_it(store: Store) -> None:
    def energy() -> Any:
        return facts_of(store).get("energy_j")

    one, two = Node(store), Node(store, "n2", "bb")
    for node in (one, two):
        node.send(node.start(100, 1))
    one.send(one.stop(200, 1, energy_j=57750))
    assert energy() is None
    two.send(two.stop(200, 1, energy_j=42250))
    assert energy() == 100000


@pytest.mark.parametrize("told", [None, "a", -1, 2e12, float("nan"), [5], True])
def test_an_energy_that_cannot_be_is_none(store: Store, told: Any) -> None:
    node = Node(store)
    node.send(node.start(100, 1), node.stop(200, 1, energy_j=told))
    assert "energy_j" not in facts_of(store)


def test_the_activity_of_several_nodes_is_their_average(store: Store) -> None:
    one, two = Node(store), Node(store, "n2", "bb")
    decided(store, "d1")
    for node in (one, two):
        node.send(node.start(100, 1, decision="d1"))
    one.send(one.stop(200, 1, activity={"seconds": 100.0, "sm": 0.9, "tensor": 0.0, "dram": 0.2}))
    two.send(two.stop(200, 1, activity={"seconds": 50.0, "sm": 0.3, "tensor": 0.0, "dram": 0.2}))
    (row,) = store.read(recurring_runs, 0, 10)
    assert (row.sm, row.dram) == (pytest.approx(0.7), pytest.approx(0.2))

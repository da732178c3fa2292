"""The record of loans and actions, and the data for forecasts."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from slurm_migbatch.store import windows
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.loans import freed, uses
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.reader import open_reader
from tests.support.store_events import Node, job, slice_entry


def loan(job: int, decided: float = 100.0, restart: int = 0, state: str = "released", **fields: Any) -> dict[str, Any]:
    """A loan as the ledger passes it to the store."""
    who = {"uid": 1001, "user": "alice", "account": "ml", "partition": "train"}
    own = {"job_id": job, "restart": restart, "decided": decided, "profile": "1g.10gb", "state": state, "why": "idle"}
    return {**who, **own, **fields}


def test_saving_a_loan_again_updates_it(store: Store) -> None:
    store.save_loans([loan(7)])
    store.save_loans([loan(7, state="running", released=101.0, started=102.0, node="n1", gpu="GPU-a"), loan(8, 103.0)])
    found = store.loans()
    assert [(row["job_id"], row["state"], row["started"]) for row in found] == [
        (7, "running", 102.0),
        (8, "released", None),
    ]
    store.save_loans([loan(7, state="ended", ended=110.0, why_ended="reclaimed"), loan(7, 120.0, restart=1)])
    assert [(row["job_id"], row["restart"]) for row in store.loans(active=True)] == [(8, 0), (7, 1)]
    assert [row["why_ended"] for row in store.loans([7])] == ["reclaimed", None]
    assert [row["job_id"] for row in store.loans(since=111.0)] == [8, 7]


def test_loan_ends_with_its_job_while_nobody_lends(store: Store) -> None:
    """Lending was disabled while the loans were active."""
    store.save_loans([loan(7, state="running", started=102.0), loan(8, state="running", started=102.0)])
    store.upsert_jobs([job(7, "RUNNING", start=102.0), job(8, "RUNNING", start=102.0)], live=[7, 8], now=103.0)
    store.upsert_jobs([], live=[8], now=200.0)
    assert [row["job_id"] for row in store.loans(active=True)] == [8]
    ended = store.loans([7])[0]
    assert (ended["state"], ended["ended"], ended["cause"]) == ("ended", 200.0, "left")


def test_actions_are_kept_in_their_order(store: Store) -> None:
    made = [
        {
            "ts": float(n),
            "job_id": n % 2,
            "restart": 0,
            "kind": "release",
            "before": "mig:loan:1",
            "after": "mig:1g.10gb:1",
        }
        for n in range(1, 6)
    ]
    store.save_loans([], made)
    store.save_loans([], [{**made[0], "ts": 9.0, "dry_run": True, "outcome": "Slurm rejected"}])
    assert [row["ts"] for row in store.actions()] == [1, 2, 3, 4, 5, 9]
    assert [row["ts"] for row in store.actions([1], limit=2)] == [5, 9]
    assert [(row["dry_run"], row["outcome"]) for row in store.actions(limit=1)] == [(True, "Slurm rejected")]


def test_foreign_text_is_cleaned_and_truncated(store: Store) -> None:
    store.save_loans([loan(7, user="a\0" + "b" * 200, why="w" * 10_000)], [])
    (found,) = store.loans()
    assert found["user"] == "a" + "b" * 127
    assert len(found["why"]) == 8192


def test_loan_in_a_window_includes_the_memory_slices_of_its_slice(store: Store, url: str) -> None:
    node = Node(store)
    node.send(node.start(100, 7, slice_entry(0, 2, "1g.20gb")))
    lent = {"state": "running", "profile": "1g.20gb", "started": 100.0, "node": "n1"}
    store.save_loans([loan(7, gpu="GPU-a", **lent), loan(8, gpu="GPU-a", **lent), loan(9, **lent)])
    with closing(open_reader(url)) as record:
        found = windows.loans(record, RunFilter(start=0.0, end=200.0))
    assert [row[-1] for row in found] == [2, None, None]


def test_past_uses_exclude_loans(store: Store) -> None:
    node = Node(store)
    node.send(
        node.start(100, 1, slice_entry(0)),
        node.start(110, 2, slice_entry(1)),
        node.start(120, 3, slice_entry(2)),
        node.stop(130, 1, slice_entry(0)),
        node.stop(140, 2, slice_entry(1)),
    )
    store.save_loans([loan(2)])
    assert [tuple(use) for use in store.read(uses, 0.0)] == [("1g.10gb", 100.0, 130.0), ("1g.10gb", 120.0, None)]
    assert [use.since for use in store.read(uses, 131.0)] == [120.0]
    assert store.read(freed, 0.0) == {"GPU-a": 130.0}
    assert store.read(freed, 131.0) == {}


def test_past_use_on_a_dead_node_ends_with_its_run(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 1, slice_entry(0)))
    store.upsert_jobs([job(1, "NODE_FAIL", start=100.0, end=130.0)])
    assert [tuple(use) for use in store.read(uses, 0.0)] == [("1g.10gb", 100.0, 130.0)]
    assert store.read(uses, 131.0) == []

"""Node events: kept once, applied in order, and none blocks the others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from slurm_migbatch.store import ingest, lifecycle
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.models import Run
from slurm_migbatch.store.receipt import NodeReceipt, Receipt
from tests.support.store_events import Node, lease_times, run_of, slice_entry, states


def kept(store: Store) -> list[tuple[int, str]]:
    with store.reading() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT seq, kind FROM node_events ORDER BY seq"))]


def test_run_is_recorded_from_start_to_stop(store: Store) -> None:
    node = Node(store)
    assert node.send(node.start(100, 7, slice_entry(0), slice_entry(4, 2, "2g.20gb"), decision="abc", warm=True)) == 1
    run = run_of(store, 7)
    assert run.run["state"] == "RUNNING"
    assert (run.run["user"], run.run["uid"], run.run["account"], run.run["partition"]) == ("alice", 1001, "ml", "gpu")
    assert (run.run["started"], run.run["ended"], run.run["warm"], run.run["decision"]) == (100, None, True, "abc")
    assert (run.run["profile"], run.run["slice_count"], run.run["nodes"]) == ("1g.10gb,2g.20gb", 2, "n1")
    assert [(lease.job, lease.start, lease.size, lease.profile) for lease in store.leases()] == [
        (7, 0, 1, "1g.10gb"),
        (7, 4, 2, "2g.20gb"),
    ]
    assert node.send(node.stop(160, 7, slice_entry(0), slice_entry(4, 2, "2g.20gb"), exit_code=0)) == 2
    run = run_of(store, 7)
    assert (run.run["state"], run.run["ended"], run.run["exit_code"]) == ("COMPLETED", 160, 0)
    assert [slice_entry["outcome"] for slice_entry in run.slices] == ["released", "released"]
    assert store.leases() == []
    assert len(lease_times(store)) == 2


@pytest.mark.parametrize(
    ("exit_code", "limit", "state", "shown"),
    [
        (0, None, "COMPLETED", (0, 0)),
        (3, None, "FAILED", (3, 0)),
        (128 + 15, None, "CANCELLED", (0, 15)),
        (128 + 11, None, "FAILED", (0, 11)),
        (None, None, "UNKNOWN", (None, None)),
        (0, 60, "TIMEOUT", (0, 0)),
        (128 + 15, 60, "TIMEOUT", (0, 15)),
        (0, 3600, "COMPLETED", (0, 0)),
    ],
)
def test_end_state_unknown_to_slurm_follows_from_exit_code_and_limit(
    store: Store, exit_code: int | None, limit: int | None, state: str, shown: tuple[int, int]
) -> None:
    node = Node(store)
    if limit:
        store.upsert_jobs([{"job_id": 7, "state": "PENDING", "submit": 90.0, "time_limit_s": limit}])
    node.send(node.start(100, 7), node.stop(160, 7, exit_code=exit_code))
    run = run_of(store, 7).run
    assert (run["state"], (run["exit_code"], run["signal"])) == (state, shown)


def test_repeated_events_count_once(store: Store) -> None:
    node = Node(store)
    events = [node.start(100, 7), node.stop(160, 7), node.start(170, 8)]
    assert node.send(*events[:2]) == 2
    assert node.send(*events) == 3
    assert node.send(*events) == 3
    assert states(store) == [(7, 0, "COMPLETED"), (8, 0, "RUNNING")]
    assert len(kept(store)) == 3


def test_first_of_two_events_with_the_same_number_is_kept(store: Store) -> None:
    node = Node(store)
    event = node.start(100, 7)
    assert node.send(event, {**event, "job": 8}) == 1
    assert node.send({**event, "job": 9}) == 1
    assert states(store) == [(7, 0, "RUNNING")]


def test_early_events_wait_for_the_events_before_them(store: Store) -> None:
    node = Node(store)
    first, second, third = node.start(100, 7), node.stop(160, 7), node.start(170, 8)
    assert node.send(third) == 0
    assert node.send(second) == 0
    assert states(store) == []
    assert node.send(first) == 3
    assert states(store) == [(7, 0, "COMPLETED"), (8, 0, "RUNNING")]


def test_many_early_events_are_applied_in_parts_with_each_message(store: Store) -> None:
    """One message must not make all other nodes' messages wait for everything that a node has stored before."""
    node = Node(store)
    first = node.event("cleared", 100)
    early = [node.event("cleared", 101) for _ in range(2000)]
    for start in range(0, len(early), 500):
        assert node.send(*early[start : start + 500]) == 0
    reached = [node.send(first)]
    while reached[-1] < node.seq and len(reached) < 9:
        reached.append(node.send())
    assert reached[0] <= 1000 and reached[-1] == node.seq


def test_gap_that_the_node_leaves_twice_is_skipped(store: Store) -> None:
    """The database was set back to before what it had acknowledged; the node cannot send that again."""
    node = Node(store)
    lost = [node.start(100, 7), node.stop(160, 7)]
    event = node.start(170, 8)
    assert node.send(event) == 0
    # the node goes on working meanwhile
    assert node.send(event, node.event("zombie", 171)) == 4
    assert states(store) == [(8, 0, "RUNNING")]
    # if the lost events come after all, nothing is lost and no current state is undone
    assert node.send(*lost) == 4
    assert states(store) == [(7, 0, "COMPLETED"), (8, 0, "RUNNING")]


def test_unknown_and_malformed_events_are_kept_and_block_nothing(store: Store) -> None:
    node = Node(store)
    odd = [
        node.event("teleport", 100, where={"to": ["mars"]}),
        node.event("start", 101),
        node.event("start", 102, job="seven", slices=[slice_entry()]),
        node.event("start", 103, job=-1, slices=[slice_entry()]),
        node.event("stop", 104, job=7, restart="x"),
        node.event("start", 105, job=2**70, slices=[slice_entry()]),
        node.event("inventory", 106, gpus="none"),
        node.event("inventory", 107, gpus=[1, {"uuid": None}]),
        node.event("boot", 108),
        node.event("misfit", 109),
        {"seq": 11, "kind": None, "ts": "yesterday"},
        {"seq": 12},
        {"seq": 13, "kind": "start", "ts": float("nan"), "job": 3, "slices": "many"},
        {"seq": 14, "kind": "x" * 5000, "ts": 1e300, "text": "a\0b\ud800c"},
    ]
    node.seq = len(odd)
    good = node.start(200, 7)
    assert node.send(*odd, good) == 15
    assert [seq for seq, _ in kept(store)] == list(range(1, 16))
    assert (7, 0, "RUNNING") in states(store)


@pytest.mark.parametrize("event", [{}, {"seq": None}, {"seq": 0}, {"seq": -3}, {"seq": "x"}, {"seq": 2**63}, 5, None])
def test_event_without_a_valid_number_is_not_kept(store: Store, event: object) -> None:
    node = Node(store)
    good = node.start(100, 7)
    assert store.ingest("n1", "aa", "boot-1", [event, good]).acked == 1  # type: ignore[list-item]
    assert len(kept(store)) == 1


def test_unusable_events_of_a_message_are_one_log_line(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(store)
    node.send(*(node.event("progress", 100, job=job, restart=0, items=1) for job in range(1, 101)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "event 1 (progress) cannot be used: job 1 has no run 0 (and 99 more)" in warning


def test_oversized_fields_are_truncated(store: Store) -> None:
    node = Node(store)
    deep: dict[str, object] = {}
    for _ in range(60):
        deep = {"d": deep}
    node.send(
        node.event("teleport", 100, blob="x" * 3_000_000),
        node.event("teleport", 101, deep=deep),
        node.start(102, 7, *(slice_entry(i) for i in range(2000)), user="u" * 5000, decision="d" * 99),
    )
    with store.reading() as connection:
        sizes = [len(row[0]) for row in connection.execute(text("SELECT payload FROM node_events"))]
    assert max(sizes) < 2_000_000
    assert len(store.leases()) == 256
    assert len(run_of(store, 7).run["user"]) == 128


def test_stop_without_a_start_records_the_slices_that_were_held(store: Store) -> None:
    node = Node(store)
    node.send(node.stop(160, 7, slice_entry(4, 2, "2g.20gb"), exit_code=1))
    run = run_of(store, 7)
    assert (run.run["state"], run.run["profile"], run.run["ended"]) == ("FAILED", "2g.20gb", 160)
    assert [(s["slot_start"], s["outcome"], s["since"], s["until"]) for s in run.slices] == [(4, "released", None, 160)]


def test_repeated_start_replaces_the_slices_of_the_run(store: Store) -> None:
    """The hook was killed after its start was written, and ran again with another placement."""
    node = Node(store)
    node.send(node.start(100, 7, slice_entry(0), slice_entry(1)), node.start(101, 7, slice_entry(1), slice_entry(2)))
    assert [lease.start for lease in store.leases()] == [1, 2]
    run = run_of(store, 7)
    assert (run.run["started"], run.run["slice_count"], run.run["profile"]) == (100, 2, "1g.10gb:2")


def test_start_in_an_occupied_slot_ends_the_earlier_lease(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7, slice_entry(0, 4, "3g.40gb")), node.start(200, 8, slice_entry(2, 2, "2g.20gb")))
    assert [(lease.job, lease.start) for lease in store.leases()] == [(8, 2)]
    assert states(store) == [(7, 0, "UNKNOWN"), (8, 0, "RUNNING")]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_two_jobs_can_share_a_slot_and_end_in_any_order(store: Store, order: tuple[int, int]) -> None:
    node = Node(store)
    node.send(node.start(10, 1), node.start(20, 2, beside=[1, 0]))
    assert lease_times(store) == [(1, 10.0, None), (2, 20.0, None)]
    assert [lease.job for lease in store.leases()] == [1, 2]
    assert [row.shared for row in store.job_progress([1, 2])] == [True, True]
    first, second = order
    node.send(node.stop(30, first, shared=True))
    assert [lease.job for lease in store.leases()] == [second]
    node.send(node.stop(40, second, shared=True))
    assert not store.leases()
    assert lease_times(store) == [(1, 10.0, 30.0 if first == 1 else 40.0), (2, 20.0, 30.0 if first == 2 else 40.0)]
    assert states(store) == [(1, 0, "COMPLETED"), (2, 0, "COMPLETED")]
    node.send(node.start(50, 3))
    assert [lease.job for lease in store.leases()] == [3]


@pytest.mark.parametrize("beside", [[7, 0], [1, 1], [1], "1.0", None, [True, 0], [1, 0, 0], {"job": 1}])
def test_start_beside_an_unknown_or_invalid_run_takes_the_slot_alone(store: Store, beside: object) -> None:
    node = Node(store)
    node.send(node.start(10, 1), node.start(20, 2, beside=beside))
    assert [lease.job for lease in store.leases()] == [2]
    assert [row.shared for row in store.job_progress([1, 2])] == [False, False]


def test_figures_of_a_run_on_a_shared_slice_are_no_lesson(store: Store) -> None:
    node = Node(store)
    figures = {"items": 1000.0, "throughput_per_s": 10.0, "tasks": 1}
    for job, ts in ((1, 10), (2, 1000)):
        store.upsert_jobs([{"job_id": job, "state": "PENDING", "submit": ts - 5.0}])
        node.send(node.start(ts, job), node.event("progress", ts + 100, job=job, restart=0, **figures))
        node.send(node.stop(ts + 100, job, **({"shared": True} if job == 1 else {})))
    lessons = {lesson.job: lesson for lesson in store.lessons(0, 10)}
    assert [lessons[job].throughput_per_s for job in (1, 2)] == [None, 10.0]
    assert run_of(store, 1).run["measured_throughput_per_s"] == 10.0


def test_start_is_compared_only_with_leases_on_its_own_gpus(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root on a node may report a thousand runs at once, and the record answers nobody else meanwhile."""
    compared: list[Any] = []
    overlaps = lifecycle._overlaps

    def compare(lease: Any, facts: Any) -> bool:
        compared.append(lease)
        return overlaps(lease, facts)

    monkeypatch.setattr(lifecycle, "_overlaps", compare)
    node = Node(store)
    runs = [{"job": n, "restart": 0, "since": 90.0, "slices": [slice_entry(gpu=f"GPU-{n}")]} for n in range(1, 61)]
    node.send(node.event("state", 100, gpus=[], runs=runs, zombies=[], idle=[]))
    node.send(node.start(101, 99, slice_entry(gpu="GPU-5"), slice_entry(1, gpu="GPU-6")))
    assert len(store.leases()) == 61 and run_of(store, 5).slices[0]["outcome"] == "lost"
    assert len(compared) < 10


def test_number_of_open_leases_of_a_node_is_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the node boots, the record ends all of them at once."""
    monkeypatch.setattr(lifecycle, "_MOST_OPEN", 3)
    node, other = Node(store), Node(store, "n2", "bb")
    node.send(*(node.start(100, number, slice_entry(gpu=f"GPU-{number}")) for number in range(1, 9)))
    other.send(other.start(100, 20, slice_entry(gpu="GPU-x")))
    assert [lease.job for lease in store.leases()] == [1, 2, 3, 20]
    node.send(node.stop(110, 1, slice_entry(gpu="GPU-1")), node.start(120, 9, slice_entry(gpu="GPU-9")))
    assert [lease.job for lease in store.leases()] == [2, 3, 9, 20]


def test_number_of_leases_of_a_run_on_a_node_is_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_MOST_OF_RUN", 3)
    node = Node(store)
    node.send(*(node.start(100 + number, 7, slice_entry(gpu=f"GPU-{number}")) for number in range(9)))
    assert len(lease_times(store)) == 3


def test_a_requeued_job_is_a_new_run(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), node.stop(110, 7, exit_code=143), node.start(120, 7, restart=1))
    assert states(store) == [(7, 0, "REQUEUED"), (7, 1, "RUNNING")]
    assert [row.run["latest"] for row in store.runs()] == [False, True]
    assert run_of(store, 7, 1).run["user"] == "alice"


def test_many_invented_runs_of_a_job_do_not_slow_down_its_events(store: Store) -> None:
    node = Node(store)
    node.send(*(node.start(100 + number, 7, restart=number) for number in range(50)))
    loaded: list[object] = []
    event.listen(Run, "load", keep := lambda run, _context: loaded.append(run))
    try:
        node.send(node.stop(200, 7, restart=20))
        store.upsert_jobs([{"job_id": 7, "state": "FAILED", "submit": 50.0, "restarts": 30}])
    finally:
        event.remove(Run, "load", keep)
    assert len(loaded) <= 5
    assert run_of(store, 7, 30).run["state"] == "FAILED"
    assert [run["restart"] for run in (row.run for row in store.runs()) if run["latest"]] == [49]


def test_number_of_runs_that_a_node_can_invent_for_a_job_is_limited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_MOST_RUNS", 3)
    monkeypatch.setattr(lifecycle, "_MOST_REUSES", 1)
    node = Node(store)
    node.send(*(node.start(100 + number, 7, restart=number) for number in range(5)))
    assert [restart for _, restart, _ in sorted(states(store))] == [0, 1, 2]
    store.upsert_jobs([{"job_id": 7, "state": "PENDING", "submit": 50.0, "restarts": 4}])
    assert node.send(node.start(120, 7, restart=4)) == node.seq
    assert run_of(store, 7, 4).run["started"] == 120
    for moment in range(1000, 1050, 10):
        node.send(node.start(moment, 8), node.stop(moment + 5, 8))
    assert len([row for row in store.runs() if row.run["job_id"] == 8]) == 2


def test_misfit_does_not_end_a_run_with_a_slice_on_another_node(store: Store) -> None:
    """Root on a node may report events of any job."""
    node, other = Node(store), Node(store, "n2", "bb")
    node.send(node.start(100, 7))
    other.send(other.event("misfit", 101, job=7, restart=0, reason="x"))
    assert (run_of(store, 7).run["state"], run_of(store, 7).run["ended"]) == ("RUNNING", None)
    node.send(node.stop(110, 7))
    assert (run_of(store, 7).run["state"], run_of(store, 7).run["ended"]) == ("COMPLETED", 110.0)


def test_a_misfit_is_requeued_with_its_reason(store: Store) -> None:
    node = Node(store)
    node.send(node.event("misfit", 100, job=7, restart=0, grant="mig:2g.20gb:1", reason="no room on any GPU"))
    run = run_of(store, 7).run
    assert (run["state"], run["reason"]) == ("REQUEUED", "misfit on n1: no room on any GPU")
    node.send(node.start(130, 7, restart=1))
    assert states(store) == [(7, 0, "REQUEUED"), (7, 1, "RUNNING")]


def test_reboot_ends_the_runs_of_that_node(store: Store) -> None:
    node, other = Node(store), Node(store, "n2", "bb")
    node.send(node.event("boot", 50, boot_id="b1"), node.start(100, 7))
    other.send(other.event("boot", 50, boot_id="c1"), other.start(100, 8))
    node.send(node.event("boot", 150, boot_id="b1"))
    assert len(store.leases()) == 2, "the agent restarted, the machine did not"
    node.send(node.event("boot", 200, boot_id="b2"))
    assert [lease.job for lease in store.leases()] == [8]
    assert states(store) == [(7, 0, "NODE_FAIL"), (8, 0, "RUNNING")]
    assert run_of(store, 7).slices[0]["outcome"] == "lost"
    assert run_of(store, 7).run["ended"] == 200


def test_runs_whose_end_is_reported_at_boot_end_as_node_fail(store: Store) -> None:
    node = Node(store)
    node.send(
        node.event("boot", 50, boot_id="b1"),
        node.start(100, 7),
        node.start(101, 8, slice_entry(1)),
        node.start(102, 9, slice_entry(2)),
    )
    node.send(
        node.stop(150, 9, slice_entry(2), exit_code=None),
        node.event("zombie", 151, reason="?"),
        node.stop(200, 7, exit_code=None),
        node.stop(200, 8, slice_entry(1), exit_code=None),
        node.event("boot", 200, boot_id="b2"),
    )
    assert states(store) == [(7, 0, "NODE_FAIL"), (8, 0, "NODE_FAIL"), (9, 0, "UNKNOWN")]
    assert [lease.job for lease in store.leases()] == []
    assert [run_of(store, job).slices[0]["outcome"] for job in (7, 8, 9)] == ["lost", "lost", "released"]


def test_first_reported_boot_is_not_a_reboot(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), node.event("boot", 110, boot_id="boot-1"))
    assert [lease.job for lease in store.leases()] == [7]


def test_loss_of_the_journal_ends_its_leases_but_not_its_runs(store: Store) -> None:
    old = Node(store)
    old.send(old.start(100, 7), old.start(101, 8, slice_entry(1)))
    new = Node(store, journal="bb")
    new.send(new.event("boot", 200, boot_id="boot-1"))
    assert store.leases() == []
    assert states(store) == [(7, 0, "RUNNING"), (8, 0, "RUNNING")]
    # one ends under the new journal, the other is found again by a repair
    new.send(new.stop(300, 7, exit_code=0), new.start(301, 8, slice_entry(1)))
    assert states(store) == [(7, 0, "COMPLETED"), (8, 0, "RUNNING")]
    assert [(lease.job, lease.since) for lease in store.leases()] == [(8, 101)]
    # events of the old journal that arrive late open no lease
    assert old.send(old.start(150, 9, slice_entry(2))) == 3
    assert [lease.job for lease in store.leases()] == [8]


def test_job_on_two_nodes_ends_when_its_last_node_stops(store: Store) -> None:
    first, second = Node(store), Node(store, "n2", "bb")
    first.send(first.start(100, 7))
    second.send(second.start(101, 7, slice_entry(gpu="GPU-b")))
    first.send(first.stop(150, 7, exit_code=0))
    assert run_of(store, 7).run["state"] == "RUNNING"
    second.send(second.stop(151, 7, slice_entry(gpu="GPU-b"), exit_code=0))
    run = run_of(store, 7).run
    assert (run["state"], run["ended"], run["nodes"], run["profile"]) == ("COMPLETED", 151, "n1,n2", "1g.10gb:2")


def test_job_id_that_slurm_reuses_is_another_job(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), node.stop(110, 7), node.start(5000, 7, user="bob"))
    assert [(row.run["reuse"], row.run["user"], row.run["state"], row.run["latest"]) for row in store.runs()] == [
        (0, "alice", "COMPLETED", False),
        (1, "bob", "RUNNING", True),
    ]


def test_late_event_of_an_earlier_run_makes_no_new_job(store: Store) -> None:
    """migbatchd has seen the next run of the job before the node reports that the first one was refused."""
    node = Node(store)
    seen = {"job_id": 7, "user": "alice", "submit": 90.0, "partition": "gpu"}
    store.upsert_jobs([{**seen, "state": "RUNNING", "start": 100.0, "restarts": 0}], live=[7], now=100.2)
    store.upsert_jobs([{**seen, "state": "PENDING", "submit": 101.0, "restarts": 1}], live=[7], now=101.5)
    node.send(node.event("misfit", 101.2, job=7, restart=0, grant="mig:2g.20gb:1", reason="no room on any GPU"))
    node.send(node.start(130, 7, restart=1), node.stop(140, 7, restart=1, exit_code=0))
    node.send(node.event("misfit", 101.3, job=7, restart=0, grant="mig:2g.20gb:1", reason="told twice"))
    assert [(row.run["restart"], row.run["state"], row.run["latest"]) for row in store.runs()] == [
        (0, "REQUEUED", False),
        (1, "COMPLETED", True),
    ]
    assert {row.run["user"] for row in store.runs()} == {"alice"}


@pytest.mark.parametrize("ended", [None, 150.0], ids=["pending", "over"])
def test_run_that_is_reported_after_the_next_one_was_listed_is_the_same_task_and_was_requeued(
    store: Store, ended: float | None
) -> None:
    """migbatchd was down meanwhile, or the task ran between two queries of Slurm."""
    node = Node(store)
    state = {"state": "PENDING"} if ended is None else {"state": "COMPLETED", "start": 130.0, "end": ended}
    task = {"job_id": 8, "user": "alice", "name": "train", "submit": 111.0, "array_job": 7, "array_task": "1", **state}
    store.upsert_jobs([{**task, "restarts": 1}], live=[8], now=160.0)
    node.send(node.start(100, 8), node.stop(110, 8, exit_code=1))
    first, second = sorted((row.run for row in store.runs()), key=lambda run: run["restart"])
    assert [first[name] for name in ("state", "ended", "exit_code", "latest")] == ["REQUEUED", 110.0, 1, False]
    assert [first[name] for name in ("name", "array_job", "array_task")] == ["train", 7, "1"]
    assert (second["state"], second["latest"]) == (state["state"], True)


def test_run_that_slurm_never_listed_is_of_the_task_that_was_requeued(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 8), node.stop(110, 8, exit_code=1))
    task = {"job_id": 8, "name": "train", "qos": "high", "submit": 111.0, "array_job": 7, "array_task": "1"}
    store.upsert_jobs([{**task, "state": "PENDING", "restarts": 1}], live=[8], now=112.0)
    run = run_of(store, 8).run
    assert [run[name] for name in ("state", "name", "qos", "array_job", "array_task")] == [
        "REQUEUED", "train", "high", 7, "1",
    ]  # fmt: skip


def test_task_that_ran_and_was_requeued_between_two_queries_is_not_its_whole_array(store: Store) -> None:
    node, tasks = Node(store), {"job_id": 7, "array_job": 7, "array_task": "1-3", "submit": 90.0, "state": "PENDING"}
    store.upsert_jobs([{**tasks, "restarts": 0}], live=[7], now=90.5)
    node.send(node.start(91, 7))
    store.upsert_jobs([{**tasks, "array_task": "3", "restarts": 1, "submit": 92.0}], live=[7], now=92.5)
    assert [(row.run["restart"], row.run["array_task"]) for row in store.runs()] == [(0, "3"), (1, "3")]


def test_misfit_within_the_second_of_its_runs_end_belongs_to_that_run(store: Store) -> None:
    """Slurm's times are whole seconds: a run that it says ended at 101 may have ended at 101.9."""
    node = Node(store)
    row = {"job_id": 7, "submit": 90.0, "start": 100.0, "end": 101.0, "restarts": 0, "state": "CANCELLED"}
    store.upsert_jobs([row], live=[], now=103.0)
    node.send(node.event("misfit", 101.9, job=7, restart=0, grant="mig:2g.20gb:1", reason="no room on any GPU"))
    assert states(store) == [(7, 0, "CANCELLED")]


@pytest.mark.parametrize("listed", [True, False], ids=["pending", "never"])
def test_short_run_on_a_node_whose_clock_is_behind_is_recorded_once(store: Store, listed: bool) -> None:
    """The run ended, by its node's clock, before it was submitted, by slurmctld's."""
    node = Node(store)
    row = {"job_id": 7, "user": "alice", "submit": 200.0, "restarts": 0, "state": "PENDING"}
    if listed:
        store.upsert_jobs([row], live=[7], now=200.5)
    node.send(node.start(180, 7), node.stop(181, 7, exit_code=0))
    store.upsert_jobs([{**row, "state": "COMPLETED", "start": 201.0, "end": 202.0}], live=[], now=203.0)
    (found,) = store.runs()
    assert [found.run[name] for name in ("state", "submitted", "started", "ended")] == ["COMPLETED", 200, 201, 202]
    assert len(found.slices) == 1


@pytest.mark.parametrize(("began", "jobs"), [(221, 1), (600, 2)])
def test_run_that_a_node_whose_clock_is_ahead_reports_after_its_end_is_recorded_once(
    store: Store, began: int, jobs: int
) -> None:
    """migbatchd was down while the job ran. Clocks differ by less than five minutes: later it is another job."""
    row = {"job_id": 7, "submit": 200.0, "start": 201.0, "end": 202.0, "restarts": 0, "state": "COMPLETED"}
    store.upsert_jobs([{**row, "nodes": "n1"}], live=[], now=250.0)
    node = Node(store)
    node.send(node.start(began, 7), node.stop(began + 1, 7, exit_code=0))
    assert [row.run["reuse"] for row in store.runs()] == list(range(jobs))
    assert len(store.runs()[-1].slices) == 1


def test_id_that_slurm_gives_again_after_a_run_that_it_never_listed_is_another_job(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), node.stop(110, 7))
    later = {"job_id": 7, "user": "bob", "submit": 500.0, "restarts": 0, "state": "PENDING"}
    store.upsert_jobs([later], live=[7], now=500.5)
    assert states(store) == [(7, 0, "COMPLETED"), (7, 0, "PENDING")]


def test_requeued_jobs_id_reused_after_a_reset_of_slurms_ids_is_another_job(store: Store) -> None:
    node = Node(store)
    row = {"job_id": 7, "submit": 90.0, "start": 100.0, "restarts": 0, "state": "RUNNING"}
    store.upsert_jobs([row], live=[7], now=100.5)
    store.upsert_jobs([{**row, "submit": 110.0, "start": None, "restarts": 1, "state": "PENDING"}], live=[7], now=110.5)
    node.send(node.start(5000, 7, user="bob"))
    assert [(row.run["reuse"], row.run["restart"], row.run["latest"]) for row in store.runs()] == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, True),
    ]


def test_pending_run_of_an_id_that_slurm_reuses_ends_with_that_id(store: Store) -> None:
    node = Node(store)
    row = {"job_id": 7, "submit": 90.0, "start": 100.0, "restarts": 0, "state": "RUNNING"}
    store.upsert_jobs([row], live=[7], now=100.5)
    store.upsert_jobs([{**row, "submit": 110.0, "start": None, "restarts": 1, "state": "PENDING"}], live=[7], now=110.5)
    store.upsert_jobs([{**row, "submit": 4990.0, "start": 5000.0}], live=[7], now=5000.5)
    node.send(node.start(5000, 7, user="bob"), node.stop(5100, 7))
    store.upsert_jobs([], live=[], now=5101.0)
    assert [(row.run["reuse"], row.run["restart"], row.run["state"]) for row in store.runs()] == [
        (0, 0, "REQUEUED"),
        (0, 1, "CANCELLED"),
        (1, 0, "COMPLETED"),
    ]
    assert all(row.run["ended"] is not None for row in store.runs())


def test_id_of_an_array_that_never_started_reused_by_slurm_is_another_job(store: Store) -> None:
    array = {"job_id": 7, "user": "alice", "submit": 90.0, "state": "PENDING", "array_job": 7, "array_task": "0-3"}
    store.upsert_jobs([array], live=[7], now=90.5)
    store.upsert_jobs([], live=[], now=100.0)  # not listed once, perhaps by mistake: it is the same job
    store.upsert_jobs([array], live=[7], now=101.0)
    store.upsert_jobs([], live=[], now=110.0)
    store.upsert_jobs([{"job_id": 7, "user": "bob", "submit": 120.0, "state": "PENDING"}], live=[7], now=120.5)
    assert [(row.run["reuse"], row.run["user"], row.run["array_job"], row.run["state"]) for row in store.runs()] == [
        (0, "alice", 7, "CANCELLED"),
        (1, "bob", None, "PENDING"),
    ]


def test_id_reused_while_nobody_watched_is_another_job(store: Store) -> None:
    """migbatchd was down while Slurm's job ids restarted: the earlier jobs had run, or waited, when it stopped."""
    node = Node(store)
    ran = {"job_id": 7, "user": "alice", "submit": 90.0, "start": 100.0, "state": "RUNNING", "restarts": 0}
    waited = {**ran, "job_id": 8, "start": None, "state": "PENDING"}
    unheld = {**ran, "job_id": 9}
    store.upsert_jobs([ran, waited, unheld], live=[7, 8, 9], now=100.5)
    node.send(node.start(100, 7))
    later = {"user": "bob", "submit": 200.0, "start": 201.0}
    store.upsert_jobs(
        [{**row, **later, "state": "RUNNING"} for row in (ran, waited, unheld)], live=[7, 8, 9], now=202.0
    )
    node.send(node.stop(150, 7, exit_code=3), node.start(201, 7, slice_entry(1)), node.stop(260, 7, slice_entry(1)))
    assert [
        (row.run["job_id"], row.run["reuse"], row.run["user"], row.run["state"], row.run["submitted"], row.run["ended"])
        for row in store.runs()
    ] == [
        (7, 0, "alice", "FAILED", 90.0, 150.0),
        (7, 1, "bob", "COMPLETED", 200.0, 260.0),
        (8, 0, "alice", "CANCELLED", 90.0, 200.0),
        (8, 1, "bob", "RUNNING", 200.0, None),
        (9, 0, "alice", "UNKNOWN", 90.0, 200.0),
        (9, 1, "bob", "RUNNING", 200.0, None),
    ]  # fmt: skip
    assert [[entry["slot_start"] for entry in row.slices] for row in store.runs()][:2] == [[0], [1]]


def test_id_of_a_requeued_job_reused_while_nobody_watched_is_another_job(store: Store) -> None:
    row = {"job_id": 7, "user": "alice", "submit": 90.0, "start": 100.0, "restarts": 0, "state": "RUNNING"}
    store.upsert_jobs([row], live=[7], now=100.5)
    store.upsert_jobs([{**row, "submit": 110.0, "start": 120.0, "restarts": 1}], live=[7], now=120.5)
    store.upsert_jobs([{**row, "user": "bob", "submit": 200.0, "start": 210.0}], live=[7], now=210.5)
    assert [(row.run["reuse"], row.run["restart"], row.run["user"], row.run["state"]) for row in store.runs()] == [
        (0, 0, "alice", "REQUEUED"),
        (0, 1, "alice", "UNKNOWN"),
        (1, 0, "bob", "RUNNING"),
    ]


@pytest.mark.parametrize("restarts", [1, 2])
def test_new_submission_time_of_a_requeued_job_is_of_the_same_job(store: Store, restarts: int) -> None:
    """Slurm counts the restart when it requeues the job, and sets the time only after the Epilog."""
    row = {"job_id": 7, "user": "alice", "submit": 90.0, "start": 100.0, "restarts": 0, "state": "RUNNING"}
    store.upsert_jobs([row], live=[7], now=100.5)
    store.upsert_jobs([{**row, "restarts": restarts, "state": "COMPLETING"}], live=[7], now=110.0)
    waiting = {**row, "restarts": restarts, "submit": 111.0, "start": None, "state": "PENDING"}
    store.upsert_jobs([waiting], live=[7], now=112.0)
    assert {(row.run["reuse"], row.run["restart"]) for row in store.runs()} == {(0, 0), (0, restarts)}


def test_newer_inventory_replaces_the_older_one(store: Store) -> None:
    node = Node(store)
    gpu = {
        "uuid": "GPU-a",
        "minor": 3,
        "index": 1,
        "name": "H100",
        "mig": True,
        "geometry": {"v": 1},
        "clock_mhz": 1980,
    }
    node.send(node.start(90, 7), node.event("inventory", 100, gpus=[gpu, {**gpu, "uuid": "GPU-b", "index": 0}]))
    assert [found["uuid"] for found in store.inventory()["n1"]] == ["GPU-b", "GPU-a"]
    assert store.inventory()["n1"][1] == gpu
    assert run_of(store, 7).slices[0]["gpu_index"] == 1, "learned after the start"
    node.send(node.event("inventory", 200, gpus=[{**gpu, "mig": False}]))
    assert store.inventory() == {"n1": [{**gpu, "mig": False}]}
    Node(store, journal="bb").send({"seq": 1, "ts": 300.0, "kind": "inventory", "gpus": [gpu]})
    node.send(node.event("inventory", 250, gpus=[]))
    assert store.inventory() == {"n1": [gpu]}, "an older one, of a journal that was lost, changes nothing"


def test_most_recently_replaced_gpus_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_MOST_GPUS", 3)
    node = Node(store)
    for moment in range(100, 120):
        node.send(node.event("inventory", moment, gpus=[{"uuid": f"GPU-{moment}-{n}", "mig": False} for n in (0, 1)]))
    with store.reading() as connection:
        known = sorted(connection.execute(text("SELECT uuid FROM gpus")).scalars())
    assert len(known) == 3 and known[1:] == ["GPU-119-0", "GPU-119-1"] and known[0].startswith("GPU-118")


def test_clock_that_was_ahead_at_boot_loses_no_events(store: Store) -> None:
    """A node's events are ordered by their numbers, whatever its clock showed."""
    node, gpu = Node(store), {"uuid": "GPU-a", "minor": 0, "index": 0, "name": "H100", "mig": False, "geometry": None}
    node.send(node.event("boot", 50, boot_id="b1"), node.start(60, 6))
    node.send(node.event("boot", 90_000, boot_id="b2"), node.event("inventory", 90_001, gpus=[gpu]))
    node.send(node.start(100, 7), node.event("inventory", 110, gpus=[{**gpu, "mig": True}]))
    assert [lease.job for lease in store.leases()] == [7]
    assert run_of(store, 7).run["state"] == "RUNNING"
    assert store.inventory()["n1"][0]["mig"] is True
    node.send(node.stop(160, 7))
    assert (run_of(store, 7).run["state"], run_of(store, 7).slices[0]["outcome"]) == ("COMPLETED", "released")


def test_node_name_is_required(store: Store) -> None:
    with pytest.raises(ValueError, match="names"):
        store.ingest("", "aa", "b", [])


# -- state events: all that a node holds -------------------------------------------------------------------------


def state_event(node: Node, ts: float, *runs: tuple[int, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A `state` event with one slice for each run."""
    rows = [
        {"job": job, "restart": 0, "uid": 1001, "since": ts - 10, "slices": [slice_entry]} for job, slice_entry in runs
    ]
    return node.event("state", ts, **{"gpus": [], "runs": rows, "zombies": [], "idle": [], **fields})


def identity(store: Store) -> str:
    with store.reading() as connection:
        return str(connection.execute(text("SELECT id FROM identity")).scalar_one())


def receipt(node: Node, *events: dict[str, Any], claim: NodeReceipt | None = None) -> Receipt:
    known = claim or NodeReceipt(identity(node.store))
    return node.store.ingest(node.name, node.journal, node.boot_id, list(events), known)


def test_node_is_incomplete_until_it_reports_its_whole_state(store: Store) -> None:
    node = Node(store)
    first = receipt(node, node.event("inventory", 100, gpus=[{"uuid": "GPU-a", "mig": True}]), node.start(101, 7))
    assert first == (2, first.database, False), "an inventory and what happens from now on are not all"
    assert receipt(node, state_event(node, 102, (7, slice_entry()))) == (3, first.database, True)
    assert receipt(node, node.stop(103, 7)) == (4, first.database, True)


def test_gpu_that_answers_again_requires_a_new_state_report(store: Store) -> None:
    """Readers of the events have dropped the GPU and what is held on it."""
    node, gpu = Node(store), {"uuid": "GPU-a", "mig": True}
    assert receipt(node, state_event(node, 100, (7, slice_entry()), gpus=[gpu])).complete
    assert receipt(node, node.event("inventory", 110, gpus=[{"uuid": "GPU-a", "mig": False}])).complete
    assert not receipt(node, node.event("inventory", 120, gpus=[gpu, {"uuid": "GPU-b", "mig": True}])).complete
    assert receipt(node, state_event(node, 130, (7, slice_entry()), gpus=[gpu])).complete
    assert receipt(node, node.event("inventory", 140, gpus=[gpu])).complete


def test_database_keeps_its_identity_and_another_one_needs_a_state_report(
    store: Store, url: str, tmp_path: Path
) -> None:
    node = Node(store)
    mine = receipt(node).database
    with open_store(url) as again:
        assert Node(again).store.ingest("n1", "aa", "b", []).database == mine
    with open_store(f"sqlite:///{tmp_path}/other.db") as other:
        assert other.ingest("n1", "aa", "b", []).database != mine
    assert receipt(node, state_event(node, 100)).complete
    assert not receipt(node, claim=NodeReceipt("0123")).complete, "the node has sent it to another database since"
    assert not receipt(node).complete, "until the whole state is sent again"
    assert receipt(node, state_event(node, 101)).complete


@pytest.mark.sqlite
def test_older_backup_asks_for_all_state_and_the_nodes_report_counts(store: Store, url: str, tmp_path: Path) -> None:
    node = Node(store)
    receipt(node, state_event(node, 100, (7, slice_entry()), (8, slice_entry(1))))
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    later = receipt(
        node, node.stop(110, 8, slice_entry(1)), node.start(111, 9, slice_entry(2)), node.stop(112, 9, slice_entry(2))
    )
    with open_store(f"sqlite:///{backup}") as old:
        node.store = old
        found = receipt(node, claim=NodeReceipt(later.database, later.acked))
        assert found == (1, later.database, False)
        assert {lease.job for lease in old.leases()} == {7, 8}
        state = state_event(node, 120, (7, slice_entry()), (11, slice_entry(3)))
        claim = NodeReceipt(found.database, found.acked)
        assert receipt(node, state, claim=claim) == (1, later.database, False), "a gap: more events may follow"
        assert receipt(node, state, claim=claim) == (5, later.database, True)
        assert {lease.job for lease in old.leases()} == {7, 11}
        assert states(old) == [(7, 0, "RUNNING"), (8, 0, "UNKNOWN"), (11, 0, "RUNNING")]
        assert run_of(old, 11).run["started"] == 110.0


def test_lost_events_require_a_new_state_report(store: Store) -> None:
    node = Node(store)
    receipt(node, state_event(node, 100))
    node.seq += 3
    late = node.start(110, 7)
    receipt(node, late)
    assert not receipt(node, late).complete, "a gap was skipped"
    receipt(node, state_event(node, 111))
    assert not receipt(node, claim=NodeReceipt(identity(store), 0, incomplete=True)).complete, "or it could not be read"


def test_state_report_ends_leases_it_omits_and_opens_those_it_names(store: Store) -> None:
    node, other = Node(store), Node(store, "n2", "bb")
    other.send(other.start(90, 7, slice_entry(gpu="GPU-b")))
    node.send(node.start(100, 7), node.start(101, 8, slice_entry(1)))
    guest = {"job": 12, "restart": 0, "uid": 1001, "since": 105.0, "slices": [slice_entry(1)], "beside": [8, 0]}
    host = {"job": 8, "restart": 0, "uid": 1001, "since": 101.0, "slices": [slice_entry(1)], "user": "alice"}
    receipt(node, state_event(node, 110, gpus=[{"uuid": "GPU-a", "index": 3, "mig": True}], runs=[guest, host]))
    assert {(lease.node, lease.job) for lease in store.leases()} == {("n2", 7), ("n1", 8), ("n1", 12)}
    assert states(store) == [(7, 0, "RUNNING"), (8, 0, "RUNNING"), (12, 0, "RUNNING")]
    assert [gpu["index"] for gpu in store.inventory()["n1"]] == [3]
    node.send(node.stop(120, 8, slice_entry(1)), node.stop(121, 12, slice_entry(1)))
    assert [lease.node for lease in store.leases()] == ["n2"]


def test_journal_that_came_back_is_the_current_one_again(store: Store) -> None:
    node, newer = Node(store), Node(store, journal="bb")
    receipt(node, state_event(node, 100, (7, slice_entry())))
    receipt(newer, state_event(newer, 110, (7, slice_entry())))
    assert not receipt(node).complete
    assert receipt(node, state_event(node, 120, (7, slice_entry()))).complete
    assert [lease.job for lease in store.leases()] == [7]

"""Filters, above all the time window: the indexed query must find what a plain one does."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from slurm_migbatch.store import windows
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.models import Run, SupplyChange, span_class
from slurm_migbatch.store.queries import unconfirmed_ends
from slurm_migbatch.store.reader import open_reader
from slurm_migbatch.store.runquery import LAST_SPAN_CLASS, JobId, RunFilter, statement_of
from slurm_migbatch.store.waste import used_runs
from tests.support.store_events import Node, job, slice_entry, states
from tests.support.stores import prepared

moments = st.floats(min_value=0, max_value=5e8) | st.sampled_from([0.0, 1.0, 4.0, 16.0, 64.0, 4.0**14, 4.0**15])


@given(moments, moments)
def test_span_class_bounds_the_length_of_a_run(began: float, length: float) -> None:
    ended = began + length
    c = span_class(began, ended)
    assert 1 <= c <= LAST_SPAN_CLASS
    assert c == LAST_SPAN_CLASS or ended - began <= 4.0**c
    assert span_class(began, None) == 0


def test_ends_that_slurm_has_not_listed_are_those_of_nodes_and_of_jobs_that_may_still_run(database: str) -> None:
    with open_store(database) as store:
        store.upsert_jobs(
            [job(1, "RUNNING", start=60.0), job(2), job(3, "RUNNING", start=60.0), job(4, "RUNNING", start=60.0)],
            now=61.0,
        )
        node = Node(store)
        node.send(*(event for number in (3, 4) for event in (node.start(62, number), node.stop(100, number))))
        store.upsert_jobs([job(4, "COMPLETED", start=60.0, end=99.0)], now=101.0)
        assert store.read(unconfirmed_ends, 50.0, 10) == {1, 2, 3}
        assert store.read(unconfirmed_ends, 200.0, 10) == {1, 2}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(moments, st.none() | moments), max_size=25), st.lists(st.tuples(moments, moments), max_size=6)
)
def test_window_finds_exactly_the_runs_that_overlap_it(
    spans: list[tuple[float, float | None]], windows: list[tuple[float, float]]
) -> None:
    with tempfile.TemporaryDirectory() as directory, open_store(prepared(f"sqlite:///{directory}/s.db")) as store:
        with Session(store.engine) as session, session.begin():
            for number, (began, length) in enumerate(spans, 1):
                session.add(
                    Run(
                        job_id=number, restart=0, reuse=0, latest=True, state="RUNNING", state_from="node",
                        slice_count=0, submitted=began, ended=None if length is None else began + length,
                    )
                )  # fmt: skip
        for first, second in windows:
            low, high = sorted((first, second))
            until = low + 1 if low == high else high
            expected = [
                number
                for number, (began, length) in enumerate(spans, 1)
                if began < until and (length is None or began + length >= low)
            ]
            found = [row.run["job_id"] for row in store.runs(RunFilter(start=low, end=high))]
            assert found == expected


@pytest.mark.sqlite
def test_window_query_uses_its_index(store: Store) -> None:
    """Without the index, a query for a day in the middle of a million runs would read half of them."""
    from sqlalchemy import select

    from slurm_migbatch.store.queries import overlapping

    statement = select(Run.id).where(overlapping(1e9, 1e9 + 86400))
    sql = str(statement.compile(store.engine, compile_kwargs={"literal_binds": True}))
    with store.reading() as connection:
        plan = " ".join(str(row) for row in connection.execute(text(f"EXPLAIN QUERY PLAN {sql}")))
    assert "ix_runs_window" in plan
    assert "SCAN" not in plan


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("chosen", "index"), [({"users": ("alice",)}, "ix_runs_user"), ({"uids": (7,)}, "ix_runs_uid")]
)
def test_query_for_one_user_uses_the_user_index(store: Store, chosen: dict[str, Any], index: str) -> None:
    """Without the index, a query for a month of one user would read that month of all users."""
    wanted = RunFilter(start=1e9, end=1e9 + 86400, **chosen)
    found = statement_of(wanted, ("state",))
    with store.reading() as connection:
        explained = connection.execute(text(f"EXPLAIN QUERY PLAN {found.text}"), dict(found.values))
        steps = [str(row[3]).replace("SEARCH TABLE ", "SEARCH ") for row in explained]  # the form before SQLite 3.36
    searches = [step for step in steps if "runs" in step]
    assert searches
    assert all(line.startswith(f"SEARCH runs USING INDEX {index} (") and "span_class=?" in line for line in searches)


@pytest.fixture
def filled(store: Store) -> Store:
    """Ended: 1 (alice, n1, 100-200, completed), 2 (bob, n2, 150-300, failed); running: 3 (alice, n1, from 400);
    pending: 4 (bob, from 450), array 10 with tasks 11 and 12; het job 20 with 21.
    """
    first, second = Node(store), Node(store, "n2", "bb")
    store.upsert_jobs(
        [job(1, submit=90.0), job(2, submit=120.0, user="bob", uid=1002, account="bio", partition="long")]
    )
    first.send(first.start(100, 1), first.stop(200, 1, exit_code=0))
    second.send(second.start(150, 2, user="bob", uid=1002), second.stop(300, 2, exit_code=1))
    store.upsert_jobs([job(3, submit=390.0), job(4, submit=450.0, user="bob", uid=1002)])
    first.send(first.start(400, 3, slice_entry(2)))
    store.upsert_jobs(
        [
            job(11, "RUNNING", submit=900.0, start=901.0, array_job=10, array_task="1"),
            job(12, "RUNNING", submit=900.0, start=901.0, array_job=10, array_task="2"),
            job(20, "RUNNING", submit=900.0, start=901.0, het_job=20),
            job(21, "RUNNING", submit=900.0, start=901.0, het_job=20),
        ]
    )
    return store


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [
        (RunFilter(), [1, 2, 3, 4, 11, 12, 20, 21]),
        (RunFilter(jobs=(JobId(1), JobId(4), JobId(99))), [1, 4]),
        (RunFilter(jobs=(JobId(10),)), [11, 12]),
        (RunFilter(jobs=(JobId(10, task="2"),)), [12]),
        (RunFilter(jobs=(JobId(20),)), [20, 21]),
        (RunFilter(jobs=(JobId(20, offset=1),)), [21]),
        (RunFilter(users=("bob",)), [2, 4]),
        (RunFilter(uids=(1002,), users=("nobody",)), [2, 4]),
        (RunFilter(accounts=("bio",)), [2]),
        (RunFilter(partitions=("long", "x")), [2]),
        (RunFilter(nodes=("n2",)), [2]),
        (RunFilter(nodes=("n1", "n2")), [1, 2, 3]),
        (RunFilter(start=0, end=95), [1]),
        (RunFilter(start=250, end=380), [2]),
        (RunFilter(start=200, end=200), [1, 2]),
        (RunFilter(start=301, end=420), [3]),
        (RunFilter(start=100, end=130, users=("alice",)), [1]),
        (RunFilter(states=("RUNNING",), start=500, end=500), [3]),
        (RunFilter(states=("RUNNING",), start=110, end=120), [1]),
        (RunFilter(states=("PENDING",), start=500, end=500), [4]),
        (RunFilter(states=("PENDING",), start=91, end=95), [1]),
        (RunFilter(states=("FAILED",), start=0, end=500), [2]),
        (RunFilter(states=("FAILED",), start=310, end=500), []),
        (RunFilter(states=("FAILED", "COMPLETED"), start=150, end=250), [1]),
        (RunFilter(states=("FAILED",)), [2]),
        (RunFilter(states=("FAILED",), jobs=(JobId(1), JobId(2)), start=0, end=500), [2]),
        (RunFilter(states=("SUSPENDED",), start=0, end=500), []),
        # as in sacct (test_against_sacct): a job has not begun at the time of its submission or start, but has ended
        (RunFilter(start=50, end=90), []),
        (RunFilter(states=("PENDING",), start=50, end=90), []),
        (RunFilter(states=("PENDING",), start=100, end=110), []),
        (RunFilter(states=("RUNNING",), start=95, end=100), []),
        (RunFilter(states=("RUNNING",), start=100, end=100), [1]),
        (RunFilter(start=90, end=90), [1]),
        (RunFilter(states=("RUNNING",), start=200, end=210), [2]),
        (RunFilter(states=("COMPLETED",), start=200, end=210), [1]),
        (RunFilter(states=("COMPLETED",), start=110, end=200), [1]),
    ],
)
def test_filter_selects_the_matching_runs(filled: Store, wanted: RunFilter, jobs: list[int]) -> None:
    assert [id for id, _, _ in states(filled, wanted)] == jobs


def test_tasks_of_an_array_are_together_in_the_order_of_their_numbers(store: Store) -> None:
    """As in sacct. Slurm numbers tasks as they start, and the last one has the number of the array."""
    tasks = {5: "10", 7: "1", 8: "2", 11: "9", 13: "3"}
    store.upsert_jobs([job(id, "RUNNING", start=60.0, array_job=5, array_task=task) for id, task in tasks.items()])
    store.upsert_jobs([job(9, "RUNNING", start=60.0, array_job=6, array_task="4"), job(10), job(12)])
    store.upsert_jobs([job(6, array_job=6, array_task="5-7%2")])
    store.upsert_jobs([job(8, restarts=1, array_job=5, array_task="2")])
    in_order = [(7, 0), (8, 0), (8, 1), (13, 0), (11, 0), (5, 0), (9, 0), (6, 0), (10, 0), (12, 0)]
    assert [found[:2] for found in states(store)] == in_order
    assert [found[:2] for found in states(store, RunFilter(duplicates=False))] == [
        key for key in in_order if key != (8, 0)
    ]
    node = Node(store)
    node.send(*[node.start(100 + id, id, slice_entry(place)) for place, id in enumerate(tasks)])
    with store.reading() as connection:
        shown = [run.shown.job_id for run in used_runs(connection, RunFilter(jobs=(JobId(5),)), 1e9)]
    assert shown == [7, 8, 13, 11, 5], "migbatch waste, too"


@pytest.mark.parametrize("wanted", ["École-1", "ÉCOLE-1"])
def test_account_beyond_ascii_is_found_as_slurm_writes_it(store: Store, wanted: str) -> None:
    store.upsert_jobs([job(7, account="École-1"), job(8, account="other")])
    assert [row.run["job_id"] for row in store.runs(RunFilter(accounts=(wanted,)))] == [7]


def test_states_select_suspended_runs_by_the_time_of_their_suspension(store: Store) -> None:
    suspended = job(1, "SUSPENDED", submit=90.0, start=100.0)
    store.upsert_jobs([{**suspended, "state": "RUNNING"}, {**suspended, "job_id": 2}], now=110.0)
    store.upsert_jobs([suspended], now=200.0)

    def selected(state: str, start: float, end: float) -> list[int]:
        return [id for id, _, _ in states(store, RunFilter(states=(state,), start=start, end=end))]

    assert (selected("SUSPENDED", 120, 150), selected("SUSPENDED", 120, 400)) == ([2], [1, 2])
    assert selected("RUNNING", 120, 400) == [], "as in sacct, while they are suspended"
    store.upsert_jobs([{**suspended, "state": "RUNNING"}], now=300.0)
    assert (selected("SUSPENDED", 250, 400), selected("SUSPENDED", 310, 400)) == ([1, 2], [2])
    assert selected("RUNNING", 120, 400) == [1]
    store.upsert_jobs([{**suspended, "state": "COMPLETED", "end": 500.0, "exit_code": "0:0"}], now=501.0)
    assert selected("SUSPENDED", 250, 400) == [1, 2]
    store.upsert_jobs([{**suspended, "job_id": 2, "state": "TIMEOUT", "end": 600.0, "exit_code": "0:15"}], now=610.0)
    assert (selected("SUSPENDED", 590, 700), selected("SUSPENDED", 601, 700)) == ([2], [])


def test_cancelled_jobs_that_never_ran_were_pending_until_then(store: Store) -> None:
    store.upsert_jobs([job(1, submit=90.0)], now=91.0)
    store.upsert_jobs([job(1, "CANCELLED", submit=90.0, start=200.0, end=200.0, exit_code="0:0")], now=201.0)
    waits = [RunFilter(states=("PENDING",), start=start, end=400) for start in (150, 200)]
    assert [states(store, wanted) for wanted in waits] == [[(1, 0, "CANCELLED")], []]


def test_each_run_counts_in_one_of_two_successive_windows(url: str) -> None:
    with open_store(prepared(url)) as store:
        node = Node(store)
        store.upsert_jobs([job(1, submit=90.0)])
        report = {"job": 1, "restart": 0, "items": 600, "tasks": 1, "throughput_per_s": 12.0}
        node.send(node.start(100, 1), node.event("progress", 150, **report), node.stop(200, 1))
        store.save_loans([{"job_id": 1, "restart": 0, "profile": "1g.10gb", "state": "ended", "decided": 90.0,
                           "started": 100.0, "ended": 200.0}])  # fmt: skip
        with Session(store.engine) as session, session.begin():
            session.query(Run).update({"predicted_throughput_per_s": 10.0})
        before, after = RunFilter(start=50, end=200), RunFilter(start=200, end=400)
        with store.reading() as connection:
            assert [len(list(used_runs(connection, wanted, 1e9))) for wanted in (before, after)] == [0, 1]
        reader = open_reader(url)
        assert [len(windows.predictions(reader, wanted)) for wanted in (before, after)] == [0, 1]
        start = (RunFilter(start=50, end=100), RunFilter(start=100, end=200))
        assert [len(windows.waits(reader, wanted, (60.0,))) for wanted in start] == [0, 1]
        assert [len(windows.loans(reader, wanted)) for wanted in start] == [0, 1]
        reader.close()


def test_filter_by_window_and_node_returns_the_slices(filled: Store) -> None:
    (row,) = filled.runs(RunFilter(nodes=("n1",), start=390, end=410))
    assert [(s["node"], s["slot_start"]) for s in row.slices] == [("n1", 2)]


def test_leases_are_listed_by_gpu_and_placement(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 1, slice_entry(4, 2, "2g.20gb"), slice_entry(0), slice_entry(0, gpu="GPU-0")))
    assert [(lease.gpu, lease.start, lease.profile) for lease in store.leases()] == [
        ("GPU-0", 0, "1g.10gb"),
        ("GPU-a", 0, "1g.10gb"),
        ("GPU-a", 4, "2g.20gb"),
    ]


def test_supply_changes_are_kept(store: Store) -> None:
    store.record_supply("n1", 100.0, 3, {"1g.10gb": 2, "none": 12}, "job 7 waits for 1g.10gb")
    of = SupplyChange
    with store.reading() as connection:
        rows = connection.execute(select(of.node, of.ts, of.version, of.counts, of.why)).all()
    assert [tuple(row) for row in rows] == [
        ("n1", 100.0, 3, {"1g.10gb": 2, "none": 12}, "job 7 waits for 1g.10gb"),
    ]


def test_reading_sees_one_moment_of_the_database(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 1))
    with store.reading() as connection:
        before = connection.execute(Run.__table__.select()).all()
        node.send(node.start(101, 2, slice_entry(3)))
        assert connection.execute(Run.__table__.select()).all() == before
    assert len(store.runs()) == 2

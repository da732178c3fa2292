"""Old rows are removed in small steps; rows that are unfinished, held or younger stay, and so do lessons."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from slurm_migbatch.config import loads
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.retention import Retention
from slurm_migbatch.store.capacity import gpu_seconds
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.models import (
    Action,
    Base,
    Job,
    NodeEvent,
    NodeJournal,
    OldLesson,
    Run,
    StoredDecision,
    StoredGpu,
    StoredLease,
    StoredLoan,
    StoredNode,
    SupplyChange,
)
from slurm_migbatch.store.retention import PruneCursor
from tests.support.store_events import Node as EventNode
from tests.support.store_events import job, slice_entry, states

NOW = 1_700_000_000.0
DAY = 86400.0
BEFORE = NOW - 400 * DAY


def fill(store: Store, seed: int, runs: int = 250) -> None:
    """Write a record of some years: jobs that ended, arrays, loans, unfinished jobs, held slices."""
    dice = random.Random(seed)
    with Session(store.engine) as session, session.begin():
        session.add_all(StoredNode(node=node, seen=NOW, journal=f"j-{node}") for node in ("n1", "n2"))
        session.add_all(NodeJournal(node=node, journal=f"j-{node}", contiguous=100) for node in ("n1", "n2"))
        session.add(StoredGpu(node="n1", uuid="GPU-a", name="H100", geometry={}, facts={}, seen=NOW))
        arrays = [9000 + number for number in range(60)]
        for number in range(1, runs + 1):
            ended = None if dice.random() < 0.05 else NOW - dice.choice([1, 100, 399, 401, 500, 900]) * DAY
            began = (ended or NOW) - dice.choice([5, 500, 50_000, 10 * DAY, 300 * DAY])
            decided = dice.random() < 0.6
            run = Run(
                job_id=number, restart=dice.choice([0, 0, 1]), latest=True, state="COMPLETED", submitted=began - 10,
                started=began, ended=ended, array_job=dice.choice([None, None, *arrays]), slice_count=1, user="alice",
                decision=f"d{number}" if decided else None, profile="1g.10gb",
                measured_memory_mib=dice.choice([None, 4000.0]),
            )  # fmt: skip
            session.add(run)
            session.flush()
            held = ended is not None and dice.random() < 0.04
            session.add(
                StoredLease(
                    run_id=run.id, job_id=number, restart=run.restart, node="n1", journal="j-n1", position=0,
                    gpu="GPU-a", profile="1g.10gb", slot_start=number % 7, slot_size=1, since=began,
                    until=None if held else ended, outcome=None if held else "released",
                )
            )  # fmt: skip
            if decided:
                session.add(
                    StoredDecision(
                        id=f"d{number}", ts=began - 10, hints={"model": "bert-base", "batch": 8}, candidates=[],
                        facts={},
                    )
                )  # fmt: skip
            session.add(
                Job(
                    job_id=number, live=ended is None or dice.random() < 0.03, state="COMPLETED",
                    seen=(ended or NOW) if dice.random() < 0.9 else NOW, facts={},
                )
            )  # fmt: skip
            if dice.random() < 0.3:
                over = ended if ended is not None and dice.random() < 0.9 else None
                session.add(
                    StoredLoan(
                        job_id=number, restart=run.restart, profile="1g.10gb", state="ended", decided=began, ended=over
                    )
                )
            if dice.random() < 0.3:
                session.add(Action(ts=began, job_id=run.array_job or number, restart=0, kind="retype", dry_run=False))
        lone = NOW - 800 * DAY
        session.add(StoredDecision(id="alone", ts=lone, hints={}, candidates=[], facts={}))
        session.add(StoredDecision(id="young", ts=NOW, hints={}, candidates=[], facts={}))
        session.add(StoredLoan(job_id=77_777, restart=0, profile="1g.10gb", state="ended", decided=lone, ended=lone))
        session.add(Action(ts=lone, job_id=77_777, restart=0, kind="throttle", dry_run=False))
        for node in ("n1", "n2"):
            for step in range(20):
                session.add(
                    SupplyChange(node=node, ts=NOW - (900 - step) * DAY, version=step, counts={"1g.10gb": step})
                )
            for seq in range(1, 101):
                at = NOW - (900 - 8 * seq) * DAY
                kind = {1: "boot", 50: "boot", 60: "zombie"}.get(seq, "start")
                session.add(
                    NodeEvent(node=node, journal=f"j-{node}", seq=seq, ts=at, received=at, kind=kind, payload={})
                )
    with Session(store.engine) as session, session.begin():
        for number, run in enumerate(session.scalars(select(Run).where(Run.ended.is_not(None)).order_by(Run.id)), 1):
            run.lesson = number


def rows(store: Store) -> dict[str, dict[Any, dict[str, Any]]]:
    """Every row of every table by its key."""
    with store.reading() as connection:
        return {
            name: {
                tuple(row[column.name] for column in table.primary_key): dict(row)
                for row in connection.execute(select(table)).mappings()
            }
            for name, table in Base.metadata.tables.items()
        }


def expected(before: dict[str, dict[Any, dict[str, Any]]]) -> dict[str, set[Any]]:
    """The keys that must remain, according to the documentation and nothing else."""
    runs, leases, jobs = (list(before[name].values()) for name in ("runs", "leases", "jobs"))
    going = {id for run in runs if run["ended"] is None for id in (run["job_id"], run["array_job"])} - {None}
    held = {lease["run_id"] for lease in leases if lease["until"] is None or lease["until"] >= BEFORE}
    listed = {job["job_id"] for job in jobs if job["live"] or job["seen"] >= BEFORE}
    lent = {loan["job_id"] for loan in before["loans"].values() if loan["ended"] is None}
    newest = {max(run["id"] for run in runs), max(runs, key=lambda run: run["lesson"] or 0)["id"]}

    def stays(run: dict[str, Any]) -> bool:
        young = run["ended"] is None or run["ended"] >= BEFORE
        job = {run["job_id"], run["array_job"]} & going or run["job_id"] in listed | lent
        return bool(young or job or run["id"] in held | newest)

    left = [run for run in runs if stays(run)]
    known = {(run["job_id"], run["restart"]) for run in left}
    named = {run["job_id"] for run in left} | {run["array_job"] for run in left}
    used = {run["decision"] for run in left}
    live = {job["job_id"] for job in jobs if job["live"]}

    def keys(name: str, kept: Any) -> set[Any]:
        return {key for key, row in before[name].items() if kept(row)}

    oldest = {
        node: min((x["since"] for x in leases if x["until"] is None and x["node"] == node), default=BEFORE)
        for node in ("n1", "n2")
    }
    last_boot = {n: max(e["id"] for e in before["node_events"].values() if (e["node"], e["kind"]) == (n, "boot"))
                 for n in ("n1", "n2")}  # fmt: skip
    last_offer = {max(s["id"] for s in before["supply_changes"].values() if s["node"] == n) for n in ("n1", "n2")}
    return {
        "runs": {(run["id"],) for run in left},
        "leases": keys("leases", lambda row: row["run_id"] in {run["id"] for run in left}),
        "jobs": keys("jobs", lambda row: row["live"] or row["job_id"] in {run["job_id"] for run in left}),
        "loans": keys(
            "loans",
            lambda row: row["ended"] is None or row["ended"] >= BEFORE or (row["job_id"], row["restart"]) in known,
        ),
        "actions": keys("actions", lambda row: row["ts"] >= BEFORE or row["job_id"] in named | live),
        "decisions": keys("decisions", lambda row: row["ts"] >= BEFORE or row["id"] in used),
        "supply_changes": keys("supply_changes", lambda row: row["ts"] >= BEFORE or row["id"] in last_offer),
        "node_events": keys(
            "node_events",
            lambda row: (
                row["ts"] >= min(BEFORE, oldest[row["node"]])
                or (row["kind"] in ("boot", "zombie") and row["id"] >= last_boot[row["node"]])
            ),
        ),
    }


def prune(store: Store, lessons: int = 10_000, *, most: int = 10**6) -> int:
    """Prune the record once; return the number of steps."""
    place: PruneCursor | None = PruneCursor()
    for step in range(most):
        if place is None:
            return step
        place = store.prune(BEFORE, lessons, place).place
    return most


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_only_old_rows_are_removed(database: str, seed: int) -> None:
    with open_store(database) as store:
        fill(store, seed)
        before = rows(store)
        should = expected(before)
        prune(store, most=seed * 7)  # interrupted, and started again
        prune(store)
        after = rows(store)
        assert {name: set(after[name]) for name in should} == should
        assert len(after["runs"]) < len(before["runs"])
        for name in set(Base.metadata.tables) - {"old_lessons", "journals"}:
            assert all(before[name][key] == row for key, row in after[name].items()), f"{name}: rows changed"
        prune(store)
        assert rows(store) == after, "a second pass finds nothing"


def test_lessons_are_unchanged_by_pruning(database: str) -> None:
    with open_store(database) as store:
        fill(store, 1)

        def taught() -> list[Any]:
            found = [lesson for lesson in store.lessons() if lesson.model and lesson.memory_mib]
            return [
                (x.number, x.run, x.user, x.state, x.model, x.batch, x.profile, x.gpu, x.slices, x.elapsed_s,
                 x.memory_mib, x.engine) for x in found
            ]  # fmt: skip

        before, newest = taught(), max(lesson.number for lesson in store.lessons())
        prune(store)
        assert taught() == before
        assert max(lesson.number for lesson in store.lessons()) == newest
        page = store.lessons(before[3][0], 10)
        assert [lesson.number for lesson in page] == sorted(lesson.number for lesson in page)
        assert page[0].number > before[3][0] and len(page) == 10
        with store.reading() as connection:
            kept = connection.scalar(select(func.count()).select_from(OldLesson)) or 0
        assert kept > 5


def test_only_the_newest_lessons_are_kept_up_to_the_limit(store: Store, tmp_path: Path) -> None:
    def kept(store: Store, lessons: int) -> list[int]:
        fill(store, 2)
        prune(store, lessons)
        with store.reading() as connection:
            return list(connection.scalars(select(OldLesson.number).order_by(OldLesson.number)))

    with open_store(f"sqlite:///{tmp_path}/other.db") as other:
        everything = kept(other, 10_000)
    assert len(everything) > 5
    assert kept(store, 5) == everything[-5:]


def test_run_and_lesson_numbers_are_not_reused(store: Store) -> None:
    """If the whole record is old, the newest run and lesson stay: readers continue from their numbers."""
    node = EventNode(store)
    for number in range(1, 6):
        store.upsert_jobs([{"job_id": number, "state": "PENDING", "submit": 1000.0}], live=(), now=1000.0)
        node.send(node.start(1000.0 + number, number), node.stop(2000.0 + number, number))
    with Session(store.engine) as session, session.begin():
        session.query(NodeEvent).update({"received": 2000.0})
    prune(store)
    assert states(store) == [(5, 0, "COMPLETED")]
    store.upsert_jobs([{"job_id": 6, "state": "PENDING", "submit": NOW - 1}])
    node.send(node.start(NOW, 6), node.stop(NOW + 9, 6))
    assert [lesson.number for lesson in store.lessons()] == [5, 6]


def test_repeated_old_events_do_not_restore_removed_runs(store: Store) -> None:
    node = EventNode(store)
    first = [node.start(1000.0, 1), node.stop(2000.0, 1), node.start(1001.0, 2), node.stop(2001.0, 2)]
    assert node.send(*first) == 4
    with Session(store.engine) as session, session.begin():
        session.query(NodeEvent).update({"received": 2000.0})
    prune(store)
    left = states(store)
    assert node.send(*first) == 4
    assert states(store) == left == [(2, 0, "COMPLETED")]
    assert node.send(node.start(NOW, 3)) == 5


def test_wrong_clock_of_a_node_does_not_remove_recent_rows(store: Store) -> None:
    """The node reports 2001; by the controller's clock it reported a moment ago, and Slurm listed the job today."""
    node = EventNode(store)
    store.upsert_jobs([job(7, "RUNNING"), job(8, "RUNNING")], live={7, 8}, now=NOW)
    node.send(*(node.start(1e9, number, slice_entry(number)) for number in (7, 8)))
    node.send(*(node.stop(1e9 + 5, number, slice_entry(number)) for number in (7, 8)))
    store.upsert_jobs([], live=set(), now=NOW + 10)
    prune(store)
    assert [id for id, _, _ in states(store)] == [7, 8]
    with store.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(NodeEvent)) == 4


KILLED = """
import sys
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.retention import PruneCursor
store, place = open_store(sys.argv[1]), PruneCursor()
while place is not None:
    place = store.prune(float(sys.argv[2]), 10_000, place).place
    print("step", flush=True)
"""


@pytest.mark.slow
def test_pruning_continues_after_a_process_was_killed(database: str) -> None:
    with open_store(database) as store:
        fill(store, 4)
        should = expected(rows(store))
        for steps in (2, 11):
            command = [sys.executable, "-c", KILLED, database, str(BEFORE)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for _ in range(steps):
                    process.stdout.readline()
                process.kill()
        found = rows(store)
        assert {lease["run_id"] for lease in found["leases"].values()} <= {id for (id,) in found["runs"]}
        prune(store)
        assert {name: set(rows(store)[name]) for name in should} == should


GPU = {"uuid": "GPU-a", "name": "H100", "mig": True, "geometry": {}}


def test_replaced_journals_are_removed_once_their_events_are(store: Store) -> None:
    """A node without a disk of its own, or in a cloud, has a new journal after each boot."""
    for boot in range(30):
        at = NOW - (700 - 20 * boot) * DAY
        node = EventNode(store, journal=f"{boot:02x}")
        node.send(node.event("state", at, gpus=[GPU], runs=[]), node.start(at, boot + 1), node.stop(at + 60, boot + 1))
        if boot == 3:
            node.seq += 5
            node.send(node.event("create", at))  # the events before it were lost with the node's disk
    for name, days in (("aa", 700), ("bb", 420)):
        node = EventNode(store, "n2", name)
        node.send(node.event("state", NOW - days * DAY, gpus=[GPU], runs=[]))
    with Session(store.engine) as session, session.begin():
        for received in session.scalars(select(NodeEvent)):
            received.received = received.ts
    prune(store)
    prune(store)
    with Session(store.engine) as session:
        kept = set(session.scalars(select(NodeJournal.journal)))
        assert kept == {*(f"{boot:02x}" for boot in range(14, 30)), "bb"}
        assert set(session.scalars(select(NodeEvent.journal))) <= kept, "no event without its journal"
    for name in ("n1", "n2"):
        assert store.read(gpu_seconds, NOW - 600 * DAY, NOW, (name,)) is None, "its GPUs at that time are not known"
    # it comes back with an old disk
    node = EventNode(store, journal="00")
    node.seq = 40
    assert node.send(node.start(NOW, 99)) == 0
    node.seq = 40
    assert node.send(node.start(NOW, 99)) == 41
    assert states(store)[-1] == (99, 0, "RUNNING")


def statements_of_prune(store: Store) -> list[tuple[str, Any]]:
    """Remove old rows; return the statements executed for it, with their values."""
    found: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: Any) -> None:
        found.append((statement, parameters))

    event.listen(store.engine, "before_cursor_execute", note)
    prune(store)
    event.remove(store.engine, "before_cursor_execute", note)
    return found


@pytest.mark.sqlite
def test_no_statement_scans_a_large_table(store: Store) -> None:
    """According to SQLite's query plan of each statement of a pass; nodes, journals and kept lessons are few."""
    fill(store, 5)
    found = statements_of_prune(store)
    plans = set()
    with store.reading() as connection:
        for statement, parameters in found:
            if statement.startswith(("SELECT", "DELETE", "UPDATE")):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
                steps = (row[3].replace("SCAN TABLE ", "SCAN ") for row in plan)  # the form before SQLite 3.36
                plans |= {(step, statement) for step in steps if step.startswith("SCAN")}
    allowed = {"SCAN nodes", "SCAN journals", "SCAN old_lessons"}
    assert {plan for plan, _ in plans if not any(plan.startswith(name) for name in allowed)} == set(), plans


def test_no_step_reads_all_journals(store: Store) -> None:
    fill(store, 5)
    found = statements_of_prune(store)
    queries = [text for text, _ in found if "FROM journals" in text]
    assert queries and all("LIMIT" in text or "journals.journal = " in text for text in queries)


def test_each_step_removes_few_rows(store: Store) -> None:
    fill(store, 6, runs=900)
    place: PruneCursor | None = PruneCursor()
    while place is not None:
        removed = store.prune(BEFORE, 10_000, place)
        place = removed.place
        assert all(count <= 200 for count in removed.rows.values()), removed


class Clockwork:
    """A writer that runs at once the work that it is given."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 0

    async def answer(self, work: Any, label: str) -> Any:
        return work(self.store)


@pytest.mark.slow
def test_migbatchd_prunes_as_configured(url: str) -> None:
    with open_store(url) as store:
        fill(store, 0)
        should = expected(rows(store))
        config = loads("[store]\nkeep = '400d'\n")
        retention = Retention(config, Clockwork(store), Metrics(), clock=lambda: NOW)
        total = asyncio.run(retention.once())
        assert {name: set(rows(store)[name]) for name in should} == should
        assert total["runs"] > 0 and total["node_events"] > 0
        assert asyncio.run(retention.once()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["400d", "forever"])
def test_progress_reports_are_removed_after_a_day_and_what_they_say_is_kept(url: str, keep: str) -> None:
    with open_store(url) as store:
        node = EventNode(store)
        sent = [node.start(NOW - 3 * DAY, 1)]
        sent += [
            node.event("progress", NOW - 3 * DAY + 120 * step, job=1, restart=0, items=50 * step, tasks=1, steps=step)
            for step in range(1, 501)
        ]
        node.send(*sent, node.stop(NOW - 2 * DAY, 1), node.start(NOW - 3000, 2))
        last = node.event("progress", NOW - 2000, job=2, restart=0, items=7, tasks=1)
        node.seq += 1  # the next event waits for a missing one
        node.send(last, node.event("progress", NOW - 3 * DAY + 5, job=1, restart=0, items=3, tasks=1))
        received = {"received": NodeEvent.ts}
        with Session(store.engine) as session, session.begin():
            session.query(NodeEvent).update(received)
        runs, progress = store.runs(), store.job_progress([1, 2])
        config = loads(f"[store]\nkeep = '{keep}'\n")
        retention = Retention(config, Clockwork(store), Metrics(), clock=lambda: NOW)
        assert asyncio.run(retention.once()) == {"node_events": 500}
        # a node that was cut off repeats what is not confirmed
        assert node.send(*sent) == 504
        assert (store.runs(), store.job_progress([1, 2])) == (runs, progress)
        with store.reading() as connection:
            kept = connection.execute(select(NodeEvent.kind, func.count()).group_by(NodeEvent.kind)).all()
        assert sorted(map(tuple, kept)) == [("progress", 502), ("start", 2), ("stop", 1)]


@pytest.mark.parametrize("keep", ["400d", "forever"])
def test_decisions_of_submissions_that_became_no_job_are_removed_after_a_day(url: str, keep: str) -> None:
    """Anybody makes as many as he likes, with `sbatch --test-only` or in a loop over a refused sbatch."""
    with open_store(url) as store:
        made = [
            {"id": f"{name}{hours}", "ts": NOW - hours * 3600, "uid": 1001, "chosen": "mig:1g.10gb:1"}
            for name in ("job", "refused")
            for hours in (1, 23, 25, 40)
        ]
        store.record_decisions(made)
        marked = [
            job(number, state, comment=f"x [mig:1g.10gb:1#job{hours}]")
            for number, (state, hours) in enumerate(
                (("RUNNING", 1), ("PENDING", 23), ("PENDING", 25), ("RUNNING", 40)), 1
            )
        ]
        store.upsert_jobs(marked, live={1, 2, 3, 4})
        retention = Retention(loads(f"[store]\nkeep = '{keep}'\n"), Clockwork(store), Metrics(), clock=lambda: NOW)
        assert asyncio.run(retention.once()) == {"decisions": 2}
        left = {id for (id,) in rows(store)["decisions"]}
        assert left == {"job1", "job23", "job25", "job40", "refused1", "refused23"}


def test_stops_before_removed_reports_are_not_taken_for_those_of_a_boot(url: str) -> None:
    """A node reports its boot days after its last report."""
    with open_store(url) as store:
        node = EventNode(store)
        node.send(node.start(NOW - 3 * DAY, 1), node.start(NOW - 3 * DAY, 2, slice_entry(1)))
        node.send(node.stop(NOW - 3 * DAY + 60, 1, exit_code=None))
        node.send(node.event("progress", NOW - 3 * DAY + 120, job=2, restart=0, items=5, tasks=1))
        with Session(store.engine) as session, session.begin():
            session.query(NodeEvent).update({"received": NodeEvent.ts})
        retention = Retention(loads(""), Clockwork(store), Metrics(), clock=lambda: NOW)
        assert asyncio.run(retention.once()) == {"node_events": 1}
        node.send(node.stop(NOW, 2, slice_entry(1), exit_code=None), node.event("boot", NOW, boot_id="boot-2"))
        assert states(store) == [(1, 0, "UNKNOWN"), (2, 0, "NODE_FAIL")]


def test_clock_years_ahead_at_boot_does_not_remove_the_record(url: str) -> None:
    """Before NTP has corrected it; slurmctld then ends jobs at that time, because their limits are over."""
    with open_store(url) as store:
        fill(store, 0)
        kept = select(Run.id).where(Run.ended >= NOW - 390 * DAY)
        with Session(store.engine) as session:
            recent = set(session.scalars(kept))
        retention = Retention(loads("[store]\nkeep = '400d'\n"), Clockwork(store), Metrics(), lambda: NOW + 4000 * DAY)
        asyncio.run(retention.once())
        with Session(store.engine) as session, session.begin():
            session.add(
                Run(job_id=10**6, restart=0, latest=True, state="TIMEOUT", ended=NOW + 4000 * DAY, slice_count=0)
            )
        asyncio.run(retention.once())
        with Session(store.engine) as session:
            assert recent <= set(session.scalars(kept))

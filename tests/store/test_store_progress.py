"""Reports of jobs and figures of the driver in the record; and ended runs as lessons."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.progress import RunProgressRow
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.recurring import recurring_runs
from slurm_migbatch.store.usage import held_slices
from slurm_migbatch.workload.lesson import Lesson
from tests.support.store_events import Node, job, run_of, slice_entry

GPU = {"uuid": "GPU-a", "index": 0, "minor": 0, "name": "NVIDIA H100 80GB HBM3", "mig": True, "geometry": {}}
DECISION = {
    "id": "abc", "ts": 90.0, "asked": "--gres=mig:auto", "bucket": "bert-large/infer/b32/128tok",
    "hints": {"model": "bert-large", "batch": 32, "input": 128, "input_unit": "tok"}, "chosen": "mig:1g.10gb:1",
    "predictor": "prior/1", "reason": "smallest", "message": "because", "source": "service",
    "candidates": [{"profile": "1g.10gb", "latency_ms": 20.0, "throughput_per_s": 100.0, "memory_mib": 5000}],
}  # fmt: skip


def report(node: Node, ts: float, job: int = 7, restart: int = 0, **fields: Any) -> dict[str, Any]:
    values = {"tasks": 1, "whole": True, "done": False, "refused": 0, "final": False, **fields}
    return node.event("progress", ts, job=job, restart=restart, **values)


def stop(node: Node, ts: float, job: int = 7, memory: float | None = None, **fields: Any) -> dict[str, Any]:
    return {**node.stop(ts, job, **fields), "memory_mib": memory}


def measured(store: Store, job: int = 7, restart: int = 0) -> tuple[Any, ...]:
    run = run_of(store, job, restart).run
    return tuple(run[f"measured_{name}"] for name in ("items", "throughput_per_s", "latency_ms", "memory_mib"))


def facts(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = run_of(store, 7).run["measured_facts"]
    return found


def test_the_last_report_counts(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), report(node, 130, items=300, throughput_per_s=10.0, latency_ms=40.0))
    assert measured(store) == (300, 10, 40, None)
    node.send(report(node, 160, items=900, throughput_per_s=15.0, latency_p99_ms=55.0, batch=16, final=True))
    node.send(stop(node, 161, memory=5120))
    assert measured(store) == (900, 15, None, 5120)
    assert (facts(store)["p99_ms"], facts(store)["batch"]) == (55, 16)
    assert facts(store)["by"] == {"items": "job", "throughput_per_s": "job", "memory_mib": "driver"}


def test_figures_of_nodes_are_added_and_memory_is_that_of_the_fullest_slice(store: Store) -> None:
    first, second = Node(store, "n1"), Node(store, "n2")
    for node, items, rate, memory in ((first, 100, 5.0, 900), (second, 50, 2.5, 1100)):
        node.send(
            node.start(100, 7),
            report(node, 120, items=items, throughput_per_s=rate, tasks=2, whole=False),
            stop(node, 121, memory=memory),
        )
    assert measured(store) == (150, 7.5, None, 1100)
    assert facts(store)["tasks"] == 4


def test_report_of_the_batch_script_is_not_added_to_those_of_the_tasks(store: Store) -> None:
    first, second = Node(store, "n1"), Node(store, "n2")
    first.send(first.start(100, 7), report(first, 130, items=160, throughput_per_s=8.0, done=True))
    second.send(second.start(100, 7), report(second, 120, items=50, throughput_per_s=2.5, whole=False))
    assert measured(store)[:2] == (160, 8)


def test_reports_after_the_clock_was_set_back_count(store: Store) -> None:
    """A node's events are ordered by their numbers, whatever its clock showed."""
    node = Node(store)
    node.send(node.start(100, 7), report(node, 90_000, items=50, throughput_per_s=5.0, steps=5))
    node.send(report(node, 130, items=200, throughput_per_s=7.0, steps=20))
    assert measured(store) == (200, 7, None, None)
    assert store.job_progress([7])[0].steps == 20
    node.send(report(node, 160, items=300, throughput_per_s=8.0, final=True), stop(node, 161))
    assert measured(store) == (300, 8, None, None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=4))
def test_events_received_in_any_order_count_once_and_in_sequence(
    tmp_path: Any, order: list[int], again: list[int]
) -> None:
    from sqlalchemy import text

    with open_store(f"sqlite:///{tmp_path}/x.db") as store:
        with store.engine.begin() as connection:
            for table in ("leases", "runs", "node_events", "journals", "nodes"):
                connection.execute(text(f"DELETE FROM {table}"))
        node = Node(store)
        events = [
            node.start(100, 7),
            report(node, 110, items=50, throughput_per_s=5.0),
            report(node, 120, items=100, throughput_per_s=6.0),
            report(node, 130, items=200, throughput_per_s=7.0, final=True),
            stop(node, 130, memory=700),
        ]
        for i in order:
            node.send(events[i])
        for i in again:
            node.send(events[i])
        node.send(*events)
        assert measured(store) == (200, 7, None, 700)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("items", -5), ("items", 1e16), ("items", "many"), ("items", float("nan")), ("throughput_per_s", 1e10),
        ("throughput_per_s", float("inf")), ("latency_ms", -1.0), ("latency_ms", [1]), ("batch", 1e9),
    ],
)  # fmt: skip
def test_impossible_figure_is_refused_and_logged(
    store: Store, caplog: pytest.LogCaptureFixture, field: str, value: Any
) -> None:
    node = Node(store)
    good = {"items": 100, "throughput_per_s": 10.0, "latency_ms": 30.0, "batch": 8}
    node.send(node.start(100, 7), report(node, 130, **{**good, field: value}))
    run = run_of(store, 7).run
    kept = {"items": run["measured_items"], "throughput_per_s": run["measured_throughput_per_s"]}
    kept |= {"latency_ms": run["measured_latency_ms"], "batch": facts(store)["batch"]}
    assert kept[field] is None
    assert {name: kept[name] for name in good if name != field and (field, name) != ("items", "throughput_per_s")} == {
        name: good[name] for name in good if name != field and (field, name) != ("items", "throughput_per_s")
    }
    assert any(field in record.getMessage() for record in caplog.records)
    assert field in facts(store)["doubts"][0]


def test_throughput_that_contradicts_the_run_time_is_refused(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), report(node, 160, items=1e6, throughput_per_s=10.0))
    assert measured(store)[:2] == (1e6, None)
    assert "take longer than its run time of 60 s" in facts(store)["doubts"][0]


def test_figure_missing_from_a_later_report_is_removed(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), report(node, 110, items=50, throughput_per_s=5.0))
    node.send(report(node, 120, items=60))
    assert measured(store)[:2] == (60, None)
    assert facts(store)["by"] == {"items": "job"}


@pytest.mark.parametrize("memory", [-1, 0, 20000, float("nan"), "much"])
def test_impossible_memory_figure_is_refused(store: Store, memory: Any) -> None:
    node = Node(store)
    node.send(node.start(100, 7), stop(node, 130, memory=memory))
    assert measured(store)[3] is None


def test_reports_of_unknown_runs_block_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(store)
    assert node.send(report(node, 110, items=5), node.event("progress", 111), node.start(112, 8)) == 3
    assert [row.run["job_id"] for row in store.runs()] == [8]
    assert "has no run" in caplog.text


def test_each_run_has_its_own_figures(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), report(node, 110, items=50), stop(node, 111))
    node.send(node.start(120, 7, restart=1), report(node, 130, restart=1, items=70))
    assert (measured(store, 7, 0)[0], measured(store, 7, 1)[0]) == (50, 70)


# -- saved progress: steps and checkpoints


def test_figures_from_a_node_that_the_job_is_not_on_do_not_count(store: Store) -> None:
    """Root on a node may report any job, even that it holds a slice there."""
    node, other = Node(store, "n1"), Node(store, "n2", "bb")
    node.send(node.start(100, 7))
    store.upsert_jobs([job(7, "RUNNING", nodes=("n1",), start=99.0)])
    figures = {"items": 9, "throughput_per_s": 1.0, "steps": 9, "checkpoint": 105.0, "oom": True}
    other.send(other.start(101, 7), report(other, 110, **figures), stop(other, 111, memory=9000, shared=True))
    assert measured(store) == (None, None, None, None)
    assert run_of(store, 7).run["measured_facts"] is None
    assert store.job_progress([7])[0].checkpoint is None
    node.send(report(node, 120, items=300, throughput_per_s=10.0))
    store.upsert_jobs([job(7, nodes=(), restarts=1, submit=130.0)])
    node.send(report(node, 121, items=310, throughput_per_s=10.0, final=True), stop(node, 122, memory=5120))
    assert measured(store) == (310, 10, None, 5120), "Slurm was faster than the end of the run"


def test_figures_of_other_nodes_are_dropped_once_slurm_reports_the_nodes(store: Store) -> None:
    node, other = Node(store, "n1"), Node(store, "n2", "bb")
    store.upsert_jobs([job(7)])
    other.send(other.start(60, 7), report(other, 70, items=9, checkpoint=70.0, oom=True))
    node.send(node.start(100, 7), report(node, 110, items=300))
    store.upsert_jobs([job(7, "RUNNING", nodes=("n1",), start=99.0)])
    assert measured(store) == (None, None, None, None)
    node.send(report(node, 120, items=310), stop(node, 122, memory=5120))
    store.upsert_jobs([job(7, "COMPLETED", nodes=("n1",), start=99.0, end=122.0)])
    assert measured(store) == (310, None, None, 5120)
    assert "oom" not in facts(store) and set(facts(store)["nodes"]) == {"n1"}


def test_completing_job_keeps_its_nodes_and_their_figures(store: Store) -> None:
    """Slurm then lists only the nodes that it still waits for."""
    first, second = Node(store, "n1"), Node(store, "n2", "bb")
    for node in (first, second):
        node.send(node.start(100, 7))
    store.upsert_jobs([job(7, "RUNNING", nodes=("n1", "n2"), start=99.0)])
    second.send(report(second, 110, items=50), stop(second, 120, memory=900))
    store.upsert_jobs([job(7, "COMPLETING", nodes=("n1",), start=99.0)])
    second.send(report(second, 121, items=60, final=True))
    store.upsert_jobs([job(7, "COMPLETING", nodes=(), start=99.0, reason="x")])
    first.send(report(first, 121, items=40, final=True), stop(first, 122, memory=800))
    store.upsert_jobs([{"job_id": 7, "restarts": 0, "state": "COMPLETED", "end": 122.0}])
    assert measured(store) == (100, None, None, 900)
    assert run_of(store, 7).run["nodes"] == "n1,n2"


def test_saved_progress_of_a_training_job_is_kept(store: Store) -> None:
    """A report without it changes nothing: files are read only at their ends."""
    node = Node(store)
    node.send(node.start(100, 7), report(node, 110, steps=40, restored=30))
    node.send(report(node, 130, items=320, throughput_per_s=16.0, batch=8, steps=70, checkpoint=129.5, ckpt_s=0.5))
    (progress,) = store.job_progress([7])
    assert progress == RunProgressRow(
        job=7, restart=0, profile="1g.10gb", started=100, ended=None, reported=130, items=320, items_per_s=16, batch=8,
        steps=70, checkpoint=129.5, ckpt_s=0.5, restored=30,
    )  # fmt: skip
    node.send(report(node, 150, items=400, throughput_per_s=16.0), stop(node, 151))
    (progress,) = store.job_progress([7])
    assert (progress.items, progress.steps, progress.checkpoint, progress.restored, progress.ended) == (
        400,
        70,
        129.5,
        30,
        151,
    )
    assert store.job_progress([8]) == [] == store.job_progress([])


def test_each_run_of_a_job_has_its_own_saved_progress(store: Store) -> None:
    node = Node(store)
    node.send(node.start(100, 7), report(node, 130, steps=50, checkpoint=130.0), stop(node, 131))
    node.send(
        node.start(200, 7, slice_entry(0, 4, "3g.40gb"), restart=1),
        report(node, 230, restart=1, steps=90, checkpoint=229.0, restored=50),
    )
    assert [(r.restart, r.profile, r.steps, r.restored) for r in store.job_progress([7])] == [
        (0, "1g.10gb", 50, None), (1, "3g.40gb", 90, 50),
    ]  # fmt: skip


def test_saved_progress_of_several_nodes_is_what_all_have_saved(store: Store) -> None:
    first, second = Node(store, "n1"), Node(store, "n2")
    for node, steps, checkpoint, seconds in ((first, 80, 125.0, 3.0), (second, 75, 128.0, 1.0)):
        node.send(node.start(100, 7), report(node, 130, steps=steps, checkpoint=checkpoint, ckpt_s=seconds))
    (progress,) = store.job_progress([7])
    assert (progress.steps, progress.checkpoint, progress.ckpt_s) == (75, 125, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", -1), ("steps", 1e16), ("steps", "many"), ("checkpoint", 39.0), ("checkpoint", 191.0),
     ("checkpoint", float("nan")), ("checkpoint", [1]), ("ckpt_s", -0.1), ("ckpt_s", 1e7), ("restored", "x")],
)  # fmt: skip
def test_impossible_saved_progress_is_refused_with_a_doubt(store: Store, field: str, value: Any) -> None:
    good = {"steps": 70, "checkpoint": 120.0, "ckpt_s": 0.5, "restored": 30}
    node = Node(store)
    node.send(node.start(100, 7), report(node, 130, **{**good, field: value}))
    (progress,) = store.job_progress([7])
    assert {name: getattr(progress, name) for name in good} == {**good, field: None}
    assert field in facts(store)["doubts"][0]


# -- lessons


def taught(store: Store, since: int = 0) -> list[Lesson]:
    return store.lessons(since)


def test_lesson_contains_all_that_is_known_of_its_run(store: Store) -> None:
    store.record_decisions([DECISION])
    store.upsert_jobs([job(7)])
    node = Node(store)
    node.send(node.event("inventory", 50, gpus=[GPU]))
    node.send(node.start(100, 7, decision="abc"), report(node, 159, items=600, throughput_per_s=12.0, latency_ms=25.0))
    assert taught(store) == []
    node.send(stop(node, 160, memory=5120))
    (lesson,) = taught(store)
    assert lesson == Lesson(
        number=1, run=lesson.run, job=7, user="alice", state="COMPLETED", model="bert-large", role="infer", batch=32,
        input=128, unit="tok", items_hint=None, profile="1g.10gb", gpu="NVIDIA H100 80GB HBM3", slices=1,
        elapsed_s=60, throughput_per_s=12, latency_s=0.025, latency_p99_s=None, memory_mib=5120, items=600,
    )  # fmt: skip
    assert taught(store, lesson.number) == []


def test_lesson_says_whether_the_job_reported_that_it_ran_out_of_memory(store: Store) -> None:
    store.record_decisions([DECISION])
    store.upsert_jobs([job(7)])
    node = Node(store)
    node.send(node.event("inventory", 50, gpus=[GPU]))
    node.send(node.start(100, 7, decision="abc"), report(node, 159, oom=True), stop(node, 160))
    assert [lesson.oom for lesson in taught(store)] == [True]


def test_runs_without_reports_or_decision_give_partial_lessons(store: Store) -> None:
    node = Node(store)
    held = [slice_entry(0), slice_entry(1), slice_entry(4, 4, "3g.40gb")]
    store.upsert_jobs([job(7)])
    node.send(node.start(100, 7, *held), {**node.stop(160, 7, *held), "memory_mib": 800})
    (lesson,) = taught(store)
    assert (lesson.model, lesson.profile, lesson.gpu, lesson.slices) == (None, None, None, 3)
    assert (lesson.elapsed_s, lesson.memory_mib, lesson.throughput_per_s) == (60, 800, None)


def test_nothing_is_learned_from_runs_that_slurm_has_not_listed(store: Store) -> None:
    """Root of a node can report jobs that do not exist, of any user, and with the decision of another user's job."""
    store.record_decisions([{**DECISION, "recurring": "key of alice's job"}])
    node = Node(store)
    node.send(node.event("inventory", 50, gpus=[GPU]))
    node.send(node.start(100, 4_000_000_000, decision="abc"), {**node.stop(160, 4_000_000_000), "memory_mib": 10})
    node.send(node.start(200, 7, decision="abc"), {**node.stop(260, 7), "memory_mib": 5000})
    assert taught(store) == store.read(recurring_runs, 0, 10) == []
    store.upsert_jobs([job(7, "COMPLETED", exit_code="0:0", nodes=["n1"], start=200.0, end=260.0)])
    assert [lesson.memory_mib for lesson in taught(store)] == [5000]
    assert [run.peak_mib for run in store.read(recurring_runs, 0, 10)] == [5000]


def test_figures_of_a_job_that_waits_count_once_slurm_has_it_on_the_node(store: Store) -> None:
    """Root of a node can report a pending job as started and ended there, out of memory for example."""
    store.record_decisions([{**DECISION, "recurring": "key of alice's job"}])
    node = Node(store)
    node.send(node.event("inventory", 50, gpus=[GPU]))
    store.upsert_jobs([job(number, nodes=()) for number in (7, 8, 9)], live=[7, 8, 9])
    for number in (7, 8, 9):
        ran = node.start(100, number, decision="abc"), {**node.stop(160, number, exit_code=1), "memory_mib": 5000}
        node.send(*ran, node.event("progress", 159, job=number, restart=0, oom=True))
    assert taught(store) == store.read(recurring_runs, 0, 10) == []
    assert held_s(store) == 0
    store.upsert_jobs([job(7, "FAILED", exit_code="1:0", nodes=("n1",), start=100.0, end=160.0)])  # a short job
    store.upsert_jobs([job(8, "CANCELLED", nodes=(), end=170.0)])
    store.upsert_jobs([job(9, "FAILED", exit_code="1:0", nodes=("n2",), start=400.0, end=500.0)])
    assert {run.job: run.peak_mib for run in store.read(recurring_runs, 0, 10)} == {7: 5000, 9: None}
    assert {lesson.job: lesson.memory_mib for lesson in taught(store)} == {7: 5000, 9: None}


def test_run_while_migbatchd_was_down_counts(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, nodes=())], live=[7])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(100, 7), {**node.stop(160, 7), "memory_mib": 5000})
    assert taught(store) == []
    store.upsert_jobs([], live=[])  # Slurm has forgotten it since
    assert [lesson.memory_mib for lesson in taught(store)] == [5000]
    assert held_s(store) == 60


def test_run_between_two_queries_counts_once_slurm_lists_the_next(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, nodes=())], live=[7])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(100, 7), {**node.stop(160, 7), "memory_mib": 5000})
    store.upsert_jobs([job(7, nodes=(), restarts=1, submit=161.0)], live=[7])
    assert [lesson.memory_mib for lesson in taught(store)] == [5000]
    assert held_s(store) == 60


def test_run_after_the_one_that_waits_does_not_count(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, nodes=())], live=[7])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(100, 7, restart=1))
    node.send({**node.stop(160, 7, restart=1), "memory_mib": 5000})
    assert taught(store) == [] and held_s(store) == 0
    store.upsert_jobs([job(7, "COMPLETED", restarts=1, nodes=("n1",), start=100.0, end=160.0)], live=[7])
    assert [lesson.memory_mib for lesson in taught(store)] == [5000]


def test_figures_of_an_earlier_run_on_another_node_do_not_count(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, "RUNNING", nodes=("n2",), start=99.0)], live=[7])
    own = Node(store, "n2")
    own.send(own.event("inventory", 50, gpus=[GPU]), own.start(100, 7), own.stop(160, 7))
    store.upsert_jobs([job(7, nodes=(), restarts=1, submit=161.0)], live=[7])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(100, 7), {**node.stop(160, 7), "memory_mib": 5000})
    assert [lesson.memory_mib for lesson in taught(store)] == [None]
    assert run_of(store, 7).run["nodes"] == "n2"


def test_later_run_while_migbatchd_was_down_counts_if_its_node_reports_late(store: Store) -> None:
    """Slurm may have forgotten the job before the node's report of its second run arrives."""
    node = Node(store)
    store.upsert_jobs([job(7, "RUNNING", nodes=("n1",), start=50.0, gid=100)], live=[7])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(50, 7))
    store.upsert_jobs([], live=[], now=900.0)
    node.send(node.stop(90, 7), node.start(100, 7, restart=1), {**node.stop(160, 7, restart=1), "memory_mib": 5000})
    assert sorted(lesson.memory_mib or 0 for lesson in taught(store)) == [0, 5000]
    assert held_s(store) == 100


def test_run_after_the_end_that_slurm_has_listed_does_not_count(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7, "COMPLETED", nodes=("n2",), start=50.0, end=90.0, gid=100)], live=[7])
    store.upsert_jobs([], live=[])
    node.send(node.event("inventory", 50, gpus=[GPU]), node.start(100, 7, restart=1), node.stop(160, 7, restart=1))
    assert held_s(store) == 0


def held_s(store: Store) -> float:
    with store.reading() as connection:
        return sum(row.seconds for row in held_slices(connection, RunFilter(), (), 0, 1000, 1000))


def test_lesson_is_repeated_when_its_run_changes_later(store: Store) -> None:
    node = Node(store)
    store.upsert_jobs([job(7), job(8)])
    node.send(node.start(100, 7, decision="abc"), node.start(101, 8), node.stop(150, 8), node.stop(160, 7))
    first = taught(store)
    assert [(lesson.job, lesson.number, lesson.model) for lesson in first] == [(8, 1, None), (7, 2, None)]
    store.record_decisions([DECISION])
    assert [(lesson.job, lesson.number, lesson.model) for lesson in taught(store, 2)] == [(7, 3, "bert-large")]
    store.upsert_jobs([job(7, "COMPLETED", exit_code="0:0", end=160.0)])
    assert taught(store, 3) == []
    store.upsert_jobs([job(8, "OUT_OF_MEMORY", exit_code="0:125", end=150.0)])
    assert [(lesson.job, lesson.state) for lesson in taught(store, 3)] == [(8, "OUT_OF_MEMORY")]


def test_reader_that_continues_by_number_misses_no_lesson(store: Store) -> None:
    """Runs end in a different order than they began, several in one message, and pages are short."""
    node = Node(store)
    jobs = list(range(1, 30))
    store.upsert_jobs([job(n) for n in jobs])
    node.send(*[node.start(100 + n, n, slice_entry(n % 7)) for n in jobs])
    for batch in itertools.batched(reversed(jobs), 4) if hasattr(itertools, "batched") else [tuple(jobs)]:
        node.send(*[node.stop(500 + n, n, slice_entry(n % 7)) for n in batch])
    seen: list[Lesson] = []
    while page := store.lessons(seen[-1].number if seen else 0, limit=3):
        seen += page
    assert {lesson.job for lesson in seen} >= {n for n in jobs if run_of(store, n).run["ended"] is not None}
    assert [lesson.number for lesson in seen] == sorted({lesson.number for lesson in seen})


def test_runs_of_earlier_schemas_are_lessons_too(url: str) -> None:
    from slurm_migbatch.store.engines import make_engine
    from slurm_migbatch.store.history import HISTORY
    from slurm_migbatch.store.migrations import migrate

    engine = make_engine(url, readonly=False)
    migrate(engine, HISTORY[:2])
    with engine.begin() as connection:
        from sqlalchemy import text

        for number, ended in ((1, "200.0"), (2, "NULL")):
            connection.execute(
                text(
                    "INSERT INTO runs (job_id, restart, reuse, latest, state, state_from, submitted, started, ended,"
                    f" began, span_class, slice_count) VALUES ({number}, 0, 0, TRUE, 'COMPLETED', 'slurm', 90.0, 100.0,"
                    f" {ended}, 90.0, 1, 1)"
                )
            )
    engine.dispose()
    with open_store(url) as store:
        assert [lesson.job for lesson in taught(store)] == [1]
        node = Node(store)
        store.upsert_jobs([job(5)])
        node.send(node.start(300, 5), node.stop(310, 5))
        assert [lesson.job for lesson in taught(store, 1)] == [5]

"""What `migbatch why` says about when a job can start, and about the jobs that it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.query.expected import describe, expect
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.catalog import GpuKind, MigNode, Partition, SiteCatalog

NOW = 1_000_000.0
KIND = GpuKind("h100-80gb", geometry("h100-80gb"), 989, 3350, 132)
NAMES = ("n1", "n2")
CATALOG = SiteCatalog(
    {"gpu": Partition("gpu", (KIND,))}, {name: MigNode(name, (KIND.name,), frozenset({"gpu"})) for name in NAMES}
)
NODES = [NodeRow(name, frozenset({"IDLE"}), partitions=("gpu",)) for name in NAMES]


def waits(gres: str, nodes: int = 1, **more) -> JobRow:
    return JobRow(100, partition="gpu", gres=f"gres/mig:{gres}", num_nodes=nodes, reason="Resources", **more)


def runs(job: int, gres: str, node: str, minutes: float | None) -> JobRow:
    end = None if minutes is None else NOW + 60 * minutes
    return JobRow(job, partition="gpu", state="RUNNING", gres=f"gres/mig:{gres}", nodes=(node,), end=end)


def expectation(row: JobRow, *running: JobRow, nodes=NODES) -> str:
    found = expect(row, [row, *running], nodes, CATALOG, NOW)
    return "" if found is None else describe(found, NOW)


@pytest.mark.parametrize(
    ("row", "running", "words"),
    [
        (waits("7g.80gb:1"), [], "as soon as its slices are created, if CPUs and memory are free"),
        (waits("7g.80gb:1"), [runs(1, "1g.10gb:1", "n1", 5)], "as soon as its slices are created"),
        (
            waits("7g.80gb:1"),
            [runs(1, "1g.10gb:1", "n1", 5), runs(2, "1g.10gb:1", "n2", 90)],
            "in 5 min at the latest, unless jobs of higher priority take the space: "
            "after the end of job 1 (1g.10gb:1 on n1)",
        ),
        (
            waits("3g.40gb:2"),
            [runs(1, "3g.40gb:1", "n1", 90), runs(3, "3g.40gb:1", "n1", 5), runs(2, "4g.40gb:1", "n2", None)],
            "in 1 h 30 min at the latest, unless jobs of higher priority take the space: "
            "after the end of job 3 (3g.40gb:1 on n1),",
        ),
        (
            waits("7g.80gb:1", 2),
            [runs(1, "1g.10gb:1", "n1", 5), runs(2, "1g.10gb:1", "n2", 9)],
            "in 9 min at the latest",
        ),
        (
            waits("7g.80gb:1", features="mig_node_n2"),
            [runs(1, "1g.10gb:1", "n1", 5), runs(2, "1g.10gb:1", "n2", None)],
            "",
        ),
        (
            waits("7g.80gb:1"),
            [runs(1, "1g.10gb:1", "n1", None), runs(2, "1g.10gb:1", "n2", None)],
            "after the end of job 1 (1g.10gb:1 on n1), of which not all have a time limit",
        ),
        (waits("7g.80gb:2"), [], ""),
    ],
)
def test_expected_start_and_the_jobs_waited_for_are_stated(row: JobRow, running: list[JobRow], words: str) -> None:
    text = expectation(row, *running)
    assert words in text if words else text == ""


def test_array_tasks_and_components_are_named_as_slurm_does() -> None:
    """The last task has the number of its array, and a component that of no job that users know."""
    task = replace(runs(7, "7g.80gb:1", "n1", 5), array_job=7, array_task="4")
    part = replace(runs(9, "7g.80gb:1", "n2", 9), het_job=8)
    text = expectation(waits("7g.80gb:1", 2), task, part)
    assert text.endswith("after the end of job 7_4 (7g.80gb:1 on n1), job 8+1 (7g.80gb:1 on n2)")


def test_requeued_job_that_is_still_ending_needs_no_time_limit() -> None:
    """Slurm shows the end of its next run until then, so its own is unknown."""
    ending = replace(runs(1, "1g.10gb:1", "n1", 60), state="COMPLETING", restarts=1).with_ending_run_count(NOW)
    text = expectation(waits("7g.80gb:1"), ending, runs(2, "1g.10gb:1", "n2", 90))
    assert text.startswith("in 0 min at the latest") and text.endswith("after the end of job 1 (1g.10gb:1 on n1)")


def test_closed_nodes_are_ignored_and_held_jobs_have_no_expected_start() -> None:
    closed = [NodeRow("n1", frozenset({"DOWN"}), partitions=("gpu",)), NODES[1]]
    assert "job 2 (1g.10gb:1 on n2)" in expectation(waits("7g.80gb:1"), runs(2, "1g.10gb:1", "n2", 9), nodes=closed)
    held = JobRow(100, partition="gpu", gres="gres/mig:7g.80gb:1", reason="JobHeldUser")
    assert expectation(held) == ""


def test_jobs_that_hold_cpus_or_memory_are_waited_for() -> None:
    """Whether they hold slices or not; of a job without, the CPUs are named."""
    node = replace(NODES[0], cpus=8, cpus_used=8, memory=1000, memory_used=900)
    small = replace(runs(1, "", "n1", 5), gres="", cpus=2, memory_per_node=500)
    large = replace(runs(2, "1g.10gb:1", "n1", 60), cpus=6, memory_per_node=400)
    after_small = (
        "in 5 min at the latest, unless jobs of higher priority take the space: after the end of job 1 (2 CPUs on n1)"
    )
    for row in (waits("1g.10gb:1", cpus=2), waits("1g.10gb:1", memory_per_node=600)):
        assert expectation(row, small, large, nodes=[node]) == after_small
    assert "job 1 (2 CPUs on n1), job 2 (1g.10gb:1 on n1)" in expectation(
        waits("1g.10gb:1", cpus=3), small, large, nodes=[node]
    )
    roomy = replace(node, cpus=64, memory=9000)
    assert "job 1" not in expectation(waits("7g.80gb:1", cpus=2), small, large, nodes=[roomy])


def test_jobs_on_a_node_are_waited_for_by_one_that_is_exclusive() -> None:
    node = replace(NODES[0], cpus=8, cpus_used=1)
    text = expectation(waits("1g.10gb:1", exclusive=True), replace(runs(1, "", "n1", 5), gres="", cpus=1), nodes=[node])
    assert text.startswith("in 5 min at the latest")

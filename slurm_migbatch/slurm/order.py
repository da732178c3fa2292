"""The order in which Slurm considers jobs, for backends that list them in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from slurm_migbatch.slurm.client import JobRow, merge_partitions

NO_TASK: Final = 0xFFFFFFFE
"""Slurm's "no such task"; greater than every task."""


def in_order(rows: Iterable[JobRow], tiers: Mapping[str, int]) -> list[JobRow]:
    """Return the rows in the order of `squeue --priority --sort=-p,V,i`: by tier of the partition, priority, time of
    submission, id.

    A waiting job has its place by the best of its partitions. Slurm keeps a priority for each of these where partitions
    have priorities of their own; a row has one.
    """
    listed = [
        (replace(row, partition=name), tiers.get(name, 0))
        for row in rows
        for name in (row.partition.split(",") if row.pending else [row.partition])
    ]
    listed.sort(key=lambda entry: (-entry[1], -entry[0].priority, entry[0].submit, *_place(entry[0])))
    return merge_partitions(row for row, _ in listed)


def _place(row: JobRow) -> tuple[int, int]:
    """Return a row's sort key: tasks of an array that are records of their own come before the rest of it."""
    if row.array_job is None or row.array_task is None:
        return row.job_id, NO_TASK
    return row.array_job, int(row.array_task) if row.array_task.isdigit() else NO_TASK

"""Sort jobs in the order in which Slurm considers them, for backends that list them in another order.

squeue does so too from 24.11 on in a cluster with capital letters in names of partitions: `squeue --priority` shows
these in lower case there, and sorts their jobs as those of tier 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from slurm_migbatch.slurm.client import JobRow, NodeRow, merge_partitions
from slurm_migbatch.slurm.fields import fields_of

NO_TASK: Final = 0xFFFFFFFE
"""Slurm's "no such task"; greater than every task."""


def has_capitals(rows: Iterable[NodeRow]) -> bool:
    """Return whether a partition of the nodes has capital letters in its name."""
    return any(name != name.lower() for names in {row.partitions for row in rows} for name in names)


def parse_tiers(output: str) -> dict[str, int]:
    """Return the tier of each partition from the output of `PARTITIONS_COMMAND`."""
    partitions = [fields_of(line) for line in output.splitlines()]
    return {
        values["PartitionName"]: int(tier)
        for values in partitions
        if "PartitionName" in values and (tier := values.get("PriorityTier", "")).isascii() and tier.isdigit()
    }


def in_order(rows: Iterable[JobRow], tiers: Mapping[str, int]) -> list[JobRow]:
    """Return the rows in the order of `squeue --priority --sort=-p,V,i`: by tier of the partition, priority, submit
    time, id.

    A pending job is sorted by the best of its partitions. Slurm keeps a priority for each of them if partitions
    have priorities of their own; a row has one.
    """
    listed = [
        (row if row.partition == name else replace(row, partition=name), tiers.get(name, 0))
        for row in rows
        for name in ((row.partitions if row.pending else ()) or (row.partition,))
    ]
    listed.sort(key=lambda entry: (-entry[1], -entry[0].priority, entry[0].submit, *_place(entry[0])))
    return merge_partitions(row for row, _ in listed)


def _place(row: JobRow) -> tuple[int, int]:
    """Return a row's sort key: array tasks with their own records come before the rest of the array."""
    if row.array_job is None or row.array_task is None:
        return row.job_id, NO_TASK
    return row.array_job, int(row.array_task) if row.array_task.isdigit() else NO_TASK

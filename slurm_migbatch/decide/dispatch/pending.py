"""Pending jobs without a place that may be re-typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from slurm_migbatch.decide.capacity.by_kind import Rest
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.excluded import user_text
from slurm_migbatch.workload.loans import LOAN, drops_old_gres_type

_PLAIN: Final = re.compile(r"[A-Za-z0-9 =._:/+-]*")
"""Characters of hints. A comment with anything else belongs to the user and is not changed."""


@dataclass(frozen=True)
class Pending:
    """A pending job, or tasks of an array, without a place.

    `copies` tasks of it have none; each requests `slice_count` slices of `profile`.
    """

    row: JobRow
    grant: Grant
    pool: frozenset[str]
    copies: int

    @property
    def profile(self) -> Profile:
        """The requested profile."""
        return self.grant.parts[0][0]

    @property
    def slice_count(self) -> int:
        """Number of slices of the profile that a task requests."""
        return self.grant.parts[0][1]

    @property
    def arrived(self) -> float:
        """Time since which it has been eligible, unix seconds."""
        return max(self.row.submit, self.row.eligible or 0.0)


def without_place(
    demands: Sequence[Demand], jobs: Mapping[int, JobRow], placed: Mapping[int, int], free_capacity: FreeCapacity
) -> Iterator[Pending]:
    """Yield the pending jobs that may be re-typed, according to Slurm's rows, in Slurm's order.

    Args:
        demands: jobs that could start with enough supply.
        placed: how many tasks of a job have a place.
        free_capacity: where nothing is left for as many slices as a job has, it is not yielded.
    """

    @cache
    def anything_fits(pool: frozenset[str], slice_count: int) -> bool:
        return any(free_capacity.count(pool, profile, slice_count, 1) for profile in free_capacity.kinds(pool))

    hopeless: set[tuple[frozenset[str], int]] = set()
    rest = Rest(demands)
    for position, demand in rest:
        if demand.nodes != 1 or len(demand.parts) != 1 or (demand.pool, demand.parts[0][1]) in hopeless:
            rest.drop(position)
            continue
        copies = demand.copies - placed.get(demand.job, 0)
        if copies < 1 or demand.apart is not None:
            continue
        row = jobs.get(demand.job)
        grant = None if row is None else marked(row.comment)
        if row is None or grant is None or grant.parts[0] != demand.parts[0] or not drops_old_gres_type(row.gres):
            continue
        if anything_fits(demand.pool, demand.parts[0][1]):
            yield Pending(row, grant, demand.pool, copies)
        else:
            hopeless.add((demand.pool, demand.parts[0][1]))
            rest.drop(position)


@lru_cache(maxsize=1 << 15)
def marked(comment: str) -> Grant | None:
    """Return the filter's grant of a job whose profile may have been its choice.

    None for every other job, and if the text before the marker has more than hints.
    """
    try:
        grant = parse_comment(comment)
    except GrantError:
        return None
    if grant is None or not grant.decision or grant.decision.startswith(LOAN) or len(grant.parts) != 1:
        return None
    return grant if _PLAIN.fullmatch(user_text(comment)) else None


def name_of(row: JobRow) -> str:
    """Return the name of a job.

    12 for a job, and for the common row of an array's tasks; 12_3 for a task with its own row.
    """
    if row.array_job is not None and row.array_task is not None and row.array_task.isdigit():
        return f"{row.array_job}_{row.array_task}"
    return str(row.job_id)

"""Lend idle MIG slices to training jobs: which job gets which slice, and which jobs grow.

A training job runs on one slice here; `decide.lending.allocation` has the rules for jobs on several. DeepBoot (Chen et
al., IEEE TPDS 2023) lends whole GPUs; loans of slices, and all of this module, are ours. It uses its ideas: value
relative to a fair share, restarts that must pay off, and ending the loans with the lowest loss first.

`lend` decides one round:

1. The expected need of inference (`reserve`) is placed into the free space first and stays there, so that it fits
   whatever is lent.
2. In Slurm's order each pending job gets the smallest of its profiles that fits, so that no job goes without
   because of another's larger slice.
3. Slices are enlarged, the largest value gained per slice first; then pairs on one GPU redistribute its space, and
pairs
   anywhere exchange their slices, if the sum of values rises. Running jobs grow only if
   `Hysteresis` allows, if the growth pays for their restart (`paid_worth`), and only while no job waits for room.

Placement on a GPU: every GPU's free space is planned as a whole (`mig.planning`), so loans and reserve are placed such
that the largest useful space remains. The GPU with the lowest loss over all profiles is chosen.

The opposite direction, which loans end so that inference can start, is `decide.lending.reclaim.reclaim_loans`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.capacity import Given, Grown, LendingCapacity
from slurm_migbatch.decide.lending.division import divide
from slurm_migbatch.decide.lending.values import (
    Division,
    ElasticJob,
    GpuCapacity,
    Lending,
    Reason,
)
from slurm_migbatch.mig.profile import Profile

_NO_ROOM: Final = ("room", "idle", "reserve")
"""Reasons of jobs that would run if there were more room."""


def lend(
    spaces: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    reserve: Mapping[Profile, int],
    now: float,
    calm: Hysteresis,
    releases: int | None = None,
) -> Lending:
    """Decide which jobs are released with which profile, and which grow.

    Args:
        spaces: GPUs that may lend.
        elastic_jobs: training jobs in Slurm's order, running ones anywhere among them.
        reserve: slices that inference is expected to need.
        now: unix seconds.
        calm: when a job may be changed and a slice lent.
        releases: maximum number of jobs to release or grow; None: unlimited.
    """
    board = LendingCapacity(spaces, elastic_jobs, now, calm)
    short = board.hold(reserve)
    limit = math.inf if releases is None else releases
    given: list[Given] = []
    lacking: dict[Hashable, Reason] = {}
    hopeless: dict[tuple[tuple[Profile, ...], frozenset[str] | None], Reason] = {}
    given += _resume(board, elastic_jobs, limit)
    resumed = {grant.elastic_job.job for grant in given}
    for elastic_job in elastic_jobs:
        if elastic_job.place is not None or elastic_job.job in resumed:
            continue
        if elastic_job.target is not None and board.vacated(elastic_job.target.node):
            lacking[elastic_job.job] = "idle"
            continue
        if len(given) >= limit:
            lacking[elastic_job.job] = "round"
            continue
        useful = board.useful(elastic_job)
        key = useful, elastic_job.nodes
        room = None if key in hopeless else board.smallest(elastic_job, useful)
        if room is None:  # space only shrinks, so no equal job will fit either
            if key not in hopeless:
                hopeless[key] = board.reason(elastic_job, useful)
            lacking[elastic_job.job] = hopeless[key]
            continue
        given.append(Given(elastic_job, board.worths(elastic_job, useful), room[1], room[0]))
        board.put(room[0], room[1])
    enough = not any(reason in _NO_ROOM for reason in lacking.values())
    board.raise_sizes(given, move=enough)  # space that a move leaves free is for jobs that wait for room
    board.exchange(given, move=enough)
    grown: list[Grown] = []
    if enough:
        grown = board.grow(elastic_jobs, int(min(limit - len(given), len(elastic_jobs))))
    grants, grows = board.placed(given, grown)
    divisions: Sequence[Division] = ()
    if not grows:
        touched = {(grant.place.node, grant.place.gpu) for grant in grants}
        untouched = [space for space in spaces if (space.node, space.gpu) not in touched]
        waiting = [job for job in elastic_jobs if lacking.get(job.job) in _NO_ROOM and job.target is None]
        divisions = divide(untouched, elastic_jobs, waiting, now, calm, int(min(limit, len(elastic_jobs))))
    return Lending(grants, grows, tuple(divisions), lacking, short)


def _resume(board: LendingCapacity, elastic_jobs: Sequence[ElasticJob], limit: float) -> list[Given]:
    """Give jobs that were stopped to grow the slices for which they were stopped, if they fit."""
    given: list[Given] = []
    for elastic_job in elastic_jobs:
        target = elastic_job.target
        if elastic_job.place is not None or target is None or len(given) >= limit:
            continue
        useful = board.useful(elastic_job)
        room = board.smallest(elastic_job, (target.profile,)) if target.profile in useful else None
        if room is not None:
            given.append(Given(elastic_job, board.worths(elastic_job, useful), room[1], room[0]))
            board.put(*room)
    return given

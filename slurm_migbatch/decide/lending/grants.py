"""Lend idle MIG slices to training jobs: which job gets which slice, and which jobs grow.

A training job runs on one slice here; `decide.lending.allocation` has the rules for jobs on several. DeepBoot (Chen et
al., IEEE TPDS 2023) lends whole GPUs. Loans of slices, and this whole module, are additions that use DeepBoot's ideas:
value relative to a fair share, restarts that must pay off, and ending the loans with the lowest loss first.

`lend` decides one round:

1. Jobs that were stopped for another slice get it, and the expected need of inference (`reserve`) is placed into the
   rest of the free space.
2. In Slurm's order each pending job gets the smallest of its profiles that fits next to the reserve, so that no job
   goes without because of another's larger slice, on nodes that have CPUs and memory for it.
3. Jobs for which only the reserve leaves no room start in its space, if they get at least their fair share
   (`_start_in_reserve`). What is left of the reserve stays, so that it fits whatever else is lent.
4. Slices are enlarged, the largest value gained per slice first; then pairs on one GPU redistribute its space, and
   pairs anywhere exchange their slices, if the sum of values rises. Running jobs grow only if
   `Hysteresis` allows, if the growth pays for their restart (`paid_worth`), and only while no job waits for room.

Placement on a GPU: every GPU's free space is planned as a whole (`mig.planning`), so loans and reserve are placed such
that the largest useful space remains. The GPU with the lowest loss over all profiles is chosen.

The opposite direction, which loans end so that inference can start, is `decide.lending.reclaim.reclaim_loans`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.capacity import LendingCapacity
from slurm_migbatch.decide.lending.division import divide
from slurm_migbatch.decide.lending.sizes import Assignment, exchange, give, grow, raise_sizes, releases_of
from slurm_migbatch.decide.lending.values import Division, ElasticJob, GpuCapacity, Lending, Reason, Target
from slurm_migbatch.mig.profile import Profile

_NO_CAPACITY: Final = ("capacity", "idle", "reserve")
"""Reasons of jobs that would run if there were more room."""
_OTHER_NODES: Final = (*_NO_CAPACITY, "resources")
"""Reasons of jobs that would run if there were more room on some nodes."""


def lend(
    capacities: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    reserve: Mapping[Profile, int],
    now: float,
    hysteresis: Hysteresis,
    releases: int = sys.maxsize,
) -> Lending:
    """Decide which jobs are released with which profile, and which grow.

    Args:
        elastic_jobs: training jobs in Slurm's order, running ones anywhere among them.
        reserve: slices that inference is expected to need.
        now: unix seconds.
        releases: maximum number of jobs to release or grow.
    """
    cluster = LendingCapacity(capacities, elastic_jobs, now, hysteresis)
    assignments = _resume(cluster, elastic_jobs, releases)
    short = cluster.place_reserve(reserve)
    resumed = {assignment.elastic_job.job for assignment in assignments}
    waiting = [job for job in elastic_jobs if job.place is None and job.job not in resumed]
    started, lacking = _start(cluster, waiting, releases - len(assignments))
    assignments += started
    kept_out = [job for job in waiting if lacking.get(job.job) == "reserve"]
    if kept_out and len(assignments) < releases:
        cluster.release_reserve()
        started = _start_in_reserve(cluster, kept_out, releases - len(assignments))
        assignments += started
        for assignment in started:
            del lacking[assignment.elastic_job.job]
        short = cluster.place_reserve(reserve)
    all_placed = not any(reason in _NO_CAPACITY for reason in lacking.values())
    # space that a move leaves free is for jobs that wait for room
    raise_sizes(cluster, assignments, move=all_placed)
    exchange(cluster, assignments, move=all_placed)
    grows = grow(cluster, elastic_jobs, releases - len(assignments)) if all_placed else ()
    grants = releases_of(cluster, assignments)
    divisions: Sequence[Division] = ()
    if not grows:
        touched = {(grant.node, grant.gpu) for grant in grants}
        untouched = [
            cluster.without_reserve(capacity) for capacity in capacities if (capacity.node, capacity.gpu) not in touched
        ]
        # no GPU is divided for a job for which one is being vacated, or that shares a slice
        lacking_capacity = [
            job
            for job in waiting
            if lacking.get(job.job) in _OTHER_NODES
            and not job.shares
            and not (job.target is not None and cluster.vacated(job.target))
        ]
        without_capacity = _without_capacity_soon(capacities, elastic_jobs, lacking_capacity, now, hysteresis)
        if without_capacity or not lacking_capacity:
            divisions = divide(untouched, elastic_jobs, without_capacity, now, hysteresis, releases)
    return Lending(grants, grows, tuple(divisions), lacking, short)


def _resume(cluster: LendingCapacity, elastic_jobs: Sequence[ElasticJob], limit: int) -> list[Assignment]:
    """Give jobs their target slices if these fit, on the planned GPUs first, then elsewhere.

    This comes before the reserve: no job is stopped for inference that is only expected, so a job that was stopped
    for another reason does not lose its slice to it.
    """
    assignments: list[Assignment] = []
    unplaced: list[tuple[ElasticJob, Target]] = []

    for elastic_job in elastic_jobs:
        target = elastic_job.target
        if elastic_job.place is not None or target is None or target.profile not in cluster.useful(elastic_job):
            continue
        gpu = cluster.gpu_of(elastic_job, target) if len(assignments) < limit else None
        if gpu is not None:
            assignments.append(give(cluster, elastic_job, gpu, target.profile))
        else:
            unplaced.append((elastic_job, target))
    for elastic_job, target in unplaced:
        placement = cluster.smallest(elastic_job, (target.profile,)) if len(assignments) < limit else None
        if placement is not None:
            assignments.append(give(cluster, elastic_job, *placement))
    return assignments


def _start(
    cluster: LendingCapacity, waiting: Sequence[ElasticJob], most: int
) -> tuple[list[Assignment], dict[int, Reason]]:
    """Give each pending job the smallest of its profiles that fits; also return why others get none."""
    started: list[Assignment] = []
    lacking: dict[int, Reason] = {}
    hopeless: dict[object, Reason] = {}
    for elastic_job in waiting:
        if elastic_job.target is not None and cluster.vacated(elastic_job.target):
            lacking[elastic_job.job] = "idle"
            continue
        if len(started) >= most:
            lacking[elastic_job.job] = "round"
            continue
        useful = cluster.useful(elastic_job)
        key = useful, elastic_job.nodes, elastic_job.cpus, elastic_job.memory
        gpu = None if key in hopeless else cluster.smallest(elastic_job, useful)
        if gpu is None:  # space only shrinks, so no equal job will fit either
            if key not in hopeless:
                hopeless[key] = cluster.reason(elastic_job, useful)
            lacking[elastic_job.job] = hopeless[key]
            continue
        started.append(give(cluster, elastic_job, *gpu))
    return started, lacking


def _start_in_reserve(cluster: LendingCapacity, kept_out: Sequence[ElasticJob], most: int) -> list[Assignment]:
    """Start jobs in the space of the reserve, each on the smallest profile that is its fair share or more.

    Without them the space would be idle, and a job that would be pending loses only its start if inference needs the
    slice soon. A slice below the fair share would cost more: a job keeps it for as long as `Hysteresis` says, and
    meanwhile gets no larger one elsewhere.
    """
    started: list[Assignment] = []
    for elastic_job in kept_out:
        if len(started) >= most:
            break
        useful = cluster.useful(elastic_job)
        fair = cluster.fair(elastic_job, useful)
        placement = cluster.smallest(
            elastic_job, [profile for profile in useful if elastic_job.speeds[profile] >= fair]
        )
        if placement is not None:
            started.append(give(cluster, elastic_job, *placement, reserved=True))
    return started


def _without_capacity_soon(
    capacities: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    waiting: Sequence[ElasticJob],
    now: float,
    hysteresis: Hysteresis,
) -> list[ElasticJob]:
    """Return the jobs that have no room even after all loans that are about to end have left."""
    vacated = [_vacant(capacity) for capacity in capacities if capacity.leaving] if waiting else []
    if not vacated:
        return list(waiting)
    cluster = LendingCapacity(vacated, elastic_jobs, now, hysteresis)
    for elastic_job in elastic_jobs:
        target = elastic_job.target
        gpu = cluster.gpu_of(elastic_job, target) if elastic_job.place is None and target is not None else None
        if gpu is not None and target is not None:
            cluster.put(gpu, target.profile)
    without_capacity = []
    for elastic_job in waiting:
        placement = cluster.smallest(elastic_job, cluster.useful(elastic_job))
        if placement is None:
            without_capacity.append(elastic_job)
        else:
            cluster.put(*placement)
    return without_capacity


def _vacant(capacity: GpuCapacity) -> GpuCapacity:
    """Return a GPU as it will be after the loans that are about to end have left, with their CPUs and memory."""
    lent = tuple(loan for loan in capacity.lent if loan.slot not in capacity.leaving)
    return replace(capacity, lent=lent, leaving=(), reclaimed=None, cpus=inf, memory=inf)

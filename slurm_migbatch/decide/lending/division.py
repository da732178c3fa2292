"""Divide GPUs again for training jobs that do not fit, or run on a slice that is far too small for them.

Speed grows less than in proportion to the slice, so more jobs on a GPU usually get more work done in total: a job on
a whole GPU is stopped for two on half of it each. A restart costs time, so a division must recover its restarts within
`loan_s`, and every job is left unchanged for as long as `Hysteresis` says. DeepBoot (section IV) scales jobs down for
others in the same way, on whole GPUs; the search over slices is an addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from slurm_migbatch.decide.capacity.spare import by_size, fits, ordered
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.capacity import LendingCapacity
from slurm_migbatch.decide.lending.sizes import exchange, give, raise_sizes
from slurm_migbatch.decide.lending.values import NOTHING, Division, ElasticJob, GpuCapacity, Resources
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot, layout_of
from slurm_migbatch.mig.profile import Profile

MARGIN: Final = 0.1
"""Minimum extra work of a division over the previous one, in whole GPUs."""
_GPUS: Final = 8
"""GPUs tried for one job, those with the largest slices first."""
_JOBS: Final = 4
"""Jobs for which a division is searched in one round."""
_AT_ONCE: Final = Hysteresis(idle_s=0.0, rest_s=0.0)


@dataclass(frozen=True)
class _Plan:
    """A GPU with its changeable jobs: the slice of each, and work done in `loan_s`, in seconds of a GPU."""

    capacity: GpuCapacity
    jobs: tuple[ElasticJob, ...]
    profiles: Mapping[int, Profile]
    work: float
    changed: frozenset[int] = frozenset()


def divide(
    capacities: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    waiting: Sequence[ElasticJob],
    now: float,
    hysteresis: Hysteresis,
    most: int,
) -> list[Division]:
    """Return the GPUs worth dividing again for jobs that do not fit, or have slices that are far too small.

    Args:
        elastic_jobs: all jobs; running ones may be stopped if `hysteresis` allows.
        waiting: jobs that do not fit, in Slurm's order.
        most: maximum number of jobs to stop.
    """
    running = {job.job: job for job in elastic_jobs if job.place is not None}
    plans = [plan for capacity in capacities if (plan := _plan(capacity, running, now, hysteresis)) is not None]
    plans.sort(key=lambda plan: -max(by_size(profile)[0] for profile in plan.profiles.values()))
    divided: dict[int, _Plan] = {}
    stopped = 0
    movable = {job.job for plan in plans for job in plan.jobs}
    changed_jobs: set[int] = set()
    assigned: dict[str, Resources] = {}
    slow_jobs = sorted((job for job in running.values() if job.job in movable), key=_speed)
    for job in (*waiting[:_JOBS], *(slow_jobs[:_JOBS] if not waiting else ())):
        if job.job in changed_jobs:  # another division gives it another slice
            continue
        current = {number: divided.get(number, plan) for number, plan in enumerate(plans[:_GPUS])}
        best = _best(current, job, changed_jobs, assigned, hysteresis)
        if best is None:
            continue
        number, extended = best
        stops = len(extended.changed - current[number].changed)
        if stopped + stops > most:
            break
        stopped += stops
        divided[number] = extended
        changed_jobs |= extended.changed
        node = extended.capacity.node
        assigned[node] = assigned.get(node, NOTHING).plus(Resources(job.cpus, job.memory))
    return [
        Division(
            plan.capacity.node,
            plan.capacity.gpu,
            {job: plan.profiles[job] for job in plan.changed},
            len(plan.jobs),
        )
        for plan in divided.values()
    ]


def _plan(capacity: GpuCapacity, running: Mapping[int, ElasticJob], now: float, hysteresis: Hysteresis) -> _Plan | None:
    """Return a GPU whose division may change; None if no job on it may."""
    if not hysteresis.may_lend(now, capacity.idle_since, capacity.reclaimed) and not (
        capacity.own and capacity.reclaimed is None
    ):
        return None
    loans = [running[loan.job] for loan in capacity.lent if loan.job in running]
    jobs = [job for job in loans if _may_use(job, capacity) and _may_change(job, now, hysteresis)]
    if not jobs:
        return None
    profiles = {job.job: job.place.slot.profile for job in jobs if job.place is not None}
    return _Plan(capacity, tuple(jobs), profiles, math.fsum(_speed(job) for job in jobs) * hysteresis.loan_s)


def _best(
    plans: Mapping[int, _Plan],
    job: ElasticJob,
    changed_jobs: Set[int],
    assigned: Mapping[str, Resources],
    hysteresis: Hysteresis,
) -> tuple[int, _Plan] | None:
    """Return the number of the GPU that gains most by a division with one more job, and that division; None if none
    gains enough.
    """
    best: tuple[float, int, _Plan] | None = None
    current_work = _speed(job) * hysteresis.loan_s
    for number, plan in plans.items():
        if (
            job.job in plan.profiles
            or not _may_use(job, plan.capacity)
            or not _has_resources(job, plan.capacity, assigned)
        ):
            continue
        if not (changed_jobs - plan.changed).isdisjoint(plan.profiles):  # one of its jobs leaves for another GPU
            continue
        extended = _with_job(plan, job, hysteresis)
        if extended is None:
            continue
        gain = extended.work - plan.work - current_work
        if gain > MARGIN * hysteresis.loan_s and (best is None or gain > best[0]):
            best = gain, number, extended
    return None if best is None else best[1:]


def _with_job(plan: _Plan, job: ElasticJob, hysteresis: Hysteresis) -> _Plan | None:
    """Return the best division of a GPU with one more job; None if it does not fit."""
    all_jobs = frozenset(held.job for held in plan.jobs)
    groups = dict.fromkeys([*(plan.changed | {held.job} for held in plan.jobs), all_jobs])
    candidates = [divided for group in groups if (divided := _divided(plan, job, group, hysteresis)) is not None]
    return max(candidates, key=lambda divided: divided.work, default=None)


def _divided(plan: _Plan, job: ElasticJob, group: frozenset[int], hysteresis: Hysteresis) -> _Plan | None:
    """Return a GPU on which a group of its jobs and one more divide their slices and the free space."""
    slots = {loan.job: loan.slot for loan in plan.capacity.lent}
    sharing = [*[held for held in plan.jobs if held.job in group], job]
    shares = _shares(
        plan.capacity.geometry,
        (*plan.capacity.taken, *[slot for name, slot in slots.items() if name not in group]),
        tuple([slots.get(held.job) for held in sharing]),
        tuple([held.speed_items for held in sharing]),
    )
    if shares is None:
        return None
    profiles = {**plan.profiles, **{held.job: profile for held, (profile, _) in zip(sharing, shares, strict=True)}}
    jobs = (*plan.jobs, job)
    changed = frozenset([held.job for held, (_, keeps) in zip(sharing, shares, strict=True) if not keeps])
    work = math.fsum(
        min(
            held.speeds[profiles[held.job]] * (hysteresis.loan_s - (held.restart_s if held.job in changed else 0.0)),
            held.ends_s,
        )
        for held in jobs
    )
    return _Plan(plan.capacity, jobs, profiles, work, changed)


@lru_cache(maxsize=1 << 14)
def _shares(
    geometry: Geometry,
    fixed: tuple[Slot, ...],
    own: tuple[Slot | None, ...],
    speeds: tuple[tuple[tuple[Profile, float], ...], ...],
) -> tuple[tuple[Profile, bool], ...] | None:
    """Return for each of the jobs that divide a GPU its profile, and whether it keeps its slot.

    None if one of them gets no slice. Cached, because rounds repeat the query until a job comes or ends.

    Args:
        fixed: slots of others.
        own: the jobs' slots; None: it has none here.
        speeds: of each job on its profiles.
    """
    used = layout_of(fixed)
    sizes = _sizes(geometry, used, speeds)
    if sizes is None:
        return None
    keeps = [slot is not None and slot.profile == profile for slot, profile in zip(own, sizes, strict=True)]
    kept = layout_of(tuple([slot for slot, stays in zip(own, keeps, strict=True) if slot is not None and stays]))
    others = ordered(profile for profile, stays in zip(sizes, keeps, strict=True) if not stays)
    if kept and not fits(geometry, used.union(kept), others):
        keeps = [False] * len(sizes)
    return tuple(zip(sizes, keeps, strict=True))


def _sizes(
    geometry: Geometry, used: Layout, speeds: tuple[tuple[tuple[Profile, float], ...], ...]
) -> tuple[Profile, ...] | None:
    """Return the profiles of jobs with these speeds on a GPU next to its used slots; None if one gets none."""
    jobs = [ElasticJob(number, dict(items)) for number, items in enumerate(speeds)]
    cluster = LendingCapacity([GpuCapacity("", 0, geometry, used.slots)], jobs, 0.0, _AT_ONCE)
    assignments = []
    for job in jobs:
        gpu = cluster.smallest(job, cluster.useful(job))
        if gpu is None:
            return None
        assignments.append(give(cluster, job, *gpu))
    raise_sizes(cluster, assignments, move=False)
    exchange(cluster, assignments, move=False)
    return tuple(assignment.profile for assignment in assignments)


def _may_use(job: ElasticJob, capacity: GpuCapacity) -> bool:
    """Return whether a job can start on a node; up to Slurm 23.02 it cannot where it has just run."""
    return job.nodes is None or capacity.node in job.nodes


def _has_resources(job: ElasticJob, capacity: GpuCapacity, assigned: Mapping[str, Resources]) -> bool:
    """Return whether a node has CPUs and memory for one more job; `assigned`: by other divisions, of each node."""
    if job.place is not None and job.place.node == capacity.node:
        return True
    other = assigned.get(capacity.node, NOTHING)
    return job.cpus <= capacity.cpus - other.cpus and job.memory <= capacity.memory - other.memory


def _may_change(job: ElasticJob, now: float, hysteresis: Hysteresis) -> bool:
    """Return whether a running job may be stopped, and still runs for long enough that this can pay off."""
    stays = job.ends_s >= _speed(job) * hysteresis.loan_s
    return stays and not job.shares and hysteresis.may_change(now, job.since, job.restarts)


def _speed(job: ElasticJob) -> float:
    return job.speeds.get(job.place.slot.profile, 0.0) if job.place is not None else 0.0

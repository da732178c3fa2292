"""Divide GPUs anew among the training jobs that run there and one that has no room, or runs on a slice too small for it.

Speed grows less than the slice does, so more jobs on a GPU mostly get more work done in all: a job on a whole GPU is
stopped for two on half of it each. A restart costs time, so a division must earn its restarts back within `loan_s`, and
every job is left alone for as long as `Hysteresis` says. DeepBoot (section IV) scales jobs down for others in the same
sense, on whole GPUs; the search over slices is ours.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurm_migbatch.decide.capacity.spare import by_size, fits, ordered
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.capacity import Given, LendingCapacity
from slurm_migbatch.decide.lending.values import Division, ElasticJob, GpuCapacity
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile

MARGIN: Final = 0.1
"""A division must do so much more work than the former one, in whole GPUs."""
_GPUS: Final = 16
"""GPUs that are tried for one job, those first whose jobs have the largest slices."""
_JOBS: Final = 8
"""Jobs for which a division is sought in one round."""


@dataclass(frozen=True)
class _Plan:
    """A GPU with the jobs that may change there: what each has, and work done in `loan_s`, in seconds of a GPU."""

    space: GpuCapacity
    jobs: tuple[ElasticJob, ...]
    profiles: Mapping[Hashable, Profile]
    work: float
    changed: frozenset[Hashable] = frozenset()


def divide(
    spaces: Sequence[GpuCapacity],
    elastic_jobs: Sequence[ElasticJob],
    waiting: Sequence[ElasticJob],
    now: float,
    calm: Hysteresis,
    most: int,
) -> list[Division]:
    """Return the GPUs that are worth dividing anew for jobs that wait for room, or have much too small slices.

    Args:
        spaces: GPUs that may lend.
        elastic_jobs: all jobs; those that run may be stopped if `calm` lets them.
        waiting: jobs that wait for want of room, in Slurm's order.
        most: at most so many jobs are stopped.
    """
    running = {job.job: job for job in elastic_jobs if job.place is not None}
    plans = [plan for space in spaces if (plan := _plan(space, running, now, calm)) is not None]
    plans.sort(key=lambda plan: -max(by_size(profile)[0] for profile in plan.profiles.values()))
    divided: dict[int, _Plan] = {}
    gains: dict[int, float] = {}
    stopped = 0
    movable = {job.job for plan in plans for job in plan.jobs}
    poor = sorted((job for job in running.values() if job.job in movable), key=_speed)
    for job in (*waiting[:_JOBS], *(poor[:_JOBS] if not waiting else ())):
        best: tuple[float, int, _Plan] | None = None
        before = _speed(job) * calm.loan_s
        for number, plan in enumerate(plans[:_GPUS]):
            plan = divided.get(number, plan)
            if job.job in plan.profiles or (job.nodes is not None and plan.space.node not in job.nodes):
                continue
            more = _with(plan, job, now, calm)
            if more is None:
                continue
            gain = more.work - plan.work - before
            if gain > MARGIN * calm.loan_s and (best is None or gain > best[0]):
                best = gain, number, more
        if best is None:
            continue
        gain, number, more = best
        stops = len(more.changed - divided.get(number, plans[number]).changed)
        if stopped + stops > most:
            break
        stopped += stops
        divided[number] = more
        gains[number] = gains.get(number, 0.0) + gain
    return [
        Division(
            plan.space.node,
            plan.space.gpu,
            {job: plan.profiles[job] for job in plan.changed},
            len(plan.jobs),
            gains[number] / calm.loan_s,
        )
        for number, plan in divided.items()
    ]


def _plan(
    space: GpuCapacity, running: Mapping[Hashable, ElasticJob], now: float, calm: Hysteresis
) -> _Plan | None:
    """Return a GPU whose division may change; None where no job on it may."""
    if not calm.may_lend(now, space.idle_since, space.reclaimed) and not (space.own and space.reclaimed is None):
        return None
    jobs = [
        running[loan.job]
        for loan in space.lent
        if loan.job in running and calm.may_change(now, running[loan.job].since, running[loan.job].restarts)
    ]
    if not jobs:
        return None
    profiles = {job.job: job.place.slot.profile for job in jobs if job.place is not None}
    return _Plan(space, tuple(jobs), profiles, sum(_speed(job) for job in jobs) * calm.loan_s)


def _with(plan: _Plan, job: ElasticJob, now: float, calm: Hysteresis) -> _Plan | None:
    """Return the best division of a GPU with one job more; None where it has no room."""
    space = plan.space
    mine = {held.job for held in plan.jobs}
    fixed = tuple(loan for loan in space.lent if loan.job not in mine)
    emptied = replace(space, lent=fixed, idle_since=0.0, reclaimed=None)
    jobs = [replace(held, place=None, nodes=None) for held in (*plan.jobs, job)]
    board = LendingCapacity([emptied], jobs, now, calm)
    given = []
    for one in jobs:
        useful = board.useful(one)
        room = board.smallest(one, useful)
        if room is None:
            return None
        given.append(Given(one, board.worths(one, useful), room[1], room[0]))
        board.put(*room)
    board.raise_sizes(given, move=False)
    board.exchange(given, move=False)
    profiles = {grant.elastic_job.job: grant.profile for grant in given}
    here = {loan.job: loan.slot for loan in space.lent}
    kept = {held.job for held in plan.jobs if held.job in here and here[held.job].profile == profiles[held.job]}
    used = Layout((*space.taken, *(loan.slot for loan in fixed), *(here[name] for name in kept)))
    if kept and not fits(space.geometry, used, ordered(profiles[held.job] for held in jobs if held.job not in kept)):
        kept = set()
    work = 0.0
    for held in (*plan.jobs, job):
        speed = held.speeds[profiles[held.job]]
        work += speed * (calm.loan_s - (0.0 if held.job in kept else held.costs.full))
    return _Plan(space, (*plan.jobs, job), profiles, work, frozenset(profiles.keys() - kept))


def _speed(job: ElasticJob) -> float:
    return job.speeds.get(job.place.slot.profile, 0.0) if job.place is not None else 0.0

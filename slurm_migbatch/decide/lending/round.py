"""Decide one round: due orders, loans that end for inference, and training jobs to release. Pure.

Inference always comes first: pending inference (`reclaim.reclaim_loans`), supply's plan for it, the
forecast. Only the rest, if idle for long enough, is lent (`decide.lending.grants.lend`), in
Slurm's order of the training jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Final

from slurm_migbatch.decide.capacity.spare import loss
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.ledger import Cause
from slurm_migbatch.decide.lending.model import Kind, LendingRules, LendingView, LoanOrder, Round, RoundCapacity
from slurm_migbatch.decide.lending.reclaim import due, reclaim_loans, stop
from slurm_migbatch.decide.lending.values import Division, ElasticJob, GpuCapacity, Grow, LentSlot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import forgets

LACKING: Final[Mapping[str, str]] = {
    "profile": "no GPU that it can use has a profile between its min and max with enough memory",
    "quota": "its account has reached its quota of loans ([lending] quota)",
    "round": "other jobs come first in this round ([lending] most_releases)",
    "reserve": "inference is expected to need the free space ([lending] horizon_s and sure)",
    "idle": "the free slices have not been idle long enough, or were reclaimed recently ([lending] min_idle_s, rest_s)",
    "room": "no GPU has room for a slice between its min and max",
    "turn": "with this release of Slurm requeued jobs restart one at a time",
    "blackout": "nothing is lent at this time of day ([lending] blackout)",
}


def decide(view: LendingView, rules: LendingRules) -> Round:
    """Decide what to do now; the orders name each job at most once."""
    orders = due(view, rules)
    ended, capacity = reclaim_loans(view, rules)
    orders += ended
    busy = {order.job for order in orders}
    lending = lend(
        _lendable(view, capacity, busy),
        elastic_jobs := _elastic_jobs(view, rules, busy),
        view.reserve,
        view.now,
        rules.calm,
        0 if view.blackout else rules.most_releases,
    )
    lacking = {
        int(str(job)): LACKING["blackout" if view.blackout else reason] for job, reason in lending.lacking.items()
    }
    waiting = {int(str(elastic_job.job)) for elastic_job in elastic_jobs if elastic_job.place is None}
    lacking.update(dict.fromkeys(_without_quota(view, rules) - waiting, LACKING["quota"]))
    quota_left = view.quota_left(rules)
    accounts = {int(str(elastic_job.job)): elastic_job.account for elastic_job in view.elastic_jobs}
    targets: dict[int, tuple[Profile, str]] = {}
    if not ended and not view.blackout:
        later = not _may_return(view, rules)
        for grant in lending.grants:
            job = int(str(grant.job))
            row = view.job_views[job].row
            if job in view.early:
                if later:
                    lacking[job] = LACKING["turn"]
                    continue
                later = True
            account, slices = accounts[job], grant.profile.compute
            if slices > quota_left.get(account, slices):
                lacking[job] = LACKING["quota"]
                continue
            if account in quota_left:
                quota_left[account] -= slices
            why = f"{grant.profile} is idle, and no inference is expected to need it"
            away = tuple(sorted(view.away.get(job, ())))
            orders.append(LoanOrder(Kind.RELEASE, job, row.restarts, why, profile=grant.profile, away=away))
        orders += [_grow(view, rules, grow) for grow in lending.grows if int(str(grow.job)) not in busy]
        for division in lending.divisions:
            orders += _divide(view, rules, division)
        targets = {int(str(grow.job)): (grow.profile, grow.place.node) for grow in lending.grows}
        for division in lending.divisions:
            targets |= {int(str(job)): (profile, division.node) for job, profile in division.profiles.items()}
    else:
        reason = LACKING["blackout"] if view.blackout else "pending inference jobs come first"
        lacking.update({int(str(grant.job)): reason for grant in lending.grants})
    return Round(tuple(orders), lacking, targets)


def _may_return(view: LendingView, rules: LendingRules) -> bool:
    """Return whether a job may return early where it may have run before.

    slurmd up to 23.02 removes revoked credentials at most every two seconds. Of several jobs that return within that
    time it assumes for some that their Prolog has run; these are requeued once more.
    """
    for job, loan in view.loans.items():
        job_view = view.job_views.get(job)
        if job_view is None or not loan.restart or forgets(job_view.row.gres):
            continue
        since = loan.started or loan.decided
        if view.now - since < (rules.apart_s if loan.started is not None else rules.turn_s):
            return False
    return True


def _lendable(view: LendingView, capacity: RoundCapacity, busy: set[int]) -> list[GpuCapacity]:
    """Return the GPUs for lending: with inference's future slots, leaving jobs, and loans without a slot.

    A GPU with a leaving job is not lent from until it has left.
    """
    spaces: dict[tuple[str, int], GpuCapacity] = {}
    for space in view.spaces:
        key = space.node, space.gpu
        coming = capacity.spaces[key]
        if coming is space:
            spaces[key] = space
            continue
        mask = sum(slot.placement.mask for slot in coming.taken)
        lent = tuple(loan for loan in space.lent if not loan.slot.placement.mask & mask)
        leaving = len(lent) < len(space.lent) or key in view.passing or _leaves(view, space, busy)
        spaces[key] = replace(coming, lent=lent, reclaimed=inf if leaving else space.reclaimed)
    for promise in view.promises:
        for key, space in spaces.items():
            if promise.nodes is not None and space.node not in promise.nodes:
                continue
            if promise.profile in space.geometry and loss(space.geometry, space.used, (), promise.profile) is not None:
                (slot,) = plan_free(space.geometry, space.used, (promise.profile,)).slots
                spaces[key] = replace(space, lent=(*space.lent, LentSlot(slot, promise.job)))
                break
    return list(spaces.values())


def _leaves(view: LendingView, space: GpuCapacity, busy: set[int]) -> bool:
    jobs = [int(str(loan.job)) for loan in space.lent]
    return any(job in busy or (job in view.loans and view.loans[job].leaving) for job in jobs)


def _elastic_jobs(view: LendingView, rules: LendingRules, busy: set[int]) -> list[ElasticJob]:
    """Return pending jobs with the profiles that their account may have, and running ones.

    Those that are leaving count as new.
    """
    barred, quota_left = _without_quota(view, rules), view.quota_left(rules)
    elastic_jobs = []
    for elastic_job in view.elastic_jobs:
        job = int(str(elastic_job.job))
        if elastic_job.place is None and (job in busy or job in barred):
            continue
        has = elastic_job.place.slot.profile if elastic_job.place is not None else None
        if elastic_job.account in quota_left:
            max_compute = quota_left[elastic_job.account] + (has.compute if has is not None else 0)
            elastic_job = replace(
                elastic_job,
                speeds={p: v for p, v in elastic_job.speeds.items() if p.compute <= max_compute or p == has},
            )
        if has is not None:
            loan = view.loans.get(job)
            stays = job in busy or loan is None or loan.leaving or _stopped_often(elastic_job, rules, view.now)
            elastic_job = replace(elastic_job, since=view.now) if stays else elastic_job
        elastic_jobs.append(elastic_job)
    return elastic_jobs


def _stopped_often(elastic_job: ElasticJob, rules: LendingRules, now: float) -> bool:
    """Return whether a running job was stopped for larger slices as often as allowed, and recently."""
    return elastic_job.changes >= rules.max_restarts and now - elastic_job.since < rules.calm.most_s


def _without_quota(view: LendingView, rules: LendingRules) -> set[int]:
    """Return pending jobs whose account has no quota left for any of their profiles."""
    quota_left = view.quota_left(rules)
    return {
        int(str(elastic_job.job))
        for elastic_job in view.elastic_jobs
        if elastic_job.place is None
        and elastic_job.account in quota_left
        and elastic_job.speeds
        and all(profile.compute > quota_left[elastic_job.account] for profile in elastic_job.speeds)
    }


def _grow(view: LendingView, rules: LendingRules, grow: Grow) -> LoanOrder:
    why = f"{grow.profile} instead of {grow.before} makes it {grow.faster:.1f} times faster"
    return stop(view, rules, int(str(grow.job)), Cause.GROW, why)


def _divide(view: LendingView, rules: LendingRules, division: Division) -> list[LoanOrder]:
    """Return the orders that stop the jobs that are to get other slices; pending ones are released later."""
    why = f"GPU {division.gpu} of {division.node} does more work if divided anew among {division.jobs} jobs"
    running = {int(str(job.job)) for job in view.elastic_jobs if job.place is not None}
    jobs = [job for name in division.profiles if (job := int(str(name))) in running]
    return [stop(view, rules, job, Cause.DIVIDE, why) for job in jobs]

"""Decide one round: due orders, loans that end for inference, and training jobs to release. Pure.

Inference always comes first: pending inference (`reclaim.reclaim_loans`), supply's plan for it, the
forecast. Only the rest, if idle for long enough, is lent (`decide.lending.grants.lend`), in
Slurm's order of the training jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from slurm_migbatch.decide.capacity.spare import loss
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.loan import Cause
from slurm_migbatch.decide.lending.model import LendingRules, LendingView, LoanOrder, OrderKind, PendingLoan, Round
from slurm_migbatch.decide.lending.reclaim import due_orders, reclaim_loans, stop
from slurm_migbatch.decide.lending.values import Division, ElasticJob, GpuCapacity, Lending, LentSlot, Release
from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import drops_old_gres_type

LACKING: Final[Mapping[str, str]] = {
    "profile": "no GPU that it can use has a profile between its min and max with enough memory",
    "quota": "its account has reached its quota of loans ([lending] quota)",
    "round": "other jobs come first in this round ([lending] most_releases)",
    "reserve": "inference is expected to need the free space ([lending] horizon_s and sure), and no slice "
    "fits that is the job's equal share of what can be lent",
    "idle": "the free slices have not been idle long enough, or were reclaimed recently ([lending] min_idle_s, rest_s)",
    "resources": "nodes with room for a slice between its min and max lack the CPUs or the memory that it requests",
    "capacity": "no GPU has room for a slice between its min and max",
    "turn": "with this release of Slurm requeued jobs restart one at a time",
    "blackout": "nothing is lent at this time of day ([lending] blackout)",
}


def not_started(releases: int) -> str:
    """Return why a job is not released now that Slurm did not start after so many releases."""
    return (
        f"Slurm did not start it after {releases} releases: what it requests besides the slice (CPUs, memory) is not "
        "free where slices are idle, or a limit does not allow it a slice; it is released again later"
    )


def decide(view: LendingView, rules: LendingRules) -> Round:
    """Decide what to do now; the orders name each job at most once."""
    orders = due_orders(view, rules)
    ended, coming = reclaim_loans(view, rules)
    orders += ended
    busy = {order.job for order in orders}
    elastic_jobs = _elastic_jobs(view, rules, busy)
    lacking: dict[int, str] = {}
    if view.blackout:  # only jobs that were stopped for another slice are considered
        kept_out = [job.job for job in elastic_jobs if job.place is None and not job.stopped]
        lacking = dict.fromkeys(kept_out, LACKING["blackout"])
    waiting = {elastic_job.job for elastic_job in elastic_jobs if elastic_job.place is None}
    elastic_jobs = [elastic_job for elastic_job in elastic_jobs if elastic_job.job not in lacking]
    lending = lend(
        _lendable(view, coming, busy),
        elastic_jobs,
        view.reserve,
        view.now,
        rules.hysteresis,
        rules.most_releases,
    )
    lacking |= {job: LACKING[reason] for job, reason in lending.lacking.items()}
    lacking.update(dict.fromkeys(_without_quota(view, rules) - waiting, LACKING["quota"]))
    if ended:
        lacking.update({grant.job: "pending inference jobs come first" for grant in lending.grants})
        return Round(tuple(orders), lacking)
    quota_left = view.quota_left(rules)
    orders += _releases(view, rules, lending.grants, quota_left, lacking)
    targets: dict[int, tuple[Profile, str, int]] = {}
    if not view.blackout:
        stops, targets = _stops(view, rules, lending, quota_left)
        orders += [order for order in stops if order.job not in busy]
    return Round(tuple(orders), lacking, targets)


def _releases(
    view: LendingView,
    rules: LendingRules,
    grants: Sequence[Release],
    quota_left: dict[str, int],
    lacking: dict[int, str],
) -> list[LoanOrder]:
    """Return the orders that release jobs; adds to `lacking` why others wait, and takes from `quota_left`."""
    orders = []
    elastic_jobs = {elastic_job.job: elastic_job for elastic_job in view.elastic_jobs}
    turn_taken = not _may_return(view, rules)
    for grant in grants:
        job, row = grant.job, view.job_views[grant.job].row
        if job in view.early:
            if turn_taken:
                lacking[job] = LACKING["turn"]
                continue
            turn_taken = True
        if not _take(quota_left, elastic_jobs, {job: grant.profile}):
            lacking[job] = LACKING["quota"]
            continue
        expectation = "inference may need it soon" if grant.reserved else "no inference is expected to need it"
        why = f"{grant.profile} is idle, and {expectation}"
        away = tuple(sorted(view.away.get(job, ())))
        orders.append(LoanOrder(OrderKind.RELEASE, job, row.restarts, why, profile=grant.profile, away=away))
    return orders


def _stops(
    view: LendingView, rules: LendingRules, lending: Lending, quota_left: dict[str, int]
) -> tuple[list[LoanOrder], dict[int, tuple[Profile, str, int]]]:
    """Return the orders that stop jobs for other slices, and the targets; takes from `quota_left`."""
    orders: list[LoanOrder] = []
    targets: dict[int, tuple[Profile, str, int]] = {}
    elastic_jobs = {elastic_job.job: elastic_job for elastic_job in view.elastic_jobs}
    for grow in lending.grows:
        if _take(quota_left, elastic_jobs, {grow.job: grow.profile}):
            why = f"{grow.profile} instead of {grow.before} makes it {grow.faster:.1f} times faster"
            orders.append(replace(stop(view, rules, grow.job, Cause.GROW, why), again=True))
            targets[grow.job] = grow.profile, grow.node, grow.gpu
    for division in lending.divisions:
        if _take(quota_left, elastic_jobs, division.profiles):
            orders += _divide(view, rules, division)
            targets |= {job: (profile, division.node, division.gpu) for job, profile in division.profiles.items()}
    return orders, targets


def _take(quota_left: dict[str, int], known: Mapping[int, ElasticJob], profiles: Mapping[int, Profile]) -> bool:
    """Take from the accounts' quotas what these jobs get beyond their slices; False, without changes, if too little."""
    extra: Counter[str] = Counter()
    for job, profile in profiles.items():
        if known[job].account in quota_left:
            extra[known[job].account] += profile.compute - _counted(known[job])
    if any(count > max(0, quota_left[account]) for account, count in extra.items()):
        return False
    for account, count in extra.items():
        quota_left[account] -= max(0, count)
    return True


def _counted(elastic_job: ElasticJob) -> int:
    """Return the compute slices that count as lent to a job: those of its slice, or of the one that it is to get."""
    if elastic_job.place is not None:
        return elastic_job.place.slot.profile.compute
    return elastic_job.target.profile.compute if elastic_job.target is not None else 0


def _may_return(view: LendingView, rules: LendingRules) -> bool:
    """Return whether a job may return early where it may have run before.

    slurmd up to 23.02 removes revoked credentials at most every two seconds. Of several jobs that return within that
    time it assumes for some that their Prolog has run; these are requeued once more.
    """
    for job, loan in view.loans.items():
        job_view = view.job_views.get(job)
        if job_view is None or not loan.restart or drops_old_gres_type(job_view.row.gres):
            continue
        since = loan.started or loan.decided
        if passed_s(since, view.now) < (rules.apart_s if loan.started is not None else rules.turn_s):
            return False
    return True


def _lendable(view: LendingView, at_start: Mapping[tuple[str, int], GpuCapacity], busy: set[int]) -> list[GpuCapacity]:
    """Return the GPUs for lending: with inference's future slots, leaving jobs, and loans without a slot.

    A GPU with a leaving job is not lent from until it has left.
    """
    capacities: dict[tuple[str, int], GpuCapacity] = {}
    for capacity in view.capacities:
        key = capacity.node, capacity.gpu
        coming = at_start[key]
        if coming is capacity:
            capacities[key] = capacity
            continue
        mask = sum(slot.placement.mask for slot in coming.taken)
        lent = tuple(loan for loan in capacity.lent if not loan.slot.placement.mask & mask)
        leaving = (
            len(lent) < len(capacity.lent) or key in view.about_to_be_free or any(_leaving(view, capacity.lent, busy))
        )
        vacant = (
            () if capacity.reclaimed == inf else tuple(_leaving(view, lent, busy, view.about_to_be_free.get(key, 0)))
        )
        capacities[key] = replace(coming, lent=lent, reclaimed=inf if leaving else capacity.reclaimed, leaving=vacant)
    for pending_loan in view.pending_loans:
        _place_pending(pending_loan, capacities, busy)
    return list(capacities.values())


def _place_pending(
    pending_loan: PendingLoan, capacities: dict[tuple[str, int], GpuCapacity], busy: Collection[int]
) -> None:
    """Update the GPU on which a loan without a known slot is expected, and what its node has free."""
    cpus, memory = pending_loan.requested
    for key, capacity in capacities.items():
        if pending_loan.nodes is not None and capacity.node not in pending_loan.nodes:
            continue
        if pending_loan.gpu is not None and capacity.gpu != pending_loan.gpu:
            continue
        if pending_loan.gpu is not None and pending_loan.job in busy:
            # the jobs of this GPU are released together: supply knows released jobs, but not pending loans
            capacities[key] = replace(capacity, reclaimed=inf)
            return
        if cpus > capacity.cpus or memory > capacity.memory or pending_loan.profile not in capacity.geometry:
            continue
        if loss(capacity.geometry, capacity.used, (), pending_loan.profile) is None:
            continue
        (slot,) = plan_free(capacity.geometry, capacity.used, (pending_loan.profile,)).slots
        capacities[key] = replace(capacity, lent=(*capacity.lent, LentSlot(slot, pending_loan.job)))
        if not (cpus or memory):
            return
        for name in [name for name, other in capacities.items() if other.node == capacity.node]:
            other = capacities[name]
            capacities[name] = replace(other, cpus=other.cpus - cpus, memory=other.memory - memory)
        return


def _leaving(view: LendingView, lent: Iterable[LentSlot], busy: set[int], about_to_be_free: int = 0) -> Iterator[Slot]:
    """Yield the slots of loans that are about to end; `about_to_be_free`: bit mask of slices of jobs that complete."""
    for loan in lent:
        stopped = loan.job in busy or (loan.job in view.loans and view.loans[loan.job].leaving)
        if stopped or loan.slot.placement.mask & about_to_be_free:
            yield loan.slot


def _elastic_jobs(view: LendingView, rules: LendingRules, busy: set[int]) -> list[ElasticJob]:
    """Return pending jobs with the profiles that their account may have, and running ones.

    Those that are leaving, or were stopped too often, count as just started.
    """
    barred, quota_left = _without_quota(view, rules), view.quota_left(rules)
    elastic_jobs = []
    for elastic_job in view.elastic_jobs:
        job = elastic_job.job
        if elastic_job.place is None and (job in busy or job in barred):
            continue
        current_profile = elastic_job.place.slot.profile if elastic_job.place is not None else None
        if elastic_job.account in quota_left:
            max_compute = quota_left[elastic_job.account] + _counted(elastic_job)
            elastic_job = replace(
                elastic_job,
                speeds={
                    p: v for p, v in elastic_job.speeds.items() if p.compute <= max_compute or p == current_profile
                },
            )
        if current_profile is not None:
            loan = view.loans.get(job)
            stays = job in busy or loan is None or loan.leaving or _stopped_often(elastic_job, rules, view.now)
            elastic_job = replace(elastic_job, since=view.now) if stays else elastic_job
        elastic_jobs.append(elastic_job)
    return elastic_jobs


def _stopped_often(elastic_job: ElasticJob, rules: LendingRules, now: float) -> bool:
    """Return whether a running job was stopped for larger slices as often as allowed, and recently."""
    return elastic_job.changes >= rules.max_restarts and passed_s(elastic_job.since, now) < rules.hysteresis.most_s


def _without_quota(view: LendingView, rules: LendingRules) -> set[int]:
    """Return pending jobs whose account has no quota left for any of their profiles."""
    quota_left = view.quota_left(rules)
    return {
        elastic_job.job
        for elastic_job in view.elastic_jobs
        if elastic_job.place is None
        and elastic_job.account in quota_left
        and elastic_job.speeds
        and all(
            profile.compute > quota_left[elastic_job.account] + _counted(elastic_job) for profile in elastic_job.speeds
        )
    }


def _divide(view: LendingView, rules: LendingRules, division: Division) -> list[LoanOrder]:
    """Return the orders that stop the jobs that are to get other slices; pending ones are released later."""
    why = f"GPU {division.gpu} of {division.node} does more work if divided anew among {division.jobs} jobs"
    running = {job.job for job in view.elastic_jobs if job.place is not None}
    jobs = [job for job in division.profiles if job in running]
    return [replace(stop(view, rules, job, Cause.DIVIDE, why), again=True) for job in jobs]

"""Manage two training jobs on one slice, from the decision to the end: the lending loop's part for them.

    pair decided -> supply's plan names it -> the guest is given the GRES `mig:guest` and its host's node -> both run
        |                                            |
        +---- given up: its host leaves, or the guest has not started in time; it waits for a slice again

Only a job that does not fit shares (`pairs.pairs` chooses the host, and whether it waits instead). A guest is a
loan like any other, on its host's profile, but takes no space: if inference needs the slice, both are reclaimed,
and the remaining one of the two has it as its own loan.

A guest leaves its host if both do less together than one alone (`pairs.partings`), and a job that shared is stopped
before its time limit if it reaches it only by sharing (`pairs.renewals`): it continues from its checkpoint with a new
limit. Learned lengths and slowdowns are in `decide.lending.shared_runs`.

Slurm up to 23.02 does not forget former GRES types of a job (`workload.loans`): a former guest would wait for a free
`guest` forever. So with these releases there are no guests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.lending.loan import Cause, JobView, Place, State
from slurm_migbatch.decide.lending.model import LendingRules, LendingView, LoanOrder, OrderKind, Round
from slurm_migbatch.decide.lending.pairs import Host, Pair, Sharer, SharingRules, pairs, partings, renewals
from slurm_migbatch.decide.lending.reclaim import stop
from slurm_migbatch.decide.lending.round import LACKING
from slurm_migbatch.decide.lending.shared_runs import SharedRuns
from slurm_migbatch.decide.lending.values import ElasticJob
from slurm_migbatch.decide.snapshot import Report, Run, passed_s
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import drops_old_gres_type

REST_S: Final = 600.0
"""How long a pair that was given up is not tried again."""
LEAD_S: Final = 30.0
"""How long before its time limit, plus the time for its checkpoint, a job that is to get a new limit is stopped."""

_LACKING: Final = (LACKING["capacity"], LACKING["reserve"])


class SliceSharing:
    """Pairs that were decided and have not started, and the runs that have shared a slice."""

    def __init__(self, rules: SharingRules, *, enabled: bool) -> None:
        """Without `enabled` no pair is made; existing ones continue to their end."""
        self._enabled = enabled
        self.runs = SharedRuns(rules)
        self._pairs: dict[int, tuple[Pair, float]] = {}
        self._rest: dict[tuple[int, int], float] = {}
        self._beside: dict[Run, Run] = {}
        self._located: set[Run] = set()
        #: runs that have shared a slice, so that their reports are not those of a slice of their own
        self.shared: set[Run] = set()

    @property
    def wanted(self) -> dict[int, int]:
        """Pairs for supply to offer: second job -> first job."""
        return {guest: pair.host for guest, (pair, _) in self._pairs.items()}

    def update(
        self,
        now: float,
        facts: Mapping[str, NodeFacts],
        places: Mapping[Run, Place],
        job_views: Mapping[int, JobView],
        reports: Mapping[Run, Report],
    ) -> None:
        """Update the current pairs from the nodes' reports, and the latest reports of runs."""
        self._beside = dict(_both(facts))
        profile_of_run = {run: slot.profile for run, (_, _, slot) in places.items()}
        self._located = set(profile_of_run)
        self.shared = {run for run in self.shared | self._beside.keys() if run[0] in job_views}
        self.runs.update(now, job_views, profile_of_run, self._beside, reports, self.shared)

    def marked(self, view: LendingView) -> LendingView:
        """Return the view with the jobs marked that share a slice or are about to."""
        sharing = {run[0] for run in self._beside} | self.wanted.keys() | set(self.wanted.values())
        if not sharing:
            return view
        elastic_jobs = (replace(job, shares=job.job in sharing) for job in view.elastic_jobs)
        return replace(view, elastic_jobs=tuple(elastic_jobs))

    def add(self, view: LendingView, decided: Round, rules: LendingRules, offered: Mapping[int, str]) -> Round:
        """Return a round's orders with those for pairs.

        Args:
            offered: the pairs that supply has put into a plan: second job -> node.
        """
        orders = [*decided.orders, *self._together(view, rules, decided.orders)]
        orders += self._ends(view, rules, {order.job for order in orders})
        busy = {order.job for order in orders}
        self._give_up(view, rules, busy)
        later = [*self._back(view, busy), *self._starts(view, offered, busy)]
        if self._enabled and not view.blackout:
            self._decide(view, decided, rules, busy | {order.job for order in later})
        lacking = {job: why for job, why in decided.lacking.items() if job not in self._pairs}
        lacking |= {guest: f"it is about to start {pair.why}" for guest, (pair, _) in self._pairs.items()}
        return replace(decided, orders=(*orders, *later), lacking=lacking)

    # -- ends of pairs ---------------------------------------------------------------------------------------------

    def _together(self, view: LendingView, rules: LendingRules, orders: Sequence[LoanOrder]) -> Iterator[LoanOrder]:
        """Yield the orders that end the other loan of a slice too: inference gets the slice when both have left."""
        ordered_jobs = {order.job for order in orders}
        for order in orders:
            other = self._beside.get((order.job, order.restart))
            is_reclaim = order.kind in (OrderKind.SIGNAL, OrderKind.REQUEUE) and order.cause in (
                Cause.RECLAIM,
                Cause.FORECAST,
            )
            loan = view.loans.get(other[0]) if other is not None and is_reclaim else None
            if loan is not None and loan.state is State.RUNNING and loan.job_id not in ordered_jobs:
                why = f"{order.why}; it shares the slice of job {order.job}"
                yield stop(view, rules, loan.job_id, order.cause, why)

    def _ends(self, view: LendingView, rules: LendingRules, busy: set[int]) -> Iterator[LoanOrder]:
        """Yield the orders that end pairs that lose work, and runs that reach their limit only by sharing."""
        if not (self.shared or self._beside or self._pairs):
            return
        running = {
            job: loan
            for job, loan in view.loans.items()
            if loan.state is State.RUNNING
            and job not in busy
            and (job_view := view.job_views.get(job)) is not None
            and job_view.row.state == "RUNNING"
        }
        shared = [self._sharer(view, job) for job, loan in running.items() if (job, loan.restart) in self.shared]
        ended = set(renewals(shared, self.runs.rules, rules.grace_s + LEAD_S))
        for job in sorted(ended):
            yield stop(view, rules, job, Cause.LIMIT, "it reaches its time limit because it shared its slice")
        stay = running.keys() - ended
        hosts = [host for host in self._slices(view, busy | ended) if host.guest is not None and host.guest.job in stay]
        restart_s = max((elastic_job.restart_s for elastic_job in view.elastic_jobs), default=0.0)
        speeds = self._speeds(view, hosts)

        def measured(job: int, beside: int) -> float | None:
            return self.runs.slowdowns.measured((job, running[job].restart), (beside, running[beside].restart))

        for pair in partings(hosts, speeds, self.runs.rules, measured, restart_s):
            self._rest[pair.guest, pair.host] = view.now + REST_S
            yield stop(view, rules, pair.guest, Cause.PARTED, pair.why)

    # -- pairs that were decided -----------------------------------------------------------------------------------

    def _give_up(self, view: LendingView, rules: LendingRules, busy: set[int]) -> None:
        hosts = {
            host.sharer.job
            for host in (self._running(view, busy) if self._pairs else ())
            if (host.sharer.job, view.loans[host.sharer.job].restart) not in self._beside
        }
        for guest, (pair, since) in list(self._pairs.items()):
            job_view = view.job_views.get(guest)
            if job_view is not None and job_view.row.active and (guest, job_view.row.restarts) not in self._located:
                continue  # it is starting, so its host has no other guest
            late = passed_s(since, view.now) > rules.start_s
            if job_view is None or not job_view.row.pending or guest in busy or pair.host not in hosts or late:
                del self._pairs[guest]
                if late:
                    self._rest[guest, pair.host] = view.now + REST_S
        self._rest = {pair: until for pair, until in self._rest.items() if until > view.now}

    def _back(self, view: LendingView, busy: set[int]) -> Iterator[LoanOrder]:
        """Yield the orders that make guests without a host wait for a slice again."""
        for job, job_view in view.job_views.items():
            if not job_view.hints.guest or not job_view.row.pending or job in self._pairs or job in busy:
                continue
            loan = view.loans.get(job)
            if loan is None:
                why = "it is requeued and waits for a slice again"
                yield LoanOrder(OrderKind.RETYPE, job, job_view.row.restarts, why)
            else:
                why = loan.why_ended or "the job to share with has ended, or it did not start in time"
                yield LoanOrder(OrderKind.WITHDRAW, job, loan.restart, why, loan.cause or Cause.LATE)

    def _starts(self, view: LendingView, offered: Mapping[int, str], busy: set[int]) -> Iterator[LoanOrder]:
        for guest, (pair, _) in self._pairs.items():
            job_view, loan = view.job_views[guest], view.loans.get(pair.host)
            if guest in offered and job_view.hints.waiting and guest not in busy and loan is not None:
                order = LoanOrder(OrderKind.SHARE, guest, job_view.row.restarts, pair.why)
                yield replace(order, profile=loan.slice, node=offered[guest])

    # -- new pairs -------------------------------------------------------------------------------------------------

    def _decide(self, view: LendingView, decided: Round, rules: LendingRules, busy: set[int]) -> None:
        slices = list(self._slices(view, busy))
        not_available = busy | self._pairs.keys()
        waiting = [
            elastic_job
            for elastic_job in view.elastic_jobs
            if elastic_job.place is None and elastic_job.job not in not_available
        ]
        speeds = self._speeds(view, slices)
        accounts = {elastic_job.job: elastic_job.account for elastic_job in view.elastic_jobs}
        quota_left = view.quota_left(rules)
        sharers = [
            replace(
                self._sharer(view, elastic_job.job, elastic_job.needs_s),
                solo=not self._may_share(view, decided, elastic_job),
            )
            for elastic_job in waiting
        ]
        for pair in pairs(slices, sharers, speeds, self.runs.rules, self._rest.keys()):
            account, compute = accounts[pair.guest], view.loans[pair.host].slice.compute
            if compute > quota_left.get(account, compute):
                continue
            if account in quota_left:
                quota_left[account] -= compute
            self._pairs[pair.guest] = pair, view.now

    def _may_share(self, view: LendingView, decided: Round, elastic_job: ElasticJob) -> bool:
        job = elastic_job.job
        row = view.job_views[job].row
        single = row.tasks == 1 and row.num_nodes == 1 and not row.requested_nodes and drops_old_gres_type(row.gres)
        has_target = elastic_job.target is not None or job in decided.targets
        return single and not has_target and decided.lacking.get(job) in _LACKING

    def _slices(self, view: LendingView, busy: set[int]) -> Iterator[Host]:
        """Yield the slices with one job, and those with two or about to have two."""
        guests = {pair.host: guest for guest, (pair, _) in self._pairs.items()}
        for host in self._running(view, busy):
            job = host.sharer.job
            partner = self._beside.get((job, view.loans[job].restart))
            guest = guests.get(job) if partner is None else partner[0]
            if guest is None:
                yield host
            elif guest in view.job_views:
                yield replace(host, guest=self._sharer(view, guest))

    def _running(self, view: LendingView, busy: set[int]) -> Iterator[Host]:
        """Yield the first holder of each slice that is and remains on loan."""
        capacities = {(capacity.node, capacity.gpu): capacity for capacity in view.capacities}
        for elastic_job in view.elastic_jobs:
            job, place = elastic_job.job, elastic_job.place
            loan = view.loans.get(job)
            if place is None or loan is None or loan.state is not State.RUNNING or job in busy:
                continue
            capacity = capacities.get((place.node, place.gpu))
            if capacity is None or view.job_views[job].row.state != "RUNNING":
                continue
            memory_mib = capacity.geometry.info(place.slot.profile).memory_mib
            yield Host(self._sharer(view, job, elastic_job.needs_s), place.slot.profile, memory_mib)

    def _sharer(self, view: LendingView, job: int, needs_s: float | None = None) -> Sharer:
        job_view = view.job_views[job]
        row, hints = job_view.row, job_view.hints
        limit = row.time_limit_s if row.end is None else max(0.0, row.end - view.now)
        sharer = Sharer(
            job, row.uid, hints.model or "", needs_s, limit, hints.mem_mib, resumes=hints.signal is not None
        )
        return self.runs.with_history(sharer, job_view)

    @staticmethod
    def _speeds(view: LendingView, hosts: Iterable[Host]) -> dict[int, Mapping[Profile, float]]:
        speeds = {elastic_job.job: elastic_job.speeds for elastic_job in view.elastic_jobs}
        for host in hosts:
            if host.guest is not None:  # it has no place of its own, so its speed is not shown
                speeds.setdefault(host.guest.job, speeds[host.sharer.job])
        return speeds


def _both(facts: Mapping[str, NodeFacts]) -> Iterator[tuple[Run, Run]]:
    for node in facts.values():
        for gpu in node.gpus:
            if gpu.guests:
                holder_of = dict(gpu.leases)
                for slot, run in gpu.guests:
                    yield run, holder_of[slot]
                    yield holder_of[slot], run

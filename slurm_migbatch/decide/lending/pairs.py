"""Choose which pending training jobs share the slices of which running ones: SJF-BSBF on MIG slices. Pure.

After Lai et al., "Scheduling Deep Learning Jobs in Multi-Tenant GPU Clusters via Wise Resource Sharing" (IWQoS 2024,
arXiv 2407.13088), and the authors' code: the shortest first, at most two jobs on one slice, and only if the pair's mean
finish is earlier than if they run one after the other (`pair_test`); of several hosts the one with the earliest mean
finish.

Additions of this module, because a slice is not a whole GPU and its jobs belong to users:

- both are jobs of one user, and the memory of both together fits the slice with a margin. A job with unknown
  need shares with no job;
- the shortest first applies among the jobs of one user. Between users the order is Slurm's;
- neither may reach its time limit because it shares. The length of a job follows from its `items` and reports;
  otherwise it is assumed to need a part of its limit (`SharingRules.of_limit`), with the error of its user's earlier
  jobs (`decide.lending.run_lengths`), and without a limit a long time;
- slowdowns are measured ones of the two applications on slices of the profile if there are any, else computed from the
  SM activity of each alone, else an assumption (`SharingRules.slow`); a pair that turns out to do less than one alone
  is ended (`partings`);
- whether a job is better off next to another one now, or on a slice of its own when one becomes free, is found by
  simulating its user's queue to its end (`lookahead.plan`), with limits on jobs and steps. If the steps do not suffice
  the pair test decides.

Times are seconds, memory MiB; a slowdown says how many times longer a job takes next to the other one, at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final
from zlib import crc32

from slurm_migbatch.decide.lending.lookahead import PAIR, RULES, pair_test, plan
from slurm_migbatch.decide.lending.pair_finish import apart, finishes, together
from slurm_migbatch.decide.lending.pair_slowdowns import PairKey, costs_s, time_sliced, together_rate
from slurm_migbatch.decide.lending.run_lengths import LengthErrors
from slurm_migbatch.decide.lending.sharing_queue import QueuedTraining, SharingQueue, Slowdown, StepBudget
from slurm_migbatch.mig.profile import Profile

UNKNOWN_S: Final = 7 * 86_400.0
"""Remaining time of a job with neither a known length nor a limit."""

Speeds = Mapping[int, Mapping[Profile, float]]
"""By job, its speed on each profile that it may have, relative to the whole GPU."""


@dataclass(frozen=True)
class Sharer:
    """A training job.

    Attributes:
        uid: its user in Slurm.
        app: the name that slowdowns are stored under; empty if it names no model.
        left_s: remaining time on the whole GPU; None: unknown.
        limit_s: remaining time limit; None: no limit.
        memory_mib: the memory that it needs; None: unknown.
        solo: it may share with no job, and waits for a slice of its own.
        ran_s: how long it has worked so far, as if alone.
        whole_s: its whole time limit; None: none of it has passed.
        errors: errors of its user's earlier estimates.
        resumes: it can be stopped with a checkpoint.
        activity: by profile, the mean share (0 to 1) of a slice's SMs that it uses if alone; as far as known.
    """

    job: int
    uid: int
    app: str = ""
    left_s: float | None = None
    limit_s: float | None = None
    memory_mib: float | None = None
    solo: bool = False
    ran_s: float = 0.0
    whole_s: float | None = None
    errors: LengthErrors = field(default_factory=LengthErrors)
    resumes: bool = False
    activity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """A training job with its slice and the slice's memory; `guest` shares the slice already, or is about to."""

    sharer: Sharer
    profile: Profile
    memory_mib: float
    guest: Sharer | None = None


@dataclass(frozen=True)
class SharingRules:
    """Assumptions and limits.

    Attributes:
        slowdown: of an unknown pair. At 1.5 equal jobs are as well off one after the other, so that only short ones
            next to long ones share.
        measured: slowdowns of known pairs.
        assumed: slowdown of an unknown pair by profile, where it is not `slowdown`.
        spare: part of the slice's memory that stays free.
        of_limit: the part of its time limit that a job of unknown length is assumed to need.
        gain: by how much the mean finish must be earlier, relatively, if the pair test decides; a margin for
            uncertainty.
        most: maximum number of pairs in one round.
        depth: number of pending jobs simulated for each user and profile; 0: the pair test alone decides.
        steps: simulation steps of one round (see `StepBudget`), divided among users and profiles. The starts of
            one rule are always simulated to their end, so that a round may take up to 1.75 times as many, and three
            more for each slice.
        tries: number of single changes tried on the starts of the best rule.
        cases: number of simulated lengths of each job of unknown length, equally probable; 1: the median.
        late: highest probability with which a job of unknown length, which cannot be stopped with a checkpoint, may
            reach its time limit only because it shares.
        renewed_s: minimum time limit for stopping a job before it, if possible, to continue with a new limit
            (`renewals`). A shorter one leaves too little time; if sharing reaches it, that much work is lost.
        worth: minimum work of two together relative to one alone. Less is refused, and ended when measured.
    """

    slowdown: float = 1.5
    measured: Mapping[PairKey, float] = field(default_factory=dict)
    assumed: Mapping[str, float] = field(default_factory=dict)
    spare: float = 0.1
    of_limit: float = 0.5
    gain: float = 0.05
    most: int = 4
    depth: int = 16
    steps: int = 8000
    tries: int = 2
    cases: int = 4
    late: float = 0.1
    renewed_s: float = 300.0
    worth: float = 0.9

    def slow(self, sharer: Sharer, other: Sharer, profile: Profile) -> float:
        """Return how many times longer `sharer` takes next to `other` on a slice of the profile."""
        name = str(profile)
        known = self.measured.get((sharer.app, other.app, name), self.measured.get((sharer.app, other.app, "")))
        if known is None:
            own, others = sharer.activity.get(name), other.activity.get(name)
            if own is not None and others is not None:
                known = time_sliced(own, others)[0]
            else:
                known = self.assumed.get(name, self.slowdown)
        return max(1.0, known)


@dataclass(frozen=True)
class Pair:
    """`guest` is to share the slice of `host`."""

    host: int
    guest: int
    why: str


def pairs(
    running: Sequence[Host],
    waiting: Sequence[Sharer],
    speeds: Speeds,
    rules: SharingRules = SharingRules(),
    resting: Collection[tuple[int, int]] = (),
) -> list[Pair]:
    """Return which jobs share slices, in the order of turns; a host has one guest.

    Args:
        waiting: pending jobs without a slice, in Slurm's order.
        resting: (guest, host) that are not to be tried now.
    """
    slurm_order = {sharer.job: number for number, sharer in enumerate(waiting)}
    turns = shortest_first(waiting, speeds, rules)
    groups = _groups(running, turns, speeds)
    pair_of: dict[int, Pair] = {}
    for uid, profile in groups:
        hosts = groups[uid, profile]
        queue = [
            sharer
            for sharer in turns
            if sharer.uid == uid and sharer.job not in pair_of and _runs(sharer, profile, speeds)
        ]
        budget = StepBudget(rules.steps // len(groups))
        group = _Group(profile, hosts, queue, speeds, rules, frozenset(resting), slurm_order)
        pair_of.update({pair.guest: pair for pair in group.pairs(budget)})
    return [pair_of[sharer.job] for sharer in turns if sharer.job in pair_of][: rules.most]


def partings(
    running: Iterable[Host],
    speeds: Speeds,
    rules: SharingRules,
    measured: Callable[[int, int], float | None],
    restart_s: float,
) -> list[Pair]:
    """Return the pairs whose guest should leave: together they do less than one alone, by more than a restart costs.

    Args:
        running, speeds, rules: as in `pairs`.
        measured: slowdown of a job next to another one, by both jobs' reports; None: unknown.
        restart_s: cost of stopping and restarting the guest.
    """
    parting = []
    for host in running:
        guest, host_job = host.guest, host.sharer
        if guest is None:
            continue
        measured_slowdowns = measured(guest.job, host_job.job), measured(host_job.job, guest.job)
        guest_s, host_s = (_alone(sharer, host.profile, speeds, rules) for sharer in (guest, host_job))
        if measured_slowdowns == (None, None) or guest_s is None or host_s is None:
            continue
        slow = (
            measured_slowdowns[0] or rules.slow(guest, host_job, host.profile),
            measured_slowdowns[1] or rules.slow(host_job, guest, host.profile),
        )
        if together_rate(*slow) < rules.worth and costs_s(guest_s, host_s, *slow) > restart_s:
            why = (
                f"beside job {host_job.job} it takes {slow[0]:.2f} times as long, and that one {slow[1]:.2f} times: "
                "together they do less than one alone"
            )
            parting.append(Pair(host_job.job, guest.job, why))
    return parting


def renewals(running: Iterable[Sharer], rules: SharingRules, lead_s: float) -> list[int]:
    """Return the jobs that reach their time limit within `lead_s` only because they shared a slice.

    They are to be stopped with a checkpoint: after a restart they have a new limit. `running`: those that have shared.
    """
    return [
        sharer.job
        for sharer in running
        if renewable(sharer, rules)
        and sharer.limit_s is not None
        and sharer.limit_s <= lead_s
        and sharer.ran_s < (sharer.whole_s or 0.0) - lead_s
    ]


def renewable(sharer: Sharer, rules: SharingRules) -> bool:
    """Return whether `renewals` keeps a job from ending at its time limit."""
    whole = sharer.limit_s if sharer.whole_s is None else sharer.whole_s
    return sharer.resumes and whole is not None and whole >= rules.renewed_s


def shortest_first(waiting: Sequence[Sharer], speeds: Speeds, rules: SharingRules) -> list[Sharer]:
    """Return the jobs in the order in which they are given a host: each user's shortest first.

    Each user keeps the positions that Slurm's order gives to the user's jobs, so no job is overtaken by another user's.
    A job's length is the expected time alone on the fastest slice that it may have; ties keep Slurm's order.
    """
    by_user: dict[int, list[Sharer]] = {}
    for sharer in waiting:
        by_user.setdefault(sharer.uid, []).append(sharer)
    by_length = {
        uid: iter(sorted(jobs, key=lambda sharer: _shortest_s(sharer, speeds, rules))) for uid, jobs in by_user.items()
    }
    return [next(by_length[sharer.uid]) for sharer in waiting]


def _groups(
    running: Iterable[Host], waiting: Iterable[Sharer], speeds: Speeds
) -> dict[tuple[int, Profile], list[Host]]:
    """Return one user's slices of one profile with one job each and at least one pending job that might share."""
    grouped: dict[tuple[int, Profile], list[Host]] = {}
    for host in running:
        if _runs(host.sharer, host.profile, speeds):
            grouped.setdefault((host.sharer.uid, host.profile), []).append(host)
    may_share = [sharer for sharer in waiting if not sharer.solo and sharer.memory_mib is not None]
    return {
        (uid, profile): hosts
        for (uid, profile), hosts in grouped.items()
        if any(host.guest is None and not host.sharer.solo for host in hosts)
        and any(sharer.uid == uid and _runs(sharer, profile, speeds) for sharer in may_share)
    }


@dataclass(frozen=True)
class _Group:
    """One user's slices of one profile, and the user's pending jobs for such a slice, the shortest first.

    `turns`: Slurm's order; `lefts`: remaining times of jobs, as far as computed.
    """

    profile: Profile
    hosts: Sequence[Host]
    queue: Sequence[Sharer]
    speeds: Speeds
    rules: SharingRules
    resting: frozenset[tuple[int, int]]
    turns: Mapping[int, int]
    lefts: dict[int, float] = field(default_factory=dict)

    def pairs(self, budget: StepBudget) -> list[Pair]:
        """Return the pairs that start now."""
        sharing = SharingQueue(len(self.hosts), self._slowdown(), budget)
        for host in self.hosts:
            host_task = self._queued(host.sharer)
            sharing.run(host_task, 1, [])
            if host.guest is not None:
                sharing.run(self._queued(host.guest), 0, [(host_task, 1)])
        hosts, guests = {host.sharer.job: host for host in self.hosts}, {guest.job: guest for guest in self.queue}
        sharing.queue = [self._queued(guest) for guest in guests.values() if guest.job not in sharing.tasks]
        pair_rule = pair_test(self.rules.gain)
        rules = (pair_rule, *(rule for rule in RULES if rule is not PAIR)) if self.rules.depth else (pair_rule,)
        starts = plan(sharing, rules, self.rules.depth, self.rules.tries)
        host_guests = [(hosts[start.partners[0][0]], guests[start.key]) for start in starts if start.partners]
        return [Pair(host.sharer.job, guest.job, self._reason(host, guest)) for host, guest in host_guests]

    def _queued(self, sharer: Sharer) -> QueuedTraining:
        turn = self.turns.get(sharer.job, 0)
        task = QueuedTraining(sharer.job, str(sharer.job), 1, self._left_s(sharer), turn)
        if sharer.left_s is None and sharer.limit_s is not None and self.rules.cases > 1:
            task.cases = tuple(
                _alone(sharer, self.profile, self.speeds, self.rules, part) or UNKNOWN_S
                for part in _parts(sharer.job, self.rules.cases)
            )
        return task

    def _left_s(self, sharer: Sharer) -> float:
        left = self.lefts.get(sharer.job)
        if left is None:
            left = self.lefts[sharer.job] = _alone(sharer, self.profile, self.speeds, self.rules) or UNKNOWN_S
        return left

    def _slowdown(self) -> Slowdown:
        """Return the function that gives slowdowns by job; pending jobs may share later if their memory fits."""
        rules = self.rules
        by_job = {str(sharer.job): sharer for sharer in self.queue}
        lone_hosts: dict[str, Host] = {}
        factors: dict[tuple[str, str], float] = {}
        for host in self.hosts:
            first, second = host.sharer, host.guest
            by_job[str(first.job)] = first
            if second is None:
                lone_hosts[str(first.job)] = host
            else:
                by_job[str(second.job)] = second
                factors[str(first.job), str(second.job)] = rules.slow(first, second, self.profile)
                factors[str(second.job), str(first.job)] = rules.slow(second, first, self.profile)
        memory_mib = min(host.memory_mib for host in self.hosts)

        def slowdown(own: str, other: str) -> float:
            factor = factors.get((own, other))
            if factor is None:
                sharer, partner = by_job[own], by_job[other]
                host = lone_hosts.get(other) or lone_hosts.get(own)
                guest = sharer if other in lone_hosts else partner
                may_share = _fit(sharer, partner, memory_mib if host is None else host.memory_mib, rules)
                if may_share and host is not None:
                    may_share = (guest.job, host.sharer.job) not in self.resting and self._in_time(host, guest)
                slowdowns = (
                    rules.slow(sharer, partner, self.profile),
                    rules.slow(partner, sharer, self.profile),
                )
                factor = factors[own, other] = (
                    slowdowns[0] if may_share and together_rate(*slowdowns) >= rules.worth else math.inf
                )
            return factor

        return slowdown

    def _in_time(self, host: Host, guest: Sharer) -> bool:
        """Return whether neither is likely to reach its time limit only because they share from now on."""
        (guest_s, host_s), (slow_guest, slow_host) = self._alone_s(host, guest), self._slow(host, guest)
        guest_end, host_end = finishes(guest_s, host_s, slow_guest, slow_host)
        return _likely_late(guest, guest_end, slow_host * host_s, slow_guest, self.rules) <= self.rules.late and (
            _likely_late(host.sharer, host_end, slow_guest * guest_s, slow_host, self.rules) <= self.rules.late
        )

    def _alone_s(self, host: Host, guest: Sharer) -> tuple[float, float]:
        return self._left_s(guest), self._left_s(host.sharer)

    def _slow(self, host: Host, guest: Sharer) -> tuple[float, float]:
        profile = self.profile
        return self.rules.slow(guest, host.sharer, profile), self.rules.slow(host.sharer, guest, profile)

    def _reason(self, host: Host, guest: Sharer) -> str:
        alone, slow = self._alone_s(host, guest), self._slow(host, guest)
        sooner = apart(*alone) - together(*alone, *slow)
        benefit = (
            f"both end {sooner:.0f} s sooner on average than one after the other"
            if sooner > 0
            else f"its user's {len(self.queue)} pending jobs end sooner on average than on separate slices"
        )
        return (
            f"beside job {host.sharer.job} on its {host.profile}: {benefit} "
            f"(slowed down {slow[0]:.2f} and {slow[1]:.2f} times)"
        )


def _fit(sharer: Sharer, other: Sharer, memory_mib: float, rules: SharingRules) -> bool:
    if sharer.memory_mib is None or other.memory_mib is None or sharer.solo or other.solo:
        return False
    return sharer.memory_mib + other.memory_mib <= (1 - rules.spare) * memory_mib


def _runs(sharer: Sharer, profile: Profile, speeds: Speeds) -> bool:
    return 0 < speeds.get(sharer.job, {}).get(profile, 0.0) < math.inf


def _alone(sharer: Sharer, profile: Profile, speeds: Speeds, rules: SharingRules, part: float = 0.5) -> float | None:
    """Return the remaining seconds of a job alone on that slice; None if it does not run there."""
    if not _runs(sharer, profile, speeds):
        return None
    if sharer.left_s is not None:
        return max(1.0, min(sharer.left_s / speeds[sharer.job][profile], UNKNOWN_S))
    if sharer.limit_s is None:
        return UNKNOWN_S
    left = sharer.errors.left_s(_expected_s(sharer, rules), sharer.ran_s, part)
    return max(1.0, min(left, sharer.limit_s or UNKNOWN_S))


def _likely_late(sharer: Sharer, end_s: float, beside_s: float, slow: float, rules: SharingRules) -> float:
    """Return the probability that a job reaches its time limit only because it shares.

    Args:
        end_s: its expected end. A length that the job stated is taken as exact.
        beside_s: maximum time for which the other one is next to it.
        slow: its slowdown meanwhile.
        sharer, rules: see there. A job that was allowed to exceed its limit counts as one without a limit.
    """
    limit = sharer.limit_s
    if limit is None or limit <= 0:
        return 0.0
    if sharer.resumes:
        return 0.0
    if sharer.left_s is not None:
        return float(end_s > limit)
    done_s = min(limit, beside_s) / slow + max(0.0, limit - beside_s)
    expected = _expected_s(sharer, rules)
    return sharer.errors.ends_within(expected, sharer.ran_s, limit) - sharer.errors.ends_within(
        expected, sharer.ran_s, done_s
    )


def _expected_s(sharer: Sharer, rules: SharingRules) -> float:
    """Return the expected length at submission of a job of unknown length."""
    whole = sharer.limit_s if sharer.whole_s is None else sharer.whole_s
    return max(1.0, rules.of_limit * (whole or 0.0))


@lru_cache(maxsize=1 << 14)
def _parts(job: int, cases: int) -> tuple[float, ...]:
    """Return the centres of `cases` equal parts of the probabilities, in an order that differs from job to job."""
    order = sorted(range(cases), key=lambda number: crc32(b"%d %d" % (job, number)))
    return tuple((number + 0.5) / cases for number in order)


def _shortest_s(sharer: Sharer, speeds: Speeds, rules: SharingRules) -> float:
    alone = [_alone(sharer, profile, speeds, rules) for profile in speeds.get(sharer.job, {})]
    return min((seconds for seconds in alone if seconds is not None), default=math.inf)

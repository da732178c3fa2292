"""Convert Slurm's queue to the demands that the planner places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import cast

from slurm_migbatch.decide.capacity.by_kind import ABSENT, SHARED, UNSETTLED, DemandQueue, KindNumbers
from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.decide.capacity.nodepools import NodePools, node_facts
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.mig.naming import reported_profile
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import GRES, LOAN

_job_id = attrgetter("job_id")

#: The type that only fills up the constant sum.
FILLER = "none"

#: A job that waits for its begin time is planned for this long before it, so that its supply is ready by then.
BEGIN_LEAD_S = 5.0

#: Pending reasons with which a job would start if its nodes offered its request. With every other reason it could not
#: start anyway: held (JobHeldUser, JobHeldAdmin, launch_failed_requeued_held), waiting for something
#: else (Dependency, Licenses, Reservation, JobArrayTaskLimit, PartitionDown, Cleaning, BurstBuffer...) or at a limit
#: (AssocGrp..., AssocMax..., QOSGrp..., QOSMax..., MaxJobs...). Nothing is reserved for those.
RUNNABLE = frozenset(
    {"", "None", "Resources", "Priority", "ReqNodeNotAvail", "NodeDown", "SchedDefer", "PartitionConfig"}
)
#: Slurm gives up a job of several nodes if fewer of them, down ones included, list its slices at the moment at which it
#: examines the job: its priority is 0 then, and it is not examined again until it is updated, for any reason. One node
#: is always there, a catalog node. Other causes leave no nodes for a demand.
GIVEN_UP = "BadConstraints"
#: How reasons in words begin that mean the same. Those of topologies ("No suitable topology unit found", "Insufficient
#: resources in topology unit") are shown from 26.05 on; older releases show Resources.
_RUNNABLE_PROSE = ("Nodes required for job are DOWN", "Required nodes lack available resources")
_TOPOLOGY = "topology"


def could_run(row: JobRow, now: float) -> bool:
    """Return whether a pending job waits only for resources."""
    if not row.pending or _waits_for_jobs(row):
        return False
    runnable = _waits_for_resources(row)
    if runnable is None:
        return row.eligible is not None and row.eligible <= now + BEGIN_LEAD_S
    return runnable


def waits_for_begin(row: JobRow, now: float) -> bool:
    """Return whether a pending job waits for its begin time, even if Slurm does not show it yet."""
    return row.reason.partition(",")[0].strip() == "BeginTime" or begin_not_shown(row, now)


def begin_not_shown(row: JobRow, now: float) -> bool:
    """Return whether a job waits for its begin time and Slurm does not show it yet, as just after a requeue."""
    return row.reason in ("", "None") and row.eligible is not None and row.eligible > now


def _waits_for_jobs(row: JobRow) -> bool:
    """Return whether a job waits for others; before Slurm has first considered it its reason does not show it."""
    return bool(row.after) and row.eligible is None


def given_up(row: JobRow) -> bool:
    """Return whether Slurm has given up a pending job that could start once enough nodes offer its slices."""
    return row.pending and row.reason == GIVEN_UP and row.num_nodes > 1


def _waits_for_resources(row: JobRow) -> bool | None:
    """Return whether a pending job waits only for resources; None: its begin time decides."""
    return given_up(row) or _runnable(row.reason)


@lru_cache(maxsize=1024)
def _runnable(reason: str) -> bool | None:
    """Return whether a job with this pending reason waits only for resources; None: its begin time decides."""
    prose = reason.replace("_", " ").strip("()")
    if prose.startswith(_RUNNABLE_PROSE) or _TOPOLOGY in prose:
        return True
    first_reason = reason.partition(",")[0].strip()
    return None if first_reason == "BeginTime" else first_reason in RUNNABLE


@lru_cache(maxsize=4096)
def slices(text: str) -> Mapping[Profile, int]:
    """Return the MIG slices in a job's GRES by profile, without filler, untyped, unknown and unreadable entries."""
    return profiles(gres.readable_counts(text, GRES))


def unlocated(holders: Iterable[JobRow], leased: Collection[tuple[int, int]]) -> Counter[Profile]:
    """Count the slices of those jobs on a node that have no lease there: the node has not reported them yet."""
    return held(row for row in holders if (row.job_id, row.restarts) not in leased)


def held(holders: Iterable[JobRow]) -> Counter[Profile]:
    """Count the slices that these jobs have on one of their nodes."""
    counts: Counter[Profile] = Counter()
    for row in sorted(holders, key=_job_id):
        for profile, count in slices(row.gres).items():
            counts[profile] = counts.get(profile, 0) + count
    return counts


def waits_for_loan(text: str) -> bool:
    """Return whether a job's GRES are those of an elastic training job that waits for a loan."""
    return gres.readable_counts(text, GRES).get(LOAN, 0) > 0


def profiles(counts: Mapping[str, int]) -> Mapping[Profile, int]:
    """Map GRES types to profiles, without zeros, the filler and types that are not profiles."""
    by_profile: Counter[Profile] = Counter()
    for gres_type, count in counts.items():
        profile = _profile(gres_type)
        if profile is not None and count > 0:
            by_profile[profile] += count
    return MappingProxyType(by_profile)


_profile = lru_cache(maxsize=4096)(reported_profile)


def demands(jobs: Sequence[JobRow], nodes: Iterable[NodeRow], supply: Collection[str], now: float) -> DemandQueue:
    """Return the pending work of a single queue; see `DemandBook.of`."""
    return DemandBook().of(JobQueue.of(jobs), nodes, supply, now)


class DemandBook:
    """Demands of successive queues; results that depend only on a row and the nodes are computed once."""

    def __init__(self) -> None:
        self._version = -1
        self._loan: Callable[[JobRow], bool] | None = None
        self._pools = NodePools((), frozenset())
        self._nodes: Sequence[NodeRow] = ()
        self._supply: frozenset[str] = frozenset()
        #: for each row of the queue its demand; the row itself if that depends on more than the row; None for nothing
        self._entries: list[Demand | JobRow | None] = []
        #: for each entry the number of the demand's kind, `UNSETTLED` or `ABSENT`
        self._numbers = bytearray()
        self._kinds = KindNumbers()
        #: by the identity of rows whose array has a throttle, their last demand
        self._throttled: dict[int, Demand] = {}
        #: pending components of heterogeneous jobs, by the row's identity
        self._components: dict[int, int] = {}

    def of(
        self,
        queue: JobQueue,
        nodes: Iterable[NodeRow],
        supply: Collection[str],
        now: float,
        avoid: Mapping[int, Collection[str]] | None = None,
        loan: Callable[[JobRow], bool] | None = None,
    ) -> DemandQueue:
        """Return the pending work that supply could help, in the order of the queue, which is Slurm's.

        The components of a heterogeneous job are adjacent, at the position of the last one, and only if Slurm would
        start all of them.

        Args:
            queue: the whole queue, including running jobs, which count towards the limits of their arrays.
            nodes: every node, for partitions and features.
            supply: names of the nodes that have MIG GPUs.
            now: unix seconds.
            avoid: job -> nodes on which an offer for it was not taken (too few CPUs there, excluded by root
                later, or for another reason only Slurm knows). Nodes that its user excludes are known from the start
                (`workload.excluded`).
            loan: whether a job may have a slice only if nothing else needs the space; None for no job. The same
                object as long as its results are the same.
        """
        self._learn(queue, tuple(nodes), frozenset(supply), loan)
        avoided, pools = avoid or {}, self._pools
        missing = Counter(self._components.values())
        components: dict[int, list[Demand | None]] = {}
        pending, numbers = list[Demand](), bytearray()
        begin, unsettled = 0, list[Demand]()
        for position, row in self._unsettled(queue, avoided):
            pending += _demands_in(self._entries[begin:position])
            numbers += self._numbers[begin:position]
            begin, settled = position + 1, len(pending)
            if row.het_job is not None:
                group = components.setdefault(row.het_job, [])
                if not (GRES not in row.gres and pools.has_others(row)):
                    group.append(self._demand(queue, row, avoided, row.het_job) if could_run(row, now) else None)
                missing[row.het_job] -= 1
                if not missing[row.het_job]:
                    group_demands = [demand for demand in group if demand is not None]
                    if len(group_demands) == len(group) and any(demand.parts for demand in group_demands):
                        pending.extend(sorted(group_demands, key=lambda demand: demand.job))
            elif could_run(row, now):
                demand = self._current_demand(queue, row, avoided)
                if demand is not None and demand.parts:
                    pending.append(demand)
            unsettled += pending[settled:]
            numbers += bytes([SHARED]) * (len(pending) - settled)
        pending += _demands_in(self._entries[begin:])
        numbers += self._numbers[begin:]
        settled_kinds = KindNumbers() if avoided else self._kinds
        rest = pending if avoided else unsettled
        kinds = {*settled_kinds.counts, *(demand.kind for demand in rest)}
        copies = settled_kinds.copies + sum([demand.copies for demand in rest if demand.parts])
        return DemandQueue(pending, kinds, bytes(numbers.translate(None, bytes([ABSENT]))), copies)

    def _unsettled(self, queue: JobQueue, avoided: Mapping[int, Collection[str]]) -> Iterator[tuple[int, JobRow]]:
        """Yield the rows whose demand depends on more than the row, each with its position."""
        if avoided:
            for position, entry in enumerate(self._entries):
                if isinstance(entry, Demand):
                    if entry.job in avoided:
                        yield position, queue.rows[entry.job]
                elif entry is not None:
                    yield position, entry
            return
        position = -1
        while (position := self._numbers.find(UNSETTLED, position + 1)) >= 0:
            entry = self._entries[position]
            assert isinstance(entry, JobRow)
            yield position, entry

    def of_running(self, queue: JobQueue, row: JobRow) -> Demand | None:
        """Return the demand of a running job after a restart; call it only after `of` for the same queue."""
        return self._demand(queue, row if row.throttle is None else replace(row, throttle=None), {})

    def _learn(
        self,
        queue: JobQueue,
        nodes: Sequence[NodeRow],
        supply: frozenset[str],
        loan: Callable[[JobRow], bool] | None,
    ) -> None:
        """Update the state to this queue and these nodes."""
        known = queue.version == self._version
        follows = (known or queue.version == self._version + 1) and loan is self._loan
        self._version = -1  # until the update is complete
        if follows and self._same_site(nodes, supply):
            for row in () if known else queue.removed:
                self._throttled.pop(id(row), None)
                self._components.pop(id(row), None)
            if not known:
                self._edit(queue)
        else:
            self._pools, self._loan = NodePools(*node_facts(nodes, supply)), loan
            self._throttled, self._components = {}, {}
            self._entries, self._numbers, self._kinds = [], bytearray(), KindNumbers()
            self._add(queue, queue.jobs)
        self._nodes, self._supply, self._version = nodes, supply, queue.version

    def _same_site(self, nodes: Sequence[NodeRow], supply: frozenset[str]) -> bool:
        """Return whether the nodes are the same for pools; compares only rows that have changed."""
        if len(nodes) != len(self._nodes) or self._supply != supply:
            return False
        changed = [pair for pair in zip(self._nodes, nodes, strict=True) if pair[0] is not pair[1]]
        old, new = ([pair[i] for pair in changed] for i in (0, 1))
        return [row.name for row in old] == [row.name for row in new] and node_facts(old, supply) == node_facts(
            new, supply
        )

    def _edit(self, queue: JobQueue) -> None:
        """Follow the edits of the queue since the last one."""
        entries, numbers, position = self._entries, self._numbers, 0
        self._entries, self._numbers = [], bytearray()
        for start, end, new in [*queue.edits, (len(entries), len(entries), ())]:
            for entry in entries[position:start]:
                if isinstance(entry, Demand):
                    self._kinds.remove(entry)
            self._entries += entries[start:end]
            self._numbers += numbers[start:end]
            self._add(queue, new)
            position = end

    def _add(self, queue: JobQueue, rows: Iterable[JobRow]) -> None:
        """Append the entries of further rows."""
        for row in rows:
            entry = self._noted(queue, row) if row.pending else None
            self._entries.append(entry)
            if entry is None:
                self._numbers.append(ABSENT)
            else:
                self._numbers.append(self._kinds.add(entry) if isinstance(entry, Demand) else UNSETTLED)

    def _noted(self, queue: JobQueue, row: JobRow) -> Demand | JobRow | None:
        """Return the entry of a pending row; see `_entries`."""
        if row.het_job is not None:
            self._components[id(row)] = row.het_job
            return row
        if GRES not in row.gres or _waits_for_jobs(row):
            return None
        runnable = _waits_for_resources(row)
        if runnable is None or row.throttle is not None:
            return row
        demand = self._demand(queue, row, {}) if runnable else None
        return demand if demand is not None and demand.parts else None

    def _current_demand(self, queue: JobQueue, row: JobRow, avoid: Mapping[int, Collection[str]]) -> Demand | None:
        """Return the current demand of a row; the same object while it is unchanged."""
        if row.throttle is None or row.job_id in avoid:
            return self._demand(queue, row, avoid)
        last = self._throttled.get(id(row))
        if last is not None and last.copies == _copies(queue, row):
            return last
        demand = self._demand(queue, row, avoid)
        if demand is not None:
            self._throttled[id(row)] = demand
        return demand

    def _demand(
        self, queue: JobQueue, row: JobRow, avoid: Mapping[int, Collection[str]], apart: int | None = None
    ) -> Demand | None:
        """Return the demand of one job; None if supply cannot help it."""
        copies = _copies(queue, row)
        if copies < 1:
            return None
        pool = self._pools.pool(row, avoid.get(row.job_id, ()))
        if len(pool) < row.num_nodes:
            return None
        loan = apart is None and self._loan is not None and self._loan(row)
        return Demand(row.job_id, _parts(row.gres), pool, row.num_nodes, copies, row.time_limit_s, apart, loan)


def _demands_in(entries: Iterable[Demand | JobRow | None]) -> Iterable[Demand]:
    """Return the demands among entries that have no rows."""
    return cast("Iterable[Demand]", filter(None, entries))


def _copies(queue: JobQueue, row: JobRow) -> int:
    """Return how many tasks of a row may start."""
    if row.throttle is None or row.array_job is None:
        return row.tasks
    return min(row.tasks, row.throttle - queue.running[row.array_job])


@lru_cache(maxsize=4096)
def _parts(text: str) -> tuple[tuple[Profile, int], ...]:
    return tuple(sorted(slices(text).items(), reverse=True))

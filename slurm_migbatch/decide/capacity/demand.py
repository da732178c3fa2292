"""From Slurm's queue to what the planner has to find room for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.workload.excluded import OPEN, excluded
from slurm_migbatch.workload.loans import AWAY, away

#: Slurm's name of the gres, and the type that only fills up the constant sum.
GRES = "mig"
FILLER = "none"

#: The type in which training jobs wait for idle slices. Where Slurm does not forget what a pending job has asked for,
#: slurm.conf gives every node one, which is never used and never changed.
LOAN = "loan"

#: A job that waits for its begin time counts once that is this near: its supply should be there when it comes.
BEGIN_LEAD_S = 5.0

#: Pending reasons under which a job would start if its nodes offered what it asks for. Every other reason means that
#: it could not start anyway: held (JobHeldUser, JobHeldAdmin, launch_failed_requeued_held, BadConstraints), waiting for
#: something else (Dependency, Licenses, Reservation, JobArrayTaskLimit, PartitionDown, Cleaning, BurstBuffer...) or at
#: a limit (AssocGrp..., AssocMax..., QOSGrp..., QOSMax..., MaxJobs...). For those nothing is kept free.
RUNNABLE = frozenset(
    {"", "None", "Resources", "Priority", "ReqNodeNotAvail", "NodeDown", "SchedDefer", "PartitionConfig"}
)
_RUNNABLE_PROSE = "Nodes required for job are DOWN"

_WORDS = re.compile(r"[A-Za-z0-9_.=:-]+")


def could_run(row: JobRow, now: float) -> bool:
    """Return whether a pending job waits for nothing but resources."""
    if not row.pending:
        return False
    runnable = _runnable(row.reason)
    if runnable is None:
        return row.eligible is not None and row.eligible <= now + BEGIN_LEAD_S
    return runnable


@lru_cache(maxsize=1024)
def _runnable(reason: str) -> bool | None:
    """Return whether a job with this pending reason waits for resources only; None: its begin time decides."""
    if reason.replace("_", " ").strip("()").startswith(_RUNNABLE_PROSE):
        return True
    word = reason.partition(",")[0].strip()
    return None if word == "BeginTime" else word in RUNNABLE


@lru_cache(maxsize=4096)
def slices(text: str) -> Mapping[Profile, int]:
    """Return the MIG slices in a job's GRES by profile, without filler, untyped, unknown and unreadable entries."""
    return profiles(gres.readable_counts(text, GRES))


def profiles(counts: Mapping[str, int]) -> Mapping[Profile, int]:
    """Map GRES types to profiles, without zeros, the filler and types that are no profile."""
    found: Counter[Profile] = Counter()
    for kind, count in counts.items():
        profile = _profile(kind)
        if profile is not None and count > 0:
            found[profile] += count
    return MappingProxyType(found)


@lru_cache(maxsize=4096)
def _profile(kind: str) -> Profile | None:
    try:
        return Profile.parse(kind)
    except ProfileError:
        return None


def demands(
    jobs: Sequence[JobRow],
    nodes: Iterable[NodeRow],
    supply: Collection[str],
    now: float,
    avoid: Mapping[int, Collection[str]] | None = None,
    loan: Callable[[JobRow], bool] | None = None,
) -> list[Demand]:
    """Return the pending work that supply could help, in the order of `jobs` (Slurm's own).

    The components of a heterogeneous job come together, where the last of them stands, and only if Slurm would start
    all of them.

    Args:
        jobs: the whole queue, running jobs too: they count against the limits of their arrays.
        nodes: every node, for partitions and features.
        supply: names of the nodes that have MIG GPUs.
        now: unix seconds.
        avoid: job -> nodes on which an offer for it stood and was not taken (too few CPUs there, excluded by root
            later, whatever else Slurm knows and we do not). What its user excludes is known from the first look
            (`workload.excluded`).
        loan: whether a job may have a slice only where nothing else needs the room; None for no job.
    """
    site = _Site(jobs, nodes, supply, avoid or {}, loan)
    missing = Counter(row.het_job for row in jobs if row.het_job is not None and row.pending)
    components: dict[int, list[Demand | None]] = {}
    found: list[Demand] = []
    for row in jobs:
        if row.het_job is not None and row.pending:
            group = components.setdefault(row.het_job, [])
            if not (GRES not in row.gres and site.has_others(row)):
                group.append(site.demand(row, row.het_job) if could_run(row, now) else None)
            missing[row.het_job] -= 1
            if not missing[row.het_job]:
                whole = [demand for demand in group if demand is not None]
                if len(whole) == len(group) and any(demand.parts for demand in whole):
                    found.extend(sorted(whole, key=lambda demand: demand.job))
        elif GRES in row.gres and could_run(row, now):
            demand = site.demand(row)
            if demand is not None and demand.parts:
                found.append(demand)
    return found


class _Site:
    """What does not depend on the job: which nodes there are, and how many tasks of each array run."""

    def __init__(
        self,
        jobs: Sequence[JobRow],
        nodes: Iterable[NodeRow],
        supply: Collection[str],
        avoid: Mapping[int, Collection[str]],
        loan: Callable[[JobRow], bool] | None,
    ) -> None:
        self._avoid, self._loan = avoid, loan
        self._rows: dict[str, NodeRow] = {}
        self._in_partition: dict[str, set[str]] = {}
        #: partitions with nodes that have no MIG GPUs
        self._mixed: set[str] = set()
        for node in nodes:
            if node.name in supply:
                self._rows[node.name] = node
                for partition in node.partitions:
                    self._in_partition.setdefault(partition, set()).add(node.name)
            elif node.open:
                self._mixed.update(node.partitions)
        self._running = Counter(row.array_job for row in jobs if row.array_job is not None and row.active)
        self._pools: dict[tuple[str, ...], frozenset[str]] = {}

    def has_others(self, row: JobRow) -> bool:
        """Return whether there are nodes without MIG GPUs in a partition of the job."""
        return not self._mixed.isdisjoint(row.partition.split(","))

    def demand(self, row: JobRow, apart: int | None = None) -> Demand | None:
        """Return what one job needs; None where nothing can be done for it."""
        copies = row.tasks
        if row.throttle is not None and row.array_job is not None:
            copies = min(copies, row.throttle - self._running[row.array_job])
        if copies < 1:
            return None
        key = (row.partition, row.features, row.requested_nodes, row.reservation)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _pool(row, self._rows, self._in_partition)
        if AWAY in row.gres:
            pool = pool.difference(away(row.gres))
        if OPEN in row.comment:
            pool = pool.difference(excluded(row.comment))
        if row.job_id in self._avoid:
            pool = pool.difference(self._avoid[row.job_id])
        if len(pool) < row.num_nodes:
            return None
        return Demand(
            job=row.job_id,
            parts=_parts(row.gres),
            pool=pool,
            nodes=row.num_nodes,
            copies=copies,
            limit_s=row.time_limit_s,
            apart=apart,
            loan=apart is None and self._loan is not None and self._loan(row),
        )


@lru_cache(maxsize=4096)
def _parts(text: str) -> tuple[tuple[Profile, int], ...]:
    return tuple(sorted(slices(text).items(), reverse=True))


def _pool(row: JobRow, rows: Mapping[str, NodeRow], in_partition: Mapping[str, set[str]]) -> frozenset[str]:
    names: set[str] = set()
    for partition in row.partition.split(","):
        names |= in_partition.get(partition, set())
    if row.requested_nodes:
        try:
            requested = set(expand(row.requested_nodes))
        except NodeListError:
            requested = set()
        if len(requested) >= row.num_nodes:
            names &= requested
    reserved = {name for name in names if row.reservation and row.reservation in rows[name].reservations}
    names = reserved or {name for name in names if not rows[name].set_aside}
    return frozenset(name for name in names if _has_features(row.features, rows[name].features))


def _has_features(expression: str, features: frozenset[str]) -> bool:
    """Return whether a node may satisfy --constraint; True for all but plain `a&b` and `a|b`, which Slurm judges."""
    words = _WORDS.findall(expression)
    rest = _WORDS.sub("", expression)
    if not words:
        return True
    if set(rest) <= {"&", ","}:
        return features.issuperset(words)
    if set(rest) <= {"|"}:
        return not features.isdisjoint(words)
    return True

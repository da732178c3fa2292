"""From Slurm's queue to what the planner has to find room for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.supply.model import Demand

#: Slurm's name of the gres, and the type that only fills up the constant sum.
GRES = "mig"
FILLER = "none"

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
    """Whether a pending job waits for nothing but resources."""
    if not row.pending:
        return False
    reason = row.reason.replace("_", " ").strip("()")
    if reason.startswith(_RUNNABLE_PROSE):
        return True
    word = row.reason.partition(",")[0].strip()
    if word == "BeginTime":
        return row.eligible is not None and row.eligible <= now + BEGIN_LEAD_S
    return word in RUNNABLE


@lru_cache(maxsize=4096)
def slices(text: str) -> Mapping[Profile, int]:
    """The MIG slices in a GRES list, by profile; the filler, untyped and unknown entries are none."""
    try:
        return profiles(gres.counts(text, GRES))
    except GresError:
        return MappingProxyType({})


def profiles(counts: Mapping[str, int]) -> Mapping[Profile, int]:
    """GRES types to profiles, without zeros; the filler and types that are no profile are left out."""
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
) -> list[Demand]:
    """The pending work that supply could help, in the order of `jobs` (Slurm's own).

    Args:
        jobs: the whole queue, running jobs too: they count against the limits of their arrays.
        nodes: every node, for partitions and features.
        supply: names of the nodes that have MIG GPUs.
        now: unix seconds.
        avoid: job -> nodes on which an offer for it stood and was not taken (too few CPUs there, excluded by the
            user, whatever else Slurm knows and we do not).
    """
    rows = {node.name: node for node in nodes if node.name in supply}
    in_partition: dict[str, set[str]] = {}
    for node in rows.values():
        for partition in node.partitions:
            in_partition.setdefault(partition, set()).add(node.name)
    running = Counter(row.array_job for row in jobs if row.array_job is not None and row.active)
    pools: dict[tuple[str, str, str], frozenset[str]] = {}
    found = []
    for row in jobs:
        if GRES not in row.gres or not could_run(row, now):
            continue
        parts = _parts(row.gres)
        if not parts:
            continue
        copies = row.tasks
        if row.throttle is not None and row.array_job is not None:
            copies = min(copies, row.throttle - running[row.array_job])
        if copies < 1:
            continue
        key = (row.partition, row.features, row.requested_nodes)
        pool = pools.get(key)
        if pool is None:
            pool = pools[key] = _pool(row, rows, in_partition)
        if avoid and row.job_id in avoid:
            pool = pool.difference(avoid[row.job_id])
        if len(pool) < row.num_nodes:
            continue
        found.append(
            Demand(
                job=row.job_id,
                parts=parts,
                pool=pool,
                nodes=row.num_nodes,
                copies=copies,
                limit_s=row.time_limit_s,
            )
        )
    return found


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
    return frozenset(name for name in names if _has_features(row.features, rows[name].features))


def _has_features(expression: str, features: frozenset[str]) -> bool:
    """Whether a node may satisfy --constraint. Only plain `a&b` and `a|b` are judged; of anything else Slurm is."""
    words = _WORDS.findall(expression)
    rest = _WORDS.sub("", expression)
    if not words:
        return True
    if set(rest) <= {"&", ","}:
        return features.issuperset(words)
    if set(rest) <= {"|"}:
        return not features.isdisjoint(words)
    return True

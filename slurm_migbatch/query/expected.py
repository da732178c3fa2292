"""When a waiting job can start at the latest, and which running jobs it waits for, by their time limits.

A node is known by its GPUs and by what running jobs hold there: the job fits once enough of them have ended. Other
waiting jobs are left out, so a job of higher priority may come before; most jobs end before their limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_migbatch.decide.capacity.demand import demands, slices
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.catalog import MigNode, SiteCatalog
from slurm_migbatch.workload.holding import can_hold


@dataclass(frozen=True)
class Expected:
    """What has to end before a job can start.

    Attributes:
        blockers: the jobs, in the order in which they end; none where the slices can be made now.
        at: when the last of them ends, unix seconds; None where one of them has no time limit.
    """

    blockers: tuple[JobRow, ...]
    at: float | None


def expect(
    row: JobRow, queue: Sequence[JobRow], nodes: Sequence[NodeRow], catalog: SiteCatalog, now: float
) -> Expected | None:
    """Return what a waiting job waits for; None where no node can hold it or nothing is known of nodes."""
    wanted = demands([row], nodes, catalog.nodes.keys(), now)
    if not wanted:
        return None
    need = Counter({profile.gres_type: count for profile, count in slices(row.gres).items()})
    open_nodes = {each.name for each in nodes if each.open}
    pool = wanted[0].pool & catalog.nodes.keys() & open_nodes
    found = [each for name in sorted(pool) if (each := _on(catalog.nodes[name], need, queue, catalog)) is not None]
    if len(found) < row.num_nodes:
        return None
    found.sort(key=lambda each: (bool(each) and each[-1].end is None, (each[-1].end or 0.0) if each else 0.0))
    blockers = {job.job_id: job for some in found[: row.num_nodes] for job in some}
    ordered = sorted(blockers.values(), key=_end)
    ends = [job.end for job in ordered]
    return Expected(tuple(ordered), None if None in ends else max((end for end in ends if end), default=now))


def _on(node: MigNode, need: Mapping[str, int], queue: Sequence[JobRow], catalog: SiteCatalog) -> list[JobRow] | None:
    """Return the jobs that have to end on one node, as they will; None where it never suffices."""
    rooms = [catalog.kinds[name].room for name in node.gpus]
    there = sorted((job for job in queue if job.active and node.name in job.nodes and slices(job.gres)), key=_end)
    for count in range(len(there) + 1):
        total = Counter(need)
        for job in there[count:]:
            total.update({profile.gres_type: number for profile, number in slices(job.gres).items()})
        if can_hold(rooms, total):
            return there[:count]
    return None


def _end(job: JobRow) -> tuple[bool, float]:
    return job.end is None, job.end or 0.0


def describe(expected: Expected, now: float) -> str:
    """Say it in one sentence."""
    if not expected.blockers:
        return "as soon as its slices are made, unless jobs of higher priority take the room"
    names = ", ".join(_name(job) for job in expected.blockers[:6])
    more = f" and {len(expected.blockers) - 6} more" if len(expected.blockers) > 6 else ""
    if expected.at is None:
        return f"once {names}{more} ended, of which not all have a time limit"
    minutes = max(0, round((expected.at - now) / 60))
    when = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
    return f"in {when} at the latest, unless jobs of higher priority take the room: once {names}{more} ended"


def _name(job: JobRow) -> str:
    held = ",".join(f"{profile}:{count}" for profile, count in sorted(slices(job.gres).items(), reverse=True))
    return f"job {job.job_id} ({held} on {','.join(job.nodes[:4])})"

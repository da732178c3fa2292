"""Latest start of a pending job, and the running jobs that it waits for, according to their time limits.

A node is described by its GPUs and by the slices, CPUs and memory of running jobs: the job fits once enough of them
have ended. Other pending jobs are ignored, so a job of higher priority may start first; most jobs end before their
limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_migbatch.decide.capacity.demand import demands, slices
from slurm_migbatch.query.show import row_name
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.catalog import SiteCatalog
from slurm_migbatch.workload.holding import GpuLayouts, can_hold

_NOW = (False, 0.0)


@dataclass(frozen=True)
class Expected:
    """The jobs that have to end before a job can start.

    Attributes:
        blockers: the jobs, in the order of their ends; empty if the slices can be created now.
        at: end of the last one, unix seconds; None if one of them has no time limit.
    """

    blockers: tuple[JobRow, ...]
    at: float | None


def expect(
    row: JobRow, queue: Sequence[JobRow], nodes: Sequence[NodeRow], catalog: SiteCatalog, now: float
) -> Expected | None:
    """Return what a pending job waits for; None if no node can hold it or nothing is known of nodes."""
    wanted = demands([row], nodes, catalog.nodes.keys(), now)
    if not wanted:
        return None
    need = Counter({profile.gres_type: count for profile, count in slices(row.gres).items()})
    open_nodes = {node.name: node for node in nodes if node.open}
    pool = wanted[0].pool & catalog.nodes.keys() & open_nodes.keys()
    running = _running(queue)
    to_end: list[list[JobRow]] = []  # for each of the nodes that are free first
    for name in sorted(pool):
        node, held = open_nodes[name], running.get(name, [])
        if row.has_resources_on(node):
            held = [job for job in held if slices(job.gres)]
        limit = len(held)
        if len(to_end) == row.num_nodes:
            last = _last(to_end[-1])
            if last == _NOW:
                break
            limit = bisect_left(held, last, key=_end)
        gpus = [catalog.kinds[gpu].gpu_layouts for gpu in catalog.nodes[name].gpus]
        to_end += _on(node, gpus, row, need, held, limit)
        to_end.sort(key=_last)
        del to_end[row.num_nodes :]
    if len(to_end) < row.num_nodes:
        return None
    blockers = {job.job_id: job for jobs in to_end for job in jobs}
    ordered = sorted(blockers.values(), key=_end)
    unlimited, end = _last(ordered)
    return Expected(tuple(ordered), None if unlimited else max(now, end))


def _running(queue: Sequence[JobRow]) -> dict[str, list[JobRow]]:
    """Return the jobs that run on each node, by end."""
    running: dict[str, list[JobRow]] = {}
    for job in sorted((job for job in queue if job.active), key=_end):
        for name in job.nodes:
            running.setdefault(name, []).append(job)
    return running


def _on(
    node: NodeRow,
    gpus: Sequence[GpuLayouts],
    row: JobRow,
    need: Mapping[str, int],
    holders: Sequence[JobRow],
    max_count: int,
) -> list[list[JobRow]]:
    """Return a list of the jobs on one node that have to end for a pending job, in the order of their ends.

    Return no list if the first `max_count` jobs are not enough. A bisection finds their number: if the end of n jobs
    makes room, so does the end of more.

    Args:
        need: the slices of the pending job on one node, by GRES type.
    """

    def suffice(count: int) -> bool:
        total = Counter(need)
        for job in holders[count:]:
            total.update({profile.gres_type: number for profile, number in slices(job.gres).items()})
        return can_hold(gpus, total) and row.has_resources_on(_without(node, holders[:count], len(holders)))

    if not suffice(max_count):
        return []
    return [list(holders[: bisect_left(range(max_count), True, key=suffice)])]


def _without(node: NodeRow, ended: Sequence[JobRow], running_count: int) -> NodeRow:
    """Return a node after the end of some of its running jobs."""
    if len(ended) == running_count:
        return replace(node, cpus_used=0, memory_used=0, owner="")
    cpus = sum(job.cpus_per_node for job in ended)
    memory = sum(job.memory_on(node) for job in ended)
    return replace(node, cpus_used=max(0, node.cpus_used - cpus), memory_used=max(0, node.memory_used - memory))


def _last(jobs: Sequence[JobRow]) -> tuple[bool, float]:
    """Return the end of the last of these jobs, as `_end` does."""
    return _end(jobs[-1]) if jobs else _NOW


def _end(job: JobRow) -> tuple[bool, float]:
    """Return whether the end of a job is unknown, and the end; a requeued job that is still ending has none."""
    return job.end is None and job.state != "COMPLETING", job.end or 0.0


def describe(expected: Expected, now: float) -> str:
    """Return a sentence about when a job can start and what it waits for."""
    if not expected.blockers:
        unless = "unless jobs of higher priority take them"
        return f"as soon as its slices are created, if CPUs and memory are free, {unless}"
    names = ", ".join(_name(job) for job in expected.blockers[:6])
    others = f" and {len(expected.blockers) - 6} more" if len(expected.blockers) > 6 else ""
    if expected.at is None:
        return f"after the end of {names}{others}, of which not all have a time limit"
    minutes = max(0, round((expected.at - now) / 60))
    duration = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
    return (
        f"in {duration} at the latest, unless jobs of higher priority take the space: after the end of {names}{others}"
    )


def _name(job: JobRow) -> str:
    held = ",".join(f"{profile}:{count}" for profile, count in sorted(slices(job.gres).items(), reverse=True))
    return f"job {row_name(job)} ({held or f'{job.cpus_per_node} CPUs'} on {','.join(job.nodes[:4])})"

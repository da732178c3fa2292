"""Allocate GPUs by goodput, with a penalty for restarts: Pollux (Qiao et al., OSDI 2021), section 4.2, as a baseline.

In every round the GPUs are divided again among all elastic jobs so that the power mean (exponent -1, a harmonic mean)
of their speedups over their fair shares is greatest. If a job would have to restart, only `max(age - restarts * delay,
0) / (age + delay)` of its speedup counts. At most one job that is spread over several nodes may be on a node. This is
so in the authors' simulator (adaptdl, `pollux.py`), including the constants.

The optimisation is a reconstruction. The authors search placements by a genetic algorithm (population 100, 100
generations), whose results are random. Here the counts are solved exactly: the harmonic mean is greatest if a sum over
jobs is, which is a knapsack (`deepboot.knapsack`); the value of every count is that on the fewest nodes. The counts are
placed afterwards (`place`); a count that cannot be placed is reduced to one that can.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from slurm_migbatch.lab.papers.deepboot import knapsack

Key = TypeVar("Key", bound=Hashable)

DELAY_S: Final = 30.0
"""Assumed cost of a restart, in seconds."""
PERIOD_S: Final = 60.0
_NOTHING: Final = 1e-3
"""The speedup over the fair share that a job without GPUs counts with."""
_SAME: Final = 1e-9
"""Sums that differ by less are equal."""


@dataclass(frozen=True)
class PolluxJob:
    """An elastic job in a round.

    Attributes:
        speeds: speed by number of GPUs, for every number that it may be given; in any unit.
        fair: its speed on its fair share of the GPUs, in the same unit.
        have: its current number of GPUs.
        age_s: seconds since it was submitted.
        delay_s: assumed cost of a restart, seconds.
    """

    speeds: Mapping[int, float]
    fair: float
    have: int = 0
    age_s: float = 0.0
    restarts: int = 0
    delay_s: float = DELAY_S


def penalty(age_s: float, restarts: int, delay_s: float = DELAY_S) -> float:
    """Return the share of a speedup that counts if it requires a restart."""
    return max(age_s - restarts * delay_s, 0.0) / (age_s + delay_s) if delay_s else 1.0


def divide(jobs: Sequence[PolluxJob], gpus: int) -> list[int]:
    """Return the number of GPUs of each job that makes the harmonic mean of the speedups greatest."""
    return knapsack([_worths(job, penalty(job.age_s, job.restarts, job.delay_s)) for job in jobs], gpus)


def stays(jobs: Sequence[PolluxJob], gpus: int, later_s: float = math.inf) -> bool:
    """Return whether no other numbers of GPUs become better than the present ones until `later_s` seconds from now.

    Restarts cost the less the older a job is.
    """
    worths = [
        _worths(job, 1.0 if later_s == math.inf else penalty(job.age_s + later_s, job.restarts, job.delay_s))
        for job in jobs
    ]
    present = math.fsum(worth.get(job.have, 0.0) for job, worth in zip(jobs, worths, strict=True))
    best = math.fsum(worth.get(count, 0.0) for worth, count in zip(worths, knapsack(worths, gpus), strict=True))
    return present >= best - _SAME


def _worths(job: PolluxJob, changed: float) -> dict[int, float]:
    """Return what each number of GPUs adds to the sum that `divide` maximises; `changed`: what of a change counts."""
    return {
        n: 1 / _NOTHING - 1 / (speed / job.fair * (1.0 if n == job.have else changed) + _NOTHING)
        for n, speed in sorted(job.speeds.items())
    }


def place(
    wanted: Mapping[Key, int], had: Mapping[Key, Mapping[int, int]], least: Mapping[Key, int], free: Mapping[int, int]
) -> dict[Key, dict[int, int]]:
    """Place the GPUs of each job by node.

    Args:
        wanted: number of GPUs of each job. A job that already has this number stays where it is.
        had: current GPUs by node, of the jobs that have some.
        least: smallest number of GPUs with which each job runs.
        free: number of GPUs of each node that no job has.

    Returns:
        GPUs by node of every job that is placed: as many as wanted, or the largest number below that can be placed.
    """
    free_gpus = dict(free)
    unchanged = {job: dict(nodes) for job, nodes in had.items() if sum(nodes.values()) == wanted.get(job, 0)}
    for job, nodes in had.items():
        if job not in unchanged:
            for node, count in nodes.items():
                free_gpus[node] = free_gpus.get(node, 0) + count
    spread = {node for nodes in unchanged.values() if len(nodes) > 1 for node in nodes}
    placed = {job: nodes for job, nodes in unchanged.items() if nodes}
    for job, target in sorted(wanted.items(), key=lambda item: -item[1]):
        if job in unchanged:
            continue
        own_nodes = had.get(job, {})
        for count in range(target, least[job] - 1, -1):
            nodes = _nodes(count, free_gpus, spread, own_nodes) if count else {}
            if nodes:
                placed[job] = nodes
                for node, taken in nodes.items():
                    free_gpus[node] -= taken
                if len(nodes) > 1:
                    spread.update(nodes)
                break
    return placed


def _nodes(count: int, free_gpus: Mapping[int, int], spread: set[int], own_nodes: Mapping[int, int]) -> dict[int, int]:
    """Choose nodes for a job; return GPUs by node, empty if there are too few.

    It is the node with the fewest GPUs that suffice, preferably one of its own; if none suffices, the emptiest nodes on
    which no job is that is spread over several.
    """
    enough = [node for node, size in free_gpus.items() if size >= count]
    if enough:
        return {min(enough, key=lambda node: (node not in own_nodes, free_gpus[node], node)): count}
    taken: dict[int, int] = {}
    for node in sorted(free_gpus, key=lambda node: (-free_gpus[node], node not in own_nodes, node)):
        missing = count - sum(taken.values())
        if not missing:
            break
        if free_gpus[node] and node not in spread:
            taken[node] = min(missing, free_gpus[node])
    return taken if sum(taken.values()) == count else {}

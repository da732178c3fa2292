"""Find slices in use that would keep Slurm from starting a job that has a place.

Slurm's backfill plans the start of a pending job for the moment when a slice of its profile should be free by the time
limits, and from then on it keeps the whole node free for it, all other GPUs and slices included. So a later job with a
longer time limit waits although its own slice is offered there. Slurm plans no start on a node that does not list the
profile: there the slices in use are not counted until the job has started, and the next job for one gets it by the next
plan after it has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_migbatch.decide.capacity.model import DemandShape, Node
from slurm_migbatch.mig.profile import Profile


def slices_not_to_count(
    placed: Iterable[tuple[str, int, Profile, float]],
    waiting: Mapping[DemandShape, int],
    nodes: Mapping[str, Node],
    until: float,
) -> dict[str, Counter[Profile]]:
    """Return by node the slices in use that should not be counted, by profile.

    None of a profile of which a job wants several: Slurm plans its start for the moment when all of them are free.

    Args:
        placed: claims: node, position of the demand in Slurm's order, profile, end by its time limit.
        waiting: position of the first demand of each kind that has no place for all of its copies.
        until: unix seconds up to which Slurm plans starts (bf_window).
    """
    singles: dict[Profile, list[tuple[int, DemandShape]]] = {}
    for kind, number in waiting.items():
        if kind.single:
            singles.setdefault(kind.slices[0], []).append((number, kind))
    for profile in {profile for kind in waiting if not kind.single for profile in kind.slices}:
        singles.pop(profile, None)
    found: dict[str, Counter[Profile]] = {}
    ends: dict[tuple[str, Profile], float] = {}
    for name, number, profile, end in placed if singles else ():
        node = nodes[name]
        for other in node.leased.keys() & singles.keys() - {profile}:
            if not any(first < number and name in kind.pool for first, kind in singles[other]):
                continue
            if (name, other) not in ends:
                ends[name, other] = _first_end(node, other)
            if ends[name, other] < min(end, until):
                found.setdefault(name, Counter())[other] = node.leased[other]
    return found


def _first_end(node: Node, profile: Profile) -> float:
    """Return when the first slice of a profile that is in use on a node should be free; infinite: unknown."""
    leases = [lease for gpu in node.gpus for lease in gpu.leases if lease.job is not None]
    ends = [lease.until for lease in leases if lease.slot.profile == profile and lease.until is not None]
    return min(ends, default=math.inf)

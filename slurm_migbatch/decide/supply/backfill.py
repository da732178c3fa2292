"""Use reserved space for jobs that end, by their time limits, before the job for which it is reserved can start.

Slurm decides which job gets an offered slot, so a slot of a profile is offered in reserved space only if every pending
job that could take it ends in time. As in EASY backfilling the job with the reservation is not delayed, as far as time
limits are known. What is submitted within the seconds until the next plan can delay it, so space is no longer used in
this way from `Reservation.held_from` on.

Where Slurm plans the start of the reserved job itself, its free slots are offered as they are, and Slurm backfills
them (`decide.supply.reserve`). They are divided for other profiles only if no pending job could be backfilled there,
and are not offered as they are from then on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple

from slurm_migbatch.decide.capacity.model import Demand, DemandShape
from slurm_migbatch.decide.supply.fleet import Fleet, GpuClaims
from slurm_migbatch.decide.supply.reserve import Reserver
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.profile import Profile

_START_S: Final = 10.0
"""Time from an offer to the start of a job."""
_FIRST: Final = 256
"""Pending jobs to examine before all others."""
_MOST: Final = 64
"""Pending jobs to examine for each profile, of those with the longest or the shortest time limits."""


class _Limit(NamedTuple):
    """The time limit of a pending job, infinite if it has none, and how many slices of a profile it needs.

    They are on each of `nodes` nodes of the pool.
    """

    limit_s: float
    job: int
    pool: frozenset[str]
    nodes: int
    slices: int

    def fits(self, free: Mapping[str, int]) -> bool:
        """Return whether enough nodes have enough free slots."""
        return sum(count >= self.slices and node in self.pool for node, count in free.items()) >= self.nodes


class Backfill:
    """Places short jobs in the reserved space of one plan.

    Args:
        demands: all pending work.
    """

    def __init__(self, fleet: Fleet, reserver: Reserver, demands: Sequence[Demand], now: float) -> None:
        self._fleet, self._reserver, self._demands, self._now = fleet, reserver, demands, now
        #: kinds of demands for which there is no place; not tried again, because space only shrinks
        self._hopeless: set[DemandShape] = set()

    def place(self, number: int, copy: int, demand: Demand) -> bool:
        """Claim slots for one copy of a demand on one node; return whether there is room."""
        if demand.kind in self._hopeless or demand.nodes > 1 or not self._reserver.blocked:
            return False
        if demand.limit_s is not None and demand.apart is None and not demand.loan:
            for node in sorted(self._reserver.blocked & demand.pool):
                slots = self._slots_on(node, demand)
                if slots is not None:
                    for gpu_claims, slot in slots:
                        self._claim(gpu_claims, slot, (number, copy, slot.profile), self._now + demand.limit_s)
                    return True
            self._hopeless.add(demand.kind)
        return False

    def _slots_on(self, node: str, demand: Demand) -> list[tuple[GpuClaims, Slot]] | None:
        """Return a slot for each slice of a demand on a node; None if they do not all fit."""
        chosen: list[tuple[GpuClaims, Slot]] = []
        gpus = sorted(self._fleet.on(node), key=lambda gpu: (gpu.shape.idle, gpu.index))
        for profile in demand.slices:
            options = (
                (gpu_claims, slot)
                for gpu_claims in gpus
                if self._may_divide(gpu_claims, profile, demand)
                for slot in _free_slots(gpu_claims, profile, [slot for gpu, slot in chosen if gpu is gpu_claims])
            )
            found = next(options, None)
            if found is None:
                return None
            chosen.append(found)
        return chosen

    def _may_divide(self, gpu_claims: GpuClaims, profile: Profile, demand: Demand) -> bool:
        """Return whether slots of a profile may be offered in the reserved space of a GPU."""
        reserved = self._reserver.reserved_at.get(gpu_claims.index)
        if reserved is None or profile not in gpu_claims.gpu.geometry:
            return False
        time_s = reserved.until - self._now - _START_S
        node, jobs = gpu_claims.node, reserved.jobs
        if demand.limit_s is None or demand.limit_s > time_s or self._competes(profile, node, jobs, time_s):
            return False
        offered = self._reserver.offered_with(gpu_claims.index)
        return profile not in offered and not any(
            self._may_be_backfilled(other, slots, jobs, time_s) for other, slots in offered.items()
        )

    def _may_be_backfilled(
        self, profile: Profile, offered: Mapping[str, int], jobs: frozenset[int], time_s: float
    ) -> bool:
        """Return whether Slurm could start a pending job, without `jobs`, for this time in so many slots of each node.

        May be wrongly true if very many jobs have short limits and do not fit.
        """
        limits = self._shortest.get(profile, [])
        in_time = [limit for limit in limits if limit.limit_s <= time_s]
        return len(in_time) == _MOST or any(limit.fits(offered) for limit in in_time if limit.job not in jobs)

    def _competes(self, profile: Profile, node: str, jobs: frozenset[int], time_s: float) -> bool:
        """Return whether a pending job, without `jobs`, that lasts longer could take a slice of a profile on a node.

        May be wrongly true if very many jobs have longer limits and cannot use the node.
        """
        if _first_limit(self._first_longest.get(profile, []), node, jobs, -math.inf) > time_s:  # usual in a long queue
            return True
        limits = self._longest.get(profile, [])
        default_s = limits[-1].limit_s if len(limits) == _MOST else -math.inf
        return _first_limit(limits, node, jobs, default_s) > time_s

    @cached_property
    def _first_longest(self) -> dict[Profile, list[_Limit]]:
        """The longest limits of the first demands, by profile."""
        return _extreme(heapq.nlargest, _by_profile(islice(self._demands, _FIRST)))

    @cached_property
    def _all(self) -> dict[Profile, list[_Limit]]:
        return _by_profile(self._demands)

    @cached_property
    def _longest(self) -> dict[Profile, list[_Limit]]:
        return _extreme(heapq.nlargest, self._all)

    @cached_property
    def _shortest(self) -> dict[Profile, list[_Limit]]:
        return _extreme(heapq.nsmallest, self._all)

    def _claim(self, gpu_claims: GpuClaims, slot: Slot, claim: tuple[int, int, Profile], end: float) -> None:
        self._reserver.withdraw(gpu_claims.index)
        condition = gpu_claims.shape.condition
        changed = condition._replace(used=condition.used.add(slot), keep=condition.keep.clear_of(slot.placement.mask))
        gpu_claims.until = (*gpu_claims.until, (slot, end))
        gpu_claims.settled = (*gpu_claims.settled, claim)
        self._fleet.change(gpu_claims, self._fleet.book.start(changed), gpu_claims.claims)


def _by_profile(demands: Iterable[Demand]) -> dict[Profile, list[_Limit]]:
    """Return the time limits of the demands for each profile."""
    found: dict[Profile, list[_Limit]] = {}
    for demand in demands:
        limit_s = math.inf if demand.limit_s is None else demand.limit_s
        for profile, count in demand.parts:
            found.setdefault(profile, []).append(_Limit(limit_s, demand.job, demand.pool, demand.nodes, count))
    return found


def _extreme(of: Callable[..., list[_Limit]], limits_of: Mapping[Profile, list[_Limit]]) -> dict[Profile, list[_Limit]]:
    """Return for each profile the first `_MOST` time limits in the order of a function of heapq."""
    return {profile: of(_MOST, limits, key=itemgetter(0)) for profile, limits in limits_of.items()}


def _first_limit(limits: Iterable[_Limit], node: str, jobs: frozenset[int], default_s: float) -> float:
    """Return the first time limit of a job that could use the node, without `jobs`; `default_s` if there is none."""
    return next((limit.limit_s for limit in limits if limit.job not in jobs and node in limit.pool), default_s)


def _free_slots(gpu_claims: GpuClaims, profile: Profile, chosen: Sequence[Slot]) -> Iterator[Slot]:
    """Yield the slots for a profile that are neither used nor claimed, with the claims as they are placed now."""
    shape, geometry = gpu_claims.shape, gpu_claims.gpu.geometry
    taken = shape.taken
    for slot in chosen:
        taken = taken.add(slot)
    for slot in geometry.info(profile).slots:
        if geometry.fits(taken, slot):
            condition = shape.condition
            used = condition.used
            for other in (*chosen, slot):
                used = used.add(other)
            if gpu_claims.shape.book.shape(condition._replace(used=used, keep=condition.keep.clear_of(used.mask))):
                yield slot

"""Use reserved space for jobs that end, by their time limits, before the job for which it is reserved can start.

Slurm decides which job gets an offered slot, so a slot of a profile is offered in reserved space only if every pending
job that could take it ends in time. So, unlike in EASY backfilling, the job with the reservation can be delayed by what
is submitted within the seconds until the next plan. From `Reservation.held_from` on, space is no longer used in this
way.

Where Slurm plans the start of the reserved job itself, its free slots are offered as they are, and Slurm backfills
them (`decide.supply.reserve`). Once they are divided for other profiles, it cannot do so until all that divides them
has ended. So they are divided only for jobs that end before one that comes earlier in Slurm's order, and wants whole
slots there, could be backfilled, and not at all while Slurm could start any job there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
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
"""Pending jobs to examine for each profile, of those that may last longest."""
_TESTED: Final = 500
"""Pending jobs that Slurm tests in one pass of backfill (bf_max_job_test)."""
_SHORTER: Final = 0.9
"""A place is sought again for time limits below this part of one for which there is none."""


class _Length(NamedTuple):
    """How long a pending job may last, infinite if it has no time limit, and the nodes of its pool."""

    limit_s: float
    job: int
    pool: frozenset[str]


class _Turn(NamedTuple):
    """Demands after a number may use reserved slots only if they end before `start`."""

    number: int
    start: float


class Backfill:
    """Places short jobs in the reserved space of one plan.

    Args:
        demands: all pending work.
    """

    def __init__(self, fleet: Fleet, reserver: Reserver, demands: Sequence[Demand], now: float) -> None:
        self._fleet, self._reserver, self._demands, self._now = fleet, reserver, demands, now
        #: time limits for which there is no place, by kind of demands, and by kind and node; space only shrinks, until
        #: offered slots are withdrawn
        self._hopeless: dict[DemandShape, float] = {}
        self._full: dict[DemandShape, dict[str, float]] = {}
        #: by GPUs that have reservations in common, and the number of reservations made so far
        self._turns: dict[tuple[frozenset[int], int], list[_Turn]] = {}

    def place(self, number: int, copy: int, demand: Demand) -> bool:
        """Claim slots for one copy of a demand; return whether there is room."""
        limit_s = demand.limit_s
        if limit_s is None or demand.apart is not None or demand.loan or not self._reserver.blocked:
            return False
        if limit_s >= _SHORTER * self._hopeless.get(demand.kind, math.inf):
            return False
        chosen = self._slots(number, demand, limit_s)
        if chosen is None:
            self._hopeless[demand.kind] = limit_s if any(self._full[demand.kind].values()) else 0.0
            return False
        for gpu_claims, slot in chosen:
            self._claim(gpu_claims, slot, (number, copy, slot.profile), self._now + limit_s)
        return True

    def may_place_shorter(self, number: int, kind: DemandShape) -> bool:
        """Return whether there may be room for demands of a kind with shorter time limits that follow a number."""
        return number < _TESTED and bool(self._reserver.blocked) and self._hopeless.get(kind, math.inf) > 0.0

    def _slots(self, number: int, demand: Demand, limit_s: float) -> list[tuple[GpuClaims, Slot]] | None:
        """Return slots for a demand with this time limit; None if there are too few."""
        chosen: list[list[tuple[GpuClaims, Slot]]] = []
        full = self._full.setdefault(demand.kind, {})
        for node in sorted(self._reserver.blocked & demand.pool):
            if limit_s >= _SHORTER * full.get(node, math.inf):
                continue
            slots = self._slots_on(node, number, demand, limit_s)
            if slots is None:
                late = any(limit_s > self._time_s(gpu_claims, number) >= 0 for gpu_claims in self._fleet.on(node))
                full[node] = limit_s if late and self._slots_on(node, number, demand, 0.0) else 0.0
                continue
            chosen.append(slots)
            if len(chosen) == demand.nodes:
                return list(chain.from_iterable(chosen))
        return None

    def _slots_on(self, node: str, number: int, demand: Demand, limit_s: float) -> list[tuple[GpuClaims, Slot]] | None:
        """Return a slot for each slice of a demand on a node; None if they do not all fit."""
        chosen: list[tuple[GpuClaims, Slot]] = []
        gpus = sorted(self._fleet.on(node), key=lambda gpu: (gpu.shape.idle, gpu.index))
        for profile, count in Counter(demand.slices).items():
            options = (
                (gpu_claims, slot)
                for gpu_claims in gpus
                if self._may_divide(gpu_claims, profile, limit_s, number)
                for slot in _free_slots(gpu_claims, profile, [slot for gpu, slot in chosen if gpu is gpu_claims])
            )
            found = list(islice(options, count))
            if len(found) < count:
                return None
            chosen += found
        return chosen

    def _time_s(self, gpu_claims: GpuClaims, number: int) -> float:
        """Return how long a job with this number may use reserved space of a GPU; -inf: not at all."""
        reserved = self._reserver.reserved_at.get(gpu_claims.index)
        if reserved is None:
            return -math.inf
        key = reserved.together, len(self._reserver.made)
        if key not in self._turns:
            self._turns[key] = self._turns_on(reserved.together)
        until = min([reserved.until, *(turn.start for turn in self._turns[key] if turn.number < number)])
        return until - self._now - _START_S

    def _may_divide(self, gpu_claims: GpuClaims, profile: Profile, limit_s: float, number: int) -> bool:
        """Return whether slots of a profile may be offered in the reserved space of a GPU to jobs with this limit."""
        time_s = self._time_s(gpu_claims, number)
        if limit_s > time_s or profile not in gpu_claims.gpu.geometry:
            return False
        # the only job with a reservation there delays no other if it starts early
        reserved = self._reserver.reserved_at[gpu_claims.index]
        jobs = reserved.jobs if len(reserved.jobs) == 1 else frozenset[int]()
        return not self._competes(profile, gpu_claims.node, jobs, time_s) and not any(
            slot.profile == profile for slot in self._reserver.offered_with(gpu_claims.index)
        )

    def _turns_on(self, gpus: frozenset[int]) -> list[_Turn]:
        """Return when pending jobs could be backfilled in the slots reserved on these GPUs.

        Those that Slurm could start now come first, because it does so at once. Not those with a reservation that
        should start before that.
        """
        reserved_at = [self._reserver.reserved_at[index] for index in gpus]
        until = min([reserved.until for reserved in reserved_at])
        slots = sum([len(self._fleet.gpu(index).reserved) for index in gpus])
        if until <= self._now or slots == 1:  # nothing can start before the reserved job in its only slot
            return []
        jobs = frozenset[int]().union(*[reserved.jobs for reserved in reserved_at])
        free_at, by_slurm_from = self._reserver.free_at(gpus), self._reserver.undivided_from(gpus)
        elsewhere = {made.job: math.inf if made.at is None else made.at for made in self._reserver.made}
        turns: list[_Turn] = []
        earliest = math.inf
        for number, demand in enumerate(islice(self._demands, _TESTED)):
            start = _start(demand, free_at)
            if demand.limit_s is None or start >= (latest := min(earliest, elsewhere.get(demand.job, math.inf))):
                continue
            time_s = until - max(start, self._now) - _START_S
            if demand.limit_s > time_s:
                continue
            if start < by_slurm_from and self._any_competes(demand, jobs, time_s):
                start = by_slurm_from
                if start >= latest or demand.limit_s > until - start - _START_S:
                    continue
            turns.append(_Turn(number if start >= self._now else -1, start))
            earliest = start
        if earliest <= self._now:  # its turn is over once it would end too late
            self._reserver.lasts_until = -math.inf
        return turns

    def _any_competes(self, demand: Demand, jobs: frozenset[int], time_s: float) -> bool:
        """Return whether a pending job that lasts longer could take a slice of a demand on any node."""
        nodes = self._reserver.blocked & demand.pool
        return any(self._competes(profile, node, jobs, time_s) for profile, _ in demand.parts for node in nodes)

    def _competes(self, profile: Profile, node: str, jobs: frozenset[int], time_s: float) -> bool:
        """Return whether a job that may last longer, without `jobs`, could take a slice of a profile on a node.

        May be wrongly true if very many jobs last longer and cannot use the node.
        """
        if _first_length(self._first_longest.get(profile, []), node, jobs, -math.inf) > time_s:  # in a long queue
            return True
        lengths = self._longest.get(profile, [])
        default_s = lengths[-1].limit_s if len(lengths) == _MOST else -math.inf
        return _first_length(lengths, node, jobs, default_s) > time_s

    @cached_property
    def _first_longest(self) -> dict[Profile, list[_Length]]:
        """The longest of the first demands, by profile."""
        return self._longest_of(islice(self._demands, _FIRST))

    @cached_property
    def _longest(self) -> dict[Profile, list[_Length]]:
        return self._longest_of(self._demands)

    def _longest_of(self, demands: Iterable[Demand]) -> dict[Profile, list[_Length]]:
        """Return the `_MOST` longest demands for each profile."""
        found: dict[Profile, list[_Length]] = {}
        for demand in demands:
            limit_s = math.inf if demand.limit_s is None else demand.limit_s
            for profile, _ in demand.parts:
                found.setdefault(profile, []).append(_Length(limit_s, demand.job, demand.pool))
        return {profile: heapq.nlargest(_MOST, lengths, key=itemgetter(0)) for profile, lengths in found.items()}

    def _claim(self, gpu_claims: GpuClaims, slot: Slot, claim: tuple[int, int, Profile], end: float) -> None:
        if any(self._reserver.offered_with(gpu_claims.index)):
            self._reserver.withdraw(gpu_claims.index)
            self._full.clear()
            self._hopeless.clear()
        condition = gpu_claims.shape.condition
        changed = condition._replace(used=condition.used.add(slot), keep=condition.keep.clear_of(slot.placement.mask))
        gpu_claims.until = (*gpu_claims.until, (slot, end))
        gpu_claims.settled = (*gpu_claims.settled, claim)
        self._fleet.change(gpu_claims, self._fleet.book.start(changed), gpu_claims.claims)


def _start(demand: Demand, free_at: Mapping[Profile, Mapping[str, Sequence[float]]]) -> float:
    """Return when a demand could start in slots that are free at these times by profile and node; infinite: never."""
    if len(demand.parts) != 1 or demand.apart is not None or demand.loan:
        return math.inf
    ((profile, count),) = demand.parts
    nodes = free_at.get(profile, {})
    starts = sorted(times[count - 1] for node, times in nodes.items() if len(times) >= count and node in demand.pool)
    return starts[demand.nodes - 1] if len(starts) >= demand.nodes else math.inf


def _first_length(lengths: Iterable[_Length], node: str, jobs: frozenset[int], default_s: float) -> float:
    """Return how long the first job that could use the node may last, without `jobs`; `default_s` if there is none."""
    return next((length.limit_s for length in lengths if length.job not in jobs and node in length.pool), default_s)


def _free_slots(gpu_claims: GpuClaims, profile: Profile, chosen: Sequence[Slot]) -> Iterator[Slot]:
    """Yield slots for a profile that are free together beside the chosen ones and the claims as they are placed now."""
    shape, geometry, condition = gpu_claims.shape, gpu_claims.gpu.geometry, gpu_claims.shape.condition
    taken, used = shape.taken, condition.used
    for slot in chosen:
        taken, used = taken.add(slot), used.add(slot)
    for slot in geometry.info(profile).slots:
        if geometry.fits(taken, slot):
            more = used.add(slot)
            if shape.book.shape(condition._replace(used=more, keep=condition.keep.clear_of(more.mask))):
                taken, used = taken.add(slot), more
                yield slot

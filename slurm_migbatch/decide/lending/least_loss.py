"""Which loans of slices end so that inference can start: all that cover one place, at least loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from slurm_migbatch.decide.capacity.spare import loss
from slurm_migbatch.decide.lending.allocation import Loan, reclaim
from slurm_migbatch.decide.lending.values import Seat, Space, Trainee
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile


def rooms_for(profile: Profile, spaces: Iterable[Space]) -> list[frozenset[Seat]]:
    """The smallest sets of loans by whose end a slice of this profile would have room; for `allocation.reclaim`.

    One set for each place that only loans and free space cover, beside others where a limit on counts (compute slices,
    engines) asks for more to go. No set holds another of the same GPU. GPUs that have room already offer none.
    """
    return [
        frozenset(Seat(space.node, space.gpu, slot) for slot in slots)
        for space in spaces
        if profile in space.geometry and not space.own
        for slots in _rooms(space.geometry, space.taken, tuple(one.slot for one in space.lent), profile)
    ]


@lru_cache(maxsize=1 << 14)
def _rooms(
    geometry: Geometry, taken: tuple[Slot, ...], lent: tuple[Slot, ...], profile: Profile
) -> tuple[tuple[Slot, ...], ...]:
    beside = Layout(taken)
    found: list[frozenset[Slot]] = []
    for slot in sorted(geometry.info(profile).slots):
        if not beside.free_of(slot.placement):
            continue
        must = [one for one in lent if one.placement.overlaps(slot.placement)]
        may = sorted(one for one in lent if not one.placement.overlaps(slot.placement))
        for count in range(len(may) + 1):
            some = [
                frozenset([*must, *more])
                for more in combinations(may, count)
                if geometry.fits(Layout(one for one in (*taken, *may) if one not in more), slot)
            ]
            found += some
            if some and not count:
                break
    least = [one for one in dict.fromkeys(found) if not any(other < one for other in found)]
    return () if frozenset() in least else tuple(tuple(sorted(one)) for one in least)


@dataclass(frozen=True)
class CallBack:
    """Loans that must end, in order, and the starts that no ending can make room for."""

    jobs: tuple[Hashable, ...]
    seats: tuple[Seat, ...]
    unserved: tuple[Profile, ...]


def call_back(
    starts: Sequence[Profile],
    spaces: Sequence[Space],
    trainees: Iterable[Trainee],
    now: float,
    *,
    horizon_s: float = 600.0,
    protect_s: float = 60.0,
) -> CallBack:
    """Which loans end, at least loss, so that inference jobs of these profiles can start, one after the other.

    What is free already, and what an earlier start left over, is used first. Loans that began lately, or were called
    back often, are ended last.
    """
    loans = [_loan(one, horizon_s) for one in trainees if one.seat is not None]
    owner = {seat: loan.job for loan in loans for seat in loan.slots}
    rooms = {(space.node, space.gpu): space for space in spaces}
    jobs: list[Hashable] = []
    seats: list[Seat] = []
    unserved: list[Profile] = []
    for profile in starts:
        at = _free(profile, rooms.values())
        if at is None:
            found = reclaim(loans, rooms_for(profile, rooms.values()), 1, now, protect_s)
            if not found.served:
                unserved.append(profile)
                continue
            node, gpu = found.slots[0].node, found.slots[0].gpu
            space = rooms[node, gpu]
            gone = {seat.slot for seat in found.slots}
            at = rooms[node, gpu] = replace(space, lent=tuple(one for one in space.lent if one.slot not in gone))
            seats += found.slots
            jobs += [owner[seat] for seat in found.slots]
            loans = [loan for loan in loans if not loan.slots & set(found.slots)]
        placed = plan_free(at.geometry, at.used, (profile,)).slots
        rooms[at.node, at.gpu] = replace(at, taken=(*at.taken, *placed))
    return CallBack(tuple(jobs), tuple(seats), tuple(unserved))


def _loan(one: Trainee, horizon_s: float) -> Loan[Seat]:
    assert one.seat is not None
    speed = one.speeds.get(one.seat.slot.profile, 0.0)
    stay = min(horizon_s, one.left_s / speed) if speed > 0 else horizon_s
    return Loan(one.job, frozenset([one.seat]), 1, 1, (0.0, speed), one.costs, one.since, one.hits, stay)


def _free(profile: Profile, spaces: Iterable[Space]) -> Space | None:
    """The GPU with room for it that loses least."""
    found: tuple[tuple[int, int], Space] | None = None
    for space in spaces:
        if profile in space.geometry and not space.own:
            lost = loss(space.geometry, space.used, (), profile)
            if lost is not None and (found is None or lost < found[0]):
                found = lost, space
    return None if found is None else found[1]

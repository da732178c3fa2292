"""Compute where on a GPU a slice could be placed once slots in use have ended, and when that should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from slurm_migbatch.decide.supply.admission import Admission, Busy, When
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile

#: Earlier than any time that is compared.
BEFORE = -math.inf


@lru_cache(maxsize=1 << 16)
def openings(geometry: Geometry, taken: Layout, profile: Profile) -> tuple[tuple[Slot, tuple[int, ...], int], ...]:
    """Return each legal slot of the profile, positions of the taken slots in its way, and their memory slices."""
    found = []
    for slot in geometry.info(profile).slots if profile in geometry else ():
        inside = tuple([i for i, taken_slot in enumerate(taken) if taken_slot.placement.mask & slot.placement.mask])
        others = [taken_slot.profile for i, taken_slot in enumerate(taken) if i not in inside]
        if geometry.admits((*others, slot.profile)):
            found.append((slot, inside, sum(taken.slots[i].placement.size for i in inside)))
    return tuple(found)


def first_of(known: Admission, profile: Profile) -> tuple[When, int] | None:
    """Return when the first GPU of a node should have room in its initial state, and its number.

    The time is `BEFORE` if it has room now. As long as none of its ends has passed, the result does not depend on the
    current time.
    """
    first: tuple[When, int] | None = None
    for i, (shape, until, when_of) in enumerate(zip(known.shapes, known.until, known.soonest, strict=True)):
        if profile not in when_of:
            found = openings(shape.geometry, shape.used, profile)
            when_of[profile] = min([latest_end(until, *opening[1:], BEFORE) for opening in found], default=None)
        when = when_of[profile]
        if when is not None and (first is None or when < first[0]):
            first = when, i
    known.first[profile] = first
    return first


def latest_end(until: Busy, inside: Sequence[int], blocked: int, now: float) -> When:
    """Return when these of the slots in use should all be free; `blocked`: their memory slices."""
    unlimited, latest = 0, now
    for i in inside:
        end = until[i][1]
        if end is None:
            unlimited = 1
        elif end > latest:
            latest = end
    return unlimited, latest, blocked


def when_free(geometry: Geometry, reserved: Sequence[Slot], busy: Busy, slot: Slot, now: float) -> When | None:
    """Return when a slot should be free; None if a reserved slot or the rest of the GPU forbids it."""
    mask = slot.placement.mask
    for other_slot in reserved:
        if other_slot.placement.mask & mask:
            return None
    unlimited, latest, blocked = 0, now, 0
    others = [other_slot.profile for other_slot in reserved]
    for other_slot, until in busy:
        if other_slot.placement.mask & mask:
            blocked += other_slot.placement.size
            if until is None:
                unlimited = 1
            else:
                latest = max(latest, until)
        else:
            others.append(other_slot.profile)
    if not geometry.admits((*others, slot.profile)):
        return None
    return unlimited, latest, blocked


@lru_cache(maxsize=1 << 16)
def first_fit(
    geometry: Geometry, held: tuple[Slot, ...], reserved: tuple[Slot, ...], slices: tuple[Profile, ...]
) -> tuple[tuple[Slot, ...], tuple[Profile, ...]]:
    """Return slots for those of the slices that fit on a GPU, taken in their order, and the other slices.

    No slice fits while a slot is held that overlaps a reserved one.
    """
    used, blocked = Layout(held), Layout(reserved)
    if used.mask & blocked.mask:
        return (), slices
    slots = plan_free(geometry, used.union(blocked), slices).slots
    unplaced = list(slices)
    for slot in slots:
        unplaced.remove(slot.profile)
    return slots, tuple(unplaced)

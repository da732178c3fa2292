"""Choose the slots of a job's slices on this node: pure, over the journal's rows of each GPU.

For each slice, the largest first, the options are compared in this order: a slot that the controller planned for this
profile before any other, then one that costs the plan nothing, then a warm instance before a place to be
created, then the fewest idle instances to destroy, then the place that leaves the most useful free space.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, LayoutError, Slot
from slurm_migbatch.mig.planning import choose
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node.journal_rows import JournalSlice

GpuSlot = tuple[str, Slot]
"""A slot on the GPU with this UUID."""


class GpuOccupancy(NamedTuple):
    """One GPU in the journal: `used` must not be touched, `idle` may be reused or destroyed.

    Instances that another hook is about to destroy (state `evict`) are among the idle ones: their space may be counted
    on, because the first hook that needs it and has the GPU's lock destroys them. They must not count as used: the
    claims that they make room for overlap them, so for a moment the GPU would seem full and the plan impossible.
    """

    uuid: str
    order: int
    geometry: Geometry
    used: tuple[Slot, ...]
    idle: tuple[JournalSlice, ...]
    planned: tuple[Slot, ...] = ()


class SlotClaim(NamedTuple):
    """One place for one slice. `warm` is the idle instance that is reused; `evict` are destroyed before.

    `planned` says whether the plan had this slot for this profile. `host` is the holder of the slice, if it is shared.
    """

    gpu: str
    slot: Slot
    warm: JournalSlice | None
    evict: tuple[JournalSlice, ...]
    planned: bool = False
    host: JournalSlice | None = None


def choose_slots(
    views: Sequence[GpuOccupancy], profiles: Sequence[Profile], uid: int, reuse: str, excluded: Collection[GpuSlot]
) -> tuple[SlotClaim, ...] | None:
    """Choose a slot for each of `profiles`, in their order; None if they do not all fit.

    `reuse` says whose idle instances may be reused: any, same-user (what the same user had last; the owner of one that
    was made manually is unknown) or never. `excluded` slots have just proved unusable.
    """
    order = sorted(range(len(profiles)), key=lambda i: (-_weight(views, profiles[i]), i))
    claims: dict[int, SlotClaim] = {}
    current = {view.uuid: view for view in views}
    for i in order:
        best = min(_options(current, profiles[i], uid, reuse, excluded), key=lambda option: option[0], default=None)
        if best is None:
            return None
        claims[i] = claim = best[1]
        current[claim.gpu] = _with_claim(current[claim.gpu], claim)
    return tuple([claims[i] for i in range(len(profiles))])


def _weight(views: Sequence[GpuOccupancy], profile: Profile) -> int:
    return max((v.geometry.info(profile).memory_slices for v in views if profile in v.geometry), default=0)


def _with_claim(view: GpuOccupancy, claim: SlotClaim) -> GpuOccupancy:
    evicted = {row.id for row in claim.evict} | ({claim.warm.id} if claim.warm is not None else set())
    return view._replace(
        used=(*view.used, claim.slot),
        idle=tuple([row for row in view.idle if row.id not in evicted]),
        planned=tuple([slot for slot in view.planned if slot != claim.slot]),
    )


def _options(
    views: Mapping[str, GpuOccupancy], profile: Profile, uid: int, reuse: str, excluded: Collection[GpuSlot]
) -> Iterator[tuple[tuple[int, ...], SlotClaim]]:
    """Yield the slots that a profile can have, each with its cost: the lowest is taken."""
    for view in views.values():
        if profile not in view.geometry:
            continue
        try:
            used = Layout(view.used)
        except LayoutError:
            continue  # a foreign instance overlaps one of migbatch; the GPU is not used until it is repaired
        free_plan = [s for s in view.planned if not used.mask & s.placement.mask]
        preferred = choose(view.geometry, used, profile)
        free_slices = view.geometry.memory_slices - used.mask.bit_count()
        for slot in view.geometry.info(profile).slots:
            if (view.uuid, slot) in excluded or not view.geometry.fits(used, slot):
                continue
            warm = _warm(view, slot, uid, reuse)
            evict = _evicted(view, used, slot, warm)
            if evict is None:
                continue
            planned = slot in free_plan
            disturbed = 0 if planned else sum(s.placement.overlaps(slot.placement) for s in free_plan)
            idle_evicted = sum(row.state == "idle" for row in evict)
            cost = (not planned, disturbed, warm is None, idle_evicted, free_slices, slot != preferred, view.order)
            yield (
                (*[int(part) for part in cost], slot.placement.start),
                SlotClaim(view.uuid, slot, warm, evict, planned),
            )


def _warm(view: GpuOccupancy, slot: Slot, uid: int, reuse: str) -> JournalSlice | None:
    for row in view.idle:
        if row.slot == slot and row.gi is not None and row.state == "idle":
            return row if reuse == "any" or (reuse == "same-user" and row.uid == uid) else None
    return None


def _evicted(
    view: GpuOccupancy, used: Layout, slot: Slot, warm: JournalSlice | None
) -> tuple[JournalSlice, ...] | None:
    """Return the idle instances to destroy before `slot` can be created; None if even that is not sufficient."""
    if warm is not None:
        return ()
    evicted = [row for row in view.idle if row.slot.placement.overlaps(slot.placement)]
    kept = [row for row in view.idle if row not in evicted]
    # Count limits (compute slices, instances of a profile, media engines) may require that more are destroyed: first
    # those that another hook is to destroy anyway, then those of the same profile, whose limit is most likely the one
    # exceeded. (The former may overlap the used slots that replace them, so no layout holds all of `kept`.)
    kept.sort(key=lambda row: (row.state != "idle", *_same_kind(row.slot.profile, slot.profile)))
    while not view.geometry.admits([*used.profiles, *(row.slot.profile for row in kept), slot.profile]):
        if not kept:
            return None
        evicted.append(kept.pop())
    return tuple(evicted)


def _same_kind(first: Profile, other: Profile) -> tuple[bool, bool]:
    return first == other, first.suffix == other.suffix

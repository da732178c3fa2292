"""Which places a job's slices take on this node: pure, over what the journal says of each GPU.

For each slice, the largest first, the options are compared in this order: a slot that the controller planned for this
profile before any other, then one that costs nothing to the plan, then a warm instance before a place that has to be
made, then the fewest idle instances to destroy, then the place that leaves the most useful free space.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, LayoutError, Slot
from slurm_migbatch.mig.planning import choose
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node.journal import Slice

Place = tuple[str, Slot]
"""A slot on the GPU with this UUID."""


class View(NamedTuple):
    """One GPU as the journal has it: `used` may not be touched, `idle` may be reused or destroyed.

    What another hook is about to destroy (state `evict`) is among the idle ones: its room may be counted on, because
    whoever needs it and has the GPU's lock first does that work. It must not count as used: what it makes room for was
    claimed before and lies across it, so for a moment the GPU would seem full and the plan impossible.
    """

    uuid: str
    order: int
    geometry: Geometry
    used: tuple[Slot, ...]
    idle: tuple[Slice, ...]
    planned: tuple[Slot, ...] = ()


class Claim(NamedTuple):
    """One place for one slice. `warm` is the idle instance that will be used as it is; `evict` goes before.

    `planned` says whether the plan had this slot for this profile. `host` is who has the slice, where it is shared.
    """

    gpu: str
    slot: Slot
    warm: Slice | None
    evict: tuple[Slice, ...]
    planned: bool = False
    host: Slice | None = None


def claim(
    views: Sequence[View], wishes: Sequence[Profile], uid: int, reuse: str, barred: Collection[Place] = ()
) -> tuple[Claim, ...] | None:
    """Places for all of `wishes`, in their order, or None where they do not all fit.

    `reuse` says whose idle instances may be used as they are: any, same-user (what the same user had last; whose it was
    is not known of one that was made by hand) or never. `barred` places have just proved unusable.
    """
    order = sorted(range(len(wishes)), key=lambda i: (-_weight(views, wishes[i]), i))
    found: dict[int, Claim] = {}
    now = {view.uuid: view for view in views}
    for i in order:
        best = min(_options(now, wishes[i], uid, reuse, barred), key=lambda option: option[0], default=None)
        if best is None:
            return None
        found[i] = taken = best[1]
        now[taken.gpu] = _after(now[taken.gpu], taken)
    return tuple([found[i] for i in range(len(wishes))])


def _weight(views: Sequence[View], profile: Profile) -> int:
    return max((v.geometry.info(profile).memory_slices for v in views if profile in v.geometry), default=0)


def _after(view: View, taken: Claim) -> View:
    gone = {piece.id for piece in taken.evict} | ({taken.warm.id} if taken.warm is not None else set())
    return view._replace(
        used=(*view.used, taken.slot),
        idle=tuple([piece for piece in view.idle if piece.id not in gone]),
        planned=tuple([slot for slot in view.planned if slot != taken.slot]),
    )


def _options(
    views: Mapping[str, View], profile: Profile, uid: int, reuse: str, barred: Collection[Place]
) -> Iterator[tuple[tuple[int, ...], Claim]]:
    for view in views.values():
        if profile not in view.geometry:
            continue
        try:
            used = Layout(view.used)
        except LayoutError:
            continue  # foreign and ours disagree; repair comes before this GPU is used again
        free_plan = [s for s in view.planned if not used.mask & s.placement.mask]
        preferred = choose(view.geometry, used, profile)
        room = view.geometry.memory_slices - used.mask.bit_count()
        for slot in view.geometry.info(profile).slots:
            if (view.uuid, slot) in barred or not view.geometry.fits(used, slot):
                continue
            warm = _warm(view, slot, uid, reuse)
            evict = _evicted(view, used, slot, warm)
            if evict is None:
                continue
            planned = slot in free_plan
            disturbed = 0 if planned else sum(s.placement.overlaps(slot.placement) for s in free_plan)
            fresh = sum(piece.state == "idle" for piece in evict)
            cost = (not planned, disturbed, warm is None, fresh, room, slot != preferred, view.order)
            yield (*[int(part) for part in cost], slot.placement.start), Claim(view.uuid, slot, warm, evict, planned)


def _warm(view: View, slot: Slot, uid: int, reuse: str) -> Slice | None:
    for piece in view.idle:
        if piece.slot == slot and piece.gi is not None and piece.state == "idle":
            return piece if reuse == "any" or (reuse == "same-user" and piece.uid == uid) else None
    return None


def _evicted(view: View, used: Layout, slot: Slot, warm: Slice | None) -> tuple[Slice, ...] | None:
    """The idle instances that must go before `slot` can be made; None where even that is not enough."""
    if warm is not None:
        return ()
    gone = [piece for piece in view.idle if piece.slot.placement.overlaps(slot.placement)]
    kept = [piece for piece in view.idle if piece not in gone]
    # Limits that are counted (compute slices, instances of a profile, media engines) may want more to go: those of
    # the same profile first, since their limit is the likeliest to be the one that is broken; before them those that
    # go anyway. (These may lie across used slots, for which they have to go, so no layout holds all of `kept`.)
    kept.sort(key=lambda piece: (piece.state != "idle", *_alike(piece.slot.profile, slot.profile)))
    while not view.geometry.admits([*used.profiles, *(piece.slot.profile for piece in kept), slot.profile]):
        if not kept:
            return None
        gone.append(kept.pop())
    return tuple(gone)


def _alike(one: Profile, other: Profile) -> tuple[bool, bool]:
    return one == other, one.suffix == other.suffix

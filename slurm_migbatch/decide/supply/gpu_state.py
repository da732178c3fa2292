"""Represent one GPU's condition while a plan is being made.

Thousands of GPUs are in few different conditions, so each condition is one shared `GpuState` object, and the result
of adding a claim to it is computed once. A claim is a slice for a pending job; its slot is chosen again after every
claim, so that claims never block each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import capacity, plan_free
from slurm_migbatch.mig.profile import Profile

#: (0 warm offer, 1 offer, 2 new slot, 3 new slot on a GPU of last choice; loss of useful space; withdrawn offers):
#: smaller is better
Cost = tuple[int, int, int]

_MAX_SHAPES = 200_000


class Condition(NamedTuple):
    """Everything that determines a `GpuState`.

    Attributes:
        keep: the slots offered so far.
        warm: slots with an existing instance.
        future: set if slots are reserved: the layout that the GPU will have when they are free. New slots must then fit
            next to the used ones now and into the future layout.
        claims: sorted.
        last_choice: whether new slots are placed here last: it is being cleared for another job, or its node is powered
            down.
    """

    geometry: Geometry
    used: Layout
    keep: Layout = EMPTY
    warm: Layout = EMPTY
    future: Layout | None = None
    claims: tuple[Profile, ...] = ()
    last_choice: bool = False


class GpuState:
    """A GPU in a condition, with its claims placed as `slots`."""

    __slots__ = (
        "_fitting",
        "_instead",
        "_next",
        "book",
        "claims",
        "condition",
        "future",
        "geometry",
        "idle",
        "keep",
        "last_choice",
        "rest",
        "slots",
        "taken",
        "used",
        "value",
        "warm",
    )

    def __init__(self, book: GpuStates, condition: Condition, slots: Layout) -> None:
        geometry, used, keep, self.warm, self.future, self.claims, self.last_choice = condition
        self.book, self.geometry, self.used, self.keep = book, geometry, used, keep
        self.condition, self.slots = condition, slots
        self.taken = used.union(slots)
        #: memory slices that are neither used nor claimed
        self.idle = geometry.memory_slices - self.taken.mask.bit_count()
        #: previous offers that no claim uses and that can stay
        self.rest = fitting_slots(geometry, self.taken, keep.clear_of(self.taken.mask))
        self.value = _value(geometry, self.taken)
        self._fitting: frozenset[Profile] | None = None
        self._next: dict[Profile, tuple[Cost, GpuState] | None] = {}
        self._instead: dict[tuple[Slot, Profile], GpuState | None] = {}

    @property
    def fitting(self) -> frozenset[Profile]:
        """Profiles of which one more slice may fit; of all others none fits."""
        if self._fitting is None:
            self._fitting = self.book.fitting(self.geometry, self.used, self.claims)
        return self._fitting

    def add(self, profile: Profile) -> tuple[Cost, GpuState] | None:
        """Return the condition with one more claim and its cost; None if it does not fit."""
        try:
            return self._next[profile]
        except KeyError:
            step = self._next[profile] = self._add(profile)
            return step

    def instead(self, slot: Slot, profile: Profile) -> GpuState | None:
        """Return the condition with one more claim and without a used slot; None if the claim does not fit."""
        try:
            return self._instead[slot, profile]
        except KeyError:
            condition = self.condition._replace(used=self.used.remove(slot))
            state = self._instead[slot, profile] = self.book.claimed(condition, (*self.claims, profile))
            return state

    def _add(self, profile: Profile) -> tuple[Cost, GpuState] | None:
        if profile not in self.fitting:
            return None
        after = self.book.claimed(self.condition, (*self.claims, profile))
        if after is None:
            return None
        new = [s for s in after.slots.slots if s.profile == profile and s not in self.slots]
        if any(s in self.keep for s in new):
            rank = 0 if any(s in self.keep and s in self.warm for s in new) else 1
        else:
            rank = 3 if self.last_choice else 2
        lost_offers = len(self.rest) + len(self.slots) + 1 - len(after.rest) - len(after.slots)
        return (rank, self.value - after.value, lost_offers), after


class Final(NamedTuple):
    """Result for one GPU: its plan, the free slots in it, the unclaimed ones of them, and the profiles of former slots
    that it lacks.
    """

    layout: Layout
    free: Counter[Profile]
    optional: Layout
    withdrawn: frozenset[Profile]


class GpuStates:
    """All GPU states so far; the planner keeps one instance, so that rounds share results."""

    def __init__(self) -> None:
        self._shapes: dict[Condition, GpuState | None] = {}
        self._finals: dict[tuple[object, ...], Final] = {}
        self._fitting: dict[tuple[Geometry, int, tuple[Profile, ...], tuple[Profile, ...]], frozenset[Profile]] = {}

    def trim(self) -> bool:
        """Clear the cache if it is large, and return whether it was cleared; to be called between plans."""
        if len(self._shapes) + len(self._finals) <= _MAX_SHAPES:
            return False
        self._shapes.clear()
        self._finals.clear()
        self._fitting.clear()
        return True

    def start(self, condition: Condition) -> GpuState:
        """Return the state of a GPU in a condition whose claims fit together."""
        shape = self.shape(condition)
        assert shape is not None
        return shape

    def claimed(self, condition: Condition, claims: Iterable[Profile]) -> GpuState | None:
        """Return the state of a GPU with these claims instead; None if they do not fit together."""
        return self.shape(condition._replace(claims=tuple(sorted(claims))))

    def shape(self, condition: Condition) -> GpuState | None:
        """Return the state of a GPU in a condition; None if its claims do not fit together."""
        try:
            return self._shapes[condition]
        except KeyError:
            slots = _arrange(condition)
            shape = None if slots is None else GpuState(self, condition, slots)
            self._shapes[condition] = shape
            return shape

    def fitting(self, geometry: Geometry, used: Layout, claims: tuple[Profile, ...]) -> frozenset[Profile]:
        """Return the profiles that fit next to used slots and claims, wherever the claims may be placed.

        That depends only on the memory slices in use and the profiles, so many GPUs share a result.
        """
        key = (geometry, used.mask, used.profiles, claims)
        fitting = self._fitting.get(key)
        if fitting is None:
            if claims:
                fitting = frozenset(
                    profile
                    for profile in self.fitting(geometry, used, claims[1:])
                    if len(plan_free(geometry, used, sorted((*claims, profile), reverse=True))) > len(claims)
                )
            else:
                profiles = [info.profile for info in geometry.profiles]
                fitting = frozenset(profile for profile in profiles if capacity(geometry, used, profile))
            self._fitting[key] = fitting
        return fitting

    def final(
        self,
        shape: GpuState,
        occupied: Layout,
        leased: Layout,
        offered: Layout,
        preference: tuple[Profile, ...],
        hidden: frozenset[Profile],
        *,
        anew: bool,
    ) -> Final:
        """Return the plan of a GPU in this condition, unclaimed space filled by preference except with `hidden`.

        `anew`: on a GPU without used or claimed slots, earlier offers are replaced by preference too.
        """
        anew = anew and not shape.taken and shape.future is None
        key = (shape, occupied, leased, offered, preference, hidden, anew)
        result = self._finals.get(key)
        if result is None:
            known = tuple(profile for profile in preference if profile in shape.geometry)
            cycle = known or default_preference(shape.geometry)
            rest = EMPTY if anew else shape.rest
            optional = rest.union(_leftover(shape, rest, tuple(p for p in cycle if p not in hidden)))
            available = shape.taken.minus(occupied).union(optional)
            result = self._finals[key] = _final(leased, offered, available, optional)
        return result


@lru_cache(maxsize=1 << 16)
def unchanged(leased: Layout, offered: Layout, keep: bool) -> Final:
    """Return the plan of a GPU that keeps its offers, or no longer offers anything."""
    return _final(leased, offered, offered if keep else EMPTY, EMPTY)


@lru_cache(maxsize=1 << 17)
def _value(geometry: Geometry, layout: Layout) -> int:
    """Return how useful the free space is: slots that could be added, by the square of their memory slices."""
    return sum(info.memory_slices**2 * capacity(geometry, layout, info.profile) for info in geometry.profiles)


def fitting_slots(geometry: Geometry, taken: Layout, wanted: Layout) -> Layout:
    """Return those of `wanted`, in order, that can all be added to `taken`."""
    if not wanted or _legal_together(geometry, taken, wanted):
        return wanted
    layout = taken
    kept = []
    for slot in wanted.slots:
        if geometry.fits(layout, slot):
            layout = layout.add(slot)
            kept.append(slot)
    return Layout(kept)


def _legal_together(geometry: Geometry, taken: Layout, wanted: Layout) -> bool:
    return (
        not taken.mask & wanted.mask
        and geometry.slots.issuperset(wanted.slots)
        and geometry.admits((*taken.profiles, *wanted.profiles))
    )


def _final(leased: Layout, offered: Layout, available: Layout, optional: Layout) -> Final:
    removed = offered.minus(available)
    return Final(
        layout=leased.union(available),
        free=available.counts(),
        optional=optional,
        withdrawn=frozenset(s.profile for s in removed.slots),
    )


def default_preference(geometry: Geometry) -> tuple[Profile, ...]:
    """Return the offers for empty space if demand is unknown: one slice of each size, the halves first.

    Plain profiles below the whole GPU, of each size the one with most compute: an H100 becomes 4g + 2g + 1g.
    """
    sizes: dict[int, Profile] = {}
    for info in geometry.profiles:  # the largest first; of one size the one with most compute comes first
        if info.profile.suffix == "" and info.memory_slices < geometry.full.memory_slices:
            sizes.setdefault(info.memory_slices, info.profile)
    return (*sizes.values(), geometry.full.profile)


def _leftover(shape: GpuState, rest: Layout, cycle: tuple[Profile, ...]) -> Layout:
    geometry = shape.geometry
    taken = shape.taken.union(rest)
    base = taken
    if shape.future is not None:
        inside = fitting_slots(geometry, shape.future, Layout((*shape.slots.slots, *rest.slots)))
        base = shape.future.union(inside)
    warm = shape.warm.clear_of(base.mask)
    added = plan_free(geometry, base, cycle * geometry.max_slots, keep=warm)
    if shape.future is None:
        return added
    return fitting_slots(geometry, taken, added.clear_of(taken.mask))


def _arrange(condition: Condition) -> Layout | None:
    """Return slots for all claims, with as few changes as possible; None if they do not fit.

    First the slots that are offered already, warm ones before cold ones, then empty space, then space that is offered
    as something else.
    """
    geometry, used, keep, warm, future, claims, _ = condition
    if not claims:
        return EMPTY
    base = used if future is None else future
    offers = keep.clear_of(base.mask | used.mask)
    wanted = Counter(claims)
    matched: list[Slot] = []
    for slot in sorted(offers.slots, key=lambda s: s not in warm):
        if wanted[slot.profile] > 0:
            wanted[slot.profile] -= 1
            matched.append(slot)
    fixed = fitting_slots(geometry, base, Layout(matched))
    if len(fixed) == len(claims) and (future is None or _fit_beside(geometry, used, fixed)):
        return fixed
    hints = offers.union(warm.clear_of(offers.mask))
    if len(fixed) == len(matched):
        unmatched = tuple(sorted(wanted.elements(), reverse=True))
        rest = Layout(s for s in offers.slots if s not in fixed)
        rest = fitting_slots(geometry, base.union(fixed), rest)
        for kept_offers in (rest, EMPTY):
            added = plan_free(geometry, base.union(fixed).union(kept_offers), unmatched, keep=hints)
            if len(added) == len(unmatched):
                slots = fixed.union(added)
                if future is None or _fit_beside(geometry, used, slots):
                    return slots
    ordered = tuple(sorted(claims, reverse=True))
    slots = plan_free(geometry, base, ordered, keep=hints)
    if len(slots) == len(ordered) and (future is None or _fit_beside(geometry, used, slots)):
        return slots
    return None


def _fit_beside(geometry: Geometry, used: Layout, slots: Layout) -> bool:
    """Return whether the slots fit next to the slots in use now."""
    return not slots.mask & used.mask and geometry.admits((*used.profiles, *slots.profiles))

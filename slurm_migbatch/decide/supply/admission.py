"""Prepare a node for planning: the states of its GPUs, its fixed slots, and everything that depends only on these.

A plan changes few nodes. For all others the results remain valid from round to round, as long as the node is the same
object.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import TypeAlias

from slurm_migbatch.decide.capacity.model import Mode, Node, NodePlan
from slurm_migbatch.decide.supply.gpu_state import Condition, GpuState, GpuStates
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.profile import Profile

#: Slots in use or claimed, and when each should be free (None: unknown).
Busy: TypeAlias = Sequence[tuple[Slot, float | None]]
#: When a slot should be free: 1 if a slot without a known end overlaps it (else 0), the time, overlapped memory slices.
When: TypeAlias = tuple[int, float, int]


class Admission:
    """One node at the beginning of a plan. Immutable, except for cached results.

    Slots that cannot be moved, because a job that just started or ended may be on any of them, are pinned: they count
    as used for space, and `fixed` of them can still be claimed as they are.

    Attributes:
        shapes: the state of each GPU; `until`: its slots in use in their order, and when they should be free.
        fixed: pinned slots that may still be claimed, by profile.
        short: slices in use that neither leases nor free slots explain.
        open: whether its slots may be changed.
        plan: the node's plan if nothing is claimed on it, and the preference for empty space in it.
        soonest: by profile, when each GPU should have room for it as it is; None: never (see `reserve`).
        first: by profile, the soonest of these and the number of the GPU; None: never on any GPU.
        together: by slices, when all of them should fit on the node as it is, and the number of the GPU and the slot of
            each; None: never (see `reserve`).
        next_end: the first time at which these change by themselves.
    """

    # A round reads the admission of every node several times, which is faster with slots.
    __slots__ = (
        "_cleared",
        "_idle",
        "_spare",
        "first",
        "fixed",
        "next_end",
        "node",
        "open",
        "plan",
        "shapes",
        "short",
        "soonest",
        "together",
        "until",
    )

    def __init__(self, node: Node, book: GpuStates, before: Admission | None) -> None:
        """Admit a node.

        Args:
            before: the node's last admission with the same book: its results for GPUs that are the same objects remain
                valid.
        """
        self.node = node
        reusable = {} if before is None or before.node.asleep != node.asleep else before.unpinned()
        held = node.unmatched
        self.short = _short(node, held) if held else Counter[Profile]()
        unchangeable = node.mode is Mode.FROZEN or bool(self.short)
        self.open = node.mode is Mode.OPEN and not unchangeable
        fixed: Counter[Profile] = Counter()
        shapes: list[GpuState] = []
        until: list[Busy] = []
        soonest: list[dict[Profile, When | None]] = []
        hides = node.mode in (Mode.WITHDRAWN, Mode.CLOSED)
        for gpu in node.gpus:
            if not (unchangeable or held or hides) and id(gpu) in reusable:
                shape, known_soonest = reusable[id(gpu)]
                shapes.append(shape)
                until.append(gpu.busy)
                soonest.append(known_soonest)
                continue
            soonest.append({})
            offers = EMPTY if hides else gpu.free
            pinned = offers if unchangeable else _only(offers, held)
            if pinned:
                fixed.update(slot.profile for slot in pinned.slots)
            shapes.append(
                book.start(
                    Condition(
                        gpu.geometry,
                        gpu.occupied.union(pinned) if pinned else gpu.occupied,
                        offers.minus(pinned) if pinned else offers,
                        gpu.warm,
                        last_choice=node.asleep,
                    )
                )
            )
            until.append(in_order([*gpu.busy, *((slot, None) for slot in pinned.slots)]) if pinned else gpu.busy)
        self.fixed = fixed - held
        self.shapes, self.until = tuple(shapes), tuple(until)
        self.plan: tuple[tuple[Profile, ...], NodePlan] | None = None
        self.soonest: Sequence[dict[Profile, When | None]] = soonest
        self.first: dict[Profile, tuple[When, int] | None] = {}
        self.together: dict[tuple[Profile, ...], tuple[float, Sequence[tuple[int, Slot]]] | None] = {}
        self.next_end = min((end for busy in until for _, end in busy if end is not None), default=math.inf)
        self._idle: int | None = None
        self._spare: Counter[Profile] | None = None
        self._cleared: tuple[Collection[str], Admission] | None = None

    def unpinned(self) -> dict[int, tuple[GpuState, dict[Profile, When | None]]]:
        """Return the results that depend only on the GPUs, by their identity."""
        if not self.open or self.node.unmatched:
            return {}
        results = zip(self.node.gpus, self.shapes, self.soonest, strict=True)
        return {id(gpu): (shape, soonest) for gpu, shape, soonest in results}

    def clearing(self, uuids: Collection[str], book: GpuStates) -> Admission:
        """Return a copy with these GPUs marked as being cleared for another job: new slots are placed there last.

        The same object for the same GPUs as in the last call.
        """
        if self._cleared is not None and self._cleared[0] == uuids:
            return self._cleared[1]
        copied = copy(self)
        copied.shapes = tuple(
            book.start(Condition(shape.geometry, shape.used, shape.keep, shape.warm, last_choice=True))
            if gpu.uuid in uuids
            else shape
            for gpu, shape in zip(self.node.gpus, self.shapes, strict=True)
        )
        copied.plan = copied._cleared = None
        self._cleared = uuids, copied
        return copied

    @property
    def idle(self) -> int:
        """Memory slices that are neither used nor claimed."""
        if self._idle is None:
            self._idle = sum([shape.idle for shape in self.shapes])
        return self._idle

    @property
    def spare(self) -> Mapping[Profile, int]:
        """Slots on offer that may remain, by profile."""
        if self._spare is None:
            self._spare = Counter([slot.profile for shape in self.shapes for slot in shape.rest.slots])
        return self._spare


def in_order(busy: Busy) -> Busy:
    """Return the busy slots sorted, in the order of a layout."""
    return tuple(sorted(busy, key=itemgetter(0)))


def _short(node: Node, held: Counter[Profile]) -> Counter[Profile]:
    free_counts = Counter(slot.profile for gpu in node.gpus for slot in gpu.free.slots)
    short = held - free_counts
    # A lease that overlaps planned slots may have ended without a report yet, and one of these may be in use.
    for gpu in node.gpus:
        if gpu.offered is not gpu.free:
            hidden = gpu.offered.minus(gpu.free)
            short |= Counter({slot.profile: held[slot.profile] for slot in hidden.slots})
    return +short


def _only(layout: Layout, profiles: Counter[Profile]) -> Layout:
    return Layout(s for s in layout.slots if profiles[s.profile] > 0) if profiles else EMPTY

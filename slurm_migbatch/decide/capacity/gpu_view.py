"""Build the planner's view of a GPU from its node's report, its plan, and the end times of its jobs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from slurm_migbatch.decide.capacity.facts import GpuFacts
from slurm_migbatch.decide.capacity.model import Gpu, Lease
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot, layout_of


class KnownGpu(NamedTuple):
    """A GPU for the planner, and what it was made from; kept, because most GPUs are the same in the next round.

    `gpu` is None if the node's report contradicts itself; `contradiction` is the reason.
    """

    facts: GpuFacts
    rows: tuple[tuple[str, int, int], ...]
    until: tuple[float | None, ...]
    guests: tuple[bool, ...]
    gpu: Gpu | None
    contradiction: str = ""

    @classmethod
    def of(
        cls,
        facts: GpuFacts,
        rows: tuple[tuple[str, int, int], ...],
        until: tuple[float | None, ...],
        guests: tuple[bool, ...] = (),
    ) -> KnownGpu:
        """Read a node's report of one GPU.

        Args:
            guests: whether Slurm counts each lease as a guest; empty: none of them.
        """
        geometry, zombies = facts.geometry, facts.zombies
        leased = tuple([slot for slot, _ in facts.leases])
        contradiction = _contradiction(geometry, (*leased, *zombies) if zombies else leased)
        if contradiction:
            return cls(facts, rows, until, guests, None, contradiction)
        as_guest = guests or (False,) * len(until)
        leases = [
            Lease(slot, run[0], end, guest)
            for (slot, run), end, guest in zip(facts.leases, until, as_guest, strict=True)
        ]
        if zombies:
            leases += [Lease(slot) for slot in zombies]
        offered = _sensible(geometry, rows, leased) if rows else EMPTY
        return cls(facts, rows, until, guests, Gpu(facts.uuid, geometry, tuple(leases), offered, facts.warm))


@lru_cache(maxsize=1 << 15)
def _contradiction(geometry: Geometry, slots: tuple[Slot, ...]) -> str:
    unknown = [slot for slot in slots if slot.profile not in geometry]
    if unknown:
        return f"{unknown[0].profile} is none of its profiles"
    try:
        Layout(slots)
    except LayoutError as error:
        return str(error)
    return ""


@lru_cache(maxsize=1 << 16)
def _sensible(geometry: Geometry, rows: tuple[tuple[str, int, int], ...], leased: tuple[Slot, ...]) -> Layout:
    """Return the slots of a plan that are not leased; none if the plan is not legal on this GPU."""
    try:
        layout = Layout(Slot.of(*row) for row in rows)
        geometry.check(layout)
    except (LayoutError, ValueError):
        return EMPTY
    return layout_of(tuple([slot for slot in layout.slots if slot not in leased]))

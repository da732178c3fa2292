"""Build the planner's view of a GPU from its node's report, its plan, and the end times of its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slurm_migbatch.decide.capacity.facts import GpuFacts
from slurm_migbatch.decide.capacity.model import Gpu, Lease
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot


@dataclass(frozen=True)
class KnownGpu:
    """A GPU for the planner, and what it was made from; kept, because most GPUs are the same in the next round."""

    facts: GpuFacts
    rows: tuple[tuple[str, int, int], ...]
    until: tuple[float | None, ...]
    guests: tuple[bool, ...]
    #: None where what the node says of it contradicts itself: `contradiction` says how
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
            facts: the node's report.
            rows: the slots of its current plan.
            until: when each lease should end.
            guests: whether Slurm counts each lease as a guest; empty: none of them.
        """
        contradiction = _contradiction(facts)
        if contradiction:
            return cls(facts, rows, until, guests, None, contradiction)
        alone = guests or (False,) * len(until)
        leases = [
            Lease(slot, run[0], end, guest) for (slot, run), end, guest in zip(facts.leases, until, alone, strict=True)
        ]
        leases += [Lease(slot) for slot in facts.zombies]
        taken = {slot for slot, _ in facts.leases}
        offered = _sensible(facts.geometry, rows)
        if not taken.isdisjoint(offered.slots):
            offered = Layout(s for s in offered.slots if s not in taken)
        return cls(facts, rows, until, guests, Gpu(facts.uuid, facts.geometry, tuple(leases), offered, facts.warm))


def _contradiction(facts: GpuFacts) -> str:
    slots = [*(slot for slot, _ in facts.leases), *facts.zombies]
    unknown = [slot for slot in slots if slot.profile not in facts.geometry]
    if unknown:
        return f"{unknown[0].profile} is none of its profiles"
    try:
        Layout(slots)
    except LayoutError as error:
        return str(error)
    return ""


@lru_cache(maxsize=1 << 16)
def _sensible(geometry: Geometry, rows: tuple[tuple[str, int, int], ...]) -> Layout:
    try:
        layout = Layout(Slot.of(*row) for row in rows)
        geometry.check(layout)
    except (LayoutError, ValueError):
        return EMPTY
    return layout

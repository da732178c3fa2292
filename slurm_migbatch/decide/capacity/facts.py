"""State of a node's GPUs by its reports: leased slots, slots out of use, and idle instances."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU: its geometry, the slot of each lease with its run (job and restart count), zombies, idle instances.

    `guests` are second holders of slots that are among the leases.
    """

    uuid: str
    geometry: Geometry
    leases: tuple[tuple[Slot, tuple[int, int]], ...] = ()
    zombies: tuple[Slot, ...] = ()
    warm: Layout = EMPTY
    guests: tuple[tuple[Slot, tuple[int, int]], ...] = ()

    @property
    def holders(self) -> tuple[tuple[Slot, tuple[int, int]], ...]:
        """All slots with a run, once for each run that holds one."""
        return (*self.leases, *self.guests)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node: its GPUs in MIG mode, and whether jobs can have slices there at all."""

    gpus: tuple[GpuFacts, ...]
    healthy: bool = True

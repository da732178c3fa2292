"""Model GPUs, their instances and holders: possible changes, and their cost.

A `Place` is a slot of one GPU. Every held place belongs to the GPU's `used` layout; `layout` also contains the idle
instances, which stay until their space is needed (warm reuse). The caller passes the time, and the policy decides
which place is taken.

GPUs on which the same slots are held are grouped as bits of one number (`alike`), so that a policy examines each
arrangement once instead of each GPU, and finds the first GPU of an arrangement in constant time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from slurm_migbatch.lab.sim.fragmentation import fragmentation
from slurm_migbatch.lab.sim.gpus import CREATE_S, DESTROY_S
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot


class PlaceError(ValueError):
    """A place cannot be taken as requested: a bug in the policy. The message says which GPU and why."""


class Place(NamedTuple):
    """A slot on a GPU, by the GPU's index in the cluster."""

    gpu: int
    slot: Slot

    def __str__(self) -> str:
        return f"{self.gpu}:{self.slot}"


class Reconfiguration(NamedTuple):
    """Creation of an instance: the layout after it, its seconds, and the numbers of destroyed and created instances."""

    layout: Layout
    seconds: float
    destroyed: int
    created: int


class NodePart(NamedTuple):
    """Whole nodes of a cluster: GPUs and nodes as bits, and the number of GPUs."""

    gpus: int
    nodes: int
    size: int


class HeldPlace:
    """A held place: the jobs that hold it, the time up to which it is metered, and from when on a job progresses."""

    __slots__ = ("opened", "resumes", "runs", "slices")

    def __init__(self, slices: int, now: float) -> None:
        self.slices = slices
        self.runs: list[SimulatedRun] = []
        self.opened = now
        self.resumes = now


class UtilizationMeter:
    """Sum of compute-slice seconds: `held`, and of these `busy`, in which a job made progress."""

    __slots__ = ("busy", "held")

    def __init__(self) -> None:
        self.held = self.busy = 0.0

    def mark(self, cell: HeldPlace, now: float) -> None:
        """Add the cell's time up to now, and update the time from which on a job makes progress in it."""
        elapsed = now - cell.opened
        if elapsed > 0:
            self.held += cell.slices * elapsed
            self.busy += cell.slices * max(0.0, now - max(cell.opened, cell.resumes))
        cell.opened = now
        runs = cell.runs
        if len(runs) == 1:
            cell.resumes = runs[0].resumes
        elif runs:
            cell.resumes = min(run.resumes for run in runs)


class SimulatedGpu:
    """One GPU.

    Attributes:
        layout: its instances, including idle ones. `used`: the held ones, which are the keys of `cells`.
        held: number of held compute slices.
        blocked: memory slices whose last holder is still saving its work, as bits, and until when.
        whole: the whole GPU as one place.
    """

    __slots__ = ("blocked", "cells", "geometry", "held", "index", "layout", "node", "used", "whole")

    def __init__(self, index: int, node: int, geometry: Geometry) -> None:
        self.index = index
        self.node = node
        self.geometry = geometry
        self.layout: Layout = EMPTY
        self.used: Layout = EMPTY
        self.cells: dict[Slot, HeldPlace] = {}
        self.held = 0
        self.blocked: list[tuple[int, float]] = []
        self.whole = Place(index, geometry.full.slots[0])

    def wait(self, slot: Slot, now: float) -> float:
        """Return the seconds until the previous holders of the slot's memory slices have saved their work."""
        if not self.blocked:
            return 0.0
        self.blocked = [(mask, until) for mask, until in self.blocked if until > now]
        mask = slot.placement.mask
        return max((until - now for bits, until in self.blocked if bits & mask), default=0.0)


class SimulatedCluster:
    """All GPUs.

    Attributes:
        gpus: by index. GPUs of a node have adjacent indexes.
        nodes: the range of GPU indexes of each node.
        empty: the GPUs without held places, as bits.
        by_empty: at index n the nodes with n empty GPUs, as bits.
        alike: for each geometry and layout of held slots, the GPUs that have it, as bits.
        fragmentation: sum of `lab.sim.fragmentation.fragmentation` over all GPUs, updated if `fragments` is set.
    """

    def __init__(self, nodes: Sequence[Sequence[Geometry]]) -> None:
        self.gpus: list[SimulatedGpu] = []
        self.nodes: list[range] = []
        self.alike: dict[tuple[Geometry, Layout], int] = {}
        for number, geometries in enumerate(nodes):
            first = len(self.gpus)
            for geometry in geometries:
                gpu = SimulatedGpu(len(self.gpus), number, geometry)
                self.gpus.append(gpu)
                key = (geometry, EMPTY)
                self.alike[key] = self.alike.get(key, 0) | 1 << gpu.index
            self.nodes.append(range(first, len(self.gpus)))
        if not self.gpus:
            raise PlaceError("a cluster needs at least one GPU")
        self.empty = (1 << len(self.gpus)) - 1
        self._empty_of = [len(node) for node in self.nodes]
        self.by_empty = [0] * (max(self._empty_of) + 1)
        for number, count in enumerate(self._empty_of):
            self.by_empty[count] |= 1 << number
        self.slices = sum(gpu.geometry.compute_slices for gpu in self.gpus)
        self.fragments = any(len(gpu.geometry.profiles) > 1 for gpu in self.gpus)
        self.fragmentation = 0.0

    @classmethod
    def of(cls, geometry: Geometry, gpus: int, per_node: int = 8) -> SimulatedCluster:
        """Return a cluster of equal GPUs; the last node may have fewer."""
        return cls([[geometry] * min(per_node, gpus - first) for first in range(0, gpus, per_node)])

    def part(self, nodes: range | None = None) -> NodePart:
        """Return these nodes (by default all) as a part of the cluster, for policies limited to them."""
        chosen = range(len(self.nodes)) if nodes is None else nodes
        gpus = 0
        for node in chosen:
            for gpu in self.nodes[node]:
                gpus |= 1 << gpu
        return NodePart(gpus, sum(1 << node for node in chosen), gpus.bit_count())

    # -- queries ----------------------------------------------------------------------------------------------------

    def runs(self, place: Place) -> Sequence[SimulatedRun]:
        """Return the runs that hold the place."""
        cell = self.gpus[place.gpu].cells.get(place.slot)
        return cell.runs if cell is not None else ()

    def holders(self, gpu: int) -> list[SimulatedRun]:
        """Return every run on a GPU, each once, in the order of its slots."""
        cells = self.gpus[gpu].cells
        if len(cells) == 1:
            return list(next(iter(cells.values())).runs)
        return list(dict.fromkeys(run for slot in sorted(cells) for run in cells[slot].runs))

    def arrangements(self, among: int) -> Iterator[tuple[Geometry, Layout, int]]:
        """Yield geometry, held layout and GPUs (bits) of each arrangement that a GPU of `among` has."""
        for (geometry, used), gpus in self.alike.items():
            if gpus & among:
                yield geometry, used, gpus & among

    # -- changes (made by the engine) --------------------------------------------------------------------------

    def configure(self, gpu: int, layout: Layout) -> None:
        """Give an empty GPU the idle instances of `layout`, at no cost, as at the start of a simulation.

        Raises:
            PlaceError: a place on it is held, or the layout is not legal there.
        """
        target = self.gpus[gpu]
        if target.cells:
            raise PlaceError(f"GPU {gpu} is in use ({target.used})")
        try:
            target.geometry.check(layout)
        except LayoutError as error:
            raise PlaceError(f"GPU {gpu}: {error}") from None
        target.layout = layout

    def take(self, place: Place, run: SimulatedRun, now: float) -> Reconfiguration | None:
        """Let `run` hold a place; return the change of instances, None if the place's instance already existed.

        Idle instances in the way are destroyed. Raises PlaceError if held ones are in the way.
        """
        gpu = self.gpus[place.gpu]
        slot = place.slot
        cell = gpu.cells.get(slot)
        if cell is not None:
            cell.runs.append(run)
            return None
        change = None
        if slot not in gpu.layout.slots:
            if not gpu.geometry.fits(gpu.used, slot):
                raise PlaceError(
                    f"GPU {place.gpu} has no room for {slot} of {run.job.name}: {gpu.geometry.why_not(gpu.used, slot)}"
                )
            change = reconfigured(gpu.geometry, gpu.layout, gpu.used, slot)
            gpu.layout = change.layout
        cell = HeldPlace(gpu.geometry.info(slot.profile).compute_slices, now)
        cell.runs.append(run)
        gpu.cells[slot] = cell
        self._hold(gpu, _added(gpu.used, slot), cell.slices)
        return change

    def leave(self, place: Place, run: SimulatedRun, now: float, until: float) -> HeldPlace | None:
        """End `run`'s hold; return the cell if no other run holds it. Its slices can be used from `until` on."""
        gpu = self.gpus[place.gpu]
        cell = gpu.cells[place.slot]
        cell.runs.remove(run)
        if until > now:
            gpu.blocked.append((place.slot.placement.mask, until))
        if cell.runs:
            return None
        del gpu.cells[place.slot]
        self._hold(gpu, _removed(gpu.used, place.slot), -cell.slices)
        return cell

    def _hold(self, gpu: SimulatedGpu, used: Layout, slices: int) -> None:
        bit = 1 << gpu.index
        before = (gpu.geometry, gpu.used)
        remaining = self.alike[before] ^ bit
        if remaining:
            self.alike[before] = remaining
        else:
            del self.alike[before]
        key = (gpu.geometry, used)
        self.alike[key] = self.alike.get(key, 0) | bit
        if self.fragments:
            self.fragmentation += fragmentation(gpu.geometry, used) - fragmentation(*before)
        gpu.used = used
        gpu.held += slices
        if bool(self.empty & bit) == bool(gpu.cells):
            self.empty ^= bit
            count, mark = self._empty_of[gpu.node], 1 << gpu.node
            self.by_empty[count] ^= mark
            count += -1 if gpu.cells else 1
            self.by_empty[count] |= mark
            self._empty_of[gpu.node] = count


def lowest(bits: int) -> int:
    """Return the index of the first GPU among `bits`, -1 if there is none."""
    return (bits & -bits).bit_length() - 1


def bit_indexes(bits: int) -> Iterator[int]:
    """Yield the indexes among `bits`, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


@lru_cache(maxsize=1 << 14)
def _added(layout: Layout, slot: Slot) -> Layout:
    return layout.add(slot)


@lru_cache(maxsize=1 << 14)
def _removed(layout: Layout, slot: Slot) -> Layout:
    return layout.remove(slot)


@lru_cache(maxsize=1 << 16)
def reconfigured(geometry: Geometry, layout: Layout, used: Layout, slot: Slot) -> Reconfiguration:
    """Return the creation of `slot`, which fits next to `used`: idle instances in its way are destroyed before.

    These are the ones that overlap it and, if a count limit still forbids it, other idle ones, the smallest first.
    On a GPU without MIG (one profile) nothing has to be created.
    """
    if len(geometry.profiles) == 1:
        return Reconfiguration(layout.add(slot), 0.0, 0, 0)
    idle = layout.minus(used)
    destroyed = [other for other in idle.slots if other.placement.overlaps(slot.placement)]
    remaining = layout.minus(Layout(destroyed))
    for other in idle.slots:
        if geometry.fits(remaining, slot):
            break
        if other in remaining:
            remaining = remaining.remove(other)
            destroyed.append(other)
    seconds = sum(_seconds(DESTROY_S, geometry, other) for other in destroyed) + _seconds(CREATE_S, geometry, slot)
    return Reconfiguration(remaining.add(slot), seconds, len(destroyed), 1)


def _seconds(table: dict[int, float], geometry: Geometry, slot: Slot) -> float:
    slices = geometry.info(slot.profile).compute_slices
    return table[min(known for known in table if known >= min(slices, max(table)))]

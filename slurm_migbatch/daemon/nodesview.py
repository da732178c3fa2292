"""Keep the reported state of the nodes' GPUs: slots that are taken, disabled ones, and idle instances.

Held in memory and updated from the stream of node events; after a restart of the service it is loaded from the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot, layout_of
from slurm_migbatch.mig.profile import ProfileError

if TYPE_CHECKING:
    from slurm_migbatch.store.queries import LeaseRow

log = logging.getLogger(__name__)

#: slots of one GPU that are remembered as held, or as zombies; more than any GPU can have
MOST_SLOTS = 128


class NodesView(Protocol):
    """The controller's interface to the nodes' state."""

    def facts(self) -> Mapping[str, NodeFacts]:
        """Return every node that has described its GPUs, as last reported."""

    def emptied(self, node: str) -> NodeFacts | None:
        """Return a node as it will be after its next boot, without instances; None if it never described its GPUs."""


@dataclass
class _Gpu:
    geometry: Geometry
    held: dict[Slot, tuple[int, int]] = field(default_factory=dict)  # slot -> (job, restart)
    guests: dict[Slot, tuple[int, int]] = field(default_factory=dict)  # second holders of held slots
    zombies: set[Slot] = field(default_factory=set)
    made: set[Slot] = field(default_factory=set)
    #: it does not answer, or the node does not use it for now: jobs keep what they hold, and nothing else is free
    unusable: bool = False
    #: the value returned last; None if something has changed since
    last_facts: GpuFacts | None = None

    @property
    def counts(self) -> bool:
        """Whether the GPU is one of its node's for now: it can be used, or jobs hold slices on it."""
        return bool(self.held) or not self.unusable

    def facts(self, uuid: str) -> GpuFacts:
        """Return the GPU's state; the same object until something changes."""
        if self.last_facts is None:
            self.last_facts = self._facts(uuid)
        return self.last_facts

    def _facts(self, uuid: str) -> GpuFacts:
        zombies: Iterable[Slot] = self.zombies.difference(self.held) if self.zombies else ()
        if self.unusable:
            zombies = _disjoint(sorted(self.geometry.slots, key=lambda slot: -slot.placement.size), self.held).slots
        unheld = self.made.difference(self.held)
        return GpuFacts(
            uuid=uuid,
            geometry=self.geometry,
            leases=tuple(sorted(self.held.items())),
            zombies=tuple(sorted(zombies)),
            warm=_disjoint(sorted(unheld), (*self.held, *zombies)) if unheld else EMPTY,
            guests=tuple(sorted(self.guests.items())) if self.guests else (),
        )

    def forget(self, *, runs: bool) -> None:
        """Forget the instances, and with `runs` who has them."""
        self.last_facts = None
        self.zombies.clear()
        self.made.clear()
        if runs:
            self.held.clear()
            self.guests.clear()

    def take(self, slot: Slot, run: tuple[int, int], host_run: tuple[int, int] | None) -> None:
        """Record that a run has the slot now; with `host_run`, together with that run."""
        if slot not in self.held and len(self.held) >= MOST_SLOTS:
            return
        self.last_facts = None
        if host_run is not None and self.held.get(slot) == host_run:
            self.guests[slot] = run
        else:  # the end of an earlier holder was not received
            self.held[slot] = run
            self.guests.pop(slot, None)
        self.make(slot)

    def make(self, slot: Slot) -> None:
        """Record that there is an instance in the slot, if the GPU has such a slot."""
        if slot in self.geometry.slots:
            self.made.add(slot)

    def give(self, slot: Slot, run: tuple[int, int]) -> None:
        """Record that a run no longer has the slot; a run that shared it keeps it."""
        self.last_facts = None
        if self.guests.get(slot) == run:
            del self.guests[slot]
        elif self.held.get(slot) == run:
            if slot in self.guests:
                self.held[slot] = self.guests.pop(slot)
            else:
                del self.held[slot]


class LiveView:
    """`NodesView` from inventory and events; safe to update from one thread and read from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, dict[str, _Gpu]] = {}
        self._unhealthy: set[str] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._emptied: dict[str, NodeFacts] = {}
        self._geometries: Mapping[str, Sequence[Geometry]] | None = None

    def load(
        self,
        inventory: Mapping[str, Sequence[Mapping[str, Any]]],
        leases: Iterable[LeaseRow],
        removed: Mapping[str, Geometry] = MappingProxyType({}),
    ) -> None:
        """Load the state from the store. Of two leases of one slot, the first is the host's, the other the guest's.

        `removed` has the geometries, by UUID, of GPUs that their nodes do not report now; jobs may hold slices there.
        """
        with self._lock:
            for node, gpus in inventory.items():
                self._inventory(node, gpus)
            for lease in leases:
                on_node = self._nodes.get(lease.node, {})
                if lease.gpu not in on_node and lease.gpu in removed:
                    on_node[lease.gpu] = _Gpu(removed[lease.gpu], unusable=True)
                gpu, slot = on_node.get(lease.gpu), _slot(lease.profile, lease.start, lease.size)
                if gpu is not None and slot is not None:
                    gpu.last_facts = None
                    (gpu.guests if slot in gpu.held else gpu.held)[slot] = (lease.job, lease.restart)
                self._facts.pop(lease.node, None)
                self._emptied.pop(lease.node, None)
            self._geometries = None

    def apply(self, node: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Process a node's events, in order."""
        with self._lock:
            for event in events:
                self._event(node, event)
            self._facts.pop(node, None)

    def facts(self) -> Mapping[str, NodeFacts]:
        """See NodesView."""
        with self._lock:
            for name, gpus in self._nodes.items():
                if name not in self._facts:
                    self._facts[name] = NodeFacts(
                        tuple(gpu.facts(uuid) for uuid, gpu in gpus.items() if gpu.counts), name not in self._unhealthy
                    )
            return dict(self._facts)

    def emptied(self, node: str) -> NodeFacts | None:
        """See NodesView."""
        with self._lock:
            if node not in self._nodes:
                return None
            if node not in self._emptied:
                gpus = self._nodes[node].items()
                self._emptied[node] = NodeFacts(tuple(GpuFacts(uuid, gpu.geometry) for uuid, gpu in gpus if gpu.counts))
            return self._emptied[node]

    def geometries(self) -> Mapping[str, Sequence[Geometry]]:
        """Return the geometry of each GPU in MIG mode by node; the same object until a node describes its GPUs."""
        with self._lock:
            if self._geometries is None:
                self._geometries = {
                    node: [gpu.geometry for gpu in gpus.values() if gpu.counts] for node, gpus in self._nodes.items()
                }
            return self._geometries

    # -- events ------------------------------------------------------------------------------------------------

    def _event(self, node: str, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "inventory":
            self._inventory(node, event.get("gpus") or ())
            self._unhealthy.discard(node)
        elif kind == "boot":
            for gpu in self._nodes.get(node, {}).values():
                gpu.forget(runs=True)
        elif kind == "state":
            self._state(node, event)
        elif kind == "fault":
            if event.get("drain"):
                self._unhealthy.add(node)
        elif kind in ("start", "stop"):
            self._slices(node, event, starts=kind == "start")
        elif kind in ("create", "destroy", "zombie", "cleared"):
            self._instances(node, [event], kind)

    def _inventory(self, node: str, gpus: Iterable[Mapping[str, Any]]) -> None:
        before = self._nodes.get(node, {})
        now: dict[str, _Gpu] = {}
        for row in gpus:
            uuid, geometry = str(row["uuid"]), geometry_of(row)
            unusable, earlier = not row.get("mig"), before.get(uuid)
            if geometry is None and row.get("problem") and earlier is not None:
                geometry = earlier.geometry
            if geometry is None:
                continue
            gpu = earlier if earlier is not None and earlier.geometry == geometry else _Gpu(geometry)
            if gpu.unusable is not unusable:
                gpu.unusable, gpu.last_facts = unusable, None
            now[uuid] = gpu
        for uuid, gpu in before.items():
            if uuid not in now and gpu.held:  # lost, so that its node cannot even find it, or left out of Gpus=
                gpu.unusable, gpu.last_facts = True, None
                now[uuid] = gpu
        self._nodes[node] = now
        self._geometries = None
        self._facts.pop(node, None)
        self._emptied.pop(node, None)

    def _state(self, node: str, event: Mapping[str, Any]) -> None:
        """Process the whole state of a node; one from the record lacks GPUs and runs, which are stored elsewhere."""
        if "gpus" in event:
            self._inventory(node, event["gpus"])
            self._unhealthy.discard(node)
        for gpu in self._nodes.get(node, {}).values():
            gpu.forget(runs="runs" in event)
        for run in sorted(event.get("runs") or (), key=lambda run: bool(run.get("beside"))):
            self._slices(node, run, starts=True)
        self._instances(node, event.get("idle"), "create")
        self._instances(node, event.get("zombies"), "zombie")

    def _slices(self, node: str, event: Mapping[str, Any], *, starts: bool) -> None:
        run, host_run = (int(event.get("job", 0)), int(event.get("restart", 0))), _run(event.get("beside"))
        for gpu, slot in self._places(node, event.get("slices")):
            if starts:
                gpu.take(slot, run, host_run)
            else:
                gpu.give(slot, run)

    def _instances(self, node: str, places: Iterable[Mapping[str, Any]] | None, kind: str) -> None:
        for gpu, slot in self._places(node, places):
            gpu.last_facts = None
            if kind == "create":
                gpu.make(slot)
            elif kind == "zombie":
                if len(gpu.zombies) < MOST_SLOTS:
                    gpu.zombies.add(slot)
            else:
                gpu.zombies.discard(slot)
                if kind == "destroy":
                    gpu.made.discard(slot)

    def _places(self, node: str, places: Iterable[Mapping[str, Any]] | None) -> Iterator[tuple[_Gpu, Slot]]:
        """Yield the GPU and the slot of each place; unknown GPUs and invalid slots are skipped."""
        for place in places or ():
            gpu = self._nodes.get(node, {}).get(str(place.get("gpu")))
            slot = _slot(place.get("profile"), place.get("start"), place.get("size"))
            if gpu is not None and slot is not None:
                yield gpu, slot


def geometry_of(gpu: Mapping[str, Any]) -> Geometry | None:
    """Return the geometry in the description of a GPU; None if MIG is off or the node runs another release.

    The record has the last one of a GPU that its node cannot describe now.
    """
    if not (gpu.get("mig") or gpu.get("problem")) or not isinstance(gpu.get("geometry"), Mapping):
        return None
    try:
        return Geometry.from_dict(gpu["geometry"])
    except GeometryError as error:
        log.warning("GPU %s is ignored: %s", gpu.get("uuid"), error)
        return None


def _run(pair: object) -> tuple[int, int] | None:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(type(part) is int for part in pair):
        return None
    return pair[0], pair[1]


def _slot(profile: object, start: object, size: object) -> Slot | None:
    if not (isinstance(profile, str) and isinstance(start, int) and isinstance(size, int)):
        return None
    try:
        return Slot.of(profile, start, size)
    except (LayoutError, ProfileError):
        return None


def _disjoint(slots: Iterable[Slot], taken: Iterable[Slot]) -> Layout:
    """Return the slots that overlap neither a taken slot nor an earlier slot of the result."""
    disjoint, mask = [], 0
    for slot in taken:
        mask |= slot.placement.mask
    for slot in slots:
        if not slot.placement.mask & mask:
            mask |= slot.placement.mask
            disjoint.append(slot)
    return layout_of(tuple(disjoint))

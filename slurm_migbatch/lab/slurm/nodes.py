"""Simulate nodes: they apply published plans, allocate slices to started jobs like the Prolog, and send events.

A job's slots are chosen by `node.placement.choose_slots` and sharing is decided by `node.guest.verdict`: this is the
code of the hooks, applied to rows equivalent to the journal's. Events are those of `docs/protocol` and go to a
`LiveView` like migbatchd's.

With `auto` plans are applied and events delivered by themselves, after their delays (`NodeDelays`), and `processes.py`
runs Prologs and Epilogs. Without it, the caller calls the steps one by one: `poll`, `prolog`, `epilog`, `report`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.plans import Guests, NodePlans, NumberedPlan
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.capacity.sharing import is_guest
from slurm_migbatch.lab.sim.gpus import CREATE_S, DESTROY_S
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.slurmctld import Slurmctld
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node import guest, placement
from slurm_migbatch.node.journal_rows import JournalRun as Run
from slurm_migbatch.node.journal_rows import JournalSlice as Slice
from slurm_migbatch.node.plan import SharedSlot
from slurm_migbatch.slurm.client import JobRow

RunId = tuple[int, int]
_SLOWEST: Final = 7
_REUSE: Final = "same-user"  # the default of WarmReuse


@dataclass(frozen=True)
class NodeDelays:
    """Durations on a node, seconds.

    Attributes:
        ack_s: from the publication of a plan until the node has acknowledged it.
        prolog_s: from a job's allocation until its Prolog chooses its slices.
        epilog_s: from the end of a job until its Epilog has released them.
        report_s: from an event until migbatchd has received it.
        create_s, destroy_s: to create and to destroy an instance, by its compute slices.
        kill_wait_s: from SIGTERM to SIGKILL.
    """

    ack_s: float = 0.1
    prolog_s: float = 0.1
    epilog_s: float = 0.2
    report_s: float = 0.2
    create_s: Mapping[int, float] = field(default_factory=lambda: CREATE_S)
    destroy_s: Mapping[int, float] = field(default_factory=lambda: DESTROY_S)
    kill_wait_s: float = 30.0


INSTANT: Final = NodeDelays(0.0, 0.0, 0.0, 0.0, {}, {})
"""No durations."""


@dataclass
class _SimulatedNode:
    geometries: dict[str, Geometry]
    plan: dict[str, tuple[Slot, ...]]
    guests: Mapping[int, tuple[str, str, int, int, int, int]] = field(default_factory=dict)
    version: int = 0
    rows: dict[int, Slice] = field(default_factory=dict)
    unreported: list[dict[str, Any]] = field(default_factory=list)
    last_contact: float = 0.0
    published: float = 0.0


class SimulatedNodes:
    """All nodes of a site, which are `daemon.plans.Plans` too; `view` has what they report.

    Args:
        slurm: the simulated slurmctld whose jobs are on these nodes.
        strict: a job that finds no free slot of the plan is a misfit, even if the node has room for it; and its slot
            is drawn at random among the free planned ones.
    """

    def __init__(
        self,
        clock: VirtualClock,
        slurm: Slurmctld,
        *,
        times: NodeDelays | None = None,
        strict: bool = False,
        auto: bool = False,
        seed: int = 0,
    ) -> None:
        self.clock, self.slurm, self.auto = clock, slurm, auto
        self.view = LiveView()
        self.times = times or (NodeDelays() if auto else INSTANT)
        self.node_plans = NodePlans(wall=clock.time, clock=clock.monotonic)
        self.random = random.Random(seed)  # noqa: S311 - reproducible, not a secret
        #: jobs that found no slice and jobs that started outside the plan, each in order of time
        self.misfits: list[int] = []
        self.unplanned: list[int] = []
        #: nodes that apply no plans and send nothing
        self.deaf: set[str] = set()
        #: called when a node has reported events: (node, events)
        self.on_events: Callable[[str, Sequence[Mapping[str, Any]]], object] = lambda node, events: None
        self._strict = strict
        self._node_of: dict[str, str] = {}
        self._nodes: dict[str, _SimulatedNode] = {}
        self._where: dict[int, tuple[str, ...]] = {}
        self._ids = 0

    def add(self, name: str, *geometries: Geometry) -> None:
        """Add a node with these GPUs; it reports them at once."""
        gpus = {f"GPU-{name}-{number}": geometry for number, geometry in enumerate(geometries)}
        self._node_of.update(dict.fromkeys(gpus, name))
        self._nodes[name] = _SimulatedNode(gpus, dict.fromkeys(gpus, ()), last_contact=self.clock.now)
        gpu_states = [
            {"uuid": uuid, "minor": number, "index": number, "name": geometry.name, "mig": True}
            | {"geometry": geometry.to_dict()}
            for number, (uuid, geometry) in enumerate(gpus.items())
        ]
        self.view.apply(name, [{"kind": "state", "ts": self.clock.now, "gpus": gpu_states, "runs": [], "idle": []}])
        self.node_plans.confirm(name, 0)

    # -- leases, for reports and tests -----------------------------------------------------------------------------

    @property
    def gpus(self) -> Mapping[str, Mapping[str, Geometry]]:
        """GPUs by node and UUID."""
        return {name: node.geometries for name, node in self._nodes.items()}

    @property
    def known(self) -> dict[str, dict[str, Layout]]:
        """The plan that each node has applied: layouts by UUID."""
        return {n: {uuid: Layout(slots) for uuid, slots in node.plan.items()} for n, node in self._nodes.items()}

    @property
    def held(self) -> dict[str, dict[str, dict[Slot, RunId]]]:
        """Slots held by runs, by node and UUID; a shared slot has its host."""
        held: dict[str, dict[str, dict[Slot, RunId]]] = {
            name: {uuid: {} for uuid in node.geometries} for name, node in self._nodes.items()
        }
        for name, node in self._nodes.items():
            for row in node.rows.values():
                if row.state == "held" and row.beside is None:
                    held[name][row.gpu][row.slot] = _run_of(row)
        return held

    @property
    def second(self) -> dict[tuple[str, str, Slot], RunId]:
        """Guests of shared slots, by node, UUID and slot."""
        return {
            (name, row.gpu, row.slot): _run_of(row)
            for name, node in self._nodes.items()
            for row in node.rows.values()
            if row.state == "held" and row.beside is not None
        }

    @property
    def guests(self) -> dict[str, Mapping[int, tuple[str, str, int, int, int, int]]]:
        """Sharing of slices that the plan of each node allows."""
        return {name: node.guests for name, node in self._nodes.items()}

    def free(self, name: str) -> Counter[Profile]:
        """Count the unused planned slots of a node."""
        held = self.held[name]
        plan = self._nodes[name].plan
        return Counter(slot.profile for uuid, slots in plan.items() for slot in slots if slot not in held[uuid])

    def zombie(self, name: str, uuid: str, slot: Slot) -> None:
        """Put a zombie, an instance that cannot be destroyed, into the slot."""
        row = self._put(self._nodes[name], Slice(uuid, slot, "zombie", gi=self._ids))
        self._queue_event(name, "zombie", row.place)

    def held_by(self, job: int) -> list[Slice]:
        """Return the held slices of a job."""
        row = self.slurm.queue.get(job)
        nodes = [self._nodes[name] for name in row.nodes if name in self._nodes] if row is not None else []
        return [
            slice_row
            for node in nodes
            for slice_row in node.rows.values()
            if slice_row.job == job and slice_row.state == "held"
        ]

    def held_on(self, gpus: Collection[str]) -> list[Slice]:
        """Return all held slices of these GPUs."""
        nodes = {self._node_of[gpu]: None for gpu in sorted(gpus)}
        rows = (row for name in nodes for row in self._nodes[name].rows.values())
        return [row for row in rows if row.state == "held" and row.gpu in gpus]

    # -- plans -----------------------------------------------------------------------------------------------------

    def current(self, node: str) -> NumberedPlan | None:
        """See daemon.plans.Plans."""
        return self.node_plans.current(node)

    def publish(
        self, node: str, gpus: Mapping[str, Sequence[tuple[str, int, int]]], guests: Guests | None = None
    ) -> int:
        """See daemon.plans.Plans; with `auto` the node applies the plan by itself."""
        version = self.node_plans.publish(node, gpus, guests)
        if node in self._nodes:
            self._nodes[node].published = self.clock.now
            if self.auto:
                self.clock.after(self.times.ack_s, lambda: self._pull_later(node))
        return version

    def acked(self, node: str) -> int:
        """See daemon.plans.Plans."""
        return self.node_plans.acked(node)

    def wait_acked(self, node: str, version: int, timeout: float) -> bool:
        """See daemon.plans.Plans; the clock advances until the node has the plan or `timeout` is over."""
        if self.node_plans.acked(node) < version:
            due = self._nodes[node].published + self.times.ack_s
            if node in self.deaf or due > self.clock.now + timeout:
                if self.auto:
                    self.clock.sleep(timeout)
            else:
                self.clock.until(due)
                self.pull(node)
        return self.node_plans.acked(node) >= version

    def silence(self, node: str) -> float:
        """See daemon.plans.Plans; nodes that are not deaf poll continuously, so their silence is 0."""
        entry = self._nodes.get(node)
        if entry is None:
            return float("inf")
        if node not in self.deaf:
            entry.last_contact = self.clock.now
        return self.clock.now - entry.last_contact

    def poll(self) -> None:
        """Let every reachable node apply its newest plan."""
        for name in self._nodes:
            self._pull_later(name)

    def _pull_later(self, name: str) -> None:
        if name not in self.deaf:
            self.pull(name)

    def pull(self, name: str) -> None:
        """Let the node apply its newest plan. The plan must keep the slots of running jobs."""
        plan, node = self.node_plans.current(name), self._nodes[name]
        if plan is None:
            self.node_plans.confirm(name, self.node_plans.acked(name))
            return
        if plan.version != node.version:
            layouts = {uuid: Layout(Slot.of(*row) for row in plan.gpus.get(uuid, ())) for uuid in node.geometries}
            for uuid, layout in layouts.items():
                node.geometries[uuid].check(layout)
            for row in node.rows.values():
                if row.state == "held" and not self._ending(row):
                    for slot in layouts[row.gpu].slots:
                        assert slot == row.slot or not slot.placement.overlaps(row.slot.placement), (
                            f"{row} is in use, {slot} of the plan is not it"
                        )
            node.plan = {uuid: layout.slots for uuid, layout in layouts.items()}
            node.guests, node.version = plan.guests, plan.version
        self.node_plans.confirm(name, plan.version)

    def _ending(self, row: Slice) -> bool:
        job = self.slurm.queue.get(row.job or 0)
        return job is None or job.state == "COMPLETING" or job.restarts != row.restart

    # -- hooks -----------------------------------------------------------------------------------------------------

    def prolog(self, row: JobRow) -> bool:
        """Allocate a job's slices on each of its nodes; return False if a node has no place for it (a misfit)."""
        return self.run_prologs(row) is not None

    def run_prologs(self, row: JobRow) -> float | None:
        """Run the Prologs; return the seconds on the slowest node, None if the job found no place on one of them."""
        slowest = 0.0
        self._where[row.job_id] = row.nodes
        for name in row.nodes:
            elapsed = self._start(row, name)
            if elapsed is None:
                self.misfits.append(row.job_id)
                self._queue_event(name, "misfit", {"job": row.job_id, "restart": row.restarts, "reason": "no place"})
                self.epilog(row.job_id)
                return None
            slowest = max(slowest, elapsed)
        return slowest

    def _start(self, row: JobRow, name: str) -> float | None:
        node = self._nodes.get(name)
        if node is None:
            return 0.0
        if is_guest(row.gres):
            return self._join(row, name, node)
        requested = [profile for profile, count in slices(row.gres).items() for _ in range(count)]
        if not requested:
            return 0.0
        views = self._views(node)
        if len(requested) == 1:  # a planned slot is preferred to any other, so only GPUs that have one are examined
            planned = [view for view in views if _free_planned(view, requested[0])]
            views = planned or views
        barred = self._barred(views, requested) if self._strict else ()
        claims = None if barred is None else placement.choose_slots(views, requested, row.uid, _REUSE, barred)
        if claims is None:
            return None
        if not all(claim.planned for claim in claims):
            self.unplanned.append(row.job_id)
        return self._make_slices(row, name, node, claims)

    def _views(self, node: _SimulatedNode) -> list[placement.GpuOccupancy]:
        views = []
        for order, (uuid, geometry) in enumerate(node.geometries.items()):
            gpu_rows = [row for row in node.rows.values() if row.gpu == uuid]
            used = tuple(dict.fromkeys(row.slot for row in gpu_rows if row.state != "idle"))
            idle = tuple(row for row in gpu_rows if row.state == "idle")
            views.append(placement.GpuOccupancy(uuid, order, geometry, used, idle, node.plan[uuid]))
        return views

    def _barred(
        self, views: Sequence[placement.GpuOccupancy], requested: Sequence[Profile]
    ) -> set[placement.GpuSlot] | None:
        """Return all slots except free planned ones drawn at random, one for each request; None if too few are free."""
        allowed: set[placement.GpuSlot] = set()
        for profile, count in Counter(requested).items():
            free = [
                (view.uuid, slot)
                for view in views
                for slot in view.planned
                if slot.profile == profile and not any(slot.placement.overlaps(used.placement) for used in view.used)
            ]
            if len(free) < count:
                return None
            allowed.update(self.random.sample(free, count))
        all_slots = {(v.uuid, s) for v in views for p in requested if p in v.geometry for s in v.geometry.info(p).slots}
        return all_slots - allowed

    def _make_slices(
        self, row: JobRow, name: str, node: _SimulatedNode, claims: Sequence[placement.SlotClaim]
    ) -> float:
        took = 0.0
        rows = []
        for claim in claims:
            has_mig = len(node.geometries[claim.gpu].profiles) > 1  # otherwise the instance stands for the GPU itself
            for slice_row in claim.evict:
                if node.rows.pop(slice_row.id or 0, None) is not None and has_mig:
                    took += self.times.destroy_s.get(_compute(slice_row.slot.profile), 0.0)
                    self._queue_event(name, "destroy", slice_row.place)
            if claim.warm is not None:
                node.rows.pop(claim.warm.id or 0, None)
            slice_row = Slice(claim.gpu, claim.slot, "held", gi=self._ids, job=row.job_id, restart=row.restarts)
            slice_row = self._put(
                node, slice_row._replace(uid=row.uid, since=self.clock.now, warm=claim.warm is not None)
            )
            if claim.warm is None and has_mig:
                took += self.times.create_s.get(_compute(slice_row.slot.profile), 0.0)
                self._queue_event(name, "create", slice_row.place)
            rows.append(slice_row)
        self._queue_event(name, "start", self._started(row, rows, took, all(claim.planned for claim in claims)))
        return took

    def _join(self, row: JobRow, name: str, node: _SimulatedNode) -> float | None:
        """Give a guest its place: next to its host or, if that has left, alone."""
        place = node.guests.get(row.job_id)
        if place is None:
            return None
        shared = SharedSlot(place[0], Slot.of(*place[1:4]), (place[4], place[5]))
        rows = list(node.rows.values())
        runs = {
            _run_of(slice_row): Run(
                slice_row.job or 0, slice_row.restart or 0, slice_row.uid or 0, "", "", "", "", "running"
            )
            for slice_row in rows
            if slice_row.state == "held"
        }
        verdict = guest.verdict(shared, row.uid, rows, runs, shared.slot in node.plan[shared.gpu])
        if verdict.action is guest.GuestAction.JOIN and verdict.host is not None:
            host = verdict.host
            slice_row = host._replace(
                job=row.job_id, restart=row.restarts, uid=row.uid, beside=host.id, shared=True, since=self.clock.now
            )
            slice_row = self._put(node, slice_row)
            fields = self._started(row, [slice_row], 0.0, True)
            self._queue_event(name, "start", fields | {"beside": [host.job or 0, host.restart or 0]})
            return 0.0
        if verdict.action is guest.GuestAction.ALONE:
            barred = {
                (uuid, slot)
                for uuid, geometry in node.geometries.items()
                if shared.slot.profile in geometry
                for slot in geometry.info(shared.slot.profile).slots
                if (uuid, slot) != (shared.gpu, shared.slot)
            }
            claims = placement.choose_slots(self._views(node), [shared.slot.profile], row.uid, _REUSE, barred)
            return None if claims is None else self._make_slices(row, name, node, claims)
        return None

    def _started(self, row: JobRow, rows: Sequence[Slice], took: float, planned: bool) -> dict[str, Any]:
        return {
            "job": row.job_id,
            "restart": row.restarts,
            "uid": row.uid,
            "user": row.user,
            "account": row.account,
            "partition": row.partition,
            "warm": all(slice_row.warm for slice_row in rows),
            "planned": planned,
            "elapsed_ms": round(took * 1000),
            "slices": [slice_row.event_fields for slice_row in rows],
        }

    def epilog(self, job: int) -> None:
        """Make a job's slices idle again; a shared slice then belongs to the other run alone."""
        for name in self._where.pop(job, ()):
            node = self._nodes.get(name)
            if node is None:
                continue
            own_rows = [row for row in node.rows.values() if row.job == job and row.state == "held"]
            for row in own_rows:
                other_row = next((slice_row for slice_row in node.rows.values() if slice_row.beside == row.id), None)
                if row.beside is not None:
                    del node.rows[row.id or 0]
                elif other_row is not None:
                    del node.rows[row.id or 0]
                    node.rows[other_row.id or 0] = other_row._replace(beside=None)
                else:
                    node.rows[row.id or 0] = row.freed("idle")
            if own_rows:
                fields = {"job": job, "restart": own_rows[0].restart, "exit_code": 0, "memory_mib": None}
                self._queue_event(name, "stop", fields | {"slices": [row.event_fields for row in own_rows]})

    # -- events ----------------------------------------------------------------------------------------------------

    def progress(self, job: int, **fields: Any) -> None:
        """Send a progress event of a running job."""
        row = self.slurm.queue.get(job)
        if row is not None and row.nodes:
            self._queue_event(row.nodes[0], "progress", {"job": job, "restart": row.restarts, "final": False, **fields})

    def report(self, name: str | None = None, count: int | None = None) -> None:
        """Deliver the events of one node or of all: all events or the first `count` of each node."""
        for node_name in [name] if name is not None else list(self._nodes):
            node = self._nodes[node_name]
            events, node.unreported = node.unreported[:count], node.unreported[len(node.unreported[:count]) :]
            if events:
                self.view.apply(node_name, events)
                self.on_events(node_name, events)

    def _queue_event(self, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        unreported = self._nodes[name].unreported
        unreported.append({"kind": kind, "ts": self.clock.now, **fields})
        if self.auto and len(unreported) == 1:
            self.clock.after(self.times.report_s, lambda: self.report(name))

    def _put(self, node: _SimulatedNode, row: Slice) -> Slice:
        self._ids += 1
        node.rows[self._ids] = row = row._replace(id=self._ids)
        return row


def _free_planned(view: placement.GpuOccupancy, profile: Profile) -> bool:
    used = 0
    for slot in view.used:
        used |= slot.placement.mask
    return any(slot.profile == profile and not slot.placement.mask & used for slot in view.planned)


def _run_of(row: Slice) -> RunId:
    return row.job or 0, row.restart or 0


def _compute(profile: Profile) -> int:
    """Return the compute slices that determine the times of creating an instance."""
    return min(_SLOWEST, profile.compute)

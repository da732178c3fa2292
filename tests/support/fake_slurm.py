"""A Slurm that schedules on GRES counts alone, strictly, and nodes that make slices by the plan they know.

`FakeSlurm` is a SlurmClient. It starts jobs in priority order wherever the offered counts allow, knows nothing of
placements, refuses what real Slurm refuses, sets a node INVAL when slurmd registers another sum than is configured,
and forgets typed counts on `reconfigure`. `FakeNodes` is the nodes' side of it: it hands slots to started jobs by the
newest plan the node has taken over, and counts every job that found none (a misfit).

Components of a heterogeneous job start all together or not at all, and only if each finds nodes that none of those
before it took, as backfill demands; what the first takes is not reconsidered for the next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_migbatch.daemon.plans import PlanBoard
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused
from slurm_migbatch.supply.demand import profiles, slices
from slurm_migbatch.supply.guests import is_guest
from slurm_migbatch.supply.view import GpuFacts, NodeFacts


class FakeClock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeNode:
    name: str
    conf: dict[str, int]  # slurm.conf's and slurmd's counts by type
    gres: dict[str, int]
    used: Counter[str] = field(default_factory=Counter)
    states: set[str] = field(default_factory=lambda: {"IDLE"})
    partitions: tuple[str, ...] = ("gpu",)
    completing: int = 0


class FakeSlurm:
    """See the module."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.machines: dict[str, FakeNode] = {}
        self.queue: dict[int, JobRow] = {}
        self.calls: Counter[str] = Counter()
        self.updates: list[dict[str, str]] = []
        self.down = False
        self.started: list[tuple[int, tuple[str, ...]]] = []
        self.running_left: dict[int, float] = {}
        self._next = 1

    # -- the cluster's side ------------------------------------------------------------------------------------

    def add_node(self, name: str, conf: Mapping[str, int], **kw: object) -> None:
        self.machines[name] = FakeNode(name, dict(conf), dict(conf), **kw)  # type: ignore[arg-type]

    def submit(
        self, want: str, *, runs: float = 100.0, limit: int | None = 600, priority: int = 1000, **kw: object
    ) -> int:
        job = self._next
        self._next += int(kw.get("tasks", 1)) + 1  # type: ignore[call-overload]
        values: dict[str, object] = {
            "partition": "gpu",
            "submit": self.clock.time(),
            "eligible": self.clock.time(),
            "reason": "None",
            **kw,
        }
        self.queue[job] = JobRow(job_id=job, gres=want, time_limit_s=limit, priority=priority, **values)  # type: ignore[arg-type]
        self.running_left[job] = runs
        return job

    def submit_het(self, *wants: str, **kw: object) -> list[int]:
        """A heterogeneous job with a component for each of `wants`."""
        jobs = [self.submit(want, **kw) for want in wants]  # type: ignore[arg-type]
        for job in jobs:
            self.queue[job] = replace(self.queue[job], het_job=jobs[0])
        return jobs

    def order(self) -> list[JobRow]:
        return sorted(self.queue.values(), key=lambda r: (not r.pending, -r.priority, r.job_id))

    def schedule(self) -> list[tuple[JobRow, tuple[str, ...]]]:
        """One cycle: start what fits by counts, highest priority first. Returns what was started."""
        started = []
        for row in self.order():
            if not row.pending or row.reason not in ("None", "Resources", "Priority"):
                continue
            if row.het_job is not None:
                if row.job_id == row.het_job:
                    started.extend(self._start_apart([r for r in self.order() if r.het_job == row.het_job]))
                continue
            while row.tasks >= 1:
                chosen = self._fit(row)
                if chosen is None:
                    self.queue[row.job_id] = row = replace(row, reason="Resources")
                    break
                for name in chosen:
                    self.machines[name].used.update(gres.counts(row.gres, "mig"))
                end = None if row.time_limit_s is None else self.clock.time() + row.time_limit_s
                state = {"state": "RUNNING", "start": self.clock.time(), "end": end, "nodes": chosen}
                if row.tasks > 1 or row.array_job is not None:
                    task = self._next
                    self._next += 1
                    self.running_left[task] = self.running_left[row.job_id]
                    run = replace(row, job_id=task, array_job=row.job_id, array_task="0", tasks=1, **state)
                    self.queue[task] = run
                    if row.tasks == 1:
                        del self.queue[row.job_id]
                        started.append((run, chosen))
                        break
                    self.queue[row.job_id] = row = replace(row, array_job=row.job_id, tasks=row.tasks - 1)
                    started.append((run, chosen))
                    continue
                self.queue[row.job_id] = run = replace(row, **state)
                started.append((run, chosen))
                break
        self.started.extend((run.job_id, nodes) for run, nodes in started)
        return started

    def _start_apart(self, components: list[JobRow]) -> list[tuple[JobRow, tuple[str, ...]]]:
        found: list[tuple[JobRow, tuple[str, ...]]] = []
        taken: set[str] = set()
        for row in components:
            chosen = self._fit(row, taken)
            if chosen is None:
                return []
            taken |= set(chosen)
            end = None if row.time_limit_s is None else self.clock.time() + row.time_limit_s
            run = replace(row, state="RUNNING", start=self.clock.time(), end=end, nodes=chosen)
            found.append((run, chosen))
        for run, chosen in found:
            self.queue[run.job_id] = run
            for name in chosen:
                self.machines[name].used.update(gres.counts(run.gres, "mig"))
        return found

    def _fit(self, row: JobRow, without: Collection[str] = ()) -> tuple[str, ...] | None:
        need = gres.counts(row.gres, "mig")
        fitting = [
            node.name
            for node in self.machines.values()
            if node.name not in without
            and set(node.partitions) & set(row.partition.split(","))
            and row.requested_nodes in ("", node.name)
            and node.states <= {"IDLE", "MIXED"}
            and not node.completing
            and all(node.gres.get(kind, 0) - node.used[kind] >= n for kind, n in need.items())
        ]
        return tuple(fitting[: row.num_nodes]) if len(fitting) >= row.num_nodes else None

    def finish(self, job: int) -> JobRow:
        """The job is over and its Epilogs have run."""
        row = self.queue.pop(job)
        for name in row.nodes:
            self.machines[name].used.subtract(gres.counts(row.gres, "mig"))
        return row

    def requeue_now(self, job: int) -> None:
        row = self.finish(job)
        self.queue[job] = replace(
            row, state="PENDING", nodes=(), start=None, end=None, restarts=row.restarts + 1, reason="None"
        )

    def reconfigure(self) -> None:
        """`scontrol reconfigure` or a restart: typed counts are slurm.conf's again, and slurmd registers."""
        for node in self.machines.values():
            if sum(node.gres.values()) != sum(node.conf.values()):
                node.states = {"IDLE", "DRAIN", "INVALID_REG"}
            node.gres = dict(node.conf)

    def restart_slurmd(self) -> None:
        """As on 22.05: slurmd's registration brings back the types that slurm.conf has any of, and only those."""
        for node in self.machines.values():
            if sum(node.gres.values()) != sum(node.conf.values()):
                node.states = {"IDLE", "DRAIN", "INVALID_REG"}
            node.gres.update({kind: n for kind, n in node.conf.items() if n})

    def register(self) -> None:
        """slurmd's periodic registration."""
        for node in self.machines.values():
            if sum(node.gres.values()) != sum(node.conf.values()):
                node.states = {"IDLE", "DRAIN", "INVALID_REG"}

    # -- SlurmClient -------------------------------------------------------------------------------------------

    def _asked(self, what: str) -> None:
        self.calls[what] += 1
        if self.down:
            raise SlurmError("slurmctld does not answer", (what,), 1, "")

    def jobs(self) -> list[JobRow]:
        self._asked("jobs")
        return self.order()

    def nodes(self) -> list[NodeRow]:
        self._asked("nodes")
        return [
            NodeRow(n.name, frozenset(n.states), gres=dict(n.gres), used=dict(n.used), partitions=n.partitions, cpus=64)
            for n in self.machines.values()
        ]

    def set_gres(self, updates: Mapping[str, str]) -> None:
        self._asked("set_gres")
        self.updates.append(dict(updates))
        unknown = dict.fromkeys(updates.keys() - self.machines.keys(), "Invalid node name specified")
        for name, text in updates.items():
            if name in unknown:
                continue
            found = gres.counts(text, "mig")
            assert "" not in found
            assert all(n > 0 for n in found.values()), text
            self.machines[name].gres = dict(found)
        if unknown:
            raise SlurmRefused(unknown, len(updates))

    def hasten(self, job_id: int) -> None:
        self._asked("hasten")
        self.queue[job_id] = replace(self.queue[job_id], reason="None", eligible=self.clock.time())

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"FakeSlurm was asked for {name}, which it does not know")


class FakeNodes:
    """The nodes: their GPUs, the plan each has taken over, and who holds which slot."""

    def __init__(self, clock: FakeClock, seed: int = 0) -> None:
        self.clock = clock
        self.board = PlanBoard(wall=clock.time, clock=clock.monotonic)
        self.gpus: dict[str, dict[str, Geometry]] = {}
        self.known: dict[str, dict[str, Layout]] = {}
        self.held: dict[str, dict[str, dict[Slot, tuple[int, int]]]] = {}
        self.told: dict[str, dict[str, dict[Slot, tuple[int, int]]]] = {}
        #: second holders: (node, gpu, slot) -> run; and as they were told last
        self.second: dict[tuple[str, str, Slot], tuple[int, int]] = {}
        self.told_second: dict[tuple[str, str, Slot], tuple[int, int]] = {}
        self.guests: dict[str, Mapping[int, tuple[str, str, int, int, int, int]]] = {}
        self.zombies: dict[str, dict[str, list[Slot]]] = {}
        self.misfits: list[int] = []
        self.deaf: set[str] = set()
        #: jobs that Slurm counts no more and whose Epilogs have not run: their nodes get no new job until then
        self.ending: set[int] = set()
        self.random = random.Random(seed)

    def add(self, name: str, *geometries: Geometry) -> None:
        self.gpus[name] = {f"GPU-{name}-{i}": g for i, g in enumerate(geometries)}
        self.known[name] = {uuid: Layout() for uuid in self.gpus[name]}
        self.held[name] = {uuid: {} for uuid in self.gpus[name]}
        self.told[name] = {uuid: {} for uuid in self.gpus[name]}
        self.zombies[name] = {uuid: [] for uuid in self.gpus[name]}
        self.board.confirm(name, 0)

    # -- Plans: nodes that are not deaf take plans over as soon as somebody waits for that

    def current(self, node: str) -> object:
        return self.board.current(node)

    def publish(self, node: str, gpus: Mapping[str, object], guests: Mapping[int, object] | None = None) -> int:
        return self.board.publish(node, gpus, guests)  # type: ignore[arg-type]

    def acked(self, node: str) -> int:
        return self.board.acked(node)

    def silence(self, node: str) -> float:
        return self.board.silence(node)

    def wait_acked(self, node: str, version: int, timeout: float) -> bool:
        if node not in self.deaf:
            self.pull(node)
        return self.board.acked(node) >= version

    def pull(self, node: str) -> None:
        """The node polls: it takes the newest plan over."""
        plan = self.board.current(node)
        if plan is None:
            self.board.confirm(node, self.board.acked(node))
            return
        for uuid in self.gpus[node]:
            layout = Layout(Slot.of(*row) for row in plan.gpus.get(uuid, ()))
            self.gpus[node][uuid].check(layout)
            for held, run in self.held[node][uuid].items():
                for slot in layout.slots if run[0] not in self.ending else ():
                    assert slot == held or not slot.placement.overlaps(held.placement), (
                        f"{held} is in use, {slot} is not it"
                    )
            self.known[node][uuid] = layout
        self.guests[node] = plan.guests
        self.board.confirm(node, plan.version)

    def poll(self) -> None:
        for node in self.gpus:
            if node not in self.deaf:
                self.pull(node)

    # -- jobs

    def prolog(self, row: JobRow, nodes: Iterable[str]) -> bool:
        """Take slots for a job on its nodes; False (a misfit, nothing taken) where one has none."""
        for node in nodes:
            if is_guest(row.gres) and not self.join(row, node):
                self.misfits.append(row.job_id)
                return False
            for profile, count in slices(row.gres).items():
                for _ in range(count):
                    options = [
                        (uuid, slot)
                        for uuid, layout in self.known[node].items()
                        for slot in layout.slots
                        if slot.profile == profile
                        and not any(slot.placement.overlaps(h.placement) for h in self.held[node][uuid])
                        and slot not in self.zombies[node][uuid]
                    ]
                    if not options:
                        self.misfits.append(row.job_id)
                        self.epilog(row.job_id)
                        return False
                    uuid, slot = self.random.choice(options)
                    self.held[node][uuid][slot] = (row.job_id, row.restarts)
        return True

    def join(self, row: JobRow, node: str) -> bool:
        """A guest's Prolog: the place that the plan names, beside its host or, where that has left, alone."""
        place = self.guests.get(node, {}).get(row.job_id)
        if place is None:
            return False
        uuid, slot, host = place[0], Slot.of(*place[1:4]), (place[4], place[5])
        held = self.held[node][uuid]
        if held.get(slot) == host and (node, uuid, slot) not in self.second:
            self.second[node, uuid, slot] = (row.job_id, row.restarts)
            return True
        if slot in self.known[node][uuid] and not any(slot.placement.overlaps(h.placement) for h in held):
            held[slot] = (row.job_id, row.restarts)
            return True
        return False

    def epilog(self, job: int) -> None:
        self.second = {where: run for where, run in self.second.items() if run[0] != job}
        for node, gpus in self.held.items():
            for uuid, slots in gpus.items():
                for slot in [s for s, run in slots.items() if run[0] == job]:
                    heir = self.second.pop((node, uuid, slot), None)
                    if heir is None:
                        del slots[slot]
                    else:
                        slots[slot] = heir

    def report(self) -> None:
        """All events have arrived."""
        self.told_second = dict(self.second)
        self.told = {n: {u: dict(s) for u, s in gpus.items()} for n, gpus in self.held.items()}

    def facts(self) -> dict[str, NodeFacts]:
        return {
            name: NodeFacts(
                tuple(
                    GpuFacts(
                        uuid,
                        geometry,
                        tuple(sorted(self.told[name][uuid].items())),
                        tuple(self.zombies[name][uuid]),
                        guests=tuple(
                            sorted((s, run) for (n, u, s), run in self.told_second.items() if (n, u) == (name, uuid))
                        ),
                    )
                    for uuid, geometry in gpus.items()
                )
            )
            for name, gpus in self.gpus.items()
        }

    def free(self, node: str) -> Counter[Profile]:
        return Counter(
            slot.profile
            for uuid, layout in self.known[node].items()
            for slot in layout.slots
            if slot not in self.held[node][uuid]
        )


def backed(slurm: FakeSlurm, nodes: FakeNodes) -> None:
    """Every count that Slurm could start a job on has a slot in the plan that the node knows."""
    for name, machine in slurm.machines.items():
        slots: Counter[Profile] = Counter()
        for uuid, layout in nodes.known[name].items():
            slots.update(layout.counts())
            slots.update(Counter(s.profile for s in nodes.held[name][uuid] if s not in layout))
        for profile, count in profiles(machine.gres).items():
            if count > machine.used[profile.gres_type]:
                assert count <= slots[profile], f"{name}: {count} x {profile} offered, {slots[profile]} slots"

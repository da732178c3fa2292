"""A small site that changes at random between snapshots: the state of Slurm, nodes and plans, as plain values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.snapshot import ClusterSnapshot, PlanStatus, PublishedPlan
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.supply_gpus import A30, H100

NOW = 1_000_000.0


class ChangingSite:
    """A sequence of snapshots of one site; unchanged parts are the same objects in the next snapshot.

    Args:
        rng: chooses the events.
        nodes: the largest number of nodes.
        jobs: the largest number of initially pending jobs.
    """

    def __init__(self, rng: random.Random, nodes: int = 4, jobs: int = 8) -> None:
        self.rng, self.now, self._job, self._version = rng, NOW, 100, 0
        self.queue: list[JobRow] = []
        self.rows: dict[str, NodeRow] = {}
        self.facts: dict[str, NodeFacts] = {}
        self.plans: dict[str, PlanStatus] = {}
        self.preference: tuple[object, ...] = ()
        for n in range(rng.randint(1, nodes)):
            geometry = rng.choice([H100, H100, A30])
            gpus = tuple(GpuFacts(f"GPU-{n}-{g}", geometry) for g in range(rng.randint(1, 2)))
            self.facts[f"n{n}"] = NodeFacts(gpus)
            self.plans[f"n{n}"] = PlanStatus(total=14)
            features = frozenset(rng.sample(["a", "b"], rng.randint(0, 2)))
            partitions = rng.choice([("gpu",), ("gpu", "train")])
            self.rows[f"n{n}"] = NodeRow(f"n{n}", frozenset({"IDLE"}), {"none": 14}, {}, partitions, features=features)
        self.rows["plain"] = NodeRow("plain", frozenset({"IDLE"}), partitions=("gpu",))
        for _ in range(rng.randint(0, jobs)):
            self._submit()

    def snapshot(self) -> ClusterSnapshot:
        """Return a snapshot of the current state."""
        return ClusterSnapshot(
            now=self.now,
            jobs=tuple(self.queue),
            nodes=tuple(self.rows.values()),
            inventory=dict(self.facts),
            plans=dict(self.plans),
            sent_back=tuple(
                (row.job_id, row.restarts - 1) for row in self.queue if row.pending and self.rng.random() < 0.05
            ),
        )

    def step(self, decided: SupplyDecision) -> None:
        """Let some time pass: publish plans, and let a few random events happen."""
        self.now += self.rng.choice([0.0, 1.0, 1.0, 30.0, 400.0, 4000.0])
        for name, plan in decided.plan.nodes.items():
            if self.rng.random() < 0.7:
                self._publish(name, plan.layouts)
        events: list[Callable[[], None]] = [
            self._submit, self._submit, self._start, self._start, self._start, self._end, self._end, self._hear,
            self._forget, self._node, self._health, self._reorder, self._renew, self._cancel, self._twice, self._drop,
        ]  # fmt: skip
        for _ in range(self.rng.randint(0, 4)):
            self.rng.choice(events)()

    # -- events ----------------------------------------------------------------------------------------------------

    def _publish(self, name: str, layouts: Mapping[str, Layout]) -> None:
        gpus = {
            uuid: tuple((s.profile.name, s.placement.start, s.placement.size) for s in layout.slots)
            for uuid, layout in layouts.items()
        }
        old = self.plans[name]
        if old.plan is None or dict(old.plan.gpus) != gpus:
            self._version += 1
            self.plans[name] = replace(
                old, plan=PublishedPlan(self._version, gpus), acknowledged=self.rng.random() < 0.8
            )
        elif not old.acknowledged:
            self.plans[name] = replace(old, acknowledged=True)

    def _submit(self) -> None:
        self._job += 1
        profile = self.rng.choice(["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb", "4g.24gb"])
        count = self.rng.choice([1, 1, 1, 2])
        row = JobRow(
            self._job,
            partition=self.rng.choice(["gpu", "train", "gpu,train"]),
            reason=self.rng.choice(["Priority", "Resources", "Resources", "Dependency", "BeginTime"]),
            num_nodes=self.rng.choice([1, 1, 1, 2]),
            gres=f"gres/mig:{profile}:{count}",
            features=self.rng.choice(["", "", "a", "a&b"]),
            time_limit_s=self.rng.choice([None, 60, 3600]),
            eligible=self.now + self.rng.choice([-10.0, 3.0, 300.0]),
            comment=self.rng.choice(["", "", "[mig-exclude:n0]", "migbatch: role=train max=1g.10gb [mig:loan:1]"]),
        )
        shape = self.rng.randint(0, 9)
        if shape == 0:
            row = replace(row, array_job=self._job, array_task="0-3", tasks=4, throttle=self.rng.choice([None, 1, 2]))
        if shape == 1:
            self._job += 1
            component = replace(row, job_id=self._job, het_job=row.job_id, gres=self.rng.choice([row.gres, ""]))
            self.queue.append(component)
            row = replace(row, het_job=row.job_id)
        self.queue.insert(self.rng.randint(0, len(self.queue)), row)

    def _start(self) -> None:
        waiting = [row for row in self.queue if row.pending and row.gres]
        if not waiting:
            return
        row, name = self.rng.choice(waiting), self.rng.choice(list(self.facts))
        limit = row.time_limit_s
        started = replace(
            row, state="RUNNING", nodes=(name,), start=self.now, end=None if limit is None else self.now + limit
        )
        if row.tasks > 1:
            self._job += 1
            self.queue.append(replace(started, job_id=self._job, tasks=1))
            self._swap(row, replace(row, tasks=row.tasks - 1))
        else:
            self._swap(row, started)
        if self.rng.random() < 0.8:
            self._lease(name, started.job_id, row.restarts)
        self._count(name)

    def _end(self) -> None:
        running = [row for row in self.queue if row.active]
        if not running:
            return
        row = self.rng.choice(running)
        if self.rng.random() < 0.4:
            self._swap(row, replace(row, state="COMPLETING"))
        else:
            self.queue.remove(row)
        if self.rng.random() < 0.6:
            self._hear()

    def _hear(self) -> None:
        """Report a node's leases: those of jobs that have ended are removed."""
        name = self.rng.choice(list(self.facts))
        active = {row.job_id for row in self.queue if row.active}
        gpus = []
        for gpu in self.facts[name].gpus:
            kept = tuple(lease for lease in gpu.leases if lease[1][0] in active)
            gpus.append(gpu if kept == gpu.leases else replace(gpu, leases=kept))
        self.facts[name] = replace(self.facts[name], gpus=tuple(gpus))
        self._count(name)

    def _forget(self) -> None:
        """Add or remove a zombie or an idle instance."""
        name = self.rng.choice(list(self.facts))
        facts = self.facts[name]
        gpu = self.rng.choice(facts.gpus)
        taken = Layout(slot for slot, _ in gpu.leases)
        fits = [slot for slot in sorted(gpu.geometry.slots) if gpu.geometry.fits(taken, slot)]
        slot = self.rng.choice(fits) if fits else None
        zombies = (slot,) if slot is not None and self.rng.random() < 0.3 else ()
        warm = Layout([slot]) if slot is not None and not zombies and self.rng.random() < 0.5 else EMPTY
        self._told(name, gpu, replace(gpu, zombies=zombies, warm=warm))

    def _node(self) -> None:
        name = self.rng.choice(list(self.rows))
        row = self.rows[name]
        self.rows[name] = self.rng.choice(
            [
                replace(row, states=frozenset({"IDLE", "DRAIN"})),
                replace(row, states=frozenset({"IDLE"})),
                replace(row, set_aside=not row.set_aside),
                replace(row, features=frozenset({"a"})),
                replace(row, cpus_used=row.cpus_used + 1),
                replace(row, gres={} if row.gres else {"none": 14}),
            ]
        )

    def _health(self) -> None:
        name = self.rng.choice(list(self.facts))
        if self.rng.random() < 0.5:
            self.facts[name] = replace(self.facts[name], healthy=not self.facts[name].healthy)
        else:
            self.plans[name] = replace(self.plans[name], reachable=not self.plans[name].reachable)

    def _reorder(self) -> None:
        self.rng.shuffle(self.queue)

    def _renew(self) -> None:
        """Slurm says the same of a job again, or something that does not matter."""
        if self.queue:
            row = self.rng.choice(self.queue)
            self._swap(row, replace(row, priority=row.priority + self.rng.randint(0, 1)))

    def _cancel(self) -> None:
        if self.queue:
            self.queue.remove(self.rng.choice(self.queue))

    def _twice(self) -> None:
        """Give a job two rows for a while."""
        if self.queue:
            row = self.rng.choice(self.queue)
            self.queue.append(replace(row, end=self.now + 77.0))

    def _drop(self) -> None:
        """Move a node to the end of the facts, as if it had been absent."""
        if len(self.facts) > 1:
            name = self.rng.choice(list(self.facts))
            self.facts[name] = self.facts.pop(name)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _swap(self, row: JobRow, new: JobRow) -> None:
        self.queue[self.queue.index(row)] = new

    def _lease(self, name: str, job: int, restart: int) -> None:
        for gpu in self.facts[name].gpus:
            taken = Layout([*(slot for slot, _ in gpu.leases), *gpu.zombies])
            fits: list[Slot] = [slot for slot in sorted(gpu.geometry.slots) if gpu.geometry.fits(taken, slot)]
            if fits:
                leases = tuple(sorted((*gpu.leases, (self.rng.choice(fits), (job, restart)))))
                self._told(name, gpu, replace(gpu, leases=leases))
                return

    def _told(self, name: str, gpu: GpuFacts, new: GpuFacts) -> None:
        gpus = tuple(new if listed is gpu else listed for listed in self.facts[name].gpus)
        self.facts[name] = replace(self.facts[name], gpus=gpus)

    def _count(self, name: str) -> None:
        """Update Slurm's count of used slices; sometimes it lags behind."""
        if name in self.rows and self.rng.random() < 0.9:
            held = Counter(slot.profile.gres_type for gpu in self.facts[name].gpus for slot, _ in gpu.leases)
            self.rows[name] = replace(self.rows[name], used=dict(held))

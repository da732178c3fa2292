"""Simulate a large, busy site for figures of migbatchd's rounds: running jobs, a long queue, and changes.

Slurm and the nodes answer at once, so only migbatchd is measured. Rows of nodes are new objects in every
round, as Slurm's client makes them; unchanged rows of jobs are the same objects, as in `daemon.poll`. Leases and plans
are stored where migbatchd stores them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from slurm_migbatch.daemon.controller import Rows
from slurm_migbatch.daemon.observer import CompleteView
from slurm_migbatch.daemon.plans import GpuSlots, Guests, NodePlans
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.snapshot import Answers, Questions
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow

NOW: Final = 1_800_000_000.0
_LOAD: Final = 0.7
"""Probability that one more slice is in use on a GPU with room for it, at the beginning."""
_SIZES: Final = {1: 6, 2: 3, 3: 3, 4: 1, 7: 1}
"""Requests by number of compute slices, of fourteen."""
_STATES: Final = frozenset({"MIXED"})
_PARTITIONS: Final = ("gpu", "train")
_LIMITS: Final = (900, 3600, 4 * 3600, 24 * 3600)
_Run = tuple[int, int]


class NoRecord:
    """A `daemon.controller.Record` that stores nothing."""

    available = True

    def supply(self, node: str, at: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Store nothing."""

    def save(self, *_: Rows) -> bool:
        """Store nothing."""
        return True

    def post(self, loans: Rows, actions: Rows) -> None:
        """Store nothing."""

    def ask(self, questions: Questions) -> Answers:
        """Answer that nothing is known."""
        return Answers(questions, (), {}, (), dict.fromkeys(questions.decisions))


class _AppliedAtOnce(NodePlans):
    """Plans that nodes apply at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, clock)
        #: nodes with a new plan
        self.renewed: dict[str, None] = {}

    def publish(self, node: str, gpus: GpuSlots, guests: Guests | None = None) -> int:
        """Publish a node's plan, and confirm it."""
        version = super().publish(node, gpus, guests)
        self.confirm(node, version)
        self.renewed[node] = None
        return version


class LargeSite:
    """Slurm's queue and nodes, the nodes' events and their plans.

    One in twenty pending rows is an array, every other one of them with a throttle; three in a hundred want two slices
    on a node, two wait for another job, two for their time to begin, and one excludes nodes.

    Attributes:
        gpus: number of all GPUs.
        now: unix seconds.
        view: what the nodes hold; `plans`: what they may use.
    """

    def __init__(self, geometry: Geometry, nodes: int, gpus: int, pending: int, seed: int) -> None:
        self.now = NOW
        self.view = CompleteView()
        self.plans = _AppliedAtOnce(lambda: self.now)
        self.gpus = nodes * gpus
        self._random = random.Random(seed)  # noqa: S311 a synthetic site, not a secret
        self._geometry, self._pending = geometry, pending
        self._slots = sorted(geometry.slots)
        plain = [info.profile for info in geometry.profiles if not info.profile.suffix]
        sizes: dict[int, Profile] = {}
        for profile in plain:
            sizes.setdefault(profile.compute, profile)
        self._asked = [sizes[size] for size, weight in _SIZES.items() if size in sizes for _ in range(weight)]
        self._next_job = 1
        self._running: dict[int, JobRow] = {}
        self._waiting: dict[int, JobRow] = {}
        self._held: dict[str, dict[str, dict[Slot, _Run]]] = {}
        self._gres: dict[str, dict[str, int]] = {}
        #: Slurm's counts in use, by node, while they are unchanged
        self._used: dict[str, Counter[str]] = {}
        #: free slots on offer, by profile and node
        self._free: dict[Profile, dict[str, list[tuple[str, Slot]]]] = {}
        total = geometry.max_slots * gpus
        description = {"mig": True, "geometry": geometry.to_dict()}
        for n in range(nodes):
            name = f"n{n:05d}"
            held = self._held[name] = {f"GPU-{n}-{g}": self._filled_gpu(name) for g in range(gpus)}
            self.view.apply(name, [{"kind": "inventory", "gpus": [{"uuid": uuid, **description} for uuid in held]}])
            self.view.set_complete(name, True)
            self._apply_events(
                name, "start", [(uuid, s, run) for uuid, slots in held.items() for s, run in slots.items()]
            )
            self._gres[name] = {plain[-1].gres_type: total, "none": total}
        self.submit()

    # -- SlurmClient, as far as a round uses it ------------------------------------------------------------------

    def jobs(self) -> tuple[JobRow, ...]:
        """Return Slurm's queue: running jobs, then pending jobs in their order."""
        return (*self._running.values(), *self._waiting.values())

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        """Return the jobs that run on some nodes."""
        if len(nodes) == len(self._held):
            return list(self._running.values())
        jobs = {job for node in nodes for held in self._held[node].values() for job, _ in held.values()}
        return [self._running[job] for job in sorted(jobs)]

    def nodes(self) -> list[NodeRow]:
        """Return Slurm's nodes."""
        rows = []
        for name, gpus in self._held.items():
            used = self._used.get(name)
            if used is None:
                used = Counter([slot.profile.gres_type for held in gpus.values() for slot in held])
                self._used[name] = used
            rows.append(NodeRow(name, _STATES, gres=self._gres[name], used=used, partitions=_PARTITIONS))
        return rows

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """Change nodes' offers."""
        for node, text in updates.items():
            self._gres[node] = _counts(text)

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Ignore: no job here may have any profile."""

    # -- events between rounds -----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Let every node request its plan."""
        for name in self._held:
            self.plans.note_contact(name)

    def submit(self) -> None:
        """Submit jobs until the queue has its length again."""
        while len(self._waiting) < self._pending:
            row = self._drawn(self._random.choice(self._asked))
            self._waiting[row.job_id] = row

    def end(self, count: int) -> None:
        """End this many running jobs, and cancel a tenth as many pending ones."""
        ended = self._random.sample(list(self._running), min(count, len(self._running)))
        rows = [self._running.pop(job) for job in ended]
        runs = {(row.job_id, 0) for row in rows}
        for node in dict.fromkeys(name for row in rows for name in row.nodes):
            ended_slices = [
                (uuid, s, run) for uuid, held in self._held[node].items() for s, run in held.items() if run in runs
            ]
            for uuid, slot, _ in ended_slices:
                del self._held[node][uuid][slot]
            self._apply_events(node, "stop", ended_slices)
            self.plans.renewed[node] = None
        for job in self._random.sample(list(self._waiting), min(count // 10, len(self._waiting))):
            del self._waiting[job]

    def start(self) -> int:
        """Start jobs in Slurm's order if their slices are offered; return how many."""
        for node in self.plans.renewed:
            self._refresh(node)
        self.plans.renewed.clear()
        return sum(row.reason == "Priority" and self._begun(row) for row in list(self._waiting.values()))

    def _refresh(self, node: str) -> None:
        """Read a node's current offer."""
        for nodes in self._free.values():
            nodes.pop(node, None)
        plan, held = self.plans.current(node), self._held[node]
        for uuid, rows in plan.gpus.items() if plan is not None else ():
            taken = sum({slot.placement.mask for slot in held[uuid]})
            for slot in (Slot.of(*row) for row in rows):
                if not slot.placement.mask & taken:
                    self._free.setdefault(slot.profile, {}).setdefault(node, []).append((uuid, slot))

    def _begun(self, row: JobRow) -> bool:
        ((profile, wanted),) = slices(row.gres).items()
        nodes = self._free.get(profile, {})
        node = next((name for name, slots in nodes.items() if len(slots) >= wanted), None)
        if node is None:
            return False
        places = [nodes[node].pop() for _ in range(wanted)]
        if not nodes[node]:
            del nodes[node]
        self._run(row, node, places)
        return True

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _run(self, row: JobRow, node: str, places: Iterable[tuple[str, Slot]]) -> None:
        job = row.job_id
        if row.tasks > 1:
            job = self._number()
            self._waiting[row.job_id] = replace(row, tasks=row.tasks - 1)
        else:
            del self._waiting[row.job_id]
        self._running[job] = self._started(replace(row, job_id=job, tasks=1), node)
        held = [(uuid, slot, (job, 0)) for uuid, slot in places]
        for uuid, slot, run in held:
            self._held[node][uuid][slot] = run
        self._apply_events(node, "start", held)

    def _started(self, row: JobRow, node: str) -> JobRow:
        end = self.now + (row.time_limit_s or 3600)
        return replace(row, state="RUNNING", reason="None", nodes=(node,), start=self.now, end=end)

    def _filled_gpu(self, node: str) -> dict[Slot, _Run]:
        layout, held = EMPTY, {}
        while self._random.random() < _LOAD:
            fits = [slot for slot in self._slots if self._geometry.fits(layout, slot)]
            if not fits:
                break
            slot = self._random.choice(fits)
            layout = layout.add(slot)
            row = JobRow(self._number(), gres=f"gres/mig:{slot.profile.gres_type}:1", time_limit_s=3600)
            end = self.now + self._random.uniform(600, 24 * 3600)
            self._running[row.job_id] = replace(self._started(row, node), partition="gpu", end=end)
            held[slot] = (row.job_id, 0)
        return held

    def _drawn(self, profile: Profile) -> JobRow:
        draw, number = self._random.random(), self._number()
        row = JobRow(
            number,
            partition=self._random.choice(("gpu", "train")),
            reason="Priority",
            submit=self.now,
            eligible=self.now,
            time_limit_s=self._random.choice(_LIMITS),
            gres=f"gres/mig:{profile.gres_type}:{2 if 0.05 <= draw < 0.08 else 1}",
        )
        if draw < 0.05:
            throttle = 4 if draw < 0.025 else None
            return replace(row, array_job=number, array_task="0-19", tasks=20, throttle=throttle)
        if 0.08 <= draw < 0.1:
            return replace(row, reason="Dependency", eligible=None)
        if 0.1 <= draw < 0.12:
            return replace(row, reason="BeginTime", eligible=self.now + 86400.0)
        if 0.12 <= draw < 0.13:
            return replace(row, comment="[mig-exclude:n00000,n00001]")
        return row

    def _number(self) -> int:
        self._next_job += 1
        return self._next_job

    def _apply_events(self, node: str, kind: str, places: Iterable[tuple[str, Slot, _Run]]) -> None:
        events = []
        for uuid, slot, (job, restart) in places:
            place = {"start": slot.placement.start, "size": slot.placement.size}
            event = {"gpu": uuid, "profile": slot.profile.name, **place}
            events.append({"kind": kind, "job": job, "restart": restart, "slices": [event]})
        if events:
            self.view.apply(node, events)
            self._used.pop(node, None)


@lru_cache(maxsize=1 << 14)
def _counts(text: str) -> dict[str, int]:
    """Return the counts in a node's GRES by type."""
    parts = (entry.rpartition(":") for entry in text.split(","))
    return {kind.partition(":")[2]: int(count) for kind, _, count in parts}

"""A small cluster for tests of whole rounds: the simulated Slurm and nodes in single steps, and the real controller."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from slurm_migbatch.daemon.controller import RoundReport
from slurm_migbatch.decide.capacity.demand import profiles
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.lab.slurm.client import SimulatedSlurm
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.nodes import SimulatedNodes
from slurm_migbatch.lab.slurm.records import NodeRecord, SimulatedPartition, SlurmSettings
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from tests.support.controllers import SupplyController
from tests.support.supply_gpus import H100

CATALOG = "migcatalog"


class SteppedMachines:
    """Machines whose started jobs wait for `prologs`, and whose terminated jobs are passed to a callback."""

    def __init__(self) -> None:
        #: called with each job that Slurm terminates
        self.terminated: Callable[[JobRow], object] = lambda row: None
        #: jobs that wait for their Prolog; all jobs ever started
        self.to_start: list[JobRow] = []
        self.started: list[tuple[int, tuple[str, ...]]] = []

    def launch(self, row: JobRow) -> None:
        """See records.Machines."""
        self.to_start.append(row)
        self.started.append((row.job_id, row.nodes))

    def signal(self, row: JobRow, name: str) -> None:
        """Do nothing: tests read Slurm's `signals`."""

    def terminate(self, row: JobRow) -> None:
        """See records.Machines."""
        self.terminated(row)


class SteppedSlurm(SimulatedSlurm):
    """A simulated Slurm that schedules and starts jobs step by step: started jobs wait for their Prolog.

    Args:
        width: number of catalog nodes: the largest number of nodes of a job that may wait for a profile not offered.
    """

    def __init__(self, clock: VirtualClock, settings: SlurmSettings | None = None, width: int = 2) -> None:
        tiers = (SimulatedPartition("gpu", 10), SimulatedPartition("train", 1))
        super().__init__(clock, settings, tiers)
        self.nodes_run = self.stepped = SteppedMachines()
        self.runs: dict[int, float] = {}
        self.width = width

    def catalog(self, geometry: Geometry, gpus: int) -> None:
        """Add DOWN nodes that list everything that a node with these GPUs may offer."""
        counts = {info.profile.gres_type: info.max_instances * gpus for info in geometry.profiles}
        for number in range(self.width):
            self.add_node(
                f"{CATALOG}{number}", {**counts, "loan": 2, "guest": 1}, partitions=("gpu", "train"), states=("DOWN",)
            )

    @property
    def real(self) -> dict[str, NodeRecord]:
        """The nodes except those of the catalog."""
        return {name: machine for name, machine in self.machines.items() if not name.startswith(CATALOG)}

    def submit(self, want: str, *, runs: float = 100.0, limit: int | None = 600, **more: Any) -> int:
        job = super().submit(want, limit=limit, **more)
        self.runs[job] = runs
        return job

    def runs_s(self, row: JobRow) -> float:
        """Return the run time of a job or array task, seconds."""
        return self.runs.get(row.job_id, self.runs.get(row.array_job or 0, 100.0))


class World:
    """A cluster with its controller; `step` simulates a second without failures, other methods simulate failures."""

    def __init__(
        self,
        nodes: int = 1,
        gpus: int = 2,
        geometry: Geometry = H100,
        settings: SupplySettings | None = None,
        seed: int = 0,
        conf: dict[str, int] | None = None,
        silence_s: float = 90.0,
    ) -> None:
        self.clock = VirtualClock()
        self.slurm = self.make_slurm(max(2, nodes))
        self.slurm.stepped.terminated = self.terminated
        self.nodes = SimulatedNodes(self.clock, self.slurm, strict=True, seed=seed)
        self.random = random.Random(seed)
        slots = geometry.max_slots * gpus
        for i in range(1, nodes + 1):
            counts = conf or {"1g.10gb": slots, "none": slots}
            self.slurm.add_node(f"n{i}", counts, partitions=("gpu", "train"))
            self.nodes.add(f"n{i}", *([geometry] * gpus))
        self.slurm.catalog(geometry, gpus)
        self.records: list[tuple[str, dict[str, int], str]] = []
        self.silence_s = silence_s
        self.settings = settings or SupplySettings(stuck_s=30)
        self.new_loop()
        self.ends: dict[int, float] = {}
        self.killed: list[int] = []

    def make_slurm(self, width: int) -> SteppedSlurm:
        return SteppedSlurm(self.clock, SlurmSettings(), width)

    @property
    def to_start(self) -> list[JobRow]:
        return self.slurm.stepped.to_start

    def new_loop(self, last_counts: dict[str, dict[str, int]] | None = None) -> None:
        """Start the service (again)."""
        self.loop = SupplyController(
            self.slurm,
            self.nodes,
            self.clock,
            self.settings,
            lambda node, counts, why: self.records.append((node, counts, why)),
            silence_s=self.silence_s,
        )
        self.loop.advertiser.recall(last_counts or {})

    def round(self) -> RoundReport:
        sums = {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}
        report = self.loop.round()
        assert sums == {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}, "the constant sum broke"
        return report

    def start(self) -> None:
        """Run Slurm's scheduler; the Prologs of started jobs run later."""
        self.slurm.schedule()

    def prologs(self) -> None:
        while self.to_start:
            self.prolog(self.to_start.pop(0))

    def prolog(self, row: JobRow) -> None:
        """Run the Prolog of a started job: it gets its slices, or is requeued."""
        if self.slurm.queue.get(row.job_id) is not row:
            return  # ended before
        if self.nodes.prolog(row):
            self.ends[row.job_id] = self.clock.time() + self.slurm.runs_s(row)
        else:
            self.slurm.requeued(row.job_id)
            self.slurm.released(row.job_id)

    def terminated(self, row: JobRow) -> None:
        """Note a job terminated by Slurm (e.g. at its time limit); its Epilog runs in the next `finish`."""
        self.ends.pop(row.job_id, None)
        self.killed.append(row.job_id)

    def finish(self) -> None:
        """End the jobs whose run time is over: report them to Slurm, and run their Epilogs."""
        for job, end in sorted(self.ends.items()):
            if end <= self.clock.time():
                self.slurm.completed(job)
                self.leave(job)
        while self.killed:
            self.leave(self.killed.pop(0))

    def leave(self, job: int) -> None:
        """Run the Epilogs of a job."""
        self.nodes.epilog(job)
        self.slurm.released(job)
        self.ends.pop(job, None)

    def step(self, seconds: float = 1.0) -> RoundReport:
        self.clock.sleep(seconds)
        self.finish()
        self.nodes.report()
        self.nodes.poll()
        report = self.round()
        backed(self.slurm.real, self.nodes)
        self.start()
        self.prologs()
        self.nodes.report()
        return report

    def running(self) -> set[int]:
        return set(self.ends)

    def steps(self, count: int) -> list[RoundReport]:
        return [self.step() for _ in range(count)]


def backed(machines: Mapping[str, NodeRecord], nodes: SimulatedNodes) -> None:
    """Assert that every count on which Slurm could start a job has a slot in the plan that the node knows."""
    known, held = nodes.known, nodes.held
    for name, machine in machines.items():
        slots: Counter[Profile] = Counter()
        for uuid, layout in known[name].items():
            slots.update(layout.counts())
            slots.update(Counter(s.profile for s in held[name][uuid] if s not in layout.slots))
        for profile, count in profiles(machine.gres).items():
            if count > machine.used[profile.gres_type]:
                assert count <= slots[profile], f"{name}: {count} x {profile} offered, {slots[profile]} slots"

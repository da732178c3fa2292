"""A small cluster for stories: FakeSlurm, FakeNodes and the real loop."""

from __future__ import annotations

import random

from slurm_migbatch.daemon.controller import RoundReport
from slurm_migbatch.decide.supply import SupplySettings
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.slurm.client import JobRow
from tests.support.controllers import SupplyController
from tests.support.fake_slurm import FakeClock, FakeNodes, FakeSlurm, backed
from tests.support.supply_gpus import H100


class World:
    """Everything together; `step` is one second in which all goes well, the rest is for those in which it does not."""

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
        self.clock = FakeClock()
        self.slurm = FakeSlurm(self.clock)
        self.nodes = FakeNodes(self.clock, seed)
        self.random = random.Random(seed)
        slots = geometry.max_slots * gpus
        for i in range(1, nodes + 1):
            self.slurm.add_node(f"n{i}", conf or {"1g.10gb": slots, "none": slots})
            self.nodes.add(f"n{i}", *([geometry] * gpus))
        self.records: list[tuple[str, dict[str, int], str]] = []
        self.silence_s = silence_s
        self.settings = settings or SupplySettings(stuck_s=30)
        self.new_loop()
        self.to_start: list[tuple[JobRow, tuple[str, ...]]] = []
        self.ends: dict[int, float] = {}

    def new_loop(self, told: dict[str, dict[str, int]] | None = None) -> None:
        """The service is started (again)."""
        self.loop = SupplyController(
            self.slurm,
            self.nodes,
            self.clock,
            self.settings,
            lambda node, counts, why: self.records.append((node, counts, why)),
            silence_s=self.silence_s,
        )
        self.loop.advertiser.recall(told or {})

    def round(self) -> RoundReport:
        sums = {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}
        report = self.loop.round()
        assert sums == {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}, "the constant sum broke"
        for node in self.slurm.machines:
            if node not in self.nodes.deaf:
                self.nodes.board.heard(node)
        return report

    def start(self) -> None:
        """Slurm's cycle; the Prologs of what it started run later."""
        self.to_start.extend(self.slurm.schedule())

    def prologs(self) -> None:
        for row, where in self.to_start:
            if self.nodes.prolog(row, where):
                self.ends[row.job_id] = self.clock.time() + self.slurm.running_left[row.job_id]
            else:
                self.slurm.requeue_now(row.job_id)
        self.to_start = []

    def finish(self) -> None:
        """Jobs whose time has come: Epilog, then Slurm."""
        for job, end in sorted(self.ends.items()):
            if end <= self.clock.time():
                self.nodes.epilog(job)
                self.slurm.finish(job)
                del self.ends[job]

    def step(self, seconds: float = 1.0) -> RoundReport:
        self.clock.sleep(seconds)
        self.finish()
        self.nodes.report()
        self.nodes.poll()
        report = self.round()
        backed(self.slurm, self.nodes)
        self.start()
        self.prologs()
        self.nodes.report()
        return report

    def running(self) -> set[int]:
        return set(self.ends)

    def steps(self, count: int) -> list[RoundReport]:
        return [self.step() for _ in range(count)]

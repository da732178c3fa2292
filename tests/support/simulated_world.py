"""The contract's world on the simulated Slurm; jobs do not end by themselves and signals have no effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from slurm_migbatch.lab.slurm.client import SimulatedSlurm
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.slurm.client import SlurmError

TIERS = (SimulatedPartition("gpu", 10), SimulatedPartition("train", 1, preempted=True))
PROFILES = ("7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb")


class SimulatedWorld:
    """A simulated cluster; time advances in `passes`, a second at a time."""

    def __init__(self, release: tuple[int, int] = (24, 11)) -> None:
        self.clock = VirtualClock()
        self.client = SimulatedSlurm(self.clock, SlurmSettings(release=release), TIERS, auto=True)
        self.nodes = ("n1", "n2")
        for name in self.nodes:
            self.client.add_node(name, {"1g.10gb": 14}, partitions=("gpu", "train"), cpus=64)
        for name in ("migcatalog1", "migcatalog2"):
            counts = dict.fromkeys(PROFILES, 14)
            self.client.add_node(name, counts, partitions=("gpu", "train"), states={"DOWN"}, cpus=64)

    def submit(self, want: str, *, partition: str = "gpu", hold: bool = False, comment: str = "", **more: Any) -> int:
        options = {"user": "mbalice", "uid": 1001, "name": "wrap", "cpus": 1, **more}
        return self.client.submit(want, partition=partition, held=hold, comment=comment, **options)

    def array(self, want: str, tasks: str) -> int:
        return self.submit(want, array=tasks)

    def het(self, *wants: str) -> int:
        return self.client.submit_het(*wants, user="mbalice")[0]

    def timed(self, want: str, minutes: int, nodes: int = 1) -> int:
        return self.submit(want, limit=60 * minutes, num_nodes=nodes)

    def dependent(self, want: str, *after: int, comment: str = "") -> int:
        return self.submit(want, after=after, comment=comment)

    def release(self, job: int) -> None:
        self.client.release(job)

    def suspend(self, job: int) -> None:
        self.client.suspend(job)

    def refusal(self, want: str) -> str:
        try:
            self.submit(want)
        except SlurmError as error:
            return str(error)
        return ""

    def passes(self) -> Iterator[None]:
        for _ in itertools.repeat(None, 600):
            yield
            self.clock.sleep(1.0)

"""The fakes that tests of supply and of the co-scheduler trust do what real Slurm does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.slurm.client import JobRow
from tests.support.contract import Changing, Looking
from tests.support.fake_slurm import FakeClock, FakeSlurm
from tests.support.loan_world import LendingSlurm


class FakeWorld:
    """A fake whose clock moves by one second for each look."""

    nodes = ("n1", "n2")

    def __init__(self, kind: type[FakeSlurm]) -> None:
        self.clock = FakeClock()
        self.client = kind(self.clock)
        for name in self.nodes:
            self.client.add_node(name, {"1g.10gb": 14}, partitions=("gpu", "train"))
        profiles = dict.fromkeys(("7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"), 1)
        self.client.add_node("migcatalog1", profiles, partitions=("gpu", "train"), states={"DOWN"})

    def submit(self, want: str, *, partition: str = "gpu", hold: bool = False, comment: str = "") -> int:
        return self.client.submit(
            f"gres/{want}",
            runs=10**9,
            limit=None,
            partition=partition,
            comment=comment,
            reason="JobHeldUser" if hold else "None",
        )

    def passes(self) -> Iterator[None]:
        for _ in range(600):
            yield
            self.clock.sleep(1.0)
            if isinstance(self.client, LendingSlurm):
                self.client.tick()
            self.client.schedule()

    def row(self, job: int) -> JobRow:
        return self.client.queue[job]


class TestFakeOfSupply(Looking):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld(FakeSlurm)


class TestFakeOfTheCoScheduler(Looking, Changing):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld(LendingSlurm)

"""The simulated Slurm, which tests and simulator share, fulfils the same contract as real Slurm."""

from __future__ import annotations

import pytest

from tests.support.contract import Arrays, Changing, Looking, Order
from tests.support.simulated_world import SimulatedWorld


class TestSimulated(Looking, Changing, Arrays, Order):
    @pytest.fixture
    def world(self) -> SimulatedWorld:
        return SimulatedWorld()


class TestSimulatedOfALongerMemory(Looking, Changing, Arrays, Order):
    """Slurm up to 23.02."""

    @pytest.fixture
    def world(self) -> SimulatedWorld:
        return SimulatedWorld((22, 5))

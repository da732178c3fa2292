"""Slurm's own commands fulfil the contract, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.contract import Arrays, Changing, Looking, Order
from tests.support.real_slurm import Control
from tests.support.real_world import RealWorld


class TestCommands(Looking, Changing, Arrays, Order, Control):
    @pytest.fixture
    def world(self, cluster: Cluster) -> Iterator[RealWorld]:
        world = RealWorld(cluster, CliClient(cluster.bin, cluster.slurm_conf))
        yield world
        world.close()

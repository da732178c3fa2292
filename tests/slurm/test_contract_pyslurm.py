"""pyslurm fulfils the contract and shows the rows of Slurm's commands: a stand-in always, the real one if installed.

`make pyslurm` builds the real one in a --slurm-root with Slurm 25.11.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.pyslurm import PyslurmClient
from slurm_migbatch.testbed import pyslurmroot
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.compared_world import ComparedWorld, rows_are_those_of_the_commands
from tests.support.contract import Arrays, Changing, Looking, Order
from tests.support.real_slurm import Control

STANDIN = ("env", f"PYTHONPATH={Path(__file__).parent / 'standin'}", sys.executable)
KINDS = ["stand-in", pytest.param("pyslurm", marks=pytest.mark.pyslurm)]


class PyslurmWorld(ComparedWorld):
    client: PyslurmClient


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[PyslurmWorld]:
    real = request.param == "pyslurm"
    python = (str(pyslurmroot.python(cluster)),) if real else ("env", f"STANDIN_BIN={cluster.bin}", *STANDIN)
    client = PyslurmClient(cluster.bin, cluster.slurm_conf, 60.0, python=python)
    assert client.probe() == ""
    world = PyslurmWorld(cluster, client)
    yield world
    world.close()
    client.close()


class TestPyslurm(Looking, Changing, Arrays, Order, Control):
    pass


def test_rows_equal_those_of_the_commands(world: PyslurmWorld) -> None:
    rows_are_those_of_the_commands(world)


def test_listing_a_known_queue_runs_no_command(world: PyslurmWorld) -> None:
    jobs = [world.submit("mig:1g.10gb:1", hold=True) for _ in range(3)]
    world.client.jobs()
    world.client.calls = world.client.asked = 0
    assert [row.gres.partition("mig")[2] for row in world.client.jobs()] == [":1g.10gb:1"] * 3
    assert (world.client.calls, world.client.asked) == (0, 1)
    world.client.update_jobs({str(jobs[0]): {"Gres": "mig:2g.20gb:1"}})
    assert {row.gres.partition("mig")[2] for row in world.client.jobs()} == {":1g.10gb:1", ":2g.20gb:1"}


def test_job_that_pyslurm_cannot_read_hides_no_other_job(world: PyslurmWorld) -> None:
    odd = world.submit("mig:1g.10gb:1", hold=True, comment=b"\xff\xfe".decode("utf-8", "surrogateescape"))
    plain = world.submit("mig:1g.10gb:1", hold=True)
    rows = {row.job_id: row for row in world.same_rows()}
    assert rows[odd].comment == "\udcff\udcfe"
    assert plain in rows


def test_missing_slurm_is_an_error_and_not_an_empty_queue(tmp_path: Path) -> None:
    client = PyslurmClient(tmp_path, tmp_path / "nowhere", 60.0, python=STANDIN)
    assert "Unable to process configuration file" in client.probe()
    with pytest.raises(SlurmError, match="ended with exit code 1"):
        client.jobs()
    client.close()

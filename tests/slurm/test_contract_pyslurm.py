"""pyslurm keeps the contract and shows the rows of Slurm's commands: a stand-in everywhere, the real one where it is.

MIGBATCH_PYSLURM names a Python that has pyslurm for the Slurm of the cluster, with its arguments (such as `chroot DIR
env PYTHONPATH=... python3`, with --slurm-root); without it the real one is tried where it can be imported here.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.slurm.pyslurm import PyslurmClient
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.contract import Arrays, Changing, Looking, Order, tasks
from tests.support.real_slurm import Control
from tests.support.real_world import RealWorld

PYTHONS = {"stand-in": ["env", f"PYTHONPATH={Path(__file__).parent / 'standin'}", sys.executable]}
if os.environ.get("MIGBATCH_PYSLURM"):
    PYTHONS["pyslurm"] = shlex.split(os.environ["MIGBATCH_PYSLURM"])
elif importlib.util.find_spec("pyslurm"):
    PYTHONS["pyslurm"] = [sys.executable]


class PyslurmWorld(RealWorld):
    client: PyslurmClient

    def __init__(self, cluster: Cluster, client: PyslurmClient) -> None:
        super().__init__(cluster, client)
        self.commands = CliClient(cluster.bin, cluster.slurm_conf)

    def same_rows(self) -> list[JobRow]:
        """The rows, once both have seen the same moment."""
        for _ in self.passes():
            before, rows, after = self.commands.jobs(), self.client.jobs(), self.commands.jobs()
            if before == after:
                assert rows == after
                return rows
        raise AssertionError("the queue does not come to rest")


@pytest.fixture(params=sorted(PYTHONS))
def world(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[PyslurmWorld]:
    python = ("env", f"STANDIN_BIN={cluster.bin}", *PYTHONS[request.param])
    client = PyslurmClient(cluster.bin, cluster.slurm_conf, 60.0, python)
    assert client.probe() == ""
    world = PyslurmWorld(cluster, client)
    yield world
    world.close()
    client.close()


class TestPyslurm(Looking, Changing, Arrays, Order, Control):
    pass


#: options of jobs whose rows are hard to tell
TELLING = (
    ["--gres=mig:1g.10gb:1"],
    ["--gres=mig:1g.10gb:1,mig:none:0", "-n", "3", "-N", "1", "-t", "10"],
    ["--gres=mig:1", "-N", "2", "-n", "2"],
    ["--gres=mig"],
    ["--gres=mig:7g.80gb:1,mig:1g.10gb:1", "-t", "1-0", "-p", "train,gpu"],
    ["--gres=mig:3g.40gb:2", "--begin=now+1hour", "--comment=None", "-J", "None"],
    ["--gres=mig:1g.10gb:1", "-H", "--comment=a\x1fb\x1e|%\nNodeName=x \u00e9", "-J", "two\nlines"],
    ["--gres=mig:1g.20gb:1", "--array=0-400:2%4", "-t", "5"],
    ["--gres=mig:7g.80gb:1", "--array=1,3,5-9"],
    ["--gres=mig:1g.10gb:9", "--array=0-3%2"],
    ["--gres=mig:1g.10gb:1", "--dependency=afterany:1", "-p", "train"],
    ["--gres=mig:1g.10gb:1", "-w", "n2", "-p", "train"],
    ["--gres=mig:3g.40gb:1", ":", "--gres=mig:2g.20gb:1"],
    [],
)
#: 22.05 refuses these at submission; pyslurm shows nothing of them
UNCOUNTED = (["--gres=mig:1g.10gb"], ["--gres=mig:7g.80gb,mig:1g.10gb:1"], ["--gres=mig:3g.40gb,mig:2g.20gb"])


def test_rows_are_those_of_the_commands(world: PyslurmWorld) -> None:
    ended = world.sbatch(wrap="false")
    for _ in world.passes():
        if ended not in {row.job_id for row in world.commands.jobs()}:
            break
    uncounted = UNCOUNTED if world.client.version() > (22, 5) else ()
    jobs = [world.sbatch(*options) for options in (*TELLING, *uncounted)]
    for _ in world.passes():
        if {row.state for row in world.commands.jobs()} == {"PENDING", "RUNNING"}:
            break
    rows = world.same_rows()
    assert {row.job_id for row in rows} >= set(jobs)
    assert ended not in {row.job_id for row in rows}
    assert {row.state for row in rows} == {"PENDING", "RUNNING"}
    array = jobs[7]
    world.client.update_jobs({f"{array}_4": {"Gres": "mig:3g.40gb:1"}, str(jobs[5]): {"Gres": "mig:2g.20gb:1"}})
    assert "4" in tasks(world, array)
    assert sum(row.tasks for row in tasks(world, array).values()) == 201
    world.same_rows()
    running = next(row for row in rows if row.state == "RUNNING" and row.array_job is None)
    world.client.requeue_all([running.job_id])
    world.same_rows()
    assert world.client.nodes() == world.commands.nodes()
    assert world.client.version() == world.commands.version()


def test_a_queue_that_is_known_costs_no_command(world: PyslurmWorld) -> None:
    jobs = [world.submit("mig:1g.10gb:1", hold=True) for _ in range(3)]
    world.client.jobs()
    world.client.calls = world.client.asked = 0
    assert [row.gres.partition("mig")[2] for row in world.client.jobs()] == [":1g.10gb:1"] * 3
    assert (world.client.calls, world.client.asked) == (0, 1)
    world.client.update_jobs({str(jobs[0]): {"Gres": "mig:2g.20gb:1"}})
    assert {row.gres.partition("mig")[2] for row in world.client.jobs()} == {":1g.10gb:1", ":2g.20gb:1"}


def test_a_job_that_pyslurm_fails_over_hides_no_other(world: PyslurmWorld) -> None:
    odd = world.submit("mig:1g.10gb:1", hold=True, comment=b"\xff\xfe".decode("utf-8", "surrogateescape"))
    plain = world.submit("mig:1g.10gb:1", hold=True)
    rows = {row.job_id: row for row in world.same_rows()}
    assert rows[odd].comment == "\udcff\udcfe"
    assert plain in rows


def test_a_slurm_that_is_not_there_is_an_error_and_not_an_empty_queue(tmp_path: Path) -> None:
    client = PyslurmClient(tmp_path, tmp_path / "nowhere", 60.0, PYTHONS["stand-in"])
    assert "Unable to process configuration file" in client.probe()
    with pytest.raises(SlurmError, match="ended with exit code 1"):
        client.jobs()
    client.close()

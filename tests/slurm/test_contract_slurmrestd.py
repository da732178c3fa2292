"""slurmrestd fulfils the contract and shows the rows of Slurm's commands, with every version of its API.

It needs a Slurm that has slurmrestd: `pytest --slurm-root=...` of 24.11 or 26.05.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.slurm import restapi
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.slurmrestd import SlurmrestdClient
from slurm_migbatch.testbed import restd
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.compared_world import ComparedWorld, rows_are_those_of_the_commands
from tests.support.contract import Arrays, Changing, Looking, Order, offer, until
from tests.support.real_slurm import Control

pytestmark = pytest.mark.slurmrestd


def client_of(cluster: Cluster, token: Path | str | None = None, user: str = "slurm") -> SlurmrestdClient:
    file = str(restd.token_file(cluster.directory) if token is None else token)
    where = restd.address(cluster.directory)
    return SlurmrestdClient(cluster.bin, cluster.slurm_conf, 60.0, address=where, token_file=file, user=user)


@pytest.fixture
def world(cluster: Cluster) -> Iterator[ComparedWorld]:
    world = ComparedWorld(cluster, client_of(cluster))
    yield world
    world.close()


class TestSlurmrestd(Looking, Changing, Arrays, Order, Control):
    pass


def test_rows_equal_those_of_the_commands(world: ComparedWorld) -> None:
    rows_are_those_of_the_commands(world)


def test_every_api_version_behaves_the_same(world: ComparedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    running = world.submit("mig:1g.10gb:2", comment="a\x1fb|%\u00e9")
    world.array("mig:1g.10gb:9", "0-3%2")
    until(world, running, "RUNNING")
    spoken = []
    for version in restapi.VERSIONS:
        monkeypatch.setattr(restapi, "VERSIONS", (version,))
        world.client = client = client_of(world.cluster)
        try:
            spoken.append(client.api.version)
        except SlurmError as error:
            assert f"offers none of the API versions v0.0.{version}" in str(error)
            continue
        world.same_rows()
        assert client.nodes() == world.commands.nodes()
        assert (client.version(), client.default_partition()) == (world.commands.version(), "gpu")
        job = world.submit("mig:3g.40gb:1", hold=True)
        client.update_jobs({str(job): {"Gres": "mig:1g.10gb:1", "Comment": f"by {version}"}})
        world.release(job)
        assert until(world, job, "RUNNING").comment == f"by {version}"
        client.requeue_all([job])
        assert until(world, job, "PENDING").restarts == 1
        client.signal_all([job, running], "CONT")
        client.cancel(job)
        client.set_gres({name: offer(world, name, **{"1g_10gb": 7, "2g_20gb": 1}) for name in world.nodes})
        client.set_gres({name: offer(world, name, **{"1g_10gb": 14}) for name in world.nodes})
    assert len(spoken) >= 3, spoken


def test_reservations_are_shown_as_by_the_commands(world: ComparedWorld) -> None:
    words = ["scontrol", "create", "reservation", "ReservationName=kept", "StartTime=now", "Duration=60", "Users=root"]
    world.cluster.run([*words, "Nodes=n2"])
    try:
        job = world.submit("mig:3g.40gb:1", hold=True)
        asked = int(world.cluster.run(["sbatch", "-H", "--parsable", "--reservation=kept", "--wrap=true"]).stdout)
        for _ in world.passes():
            if any(node.set_aside for node in world.client.nodes()):
                break
        assert {node.name for node in world.client.nodes() if node.set_aside} == {"n2"}
        assert world.client.nodes() == world.commands.nodes()
        assert {row.job_id: row.reservation for row in world.same_rows()} == {job: "", asked: "kept"}
    finally:
        world.client.cancel(asked)
        for _ in world.passes():
            if not world.cluster.run(["scontrol", "delete", "ReservationName=kept"], check=False).returncode:
                break


@pytest.mark.parametrize("whose", ["mbalice", "", "forged"])
def test_token_without_access_to_every_job_is_an_error_not_an_empty_queue(
    world: ComparedWorld, tmp_path: Path, whose: str
) -> None:
    world.submit("mig:3g.40gb:1", hold=True)
    file = tmp_path / "token"
    if whose == "mbalice":
        file.write_text(world.cluster.run(["scontrol", "token", "lifespan=600"], "mbalice").stdout)
    elif whose:
        head, _, tail = restd.token_file(world.cluster.directory).read_text().partition(".")
        file.write_text(f"{head}.{tail[:-4]}AAAA")
    file.touch()
    file.chmod(0o600)
    client = client_of(world.cluster, file if whose else "")
    assert client.probe() != ""
    with pytest.raises(SlurmError):
        client.jobs()

"""Which backend the service takes, and that the choice changes nothing that it sees."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.daemon.compose import client_of
from slurm_migbatch.daemon.ended import HistoryClient, PyslurmHistoryClient
from slurm_migbatch.slurm import pyslurm as backend
from slurm_migbatch.testbed.cluster import Cluster

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture
def here(cluster: Cluster) -> Iterator[ClusterConfig]:
    yield ClusterConfig(slurm_bin=str(cluster.bin), slurm_conf=str(cluster.slurm_conf), timeout_s=60.0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    command = ("env", f"PYTHONPATH={STANDIN}", f"STANDIN_BIN={cluster.bin}", sys.executable)
    monkeypatch.setattr(backend.PyslurmClient.__init__, "__defaults__", (None, None, 20.0, command))


def chosen(config: ClusterConfig, backend: str) -> HistoryClient:
    return client_of(ClusterConfig(**{**vars(config), "backend": backend}))


def test_commands_are_the_default(here: ClusterConfig) -> None:
    assert type(client_of(here)) is HistoryClient


@pytest.mark.parametrize(("name", "level"), [("auto", logging.INFO), ("pyslurm", logging.WARNING)])
def test_without_pyslurm_the_service_goes_by_commands_and_says_why(
    here: ClusterConfig, name: str, level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no module named pyslurm')")
    monkeypatch.setattr(backend.PyslurmClient.__init__, "__defaults__", (None, None, 20.0, command))
    with caplog.at_level(logging.INFO):
        client = chosen(here, name)
    assert type(client) is HistoryClient
    assert client.jobs() == []
    (record,) = [r for r in caplog.records if "pyslurm" in r.getMessage()]
    assert (record.levelno, "no module named pyslurm" in record.getMessage()) == (level, True)


@pytest.mark.parametrize("name", ["auto", "pyslurm"])
def test_with_pyslurm_it_sees_the_same(here: ClusterConfig, name: str, installed: None, cluster: Cluster) -> None:
    job = cluster.submit("--gres=mig:3g.40gb:1", "-H", wrap="true")
    ended = cluster.submit("--output=/dev/null", wrap="exit 3")
    cluster.wait_job(ended)
    client, commands = chosen(here, name), client_of(here)
    assert isinstance(client, PyslurmHistoryClient)
    try:
        assert [row.job_id for row in client.jobs()] == [job]
        assert client.jobs() == commands.jobs()
        assert client.ended([ended, job]) == commands.ended([ended, job])
        assert [(row["job_id"], row["state"]) for row in client.ended([ended, job])] == [(ended, "FAILED")]
    finally:
        client.cancel(job)
        client.close()

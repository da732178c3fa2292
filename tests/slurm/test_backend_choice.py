"""Which backend the service chooses, and that the choice does not change the rows that it gets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.daemon.compose import client_of
from slurm_migbatch.daemon.ended import HistoryClient, PyslurmHistoryClient
from slurm_migbatch.testbed.cluster import Cluster

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture
def cluster_config(cluster: Cluster) -> Iterator[ClusterConfig]:
    yield ClusterConfig(slurm_bin=str(cluster.bin), slurm_conf=str(cluster.slurm_conf), timeout_s=60.0)


def python(tmp_path: Path, command: str) -> str:
    """Write a program in place of the Python that has pyslurm."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return str(program)


def chosen(config: ClusterConfig, backend: str, program: str) -> HistoryClient:
    return client_of(replace(config, backend=backend, pyslurm_python=program))


def test_slurm_commands_are_the_default_backend(cluster_config: ClusterConfig) -> None:
    assert type(client_of(cluster_config)) is HistoryClient


@pytest.mark.parametrize(("name", "level"), [("auto", logging.INFO), ("pyslurm", logging.WARNING)])
def test_service_falls_back_to_commands_without_pyslurm_and_logs_why(
    cluster_config: ClusterConfig, name: str, level: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    program = python(tmp_path, "echo no module named pyslurm >&2; exit 1")
    with caplog.at_level(logging.INFO):
        client = chosen(cluster_config, name, program)
    assert type(client) is HistoryClient
    assert client.jobs() == []
    (record,) = [r for r in caplog.records if "pyslurm" in r.getMessage()]
    assert (record.levelno, "no module named pyslurm" in record.getMessage()) == (level, True)


@pytest.mark.parametrize("name", ["auto", "pyslurm"])
def test_pyslurm_backend_returns_the_same_rows_as_the_commands(
    cluster_config: ClusterConfig, name: str, tmp_path: Path, cluster: Cluster
) -> None:
    program = python(tmp_path, f'PYTHONPATH={STANDIN} STANDIN_BIN={cluster.bin} exec {sys.executable} "$@"')
    job = cluster.submit("--gres=mig:3g.40gb:1", "-H", wrap="true")
    ended = cluster.submit("--output=/dev/null", "--job-name=a |\n\x1fb", "--time=7", wrap="exit 3")
    cluster.wait_job(ended)
    client, commands = chosen(cluster_config, name, program), client_of(cluster_config)
    assert isinstance(client, PyslurmHistoryClient)
    try:
        assert [row.job_id for row in client.jobs()] == [job]
        assert client.jobs() == commands.jobs()
        assert client.ended([ended, job]) == commands.ended([ended, job])
        (row,) = client.ended([ended, job])
        assert (row["job_id"], row["state"]) == (ended, "FAILED")
        assert (row["name"], row["time_limit_s"]) == ("a |\n\x1fb", 420)
    finally:
        client.cancel(job)
        client.close()

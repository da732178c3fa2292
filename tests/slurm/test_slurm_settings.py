"""Settings of slurmctld that decisions depend on."""

from __future__ import annotations

import pytest

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.settings import backfill_window_s, parse_settings
from slurm_migbatch.testbed.cluster import Cluster


@pytest.mark.parametrize(
    ("parameters", "days"),
    [
        ("(null)", 1),
        ("bf_continue,bf_window=10080,bf_resolution=600", 7),
        ("BF_Window=2880", 2),
        ("bf_window_linear=60", 1),
        ("bf_window=0", 1),  # Slurm refuses both, and takes the default
        ("bf_window=43201", 1),
        ("bf_window=43200", 30),
        ("bf_window=", 1),
    ],
)
def test_backfill_window_is_read(parameters: str, days: float) -> None:
    config = f"SchedulerParameters     = {parameters}\nSchedulerType           = sched/backfill\n"
    assert backfill_window_s(parse_settings(config)) == days * 86_400


def test_there_is_no_window_without_backfill() -> None:
    assert backfill_window_s(parse_settings("SchedulerParameters = bf_window=60\nSchedulerType = sched/builtin")) == 0


@pytest.mark.slurm
def test_client_reads_the_window_of_the_cluster(cluster: Cluster) -> None:
    config = cluster.run(["scontrol", "show", "config"]).stdout
    assert CliClient(cluster.bin, cluster.slurm_conf).backfill_window_s() == backfill_window_s(parse_settings(config))
    assert parse_settings(config)["schedulertype"] == "sched/backfill"

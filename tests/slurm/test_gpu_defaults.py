"""What partitions give jobs for each GPU."""

from __future__ import annotations

import pytest

from slurm_migbatch.slurm.gpu_defaults import GpuDefaults, parse

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=64000 DefMemPerCPU=4000
PartitionName=part JobDefaults=DefMemPerGPU=100
PartitionName=cpu JobDefaults=(null) DefMemPerNode=UNLIMITED
"""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("JobDefaults             = (null)\n", {"gpu": GpuDefaults(8, 64000), "part": GpuDefaults(0, 100)}),
        (
            "Configuration data as of ...\nJobDefaults             = DefCpuPerGPU=2\n",
            {"gpu": GpuDefaults(8, 64000), "part": GpuDefaults(2, 100), "cpu": GpuDefaults(2, 0)},
        ),
        ("", {"gpu": GpuDefaults(8, 64000), "part": GpuDefaults(0, 100)}),
    ],
)
def test_partitions_have_their_own_defaults_and_else_the_clusters(
    config: str, expected: dict[str, GpuDefaults]
) -> None:
    assert parse(PARTITIONS, config) == expected


def test_odd_defaults_are_none() -> None:
    assert (
        parse("PartitionName=gpu JobDefaults=DefCpuPerGPU=x,DefMemPerGPU=,Other\nJobDefaults=DefCpuPerGPU=1", "") == {}
    )

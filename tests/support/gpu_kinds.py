"""Kinds of GPUs and a site for tests: the SM counts and memory sizes that drivers report."""

from __future__ import annotations

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from slurm_migbatch.workload.catalog import GpuKind, Partition, SiteCatalog

P = Profile.parse


def info(name: str, compute: int, memory: int, mib: int, sms: int, limit: int) -> ProfileInfo:
    return ProfileInfo(P(name), compute, compute, memory, mib, sms, 1, 0, 0, 0, 0, limit, (Placement(0, memory),))


H100 = GpuKind(
    "h100-80gb",
    Geometry(
        "NVIDIA H100 80GB HBM3",
        [
            info("1g.10gb", 1, 1, 9984, 16, 7),
            info("1g.10gb+me", 1, 1, 9984, 16, 1),
            info("1g.20gb", 1, 2, 20096, 26, 4),
            info("2g.20gb", 2, 2, 20096, 32, 3),
            info("3g.40gb", 3, 4, 40448, 60, 2),
            info("4g.40gb", 4, 4, 40448, 64, 1),
            info("7g.80gb", 7, 8, 81152, 132, 1),
        ],
    ),
    989,
    3350,
    132,
    ("h100",),
)
A100_40 = GpuKind(
    "a100-40gb",
    Geometry(
        "NVIDIA A100-SXM4-40GB",
        [
            info("1g.5gb", 1, 1, 4864, 14, 7),
            info("1g.10gb", 1, 2, 9856, 14, 4),
            info("2g.10gb", 2, 2, 9856, 28, 3),
            info("3g.20gb", 3, 4, 19968, 42, 2),
            info("4g.20gb", 4, 4, 19968, 56, 1),
            info("7g.40gb", 7, 8, 40192, 98, 1),
        ],
    ),
    312,
    1555,
    108,
    ("a100",),
)
SITE = SiteCatalog(
    {
        "gpu": Partition("gpu", (H100,)),
        "old": Partition("old", (A100_40,), P("2g.10gb")),
        "mixed": Partition("mixed", (H100, A100_40), gpu_defaults=GpuDefaults(9, 50_000), others=frozenset({"v100"})),
    }
)

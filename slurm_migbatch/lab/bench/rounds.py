"""Measure decisions for a full queue of training jobs and many idle slices, and slurmctld's load.

On a real Slurm with simulated GPUs. First a dry run, in which the same decision is repeated in every round; then
the same service in normal mode, which releases as many jobs per round as configured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.bench.rpcs import Diag, diag
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.proc import wait_until

TARGET_S: Final = 1.0
WATCH_S: Final = 20.0
RELEASES: Final = 16
_SAMPLE = re.compile(
    r"^(migbatch_(?:lending|supply)_round_seconds_(?:sum|count|bucket))(?:\{le=\"([^\"]+)\"\})? (\S+)$"
)


def measure(
    pending: int = 1000,
    nodes: int = 8,
    gpus: int = 9,
    progress: Progress = silent,
    slurm_root: str = "",
) -> dict[str, Any]:
    """Run the whole measurement (root, some minutes).

    Args:
        pending: pending training jobs, each for a slice of any size.
        nodes, gpus: of the test bed; an H100 has seven slices.
        slurm_root: run the Slurm of this debootstrapped Debian.

    Raises:
        TestbedError: the test bed failed.
    """
    lending = {
        "enabled": True,
        "partitions": ["train"],
        "dry_run": True,
        "min_idle_s": 0.0,
        "most_releases": pending,
    }
    with Cluster(
        nodes=nodes,
        gpus=gpus,
        cpus=256,
        slurm_root=slurm_root,
        migbatch="all",
        config={"lending": lending},
        options={"MaxJobCount": "20000"},
    ) as bed:
        client = CliClient(bed.bin, bed.slurm_conf)
        progress(f"{pending} training jobs are submitted", 3)
        line = (
            'sbatch --parsable -p train -o /dev/null --gres=mig:auto --comment="migbatch: role=train max=1g.10gb" '
            "--time=60 --wrap='sleep 600'\n"
        )
        bed.run(["sh"], "mbalice", input=line * pending, timeout=900.0)
        wait_until(lambda: _waiting(client) >= pending, 120.0, "the queue", every=1.0)
        phases = {}
        for name, dry in (("dry run", True), ("lending", False)):
            if not dry:
                bed.product.reconfigure(lending={"dry_run": False, "most_releases": RELEASES})
            progress(f"{name}, {WATCH_S:g} s", 3)
            phases[name] = _phase(bed, client)
        bed.run(["scancel", "-u", "mbalice"], timeout=600.0)
    return {
        "bench": "rounds",
        "pending": pending,
        "slots": nodes * gpus * 7,
        "releases_a_round": RELEASES,
        "phases": phases,
        "bars": [
            Bar(f"{name}: rounds of lending that took longer than 1 s", float(phase["lending"]["late"]), 0.0).to_dict()
            for name, phase in phases.items()
        ]
        + [
            Bar(f"{name}: mean decision [s]", phase["lending"]["mean_s"], TARGET_S).to_dict()
            for name, phase in phases.items()
        ],
    }


def _phase(bed: Cluster, client: CliClient) -> dict[str, Any]:
    wait_until(lambda: _rounds(bed)["lending"]["count"] > 0, 120.0, "a first round of lending", every=0.5)
    before, earlier, begun = _rounds(bed), diag(bed), time.monotonic()
    time.sleep(WATCH_S)
    after, later, seconds = _rounds(bed), diag(bed), time.monotonic() - begun
    return {
        "seconds": round(seconds, 1),
        **{name: _difference(before[name], after[name]) for name in ("lending", "supply")},
        "running": sum(row.state == "RUNNING" for row in client.jobs()),
        "sdiag_before": _counts(earlier),
        "sdiag_after": _counts(later),
        "rpcs": _counts(later.since(earlier)),
    }


def _counts(rpcs: Diag) -> dict[str, int]:
    return {name: count.count for name, count in sorted(rpcs.types.items())}


def _waiting(client: CliClient) -> int:
    return sum(row.tasks for row in client.jobs() if row.pending)


def _rounds(bed: Cluster) -> dict[str, dict[str, float]]:
    """Return for both loops: rounds, their seconds, and those of at most one second; since the service's start."""
    loops: dict[str, dict[str, float]] = {
        name: {"count": 0.0, "sum": 0.0, "quick": 0.0} for name in ("lending", "supply")
    }
    for line in bed.product.metrics().splitlines():
        if match := _SAMPLE.match(line):
            loop = loops["lending" if "lending" in match[1] else "supply"]
            suffix = match[1].rpartition("_")[2]
            if suffix != "bucket":
                loop[suffix] = float(match[3])
            elif float(match[2]) == TARGET_S:
                loop["quick"] = float(match[3])
    return loops


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    rounds = after["count"] - before["count"]
    quick = after["quick"] - before["quick"]
    spent = after["sum"] - before["sum"]
    return {"rounds": rounds, "mean_s": round(spent / rounds, 4) if rounds else 0.0, "late": rounds - quick}

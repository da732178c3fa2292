"""Read SenseTime Helios "Earth": how many GPUs each virtual cluster of a Slurm site used, every ten minutes.

Note: this is occupancy, not jobs. `running_gpus` are the allocated GPUs, whether busy or not; `pending_gpus` are those
that queued jobs requested. Times have no zone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slurm_migbatch.lab.sim.job import DemandChange
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.trace import Trace


def read(path: Path, column: Literal["running_gpus", "pending_gpus", "wanted"] = "running_gpus") -> Trace:
    """Read the demand of each virtual cluster in GPUs, at each change; `wanted` is the sum of running and pending.

    Raises TraceError.
    """
    rows = []
    for line in lines(path, ("vc", "time", "running_gpus", "pending_gpus", "total_gpus")):
        running, pending = line.count_of("running_gpus"), line.count_of("pending_gpus")
        if running > line.count_of("total_gpus"):
            raise line.wrong(f"running_gpus must be at most total_gpus, not {running}")
        value = {"running_gpus": running, "pending_gpus": pending, "wanted": running + pending}[column]
        rows.append((line.moment("time"), line.text("vc"), value))
    rows.sort()
    begin = rows[0][0] if rows else 0.0
    last: dict[str, int] = {}
    demands = []
    for moment, cluster, value in rows:
        if last.get(cluster) != value:
            last[cluster] = value
            demands.append(DemandChange(moment - begin, cluster, float(value)))
    return Trace("helios", demands=tuple(demands))


def sizes(path: Path) -> dict[str, int]:
    """Read the largest number of GPUs that each virtual cluster ever had. Raises TraceError."""
    gpus_of: dict[str, int] = {}
    for line in lines(path, ("vc", "total_gpus")):
        cluster = line.text("vc")
        gpus_of[cluster] = max(gpus_of.get(cluster, 0), line.count_of("total_gpus"))
    return gpus_of

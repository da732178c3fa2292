"""Measure the simulator's speed: a large public trace at its own size and at multiples, on a cluster of the same scale.

Times are processor seconds of this one process, independent of other work on the machine; elapsed time is given too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar, exponent
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import whole
from slurm_migbatch.lab.sim.policies.queued import Fifo
from slurm_migbatch.lab.sim.speeds import Whole
from slurm_migbatch.lab.traces import joblog
from slurm_migbatch.lab.traces.files import below

GPUS: Final = 550
SCALES: Final = (1, 2, 4, 8)
TARGET_S: Final = 60.0
TARGET_EXPONENT: Final = 1.15
"""n log n from 82,000 to 656,000 jobs grows with an exponent of 1.08."""
_FILE: Final = "philly_jobs.csv.gz"


def measure(
    data: Path,
    scales: Sequence[int] = (),
    progress: Progress = silent,
) -> dict[str, Any]:
    """Read the trace and simulate it first come first served; `data` is its file or a directory above it.

    Returns:
        {"jobs", "gpus", "read_s", "exponent", "bars", "runs"}; a run has "scale", "jobs", "gpus", "moments", "cpu_s"
        and "wall_s".

    Raises:
        FileNotFoundError: there is none.
        TraceError: it cannot be read.
    """
    began = time.process_time()
    trace = joblog.read(_find(data))
    read_s = time.process_time() - began
    runs = []
    for scale in scales or SCALES:
        progress(f"{scale} x {len(trace.jobs)} jobs on {scale * GPUS} GPUs", len(scales or SCALES))
        jobs = trace.copies(scale).jobs if scale > 1 else trace.jobs
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        result = Simulation(SimulatedCluster.of(whole("a100-80gb"), scale * GPUS), jobs, Fifo(), Whole()).run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        runs.append(
            {
                "scale": scale,
                "jobs": len(jobs),
                "gpus": scale * GPUS,
                "moments": result.steps,
                "cpu_s": round(cpu, 3),
                "wall_s": round(wall, 3),
            }
        )
    growth = exponent([(run["jobs"], run["cpu_s"]) for run in runs])
    bars = [Bar(f"{len(trace.jobs)} Philly jobs on {GPUS} GPUs [s]", read_s + runs[0]["cpu_s"], TARGET_S)]
    if growth is not None:
        bars.append(Bar("time growth exponent", growth, TARGET_EXPONENT))
    return {
        "jobs": len(trace.jobs),
        "gpus": GPUS,
        "read_s": round(read_s, 3),
        "runs": runs,
        "exponent": growth,
        "bars": [bar.to_dict() for bar in bars],
    }


def _find(data: Path) -> Path:
    paths = [data] if data.is_file() else below(data, _FILE)
    if not paths:
        raise FileNotFoundError(2, f"no {_FILE} below it", str(data))
    return paths[0]

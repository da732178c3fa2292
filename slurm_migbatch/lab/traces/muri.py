"""Read Muri's 400-job trace and the traces of "wise resource sharing" with the same columns.

Note: times are in milliseconds. `duration` and `iterations` x `iteration_time` differ (their ratio is 0.99 on average,
0.19 to 1.30 for single jobs); the published schedulers count in iterations, so the latter is the work here, and
`duration` is the user's estimate. Jobs request up to 32 GPUs. The files do not say whether `batch_size` is per GPU;
this is assumed, because `iteration_time` does not depend on the number of GPUs.
"""

from __future__ import annotations

import math
from pathlib import Path

from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.trace import Trace

COLUMNS = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration", "iteration_time")


def read(path: Path) -> Trace:
    """Read all jobs; `app` is the model. Raises TraceError."""
    jobs = []
    seen: set[int] = set()
    for line in lines(path, COLUMNS):
        number = line.count_of("job_id")
        if number in seen:
            raise line.wrong(f"job_id {number} occurs twice")
        seen.add(number)
        work = line.count_of("iterations", 1) * line.number_of("iteration_time", 0) / 1000
        if not 0 < work < math.inf:
            raise line.wrong("iterations times iteration_time must be above 0 ms and finite")
        jobs.append(
            SimulatedJob(
                number,
                f"{line.text('model_name')}-{number}",
                line.number_of("submit_time", 0) / 1000,
                work,
                gpus=line.count_of("num_gpu", 1),
                app=line.text("model_name"),
                batch=line.count_of("batch_size", 1) * line.count_of("num_gpu", 1),
                estimate=line.number_of("duration", 0) / 1000 or None,
            )
        )
    jobs.sort(key=lambda job: (job.arrival, job.id))
    return Trace(tuple(jobs))

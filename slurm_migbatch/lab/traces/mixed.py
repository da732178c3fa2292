"""Read training and inference in one table, `name,time,application,num_replicas,batch_size,duration,num_task`.

DeepBoot's workloads have these columns. A row with `num_task` above 0 is inference: it holds `num_replicas` GPUs for
`duration` seconds, in which it serves `num_task` requests. Any other row is training.

Note: in DeepBoot's files `duration` has no meaning for training (every row has the same number); the work then comes
from measured profiles, as in Pollux's workloads. In a user's own table the work is the duration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.pollux import ApplicationProfile, profiled_s
from slurm_migbatch.lab.traces.trace import Trace

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size", "duration", "num_task")


def read(path: Path, known: Mapping[str, ApplicationProfile] | None = None) -> Trace:
    """Read all rows.

    The work of training jobs comes from `known` or, without it, from `duration`. Raises TraceError.
    """
    jobs = []
    for line in lines(path, COLUMNS):
        app, gpus, batch = line.text("application"), line.count_of("num_replicas", 1), line.count_of("batch_size", 1)
        tasks = line.number_of("num_task")
        work = line.number_of("duration", 0)
        if tasks <= 0 and known is not None:
            work = profiled_s(line, known, app, gpus, batch)
        if not work:
            raise line.wrong("duration must be above 0 s")
        jobs.append(
            SimulatedJob(
                line.number,
                line.text("name"),
                line.seconds_of("time"),
                work,
                "infer" if tasks > 0 else "train",
                gpus=gpus,
                app=app,
                batch=batch,
                tasks=max(0, int(tasks)),
            )
        )
    jobs.sort(key=lambda job: (job.arrival, job.id))
    return Trace(tuple(jobs))

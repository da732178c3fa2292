"""Read Microsoft Philly GPU jobs as the CSV `timestamp,duration,num_gpus,gpu_time,cluster` (of two public artifacts).

Note: rows are not in order of time; durations are on the GPUs of 2017 and count one try only; there is no user
and no model. The virtual cluster is used as the user, because a scheduler would consider its share.
"""

from __future__ import annotations

from pathlib import Path

from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.trace import Trace


def read(path: Path) -> Trace:
    """Read all jobs; time 0 is the first submission. Raises TraceError."""
    rows = []
    for line in lines(path, ("timestamp", "duration", "num_gpus", "cluster")):
        duration, gpus = line.number_of("duration", 0), line.count_of("num_gpus", 1)
        if not duration:
            raise line.wrong("duration must be above 0 s")
        rows.append((line.moment("timestamp"), line.number, duration, gpus, line.text("cluster")))
    rows.sort()
    begin = rows[0][0] if rows else 0.0
    jobs = tuple(
        SimulatedJob(number, f"philly-{row}", moment - begin, duration, gpus=gpus, user=cluster)
        for number, (moment, row, duration, gpus, cluster) in enumerate(rows)
    )
    return Trace("philly", jobs)

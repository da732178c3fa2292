"""Read Alibaba's GPU-sharing cluster of 2023 (openb): pods that request shares of GPUs, latency-sensitive and
best-effort.

Note: pods that request no GPU are skipped, and so are those whose run time is unknown: never scheduled (no
scheduled_time), not ended (no deletion_time), or ended before they began. The trace spans 149 days, but nearly all
pods arrived in the last 45: time 0 is day 105, and older pods are skipped. In an extract without later pods, time 0 is
that of the trace. `gpu_milli` is a share of one GPU only if
`num_gpu` is 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import CsvLine, Skipped, UnusedRows, lines
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

DAY: Final = 86400.0
SERVED: Final = frozenset({"LS", "Guaranteed", "Burstable"})
"""Classes of service other than best effort: treated as inference."""
BEGIN_DAY: Final = 105
"""Pods that were created before this day of the trace are skipped if there are later ones."""


def read(path: Path, geometry: Geometry) -> Trace:
    """Read pods as jobs; one with a share of a GPU requests the smallest profile with that much compute and memory.

    `LS`, `Guaranteed` and `Burstable` pods are inference, `BE` ones training. Work is the time from scheduling to
    deletion. Raises TraceError.
    """
    columns = ("name", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time", "scheduled_time")
    jobs: list[SimulatedJob] = []
    unused = UnusedRows()
    for line in lines(path, columns, unused=unused):
        with unused:
            jobs.append(_job(line, geometry))
    jobs.sort(key=lambda job: (job.arrival, job.id))
    begin = BEGIN_DAY * DAY
    late = [replace(job, arrival=job.arrival - begin) for job in jobs if job.arrival >= begin]
    if late and len(late) < len(jobs):
        unused.skipped[f"pods that came before day {BEGIN_DAY}"] = len(jobs) - len(late)
    return Trace(tuple(late or jobs), unused.notices(len(jobs)))


def _job(line: CsvLine, geometry: Geometry) -> SimulatedJob:
    """Return a pod as a job. Raises Skipped, and TraceError if it is wrong."""
    gpus, milli = line.count_of("num_gpu"), line.count_of("gpu_milli")
    created = line.number_of("creation_time", 0)
    if not gpus:
        raise Skipped("pods that request no GPU")
    if not line.text("scheduled_time"):
        raise Skipped("pods that were never scheduled")
    if not line.text("deletion_time"):
        raise Skipped("pods that have not ended")
    work = line.number_of("deletion_time", 0) - line.number_of("scheduled_time", 0)
    if work <= 0:
        raise Skipped("pods that ended before they began")
    if gpus > 1 and milli != 1000:
        raise line.wrong(f"a pod with {gpus} GPUs uses whole ones: gpu_milli must be 1000, not {milli}")
    if not 0 < milli <= 1000:
        raise line.wrong(f"gpu_milli must be between 1 and 1000, not {milli}")
    kind = line.text("qos")
    return SimulatedJob(
        line.number,
        line.text("name"),
        created,
        work,
        "infer" if kind in SERVED else "train",
        gpus=gpus,
        profile=None if milli == 1000 else slice_of(geometry, milli / 1000),
        user=kind,
    )


def slice_of(geometry: Geometry, share: float) -> Profile | None:
    """Return the smallest profile with this share of compute and memory; None if only the whole GPU has it."""
    full = geometry.full
    enough = [
        info
        for info in geometry.profiles
        if not info.profile.suffix
        and info.compute_slices >= share * full.compute_slices - 1e-9
        and info.memory_slices >= share * geometry.memory_slices - 1e-9
    ]
    best = min(enough, key=lambda info: (info.memory_slices, info.compute_slices))
    return None if best.profile == full.profile else best.profile

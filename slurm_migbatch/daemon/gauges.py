"""Compute metrics of slices and of pending jobs for /metrics, from reports of nodes and Slurm.

Labels are profiles and states only: no job, user or GPU, of which there are too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

from slurm_migbatch.decide.capacity.demand import could_run, given_up
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.slurm.client import JobRow


def slices_by_state(nodes: Mapping[str, NodeFacts]) -> Mapping[tuple[str, str], int]:
    """Count slices by profile and state: held by one job, shared by two, idle, zombie."""
    counts: Counter[tuple[str, str]] = Counter()
    for gpu in (gpu for node in nodes.values() for gpu in node.gpus):
        shared = {slot for slot, _ in gpu.guests}
        counts.update((slot.profile.name, "shared" if slot in shared else "held") for slot, _ in gpu.leases)
        counts.update((slot.profile.name, "idle") for slot in gpu.warm)
        counts.update((slot.profile.name, "zombie") for slot in gpu.zombies)
    return counts


def waits(jobs: Iterable[JobRow], now: float) -> Mapping[str, float]:
    """Return the longest and the median wait in seconds of pending jobs that request slices; 0 if none waits.

    The wait begins when a job becomes eligible. A job that would not start with slices either is not counted: it is
    held, as after a failed start, is at a limit, or waits for another job or its begin time.
    """
    requests = (job for job in jobs if "mig:" in job.gres and (could_run(job, now) or given_up(job)))
    since = [job.eligible for job in requests if job.eligible is not None]
    seconds = [now - began for began in since if began <= now] or [0.0]
    return {"longest": max(seconds), "median": median(seconds)}

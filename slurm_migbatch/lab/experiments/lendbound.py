"""Compute a bound on lending: the lowest mean completion time of training under any schedule.

A linear programme over time. In every interval a job may have any profile for any part of it, all jobs together at most
the compute and memory slices that inference leaves, summed over the cluster. There are no other constraints: slices
have no placements, changes are free, the future is known. Inference has its slices from the moment of its submission.

A job that needs w seconds on a whole GPU and does s(t) of it a second ends no earlier than w/2 after the mean moment of
its work, the integral of t s(t) / w, because s is at most 1 (the mean busy time of preemptive schedules, Goemans et
al., SIAM J. Discrete Math. 15(2), 2002). The programme minimizes the sum of these; work counts from the begin of its
interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments import lendslices
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob

STEP_S: Final = 60.0
"""Length of an interval while jobs arrive; later ones are `LATER` times as long."""
LATER: Final = 4.0


def least_jct_s(
    training: Sequence[SimulatedJob], inference: Sequence[SimulatedJob], found: lendslices.Miso, gpus: int
) -> float:
    """Return the bound on the mean completion time, seconds.

    Args:
        gpus: the number of GPUs of the cluster, all of the kind of `lendslices`.

    Raises:
        NotMeasurable: the programme was not solved.
    """
    edges = _edges(training, gpus)
    begins, lengths = edges[:-1], np.diff(edges)
    free = _free(inference, edges, gpus)
    profiles = [info for info in geometry(lendslices.GPU).profiles if not info.profile.suffix]
    costs, rows, columns, values = [], [], [], []
    limits: list[float] = []
    needs: list[tuple[int, list[tuple[int, float]]]] = []
    used: tuple[list[list[tuple[int, float]]], ...] = tuple([[] for _ in begins] for _ in range(2))
    number = 0
    for job in training:
        allowed = [info for info in profiles if job.profile in (None, info.profile)]
        speeds = [(info, speed) for info in allowed if (speed := found.speeds.relative(job, info.profile)) > 0]
        work: list[tuple[int, float]] = []
        for at in range(int(np.searchsorted(edges, job.arrival, "right")) - 1, len(begins)):
            begin = max(begins[at], job.arrival)
            share = (edges[at + 1] - begin) / lengths[at]
            for info, speed in speeds:
                done = speed * lengths[at]
                costs.append(done * begin / job.work)
                work.append((number, done))
                used[0][at].append((number, info.compute_slices))
                used[1][at].append((number, info.memory_slices))
                rows.append(len(limits))
                columns.append(number)
                values.append(1.0)
                number += 1
            limits.append(share)
        needs.append((len(needs), work))
    for usage, capacity in zip(used, free, strict=True):
        for at, terms in enumerate(usage):
            for column, amount in terms:
                rows.append(len(limits))
                columns.append(column)
                values.append(float(amount))
            limits.append(float(capacity[at]))
    upper = coo_array((values, (rows, columns)), shape=(len(limits), number))
    equal = _equal(needs, number)
    solved: Any = linprog(
        costs, A_ub=upper, b_ub=limits, A_eq=equal, b_eq=[job.work for job in training], method="highs-ipm"
    )
    if solved.status != 0:
        raise NotMeasurable(f"the bound on lending was not found: {solved.message}")
    fixed = math.fsum(job.work / 2 + job.costs.cold_start_s - job.arrival for job in training)
    return float(solved.fun + fixed) / len(training)


def alone_jct_s(training: Iterable[SimulatedJob]) -> float:
    """Return the mean completion time if every job had a whole GPU to itself from its submission on, seconds."""
    return float(np.mean([job.work + job.costs.cold_start_s for job in training]))


def _equal(needs: Sequence[tuple[int, list[tuple[int, float]]]], width: int) -> coo_array:
    terms = [(row, column, done) for row, work in needs for column, done in work]
    rows, columns, values = zip(*terms, strict=True)
    return coo_array((values, (rows, columns)), shape=(len(needs), width))


def _edges(training: Sequence[SimulatedJob], gpus: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the interval limits in seconds; all work fits even on whole GPUs, one job after the other."""
    last = max(job.arrival for job in training)
    end = last + sum(job.work for job in training) / gpus * 2 + max(job.work for job in training)
    first = np.arange(0.0, last + STEP_S, STEP_S)
    return np.concatenate([first, np.arange(first[-1] + LATER * STEP_S, end + 2 * LATER * STEP_S, LATER * STEP_S)])


def _free(
    inference: Iterable[SimulatedJob], edges: np.ndarray[Any, np.dtype[np.float64]], gpus: int
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the compute and the memory slices that inference leaves in each interval, on average."""
    gpu = geometry(lendslices.GPU)
    compute = np.full(len(edges) - 1, float(gpus * gpu.compute_slices))
    memory = np.full(len(edges) - 1, float(gpus * gpu.memory_slices))
    lengths = np.diff(edges)
    for job in inference:
        assert job.profile is not None
        info, end = gpu.info(job.profile), job.arrival + job.costs.cold_start_s + job.work
        within = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], job.arrival), 0.0, None) / lengths
        compute -= within * info.compute_slices
        memory -= within * info.memory_slices
    return np.maximum(compute, 0.0), np.maximum(memory, 0.0)

"""Choose the sizes of lent slices: the profiles whose values for their jobs have the largest sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, islice
from typing import Final, TypeAlias

from slurm_migbatch.decide.capacity.spare import by_size, fits, left, ordered, without
from slurm_migbatch.decide.lending.allocation import paid_worth
from slurm_migbatch.decide.lending.capacity import LendingCapacity
from slurm_migbatch.decide.lending.values import ElasticJob, Grow, Release, SlotReference
from slurm_migbatch.mig.profile import Profile

_Step: TypeAlias = tuple[float, int, int, Profile, Profile]
"""Value lost per added size, compute slices after it, number of the assignment, profiles before and after."""
_GAIN: Final = 1e-9
_PASSES: Final = 3
_PAIRS: Final = 1500
"""Pairs of jobs tried at a time; enough for those on 70 GPUs of seven jobs each."""


@dataclass
class Assignment:
    """A pending job, the value of each profile that it can use (from small to large), the chosen one, and its GPU.

    `reserved`: see `Release`.
    """

    elastic_job: ElasticJob
    worths: Mapping[Profile, float]
    profile: Profile
    gpu: int
    reserved: bool = False


def give(
    cluster: LendingCapacity, elastic_job: ElasticJob, index: int, profile: Profile, *, reserved: bool = False
) -> Assignment:
    """Assign a slice of a GPU to a job; a profile's value is the job's speed on it over that on the fair share."""
    useful = cluster.useful(elastic_job)
    fair = cluster.fair(elastic_job, useful)
    cluster.put(index, profile)
    cluster.take(elastic_job, index)
    worths = {choice: elastic_job.speeds[choice] / fair for choice in useful}
    return Assignment(elastic_job, worths, profile, index, reserved)


def raise_sizes(cluster: LendingCapacity, assignments: Sequence[Assignment], move: bool) -> None:
    """Enlarge slices while there is room, the largest value gained per added size first.

    `move`: whether slices may also be enlarged on other GPUs.
    """
    for _ in range(_PASSES):
        heap = [step for number, assignment in enumerate(assignments) for step in _steps(number, assignment)]
        heapify(heap)
        moved = False
        while heap:
            _, _, number, before, after = heappop(heap)
            assignment = assignments[number]
            gpu = assignment.gpu
            if assignment.profile == before and _enlarge(cluster, assignment, after, move):
                moved |= assignment.gpu != gpu
                for step in _steps(number, assignment):
                    heappush(heap, step)
        if not moved:  # no slice was freed
            return


def _enlarge(cluster: LendingCapacity, assignment: Assignment, after: Profile, move: bool) -> bool:
    """Give a job a larger slice if it fits, on its GPU or elsewhere; return whether it has one."""
    gpu = cluster.gpus[assignment.gpu]
    planned: tuple[Profile, ...] | None = None
    if after in gpu.geometry:
        added_memory = gpu.geometry.info(after).memory_slices - gpu.geometry.info(assignment.profile).memory_slices
        if added_memory <= left(gpu.geometry, gpu.used, gpu.planned)[1]:
            planned = ordered((*without(gpu.planned, assignment.profile), after))
    if planned is not None and fits(gpu.geometry, gpu.used, planned):
        cluster.replan(assignment.gpu, planned)
    else:
        target_gpu = cluster.best_for(assignment.elastic_job, after) if move else None
        if target_gpu is None:
            return False
        cluster.drop(assignment.gpu, assignment.profile)
        cluster.put(target_gpu, after)
        cluster.take(assignment.elastic_job, assignment.gpu, -1)
        cluster.take(assignment.elastic_job, target_gpu)
        assignment.gpu = target_gpu
    assignment.profile = after
    return True


def exchange(cluster: LendingCapacity, assignments: Sequence[Assignment], move: bool) -> None:
    """Redistribute space between two jobs of one GPU, and swap slices across GPUs, if the sum of values rises."""
    for _ in range(_PASSES):
        by_gpu: dict[int, list[Assignment]] = {}
        for assignment in assignments:
            by_gpu.setdefault(assignment.gpu, []).append(assignment)
        same_gpu_pairs = (pair for on_gpu in by_gpu.values() for pair in combinations(on_gpu, 2))
        changed = [_divide(cluster, a, b) for a, b in islice(same_gpu_pairs, _PAIRS)]
        changed += [_swap(cluster, a, b) for a, b in islice(combinations(assignments, 2), _PAIRS)]
        if not any(changed):
            return
        raise_sizes(cluster, assignments, move)


def _divide(cluster: LendingCapacity, a: Assignment, b: Assignment) -> bool:
    """Divide the space of two jobs on one GPU anew if the sum of their values rises."""
    if a.gpu != b.gpu:
        return False
    of_a, of_b = a.worths, b.worths
    current_worth = of_a[a.profile] + of_b[b.profile] + _GAIN
    better = sorted(
        ((of_a[p] + of_b[q], p, q) for p in of_a for q in of_b if of_a[p] + of_b[q] > current_worth), reverse=True
    )
    if not better:
        return False
    gpu = cluster.gpus[a.gpu]
    others = without(without(gpu.planned, a.profile), b.profile)
    for _, p, q in better:
        planned = ordered((*others, p, q))
        if fits(gpu.geometry, gpu.used, planned):
            cluster.replan(a.gpu, planned)
            a.profile, b.profile = p, q
            return True
    return False


def _swap(cluster: LendingCapacity, a: Assignment, b: Assignment) -> bool:
    """Swap the slices of two jobs on different GPUs if the sum of their values rises."""
    of_a, of_b = a.worths, b.worths
    if a.gpu == b.gpu or a.profile not in of_b or b.profile not in of_a:
        return False
    if of_a[b.profile] + of_b[a.profile] <= of_a[a.profile] + of_b[b.profile] + _GAIN:
        return False
    gpus = cluster.gpus
    if (
        gpus[b.gpu].group not in cluster.regions[a.elastic_job.nodes]
        or gpus[a.gpu].group not in cluster.regions[b.elastic_job.nodes]
    ):
        return False
    if not _swap_resources(cluster, a, b):
        return False
    a.profile, b.profile, a.gpu, b.gpu = b.profile, a.profile, b.gpu, a.gpu
    return True


def _swap_resources(cluster: LendingCapacity, a: Assignment, b: Assignment) -> bool:
    """Exchange the CPUs and memory of two jobs on their nodes; False, without changes, if a node lacks any."""
    gpus = cluster.gpus
    cluster.take(a.elastic_job, a.gpu, -1)
    cluster.take(b.elastic_job, b.gpu, -1)
    enough = cluster.has_resources(a.elastic_job, gpus[b.gpu].capacity.node)
    enough = enough and cluster.has_resources(b.elastic_job, gpus[a.gpu].capacity.node)
    cluster.take(a.elastic_job, b.gpu if enough else a.gpu)
    cluster.take(b.elastic_job, a.gpu if enough else b.gpu)
    return enough


def grow(cluster: LendingCapacity, elastic_jobs: Sequence[ElasticJob], max_count: int) -> tuple[Grow, ...]:
    """Return the running jobs for which a larger slice pays off, the largest gain first."""
    offers: list[tuple[float, int, Profile, float]] = []
    for number, elastic_job in enumerate(elastic_jobs):
        if elastic_job.place is None or elastic_job.shares:
            continue
        if not cluster.hysteresis.may_change(cluster.now, elastic_job.since, elastic_job.restarts):
            continue
        useful, current = cluster.useful(elastic_job), elastic_job.place.slot.profile
        current_speed = elastic_job.speeds.get(current, 0.0)
        fair = cluster.fair(elastic_job, useful) if useful else 0.0
        for profile in useful:
            speed = elastic_job.speeds[profile]
            if profile.compute <= current.compute or speed < cluster.hysteresis.gain * current_speed:
                continue
            stay = min(cluster.hysteresis.loan_s, elastic_job.ends_s / speed)
            worth = paid_worth(speed, fair, restart_s=elastic_job.restart_s, stay_s=stay)
            if worth > current_speed / fair + _GAIN:
                offers.append((current_speed / fair - worth, number, profile, current_speed))
    grown: dict[int, Grow] = {}
    for _, number, profile, current_speed in sorted(offers):
        if len(grown) >= max_count:
            break
        elastic_job = elastic_jobs[number]
        place = elastic_job.place
        gpu = None if number in grown or place is None else _grown(cluster, elastic_job, place, profile)
        if place is not None and gpu is not None:
            faster = elastic_job.speeds[profile] / current_speed if current_speed else math.inf
            capacity = cluster.gpus[gpu].capacity
            grown[number] = Grow(elastic_job.job, place.slot.profile, profile, capacity.node, capacity.gpu, faster)
    return tuple(grown.values())


def _grown(cluster: LendingCapacity, elastic_job: ElasticJob, place: SlotReference, profile: Profile) -> int | None:
    """Place a job's larger slice and return the GPU, None if there is none.

    On the job's own GPU it may replace the job's slice.
    """
    own_gpu = cluster.place_of.get((place.node, place.gpu))
    if own_gpu is not None and place.slot in cluster.gpus[own_gpu].used:
        gpu = cluster.gpus[own_gpu]
        used = gpu.used.remove(place.slot)
        planned = ordered((*gpu.planned, profile))
        if gpu.lendable and profile in gpu.geometry and fits(gpu.geometry, used, planned):
            gpu.used = used
            cluster.replan(own_gpu, planned)
            return own_gpu
    other_gpu = cluster.best_for(elastic_job, profile)
    if other_gpu is None:
        other_gpu = cluster.best_on_node(elastic_job, place, profile)
    if other_gpu is not None:
        cluster.put(other_gpu, profile)
        cluster.take(elastic_job, other_gpu)
    return other_gpu


def releases_of(cluster: LendingCapacity, assignments: Sequence[Assignment]) -> tuple[Release, ...]:
    """Return the decisions, each with its expected GPU."""
    gpus = [cluster.gpus[assignment.gpu].capacity for assignment in assignments]
    return tuple(
        Release(assignment.elastic_job.job, assignment.profile, gpu.node, gpu.gpu, assignment.reserved)
        for assignment, gpu in zip(assignments, gpus, strict=True)
    )


def _steps(number: int, assignment: Assignment) -> Iterable[_Step]:
    """Yield the steps to larger profiles, by the value gained per added size (compute and memory count alike)."""
    current, worths = assignment.profile, assignment.worths
    for profile, worth in worths.items():
        gain = worth - worths[current]
        if gain > _GAIN and by_size(profile) > by_size(current):
            added_size = (
                profile.compute - current.compute + (profile.memory_gb - current.memory_gb) / max(1, current.memory_gb)
            )
            yield -gain / max(added_size, _GAIN), profile.compute, number, current, profile

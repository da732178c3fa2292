"""Run jobs of a trace on the simulated Slurm: their submissions, their work, and their speed next to others.

| job of the trace | submitted as |
|---|---|
| names a profile | `--gres=mig:PROFILE:n` |
| names none | `--gres=gpu:n`, which the submit filter changes to the full profile; on several nodes if necessary |
| of one GPU without a profile, if `auto` includes it | `--gres=mig:auto` with its model, batch and number of items |
| training of one slice or GPU, if `elastic` includes it | `mig:auto` with `role=train` in a partition that lends |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from slurm_migbatch.config import Config
from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Speeds
from slurm_migbatch.lab.slurm.filter import FIRST_UID
from slurm_migbatch.lab.slurm.run import Submission
from slurm_migbatch.lab.slurm.work import SimulatedTraining
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node.journal_rows import JournalSlice as Slice
from slurm_migbatch.submit.gres_request import MAX_COUNT

Auto: TypeAlias = Literal["no", "infer", "all"]
SERVING: Final = "gpu"
"""Partition of jobs that are not lent slices, unless the configuration names others."""
_MODEL: Final = re.compile(r"[a-z0-9][a-z0-9._/-]{0,95}")
_USER: Final = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_ITEMS: Final = 10**12
_LONGEST_S: Final = 365 * 86_400
_MOST_BATCH: Final = 65_536


@dataclass(frozen=True)
class Manner:
    """How jobs of a trace are submitted.

    Attributes:
        nodes, per_node: number of nodes of the cluster, and of GPUs on each.
        auto: which jobs of one GPU without a profile are `mig:auto`.
        elastic: whether training of one slice or GPU waits for idle slices and may be stopped and continued.
        serving: the partition of everything else; `lending`: that of elastic training.
    """

    nodes: int
    per_node: int
    geometry: Geometry
    auto: Auto = "no"
    elastic: bool = False
    serving: str = SERVING
    lending: str = ""

    def lent(self, job: SimulatedJob) -> bool:
        """Return whether the job is elastic training."""
        return self.elastic and job.kind == "train" and job.gpus == 1

    def open(self, job: SimulatedJob) -> bool:
        """Return whether the submit filter chooses the job's slice."""
        if self.lent(job):
            return True
        return job.profile is None and job.gpus == 1 and self.auto in (job.kind, "all")


def partitions_of(config: Config) -> tuple[str, str]:
    """Return the partition of ordinary jobs and that of elastic training (empty: no lending).

    They are the same if all of the configuration's partitions lend.
    """
    lending = config.lending.partitions if config.lending.enabled else ()
    names = config.cluster.partitions or (SERVING,)
    return next((name for name in names if name not in lending), names[0]), next(iter(lending), "")


# -- a job's work -----------------------------------------------------------------------------------------------------


@dataclass
class Course(SimulatedTraining):
    """A job of a trace over all its runs; training keeps its work over restarts, inference restarts from zero.

    Attributes:
        rate: seconds of work done per second on slices of these profiles; 0 if the job does not fit, and then it fails.
        resumes: when each run made, or would have made, its first progress, by restart count; unix seconds.
        began: when the job first made progress; None: not yet.
        progress_s: seconds with progress.
        lost_s: seconds of work that have to be repeated.
        failed: it did not fit on its slice.
    """

    rate: Callable[[Sequence[Profile]], float] = lambda profiles: 1.0
    resumes: dict[int, float] = field(default_factory=dict)
    began: float | None = None
    progress_s: float = 0.0
    lost_s: float = 0.0
    failed: bool = False

    def begin(self, now: float, slices: Sequence[Profile], restart: int) -> None:
        """See Work. A run that never began, because a slice was missing, does not count as a restart."""
        self.lost_s += self.done - self.saved
        super().begin(now, slices, len(self.resumes))
        self.failed = self._rate <= 0
        self.resumes[restart] = self._from

    def rate_on(self, slices: Sequence[Profile]) -> float:
        """See SimulatedTraining."""
        return self.rate(slices)

    def end_at(self) -> float:
        """See Work; a job that does not fit ends when it would have made its first progress."""
        return self._from if self.failed else super().end_at()

    def settle(self, now: float) -> None:
        """Add up the work done until now."""
        self._settle(now)

    def _settle(self, now: float) -> None:
        if now > self._from and not self.failed:
            self.began = self._from if self.began is None else self.began
            self.progress_s += now - self._from
        super()._settle(now)


def course_of(job: SimulatedJob, speeds: Speeds, geometry: Geometry) -> Course:
    """Return the work of a job at the speeds of the scenario."""
    places = _places(geometry)
    costs, training = job.costs, job.kind == "train"
    return Course(
        job.work,
        lambda profile: speeds.speed(job, [places[profile]]),
        costs.cold_start_s,
        costs.restart_s,
        checkpoint_s=costs.checkpoint_s,
        hears_usr=training,
        hears_term=training,
        rate=lambda profiles: speeds.speed(job, [places[profile] for profile in profiles[: job.gpus]]),
    )


@lru_cache(maxsize=16)
def _places(geometry: Geometry) -> Mapping[Profile, Place]:
    """Return a place for each profile."""
    return {info.profile: Place(0, info.slots[0]) for info in geometry.profiles}


@dataclass(frozen=True)
class Hindrances:
    """Slowdowns of jobs by others on the same GPU (a `processes.Neighbourhood`), computed as in `sim.engine`.

    Attributes:
        speeds: gives the slowdowns of jobs that share a slice.
        run_of: returns the job of the trace for a job id of Slurm.
        geometries: of GPUs by UUID.
        wide: whether busy slices on the same GPU slow down a job.
    """

    speeds: Speeds
    run_of: Callable[[int], SimulatedRun]
    geometries: Mapping[str, Geometry]
    wide: bool

    def share(self, job: int, held: Sequence[Slice]) -> float:
        """See Neighbourhood; a gang is as slow as its slowest part."""
        run, worst = self.run_of(job), 1.0
        for slice_row in held:
            if slice_row.job != job:
                continue
            gpu_rows = [row for row in held if row.gpu == slice_row.gpu]
            factor = 1.0
            others = [self.run_of(row.job or 0) for row in gpu_rows if row.slot == slice_row.slot and row.job != job]
            if others:
                factor = self.speeds.slowdown(run, others)
            slots = {row.slot for row in gpu_rows}
            if run.sensitivity and len(slots) > 1:
                used = sum(slot.placement.size for slot in slots)
                own_slices = slice_row.slot.placement.size
                factor *= 1.0 + run.sensitivity * (used - own_slices) / (
                    self.geometries[slice_row.gpu].memory_slices - own_slices
                )
            worst = max(worst, factor)
        return 1.0 / worst


# -- submissions ------------------------------------------------------------------------------------------------------


def submission_of(job: SimulatedJob, at: float, uid: int, course: Course, manner: Manner) -> Submission:
    """Return the sbatch of a job, as its user would write it.

    Args:
        at: seconds after the begin of the simulation.
    """
    on_node = min(MAX_COUNT, manner.per_node * _most_on_gpu(manner.geometry, job.profile))
    nodes, per_node = spread(job.gpus, manner.nodes, on_node)
    if manner.open(job):
        gres = "mig:auto"
    else:
        gres = f"gpu:{per_node}" if job.profile is None else f"mig:{job.profile.gres_type}:{per_node}"
    fields = {"user": _USER.sub("_", job.user) or "user", "uid": uid, "num_nodes": nodes}
    slowest = 1.0
    if manner.open(job):
        enough = _enough(job, course, manner)
        least = enough[0] if enough else None
        fields["comment"] = _hints(job, least, job.largest or _largest(enough, course), manner)
        slowest = course.rate([least]) if least is not None else 1.0  # the time limit must suffice on that slice
    seconds = max(1, math.ceil(job.claimed / slowest + job.costs.cold_start_s))
    return Submission(
        at,
        gres,
        lambda: course,
        manner.lending if manner.lent(job) else manner.serving,
        seconds if seconds <= _LONGEST_S else None,
        name=job.name[:64],
        fields=fields,
    )


def spread(count: int, nodes: int, per_node: int) -> tuple[int, int]:
    """Return the number of nodes for `count` slices, and the number of slices on each.

    It is the smallest number of nodes that divides `count`. If none does, the fewest nodes are used and the number of
    slices on each is rounded up.
    """
    fewest = -(-count // per_node)
    for number in range(fewest, min(nodes, count) + 1):
        if count % number == 0:
            return number, count // number
    return fewest, -(-count // fewest)


def users_of(jobs: Sequence[SimulatedJob]) -> dict[str, int]:
    """Return a uid for each user of a trace."""
    return {user: FIRST_UID + number for number, user in enumerate(sorted({job.user for job in jobs}))}


def _most_on_gpu(geometry: Geometry, profile: Profile | None) -> int:
    """Return the largest number of slices of the profile on one GPU; 1 for a profile that the GPU does not have."""
    return 1 if profile is None or profile not in geometry else geometry.info(profile).max_instances


def _enough(job: SimulatedJob, course: Course, manner: Manner) -> list[Profile]:
    """Return the slices, at least the requested one, on which the job can run; the smallest first."""
    asked = job.profile
    return [
        info.profile
        for info in sorted(manner.geometry.profiles, key=lambda info: (info.compute_slices, info.memory_slices))
        if not info.profile.suffix
        and (asked is None or (info.profile.compute >= asked.compute and info.profile.memory_gb >= asked.memory_gb))
        and course.rate([info.profile]) > 0
    ]


def _largest(enough: Sequence[Profile], course: Course) -> Profile | None:
    """Return the smallest of these slices on which the job is as fast as on any; None if it is the last one."""
    rates = [course.rate([profile]) for profile in enough]
    return next((profile for profile, rate in zip(enough[:-1], rates, strict=False) if rate >= max(rates)), None)


def _hints(job: SimulatedJob, least: Profile | None, largest: Profile | None, manner: Manner) -> str:
    model = job.app.lower()
    hints = {"model": model if _MODEL.fullmatch(model) else "", "role": job.kind}
    if hints["model"] and 0 < job.batch <= _MOST_BATCH:
        hints["batch"] = str(job.batch)
    if manner.lent(job):
        hints |= {"min": least.gres_type if least else "", "max": largest.gres_type if largest else ""}
        hints["signal"] = "usr1"
    elif 0 < job.tasks <= _MOST_ITEMS:
        hints["items"] = str(job.tasks)
        if job.slo_s is not None and job.slo_s >= 1:
            hints["deadline"] = f"{int(job.slo_s)}s"
    return "migbatch: " + " ".join(f"{key}={value}" for key, value in hints.items() if value)

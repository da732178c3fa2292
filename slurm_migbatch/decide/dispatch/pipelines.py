"""Choose profiles with which a pipeline (jobs connected by --dependency) meets its deadline at the lowest cost.

The jobs of a pipeline belong to one user and name it in their hints (`pipeline=`), pending or running, in the order of
Slurm's dependencies. Its deadline counts from the submission of its first job. The submit filter sees one job at a time
and grants each the smallest slice that alone meets the whole deadline; here, once the others are in the queue,
`decide.dispatch.split` divides the remaining time over the jobs that have not started, by predicted seconds and cost in
GPU equivalents times seconds (ESG: Hui et al., HPDC 2024; its stages of a workflow are jobs here). It is divided
again whenever a job starts, ends or is added, and when the predictions no longer fit; so a job's actual duration counts
once it has ended.

A job that only waits for other jobs gets its profile only here. One that waits for capacity may also be re-typed by
`decide.dispatch.retype`, among profiles with which the split still meets the deadline (`PipelinePlan.limits`), but
never in a round in which it was changed here.

Slurm up to 23.02 keeps a pending job's former request, so there nothing is re-typed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.dispatch.pending import Pending, marked
from slurm_migbatch.decide.dispatch.promises import ProfileOption, Promise
from slurm_migbatch.decide.dispatch.retype import MOST, Retype, RetypeHistory, can_be_named
from slurm_migbatch.decide.dispatch.split import Split, SplitStage, StageChoice, split
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import OTHERS, JobRow
from slurm_migbatch.slurm.dependencies import PIPELINE_HINT
from slurm_migbatch.slurm.times import format_clock
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import drops_old_gres_type

PipelineKey = tuple[int, str]
"""A user id and the name of his pipeline."""
Promises = Callable[[Pending], "Promise | None"]
Rates = Callable[[Hints, str], Mapping[Profile, float]]
Equivalent = Callable[[Profile], float]

START_S: Final = 10.0
"""From the end of one job to the start of the next, if there is capacity: Epilog, migbatchd's plan, Slurm's scheduling
cycle, Prolog.
"""
LATE: Final = 1.5
"""If the deadline is lost, a job that waits for capacity may use a slice on which it takes so many times as long."""
MOST_JOBS: Final = 64
"""A pipeline with more unfinished jobs is not changed."""
MOST_WEIGHED: Final = 1024
"""Jobs of pipelines examined in one round, least recently examined first."""
MOST_SPLIT: Final = 16
"""Pipelines that are split in one round."""
WORTH: Final = 0.03
"""Jobs are not re-typed for a lower cost that saves less than this share."""


@dataclass(frozen=True)
class KnownPipeline:
    """Memory about a pipeline while any job of it is in the queue. Times in unix seconds.

    Attributes:
        begin: submission of its first job.
        deadline_s: the shortest given by any of its jobs; None: none.
        at: when it was last examined.
        split_for: the jobs of the last split: each with whether it had started, and its number of possible profiles;
            empty: none.
        jobs: its unfinished jobs then, in the order of their dependencies.
        seconds, left_s: their predicted maximum duration, and the remaining time.
        why_not: why it was not split; empty if it was.
    """

    begin: float
    deadline_s: int | None = None
    at: float = -math.inf
    split_for: tuple[tuple[int, bool, int], ...] = ()
    jobs: tuple[int, ...] = ()
    seconds: float = 0.0
    left_s: float = 0.0
    why_not: str = ""


@dataclass(frozen=True)
class PipelinePlan:
    """Result for the jobs of pipelines.

    Attributes:
        changes: jobs that get another profile.
        limits: maximum seconds of a job of a pipeline when it is re-typed for lack of capacity, by job id; 0 if its
            pipeline was put off to a later round.
    """

    changes: tuple[Retype, ...] = ()
    limits: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """A job or an array of a pipeline, and its possible profiles.

    Attributes:
        job: its id, an array's own.
        rows: of it; one except for arrays.
        pending: what is re-typed; None: nothing.
        start_s: part of each choice's seconds before it can start.
        open: number of possible profiles, also while it must keep the last one.
        profiles: the possible ones, at least one; those of `choices`. `now`: the current one.
    """

    job: int
    rows: tuple[JobRow, ...]
    choices: tuple[StageChoice, ...]
    pending: Pending | None = None
    profiles: tuple[Profile, ...] = ()
    now: int = 0
    start_s: float = 0.0
    open: int = 1

    @property
    def started(self) -> bool:
        return not any(row.pending for row in self.rows)


def pipeline_of(row: JobRow) -> PipelineKey | None:
    """Return the pipeline of a pending or running job; None if it has none."""
    if PIPELINE_HINT not in row.comment or not (row.pending or row.active):
        return None
    hints = hints_of(row.comment)
    return None if hints is None or hints.pipeline is None else (row.uid, hints.pipeline)


def plan_pipelines(
    now: float,
    queue: Iterable[JobRow],
    promises: Promises,
    rates: Rates,
    history: RetypeHistory,
    known: dict[PipelineKey, KnownPipeline],
    equivalent: Equivalent,
) -> PipelinePlan:
    """Return which jobs of pipelines get another profile now.

    Args:
        now: unix seconds.
        promises: the alternatives of each job; None for nothing, or unknown.
        rates: conservative items a second, by profile.
        known: memory about each pipeline; updated from the queue.
        equivalent: GPU equivalent of a slice.
    """
    rows_of: dict[PipelineKey, list[JobRow]] = {}
    for row in queue:
        key = pipeline_of(row)
        if key is not None:
            rows_of.setdefault(key, []).append(row)
    for key in [key for key in known if key not in rows_of]:
        del known[key]
    for key, rows in rows_of.items():
        known[key] = _noted(known.get(key), rows)
    round_ = _Round(now, promises, rates, history, equivalent)
    for key in sorted(rows_of, key=lambda key: (known[key].at, key)):
        known[key] = round_.examine(known[key], rows_of[key])
    return PipelinePlan(tuple(round_.changes), round_.limits)


def _noted(before: KnownPipeline | None, rows: Sequence[JobRow]) -> KnownPipeline:
    """Return the state of a pipeline, updated by its current jobs."""
    begin = min(row.submit for row in rows)
    deadlines = [hints.deadline_s for row in rows if (hints := hints_of(row.comment)) and hints.deadline_s is not None]
    if before is None:
        return KnownPipeline(begin, min(deadlines, default=None))
    deadline_s = min((*deadlines, *(() if before.deadline_s is None else (before.deadline_s,))), default=None)
    return replace(before, begin=min(begin, before.begin), deadline_s=deadline_s)


class _Round:
    """One round over all pipelines."""

    def __init__(
        self, now: float, promises: Promises, rates: Rates, history: RetypeHistory, equivalent: Equivalent
    ) -> None:
        self._now, self._promises, self._rates, self._history = now, promises, rates, history
        self._equivalent = equivalent
        self._weighed = self._splits = 0
        self.changes: list[Retype] = []
        self.limits: dict[int, float] = {}

    def examine(self, known: KnownPipeline, rows: Sequence[JobRow]) -> KnownPipeline:
        """Examine one pipeline and return its new state."""
        if known.deadline_s is None:
            return replace(known, jobs=(), why_not="none of its jobs has a deadline")
        by_job: dict[int, list[JobRow]] = {}
        for row in rows:
            by_job.setdefault(row.job_id if row.array_job is None else row.array_job, []).append(row)
        if len(by_job) > MOST_JOBS:
            why = f"it has {len(by_job)} unfinished jobs, and at most {MOST_JOBS} are supported"
            return replace(known, jobs=(), why_not=why)
        if self._weighed + len(by_job) > MOST_WEIGHED:
            return self._put_off(known, rows)
        self._weighed += len(by_job)
        jobs, predecessors = [], _order(by_job)
        for number in predecessors:
            job = self._job(number, by_job[number])
            if job is None:
                why = f"the duration of job {number} is unknown: add items= or --time"
                return replace(known, at=self._now, jobs=(), why_not=why)
            jobs.append(job)
        return self._weigh(known, jobs, list(predecessors.values()))

    def _put_off(self, known: KnownPipeline, rows: Iterable[JobRow]) -> KnownPipeline:
        """Leave a pipeline to a later round; until then its jobs keep their profiles, as their limits are unknown."""
        self.limits.update((row.job_id, 0.0) for row in rows)
        return known

    def _weigh(self, known: KnownPipeline, jobs: Sequence[_Job], after: Sequence[tuple[int, ...]]) -> KnownPipeline:
        assert known.deadline_s is not None
        left_s = known.begin + known.deadline_s - self._now
        stages = [SplitStage(job.choices, before) for job, before in zip(jobs, after, strict=True)]
        current_choices = [job.now for job in jobs]
        current = Split.of(stages, current_choices, left_s)
        split_for = tuple((job.job, job.started, job.open) for job in jobs)
        chosen = current
        if split_for != known.split_for or not current.kept:
            if self._splits == MOST_SPLIT or len(self.changes) >= MOST:
                return self._put_off(known, [row for job in jobs for row in job.rows])
            best = split(stages, left_s)
            self._splits += best.kept  # if no split meets the deadline this is found immediately
            known = replace(known, split_for=split_for)
            if _is_better(best, current):
                chosen = best
                self._retype(known, jobs, best, left_s)
        spare_s = max(0.0, left_s - chosen.seconds)
        for job, number in zip(jobs, chosen.chosen, strict=True):
            for row in job.rows:
                takes_s = job.choices[number].seconds - job.start_s
                self.limits[row.job_id] = takes_s * (1.0 if chosen.kept else LATE) + spare_s
        numbers = tuple(job.job for job in jobs)
        examined = replace(known, at=self._now, jobs=numbers, why_not="")
        return replace(examined, seconds=chosen.seconds, left_s=left_s)

    def _retype(self, known: KnownPipeline, jobs: Sequence[_Job], best: Split, left_s: float) -> None:
        outcome = "meets" if best.kept else "comes closest to"
        for job, number in zip(jobs, best.chosen, strict=True):
            if job.pending is not None and number != job.now:
                why = (
                    f"this job's share is {job.choices[number].seconds:.3g} s of the {left_s:.0f} s left to its "
                    f"pipeline; {best.seconds:.0f} s in total {outcome} deadline={known.deadline_s}s"
                )
                self.changes.append(Retype(job.pending, (), job.profiles[number], why))

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _job(self, number: int, rows: Sequence[JobRow]) -> _Job | None:
        """Return a job with its possible profiles; None if its duration is unknown."""
        waiting = [row for row in rows if row.pending]
        if not waiting:
            remaining_s = _longest(self._rest_s(row) for row in rows)
            return None if remaining_s is None else _Job(number, tuple(rows), (StageChoice(remaining_s, 0.0),))
        start_s = max(START_S if row.after else (row.eligible or 0.0) - self._now for row in waiting)
        start_s = max(0.0, start_s)
        movable = self._movable(waiting[0]) if len(waiting) == 1 else None
        if movable is not None:
            return self._with_choices(number, rows, movable, start_s)
        whole_s = _longest(self._whole_s(row) for row in waiting)
        return None if whole_s is None else _Job(number, tuple(rows), (StageChoice(start_s + whole_s, 0.0),))

    def _with_choices(
        self,
        number: int,
        rows: Sequence[JobRow],
        movable: tuple[Pending, tuple[ProfileOption, ...], int],
        start_s: float,
    ) -> _Job | None:
        pending, options, items = movable
        row = pending.row
        seconds_of = {option.profile: items / (option.rate * pending.slice_count) for option in options if option.rate}
        if pending.profile not in seconds_of:
            return None
        limit_s = math.inf if row.time_limit_s is None else row.time_limit_s
        profiles = tuple(sorted(p for p, s in seconds_of.items() if s <= limit_s or p == pending.profile))
        option_count = len(profiles)
        if not self._history.free(row, self._now):
            profiles = (pending.profile,)
        waves = 1 if row.throttle is None else math.ceil(row.tasks / max(1, row.throttle))
        count = pending.slice_count * row.tasks
        prices = {p: self._equivalent(p) * count * seconds_of[p] for p in profiles}
        choices = tuple(StageChoice(start_s + waves * seconds_of[p], prices[p]) for p in profiles)
        return _Job(
            number, tuple(rows), choices, pending, profiles, profiles.index(pending.profile), start_s, option_count
        )

    def _movable(self, row: JobRow) -> tuple[Pending, tuple[ProfileOption, ...], int] | None:
        """Return what can be re-typed of a job, and its possible profiles; None for nothing."""
        grant = marked(row.comment)
        # nodes that a job selects by name, feature or reservation may lack profiles of its partition
        chosen_nodes = row.requested_nodes or row.features or row.reservation
        if row.num_nodes != 1 or row.het_job is not None or chosen_nodes or not can_be_named(row):
            return None
        if grant is None or not drops_old_gres_type(row.gres) or dict(grant.parts) != dict(slices(row.gres)):
            return None
        pending = Pending(row, grant, frozenset(), row.tasks)
        promise = self._promises(pending)
        if promise is None or promise.items is None:
            return None
        options = self._history.possible(pending, promise)
        return (pending, options, promise.items) if pending.profile in {o.profile for o in options} else None

    def _whole_s(self, row: JobRow) -> float | None:
        """Return the maximum duration of a job on its profile: predicted, else its time limit; None: unknown."""
        hints, requested = hints_of(row.comment), slices(row.gres)
        if hints is not None and hints.items is not None and len(requested) == 1:
            ((profile, count),) = requested.items()
            # the name of the pipeline does not change the answer
            rate = self._rates(replace(hints, pipeline=None), row.partition).get(profile)
            if rate:
                return hints.items / (rate * count)
        return None if row.time_limit_s is None else float(row.time_limit_s)

    def _rest_s(self, row: JobRow) -> float | None:
        """Return the remaining duration of a job that has started."""
        if row.state == "COMPLETING":
            return 0.0
        whole_s = self._whole_s(row)
        if whole_s is None:
            return None
        # a job that is late already is assumed to need as much time again as it is late
        return abs(whole_s - (self._now - (row.start or self._now)))


def _longest(durations: Iterable[float | None]) -> float | None:
    """Return the longest of some durations; None if one is unknown."""
    seconds = list(durations)
    known_s = [duration for duration in seconds if duration is not None]
    return max(known_s) if len(known_s) == len(seconds) else None


def _is_better(best: Split, current: Split) -> bool:
    """Return whether jobs should be re-typed for a split."""
    if current.kept:
        return best.price < (1 - WORTH) * current.price
    return best.kept or best.seconds < (1 - WORTH) * current.seconds


def _order(by_job: Mapping[int, Sequence[JobRow]]) -> dict[int, tuple[int, ...]]:
    """Return the jobs, each behind those it waits for, with the positions of these.

    Jobs that are not in the pipeline, or have ended, count as ended. A job with more dependencies than were read is
    assumed to wait for all jobs of the pipeline that were submitted before it. Slurm refuses cycles; if rows show one
    anyway, a dependency that closes it is ignored.
    """
    waits = {job: _waits(job, rows) & by_job.keys() for job, rows in by_job.items()}
    for job, rows in by_job.items():
        if any(row.pending and OTHERS in row.after for row in rows):
            waits[job] |= {before for before in by_job if before < job}
    places: dict[int, int] = {}
    ordered: dict[int, tuple[int, ...]] = {}
    remaining = sorted(waits)
    while remaining:
        ready = [job for job in remaining if waits[job] <= places.keys()] or remaining[:1]
        for job in ready:
            ordered[job] = tuple(sorted(places[before] for before in waits[job] if before in places))
        for job in ready:
            places[job] = len(places)
        remaining = [job for job in remaining if job not in places]
    return ordered


def _waits(job: int, rows: Sequence[JobRow]) -> set[int]:
    return {before for row in rows if row.pending for before in row.after} - {job}


def why_pipeline(row: JobRow, known: Mapping[PipelineKey, KnownPipeline]) -> str:
    """Describe the state of a job's pipeline; empty if it has none."""
    key = pipeline_of(row)
    pipeline = None if key is None else known.get(key)
    if key is None or pipeline is None:
        return ""
    head = f"pipeline {key[1]}"
    if pipeline.why_not:
        return f"the deadline of {head} is not split: {pipeline.why_not}"
    if not pipeline.jobs:
        return ""
    seconds = format_clock(round(pipeline.seconds))
    takes = f"{len(pipeline.jobs)} unfinished jobs are predicted to take {seconds} at most"
    if pipeline.left_s <= 0:
        return f"the deadline of {head} has passed by {format_clock(round(-pipeline.left_s))}: {takes}"
    time_left = f"with {format_clock(round(pipeline.left_s))} left until its deadline"
    if pipeline.seconds <= pipeline.left_s:
        return f"{head}: {takes}, {time_left}"
    return f"the deadline of {head} cannot be met on any slices, so fast ones were chosen: {takes}, {time_left}"

"""Estimate what Slurm does not know of training jobs: their speed on each slice, and the cost of stopping them.

Speeds are relative to the whole GPU. They come from the predictor if the job names a known model, else from
average training speeds on slices (`decide.lending.values.usual_speed`); the job's own measured speeds on several
profiles are combined with both (`decide.lending.training_speed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.training_speed import SpeedReport, speeds, usable
from slurm_migbatch.decide.lending.values import ElasticJob, usual_speed, within
from slurm_migbatch.decide.snapshot import NoPredictions, Predictions, Report, Run
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints

_FUTURE_S: Final = 60.0
_MOST_S: Final = 86_400.0
_MOST_KINDS: Final = 10_000
"""Kinds of jobs, by hints and partition, whose speeds are kept after the last such job has left; or as many as jobs."""


def report_of(event: Mapping[str, Any], now: float) -> tuple[Run, Report] | None:
    """Read a `progress` event; None if it names no run. Implausible values, which the job wrote, are dropped."""
    job, restart = event.get("job"), event.get("restart", 0)
    if type(job) is not int or type(restart) is not int:
        return None
    checkpoint = _number(event.get("checkpoint"), now + _FUTURE_S)
    items, rate = _number(event.get("items"), 1e15), _number(event.get("throughput_per_s"), 1e9)
    latency_ms, at = _number(event.get("latency_ms"), 1e9), _number(event.get("ts"), now + _FUTURE_S)
    ckpt_s, activity = _number(event.get("ckpt_s"), _MOST_S), _number(event.get("sm"), 1.0)
    return (job, restart), Report(checkpoint, ckpt_s, items, rate, latency_ms, at, activity)


class ElasticJobs:
    """Speeds, reports and costs of jobs, kept as long as Slurm lists them."""

    def __init__(self, restart_s: float, checkpoint_s: float) -> None:
        """`restart_s`, `checkpoint_s`: defaults for a job without reports."""
        self._predictions: Predictions = NoPredictions()
        self._version: str | None = None
        self._restart_s, self._checkpoint_s = restart_s, checkpoint_s
        self._reports: dict[Run, Report] = {}
        self._heard: dict[int, dict[int, SpeedReport]] = {}
        self._geometries: tuple[Geometry, ...] = ()
        self._usual: dict[LoanHints, Mapping[Profile, float]] = {}
        self._predicted: dict[tuple[LoanHints, str], Mapping[Profile, float]] = {}
        #: of each job the speeds, and the hints and partition that they are for
        self._speeds: dict[int, tuple[LoanHints, str, Mapping[Profile, float]]] = {}
        #: pending jobs that have never run, as the last round saw them, and what that depends on
        self.waiting: dict[int, tuple[JobView, Mapping[Profile, float], frozenset[str] | None, int, ElasticJob]] = {}

    # -- input ------------------------------------------------------------------------------------------------------

    def gpus(self, geometries: Iterable[Geometry]) -> None:
        """Set the kinds of GPUs in the cluster."""
        current = tuple(dict.fromkeys(geometries))
        if current != self._geometries:
            self._geometries = current
            self._usual.clear()
            self._predicted.clear()
            self._speeds.clear()

    def use(self, predictions: Predictions) -> None:
        """Use this predictor from now on; results of another version are dropped."""
        self._predictions = predictions
        if predictions.version != self._version:
            self._version = predictions.version
            self._predicted.clear()
            self._speeds.clear()

    def report(self, run: Run, report: Report) -> None:
        """Add a report of a run; a field that it omits keeps its value."""
        earlier = self._reports.get(run, Report())
        values = {name: value for name, value in vars(report).items() if value is not None}
        self._reports[run] = replace(earlier, **values)

    def recall(self, run: Run, profile: Profile, report: Report) -> None:
        """Add the record's data on a run that had a slice of this profile."""
        self._reports.setdefault(run, report)
        self._add_reports(run, profile, report)

    def update(self, job_views: Mapping[int, JobView], held: Mapping[Run, Profile]) -> None:
        """Update from Slurm's current list and the profile of each run; drop jobs that are no longer listed."""
        for run, report in list(self._reports.items()):
            job_view = job_views.get(run[0])
            if job_view is None or job_view.row.restarts > run[1]:
                del self._reports[run]
            elif run in held:
                self._add_reports(run, held[run], report)
        for job in [job for job in self._heard if job not in job_views]:
            del self._heard[job]
        for job in self._speeds.keys() - job_views.keys():
            del self._speeds[job]
        most_kinds = max(_MOST_KINDS, 2 * len(job_views))
        if len(self._usual) > most_kinds or len(self._predicted) > most_kinds:
            self._forget_unlisted(job_views)

    def _forget_unlisted(self, job_views: Mapping[int, JobView]) -> None:
        """Drop the speeds of all kinds except those of these jobs, which would only be predicted again in this round.

        What remains depends on nothing that recordings lack, so a replay asks for the same predictions.
        """
        kinds = {(job_view.hints.unplaced, job_view.row.partition) for job_view in job_views.values()}
        hints = {kind[0] for kind in kinds}
        self._predicted = {kind: speeds for kind, speeds in self._predicted.items() if kind in kinds}
        self._usual = {kind: speeds for kind, speeds in self._usual.items() if kind in hints}
        self._speeds = {
            job: cached
            for job, cached in self._speeds.items()
            if cached[0] is job_views[job].hints and cached[1] == job_views[job].row.partition
        }

    def _add_reports(self, run: Run, profile: Profile, report: Report) -> None:
        if report.items and report.rate:
            speed_report = SpeedReport(profile.name, report.items, report.items / report.rate)
            by_restart = self._heard.setdefault(run[0], {})
            if by_restart.get(run[1]) != speed_report:
                by_restart[run[1]] = speed_report
                self._speeds.pop(run[0], None)

    # -- queries ----------------------------------------------------------------------------------------------------

    @property
    def reports(self) -> Mapping[Run, Report]:
        """The latest report of each run."""
        return self._reports

    def speeds(self, job_view: JobView) -> Mapping[Profile, float]:
        """Return the speed on each profile that the job may have, relative to the whole GPU."""
        job, hints, partition = job_view.row.job_id, job_view.hints, job_view.row.partition
        cached = self._speeds.get(job)
        if cached is not None and cached[0] is hints and cached[1] == partition:
            return cached[2]
        by_profile = self._expected(job_view)
        measured = self._heard.get(job)
        if measured:
            by_name = speeds({profile.name: speed for profile, speed in by_profile.items()}, list(measured.values()))
            by_profile = {profile: by_name[profile.name] for profile in by_profile}
        self._speeds[job] = hints, partition, by_profile
        return by_profile

    def never_ran(self, job_view: JobView) -> bool:
        """Return whether nothing is known of a pending job's runs, so that the time changes no estimate."""
        row = job_view.row
        if row.restarts or not row.pending or not (row.start is None or job_view.hints.signal):
            return False
        return (row.job_id, 0) not in self._reports and row.job_id not in self._heard

    def restart_s(self, job_view: JobView, now: float) -> float:
        """Return the seconds that stopping the job now would cost: its restart, and its checkpoint or unsaved work."""
        report = self._reports.get((job_view.row.job_id, job_view.row.restarts), Report())
        if job_view.hints.signal:
            return self._restart_s + (report.ckpt_s if report.ckpt_s is not None else self._checkpoint_s)
        saved_at = max(report.checkpoint or 0.0, job_view.row.start or now)
        return self._restart_s + max(0.0, now - saved_at)

    def left_s(self, job_view: JobView, now: float) -> float:
        """Return the maximum remaining seconds on the whole GPU within a job's time limit.

        Infinite without a limit.
        """
        row = job_view.row
        if row.pending and row.time_limit_s is not None:
            return row.time_limit_s * max(self.speeds(job_view).values(), default=1.0)
        if row.time_limit_s is None or row.start is None or job_view.hints.slice is None or not row.active:
            return math.inf
        speed = self.speeds(job_view).get(job_view.hints.slice, 0.0)
        return max(0.0, row.start + row.time_limit_s - now) * speed

    def needs_s(self, job_view: JobView) -> float | None:
        """Return the seconds on the whole GPU that a job still needs, by `items` and its runs' reports; None: unknown.

        The rate is that of runs on a slice of their own; work of a run next to another one counts as done. A job
        that has done more than it stated gives no estimate.
        """
        if job_view.hints.items is None:
            return None
        job, restart = job_view.row.job_id, job_view.row.restarts
        speed = {profile.name: value for profile, value in self.speeds(job_view).items()}
        speed_reports = self._heard.get(job, {})
        measured = [report for report in usable(speed_reports.values()) if report.profile in speed]
        items_done = {run: report.items for run, report in speed_reports.items()}
        items_done[restart] = max(
            items_done.get(restart, 0.0), self._reports.get((job, restart), Report()).items or 0.0
        )
        items_left = job_view.hints.items - math.fsum(items_done.values())
        if not measured or items_left <= 0:
            return None
        worked_s = math.fsum(report.seconds * speed[report.profile] for report in measured)
        return items_left * worked_s / math.fsum(report.items for report in measured)

    def _expected(self, job_view: JobView) -> Mapping[Profile, float]:
        hints = job_view.hints.unplaced
        key = hints, job_view.row.partition
        if hints.model is not None:
            if key not in self._predicted:
                predicted = self._predictions.training_speeds(hints, job_view.row.partition)
                allowed = {p for geometry in self._geometries for p in within(geometry, hints.min, hints.max)}
                self._predicted[key] = {p: speed for p, speed in predicted.items() if p in allowed and speed > 0}
            if self._predicted[key]:
                return self._predicted[key]
        if hints not in self._usual:
            self._usual[hints] = self._unknown(hints)
        return self._usual[hints]

    def _unknown(self, hints: LoanHints) -> dict[Profile, float]:
        speed_of: dict[Profile, float] = {}
        for geometry in self._geometries:
            for profile in within(geometry, hints.min, hints.max):
                if hints.mem_mib is None or geometry.info(profile).memory_mib >= hints.mem_mib:
                    speed = usual_speed(geometry, profile)
                    speed_of[profile] = min(speed_of.get(profile, speed), speed)
        return speed_of


def _number(value: Any, limit: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= limit else None

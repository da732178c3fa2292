"""Learn from training jobs that may share slices: how long they work, and the slowdowns of pairs.

Updated in each round with Slurm's jobs, the pairs, and the reports; used by
`decide.lending.slice_sharing`. It is not persisted: after a restart of migbatchd it is learned again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.pair_slowdowns import PairSlowdowns, RateKey, Reported
from slurm_migbatch.decide.lending.pairs import Sharer, SharingRules
from slurm_migbatch.decide.lending.run_lengths import LengthHistory
from slurm_migbatch.decide.snapshot import Report, Run
from slurm_migbatch.mig.profile import Profile


class SharedRuns:
    """Work time of jobs, and rates of runs alone and next to others."""

    def __init__(self, rules: SharingRules) -> None:
        self._rules = rules
        self.slowdowns = PairSlowdowns(rules.measured, rules.slowdown)
        self.lengths = LengthHistory()
        self._worked: dict[int, float] = {}
        #: user and time limit of jobs that have worked
        self._limits: dict[int, tuple[int, float | None]] = {}
        #: by run, the time of its last report
        self._reported: dict[Run, float] = {}
        self._now: float | None = None

    @property
    def rules(self) -> SharingRules:
        """The rules with the currently known slowdowns."""
        return replace(self._rules, measured=self.slowdowns.known, assumed=self.slowdowns.assumed)

    def update(
        self,
        now: float,
        job_views: Mapping[int, JobView],
        held: Mapping[Run, Profile],
        beside: Mapping[Run, Run],
        reports: Mapping[Run, Report],
        shared: Collection[Run] = (),
    ) -> None:
        """Update from a round: the profile of each run that has or shares a slice, and the latest reports.

        `shared`: the runs that have ever shared a slice.
        """
        self._work(now, job_views, held, beside)
        before, self._reported = self._reported, {}
        for run, profile in held.items():
            job_view, report = job_views.get(run[0]), reports.get(run)
            if job_view is None or report is None or report.items is None or report.at is None:
                continue
            other = beside.get(run)
            activity = None if run in shared else report.activity
            reported = Reported(_kind(job_view, profile), _app(job_view), report.items, report.at, activity)
            app = _app(job_views.get(other[0])) if other is not None else ""
            self.slowdowns.add_report(run, reported, other, app, again=report.at == before.get(run))
            self._reported[run] = report.at
        self.slowdowns.forget(held.keys())

    def with_history(self, sharer: Sharer, job_view: JobView) -> Sharer:
        """Return `sharer` with the known data on its length and its activity."""
        row = job_view.row
        worked, errors = self._worked.get(row.job_id, 0.0), self.lengths.errors(row.uid)
        activity = self.slowdowns.activity(row.uid, _label(job_view))
        return replace(sharer, ran_s=worked, whole_s=row.time_limit_s, errors=errors, activity=activity)

    def _work(
        self, now: float, job_views: Mapping[int, JobView], held: Mapping[Run, Profile], beside: Mapping[Run, Run]
    ) -> None:
        """Add the work of runs since the last round, as if alone, and record the lengths of jobs that left."""
        elapsed_s = 0.0 if self._now is None else max(0.0, now - self._now)
        rules = self.rules if beside else self._rules
        self._now = now
        for run in held:
            job_view = job_views.get(run[0])
            if job_view is None or job_view.row.state != "RUNNING":
                continue
            row, other = job_view.row, beside.get(run)
            self._limits[run[0]] = row.uid, row.time_limit_s
            if run[0] in self._worked:
                slow = 1.0 if other is None else self._slow(run, other, job_views, rules, held[run])
                self._worked[run[0]] += elapsed_s / slow
            else:
                self._worked[run[0]] = 0.0 if row.start is None else max(0.0, now - row.start)
        for job in [job for job in self._worked if job not in job_views]:
            worked, (uid, limit) = self._worked.pop(job), self._limits.pop(job)
            if limit is not None:
                self.lengths.note(uid, self._rules.of_limit * limit, worked)

    def _slow(
        self, run: Run, other: Run, job_views: Mapping[int, JobView], rules: SharingRules, profile: Profile
    ) -> float:
        measured = self.slowdowns.measured(run, other)
        if measured is not None:
            return measured
        sharers = (self._pair_member(run[0], job_views), self._pair_member(other[0], job_views))
        return rules.slow(*sharers, profile)

    def _pair_member(self, job: int, job_views: Mapping[int, JobView]) -> Sharer:
        """Return a job with what its slowdown depends on."""
        job_view = job_views.get(job)
        if job_view is None:
            return Sharer(job, 0)
        uid = job_view.row.uid
        return Sharer(job, uid, _app(job_view), activity=self.slowdowns.activity(uid, _label(job_view)))


def _app(job_view: JobView | None) -> str:
    """Return the name that slowdowns are stored under; empty if a job names no model."""
    return "" if job_view is None else job_view.hints.model or ""


def _kind(job_view: JobView, profile: Profile) -> RateKey:
    """Return the key of a rate alone."""
    return RateKey(job_view.row.uid, _label(job_view), profile.name)


def _label(job_view: JobView) -> str:
    """Return the name of jobs with the same hints; a job that names no model has its own."""
    hints = job_view.hints
    if not hints.model:
        return f"job {job_view.row.job_id}"
    return f"{hints.model} {hints.batch} {hints.input}{hints.input_unit}"

"""What is learned of trainings that may share slices: how long they work, and what pairs cost one another.

Fed in each round with what Slurm shows, who is beside whom, and what runs report; asked by
`decide.lending.slice_sharing`. Nothing of it outlives migbatchd: after a restart it is learned anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm_migbatch.decide.lending.ledger import JobView
from slurm_migbatch.decide.lending.pair_slowdowns import PairSlowdowns, Reported
from slurm_migbatch.decide.lending.pairs import Sharer, SharingRules
from slurm_migbatch.decide.lending.run_lengths import LengthHistory
from slurm_migbatch.decide.lending.view import Run
from slurm_migbatch.decide.snapshot import Report
from slurm_migbatch.mig.profile import Profile


class SharedRuns:
    """Keeps how long jobs have worked, and the rates of runs alone and beside others."""

    def __init__(self, rules: SharingRules) -> None:
        self._rules = rules
        self._slowdowns = PairSlowdowns(rules.measured, rules.slowdown)
        self._lengths = LengthHistory()
        self._worked: dict[int, float] = {}
        self._last: Mapping[int, JobView] = {}
        self._now: float | None = None

    @property
    def rules(self) -> SharingRules:
        """The rules with the slowdowns that are known now."""
        return replace(self._rules, measured=self._slowdowns.known, slowdown=self._slowdowns.assumed)

    def update(
        self,
        now: float,
        job_views: Mapping[int, JobView],
        held: Mapping[Run, Profile],
        beside: Mapping[Run, Run],
        reports: Mapping[Run, Report],
    ) -> None:
        """Take in a round: the profile of each run that has a slice or shares one, and what runs reported last."""
        self._work(now, job_views, held, beside)
        for run, profile in held.items():
            job_view, report = job_views.get(run[0]), reports.get(run)
            if job_view is None or report is None or report.items is None or report.at is None:
                continue
            hints, other = job_view.hints, beside.get(run)
            kind = job_view.row.uid, hints.model or run[0], hints.batch, hints.input, profile
            reported = Reported(kind, hints.model or "", report.items, report.at)
            partner = None if other is None else job_views.get(other[0])
            model = (partner.hints.model or "") if partner is not None else ""
            self._slowdowns.hear(run, reported, other, model)
        self._slowdowns.forget(held.keys())

    def measured(self, run: Run, beside: Run) -> float | None:
        """Return how much longer a run takes beside that one, as far as both reported enough."""
        return self._slowdowns.measured(run, beside)

    def told(self, sharer: Sharer, job_view: JobView) -> Sharer:
        """Return a job with what is known of its length."""
        row = job_view.row
        return replace(
            sharer,
            ran_s=self._worked.get(row.job_id, 0.0),
            whole_s=row.time_limit_s,
            errors=self._lengths.errors(row.uid),
        )

    def _work(
        self, now: float, job_views: Mapping[int, JobView], held: Collection[Run], beside: Mapping[Run, Run]
    ) -> None:
        """Count what runs have worked since the last round, and note the lengths of jobs that left."""
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        for run in held:
            job_view = job_views.get(run[0])
            if job_view is None or job_view.row.state != "RUNNING":
                continue
            begin = job_view.row.start
            if run[0] not in self._worked and begin is not None:
                self._worked[run[0]] = max(0.0, now - begin)
                continue
            self._worked[run[0]] = self._worked.get(run[0], 0.0) + passed / self._slow(run, beside, job_views)
        for job in [job for job in self._worked if job not in job_views]:
            worked, row = self._worked.pop(job), self._last[job].row
            if row.time_limit_s is not None:
                self._lengths.note(row.uid, self._rules.of_limit * row.time_limit_s, worked)
        self._last, self._now = job_views, now

    def _slow(self, run: Run, beside: Mapping[Run, Run], job_views: Mapping[int, JobView]) -> float:
        other = beside.get(run)
        if other is None:
            return 1.0
        measured = self._slowdowns.measured(run, other)
        if measured is not None:
            return measured
        own, partner = job_views.get(run[0]), job_views.get(other[0])
        names = ((own.hints.model or "") if own else "", (partner.hints.model or "") if partner else "")
        return max(1.0, self._slowdowns.known.get(names, self._slowdowns.assumed))

"""Track the states of loans from what Slurm shows.

A loan is one release of one elastic training job:

    released -> running -> signalled -> requeued -> ended
        |          |                                  ^
        +-> withdrawn, or it left in any other way ---+

Slurm's list is authoritative. A call to Slurm alone changes no state: a loan to be released that still shows
`mig:loan` was not released, and one to be requeued that still runs was not requeued. The ledger adds what Slurm does
not know: the reason, the start, and the grace time of a signalled job.

A state is an intention, which is recorded before Slurm is called; its time (`released`, `signalled`, `requeued`)
is set once Slurm has accepted it. A service that was killed in between finds the intention without its time, checks
Slurm's state, and calls again only if that does not show it done. A job that returns to the queue by itself
(preemption, a failed node, `scontrol requeue`), is cancelled or completes ends its loan in any state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slurm_migbatch.decide.lending.loan import Cause, JobView, Loan, LoanHistory, Place, State
from slurm_migbatch.decide.lending.values import Target
from slurm_migbatch.decide.snapshot import Report, Run, passed_s
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow

SLACK_S: Final = 1.0
"""A job may round the time of its checkpoint down to whole seconds."""
EXPECTED_S: Final = 30.0
"""A released array task that Slurm does not list within this time was not released."""
STALE_S: Final = 3600.0
"""How long a job's history is kept after it left Slurm's list."""
REQUEUE_DELAY_S: Final = 150.0
"""Slurm's own delay of a requeued job is about two minutes; a later begin time is the user's."""
SCAN_S: Final = 2.0
"""Minimum interval of slurmd's checks for expired credentials."""
MOST_REST_S: Final = 600.0
"""How long, at most, a job that Slurm did not start after its releases is released no more."""


_FIRST = re.compile(r"\[?([0-9]+)")


@dataclass
class Ledger:
    """Every active loan, by job, and the history of ended ones."""

    open: dict[int, Loan] = field(default_factory=dict)
    #: the inference job that a loan ends for, by the loan's job
    ends_for: dict[int, int] = field(default_factory=dict)
    past: dict[int, LoanHistory] = field(default_factory=dict)
    #: targets of jobs that were stopped for another slice, until they are released
    targets: dict[int, Target] = field(default_factory=dict)
    #: runs (job, restart count) that are or were loans and may still hold a slice
    runs: set[Run] = field(default_factory=set)
    #: when a loan was last reclaimed from a GPU, by its UUID
    reclaimed: dict[str, float] = field(default_factory=dict)
    _unsaved: dict[tuple[int, int, float], Loan] = field(default_factory=dict)
    #: by job, nodes where a run ended recently, and until when slurmd there may confuse the next run with that one
    ran_on: dict[int, dict[str, float]] = field(default_factory=dict)
    #: releases of array tasks that shared a row with others; a task has its own job id only after its release
    _expected: dict[tuple[int, int], Loan] = field(default_factory=dict)

    def load(self, loans: Iterable[Loan]) -> None:
        """Start from the record: active loans and recently ended ones, in the order of their decisions."""
        for loan in loans:
            self.runs.add((loan.job_id, loan.restart))
            if loan.ended is not None:
                self._remember(loan)
                continue
            earlier = self.open.get(loan.job_id)
            if earlier is not None:
                self._close(earlier, loan.decided, Cause.LEFT, "the record has a later release of this job")
            self.open[loan.job_id] = loan

    def unsaved(self) -> list[Loan]:
        """Return the loans that changed since the last call."""
        changed = list(self._unsaved.values())
        self._unsaved.clear()
        return changed

    def mark_unsaved(self, loans: Iterable[Loan]) -> None:
        """Return these loans, which could not be written, again at the next call, unless they have changed since."""
        for loan in loans:
            self._unsaved.setdefault(_identity(loan), loan)

    def states(self) -> Counter[str]:
        """Count the loans in each state."""
        return Counter(loan.state.value for loan in list(self.open.values()))

    # -- what Slurm shows ------------------------------------------------------------------------------------------

    def follow(
        self,
        job_views: Mapping[int, JobView],
        places: Mapping[Run, Place],
        reports: Mapping[Run, Report],
        now: float,
        unread: Collection[int] = (),
    ) -> list[Loan]:
        """Update every loan from Slurm's list.

        Args:
            job_views: every elastic training job that Slurm lists.
            places: place of each run (job, restart count) that has a slice, by the nodes' reports.
            reports: the latest report of each run.
            unread: jobs that Slurm lists but whose row could not be read; their loans remain unchanged.

        Returns:
            The loans that ended.
        """
        ended = []
        for job, loan in list(self.open.items()):
            job_view, run = job_views.get(job), (job, loan.restart)
            if job in unread:
                continue
            if job_view is None:
                ended.append(self._close(loan, now, Cause.LEFT, "the job is no longer in Slurm"))
            elif job_view.row.restarts > loan.restart or (job_view.row.pending and loan.started is not None):
                ended.append(self._came_back(loan, job_view.row, now))
            elif job_view.row.pending:
                ended += self._still_waits(loan, job_view, now)
            elif job_view.row.active:
                self._runs(loan, job_view.row, places.get(run), reports.get(run, Report()).checkpoint, now)
        for job, job_view in job_views.items():
            if job not in self.open and job_view.row.tasks <= 1:
                self._newly_seen(job_view, places.get((job, job_view.row.restarts)), now)
        self._expected = {task: loan for task, loan in self._expected.items() if now - loan.decided < EXPECTED_S}
        self.runs = {(loan.job_id, loan.restart) for loan in self.open.values()} | (self.runs & places.keys())
        for job in [job for job, past in self.past.items() if job not in job_views and now - past.ended > STALE_S]:
            del self.past[job]
        self.targets = {job: target for job, target in self.targets.items() if self._due(job, target, job_views, now)}
        self.ran_on = {
            job: remaining
            for job, nodes in self.ran_on.items()
            if job in job_views and (remaining := {node: until for node, until in nodes.items() if until > now})
        }
        return ended

    def _due(self, job: int, target: Target, job_views: Mapping[int, JobView], now: float) -> bool:
        loan = self.open.get(job)
        return job in job_views and now < target.until and (loan is None or loan.leaving)

    def taken_for_last(self, job: int) -> frozenset[str]:
        """Return the nodes where slurmd would confuse a job's next run with its last one: `decide.lending.pools`."""
        return frozenset(self.ran_on.get(job, ()))

    def unstarted(self, job_views: Mapping[int, JobView], start_s: float, now: float) -> dict[int, int]:
        """Return the pending jobs that are not released now because Slurm did not start them, and how often it did not.

        From the second time on, because another job may have come first once. The tasks of an array count together:
        what keeps one from starting (a limit, memory, CPUs) keeps all.
        """
        late, ended = Counter[int](), dict[int, float]()
        for job, job_view in job_views.items():
            past = self.past.get(job)
            if past is not None and past.late and job_view.row.pending:
                first = job_view.row.array_job or job
                late[first] += past.late
                ended[first] = max(ended.get(first, 0.0), past.ended)
        if not late:
            return {}
        unstarted = {
            first: count
            for first, count in late.items()
            if count > 1 and passed_s(ended[first], now) < min(MOST_REST_S, start_s * 2.0 ** min(count - 2, 10))
        }
        return {
            job: unstarted[first]
            for job, job_view in job_views.items()
            if (first := job_view.row.array_job or job) in unstarted and job_view.row.pending
        }

    def _newly_seen(self, job_view: JobView, place: Place | None, now: float) -> None:
        profile = place[2].profile if job_view.hints.guest and place is not None else job_view.hints.slice
        if profile is not None and not self._meet(job_view, now) and job_view.row.active:
            self._adopt(job_view, profile, place, now)

    def _came_back(self, loan: Loan, row: JobRow, now: float) -> Loan:
        if loan.state is State.REQUEUED:
            ended = self._close(replace(loan, requeued=loan.requeued or now), now, loan.cause, loan.why_ended)
        else:
            why = "Slurm requeued it (preemption, node failure, scontrol requeue)"
            if loan.started is None:
                why = "it was requeued right after its start; see the node's log"
            ended = self._close(loan, now, Cause.SLURM, why)
        if loan.node and row.pending and row.eligible is not None and now < row.eligible < now + REQUEUE_DELAY_S:
            self.ran_on[loan.job_id][loan.node] = row.eligible + SCAN_S  # Slurm's own delay is long enough
        return ended

    def _still_waits(self, loan: Loan, job_view: JobView, now: float) -> list[Loan]:
        if job_view.hints.slice == loan.slice or job_view.hints.guest:
            if loan.released is None:  # Slurm accepted it, and migbatchd was killed before recording it
                self._put(replace(loan, released=now))
            return []
        if loan.state is State.WITHDRAWN:
            return [self._close(loan, now, loan.cause, loan.why_ended)]
        if loan.released is None:
            return [self._close(loan, now, Cause.REFUSED, "Slurm was not updated")]
        return [self._close(loan, now, Cause.SLURM, "the job's GRES was changed by others")]

    def _runs(self, loan: Loan, row: JobRow, place: Place | None, checkpoint: float | None, now: float) -> None:
        changes: dict[str, Any] = {}
        if loan.state in (State.RELEASED, State.WITHDRAWN):
            changes = {"state": State.RUNNING, "started": row.start or now, "cause": Cause.NONE, "why_ended": ""}
            changes["released"] = loan.released or loan.decided
        if row.nodes and not loan.node:
            changes["node"] = row.nodes[0]
        if place is not None and loan.gpu != place[1]:
            changes["node"], changes["gpu"] = place[0], place[1]
        awaits_checkpoint = loan.signalled is not None and loan.checkpoint is None
        if awaits_checkpoint and checkpoint is not None and checkpoint >= (loan.signalled or 0.0) - SLACK_S:
            changes["checkpoint"] = checkpoint
        if changes:
            self._put(replace(loan, **changes))

    def _meet(self, job_view: JobView, now: float) -> bool:
        """Open the loan of a released array task under the task's own job id; return whether the job is such a task."""
        row, task = job_view.row, first_task(job_view.row)
        loan = self._expected.pop((row.array_job or 0, task), None) if task is not None else None
        if loan is None or loan.slice != job_view.hints.slice:
            return False
        self._put(replace(loan, job_id=row.job_id, restart=row.restarts, released=now))
        if row.active:
            self._runs(self.open[row.job_id], row, None, None, now)
        return True

    def _adopt(self, job_view: JobView, profile: Profile, place: Place | None, now: float) -> None:
        row = job_view.row
        began = row.start or now
        node, gpu = (place[0], place[1]) if place is not None else (row.nodes[0] if row.nodes else "", "")
        loan = _new(row, profile, began, "found running without a record of it")
        self._put(replace(loan, state=State.RUNNING, released=began, started=began, node=node, gpu=gpu))

    # -- intentions and their outcome ----------------------------------------------------------------------------

    def release(self, row: JobRow, profile: Profile, why: str, now: float) -> None:
        """Record that a job, or the first array task of the row, is about to be given that profile."""
        self.targets.pop(row.job_id, None)
        task = first_task(row)
        if row.tasks > 1 and task is not None:
            self._expected[row.array_job or 0, task] = _new(row, profile, now, why)
        else:
            self._put(_new(row, profile, now, why))

    def withdraw(self, job: int, cause: Cause, why: str) -> None:
        """Record that the release is about to be withdrawn."""
        self._put(replace(self.open[job], state=State.WITHDRAWN, cause=cause, why_ended=why))

    def signal(self, job: int, cause: Cause, why: str, inference: int = 0) -> None:
        """Record that the job is about to be signalled to write a checkpoint; `inference`: see `LoanOrder`."""
        self._ends_for(job, inference)
        loan = replace(self.open[job], state=State.SIGNALLED, signalled=None, checkpoint=None)
        self._put(replace(loan, cause=cause, why_ended=why))

    def requeue(self, job: int, cause: Cause, why: str, inference: int = 0) -> None:
        """Record that the job is about to be requeued; `inference`: see `LoanOrder`."""
        self._ends_for(job, inference)
        loan = replace(self.open[job], state=State.REQUEUED)
        self._put(loan if loan.cause else replace(loan, cause=cause, why_ended=why))

    def confirm(self, job: int, at: float) -> None:
        """Record that Slurm accepted, at that time, the last intention for this job."""
        loan = self.open.get(job)
        time_fields = {State.RELEASED: "released", State.SIGNALLED: "signalled", State.REQUEUED: "requeued"}
        if loan is not None and loan.state in time_fields:
            self._put(replace(loan, **{time_fields[loan.state]: at}))  # type: ignore[arg-type]

    def refused(self, job: int, error: str, now: float) -> None:
        """Record that Slurm refused the last intention; a job that cannot be signalled is requeued."""
        loan = self.open.get(job)
        if loan is None:
            return
        if loan.state is State.RELEASED and loan.released is None:
            self._close(loan, now, Cause.REFUSED, error)
        elif loan.state is State.SIGNALLED and loan.signalled is None:
            self._put(replace(loan, state=State.REQUEUED))

    def keep_running(self, job: int) -> None:
        """Record that a running job is not stopped after all."""
        self.targets.pop(job, None)
        self.ends_for.pop(job, None)
        loan = self.open.get(job)
        if loan is not None and loan.leaving:
            self._put(replace(loan, state=State.RUNNING, cause=Cause.NONE, why_ended=""))

    # -- helpers --------------------------------------------------------------------------------------------------

    def _ends_for(self, job: int, inference: int) -> None:
        if inference:
            self.ends_for[job] = inference

    def _put(self, loan: Loan) -> None:
        self.open[loan.job_id] = loan
        self.runs.add((loan.job_id, loan.restart))
        self._unsaved[_identity(loan)] = loan

    def _close(self, loan: Loan, now: float, cause: Cause, why: str) -> Loan:
        ended = replace(loan, state=State.ENDED, ended=max(now, loan.decided), cause=cause, why_ended=why)
        self.open.pop(loan.job_id, None)
        self.ends_for.pop(loan.job_id, None)
        self._unsaved[_identity(ended)] = ended
        self._remember(ended)
        return ended

    def _remember(self, loan: Loan) -> None:
        past = self.past.get(loan.job_id, LoanHistory())
        was_taken = loan.cause in (Cause.RECLAIM, Cause.FORECAST, Cause.SLURM) and loan.started is not None
        ended = loan.ended or loan.decided
        node = loan.node if loan.restart > past.restart else loan.node or past.node
        cause = loan.cause if loan.restart >= past.restart else past.cause
        late = 0 if loan.started is not None else past.late + (loan.cause is Cause.LATE)
        self.past[loan.job_id] = LoanHistory(
            past.hits + was_taken, max(past.restart, loan.restart), max(past.ended, ended), node, cause, late
        )
        if loan.node:
            self.ran_on.setdefault(loan.job_id, {})[loan.node] = ended + REQUEUE_DELAY_S
        if was_taken and loan.gpu:
            self.reclaimed[loan.gpu] = max(self.reclaimed.get(loan.gpu, 0.0), ended)


def first_task(row: JobRow) -> int | None:
    """Return the array task of a row, the first one if several share it; None if it is not of an array."""
    match = _FIRST.match(row.array_task or "")
    return int(match[1]) if match is not None and row.array_job is not None else None


def _new(row: JobRow, profile: Profile, now: float, why: str) -> Loan:
    return Loan(
        job_id=row.job_id,
        restart=row.restarts,
        decided=now,
        profile=profile.name,
        state=State.RELEASED,
        why=why,
        uid=row.uid,
        user=row.user,
        account=row.account,
        partition=row.partition,
    )


def _identity(loan: Loan) -> tuple[int, int, float]:
    return loan.job_id, loan.restart, loan.decided

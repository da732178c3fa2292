"""`migbatch loans`: slices on loan to training jobs, and training jobs that wait for one.

Slurm knows which jobs wait and run, the record why and since when, migbatchd why a job has no loan yet. Each is queried
for what it knows best, so the answer is right even while migbatchd is down: a job that Slurm shows as running is
running, whatever the record has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from slurm_migbatch.decide.lending.inputs import job_views_of
from slurm_migbatch.decide.lending.loan import JobView, Loan, State
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.query.questions import LoansQuestion
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.show import row_name, shown
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.query.why import is_named
from slurm_migbatch.report.columns import job_id
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.lines import separated_lines, table_lines
from slurm_migbatch.report.selection import parse_jobs
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.times import time_formatter
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.queries import JobId, RunFilter, select_runs

COLUMNS = ("JOBID", "USER", "ACCOUNT", "PROFILE", "NODE", "GPU", "SINCE", "STATE", "RESTARTS", "WHY")
_JOB: Final = re.compile(r"\bjob (\d{1,18})\b")
#: stands for an array task without a job; Slurm numbers jobs from 1
_NO_JOB: Final = 0


@dataclass(frozen=True)
class LoanView:
    """One line. `since` in unix seconds; `gpu` is the GPU's index if the node has reported it, else its UUID; `jobid`
    is the job as Slurm prints it, 12_3, `job` its number.
    """

    job: int
    user: str
    account: str
    profile: str
    node: str
    gpu: str
    since: float
    state: str
    restarts: int
    why: str
    jobid: str = ""


def answer(question: LoansQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the selected loans, and the jobs that wait for one."""
    named = _named(question.jobs)
    config = site.config
    queue = rights.jobs(site.slurm().jobs())
    job_views = job_views_of(queue, config.lending.partitions)
    with site.record() as store:
        wanted = _ids(store, named, job_views) if named else ()
        rows = store.loans(wanted, active=not question.over)
        dry_run_reasons = _would(store.actions(wanted)) if config.lending.dry_run else {}
        names = _recorded_names(store, {row["job_id"] for row in rows}.union(*map(_mentioned, rows)))
        indexes = {
            gpu["uuid"]: gpu["index"] for gpus in store.inventory().values() for gpu in gpus if gpu["index"] is not None
        }
    visible = [loan for row in rows if (loan := Loan.from_row(row)) is not None and may_see(rights, loan, job_views)]
    reasons, remarks = waiting(site) if any(job_view.row.pending for job_view in job_views.values()) else ({}, ())
    dry_run_reasons = {job: why for job, why in dry_run_reasons.items() if _in_full(rights, job_views.get(job))}
    names |= {row.job_id: row_name(row) for row in queue}

    def jobid(job: int) -> str:
        return names.get(job, str(job))

    views = view(job_views, visible, {**reasons, **dry_run_reasons}, indexes, wanted)
    views = [replace(row, jobid=jobid(row.job)) for row in redacted(rights, views, job_views, visible, jobid)]
    if question.as_json:
        return Reply([json.dumps({"version": 1, "loans": [asdict(row) for row in views]})], remarks)
    cells = [_cells(row, question.time_style) for row in views]
    if question.delimiter is None:
        return Reply(list(table_lines(COLUMNS, cells, show_header=question.header)), remarks)
    lines = separated_lines(COLUMNS, cells, question.delimiter, show_header=question.header, closed=question.closed)
    return Reply([*lines], remarks)


def _ids(store: Store, named: Sequence[JobId], job_views: Mapping[int, JobView]) -> Collection[int]:
    """Return the ids of these jobs: of an array those of its tasks, in the queue or in the record."""
    with store.reading() as connection:
        recorded = {run.job_id for run, _ in select_runs(connection, RunFilter(jobs=tuple(named)), ("job_id",))}
    queued = {job for job, job_view in job_views.items() if any(is_named(job_view.row, id) for id in named)}
    plain = {id.job for id in named if id.task is None and id.offset is None}
    return {*recorded, *queued, *plain} or {_NO_JOB}


def _mentioned(row: Mapping[str, Any]) -> set[int]:
    """Return the jobs that the reasons of a recorded loan name."""
    return {int(found[1]) for name in ("why", "why_ended") for found in _JOB.finditer(row[name] or "")}


def _recorded_names(store: Store, jobs: Collection[int]) -> dict[int, str]:
    """Return these jobs as Slurm prints them."""
    if not jobs:
        return {}
    fields = ("job_id", "array_job", "array_task", "het_job", "het_offset")
    with store.reading() as connection:
        runs = select_runs(connection, RunFilter(jobs=tuple(map(JobId, jobs))), fields)
        return {run.job_id: job_id(run) for run, _ in runs}


def queue_names(job_views: Mapping[int, JobView]) -> dict[int, str]:
    """Return jobs in the queue as Slurm prints them."""
    return {job: row_name(view.row) for job, view in job_views.items()}


def may_see(rights: Rights, loan: Loan, job_views: Mapping[int, JobView]) -> bool:
    """Return whether the user may see a loan: by the rules of the record, or because squeue shows them its job."""
    job_view = job_views.get(loan.job_id)
    return rights.run(loan.uid, loan.account) or (job_view is not None and job_view.row.uid == loan.uid)


def _in_full(rights: Rights, job_view: JobView | None) -> bool:
    return job_view is not None and rights.in_full(job_view.row.uid, job_view.row.account)


def redacted(
    rights: Rights,
    views: Sequence[LoanView],
    job_views: Mapping[int, JobView],
    loans: Sequence[Loan],
    name_of: Callable[[int], str] = str,
) -> list[LoanView]:
    """Return the lines without accounts and jobs of others that the user may not see, and what their hints imply.

    `name_of` returns a job as Slurm prints it, given its number.
    """
    owners = {loan.job_id: (loan.uid, loan.account) for loan in loans}
    owners |= {job: (job_view.row.uid, job_view.row.account) for job, job_view in job_views.items()}
    return [
        replace(
            row,
            account=row.account if rights.account(*owners[row.job]) else "",
            why=rights.sentence(
                row.why if rights.in_full(*owners[row.job]) else without_estimates(row.why), owners, name_of
            ),
        )
        for row in views
    ]


def view(
    job_views: Mapping[int, JobView],
    loans: Iterable[Loan],
    reasons: Mapping[int, str],
    indexes: Mapping[str, int],
    wanted: Collection[int] = (),
) -> list[LoanView]:
    """Return ended loans first, then current ones and waiting jobs in Slurm's order.

    Args:
        job_views: elastic training jobs as Slurm shows them now; `reasons`: why they wait.
        loans: from the record, by decision time; `indexes`: of GPUs by UUID.
        wanted: only these jobs; () for all.
    """
    ended: list[LoanView] = []
    current_views: dict[int, LoanView] = {}
    for loan in loans:
        job_view = job_views.get(loan.job_id)
        current = job_view is not None and loan.ended is None and job_view.row.restarts == loan.restart
        gpu = str(indexes.get(loan.gpu, loan.gpu))
        if current and job_view is not None:
            current_views[loan.job_id] = _view_of_open(loan, job_view, gpu)
        else:
            why = loan.why_ended or "it has left the queue"
            ended.append(_line(loan, gpu, loan.ended or loan.decided, "ended", why))
    loan_views = list(ended)
    for job, job_view in job_views.items():
        row = job_view.row
        if wanted and job not in wanted:
            continue
        if job in current_views:
            loan_views.append(current_views[job])
            continue
        held = job_view.hints.slice if row.active else None
        state = "running" if row.active else "waiting"
        why = "" if row.active else reasons.get(job, f"Slurm: {row.reason}" if row.reason else "")
        profile, since = held.name if held is not None else "", (row.start or 0.0) if row.active else row.submit
        node = row.nodes[0] if row.nodes else ""
        loan_views.append(LoanView(job, row.user, row.account, profile, node, "", since, state, row.restarts, why))
    return loan_views


def _view_of_open(loan: Loan, job_view: JobView, gpu: str) -> LoanView:
    moments = {State.RUNNING: loan.started, State.SIGNALLED: loan.signalled, State.REQUEUED: loan.requeued}
    state, since = loan.state, moments.get(loan.state)
    if job_view.row.active and state in (State.RELEASED, State.WITHDRAWN):
        state, since = State.RUNNING, job_view.row.start
    return _line(loan, gpu, since or loan.decided, state.value, loan.why_ended if loan.leaving else loan.why)


def _line(loan: Loan, gpu: str, since: float, state: str, why: str) -> LoanView:
    return LoanView(loan.job_id, loan.user, loan.account, loan.profile, loan.node, gpu, since, state, loan.restart, why)


def waiting(site: QuerySite) -> tuple[dict[int, str], tuple[str, ...]]:
    """Ask migbatchd why each job waits, in full; if it does not answer, return nothing and a remark."""
    try:
        reply = json.loads(site.daemon("/v1/waiting"))
        reasons = {**reply["waiting"], **reply["in_full"]}
        return {int(job): str(why) for job, why in reasons.items()}, ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        location = "" if site.quiet else f" at {site.config.daemon.api_socket}"
        return {}, (f"migbatch: no answer from migbatchd{location}, reasons are missing{site.detail(error)}",)


def _would(actions: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the last action that a dry run would take on each job."""
    return {
        row["job_id"]: f"dry run: would {row['kind']}, {row['before']} -> {row['after']} ({row['why']})"
        for row in actions
        if row["dry_run"]
    }


def _named(text: str | None) -> tuple[JobId, ...]:
    if text is None:
        return ()
    try:
        jobs = parse_jobs(text)
    except ReportError:
        jobs = ()
    if not jobs:
        raise Unanswerable(f"{text!r} is not a list of jobs; write 123, 123_4 or 123,124", 2)
    return jobs


def _cells(row: LoanView, time_style: str) -> tuple[str, ...]:
    format_time = time_formatter(time_style)
    texts = (row.jobid, row.user, row.account, row.profile, row.node, row.gpu, format_time(row.since), row.state)
    return (*(shown(text) if text else "-" for text in texts), str(row.restarts), shown(row.why or "-"))

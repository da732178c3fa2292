"""`migbatch why`: why a job waits, from Slurm's queue, the record and the running supply loop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_migbatch.decide.capacity.demand import slices, waits_for_loan
from slurm_migbatch.decide.dispatch.arrays import elastic_hints, read_throttle
from slurm_migbatch.mig.grant import GrantError, parse_comment
from slurm_migbatch.query import show
from slurm_migbatch.query.expected import describe as tell
from slurm_migbatch.query.expected import expect
from slurm_migbatch.query.nodes import free_counts
from slurm_migbatch.query.questions import ShowQuestion, WhyQuestion
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.show import candidate_lines, job_id, name_of, pairs_of, row_name, shown
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.lines import pair_lines
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.taskexpr import has_task
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.runquery import JobId
from slurm_migbatch.workload.catalog import CatalogError, SiteCatalog, load
from slurm_migbatch.workload.loans import LoanHints, decided, loan_hints


def answer(question: WhyQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with what a pending job waits for."""
    job, client = job_id(question.job), site.slurm()
    nodes = client.nodes() if rights.nodes else None  # first: it tells the client whether reservations matter
    queue = rights.jobs(client.jobs())
    row = find(queue, job)
    if row is None:
        with suppress(StoreError):
            show.answer(ShowQuestion(question.job), rights, site)  # raises if the record has no such job
        name = name_of(job)
        raise Unanswerable(f"Slurm does not list job {name}; `migbatch show {name}` shows its result")
    if row.unread:
        cause = f" ({row.reason})" if rights.in_full(row.uid, row.account) else ""  # it may quote the job's user
        raise Unanswerable(f"Slurm's row of job {name_of(job)} cannot be parsed{cause}, so it is left alone")
    if not row.pending:
        raise Unanswerable(
            f"job {name_of(job)} is not pending, it is {row.state.lower()}; see `migbatch show {name_of(job)}`"
        )
    elastic = loan_hints(row.comment, row.partition, row.gres, site.config.lending.partitions)
    decision, at_once, in_full = None, "", rights.in_full(row.uid, row.account)
    if in_full:
        decision, at_once = _decision(site, row), tasks_at_once(row, _throttles(site, row))
    elif elastic is not None:
        elastic = replace(elastic, min=None, max=None)
    supply = "nodes are private"
    if rights.nodes:
        rows = {other.job_id: other for other in queue}
        why = ask(site, row.job_id).shown(in_full=in_full)
        supply = rights.sentence(why, rows, lambda number: row_name(rows[number]) if number in rows else str(number))
    expected: list[tuple[str, str]] = []
    if rights.nodes and (rights.everything or "jobs" not in rights.private) and elastic is None:
        expected += _expected(site, row, queue, nodes or (), time.time())
    ahead = "pending jobs" if rights.everything or "jobs" not in rights.private else "pending jobs visible to you"
    described = describe(row, queue, nodes, decision, supply, elastic, ahead, at_once)
    return Reply(list(pair_lines([*described, *expected])))


def find(queue: Sequence[JobRow], job: JobId) -> JobRow | None:
    """Return the row of a job, of an array task, or of a component of a heterogeneous job.

    Of several, pending ones come first, and of these the ones that wait for slices.
    """
    rows = [row for row in queue if is_named(row, job)]
    return min(
        rows,
        key=lambda row: (not row.pending, not (slices(row.gres) or waits_for_loan(row.gres))),
        default=None,
    )


def is_named(row: JobRow, job: JobId) -> bool:
    """Return whether a row of the queue is a job, one of its tasks or components, or the task or component named."""
    if job.task is not None:
        # tasks that have not started share one row
        return row.array_job == job.job and has_task(row.array_task or "", job.task)
    if job.offset is not None:
        return row.het_job == job.job and row.job_id - job.job == job.offset
    return job.job in (row.job_id, row.array_job, row.het_job)


def describe(
    row: JobRow,
    queue: Sequence[JobRow],
    nodes: Sequence[NodeRow] | None,
    decision: Mapping[str, Any] | None,
    supply: str,
    elastic: LoanHints | None = None,
    others: str = "pending jobs",
    at_once: str = "",
) -> Iterator[tuple[str, str]]:
    """Yield the lines about a pending job.

    Args:
        row: Slurm's row of it.
        queue: Slurm's queue, as far as the user may see it.
        nodes: None if the user may not see them.
        decision: of the submit filter about it.
        supply: migbatchd's reason why it waits.
        elastic: for a training job that waits for a loan.
        others: which jobs of the queue those are.
        at_once: number of concurrent tasks of an elastic array, and why; empty for other jobs.
    """
    wants = slices(row.gres)
    yield "Job", f"{row_name(row)} of {row.user} in {row.partition}" + (f", {row.tasks} tasks" if row.tasks > 1 else "")
    if decision:
        yield "Requested", shown(decision.get("asked"))
        yield "Bucket", shown(decision.get("bucket") or "none: no known model")
        yield "Decision", shown((decision.get("message") or "explicit profile").removeprefix("migbatch: "))
    per_node = f" on each of {row.num_nodes} nodes" if row.num_nodes > 1 else ""
    waits = elastic is not None or waits_for_loan(row.gres)
    nothing = f"a loan of a slice{_bounds(elastic)}" if waits else "no slice"
    yield "Needs", (", ".join(f"{n} x {p}" for p, n in sorted(wants.items(), reverse=True)) or nothing) + per_node
    ahead = sum(1 for other in queue if other.pending and other.priority > row.priority)
    yield "Slurm", f"{row.reason or 'no reason yet'}; {ahead} {others} have a higher priority"
    if at_once:
        yield "At once", shown(at_once)
    if wants and nodes is not None:
        yield from pairs_of("Offered", offers(wants, nodes))
    if waits:
        yield "Lending", supply
    elif wants:
        yield "Supply", supply
    if decision:
        yield from pairs_of("Candidates", candidate_lines(decision))


def _bounds(elastic: LoanHints | None) -> str:
    if elastic is None:
        return ""
    minimum = f", at least {elastic.min}" if elastic.min is not None else ""
    return minimum + (f", at most {elastic.max}" if elastic.max is not None else "")


def offers(wants: Mapping[Any, int], nodes: Sequence[NodeRow]) -> Iterator[str]:
    """Yield where each requested profile is offered now."""
    for profile in sorted(wants, reverse=True):
        free = [(row.name, n) for row in nodes if row.open and (n := free_counts(row).get(profile.gres_type, 0))]
        listed = ", ".join(f"{n} on {name}" for name, n in free[:6]) + (" and more" if len(free) > 6 else "")
        yield f"{profile}: {listed or 'not offered at the moment'}"


@dataclass(frozen=True)
class Reason:
    """Why a job waits, for everyone who may see it; `in_full`: with what follows from its user's hints, if anything."""

    why: str
    in_full: str = ""

    def shown(self, *, in_full: bool) -> str:
        """Return what a user may see."""
        return self.in_full if in_full and self.in_full else self.why


def ask(site: QuerySite, job: int) -> Reason:
    """Return why a job waits according to the running supply loop, or a sentence that it does not answer."""
    try:
        reply = json.loads(site.daemon(f"/v1/why/{job}"))
        return Reason(str(reply["why"]), str(reply["in_full"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        location = "" if site.quiet else f" at {site.config.daemon.api_socket} ({error})"
        return Reason(f"no answer from migbatchd{location}; offers do not change")


def tasks_at_once(row: JobRow, actions: Sequence[Mapping[str, Any]] | None) -> str:
    """Return how many tasks of an elastic array run at once, and why; empty for any other job. `actions`: what was done
    to the array, oldest first; None if the record cannot be read.
    """
    if row.array_job is None or elastic_hints(row.comment) is None or actions is None:
        return ""
    applied: list[Mapping[str, Any]] = []
    for action in actions:
        if action["kind"] != "throttle" or action["dry_run"]:
            continue
        if not action["outcome"]:
            applied.append(action)
        elif applied and applied[-1]["after"] == action["after"]:  # recorded before Slurm refused it
            applied.pop()
    if applied and (row.tasks == 1 or read_throttle(applied[-1]["after"]) == row.throttle):
        return f"{applied[-1]['after']}: {applied[-1]['why']}"
    if row.throttle is not None:
        return f"{row.throttle}, set by its user"
    return "no limit: all of its tasks are needed, or the duration or throughput of a task is unknown"


def _throttles(site: QuerySite, row: JobRow) -> list[dict[str, Any]] | None:
    if row.array_job is None or elastic_hints(row.comment) is None:
        return None
    try:
        with site.record() as store:
            return list(store.actions([row.array_job]))
    except StoreError:
        return None


def _expected(
    site: QuerySite, row: JobRow, queue: Sequence[JobRow], nodes: Sequence[NodeRow], now: float
) -> Iterator[tuple[str, str]]:
    """Yield when a job can start, and what it waits for; nothing if unknown."""
    catalog = known_catalog(site)
    expected = None if catalog is None else expect(row, queue, nodes, catalog, now)
    if expected is not None:
        yield "Expected", tell(expected, now)


def known_catalog(site: QuerySite) -> SiteCatalog | None:
    """Return the catalog of the site; None if it cannot be read."""
    try:
        return load(Path(site.catalog or site.config.submit.catalog))
    except (OSError, CatalogError):
        return None


def _decision(site: QuerySite, row: JobRow) -> dict[str, Any] | None:
    try:
        grant = parse_comment(row.comment)
        name = "" if grant is None else grant.decided
    except GrantError:
        name = decided(row.comment)
    if not name:
        return None
    try:
        with site.record() as store:
            return store.decision(name)
    except StoreError:
        return None

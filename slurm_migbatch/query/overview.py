"""The cluster as `migbatch top` shows it: Slurm, the record and migbatchd at one moment, without access control.

The process that answers caches it briefly, so that many watching users cost as much as one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.decide.lending.inputs import job_views_of
from slurm_migbatch.decide.lending.loan import JobView, Loan
from slurm_migbatch.query.expected import Expected, expect
from slurm_migbatch.query.loans import waiting
from slurm_migbatch.query.nodes import NodeView, job_names
from slurm_migbatch.query.nodes import view as node_views
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.query.why import Reason, ask, known_catalog
from slurm_migbatch.report.columns import job_id
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.progress import RunProgressRow
from slurm_migbatch.store.queries import NAMED_BY, JobId, LeaseRow, RunFilter, holders, select_runs
from slurm_migbatch.store.recent import RecentEvent, recent_events

#: kinds of node events shown
EVENTS: Final = ("start", "stop", "misfit", "fault", "zombie", "cleared", "boot")
#: number of node events shown
_EVENTS: Final = 60
_NAME_S: Final = 600.0
_CATALOG_S: Final = 60.0
#: seconds for which an overview, and what a job waits for, is cached
_OVERVIEW_S: Final = 2.0
_WAIT_S: Final = 5.0
_EXPECTED_S: Final = 20.0

Slots = Sequence[tuple[str, int, int]]


@dataclass(frozen=True)
class Overview:
    """The cluster at one moment; `nodes` and `queue` are None if Slurm does not answer.

    Attributes:
        views: nodes and GPUs of the record, without leases.
        plans: for each node GPU -> slots of its plan, used and free; empty if migbatchd does not answer.
        trainings: elastic jobs in the queue.
        reasons: why training jobs wait.
        owners: uid, account and user of jobs in events and loans.
        names: of jobs in events and leases, as Slurm prints them.
    """

    at: float
    cluster: str
    nodes: Sequence[NodeRow] | None
    queue: Sequence[JobRow] | None
    views: Sequence[NodeView]
    leases: Sequence[LeaseRow]
    plans: Mapping[str, Mapping[str, Slots]]
    trainings: Mapping[int, JobView]
    loans: Sequence[Loan]
    reasons: Mapping[int, str]
    progress: Mapping[int, RunProgressRow]
    events: Sequence[RecentEvent]
    actions: Sequence[Mapping[str, Any]]
    owners: Mapping[int, tuple[int | None, str | None, str | None]]
    names: Mapping[int, str]
    remarks: tuple[str, ...] = ()


def overview(site: QuerySite) -> Overview:
    """Return a recent overview. Raises StoreError."""
    return site.kept("overview", _OVERVIEW_S, lambda: _made(site))


def expectation(site: QuerySite, seen: Overview, row: JobRow) -> Expected | None:
    """Return what a pending job waits for; None if unknown."""

    def find() -> Expected | None:
        catalog = site.kept("catalog", _CATALOG_S, lambda: known_catalog(site))
        if catalog is None:
            return None
        return expect(row, seen.queue or (), seen.nodes or (), catalog, seen.at)

    return site.kept(f"expected {row.job_id}", _EXPECTED_S, find)


def reason(site: QuerySite, row: JobRow) -> Reason:
    """Return why a job waits according to migbatchd; nothing if it does not answer."""
    if site.kept("silent", _WAIT_S, lambda: not _answers(site)):
        return Reason("")
    return site.kept(f"why {row.job_id}", _WAIT_S, lambda: ask(site, row.job_id))


def _answers(site: QuerySite) -> bool:
    try:
        site.daemon("/v1/why/0")
    except OSError:
        return False
    return True


def _made(site: QuerySite) -> Overview:
    remarks: list[str] = []
    client = site.slurm()
    nodes: Sequence[NodeRow] | None
    queue: Sequence[JobRow] | None
    try:
        nodes = client.nodes()  # first: it tells the client whether reservations matter
        queue = client.jobs()
        cluster = site.kept("cluster", _NAME_S, lambda: client.settings().get("clustername", ""))
    except SlurmError as error:
        nodes, queue, cluster = None, None, ""
        remarks.append(f"no answer from Slurm, the queue and the offers are missing{site.detail(error)}")
    trainings = job_views_of(queue or (), site.config.lending.partitions)
    reasons, waiting_remarks = waiting(site) if any(job.row.pending for job in trainings.values()) else ({}, ())
    plans = _plans(site)
    if plans is None:
        remarks.append("no answer from migbatchd, the offers of each GPU are missing")
    with site.record() as store:
        views = node_views(store, nodes, (), ())
        present = {view.name for view in views}
        leases = [lease for lease in store.leases() if lease.node in present]
        loans = [loan for row in store.loans(active=True) if (loan := Loan.from_row(row)) is not None]
        events = store.read(recent_events, EVENTS, _EVENTS)
        actions = [row for row in store.actions(limit=_EVENTS) if not row["dry_run"] and not row["outcome"]]
        jobs = {loan.job_id for loan in loans}
        progress = {row.job: row for row in store.job_progress(jobs)}
        jobs |= {int(event.payload["job"]) for event in events if isinstance(event.payload.get("job"), int)}
        owners, names = _owners(store, jobs | {int(row["job_id"]) for row in actions})
        names |= job_names(store.read(holders))
    return Overview(
        time.time(), cluster, nodes, queue, views, leases, plans or {}, trainings, loans, reasons, progress, events,
        actions, owners, names, (*remarks, *waiting_remarks),
    )  # fmt: skip


def _plans(site: QuerySite) -> dict[str, dict[str, Slots]] | None:
    try:
        plans = json.loads(site.daemon("/v1/plans"))["plans"]
        return {
            str(node): {str(gpu): [(str(p), int(s), int(n)) for p, s, n in slots] for gpu, slots in gpus.items()}
            for node, gpus in plans.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _owners(
    store: Store, jobs: Collection[int]
) -> tuple[dict[int, tuple[int | None, str | None, str | None]], dict[int, str]]:
    """Return uid, account and user of jobs, and their names, from the record."""
    if not jobs:
        return {}, {}
    wanted = RunFilter(jobs=tuple(JobId(job) for job in sorted(jobs)), duplicates=False)
    with store.reading() as connection:
        rows = [run for run, _ in select_runs(connection, wanted, (*NAMED_BY, "uid", "account", "user"))]
    return {run.job_id: (run.uid, run.account, run.user) for run in rows}, {run.job_id: job_id(run) for run in rows}

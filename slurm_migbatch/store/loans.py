"""The record of lending and dispatch: loans of slices, actions on jobs, and the data for lending's forecast.

A loan is written before Slurm is changed (the intention) and again after every change, under the same identity (job,
restart, decision time), so that a service killed in between knows what it was about to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

from slurm_migbatch.store import clean
from slurm_migbatch.store.models import Action, Run, StoredLease, StoredLoan, portions
from slurm_migbatch.store.queries import among

_MOMENTS = ("released", "started", "signalled", "checkpoint", "requeued", "ended")
_TEXTS = ("user", "account", "partition", "profile", "state", "node", "gpu", "why", "cause", "why_ended")
_LOAN = [column for column in StoredLoan.__table__.columns if column.name != "id"]
_ACTION = [column for column in Action.__table__.columns if column.name != "id"]


class InferenceUse(NamedTuple):
    """A slice of a job that was not a loan: its profile, start and end (None: still held)."""

    profile: str
    since: float
    until: float | None


def save_loans(session: Session, loans: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any]] = ()) -> None:
    """Store the current loans, new or updated, and append the actions."""
    for portion in portions(loans):
        _save(session, portion)
    for action in actions:
        session.add(
            Action(
                ts=action["ts"], job_id=action["job_id"], restart=action["restart"],
                kind=Action.fitting("kind", action["kind"]) or "?", dry_run=bool(action.get("dry_run")),
                **{name: Action.fitting(name, action.get(name)) for name in ("before", "after", "why", "outcome")},
            )
        )  # fmt: skip


def _save(session: Session, loans: Sequence[Mapping[str, Any]]) -> None:
    jobs = {int(loan["job_id"]) for loan in loans}
    known = {
        (row.job_id, row.restart, row.decided): row
        for row in session.scalars(select(StoredLoan).where(StoredLoan.job_id.in_(jobs)))
    }
    for loan in loans:
        key = (int(loan["job_id"]), int(loan["restart"]), float(loan["decided"]))
        row = known.get(key)
        if row is None:
            row = known[key] = StoredLoan(job_id=key[0], restart=key[1], decided=key[2])
            session.add(row)
        row.uid = clean.whole(loan.get("uid"))
        for name in _TEXTS:
            setattr(row, name, StoredLoan.fitting(name, loan.get(name)))
        for name in _MOMENTS:
            setattr(row, name, clean.moment(loan.get(name)))


def loans(
    connection: Connection, jobs: Collection[int] = (), *, active: bool = False, since: float | None = None
) -> list[dict[str, Any]]:
    """Return the loans by decision time: of these jobs (() for all), active ones, those decided or still active at
    `since` (unix seconds) or later.
    """
    statement = select(*_LOAN).order_by(StoredLoan.decided, StoredLoan.id)
    if jobs:
        statement = statement.where(among(StoredLoan.job_id, jobs))
    if active:
        statement = statement.where(StoredLoan.ended.is_(None))
    if since is not None:
        statement = statement.where((StoredLoan.ended.is_(None)) | (StoredLoan.ended >= since))
    return [dict(row._mapping) for row in connection.execute(statement)]


def actions(connection: Connection, jobs: Collection[int] = (), limit: int = 1000) -> list[dict[str, Any]]:
    """Return the newest actions, oldest first; only of these jobs, () for all."""
    statement = select(*_ACTION).order_by(Action.id.desc()).limit(limit)
    if jobs:
        statement = statement.where(among(Action.job_id, jobs))
    return [dict(row._mapping) for row in connection.execute(statement)][::-1]


def uses(connection: Connection, since: float) -> list[InferenceUse]:
    """Return the slices that jobs other than loans held at that time or later, by start.

    The input of the forecast.
    """
    lent = (
        select(StoredLoan.id)
        .where(StoredLoan.job_id == StoredLease.job_id, StoredLoan.restart == StoredLease.restart)
        .exists()
    )
    # a node that died with a run never reports the release
    held = StoredLease.until.is_(None) & (Run.ended.is_(None) | (Run.ended >= since))
    statement = (
        select(StoredLease.profile, StoredLease.since, func.coalesce(StoredLease.until, Run.ended))
        .join(Run, Run.id == StoredLease.run_id)
        .where(StoredLease.since.is_not(None), held | (StoredLease.until >= since), ~lent)
        .order_by(StoredLease.since)
    )
    return [InferenceUse(profile, float(began or 0), until) for profile, began, until in connection.execute(statement)]


def freed(connection: Connection, since: float) -> dict[str, float]:
    """Return when a job other than a loan last released a slice on each GPU (by UUID), not before `since`."""
    lent = (
        select(StoredLoan.id)
        .where(StoredLoan.job_id == StoredLease.job_id, StoredLoan.restart == StoredLease.restart)
        .exists()
    )
    last = (
        select(StoredLease.gpu, func.max(StoredLease.until))
        .where(StoredLease.until >= since, ~lent)
        .group_by(StoredLease.gpu)
    )
    return {gpu: float(until or 0) for gpu, until in connection.execute(last)}

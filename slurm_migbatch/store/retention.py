"""Removing what is older than the site wants to keep, a few hundred rows at a time.

Each call of `prune` is one short transaction and says where to go on. Nothing is lost by a process that dies between
two calls: the next one begins again, and finds what is left. No statement looks at more rows than it takes, those aside
that have to stay.

What stays, however old:

- a run that goes on, holds a slice, or belongs to a job, an array or a heterogeneous job of which anything goes on;
- a run whose job Slurm listed lately: the clock of a node that told of its end may be wrong;
- a decision, an action or a loan as long as a run is there that it is about: without its loan a run would count as
  demand of inference (`store.loans.uses`);
- events of a node from the beginning of its oldest lease on, and what still says how its GPUs are;
- the newest run and the newest lesson, whose numbers must not be given again, and the last offer of each node;
- nodes, journals, GPUs, imported measurements: there are as many as there is hardware, or as the site imported.

Of a removed run the predictor's figures are kept as an `OldLesson`, so that a model is not forgotten for its age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Delete, and_, delete, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from slurm_migbatch.store.lessons import teaching
from slurm_migbatch.store.models import (
    Action,
    Decision,
    Job,
    Lease,
    Loan,
    Node,
    NodeEvent,
    NodeJournal,
    OldLesson,
    Run,
    SupplyChange,
)
from slurm_migbatch.store.runquery import LAST_SPAN_CLASS, OPEN

AT_ONCE: Final = 200
"""Rows that one transaction looks at."""
_STANDING: Final = ("boot", "state", "zombie", "cleared", "fault")
"""Events that say how a node's GPUs are, as far as they are not older than its last boot."""


class PruneCursor(NamedTuple):
    """Where to go on: the stage, the part of it, and the last row that was looked at."""

    stage: int = 0
    part: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()


class Removed(NamedTuple):
    """What one step removed, by table, and where to go on; None: nothing older is left to look at."""

    rows: dict[str, int]
    place: PruneCursor | None


class _Limits(NamedTuple):
    before: float
    lessons: int
    at_once: int


class _Found(NamedTuple):
    """What one step of a stage found: rows removed by table, the last row it looked at (None: no more there)."""

    rows: dict[str, int]
    after: tuple[Any, ...] | None


def prune(session: Session, before: float, lessons: int, place: PruneCursor | None, at_once: int = AT_ONCE) -> Removed:
    """Remove some of what is older than `before` (unix seconds), from `place` on; see `Store.prune`."""
    stage, part, after = place or PruneCursor()
    parts, work = _STAGES[stage]
    left = [known for known in parts(session) if not part or known >= part]
    if not left:
        return Removed({}, _next_stage(stage))
    if left[0] != part:
        after = ()
    found = work(session, _Limits(before, lessons, at_once), left[0], after)
    if found.after is not None:
        return Removed(found.rows, PruneCursor(stage, left[0], found.after))
    return Removed(found.rows, PruneCursor(stage, left[1]) if len(left) > 1 else _next_stage(stage))


def _next_stage(stage: int) -> PruneCursor | None:
    return PruneCursor(stage + 1) if stage + 1 < len(_STAGES) else None


def _later(moment: Any, id: Any, after: tuple[Any, ...]) -> ColumnElement[bool]:
    """Return the rows after (moment, id) in this order, said so that an index on the moment finds their beginning."""
    return and_(moment >= after[0], or_(moment > after[0], id > after[1])) if after else and_(True)


def _remove(session: Session, statement: Delete) -> int:
    return int(session.connection().execute(statement).rowcount)


# -- runs, their leases and jobs ---------------------------------------------------------------------------------------


def _classes(_session: Session) -> Sequence[tuple[Any, ...]]:
    return [(number,) for number in range(OPEN + 1, LAST_SPAN_CLASS + 1)]


def _runs(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    statement = (
        select(Run.id, Run.ended, Run.job_id, Run.array_job, Run.het_job)
        .where(Run.span_class == part[0], Run.ended < limits.before, _later(Run.ended, Run.id, after))
        .order_by(Run.ended, Run.id)
        .limit(limits.at_once)
    )
    rows = session.execute(statement).all()
    if not rows:
        return _Found({}, None)
    going = _going(session, rows)
    ids = [row.id for row in rows if not going & {row.job_id, row.array_job, row.het_job}]
    expired = session.execute(_over(ids, limits.before)).all()
    count: dict[str, int] = {}
    if expired:
        ids, jobs = [row.id for row in expired], {row.job_id for row in expired}
        if taught := list(teaching(session.connection(), ids)):
            for lesson in taught:
                session.merge(lesson)
            session.flush()
            _bound_lessons(session, limits.lessons)
        count["leases"] = _remove(session, delete(Lease).where(Lease.run_id.in_(ids)))
        count["runs"] = _remove(session, delete(Run).where(Run.id.in_(ids)))
        jobless = ~exists().where(Run.job_id == Job.job_id)
        count["jobs"] = _remove(session, delete(Job).where(Job.job_id.in_(jobs), Job.live.is_(False), jobless))
    last = rows[-1]
    return _Found(count, (last.ended, last.id))


def _going(session: Session, rows: Sequence[Any]) -> set[int]:
    """Return the jobs, arrays and heterogeneous jobs of these rows of which a run goes on."""
    named = {id for row in rows for id in (row.job_id, row.array_job, row.het_job) if id is not None}
    columns = (Run.job_id, Run.array_job, Run.het_job)
    # open runs are few; wrapped, the columns keep databases from going through all tasks of an array instead
    of_these = or_(*(func.coalesce(column, 0).in_(named) for column in columns))
    open_runs = session.execute(select(*columns).where(Run.span_class == OPEN, of_these))
    return {id for row in open_runs for id in row if id is not None}


def _over(ids: Sequence[int], before: float) -> Any:
    """Return id and job of those runs that are over in every respect."""
    newest = (select(func.max(Run.id)).scalar_subquery(), select(func.max(Run.lesson)).scalar_subquery())
    return select(Run.id, Run.job_id).where(
        Run.id.in_(ids),
        Run.id != newest[0],
        func.coalesce(Run.lesson, 0) != func.coalesce(newest[1], -1),
        ~exists().where(Lease.run_id == Run.id, or_(Lease.until.is_(None), Lease.until >= before)),
        ~exists().where(Job.job_id == Run.job_id, or_(Job.live, Job.seen >= before)),
        ~exists().where(Loan.job_id == Run.job_id, Loan.ended.is_(None)),
    )


def _bound_lessons(session: Session, most: int) -> None:
    """Leave the newest lessons of removed runs, as many as are learned from."""
    oldest = session.scalar(select(OldLesson.number).order_by(OldLesson.number.desc()).offset(most).limit(1))
    if oldest is not None:
        _remove(session, delete(OldLesson).where(OldLesson.number <= oldest))


# -- what is about runs ------------------------------------------------------------------------------------------------


def _whole(_session: Session) -> Sequence[tuple[Any, ...]]:
    return [(0,)]


def _step(
    session: Session, limits: _Limits, moment: Any, id: Any, after: tuple[Any, ...], unneeded: ColumnElement[bool]
) -> _Found:
    """Remove the unneeded ones of the next rows by (moment, id)."""
    table = id.class_
    old = select(id, moment).where(moment < limits.before, _later(moment, id, after))
    rows = session.execute(old.order_by(moment, id).limit(limits.at_once)).all()
    if not rows:
        return _Found({}, None)
    expired = session.scalars(select(id).where(id.in_([row[0] for row in rows]), unneeded)).all()
    count = _remove(session, delete(table).where(id.in_(expired))) if expired else 0
    return _Found({table.__tablename__: count}, (rows[-1][1], rows[-1][0]))


def _loans(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    alone = ~exists().where(Run.job_id == Loan.job_id, Run.restart == Loan.restart)
    return _step(session, limits, Loan.ended, Loan.id, after, alone)


def _actions(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    task = aliased(Run)
    alone = and_(
        ~exists().where(Run.job_id == Action.job_id),
        ~exists().where(task.array_job == Action.job_id),
        ~exists().where(Job.job_id == Action.job_id, Job.live),
    )
    return _step(session, limits, Action.ts, Action.id, after, alone)


def _decisions(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    return _step(session, limits, Decision.ts, Decision.id, after, ~exists().where(Run.decision == Decision.id))


# -- what nodes told and were given ------------------------------------------------------------------------------------


def _journals(session: Session) -> Sequence[tuple[Any, ...]]:
    found = session.execute(select(NodeJournal.node, NodeJournal.journal)).all()
    return sorted(tuple(row) for row in found)


def _events(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    node, name = part
    journal = session.get_one(NodeJournal, part)
    since = session.scalar(select(func.min(Lease.since)).where(Lease.until.is_(None), Lease.node == node))
    limit = limits.before if since is None else min(limits.before, since)
    statement = (
        select(NodeEvent.id, NodeEvent.seq, NodeEvent.ts, NodeEvent.received, NodeEvent.kind)
        .where(NodeEvent.node == node, NodeEvent.journal == name, NodeEvent.seq <= journal.contiguous)
        .where(NodeEvent.seq > (after[0] if after else 0))
        .order_by(NodeEvent.seq)
        .limit(limits.at_once)
    )
    rows = session.execute(statement).all()
    # the clock of a node may be wrong: by this host's own it is known where to end
    old = list(takewhile(lambda row: row.received < limit, rows))
    standing = _standing(session, node) if any(row.kind in _STANDING for row in old) else 0
    expired = [row for row in old if row.ts < limit and (row.kind not in _STANDING or row.id < standing)]
    if expired:
        journal.forgotten = max(journal.forgotten or 0, expired[-1].seq)
        session.flush()
        _remove(session, delete(NodeEvent).where(NodeEvent.id.in_([row.id for row in expired])))
    more = bool(rows) and len(old) == len(rows)
    return _Found({"node_events": len(expired)}, (rows[-1].seq,) if more else None)


def _standing(session: Session, node: str) -> int:
    """Return the event from which on it is told how a node's GPUs are; it goes through all events of the node."""
    newest = select(func.max(NodeEvent.id)).where(NodeEvent.node == node, NodeEvent.kind.in_(("boot", "state")))
    return session.scalar(newest) or 0


def _supplied(session: Session) -> Sequence[tuple[Any, ...]]:
    return sorted((node,) for node in session.scalars(select(Node.node)))


def _supply(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _Found:
    here = SupplyChange.node == part[0]
    newest = session.scalar(select(func.max(SupplyChange.id)).where(here))
    statement = (
        select(SupplyChange.id, SupplyChange.ts)
        .where(here, SupplyChange.ts < limits.before, _later(SupplyChange.ts, SupplyChange.id, after))
        .order_by(SupplyChange.ts, SupplyChange.id)
        .limit(limits.at_once)
    )
    rows = session.execute(statement).all()
    if not rows:
        return _Found({}, None)
    expired = [row.id for row in rows if row.id != newest]
    count = _remove(session, delete(SupplyChange).where(SupplyChange.id.in_(expired))) if expired else 0
    return _Found({"supply_changes": count}, (rows[-1].ts, rows[-1].id))


_Parts = Callable[[Session], Sequence[tuple[Any, ...]]]
_Work = Callable[[Session, _Limits, tuple[Any, ...], tuple[Any, ...]], _Found]

#: runs first: what is about them goes once they are gone
_STAGES: Final[tuple[tuple[_Parts, _Work], ...]] = (
    (_classes, _runs),
    (_whole, _loans),
    (_whole, _actions),
    (_whole, _decisions),
    (_journals, _events),
    (_supplied, _supply),
)

"""Removal of old rows, a few hundred at a time.

Each call of `prune` is one short transaction and returns where to continue. A process that dies between two calls loses
nothing: the next one starts again, and finds the rest. No statement examines more rows than it removes, except those
that have to stay.

What stays, regardless of age:

- a run that is running, holds a slice, or belongs to a job, an array or a heterogeneous job that is partly running;
- a run whose job Slurm listed recently: the clock of a node that reported its end may be wrong;
- a decision, an action or a loan as long as its run exists: without its loan a run would count as demand of inference
  (`store.loans.uses`). A decision without a run after a day is of a submission that became no job: Slurm refused it,
  or only tested it (`sbatch --test-only`), which no limit on jobs restricts. These are removed then;
- events of a node since the start of its oldest lease, and those that describe its current GPUs; except progress
  reports, which are removed after a day: what they say is kept with the run, and a run may send hundreds a day;
- the newest run and the newest lesson, whose numbers must not be reused, and the last offer of each node;
- nodes, their current journals, GPUs, imported measurements: bounded by the hardware, or by the site's imports.

The predictor's figures of a removed run are kept as an `OldLesson`, so that a model is not forgotten because of its
age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Delete, and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from slurm_migbatch.store.lessons import teaching
from slurm_migbatch.store.models import (
    Action,
    Job,
    NodeEvent,
    NodeJournal,
    OldLesson,
    Run,
    StoredDecision,
    StoredLease,
    StoredLoan,
    StoredNode,
    SupplyChange,
)
from slurm_migbatch.store.runquery import LAST_SPAN_CLASS, OPEN

AT_ONCE: Final = 200
"""Rows examined per transaction."""
_UNUSED_S: Final = 86400.0
"""Seconds before `reports` in which decisions without a run are looked for, so that no pass examines all decisions."""
_STANDING: Final = ("boot", "state", "zombie", "cleared", "fault")
"""Events that describe a node's GPUs, if they are not older than its last boot."""


class PruneCursor(NamedTuple):
    """Where to continue: the stage, its part, and the last row examined."""

    stage: int = 0
    part: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()


class Removed(NamedTuple):
    """What one step removed, by table, and where to continue; None: finished."""

    rows: dict[str, int]
    place: PruneCursor | None


class _Limits(NamedTuple):
    before: float
    lessons: int
    reports: float


class _StepResult(NamedTuple):
    """Result of one step of a stage: rows removed by table, the last row examined (None: no more)."""

    rows: dict[str, int]
    after: tuple[Any, ...] | None


def prune(session: Session, before: float, lessons: int, place: PruneCursor | None, reports: float) -> Removed:
    """Remove some of the rows that are older than `before` (unix seconds), from `place` on; see `Store.prune`."""
    stage, part, after = place or PruneCursor()
    parts, work = _STAGES[stage]
    remaining = parts(session, part)
    if not remaining:
        return Removed({}, _next_stage(stage))
    if remaining[0] != part:
        after = ()
    result = work(session, _Limits(before, lessons, reports), remaining[0], after)
    if result.after is not None:
        return Removed(result.rows, PruneCursor(stage, remaining[0], result.after))
    return Removed(result.rows, PruneCursor(stage, remaining[1]) if len(remaining) > 1 else _next_stage(stage))


def newest_end(connection: Connection) -> float | None:
    """Return when the last of the ended runs ended, unix seconds; None without any."""
    last = select(func.max(Run.ended))
    ends = [connection.scalar(last.where(Run.span_class == number)) for number in range(OPEN + 1, LAST_SPAN_CLASS + 1)]
    return max((end for end in ends if end is not None), default=None)


def _next_stage(stage: int) -> PruneCursor | None:
    return PruneCursor(stage + 1) if stage + 1 < len(_STAGES) else None


def _following(moment: Any, id: Any, after: tuple[Any, ...]) -> ColumnElement[bool]:
    """Return the condition for rows that follow `after`, a (time, id), in a form that can use an index on the time."""
    return and_(moment >= after[0], or_(moment > after[0], id > after[1])) if after else and_(True)


def _remove(session: Session, statement: Delete) -> int:
    return int(session.connection().execute(statement).rowcount)


# -- runs, their leases and jobs ---------------------------------------------------------------------------------------


def _classes(_session: Session, part: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    return [(number,) for number in range(part[0] if part else OPEN + 1, LAST_SPAN_CLASS + 1)]


def _runs(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    """Remove finished runs with their slices and jobs; keep figures of those that the predictor learns from."""
    statement = (
        select(Run.id, Run.ended, Run.job_id, Run.array_job, Run.het_job)
        .where(Run.span_class == part[0], Run.ended < limits.before, _following(Run.ended, Run.id, after))
        .order_by(Run.ended, Run.id)
        .limit(AT_ONCE)
    )
    rows = session.execute(statement).all()
    if not rows:
        return _StepResult({}, None)
    running = _jobs_still_running(session, rows)
    ids = [row.id for row in rows if not running & {row.job_id, row.array_job, row.het_job}]
    expired = session.execute(_finished_runs(ids, limits.before)).all()
    removed: dict[str, int] = {}
    if expired:
        ids, jobs = [row.id for row in expired], {row.job_id for row in expired}
        if old_lessons := list(teaching(session.connection(), ids)):
            for lesson in old_lessons:
                session.merge(lesson)
            session.flush()
            _bound_lessons(session, limits.lessons)
        removed["leases"] = _remove(session, delete(StoredLease).where(StoredLease.run_id.in_(ids)))
        removed["runs"] = _remove(session, delete(Run).where(Run.id.in_(ids)))
        jobless = ~exists().where(Run.job_id == Job.job_id)
        removed["jobs"] = _remove(session, delete(Job).where(Job.job_id.in_(jobs), Job.live.is_(False), jobless))
    last = rows[-1]
    return _StepResult(removed, (last.ended, last.id))


def _jobs_still_running(session: Session, rows: Sequence[Any]) -> set[int]:
    """Return the jobs, arrays and heterogeneous jobs of these rows that have a running run."""
    ids = {id for row in rows for id in (row.job_id, row.array_job, row.het_job) if id is not None}
    columns = (Run.job_id, Run.array_job, Run.het_job)
    # open runs are few; with coalesce() databases search these, instead of scanning all tasks of an array
    matching = or_(*(func.coalesce(column, 0).in_(ids) for column in columns))
    open_runs = session.execute(select(*columns).where(Run.span_class == OPEN, matching))
    return {id for row in open_runs for id in row if id is not None}


def _finished_runs(ids: Sequence[int], before: float) -> Any:
    """Return the SELECT of id and job of those runs that are completely finished."""
    newest = (select(func.max(Run.id)).scalar_subquery(), select(func.max(Run.lesson)).scalar_subquery())
    return select(Run.id, Run.job_id).where(
        Run.id.in_(ids),
        Run.id != newest[0],
        func.coalesce(Run.lesson, 0) != func.coalesce(newest[1], -1),
        ~exists().where(StoredLease.run_id == Run.id, or_(StoredLease.until.is_(None), StoredLease.until >= before)),
        ~exists().where(Job.job_id == Run.job_id, or_(Job.live, Job.seen >= before)),
        ~exists().where(StoredLoan.job_id == Run.job_id, StoredLoan.ended.is_(None)),
    )


def _bound_lessons(session: Session, most: int) -> None:
    """Keep the newest lessons of removed runs, as many as are used for learning."""
    oldest = session.scalar(select(OldLesson.number).order_by(OldLesson.number.desc()).offset(most).limit(1))
    if oldest is not None:
        _remove(session, delete(OldLesson).where(OldLesson.number <= oldest))


# -- rows about runs -------------------------------------------------------------------------------------------------


def _whole_table(_session: Session, _part: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    return [(0,)]


def _step(
    session: Session,
    limits: _Limits,
    moment: Any,
    id: Any,
    after: tuple[Any, ...],
    unneeded: ColumnElement[bool],
    *here: ColumnElement[bool],
) -> _StepResult:
    """Remove the unneeded ones of the next rows, by (time, id), that meet the conditions `here`."""
    table = id.class_
    old = select(id, moment).where(*here, moment < limits.before, _following(moment, id, after))
    rows = session.execute(old.order_by(moment, id).limit(AT_ONCE)).all()
    if not rows:
        return _StepResult({}, None)
    expired = session.scalars(select(id).where(id.in_([row[0] for row in rows]), unneeded)).all()
    count = _remove(session, delete(table).where(id.in_(expired))) if expired else 0
    return _StepResult({table.__tablename__: count}, (rows[-1][1], rows[-1][0]))


def _loans(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    alone = ~exists().where(Run.job_id == StoredLoan.job_id, Run.restart == StoredLoan.restart)
    return _step(session, limits, StoredLoan.ended, StoredLoan.id, after, alone)


def _actions(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    task = aliased(Run)
    alone = and_(
        ~exists().where(Run.job_id == Action.job_id),
        ~exists().where(task.array_job == Action.job_id),
        ~exists().where(Job.job_id == Action.job_id, Job.live),
    )
    return _step(session, limits, Action.ts, Action.id, after, alone)


def _decisions(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    return _step(
        session, limits, StoredDecision.ts, StoredDecision.id, after, ~exists().where(Run.decision == StoredDecision.id)
    )


def _unused(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    """Remove decisions of submissions that became no job; their runs would be recorded within seconds."""
    recent = limits._replace(before=limits.reports)
    start = after or (limits.reports - _UNUSED_S, "")
    return _step(
        session, recent, StoredDecision.ts, StoredDecision.id, start, ~exists().where(Run.decision == StoredDecision.id)
    )


# -- events and offers of nodes --------------------------------------------------------------------------------------


def _journals(session: Session, part: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    # a node without a disk of its own has a new journal after each boot: not all of them for each step
    node, name = NodeJournal.node, NodeJournal.journal
    rest = and_(node >= part[0], or_(node > part[0], name >= part[1])) if part else and_(True)
    return [tuple(row) for row in session.execute(select(node, name).where(rest).order_by(node, name).limit(2))]


def _events(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    """Remove old events of one journal of a node, and the journal if it was replaced and has no events."""
    node, name = part
    journal = session.get_one(NodeJournal, part)
    since = session.scalar(
        select(func.min(StoredLease.since)).where(StoredLease.until.is_(None), StoredLease.node == node)
    )
    limit = limits.before if since is None else min(limits.before, since)
    replaced = journal.superseded is not None and journal.superseded < limits.before
    statement = (
        select(NodeEvent.id, NodeEvent.seq, NodeEvent.ts, NodeEvent.received, NodeEvent.kind)
        .where(NodeEvent.node == node, NodeEvent.journal == name)
        .where(and_(True) if replaced else NodeEvent.seq <= journal.contiguous)  # a gap is filled no more
        .where(NodeEvent.seq > (after[0] if after else 0))
        .order_by(NodeEvent.seq)
        .limit(AT_ONCE)
    )
    rows = session.execute(statement).all()
    # the clock of a node may be wrong: this host's own determines where to stop
    old = list(takewhile(lambda row: row.received < limit, rows))
    standing = _standing(session, node) if any(row.kind in _STANDING for row in old) else 0
    expired = [row for row in old if row.ts < limit and (row.kind not in _STANDING or row.id < standing)]
    if expired:
        journal.forgotten = max(journal.forgotten or 0, expired[-1].seq)
        session.flush()
        _remove(session, delete(NodeEvent).where(NodeEvent.id.in_([row.id for row in expired])))
    if replaced and not rows and not after:
        session.delete(journal)
        # what is known of the node does not begin with the next journal (`store.capacity`)
        others = update(NodeJournal).where(NodeJournal.node == node, NodeJournal.forgotten.is_(None))
        session.execute(others.values(forgotten=0))
        return _StepResult({"journals": 1}, None)
    unfinished = bool(rows) and len(old) == len(rows)
    return _StepResult({"node_events": len(expired)}, (rows[-1].seq,) if unfinished else None)


def _reports(session: Session, limits: _Limits, _part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    """Remove progress reports that are stored in their runs, which is so unless an event before them is missing."""
    journal = exists().where(NodeJournal.node == NodeEvent.node, NodeJournal.journal == NodeEvent.journal)
    applied = journal.where(or_(NodeEvent.seq <= NodeJournal.contiguous, NodeJournal.superseded < limits.reports))
    unneeded = and_(NodeEvent.received < limits.reports, applied)
    old = limits._replace(before=limits.reports)
    return _step(session, old, NodeEvent.ts, NodeEvent.id, after, unneeded, NodeEvent.kind == "progress")


def _standing(session: Session, node: str) -> int:
    """Return the first event that describes the node's current GPUs; scans all events of the node."""
    newest = select(func.max(NodeEvent.id)).where(NodeEvent.node == node, NodeEvent.kind.in_(("boot", "state")))
    return session.scalar(newest) or 0


def _supplied(session: Session, part: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    rest = StoredNode.node >= part[0] if part else and_(True)
    return [(node,) for node in session.scalars(select(StoredNode.node).where(rest).order_by(StoredNode.node).limit(2))]


def _supply(session: Session, limits: _Limits, part: tuple[Any, ...], after: tuple[Any, ...]) -> _StepResult:
    of_node = SupplyChange.node == part[0]
    newest = session.scalar(select(func.max(SupplyChange.id)).where(of_node))
    return _step(session, limits, SupplyChange.ts, SupplyChange.id, after, SupplyChange.id != newest, of_node)


#: returns the next parts, from the given one on (all for ()); two at least, if there are
_Parts = Callable[[Session, tuple[Any, ...]], Sequence[tuple[Any, ...]]]
_Work = Callable[[Session, _Limits, tuple[Any, ...], tuple[Any, ...]], _StepResult]

#: runs first: rows about them are removed afterwards
_STAGES: Final[tuple[tuple[_Parts, _Work], ...]] = (
    (_classes, _runs),
    (_whole_table, _loans),
    (_whole_table, _actions),
    (_whole_table, _decisions),
    (_journals, _events),
    (_supplied, _supply),
    (_whole_table, _reports),
    (_whole_table, _unused),
)

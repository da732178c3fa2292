"""Reading the store: runs in a window of time, leases, inventory, decisions. Each is one statement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Label, and_, false, literal, or_, select
from sqlalchemy.engine import Row
from sqlalchemy.orm import InstrumentedAttribute, aliased

from slurm_migbatch.store.models import LAST_SPAN_CLASS, OPEN, Action, DatabaseIdentity, Decision, Gpu, Lease, Run

#: columns of a run and of a slice that can be asked for, by name
RUN_FIELDS = {column.key: column for column in Run.__table__.columns}
SLICE_FIELDS = {column.key: column for column in Lease.__table__.columns}
_CLOCKS_S = 60.0


def _retyped(field: InstrumentedAttribute[Any], *, last: bool) -> Label[Any]:
    """Return a field of the first or last time that a run was given another profile while it waited; none: null.

    A change of an array's tasks is kept under the array (whose id the last task has, too), so that of a task it is one
    that led to what the task got.
    """
    mine = or_(
        and_(Run.array_job.is_(None), Action.job_id == Run.job_id),
        and_(Action.job_id.in_([Run.job_id, Run.array_job]), Action.after == Run.profile),
    )
    order = Action.id.desc() if last else Action.id
    done = and_(Action.kind == "retype", Action.restart == Run.restart, Action.dry_run.is_(False))
    # Slurm may have begun its job ids anew; moments are of several clocks
    then = and_(
        or_(Run.submitted.is_(None), Action.ts >= Run.submitted - _CLOCKS_S),
        or_(Run.started.is_(None), Action.ts <= Run.started + _CLOCKS_S),
    )
    statement = select(field).where(mine, done, Action.outcome.is_(None), then).order_by(order).limit(1)
    return statement.correlate(Run).scalar_subquery().label(f"retyped_{field.key}")


#: what can be asked for of a run besides: from which profile it was moved to which, and why, while it waited
RETYPED_FIELDS = {
    f"retyped_{field.key}": _retyped(field, last=last)
    for field, last in ((Action.before, False), (Action.after, True), (Action.why, True))
}

#: columns of a LeaseRow, in its order
_LEASE_ROW = ("node", "gpu", "profile", "slot_start", "slot_size", "job_id", "restart", "since", "until", "mig_uuid")

#: states of runs that still go on
LIVE_STATES = frozenset({"PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "STOPPED", "SIGNALING"})


@dataclass(frozen=True)
class JobId:
    """A job as users name it: 12, 12_3 (array task), 12+1 (component of a heterogeneous job)."""

    job: int
    task: str | None = None
    offset: int | None = None


@dataclass(frozen=True)
class RunFilter:
    """Which runs are wanted; an empty tuple or None does not filter. All conditions must hold.

    Attributes:
        start, end: window in unix seconds, both included. Without `states`, runs that existed in it are wanted;
            with `states`, those that were in one of them at some moment of it (as sacct has it).
        duplicates: earlier runs of a job id too (requeues, numbers that Slurm used again).
        only: (user, accounts): runs of this user id or charged to one of these accounts, whatever else is wanted.
    """

    jobs: tuple[JobId, ...] = ()
    users: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    start: float | None = None
    end: float | None = None
    duplicates: bool = True
    only: tuple[int, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class LeaseRow:
    """One slice held by one run. `until` is None while it is held."""

    node: str
    gpu: str
    profile: str
    start: int
    size: int
    job: int
    restart: int
    since: float | None
    until: float | None = None
    mig_uuid: str | None = None


@dataclass(frozen=True)
class RunRow:
    """One run: every column of the table by name, and its slices likewise."""

    run: dict[str, Any]
    slices: tuple[dict[str, Any], ...] = field(default=())


def select_runs(
    connection: Connection, wanted: RunFilter, run_fields: Collection[str], slice_fields: Collection[str] = ()
) -> Iterator[tuple[Row[Any], Sequence[Row[Any]]]]:
    """Yield the wanted runs by job id, each with its slices, in one statement that fetches no other fields.

    Args:
        run_fields: names in RUN_FIELDS and RETYPED_FIELDS; "id" comes too.
        slice_fields: names in SLICE_FIELDS, which appear as slice_<name>; () does not look at slices at all.

    Yields:
        (row with the run's fields, rows with its slices' fields). With slices, the first slice's row is the run's.
    """
    columns: list[ColumnElement[Any]] = [Run.__table__.c.id]
    columns += [RUN_FIELDS[name] if name in RUN_FIELDS else RETYPED_FIELDS[name] for name in run_fields if name != "id"]
    conditions = list(conditions_of(wanted))
    order = [Run.job_id, Run.reuse, Run.restart]
    if not slice_fields:
        for row in connection.execute(select(*columns).where(*conditions).order_by(*order)):
            yield row, ()
        return
    columns += [Lease.__table__.c.id.label("slice_id")]
    columns += [SLICE_FIELDS[name].label(f"slice_{name}") for name in slice_fields if name != "id"]
    held = and_(Lease.run_id == Run.id, or_(Lease.outcome.is_(None), Lease.outcome != "moved"))
    statement = select(*columns).select_from(Run).outerjoin(Lease, held).where(*conditions)
    rows = connection.execute(statement.order_by(*order, Lease.node, Lease.position, Lease.id))
    position = len(columns) - len([name for name in slice_fields if name != "id"]) - 1
    for _, group in groupby(rows, key=itemgetter(0)):
        lines = list(group)
        yield lines[0], lines if lines[0][position] is not None else ()


def conditions_of(wanted: RunFilter) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions on `Run` that a filter means; all must hold."""
    if wanted.only is not None:
        uid, accounts = wanted.only
        yield or_(Run.uid == uid, Run.account.in_(accounts))
    if wanted.jobs:
        yield or_(*_named(wanted.jobs))
    if wanted.users or wanted.uids:
        yield or_(Run.user.in_(wanted.users), Run.uid.in_(wanted.uids))
    if wanted.accounts:
        yield Run.account.in_(wanted.accounts)
    if wanted.partitions:
        yield Run.partition.in_(wanted.partitions)
    if wanted.nodes:
        held = aliased(Lease)
        yield select(held.id).where(held.run_id == Run.id, held.node.in_(wanted.nodes)).exists()
    if not wanted.duplicates:
        yield Run.latest.is_(True)
    # a list of jobs is short: its own indexes serve it best
    narrow = not wanted.jobs
    if wanted.states:
        yield or_(*_in_states(wanted, narrow))
    elif wanted.start is not None or wanted.end is not None:
        yield overlapping(wanted.start, wanted.end, narrow=narrow)


def _named(jobs: Collection[JobId]) -> Iterator[ColumnElement[bool]]:
    """Yield few conditions for many jobs: SQLite takes up to a thousand."""
    whole = [id.job for id in jobs if id.task is None and id.offset is None]
    if whole:
        yield or_(Run.job_id.in_(whole), Run.array_job.in_(whole), Run.het_job.in_(whole))
    tasks: dict[int, list[str]] = {}
    parts: dict[int, list[int]] = {}
    for id in jobs:
        if id.task is not None:
            tasks.setdefault(id.job, []).append(id.task)
        elif id.offset is not None:
            parts.setdefault(id.job, []).append(id.offset)
    for job, names in tasks.items():
        yield and_(Run.array_job == job, Run.array_task.in_(names))
    for job, offsets in parts.items():
        yield and_(Run.het_job == job, Run.het_offset.in_(offsets))


def overlapping(start: float | None, end: float | None, *, narrow: bool = True) -> ColumnElement[bool]:
    """Return the runs that existed at some moment from `start` to `end`.

    With `narrow` it is said in a way that an index on (span_class, ended) answers in time that grows with the number
    of matches, not of runs: a run of a class whose runs last less than 4**c seconds and that began by `end` has ended
    by end + 4**c.
    """
    begins = Run.began <= end if end is not None else literal(True)
    low = Run.ended >= start if start is not None else Run.ended.is_not(None)
    if not narrow:
        return and_(begins, or_(Run.ended.is_(None), low))
    ranges = [Run.span_class == OPEN]
    for c in range(1, LAST_SPAN_CLASS + 1):
        high = Run.ended <= end + 4.0**c if end is not None and c < LAST_SPAN_CLASS else literal(True)
        ranges.append(and_(Run.span_class == c, low, high))
    return and_(begins, or_(*ranges))


def _in_states(wanted: RunFilter, narrow: bool) -> Iterator[ColumnElement[bool]]:
    start, end = wanted.start, wanted.end
    window = overlapping(start, end, narrow=narrow) if start is not None or end is not None else literal(True)
    states = set(wanted.states)
    if "PENDING" in states:
        waited = or_(Run.started.is_(None), Run.started >= start) if start is not None else Run.submitted.is_not(None)
        yield and_(window, waited)
    if "RUNNING" in states:
        ran = Run.started <= end if end is not None else Run.started.is_not(None)
        yield and_(window, ran)
    live = states & (LIVE_STATES - {"PENDING", "RUNNING"})
    if live:
        yield and_(window, Run.state.in_(live))
    if final := states - LIVE_STATES:
        ended: list[ColumnElement[bool]] = [Run.state.in_(final), Run.ended.is_not(None)]
        if start is not None:
            ended.append(Run.ended >= start)
        if end is not None:
            ended.append(Run.ended <= end)
        yield and_(window, *ended)
    yield false()


def runs(connection: Connection, wanted: RunFilter) -> list[RunRow]:
    """Return the wanted runs with all their fields."""
    names, slices = list(RUN_FIELDS), list(SLICE_FIELDS)
    found = []
    for row, lines in select_runs(connection, wanted, names, slices):
        fields = row._mapping
        found.append(
            RunRow(
                {name: fields[name] for name in names},
                tuple({name: line._mapping[f"slice_{name}"] for name in slices} for line in lines),
            )
        )
    return found


def leases(connection: Connection, *, active: bool = True) -> list[LeaseRow]:
    """Return the slices held, by node, GPU and place."""
    statement = select(*(SLICE_FIELDS[name] for name in _LEASE_ROW)).order_by(
        Lease.node, Lease.gpu, Lease.slot_start, Lease.id
    )
    if active:
        statement = statement.where(Lease.until.is_(None))
    return [LeaseRow(*row) for row in connection.execute(statement)]


def identity(connection: Connection) -> str:
    """Return which database this is."""
    return str(connection.scalar(select(DatabaseIdentity.id)) or "")


def inventory(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """Return the present GPUs by node, as their inventory events described them."""
    found: dict[str, list[dict[str, Any]]] = {}
    columns = (Gpu.node, Gpu.uuid, Gpu.minor, Gpu.gpu_index, Gpu.name, Gpu.mig, Gpu.geometry, Gpu.facts)
    statement = select(*columns).where(Gpu.present).order_by(Gpu.node, Gpu.gpu_index, Gpu.uuid)
    for node, uuid, minor, index, name, mig, geometry, facts in connection.execute(statement):
        own = {"uuid": uuid, "minor": minor, "index": index, "name": name, "mig": mig, "geometry": geometry}
        found.setdefault(node, []).append({**(facts if isinstance(facts, dict) else {}), **own})
    return found


def decision(connection: Connection, id: str) -> dict[str, Any] | None:
    """Return one decision with all its fields."""
    row = connection.execute(select(*Decision.__table__.columns).where(Decision.id == id)).first()
    return dict(row._mapping) if row is not None else None

"""Reading the store over SQLAlchemy: runs, leases, inventory, decisions. Each is one statement."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    TextClause,
    and_,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.orm import InstrumentedAttribute

from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.store import runquery
from slurm_migbatch.store.models import (
    DatabaseIdentity,
    Run,
    StoredDecision,
    StoredGpu,
    StoredLease,
    StoredNode,
    SupplyChange,
)
from slurm_migbatch.store.runquery import RUN_FIELDS, SLICE_FIELDS
from slurm_migbatch.store.runquery import JobId as JobId
from slurm_migbatch.store.runquery import RunFilter as RunFilter

#: a lease that was replaced at a restart of the node's hooks is not counted together with its replacement
COUNTED: ColumnElement[bool] = or_(StoredLease.outcome.is_(None), StoredLease.outcome != "moved")
#: a run that does not wait according to Slurm; root of a node can report slices and figures of one that does
PLACED: ColumnElement[bool] = Run.placed.is_not(False)
ON_ITS_NODES: ColumnElement[bool] = literal_column(runquery.ON_ITS_NODES, Boolean())
#: a run that Slurm has listed; root of a node can report any other, of any user, and nothing is learned from it
LISTED: ColumnElement[bool] = and_(or_(Run.submitted.is_not(None), Run.gid.is_not(None)), PLACED)
#: the fields of a run that its name, as Slurm prints it, depends on
NAMED_BY = ("job_id", "array_job", "array_task", "het_job", "het_offset")
_NAMED = re.compile(r":(v\d+)")


@dataclass(frozen=True)
class LeaseRow:
    """A slice that a run holds."""

    node: str
    gpu: str
    profile: str
    start: int
    size: int
    job: int
    restart: int
    since: float | None


@dataclass(frozen=True)
class RunRow:
    """One run: every column of the table by name, and its slices likewise."""

    run: dict[str, Any]
    slices: tuple[dict[str, Any], ...] = ()


def select_runs(
    connection: Connection,
    wanted: RunFilter,
    run_fields: Collection[str],
    slice_fields: Collection[str] = (),
    *,
    by_array: bool = False,
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the selected runs as `runquery.select_runs` does, over a connection of SQLAlchemy."""
    return runquery.select_runs(_executing(connection), wanted, run_fields, slice_fields, by_array=by_array)


def any_run(connection: Connection, wanted: RunFilter) -> bool:
    """Return whether there is any such run."""
    return runquery.any_run(_executing(connection), wanted)


def _executing(connection: Connection) -> runquery.Execute:
    return lambda statement, values: connection.execute(text(statement), dict(values))


def conditions_of(wanted: RunFilter) -> Iterator[TextClause]:
    """Yield the conditions on `Run` of a filter, for other statements; all must hold."""
    values = runquery.Values()
    for condition in list(runquery.conditions(wanted, values)):
        yield _clause(condition, values)


def overlapping(start: float | None, end: float | None) -> TextClause:
    """Return the condition on `Run` that it existed at some time from `start` to `end`, see `runquery`."""
    values = runquery.Values()
    return _clause(runquery.overlapping(start, end, values), values)


def among(column: InstrumentedAttribute[Any], chosen: Collection[Any]) -> TextClause:
    """Return the condition that a column has one of these values, of which there may be many, see `runquery.Values`."""
    values = runquery.Values()
    return _clause(f"{column.class_.__tablename__}.{column.key} IN {values.all(chosen)}", values)


def _clause(condition: str, values: runquery.Values) -> TextClause:
    names = dict.fromkeys(_NAMED.findall(condition))
    # unique: clauses of one statement may have the same names
    return text(f"({condition})").bindparams(*(bindparam(name, values.found[name], unique=True) for name in names))


def runs(connection: Connection, wanted: RunFilter) -> list[RunRow]:
    """Return the selected runs with all their fields, those of an array together."""
    return [
        RunRow(
            {name: getattr(row, name) for name in RUN_FIELDS},
            tuple({name: getattr(slice_row, f"slice_{name}") for name in SLICE_FIELDS} for slice_row in lines),
        )
        for row, lines in select_runs(connection, wanted, RUN_FIELDS, SLICE_FIELDS, by_array=True)
    ]


def leases(connection: Connection) -> list[LeaseRow]:
    """Return the slices held, by node, GPU and placement."""
    columns = (
        StoredLease.node, StoredLease.gpu, StoredLease.profile, StoredLease.slot_start, StoredLease.slot_size,
        StoredLease.job_id, StoredLease.restart, StoredLease.since,
    )  # fmt: skip
    statement = select(*columns).where(StoredLease.until.is_(None))
    statement = statement.order_by(StoredLease.node, StoredLease.gpu, StoredLease.slot_start, StoredLease.id)
    return [LeaseRow(*row) for row in connection.execute(statement)]


def holders(connection: Connection) -> list[Any]:
    """Return the runs that hold slices, with the fields of NAMED_BY."""
    columns = [getattr(Run, name) for name in NAMED_BY]
    return list(
        connection.execute(
            select(*columns)
            .join(StoredLease, StoredLease.run_id == Run.id)
            .where(StoredLease.until.is_(None))
            .distinct()
        )
    )


def unconfirmed_ends(connection: Connection, since: float, most: int) -> frozenset[int]:
    """Return the jobs, the last ones, of whose latest run Slurm has listed no end, and that ended at `since` or later
    by what nodes say, or not at all: it may have ended while migbatchd was down.
    """
    unlisted = select(Run.job_id).where(
        overlapping(since, None), or_(Run.ended.is_(None), Run.state_from != "slurm"), Run.latest
    )
    return frozenset(connection.scalars(unlisted.order_by(Run.id.desc()).limit(most)))


def identity(connection: Connection) -> str:
    """Return the id of this database."""
    return str(connection.scalar(select(DatabaseIdentity.id)) or "")


def inventory(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """Return the current GPUs by node, as their inventory events described them."""
    by_node: dict[str, list[dict[str, Any]]] = {}
    columns = (
        StoredGpu.node,
        StoredGpu.uuid,
        StoredGpu.minor,
        StoredGpu.gpu_index,
        StoredGpu.name,
        StoredGpu.mig,
        StoredGpu.geometry,
        StoredGpu.facts,
    )
    statement = select(*columns).where(StoredGpu.present).order_by(StoredGpu.node, StoredGpu.gpu_index, StoredGpu.uuid)
    for node, uuid, minor, index, name, mig, geometry, facts in connection.execute(statement):
        own = {"uuid": uuid, "minor": minor, "index": index, "name": name, "mig": mig, "geometry": geometry}
        by_node.setdefault(node, []).append({**(facts if isinstance(facts, dict) else {}), **own})
    return by_node


def geometries(connection: Connection, *, removed: bool = False) -> dict[str, Geometry]:
    """Return the last known geometry of each GPU by its UUID, or only of GPUs that their nodes do not report now.

    Invalid ones are skipped.
    """
    by_uuid: dict[str, Geometry] = {}
    statement = select(StoredGpu.uuid, StoredGpu.geometry)
    for uuid, described in connection.execute(statement.where(~StoredGpu.present) if removed else statement):
        try:
            by_uuid[uuid] = Geometry.from_dict(described)
        except GeometryError:
            continue
    return by_uuid


def whole_gpus(connection: Connection) -> dict[tuple[str, int], tuple[int, int]]:
    """Return compute and memory slices of whole GPUs, by a profile that they have and its memory slices."""
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for geometry in set(geometries(connection).values()):
        for info in geometry.profiles:
            whole = (geometry.compute_slices, geometry.memory_slices)
            sizes.setdefault((info.profile.name, info.memory_slices), whole)
    return sizes


def decision(connection: Connection, id: str) -> dict[str, Any] | None:
    """Return one decision with all its fields."""
    row = connection.execute(select(*StoredDecision.__table__.columns).where(StoredDecision.id == id)).first()
    return dict(row._mapping) if row is not None else None


def last_offers(connection: Connection) -> dict[str, dict[str, int]]:
    """Return the last counts of each node, by GRES type, including the filler."""
    newest = select(func.max(SupplyChange.id)).group_by(SupplyChange.node)
    rows = connection.execute(select(SupplyChange.node, SupplyChange.counts).where(SupplyChange.id.in_(newest)))
    return {row.node: dict(row.counts) for row in rows}


def last_seen(connection: Connection) -> dict[str, float]:
    """Return when each node last reported (unix seconds)."""
    return {row.node: row.seen for row in connection.execute(select(StoredNode.node, StoredNode.seen))}

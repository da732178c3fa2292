"""The store as used by the daemon: decisions in batches, and events of instances since each node booted."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import func, select

from slurm_migbatch.profiling.measurement import COLUMNS, Measurement
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.decisions import record_decisions
from slurm_migbatch.store.models import MeasuredPoint, Node, NodeEvent, Run, SupplyChange
from slurm_migbatch.store.recurring import RecurringRun, newest_lesson, recurring_runs
from slurm_migbatch.store.work import PastRuns, TaskRunRow, array_runs, past_work

#: only the newest creates and destroys matter: they only express a preference for idle instances
_NEWEST = 20_000


class Learnable(NamedTuple):
    """The number of the newest lesson, and the time of the newest import of measurements (unix seconds)."""

    lesson: int = 0
    imported: float = 0.0


class HistoryStore(Store):
    """`Store` that writes decisions in batches and reads how idle instances, zombies and faults arose."""

    def __enter__(self) -> HistoryStore:
        return self

    def record_decisions(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Record several decisions in one transaction, because commits dominate the cost of many submissions."""
        self._write(lambda session: record_decisions(session, decisions, time.time()))

    def learnable(self) -> Learnable:
        """Return how far the record goes."""
        with self.reading() as connection:
            lesson = connection.scalar(select(func.max(Run.lesson)))
            imported = connection.scalar(select(func.max(MeasuredPoint.imported)))
        return Learnable(max(lesson or 0, 0), imported or 0.0)

    def newest_lesson(self) -> int:
        """Return the number of the newest ended run usable for learning; 0 if there is none."""
        with self.reading() as connection:
            return newest_lesson(connection)

    def recurring_runs(self, since: int, limit: int) -> list[RecurringRun]:
        """Return ended runs after a lesson number, in order, that the submit filter can recognize."""
        with self.reading() as connection:
            return recurring_runs(connection, since, limit)

    def measured_since(self, imported: float) -> list[Measurement]:
        """Return measured points that were added or changed after that time (unix seconds)."""
        columns = (MeasuredPoint.__table__.c[name] for name in COLUMNS)
        statement = select(*columns).where(MeasuredPoint.imported > imported).order_by(MeasuredPoint.id)
        with self.reading() as connection:
            return [Measurement(*row) for row in connection.execute(statement)]

    def instance_events(self, *, changes: bool = True) -> dict[str, list[dict[str, Any]]]:
        """Return events about instances by node, in order, since the node last booted or sent its whole state.

        Of a `state` only instances; `leases` has their holders. Without `changes` only zombies and faults.
        """
        booted = (
            select(NodeEvent.node, func.max(NodeEvent.id).label("id"))
            .where(NodeEvent.kind.in_(("boot", "state")))
            .group_by(NodeEvent.node)
            .subquery()
        )
        since = (
            select(NodeEvent.id, NodeEvent.node, NodeEvent.kind, NodeEvent.payload)
            .outerjoin(booted, booted.c.node == NodeEvent.node)
            .where(NodeEvent.id >= func.coalesce(booted.c.id, 0))
            .order_by(NodeEvent.id.desc())
        )
        troubles = since.where(NodeEvent.kind.in_(("state", "zombie", "cleared", "fault")))
        made = since.where(NodeEvent.kind.in_(("create", "destroy"))).limit(_NEWEST)
        with self.reading() as connection:
            rows = [*connection.execute(troubles), *(connection.execute(made) if changes else ())]
        found: dict[str, list[dict[str, Any]]] = {}
        for _, node, kind, payload in sorted(rows, key=lambda row: row.id):
            if isinstance(payload, dict):
                facts = {key: value for key, value in payload.items() if key not in ("gpus", "runs")}
                found.setdefault(node, []).append({**facts, "kind": kind})
        return found

    def last_offers(self) -> dict[str, dict[str, int]]:
        """Return the last counts of each node, by GRES type, including the filler."""
        newest = select(func.max(SupplyChange.id)).group_by(SupplyChange.node)
        with self.reading() as connection:
            rows = connection.execute(select(SupplyChange.node, SupplyChange.counts).where(SupplyChange.id.in_(newest)))
            return {row.node: dict(row.counts) for row in rows}

    def last_seen(self) -> dict[str, float]:
        """Return when each node last reported (unix seconds)."""
        with self.reading() as connection:
            return {row.node: row.seen for row in connection.execute(select(Node.node, Node.seen))}

    def array_runs(self, arrays: Collection[int]) -> dict[int, list[TaskRunRow]]:
        """Return the started tasks of these arrays."""
        with self.reading() as connection:
            return array_runs(connection, arrays)

    def past_work(self, since: float) -> list[PastRuns]:
        """Return the use of slices since that time (unix seconds), without loans."""
        with self.reading() as connection:
            return past_work(connection, since)


def open_history(url: str, *, readonly: bool = False, term: int = 0) -> HistoryStore:
    """Open the store as `open_store` does, as a HistoryStore that writes only in that term (0: any).

    Raises:
        StoreError: see `open_store`.
    """
    store = open_store(url, readonly=readonly)
    history = HistoryStore(store.engine, readonly=store.readonly)
    history.term = term
    return history

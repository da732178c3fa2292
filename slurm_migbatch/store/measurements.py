"""Measurements in the store: each point once, the last import of it counts."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.orm import Session

from slurm_migbatch.profiling.measurement import COLUMNS, Measurement
from slurm_migbatch.store.models import MeasuredPoint, portions

_VALUES = tuple(MeasuredPoint.__table__.c[name] for name in COLUMNS)


class Added(NamedTuple):
    """Result of an import: added, replaced and unchanged points."""

    added: int
    replaced: int
    same: int


def add_measurements(session: Session, rows: Iterable[Measurement], now: float) -> Added:
    """Store the rows; of rows about the same point the last counts, whether in this call or an earlier one."""
    new = {digest(row): row for row in rows}
    mark = {"batch_id": secrets.token_hex(8), "imported": now}
    added, replaced, same = [], [], 0
    for digests in portions(list(new)):
        statement = select(MeasuredPoint.id, MeasuredPoint.point, *_VALUES).where(MeasuredPoint.point.in_(digests))
        old = {row.point: row for row in session.execute(statement)}
        for point in digests:
            values = new[point].to_dict()
            known = old.get(point)
            if known is None:
                added.append({"point": point, **mark, **values})
            elif tuple(known[2:]) != tuple(values.values()):
                replaced.append({"id": known.id, **mark, **values})
            else:
                same += 1
    if added:
        session.execute(insert(MeasuredPoint), added)
    if replaced:
        session.execute(update(MeasuredPoint), replaced)
    return Added(len(added), len(replaced), same)


def measurements(connection: Connection, model: str | None, kind: str | None, since: float | None) -> list[Measurement]:
    """See `Store.measurements`; in the order of their first import."""
    statement = select(*_VALUES).order_by(MeasuredPoint.id)
    if since is not None:
        statement = statement.where(MeasuredPoint.imported > since)
    if model is not None:
        statement = statement.where(MeasuredPoint.model == model)
    if kind is not None:
        statement = statement.where(MeasuredPoint.kind == kind)
    return [Measurement(*row) for row in connection.execute(statement)]


def digest(row: Measurement) -> str:
    """Return the row's identity as 64 hexadecimal digits. It is stored, so it must never change."""
    return hashlib.sha256(json.dumps(row.point).encode()).hexdigest()

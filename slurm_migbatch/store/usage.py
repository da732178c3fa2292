"""Slices held in a time window, grouped by the database: the first step of `migbatch usage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    String,
    TextClause,
    and_,
    case,
    cast,
    exists,
    func,
    literal_column,
    or_,
    select,
)
from sqlalchemy.orm import aliased

from slurm_migbatch.store.models import Run, StoredLease
from slurm_migbatch.store.queries import COUNTED, ON_ITS_NODES, PLACED, RunFilter, among, conditions_of
from slurm_migbatch.store.runquery import HELD_UNTIL
from slurm_migbatch.values import replace

#: available groups, besides profile and size, which are always included
GROUPS: dict[str, ColumnElement[Any]] = {
    "user": func.coalesce(Run.user, cast(Run.uid, String(16)), ""),
    "account": func.coalesce(Run.account, ""),
    "partition": func.coalesce(Run.partition, ""),
    "node": func.coalesce(StoredLease.node, ""),
}

#: SM activity of a run's slices, 0 to 1; null if not sampled, or for a shared slice, whose activity cannot be
#: attributed
SM_ACTIVITY: ColumnElement[Any] = case(
    (
        func.coalesce(Run.measured_facts["shared"].as_string(), "") == "",
        Run.measured_facts["sm"].as_float(),
    ),
    else_=None,
)


class HeldSlices(NamedTuple):
    """Time for which equal slices were held in a window.

    Attributes:
        groups: values of the group columns, in order.
        profile, size: of each slice; `size` in memory slices.
        run: 0 for runs of equal slices that are inside the window, which are counted together; else the run's id.
            The latter may be in several groups and windows.
        runs: number of these runs.
        seconds: of all slices together.
        sampled_s: of these, seconds of runs whose SMs were sampled; `idle_s`: the part of them in which SMs were idle.
    """

    groups: tuple[str, ...]
    profile: str
    size: int
    run: int
    runs: int
    seconds: float
    sampled_s: float
    idle_s: float


def held_slices(
    connection: Connection, wanted: RunFilter, groups: Sequence[str], start: float, end: float, now: float
) -> Iterator[HeldSlices]:
    """Yield what the selected runs held between two times, from their start to their end according to Slurm; see
    `HELD_UNTIL`.

    Args:
        wanted: its window is replaced by this one. With nodes, slices on other nodes are excluded.
        groups: names in GROUPS.
        start, end, now: unix seconds; a running run has held its slices until `now`.
    """
    until = min(end, now)
    if until <= start:
        return
    held_until: ColumnElement[float] = literal_column(HELD_UNTIL, Double())
    began = case((Run.started > start, Run.started), else_=start)
    ended = case((held_until < until, held_until), else_=until)
    other = aliased(StoredLease)
    differs = [other.profile != StoredLease.profile, other.slot_size != StoredLease.slot_size]
    if "node" in groups:
        differs.append(other.node != StoredLease.node)
    equal = or_(Run.slice_count == 1, ~exists().where(other.run_id == Run.id, or_(*differs)))
    whole = and_(Run.started >= start, Run.ended <= end, equal)
    conditions: list[ColumnElement[bool] | TextClause] = [
        *conditions_of(replace(wanted, start=start, end=end, states=(), duplicates=True)),
        Run.started < until,
        or_(held_until.is_(None), held_until > start),
        COUNTED,
        PLACED,
        ON_ITS_NODES,
    ]
    if wanted.nodes:
        conditions.append(among(StoredLease.node, wanted.nodes))
    names = [GROUPS[name].label(f"group_{name}") for name in groups]
    spans = (
        select(
            *names,
            StoredLease.profile,
            StoredLease.slot_size,
            case((whole, 0), else_=Run.id).label("run"),
            Run.id.label("counted"),
            (ended - began).label("seconds"),
            SM_ACTIVITY.label("sm"),
        )
        .join(StoredLease, StoredLease.run_id == Run.id)
        .where(*conditions)
        .subquery()
    )
    keys = [*(spans.c[name.name] for name in names), spans.c.profile, spans.c.slot_size, spans.c.run]
    sampled = case((spans.c.sm.is_not(None), spans.c.seconds), else_=0.0)
    idle = case((spans.c.sm.is_not(None), spans.c.seconds * (1.0 - spans.c.sm)), else_=0.0)
    sums = (func.sum(spans.c.seconds), func.sum(sampled), func.sum(idle))
    runs = func.count(spans.c.counted.distinct())
    for row in connection.execute(select(*keys, runs, *sums).group_by(*keys)):
        group, (profile, size, run, count, *seconds) = row[: len(names)], row[len(names) :]
        yield HeldSlices(tuple(map(str, group)), profile, size, run, count, *map(float, seconds))

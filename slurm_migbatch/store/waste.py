"""Ended runs with what they held and used, and how long others waited: the input of `migbatch waste`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Double, TextClause, case, func, literal_column, select

from slurm_migbatch.predict.recurring import PastRun
from slurm_migbatch.store import clean, recurring
from slurm_migbatch.store.models import Run, StoredDecision, StoredLease
from slurm_migbatch.store.queries import COUNTED, LISTED, ON_ITS_NODES, RunFilter, conditions_of
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.store.runquery import HELD_UNTIL
from slurm_migbatch.values import replace

_AT_ONCE: Final = 1000
"""Number of rows that are in memory at a time."""
_MOST_WAITS: Final = 10_000
"""Number of newest runs whose wait is considered."""
#: fields of the figures, in the order of `used_runs`; a single text of the decision, because JSON is slow to read
_FIGURES = (
    Run.id, Run.profile, Run.state, Run.exit_code, Run.signal, Run.measured_memory_mib, Run.measured_facts,
    StoredDecision.recurring, StoredDecision.facts["engine"].as_string().label("engine"),
)  # fmt: skip
#: displayed fields of a run
_SHOWN = (
    Run.job_id, Run.restart, Run.array_job, Run.array_task, Run.het_job, Run.het_offset, Run.uid, Run.user, Run.account,
    Run.partition, Run.nodes, Run.submitted, Run.started, Run.ended,
)  # fmt: skip


class UsedRun(NamedTuple):
    """One run that has held slices.

    Attributes:
        recurring: key of its recurring job; empty if unknown.
        own: its figures as a run of it; the profile is empty if those of its slices differ.
        shown: a row with the displayed fields (job_id, array_job, user, started ...).
        shared: it shared its slice with another for a while, so figures are not its own.
        given_back_s: seconds to its end of slices on nodes that it gave back.
        gpu: UUID of the GPU of one of its slices.
    """

    recurring: str
    own: PastRun
    shown: Any
    shared: bool
    given_back_s: float
    gpu: str


def used_runs(connection: Connection, wanted: RunFilter, now: float) -> Iterator[UsedRun]:
    """Yield the selected runs that have started and held slices; with a window those that ended in it.

    One that ended at the end of the window belongs to the next one. Runs of one job are yielded by array task; those
    of a window by recurring job, each from its newest run to its oldest. They are read as they are used, so a server's
    connection is busy until the last one. `now`: to when a running run has held its slices.
    """
    conditions: list[ColumnElement[bool] | TextClause] = [
        *conditions_of(replace(wanted, states=())),
        Run.slice_count > 0,
        Run.started.is_not(None),
    ]
    if not wanted.jobs:
        conditions += [Run.ended >= (wanted.start or 0.0), Run.ended < wanted.end]
    counted = StoredLease.run_id == Run.id, COUNTED, ON_ITS_NODES
    held = select(StoredLease.gpu).where(*counted).limit(1).correlate(Run).scalar_subquery()
    held_until: ColumnElement[float] = literal_column(HELD_UNTIL, Double())
    until_end = func.sum(func.coalesce(Run.ended, now) - func.coalesce(held_until, Run.ended, now))
    given_back = case(
        (Run.slice_count > 1, select(until_end).where(*counted).correlate(Run).scalar_subquery()), else_=0.0
    )
    runs = select(*_FIGURES, *_SHOWN, given_back, held.label("gpu")).outerjoin(
        StoredDecision, StoredDecision.id == Run.decision
    )
    newest_first = (StoredDecision.recurring, Run.job_id.desc(), Run.id.desc())
    by_task = (func.length(Run.array_task), Run.array_task, Run.job_id, Run.id)  # see `runquery.select_runs`
    runs = runs.where(*conditions).order_by(*(by_task if wanted.jobs else newest_first))
    for row in connection.execute(runs, execution_options={"yield_per": _AT_ONCE}):
        id, profile, state, exit_code, signal, peak_mib, facts, key, engine = row[: len(_FIGURES)]
        facts = facts if isinstance(facts, dict) else {}
        name = (recurring.only_profile(profile) or "").replace("+", ".")
        ended = recurring.ended(state, exit_code, signal, facts)
        if facts.get("shared") is True:
            own, shared = PastRun(id, name, ended, engine=clean.text(engine, 16) or ""), True
        else:
            sm, dram = recurring.share(facts.get("sm")), recurring.share(facts.get("dram"))
            own, shared = PastRun(id, name, ended, peak_mib, sm, dram, clean.text(engine, 16) or ""), False
        yield UsedRun(key or "", own, row, shared, row[-2] or 0.0, row[-1] or "")


def runs_alike(connection: Connection, keys: Collection[str], before: float, each: int) -> Iterator[RecurringRun]:
    """Yield the newest runs of recurring jobs that had ended by a time, at most `each` per job, its newest last."""
    for key in sorted(keys):
        newest = (
            select(*recurring.COLUMNS)
            .join(StoredDecision, StoredDecision.id == Run.decision)
            .where(StoredDecision.recurring == key, Run.lesson > 0, Run.ended <= before, LISTED)
            .order_by(Run.lesson.desc())
            .limit(each)
        )
        yield from (recurring.run_of(row) for row in reversed(connection.execute(newest).all()))


def waits(
    connection: Connection, wanted: RunFilter, partition: str, profile: str, window: Sequence[float]
) -> list[float]:
    """Return how many seconds the newest selected runs in a partition with exactly these slices (`Run.profile`:
    "1g.10gb", "1g.10gb:2") waited, that were submitted between two times.
    """
    start, end = window
    of_all_users = replace(wanted, start=start, end=None, states=(), jobs=(), users=(), uids=(), accounts=())
    statement = (
        select(Run.started - Run.submitted)
        .where(*conditions_of(of_all_users))
        .where(Run.submitted >= start, Run.submitted <= end, Run.started.is_not(None))
        .where(Run.partition == partition, Run.profile == profile)
        .order_by(Run.id.desc())
        .limit(_MOST_WAITS)
    )
    return [max(0.0, float(seconds or 0.0)) for seconds in connection.scalars(statement)]

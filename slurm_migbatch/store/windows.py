"""What the record holds of a window of time, for pictures of it: slices held, waits, predictions, loans, GPUs.

Each is one statement, restricted by a `RunFilter` that has a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from slurm_migbatch.store.models import Gpu, Lease, Loan, Run
from slurm_migbatch.store.queries import RunFilter, conditions_of
from slurm_migbatch.store.usage import COUNTED, SM_ACTIVITY

#: figures that are predicted and measured, as columns of a run: predicted_<name>, measured_<name>
PREDICTED = ("throughput_per_s", "latency_ms", "memory_mib")


class HeldSlice(NamedTuple):
    """One slice that a run held at some moment of the window: names of the columns that `held_slices` selects.

    Attributes:
        since, until: unix seconds, of the run as Slurm accounts for it; `until` is None while it goes on.
        sm: see `usage.SM_ACTIVITY`.
    """

    node: str
    gpu: str
    gpu_index: int | None
    profile: str
    slot_start: int
    slot_size: int
    since: float
    until: float | None
    account: str | None
    sm: float | None


def held_slices(connection: Connection, wanted: RunFilter) -> Sequence[Sequence[Any]]:
    """Return rows with the fields of `HeldSlice`; a slice that two runs share comes once for each.

    Which slices, from when to when and how active is as `migbatch usage` has it.
    """
    statement = select(
        Lease.node, Lease.gpu, Lease.gpu_index, Lease.profile, Lease.slot_start, Lease.slot_size, Run.started,
        Run.ended, Run.account, SM_ACTIVITY,
    ).join(Run, Lease.run_id == Run.id)  # fmt: skip
    known: list[ColumnElement[bool]] = [Run.started.is_not(None), COUNTED]
    if wanted.end is not None:
        known.append(Run.started < wanted.end)
    if wanted.start is not None:
        known.append(or_(Run.ended.is_(None), Run.ended > wanted.start))
    if wanted.nodes:
        known.append(Lease.node.in_(wanted.nodes))
    return connection.execute(statement.where(*conditions_of(wanted), *known)).all()


def waits(connection: Connection, wanted: RunFilter, bounds: Sequence[float]) -> list[tuple[str, int, int]]:
    """Count the runs that started in the window by profile and by how long they waited since submission.

    Args:
        bounds: ascending seconds; class i holds waits below bounds[i], class len(bounds) all others.

    Returns:
        (what they got, class, runs).
    """
    wait = Run.started - Run.submitted
    classes = case(*((wait < bound, number) for number, bound in enumerate(bounds)), else_=len(bounds))
    statement = select(Run.profile, classes, func.count()).where(*conditions_of(wanted), *_within(Run.started, wanted))
    statement = statement.where(Run.submitted.is_not(None), Run.profile.is_not(None)).group_by(Run.profile, classes)
    return [(str(profile), int(number), int(count)) for profile, number, count in connection.execute(statement)]


def predictions(connection: Connection, wanted: RunFilter) -> Sequence[Sequence[Any]]:
    """Return predicted and measured figures of runs that ended in the window: two columns for each of PREDICTED."""
    pairs = [(getattr(Run, f"predicted_{name}"), getattr(Run, f"measured_{name}")) for name in PREDICTED]
    known = or_(*(and_(predicted > 0, measured > 0) for predicted, measured in pairs))
    columns = [column for pair in pairs for column in pair]
    statement = select(*columns).where(*conditions_of(wanted), *_within(Run.ended, wanted), known)
    return connection.execute(statement).all()


def loans(connection: Connection, wanted: RunFilter) -> Sequence[Sequence[Any]]:
    """Return (profile, started, signalled, requeued, ended, cause) of loans that ran at some moment of the window.

    Of the filter the window, users, accounts, partitions, nodes and `only` count.
    """
    conditions: list[ColumnElement[bool]] = [Loan.started.is_not(None)]
    if wanted.end is not None:
        conditions.append(Loan.started <= wanted.end)
    if wanted.start is not None:
        conditions.append(or_(Loan.ended.is_(None), Loan.ended >= wanted.start))
    if wanted.only is not None:
        uid, accounts = wanted.only
        conditions.append(or_(Loan.uid == uid, Loan.account.in_(accounts)))
    if wanted.users or wanted.uids:
        conditions.append(or_(Loan.user.in_(wanted.users), Loan.uid.in_(wanted.uids)))
    chosen = ((Loan.account, wanted.accounts), (Loan.partition, wanted.partitions), (Loan.node, wanted.nodes))
    conditions += [column.in_(names) for column, names in chosen if names]
    columns = (Loan.profile, Loan.started, Loan.signalled, Loan.requeued, Loan.ended, Loan.cause)
    return connection.execute(select(*columns).where(*conditions)).all()


def gpus(connection: Connection, wanted: RunFilter) -> Sequence[Sequence[Any]]:
    """Return (node, uuid, index) of the GPUs in MIG mode that nodes have now."""
    statement = select(Gpu.node, Gpu.uuid, Gpu.gpu_index).where(Gpu.present, Gpu.mig)
    if wanted.nodes:
        statement = statement.where(Gpu.node.in_(wanted.nodes))
    return connection.execute(statement).all()


def _within(moment: ColumnElement[Any] | Any, wanted: RunFilter) -> Iterator[ColumnElement[bool]]:
    """Yield that a moment is known and lies in the window."""
    yield moment.is_not(None)
    if wanted.start is not None:
        yield moment >= wanted.start
    if wanted.end is not None:
        yield moment <= wanted.end

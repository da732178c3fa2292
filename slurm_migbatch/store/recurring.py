"""Ended runs of recurring jobs, as input of `predict.recurring`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, func, select

from slurm_migbatch.store import clean
from slurm_migbatch.store.lifecycle import STOP_SIGNALS
from slurm_migbatch.store.models import MeasuredPoint, Run, StoredDecision
from slurm_migbatch.store.queries import LISTED
from slurm_migbatch.workload.loans import LOAN

_DONE: Final = frozenset({"COMPLETED", "TIMEOUT"})
_CUT: Final = frozenset({"CANCELLED", "PREEMPTED", "DEADLINE", "REVOKED"})


@dataclass(frozen=True)
class RecurringRun:
    """One run of a recurring job.

    Attributes:
        number: its position in the order of lessons; `run` stays the same when it is returned again.
        recurring: key of the job, from `submit.script.recurring_key`; empty if unknown.
        profile: of its slices, as in the record; None if they differed.
        ended: "done", "oom", "failed" or "cut", or empty if unknown.
        peak_mib, sm, dram: see `predict.recurring.PastRun`; None also for a run that shared its slice.
        retry: the user wants it retried if its slice was too small; never for elastic training, which gets a slice of
            any allowed size again.
        low, high: the smallest and the largest profile allowed by its user; empty: any.
        work: label of the work that its hints described, as in the decision.
        user: whose job it was; empty if unknown.
        until: when it ended, unix seconds; 0 if unknown.
    """

    number: int
    run: int
    job: int
    restart: int
    het: bool
    recurring: str
    profile: str | None
    ended: str
    peak_mib: float | None
    sm: float | None
    dram: float | None
    engine: str
    retry: bool
    partition: str = ""
    slices: int = 1
    low: str = ""
    high: str = ""
    user: str = ""
    until: float = 0.0
    work: str = ""


#: fields read by `run_of`, of a run joined with its decision
COLUMNS: Final = (
    Run.lesson, Run.id, Run.job_id, Run.restart, Run.array_job, Run.het_job, Run.user, Run.partition, Run.profile,
    Run.slice_count, Run.ended, Run.state, Run.exit_code, Run.signal, Run.measured_memory_mib, Run.measured_facts,
    Run.decision, StoredDecision.recurring, StoredDecision.bucket, StoredDecision.hints,
    StoredDecision.facts,
)  # fmt: skip


def recurring_runs(connection: Connection, since: int, limit: int) -> list[RecurringRun]:
    """Return ended runs after a lesson number, in order: those that the submit filter can recognize."""
    statement = (
        select(*COLUMNS)
        .join(StoredDecision, StoredDecision.id == Run.decision)
        .where(Run.lesson > max(since, 0), LISTED)
        .order_by(Run.lesson)
        .limit(limit)
    )
    return [run_of(row) for row in connection.execute(statement)]


class Learnable(NamedTuple):
    """The number of the newest lesson, and the time of the newest import of measurements (unix seconds)."""

    lesson: int = 0
    imported: float = 0.0


def learnable(connection: Connection) -> Learnable:
    """Return the newest lesson and the newest import in the record."""
    return Learnable(newest_lesson(connection), connection.scalar(select(func.max(MeasuredPoint.imported))) or 0.0)


def newest_lesson(connection: Connection) -> int:
    """Return the number of the newest lesson; 0 if there is none."""
    return max(connection.scalar(select(func.max(Run.lesson))) or 0, 0)


def run_of(row: Any) -> RecurringRun:
    """Return the run of a row of COLUMNS; the decision may be missing."""
    measured = row.measured_facts if isinstance(row.measured_facts, dict) else {}
    hints: Mapping[str, Any] = row.hints if isinstance(row.hints, dict) else {}
    facts: Mapping[str, Any] = row.facts if isinstance(row.facts, dict) else {}
    alone = measured.get("shared") is not True
    return RecurringRun(
        number=row.lesson or 0,
        run=row.id,
        job=row.job_id,
        restart=row.restart,
        het=row.het_job is not None,
        recurring=row.recurring or "",
        profile=only_profile(row.profile),
        ended=ended(row.state, row.exit_code, row.signal, measured),
        peak_mib=row.measured_memory_mib if alone else None,
        sm=share(measured.get("sm")) if alone else None,
        dram=share(measured.get("dram")) if alone else None,
        engine=clean.text(facts.get("engine"), 16) or "",
        retry=hints.get("retry") == "oom" and not (row.decision or "").startswith(LOAN),
        partition=row.partition or "",
        slices=row.slice_count,
        low=clean.text(hints.get("min"), 24) or "",
        high=clean.text(hints.get("max"), 24) or "",
        user=row.user or "",
        until=row.ended or 0.0,
        work=clean.text(row.bucket, 256) or "",
    )


@lru_cache(maxsize=4096)
def only_profile(profile: str | None) -> str | None:
    """Return the profile of a run's slices, as `Run.profile` lists them; None if they differ."""
    name = (profile or "").partition(":")[0]
    return name if name and "," not in (profile or "") else None


def ended(state: str, exit_code: int | None, signal: int | None, measured: Mapping[str, Any]) -> str:
    """Return how a run ended, see `RecurringRun`."""
    if state in _DONE:
        return "done"
    if state in _CUT:
        return "cut"
    if state in ("FAILED", "REQUEUED") and (exit_code or signal):
        if measured.get("oom") is True:
            return "oom"
        stopped = state == "REQUEUED" and signal in STOP_SIGNALS  # preempted, for example
        return "cut" if stopped else "failed"
    return ""


def share(value: Any) -> float | None:
    """Return a share from 0 to 1, or None."""
    if value.__class__ is float:  # of a million runs mostly
        return value if 0 <= value <= 1 else None
    number = clean.real(value)
    return number if number is not None and 0 <= number <= 1 else None

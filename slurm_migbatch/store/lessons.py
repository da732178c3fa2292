"""Ended runs as lessons: request, prediction, allocation, and result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, Select, and_, select

from slurm_migbatch.store import clean
from slurm_migbatch.store.models import OldLesson, Run, StoredDecision, StoredGpu, StoredLease, portions
from slurm_migbatch.store.queries import COUNTED, LISTED
from slurm_migbatch.workload.lesson import Lesson


def lessons(connection: Connection, since: int, limit: int) -> list[Lesson]:
    """See `Store.lessons`; including those of runs that were removed because of their age."""
    of_runs = _read(connection, _ENDED.where(Run.lesson > max(since, 0)).order_by(Run.lesson).limit(limit))
    statement = select(OldLesson.lesson).where(OldLesson.number > since).order_by(OldLesson.number).limit(limit)
    of_removed_runs = [_kept(row) for row in connection.scalars(statement)]
    return (
        sorted([*of_removed_runs, *of_runs], key=lambda lesson: lesson.number)[:limit] if of_removed_runs else of_runs
    )


def teaching(connection: Connection, runs: Collection[int]) -> Iterator[OldLesson]:
    """Yield the training data to keep of ended runs that are being removed: figures and user.

    A run that `predict.runs` cannot use is skipped, whatever becomes known later.
    """
    for lesson in _read(connection, _ENDED.where(Run.id.in_(runs), Run.lesson > 0)):
        measured = (lesson.throughput_per_s, lesson.latency_s, lesson.memory_mib, lesson.oom)
        figures = (*measured, lesson.items, lesson.items_hint)
        if lesson.model and lesson.batch and lesson.profile and lesson.gpu and lesson.slices == 1 and any(figures):
            plain = replace(lesson, job=0)
            yield OldLesson(number=lesson.number, lesson=asdict(plain))


_ENDED = (
    select(Run.__table__, StoredDecision.hints, StoredDecision.facts)
    .outerjoin(StoredDecision, StoredDecision.id == Run.decision)
    .where(LISTED)
)


def _read(connection: Connection, statement: Select[Any]) -> list[Lesson]:
    rows = connection.execute(statement).all()
    held = _held(connection, [row.id for row in rows])
    return [_lesson(row, held.get(row.id, [])) for row in rows]


def _kept(known: Mapping[str, Any]) -> Lesson:
    """Return a stored lesson; an earlier or later release, with other fields, may have written it."""
    return Lesson(**{field.name: known[field.name] for field in fields(Lesson) if field.name in known})


def _held(connection: Connection, runs: Sequence[int]) -> dict[int, list[Any]]:
    """Return the profile and GPU model of every slice, by run."""
    by_run: dict[int, list[Any]] = {}
    for portion in portions(runs):
        statement = (
            select(StoredLease.run_id, StoredLease.profile, StoredGpu.name)
            .outerjoin(StoredGpu, and_(StoredGpu.node == StoredLease.node, StoredGpu.uuid == StoredLease.gpu))
            .where(StoredLease.run_id.in_(portion), COUNTED)
        )
        for row in connection.execute(statement):
            by_run.setdefault(row.run_id, []).append(row)
    return by_run


def _lesson(row: Any, slices: Sequence[Any]) -> Lesson:
    """Return what the predictor needs of a finished run."""
    hints, facts, measured = _object(row.hints), _object(row.facts), _object(row.measured_facts)
    alone = measured.get("shared") is not True
    model = clean.text(hints.get("model"), 128)
    return Lesson(
        number=row.lesson,
        run=row.id,
        job=row.job_id,
        user=row.user,
        state=row.state,
        model=model,
        role=clean.text(hints.get("role"), 16) or ("infer" if model else None),
        batch=clean.whole(measured.get("batch"), 1) or clean.whole(hints.get("batch"), 1),
        input=clean.whole(hints.get("input"), 1),
        unit=clean.text(hints.get("input_unit"), 8) or "",
        items_hint=clean.whole(hints.get("items"), 1),
        profile=_common(mig_slice.profile for mig_slice in slices),
        gpu=_common(mig_slice.name for mig_slice in slices),
        slices=len(slices),
        elapsed_s=max(0.0, row.ended - row.started),
        throughput_per_s=row.measured_throughput_per_s if alone else None,
        latency_s=_seconds(row.measured_latency_ms) if alone else None,
        latency_p99_s=_seconds(clean.real(measured.get("p99_ms"))) if alone else None,
        memory_mib=row.measured_memory_mib if alone else None,
        items=row.measured_items,
        engine=clean.text(facts.get("engine"), 16) or "",
        oom=measured.get("oom") is True and alone,
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _common(values: Any) -> Any:
    """Return the common value; None if they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3

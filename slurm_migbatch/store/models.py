"""The tables, as SQLAlchemy classes with the same meaning on SQLite, MariaDB and PostgreSQL.

Times are unix seconds (double precision). The tables themselves are created by `store.history`, never from here; a test
compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    event,
    inspect,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, mapped_column

from slurm_migbatch.store import clean
from slurm_migbatch.store.runquery import LAST_SPAN_CLASS, OPEN

T = TypeVar("T")

#: characters of an external text in a column without a length
_LONGEST = 8192

#: a change of these makes an ended run a new lesson
_TEACHING = (
    "submitted", "gid", "placed", "started", "ended", "state", "profile", "slice_count", "decision",
    "measured_latency_ms", "measured_throughput_per_s", "measured_memory_mib", "measured_items", "measured_facts",
    "predicted_latency_ms", "predicted_throughput_per_s", "predicted_memory_mib",
)  # fmt: skip

BigId = BigInteger().with_variant(Integer(), "sqlite")


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items, 500 at a time: old versions of SQLite accept at most 999 values in a statement."""
    for start in range(0, len(items), 500):
        yield items[start : start + 500]


def span_class(began: float, ended: float | None) -> int:
    """Return the class of a run by its length; OPEN while it has no end. See `runquery.overlapping`.

    A class c >= 1 has the runs that last (submission to end) less than 4**c seconds and at least 4**(c-1).
    """
    if ended is None:
        return OPEN
    length = max(ended - began, 0.0)
    return min(1 + max(0, math.floor(math.log(length, 4))) if length >= 1 else 1, LAST_SPAN_CLASS)


class Base(DeclarativeBase):
    """The tables of migbatch."""

    type_annotation_map = {float: Double(), int: BigInteger()}

    @classmethod
    def fitting(cls, name: str, value: Any) -> str | None:
        """Return an external value as text, cut to the length of a column; None for empty and non-scalar values."""
        return clean.text(value, cls.longest(name))

    @classmethod
    def longest(cls, name: str) -> int:
        """Return the number of characters that a column of texts holds."""
        return getattr(cls.__table__.c[name].type, "length", None) or _LONGEST


class Run(Base):
    """One run of one job: (job id, restart count), and `reuse` if Slurm restarted its job ids."""

    __tablename__ = "runs"
    __table_args__ = (
        UniqueConstraint("job_id", "reuse", "restart", name="uq_runs_identity"),
        Index("ix_runs_array_job", "array_job"),
        Index("ix_runs_het_job", "het_job"),
        Index("ix_runs_window", "span_class", "ended"),
        Index("ix_runs_user", "user", "span_class", "ended"),
        Index("ix_runs_uid", "uid", "span_class", "ended"),
        Index("ix_runs_decision", "decision"),
        Index("ix_runs_lesson", "lesson"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int]
    restart: Mapped[int] = mapped_column(Integer)
    reuse: Mapped[int] = mapped_column(Integer, default=0)
    #: the newest run of its job id: shown unless duplicates are requested
    latest: Mapped[bool] = mapped_column(default=True)
    array_job: Mapped[int | None]
    array_task: Mapped[str | None] = mapped_column(String(256))
    het_job: Mapped[int | None]
    het_offset: Mapped[int | None] = mapped_column(Integer)
    uid: Mapped[int | None]
    user: Mapped[str | None] = mapped_column(String(128))
    account: Mapped[str | None] = mapped_column(String(128))
    partition: Mapped[str | None] = mapped_column(String(128))
    gid: Mapped[int | None]
    qos: Mapped[str | None] = mapped_column(String(128))
    wckey: Mapped[str | None] = mapped_column(String(128))
    #: the comment of its user, without what the submit filter has added
    comment: Mapped[str | None] = mapped_column(String(1024))
    name: Mapped[str | None] = mapped_column(String(256))
    nodes: Mapped[str | None] = mapped_column(Text)

    state: Mapped[str] = mapped_column(String(24), default="PENDING")
    #: source: "node" (events), "poll" (it left Slurm's list) or "slurm" (Slurm's state, which has precedence)
    state_from: Mapped[str] = mapped_column(String(8), default="node")
    reason: Mapped[str | None] = mapped_column(String(512))
    exit_code: Mapped[int | None] = mapped_column(Integer)
    signal: Mapped[int | None] = mapped_column(Integer)
    submitted: Mapped[float | None]
    started: Mapped[float | None]
    ended: Mapped[float | None]
    #: when Slurm first listed it as suspended, and when as running again after the last time; None while suspended
    suspended: Mapped[float | None]
    resumed: Mapped[float | None]
    time_limit_s: Mapped[int | None]
    #: whether a row of Slurm has given the run nodes; empty if there was none
    placed: Mapped[bool | None]
    #: first known time and length class, maintained by `_settle`; used to search time windows
    began: Mapped[float]
    span_class: Mapped[int] = mapped_column(Integer)

    asked: Mapped[str | None] = mapped_column(String(1024))
    bucket: Mapped[str | None] = mapped_column(String(256))
    decision: Mapped[str | None] = mapped_column(String(16))
    source: Mapped[str | None] = mapped_column(String(16))
    #: its allocation, as "2g.20gb" or "1g.10gb:2,3g.40gb"
    profile: Mapped[str | None] = mapped_column(String(512))
    slice_count: Mapped[int] = mapped_column(Integer, default=0)
    warm: Mapped[bool | None]
    setup_ms: Mapped[float | None]

    predicted_latency_ms: Mapped[float | None]
    predicted_throughput_per_s: Mapped[float | None]
    predicted_memory_mib: Mapped[float | None]
    measured_latency_ms: Mapped[float | None]
    measured_throughput_per_s: Mapped[float | None]
    measured_memory_mib: Mapped[float | None]
    #: the job's items (images, sequences), over all its nodes
    measured_items: Mapped[float | None]
    #: sources of these figures, and the report of each node: see `store.measured`
    measured_facts: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    #: the order in which runs became usable for learning, see `store.db._number`; below 0 until the transaction ends
    lesson: Mapped[int | None]


@event.listens_for(Run, "before_insert")
@event.listens_for(Run, "before_update")
def _settle(_mapper: Mapper[Run], _connection: object, run: Run) -> None:
    known = [moment for moment in (run.submitted, run.started, run.ended) if moment is not None]
    run.began = min(known, default=0.0)
    run.span_class = span_class(run.began, run.ended)
    if run.ended is None or run.started is None or not run.slice_count:
        return
    state = inspect(run)
    if (run.lesson or 0) >= 0 and any(state.attrs[name].history.has_changes() for name in _TEACHING):
        run.lesson = -1 - (run.lesson or 0)


class StoredLease(Base):
    """One slice held by one run, from `since` to `until`. `outcome`: released, moved (replaced at a restart), lost,
    returned (its node was taken from the job before its end).
    """

    __tablename__ = "leases"
    __table_args__ = (Index("ix_leases_run", "run_id"), Index("ix_leases_open", "until", "node"))

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    job_id: Mapped[int]
    restart: Mapped[int] = mapped_column(Integer)
    node: Mapped[str] = mapped_column(String(255))
    journal: Mapped[str] = mapped_column(String(64))
    position: Mapped[int] = mapped_column(Integer)
    gpu: Mapped[str] = mapped_column(String(128))
    gpu_index: Mapped[int | None] = mapped_column(Integer)
    profile: Mapped[str] = mapped_column(String(32))
    slot_start: Mapped[int] = mapped_column(Integer)
    slot_size: Mapped[int] = mapped_column(Integer)
    gi: Mapped[int | None] = mapped_column(Integer)
    ci: Mapped[int | None] = mapped_column(Integer)
    mig_uuid: Mapped[str | None] = mapped_column(String(128))
    since: Mapped[float | None]
    until: Mapped[float | None]
    outcome: Mapped[str | None] = mapped_column(String(16))


class StoredDecision(Base):
    """The submit filter's result for one request, and why."""

    __tablename__ = "decisions"
    __table_args__ = (Index("ix_decisions_ts", "ts"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    ts: Mapped[float]
    uid: Mapped[int | None]
    user: Mapped[str | None] = mapped_column(String(128))
    partition: Mapped[str | None] = mapped_column(String(128))
    asked: Mapped[str | None] = mapped_column(String(1024))
    hints: Mapped[Any] = mapped_column(JSON)
    bucket: Mapped[str | None] = mapped_column(String(256))
    candidates: Mapped[Any] = mapped_column(JSON)
    chosen: Mapped[str | None] = mapped_column(String(512))
    message: Mapped[str | None] = mapped_column(Text)
    source: Mapped[str | None] = mapped_column(String(16))
    #: other output of the filter
    facts: Mapped[Any] = mapped_column(JSON)
    #: its recurring job; empty if the filter could not identify one
    recurring: Mapped[str | None] = mapped_column(String(32))


class DatabaseIdentity(Base):
    """Identity of this database: one row with a random id, so that nodes notice when another replaces it."""

    __tablename__ = "identity"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    made: Mapped[float]


class Term(Base):
    """The active migbatchd: one row, see `store.terms`."""

    __tablename__ = "terms"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    number: Mapped[int]
    #: the host; empty after a release
    holder: Mapped[str] = mapped_column(String(255))
    #: by the database server's clock, unix seconds
    until: Mapped[float]


class StoredNode(Base):
    """The state of one node's reports: its current journal and boot."""

    __tablename__ = "nodes"

    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    journal: Mapped[str | None] = mapped_column(String(64))
    boot_id: Mapped[str | None] = mapped_column(String(64))
    booted: Mapped[float | None]
    seen: Mapped[float]
    #: number of the `state` event since which all its events are recorded; empty if some are missing
    told: Mapped[int | None]


class NodeJournal(Base):
    """How far one journal of one node has been read without a gap."""

    __tablename__ = "journals"

    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    journal: Mapped[str] = mapped_column(String(64), primary_key=True)
    contiguous: Mapped[int] = mapped_column(default=0)
    #: number up to which events were removed because of their age (`store.retention`): a repeated one is not new; 0: an
    #: earlier journal of the node was removed
    forgotten: Mapped[int | None]
    #: when another journal replaced it; its leases ended then
    superseded: Mapped[float | None]


class NodeEvent(Base):
    """One event as the node sent it."""

    __tablename__ = "node_events"
    __table_args__ = (
        UniqueConstraint("node", "journal", "seq", name="uq_node_events_identity"),
        Index("ix_node_events_kind", "kind", "ts"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    node: Mapped[str] = mapped_column(String(255))
    journal: Mapped[str] = mapped_column(String(64))
    seq: Mapped[int]
    ts: Mapped[float]
    kind: Mapped[str] = mapped_column(String(64))
    payload: Mapped[Any] = mapped_column(JSON)
    received: Mapped[float]


class StoredGpu(Base):
    """One GPU as its node last described it."""

    __tablename__ = "gpus"

    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    uuid: Mapped[str] = mapped_column(String(128), primary_key=True)
    minor: Mapped[int | None] = mapped_column(Integer)
    gpu_index: Mapped[int | None] = mapped_column(Integer)
    name: Mapped[str | None] = mapped_column(String(128))
    mig: Mapped[bool] = mapped_column(default=False)
    geometry: Mapped[Any] = mapped_column(JSON)
    facts: Mapped[Any] = mapped_column(JSON)
    #: in the node's latest inventory
    present: Mapped[bool] = mapped_column(default=True)
    seen: Mapped[float]


class SupplyChange(Base):
    """The slice counts that Slurm was given for a node, when and why."""

    __tablename__ = "supply_changes"
    __table_args__ = (Index("ix_supply_changes_node", "node", "ts"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    node: Mapped[str] = mapped_column(String(255))
    ts: Mapped[float]
    version: Mapped[int]
    counts: Mapped[Any] = mapped_column(JSON)
    why: Mapped[str | None] = mapped_column(Text)


class Job(Base):
    """The latest state of a job id in Slurm."""

    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_live", "live"),)

    job_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    live: Mapped[bool]
    state: Mapped[str] = mapped_column(String(24))
    seen: Mapped[float]
    #: the whole row, for fields without a column
    facts: Mapped[Any] = mapped_column(JSON)


class StoredLoan(Base):
    """One release of one elastic training job, from the decision to its end; `ended` is empty until then.

    `state`: released, running, signalled, requeued, withdrawn, ended (see `decide.lending.loan`).
    """

    __tablename__ = "loans"
    __table_args__ = (
        UniqueConstraint("job_id", "restart", "decided", name="uq_loans_identity"),
        Index("ix_loans_ended", "ended"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int]
    #: Slurm's restart count of its run
    restart: Mapped[int] = mapped_column(Integer)
    uid: Mapped[int | None]
    user: Mapped[str | None] = mapped_column(String(128))
    account: Mapped[str | None] = mapped_column(String(128))
    partition: Mapped[str | None] = mapped_column(String(128))
    profile: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16))
    node: Mapped[str | None] = mapped_column(String(255))
    gpu: Mapped[str | None] = mapped_column(String(128))
    decided: Mapped[float]
    released: Mapped[float | None]
    started: Mapped[float | None]
    signalled: Mapped[float | None]
    #: time of the checkpoint that the job reported after the signal
    checkpoint: Mapped[float | None]
    requeued: Mapped[float | None]
    ended: Mapped[float | None]
    why: Mapped[str | None] = mapped_column(Text)
    #: a value of `decide.lending.loan.Cause`
    cause: Mapped[str | None] = mapped_column(String(16))
    why_ended: Mapped[str | None] = mapped_column(Text)


class Action(Base):
    """One action of migbatchd on a job, or with `dry_run` one that it would have taken.

    `kind`: release, withdraw, signal, requeue, retype, throttle, share, move, preempt, hold. `outcome` is empty if
    Slurm applied it.
    """

    __tablename__ = "actions"
    __table_args__ = (Index("ix_actions_job", "job_id"), Index("ix_actions_ts", "ts"))

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    ts: Mapped[float]
    job_id: Mapped[int]
    restart: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(16))
    before: Mapped[str | None] = mapped_column(String(512))
    after: Mapped[str | None] = mapped_column(String(512))
    why: Mapped[str | None] = mapped_column(Text)
    dry_run: Mapped[bool]
    outcome: Mapped[str | None] = mapped_column(String(512))


class OldLesson(Base):
    """Training data of the predictor from a run that was removed because of its age, see `store.retention`."""

    __tablename__ = "old_lessons"

    #: lesson number of the run, `Run.lesson`
    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    #: the fields of `workload.lesson.Lesson`
    lesson: Mapped[Any] = mapped_column(JSON)


class MeasuredPoint(Base):
    """One measured point of a model: the columns of `profiling.measurement.Measurement`, and its source."""

    __tablename__ = "measurements"
    __table_args__ = (
        UniqueConstraint("point", name="uq_measurements_point"),
        Index("ix_measurements_model", "model", "kind"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    #: digest of the columns that identify the point; some may be unknown, which no database treats as unique
    point: Mapped[str] = mapped_column(String(64))
    #: the import of these values, and its time
    batch_id: Mapped[str] = mapped_column(String(16))
    imported: Mapped[float]
    gpu: Mapped[str] = mapped_column(String(128))
    model: Mapped[str] = mapped_column(String(128))
    family: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(8))
    profile: Mapped[str] = mapped_column(String(32))
    compute_slices: Mapped[int | None] = mapped_column(Integer)
    memory_slices: Mapped[int | None] = mapped_column(Integer)
    sm_count: Mapped[int | None] = mapped_column(Integer)
    batch: Mapped[int] = mapped_column(Integer)
    input_size: Mapped[int | None] = mapped_column(Integer)
    procs: Mapped[int] = mapped_column(Integer)
    throughput_per_s: Mapped[float | None]
    latency_s: Mapped[float | None]
    latency_p99_s: Mapped[float | None]
    memory_mib: Mapped[float | None]
    params: Mapped[float | None]
    flops_per_item: Mapped[float | None]
    source: Mapped[str] = mapped_column(String(256))
    engine: Mapped[str] = mapped_column(String(32))
    precision: Mapped[str] = mapped_column(String(32))
    output: Mapped[int | None] = mapped_column(Integer)
    ttft_s: Mapped[float | None]
    ttft_p99_s: Mapped[float | None]
    tpot_s: Mapped[float | None]
    tpot_p99_s: Mapped[float | None]
    tuning: Mapped[str] = mapped_column(String(64))

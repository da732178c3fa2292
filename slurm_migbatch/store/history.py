"""Migration steps, in order; each is frozen once it was released.

A step may be repeated after an interruption (MariaDB cannot roll back DDL), so every step skips what exists.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.schema import CreateColumn

from slurm_migbatch.store.migrations import Migration, table_options
from slurm_migbatch.store.steps import STEPS

_BIG = BigInteger().with_variant(Integer(), "sqlite")


def _text(name: str, length: int, *, null: bool = True, key: bool = False) -> Column[object]:
    return Column(name, String(length), nullable=null and not key, primary_key=key)


def _whole(name: str, *, null: bool = True) -> Column[object]:
    return Column(name, Integer, nullable=null)


def _big(name: str, *, null: bool = True) -> Column[object]:
    return Column(name, BigInteger, nullable=null)


def _real(name: str, *, null: bool = True) -> Column[object]:
    return Column(name, Double, nullable=null)


def _yes(name: str, *, null: bool = False) -> Column[object]:
    return Column(name, Boolean, nullable=null)


def _json(name: str) -> Column[object]:
    return Column(name, JSON, nullable=False)


def _serial() -> Column[object]:
    return Column("id", _BIG, primary_key=True)


def _names(connection: Connection, table: str) -> set[str]:
    return {column["name"] for column in inspect(connection).get_columns(table)}


def _add(connection: Connection, name: str, *columns: Column[Any]) -> Table:
    """Add the columns that the table lacks."""
    existing, table = _names(connection, name), Table(name, MetaData(), *columns)
    for column in table.columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {definition}"))
    return table


def _create(
    connection: Connection, meta: MetaData, name: str, *items: Column[object] | Index | UniqueConstraint
) -> Table:
    """Create a table with its indexes, unless it exists."""
    table = Table(name, meta, *items, **table_options(connection))
    table.create(connection, checkfirst=True)
    return table


def _first_tables(connection: Connection) -> None:
    table = partial(_create, connection, MetaData())
    table(
        "runs",
        _serial(), _big("job_id", null=False), _whole("restart", null=False), _whole("reuse", null=False),
        _yes("latest"),
        _big("array_job"), _text("array_task", 256), _big("het_job"), _whole("het_offset"),
        _big("uid"), _text("user", 128), _text("account", 128), _text("partition", 128), _text("name", 256),
        Column("nodes", Text),
        _text("state", 24, null=False), _text("state_from", 8, null=False), _text("reason", 512),
        _whole("exit_code"), _whole("signal"), _real("submitted"), _real("started"), _real("ended"),
        _big("time_limit_s"),
        _real("began", null=False), _whole("span_class", null=False),
        _text("asked", 1024), _text("bucket", 256), _text("decision", 16), _text("source", 16),
        _text("profile", 512), _whole("slice_count", null=False), _yes("warm", null=True), _real("setup_ms"),
        _real("predicted_latency_ms"), _real("predicted_throughput_per_s"), _real("predicted_memory_mib"),
        _real("measured_latency_ms"), _real("measured_throughput_per_s"), _real("measured_memory_mib"),
        UniqueConstraint("job_id", "reuse", "restart", name="uq_runs_identity"),
        Index("ix_runs_array_job", "array_job"),
        Index("ix_runs_het_job", "het_job"),
        Index("ix_runs_window", "span_class", "ended"),
        Index("ix_runs_decision", "decision"),
    )  # fmt: skip
    table(
        "leases",
        _serial(), Column("run_id", _BIG, ForeignKey("runs.id"), nullable=False),
        _big("job_id", null=False), _whole("restart", null=False),
        _text("node", 255, null=False), _text("journal", 64, null=False), _whole("position", null=False),
        _text("gpu", 128, null=False), _whole("gpu_index"), _text("profile", 32, null=False),
        _whole("slot_start", null=False), _whole("slot_size", null=False), _whole("gi"), _whole("ci"),
        _text("mig_uuid", 128), _real("since"), _real("until"), _text("outcome", 16),
        Index("ix_leases_run", "run_id"),
        Index("ix_leases_open", "until", "node"),
    )  # fmt: skip
    table(
        "decisions",
        _text("id", 16, key=True), _real("ts", null=False), _big("uid"), _text("user", 128), _text("partition", 128),
        _text("asked", 1024), _json("hints"), _text("bucket", 256), _json("candidates"), _text("chosen", 512),
        Column("message", Text), _text("source", 16), _json("facts"),
        Index("ix_decisions_ts", "ts"),
    )  # fmt: skip
    table(
        "nodes",
        _text("node", 255, key=True), _text("journal", 64), _text("boot_id", 64), _real("booted"),
        _real("seen", null=False),
    )  # fmt: skip
    table(
        "journals",
        _text("node", 255, key=True), _text("journal", 64, key=True), _big("contiguous", null=False),
        _real("superseded"),
    )  # fmt: skip
    table(
        "node_events",
        _serial(), _text("node", 255, null=False), _text("journal", 64, null=False), _big("seq", null=False),
        _real("ts", null=False), _text("kind", 64, null=False), _json("payload"), _real("received", null=False),
        UniqueConstraint("node", "journal", "seq", name="uq_node_events_identity"),
        Index("ix_node_events_kind", "kind", "ts"),
    )  # fmt: skip
    table(
        "gpus",
        _text("node", 255, key=True), _text("uuid", 128, key=True), _whole("minor"), _whole("gpu_index"),
        _text("name", 128), _yes("mig"), _json("geometry"), _json("facts"), _yes("present"), _real("seen", null=False),
    )  # fmt: skip
    table(
        "supply_changes",
        _serial(), _text("node", 255, null=False), _real("ts", null=False), _big("version", null=False),
        _json("counts"),
        Column("why", Text),
        Index("ix_supply_changes_node", "node", "ts"),
    )  # fmt: skip
    table(
        "jobs",
        Column("job_id", _BIG, primary_key=True, autoincrement=False), _yes("live"), _text("state", 24, null=False),
        _real("seen", null=False), _json("facts"),
        Index("ix_jobs_live", "live"),
    )  # fmt: skip


def _measurements(connection: Connection) -> None:
    text = partial(_text, null=False)
    _create(
        connection, MetaData(), "measurements",
        _serial(), text("point", 64), text("batch_id", 16), _real("imported", null=False),
        text("gpu", 128), text("model", 128), text("family", 64), text("kind", 8), text("profile", 32),
        _whole("compute_slices"), _whole("memory_slices"), _whole("sm_count"),
        _whole("batch", null=False), _whole("input_size"), _whole("procs", null=False),
        _real("throughput_per_s"), _real("latency_s"), _real("latency_p99_s"), _real("memory_mib"),
        _real("params"), _real("flops_per_item"), text("source", 256),
        UniqueConstraint("point", name="uq_measurements_point"),
        Index("ix_measurements_model", "model", "kind"),
    )  # fmt: skip


def _achieved(connection: Connection) -> None:
    numbered = "lesson" in _names(connection, "runs")
    facts: Column[object] = Column("measured_facts", JSON)
    runs = _add(connection, "runs", _real("measured_items"), facts, _big("lesson"))
    Index("ix_runs_lesson", runs.c.lesson).create(connection, checkfirst=True)
    if not numbered:
        connection.execute(
            text("UPDATE runs SET lesson = id WHERE started IS NOT NULL AND ended IS NOT NULL AND slice_count > 0")
        )


def _loans(connection: Connection) -> None:
    _create(
        connection, MetaData(), "loans",
        _serial(), _big("job_id", null=False), _whole("restart", null=False),
        _big("uid"), _text("user", 128), _text("account", 128), _text("partition", 128),
        _text("profile", 32, null=False), _text("state", 16, null=False), _text("node", 255), _text("gpu", 128),
        _real("decided", null=False), _real("released"), _real("started"), _real("signalled"), _real("checkpoint"),
        _real("requeued"), _real("ended"), Column("why", Text), _text("cause", 16), Column("why_ended", Text),
        UniqueConstraint("job_id", "restart", "decided", name="uq_loans_identity"),
        Index("ix_loans_ended", "ended"),
    )  # fmt: skip
    _create(
        connection, MetaData(), "actions",
        _serial(), _real("ts", null=False), _big("job_id", null=False), _whole("restart", null=False),
        _text("kind", 16, null=False), _text("before", 512), _text("after", 512), Column("why", Text),
        _yes("dry_run"), _text("outcome", 512),
        Index("ix_actions_job", "job_id"),
        Index("ix_actions_ts", "ts"),
    )  # fmt: skip


def _identity(connection: Connection) -> None:
    _add(connection, "nodes", _big("told"))
    table = _create(connection, MetaData(), "identity", _text("id", 64, key=True), _real("made", null=False))
    if connection.scalar(select(func.count()).select_from(table)) == 0:
        connection.execute(table.insert().values(id=secrets.token_hex(16), made=time.time()))


def _recurring(connection: Connection) -> None:
    _add(connection, "decisions", _text("recurring", 32))


def _terms(connection: Connection) -> None:
    _create(
        connection, MetaData(), "terms", Column("id", Integer, primary_key=True, autoincrement=False),
        _big("number", null=False), _text("holder", 255, null=False), _real("until", null=False),
    )  # fmt: skip


def _retention(connection: Connection) -> None:
    _add(connection, "journals", _big("forgotten"))
    number: Column[object] = Column("number", _BIG, primary_key=True, autoincrement=False)
    _create(connection, MetaData(), "old_lessons", number, _json("lesson"))


def _served(connection: Connection) -> None:
    _add(
        connection,
        "measurements",
        Column("engine", String(32), nullable=False, server_default=""),
        Column("precision", String(32), nullable=False, server_default=""),
        _whole("output"),
        *(_real(name) for name in ("ttft_s", "ttft_p99_s", "tpot_s", "tpot_p99_s")),
    )


def _trained(connection: Connection) -> None:
    _add(connection, "measurements", Column("tuning", String(64), nullable=False, server_default=""))


def _accounting(connection: Connection) -> None:
    _add(connection, "runs", _big("gid"), _text("qos", 128), _text("wckey", 128), _text("comment", 1024))


def _users(connection: Connection) -> None:
    existing = {index["name"] for index in inspect(connection).get_indexes("runs")}
    columns: tuple[Column[object], ...] = (
        Column("user", String(64)), Column("uid", BigInteger), Column("span_class", Integer), Column("ended", Double),
    )  # fmt: skip
    table = Table("runs", MetaData(), *columns)
    for name in ("user", "uid"):
        if f"ix_runs_{name}" not in existing:
            Index(f"ix_runs_{name}", table.c[name], table.c.span_class, table.c.ended).create(connection)


def _suspended(connection: Connection) -> None:
    _add(connection, "runs", _real("suspended"), _real("resumed"))


def _placed(connection: Connection) -> None:
    _add(connection, "runs", Column("placed", Boolean))


_APPLY = (
    _first_tables,
    _measurements,
    _achieved,
    _loans,
    _identity,
    _recurring,
    _terms,
    _retention,
    _served,
    _accounting,
    _trained,
    _users,
    _suspended,
    _placed,
)

HISTORY: tuple[Migration, ...] = tuple(Migration(name, apply) for name, apply in zip(STEPS, _APPLY, strict=True))

"""Migration steps, in order; each is frozen once it was released.

A step may be repeated after an interruption (MariaDB cannot roll back DDL), so every step skips what exists.
"""

from __future__ import annotations

import secrets
import time

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

from slurm_migbatch.store.migrations import Migration
from slurm_migbatch.store.models import TABLE_OPTIONS
from slurm_migbatch.store.steps import STEPS

_BIG = BigInteger().with_variant(Integer(), "sqlite")


def _first_tables(connection: Connection) -> None:
    meta = MetaData()

    def table(name: str, *items: Column[object] | Index | UniqueConstraint) -> None:
        Table(name, meta, *items, **TABLE_OPTIONS)

    def text(name: str, length: int, *, null: bool = True, key: bool = False) -> Column[object]:
        return Column(name, String(length), nullable=null and not key, primary_key=key)

    def whole(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, Integer, nullable=null)

    def big(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, BigInteger, nullable=null)

    def real(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, Double, nullable=null)

    def yes(name: str, *, null: bool = False) -> Column[object]:
        return Column(name, Boolean, nullable=null)

    def json(name: str) -> Column[object]:
        return Column(name, JSON, nullable=False)

    def serial() -> Column[object]:
        return Column("id", _BIG, primary_key=True)

    table(
        "runs",
        serial(), big("job_id", null=False), whole("restart", null=False), whole("reuse", null=False), yes("latest"),
        big("array_job"), text("array_task", 256), big("het_job"), whole("het_offset"),
        big("uid"), text("user", 128), text("account", 128), text("partition", 128), text("name", 256),
        Column("nodes", Text),
        text("state", 24, null=False), text("state_from", 8, null=False), text("reason", 512),
        whole("exit_code"), whole("signal"), real("submitted"), real("started"), real("ended"), big("time_limit_s"),
        real("began", null=False), whole("span_class", null=False),
        text("asked", 1024), text("bucket", 256), text("decision", 16), text("source", 16),
        text("profile", 512), whole("slice_count", null=False), yes("warm", null=True), real("setup_ms"),
        real("predicted_latency_ms"), real("predicted_throughput_per_s"), real("predicted_memory_mib"),
        real("measured_latency_ms"), real("measured_throughput_per_s"), real("measured_memory_mib"),
        UniqueConstraint("job_id", "reuse", "restart", name="uq_runs_identity"),
        Index("ix_runs_array_job", "array_job"),
        Index("ix_runs_het_job", "het_job"),
        Index("ix_runs_window", "span_class", "ended"),
        Index("ix_runs_decision", "decision"),
    )  # fmt: skip
    table(
        "leases",
        serial(), Column("run_id", _BIG, ForeignKey("runs.id"), nullable=False),
        big("job_id", null=False), whole("restart", null=False),
        text("node", 255, null=False), text("journal", 64, null=False), whole("position", null=False),
        text("gpu", 128, null=False), whole("gpu_index"), text("profile", 32, null=False),
        whole("slot_start", null=False), whole("slot_size", null=False), whole("gi"), whole("ci"),
        text("mig_uuid", 128), real("since"), real("until"), text("outcome", 16),
        Index("ix_leases_run", "run_id"),
        Index("ix_leases_open", "until", "node"),
    )  # fmt: skip
    table(
        "decisions",
        text("id", 16, key=True), real("ts", null=False), big("uid"), text("user", 128), text("partition", 128),
        text("asked", 1024), json("hints"), text("bucket", 256), json("candidates"), text("chosen", 512),
        Column("message", Text), text("source", 16), json("facts"),
        Index("ix_decisions_ts", "ts"),
    )  # fmt: skip
    table(
        "nodes",
        text("node", 255, key=True), text("journal", 64), text("boot_id", 64), real("booted"), real("seen", null=False),
    )  # fmt: skip
    table(
        "journals",
        text("node", 255, key=True), text("journal", 64, key=True), big("contiguous", null=False), real("superseded"),
    )  # fmt: skip
    table(
        "node_events",
        serial(), text("node", 255, null=False), text("journal", 64, null=False), big("seq", null=False),
        real("ts", null=False), text("kind", 64, null=False), json("payload"), real("received", null=False),
        UniqueConstraint("node", "journal", "seq", name="uq_node_events_identity"),
        Index("ix_node_events_kind", "kind", "ts"),
    )  # fmt: skip
    table(
        "gpus",
        text("node", 255, key=True), text("uuid", 128, key=True), whole("minor"), whole("gpu_index"),
        text("name", 128), yes("mig"), json("geometry"), json("facts"), yes("present"), real("seen", null=False),
    )  # fmt: skip
    table(
        "supply_changes",
        serial(), text("node", 255, null=False), real("ts", null=False), big("version", null=False), json("counts"),
        Column("why", Text),
        Index("ix_supply_changes_node", "node", "ts"),
    )  # fmt: skip
    table(
        "jobs",
        Column("job_id", _BIG, primary_key=True, autoincrement=False), yes("live"), text("state", 24, null=False),
        real("seen", null=False), json("facts"),
        Index("ix_jobs_live", "live"),
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)


def _measurements(connection: Connection) -> None:
    meta = MetaData()

    def text(name: str, length: int) -> Column[object]:
        return Column(name, String(length), nullable=False)

    def whole(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, Integer, nullable=null)

    def real(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, Double, nullable=null)

    Table(
        "measurements",
        meta,
        Column("id", _BIG, primary_key=True),
        text("point", 64), text("batch_id", 16), real("imported", null=False),
        text("gpu", 128), text("model", 128), text("family", 64), text("kind", 8), text("profile", 32),
        whole("compute_slices"), whole("memory_slices"), whole("sm_count"),
        whole("batch", null=False), whole("input_size"), whole("procs", null=False),
        real("throughput_per_s"), real("latency_s"), real("latency_p99_s"), real("memory_mib"),
        real("params"), real("flops_per_item"), text("source", 256),
        UniqueConstraint("point", name="uq_measurements_point"),
        Index("ix_measurements_model", "model", "kind"),
        **TABLE_OPTIONS,
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)


def _achieved(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("runs")}
    columns = (Column("measured_items", Double), Column("measured_facts", JSON), Column("lesson", BigInteger))
    runs = Table("runs", MetaData(), Column("id", _BIG, primary_key=True), *columns)
    for column in columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE runs ADD COLUMN {definition}"))
    Index("ix_runs_lesson", runs.c.lesson).create(connection, checkfirst=True)
    if "lesson" not in existing:
        connection.execute(
            text("UPDATE runs SET lesson = id WHERE started IS NOT NULL AND ended IS NOT NULL AND slice_count > 0")
        )


def _loans(connection: Connection) -> None:
    meta = MetaData()

    def text(name: str, length: int, *, null: bool = True) -> Column[object]:
        return Column(name, String(length), nullable=null)

    def real(name: str, *, null: bool = True) -> Column[object]:
        return Column(name, Double, nullable=null)

    Table(
        "loans",
        meta,
        Column("id", _BIG, primary_key=True),
        Column("job_id", BigInteger, nullable=False), Column("restart", Integer, nullable=False),
        Column("uid", BigInteger), text("user", 128), text("account", 128), text("partition", 128),
        text("profile", 32, null=False), text("state", 16, null=False), text("node", 255), text("gpu", 128),
        real("decided", null=False), real("released"), real("started"), real("signalled"), real("checkpoint"),
        real("requeued"), real("ended"), Column("why", Text), text("cause", 16), Column("why_ended", Text),
        UniqueConstraint("job_id", "restart", "decided", name="uq_loans_identity"),
        Index("ix_loans_ended", "ended"),
        **TABLE_OPTIONS,
    )  # fmt: skip
    Table(
        "actions",
        meta,
        Column("id", _BIG, primary_key=True),
        real("ts", null=False),
        Column("job_id", BigInteger, nullable=False), Column("restart", Integer, nullable=False),
        text("kind", 16, null=False), text("before", 512), text("after", 512), Column("why", Text),
        Column("dry_run", Boolean, nullable=False), text("outcome", 512),
        Index("ix_actions_job", "job_id"),
        Index("ix_actions_ts", "ts"),
        **TABLE_OPTIONS,
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)


def _identity(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("nodes")}
    if "told" not in existing:
        connection.execute(text("ALTER TABLE nodes ADD COLUMN told BIGINT"))
    meta = MetaData()
    table = Table(
        "identity", meta, Column("id", String(64), primary_key=True), Column("made", Double, nullable=False),
        **TABLE_OPTIONS,
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)
    if connection.scalar(select(func.count()).select_from(table)) == 0:
        connection.execute(table.insert().values(id=secrets.token_hex(16), made=time.time()))


def _recurring(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("decisions")}
    if "recurring" not in existing:
        connection.execute(text("ALTER TABLE decisions ADD COLUMN recurring VARCHAR(32)"))


def _terms(connection: Connection) -> None:
    meta = MetaData()
    Table(
        "terms", meta, Column("id", Integer, primary_key=True, autoincrement=False),
        Column("number", BigInteger, nullable=False), Column("holder", String(255), nullable=False),
        Column("until", Double, nullable=False), **TABLE_OPTIONS,
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)


def _retention(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("journals")}
    if "forgotten" not in existing:
        connection.execute(text("ALTER TABLE journals ADD COLUMN forgotten BIGINT"))
    meta = MetaData()
    Table(
        "old_lessons", meta, Column("number", _BIG, primary_key=True, autoincrement=False),
        Column("lesson", JSON, nullable=False), **TABLE_OPTIONS,
    )  # fmt: skip
    meta.create_all(connection, checkfirst=True)


def _served(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("measurements")}
    columns: tuple[Column[object], ...] = (
        Column("engine", String(32), nullable=False, server_default=""),
        Column("precision", String(32), nullable=False, server_default=""),
        Column("output", Integer),
        *(Column(name, Double) for name in ("ttft_s", "ttft_p99_s", "tpot_s", "tpot_p99_s")),
    )
    Table("measurements", MetaData(), *columns)
    for column in columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE measurements ADD COLUMN {definition}"))


def _trained(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("measurements")}
    if "tuning" not in existing:
        connection.execute(text("ALTER TABLE measurements ADD COLUMN tuning VARCHAR(64) DEFAULT '' NOT NULL"))


def _accounting(connection: Connection) -> None:
    existing = {column["name"] for column in inspect(connection).get_columns("runs")}
    columns: tuple[Column[object], ...] = (
        Column("gid", BigInteger),
        Column("qos", String(128)),
        Column("wckey", String(128)),
        Column("comment", String(1024)),
    )
    Table("runs", MetaData(), *columns)
    for column in columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE runs ADD COLUMN {definition}"))


def _users(connection: Connection) -> None:
    existing = {index["name"] for index in inspect(connection).get_indexes("runs")}
    columns: tuple[Column[object], ...] = (
        Column("user", String(64)), Column("uid", BigInteger), Column("span_class", Integer), Column("ended", Double),
    )  # fmt: skip
    table = Table("runs", MetaData(), *columns)
    for name in ("user", "uid"):
        if f"ix_runs_{name}" not in existing:
            Index(f"ix_runs_{name}", table.c[name], table.c.span_class, table.c.ended).create(connection)


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
)

HISTORY: tuple[Migration, ...] = tuple(Migration(name, apply) for name, apply in zip(STEPS, _APPLY, strict=True))

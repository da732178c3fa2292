"""Databases as earlier releases left them: the schema of any step of the history, with rows in every table."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from sqlalchemy import JSON, MetaData, Table, insert, select

from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.migrations import migrate

AT = 1_700_000_000.25
#: rows by table, with the current columns; columns that an old schema lacks are left out
ROWS: dict[str, list[dict[str, Any]]] = {
    "runs": [
        {
            "id": 5, "job_id": 41, "restart": 1, "reuse": 0, "latest": True, "array_job": 40, "array_task": "3",
            "uid": 1001, "user": "alice", "account": "ml", "partition": "gpu", "name": "übung \U0001f600",
            "gid": 1001, "qos": "normal", "wckey": "paper", "comment": "a comment",
            "nodes": "n1", "state": "COMPLETED", "state_from": "slurm", "exit_code": 0, "signal": 0,
            "submitted": AT - 30, "started": AT - 20, "ended": AT, "time_limit_s": 600, "began": AT - 30,
            "span_class": 3, "asked": "mig:auto", "bucket": "bert", "decision": "7fq3k", "source": "auto",
            "profile": "1g.10gb", "slice_count": 1, "warm": False, "setup_ms": 12.5, "predicted_latency_ms": 3.5,
            "measured_memory_mib": 4000.0, "measured_items": 12.0, "measured_facts": {"by": {"memory_mib": "driver"}},
            "lesson": 1,
        },
        {
            "id": 9, "job_id": 42, "restart": 0, "reuse": 0, "latest": True, "state": "RUNNING", "state_from": "node",
            "submitted": AT - 5, "started": AT, "began": AT - 5, "span_class": 0, "slice_count": 1, "warm": True,
            "profile": "2g.20gb",
        },
    ],
    "leases": [
        {
            "id": 3, "run_id": 5, "job_id": 41, "restart": 1, "node": "n1", "journal": "aa", "position": 0,
            "gpu": "GPU-a", "gpu_index": 0, "profile": "1g.10gb", "slot_start": 0, "slot_size": 1, "gi": 7, "ci": 0,
            "mig_uuid": "MIG-x", "since": AT - 20, "until": AT, "outcome": "released",
        },
        {
            "id": 4, "run_id": 9, "job_id": 42, "restart": 0, "node": "n1", "journal": "aa", "position": 0,
            "gpu": "GPU-a", "gpu_index": 0, "profile": "2g.20gb", "slot_start": 2, "slot_size": 2, "gi": 3, "ci": 0,
            "mig_uuid": "MIG-y", "since": AT, "until": None, "outcome": None,
        },
    ],
    "decisions": [
        {
            "id": "7fq3k", "ts": AT - 31, "uid": 1001, "user": "alice", "partition": "gpu", "asked": "mig:auto",
            "hints": {"model": "bert-base", "batch": 8}, "bucket": "bert", "candidates": [{"profile": "1g.10gb"}],
            "chosen": "mig:1g.10gb:1", "message": "snowman \N{SNOWMAN}", "source": "auto",
            "facts": {"deep": [1.5, None]},
        }
    ],
    "nodes": [{"node": "n1", "journal": "aa", "boot_id": "b1", "booted": AT - 99, "seen": AT, "told": 2}],
    "journals": [{"node": "n1", "journal": "aa", "contiguous": 3, "superseded": None}],
    "node_events": [
        {"id": seq, "node": "n1", "journal": "aa", "seq": seq, "ts": AT - 20 + seq, "kind": "start",
         "payload": {"job": 41}, "received": AT}
        for seq in (1, 2, 3)
    ],
    "gpus": [
        {"node": "n1", "uuid": "GPU-a", "minor": 0, "gpu_index": 0, "name": "H100", "mig": True,
         "geometry": {"slots": []}, "facts": {}, "present": True, "seen": AT}
    ],
    "supply_changes": [{"id": 1, "node": "n1", "ts": AT, "version": 4, "counts": {"1g.10gb": 3}, "why": "queue"}],
    "jobs": [{"job_id": 42, "live": True, "state": "RUNNING", "seen": AT, "facts": {"state": "RUNNING"}}],
    "measurements": [
        {"id": 1, "point": "ab" * 32, "batch_id": "cd", "imported": AT, "gpu": "h100", "model": "bert-base",
         "family": "bert", "kind": "infer", "profile": "1g.10gb", "batch": 8, "procs": 1, "throughput_per_s": 10.0,
         "source": "lab"}
    ],
    "loans": [
        {"id": 1, "job_id": 50, "restart": 0, "profile": "1g.10gb", "state": "ended", "decided": AT - 9, "ended": AT}
    ],
    "actions": [{"id": 1, "ts": AT, "job_id": 50, "restart": 0, "kind": "release", "dry_run": False}],
    "terms": [{"id": 1, "number": 6, "holder": "", "until": 0.0}],
    "old_lessons": [{"number": 0, "lesson": {"model": "bert-base"}}],
}  # fmt: skip


def make_old(url: str, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Create the schema after `steps` migrations with rows in every table; return all rows as read back."""
    engine = make_engine(url, readonly=False)
    migrate(engine, HISTORY[:steps])
    metadata = MetaData()
    metadata.reflect(engine)
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            for row in ROWS.get(table.name, ()):
                connection.execute(insert(table).values(**_known(table, row)))
        if engine.dialect.name == "postgresql":
            for table in metadata.sorted_tables:
                if "id" in table.columns and table.name not in ("decisions", "identity", "terms"):
                    connection.exec_driver_sql(
                        f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), max(id)) FROM {table.name}"
                    )
    rows = all_rows(url)
    engine.dispose()
    return rows


def _known(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in row.items() if name in table.columns}
    # MariaDB reflects a JSON column as long text
    return {
        name: json.dumps(value) if isinstance(value, (dict, list)) and not isinstance(table.columns[name].type, JSON)
        else value for name, value in values.items()
    }  # fmt: skip


def all_rows(url: str) -> dict[str, list[dict[str, Any]]]:
    """Return every row of every table, in the order of their keys; JSON documents are decoded."""
    engine = make_engine(url, readonly=True)
    metadata = MetaData()
    metadata.reflect(engine)
    with engine.connect() as connection:
        rows = {
            table.name: [
                {name: _plain(value) for name, value in row.items()}
                for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
            ]
            for table in metadata.sorted_tables
        }
    engine.dispose()
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        return json.loads(value)
    if isinstance(value, Decimal):  # MariaDB returns a double as Decimal
        return float(value)
    return int(value) if isinstance(value, bool) else value

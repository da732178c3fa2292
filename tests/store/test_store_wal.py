"""The write-ahead log of an SQLite record stays bounded, however its readers overlap."""

from __future__ import annotations

import fcntl
import logging
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.store import engines, wal
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.sqlitefile import log_bytes
from slurm_migbatch.store.wal import LogBound
from tests.support.stores import prepared

pytestmark = pytest.mark.sqlite

LIMIT = 1 << 20
NOBODY = 65534
MARKS = 4
"""Snapshots of different times that SQLite can tell apart (WAL_READ_LOCK in its wal.c, without the one of the file)."""
OVERLAPPING = """
import os, sqlite3, sys, time
if int(sys.argv[2]):
    os.setuid(int(sys.argv[2]))

def snapshot():
    link = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None, timeout=600)
    link.execute("BEGIN")
    link.execute("SELECT count(*) FROM nodes").fetchall()
    return link

held = [snapshot() for _ in range(int(sys.argv[3]))]
print("reading", flush=True)
while True:
    held.append(snapshot())
    time.sleep(0.005)
    held.pop(0).close()
"""


@pytest.fixture
def file(open_tmp_path: Path) -> Path:
    """Where the record is; other users can read the directory."""
    return open_tmp_path / "migbatch.db"


@pytest.fixture
def store(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Store]:
    """An empty record; the writer is patient, because readers of a busy test machine are slow."""
    monkeypatch.setattr(wal, "FIRST_S", wal.LONGEST_S)
    caplog.set_level(logging.INFO, "slurm_migbatch.store.wal")
    url = prepared(f"sqlite:///{file}")
    file.chmod(0o644)
    with open_store(url) as opened:
        yield opened


@contextmanager
def overlapping_readers(file: Path, uid: int = 0, snapshots: int = 1) -> Iterator[None]:
    """A process of this user that always begins to read before it ends an earlier snapshot; it keeps so many."""
    argv = [sys.executable, "-ISc", OVERLAPPING, str(file), str(uid), str(snapshots)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as reading:
        try:
            assert reading.stdout is not None
            assert reading.stdout.readline() == b"reading\n"
            yield
        finally:
            reading.kill()
    assert reading.returncode == -signal.SIGKILL, "it has read to the end"


@contextmanager
def stopped_reader(file: Path) -> Iterator[None]:
    """A snapshot that stays."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, isolation_level=None)) as link:
        link.execute("BEGIN")
        link.execute("SELECT count(*) FROM nodes").fetchall()
        yield


@pytest.fixture
def commit(store: Store) -> Callable[[], None]:
    """A function that commits a row of a few pages."""
    with store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE notes (text VARCHAR)")

    return partial(add_row, store)


def add_row(store: Store) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO notes VALUES (?)", ("x" * 20_000,))


def grow(file: Path, commit: Callable[[], None], size: int) -> None:
    """Commit until the log is larger than `size`."""
    for _ in range(size // 10_000):
        commit()
        if log_bytes(file) > size:
            return
    raise AssertionError("the log does not grow")


def never() -> bool:
    return False


@pytest.mark.slow
@pytest.mark.parametrize("uid", [0, NOBODY], ids=["reader of the same user", "reader that cannot write"])
@pytest.mark.parametrize("snapshots", [1, 2 * MARKS])
def test_log_is_truncated_while_readers_overlap(
    store: Store, file: Path, commit: Callable[[], None], uid: int, snapshots: int
) -> None:
    bound = LogBound(file, LIMIT)
    with overlapping_readers(file, uid, snapshots):
        grow(file, commit, 8 * LIMIT)  # SQLite itself begins it again at 4 MiB if nobody reads
        bound.keep(never)
        assert log_bytes(file) == 0
        for _ in range(200):
            commit()
            bound.keep(never)
            assert log_bytes(file) < 2 * LIMIT


def test_writer_of_migbatchd_bounds_the_log(
    file: Path, commit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "LIMIT_BYTES", LIMIT)
    writer = StoreWriter(lambda: open_store(f"sqlite:///{file}"), 1000)
    writer.start()
    sizes = []
    with overlapping_readers(file):
        for number in range(300):
            row = {"job_id": number, "name": "x" * 20_000}
            writer.call(lambda store, row=row: store.upsert_jobs([row]), "jobs").result(120)  # type: ignore[misc]
            sizes.append(log_bytes(file))
    assert writer.stop(120) == 0
    assert max(sizes) < 2 * LIMIT


def test_log_that_a_stopped_reader_needs_is_reported_and_tried_again_later(
    store: Store,
    file: Path,
    commit: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wal, "FIRST_S", 0.001)
    monkeypatch.setattr(wal, "LARGE_BYTES", 2 * LIMIT)
    bound = LogBound(file, LIMIT)
    with stopped_reader(file):
        for failures in (1, 2, 3):
            grow(file, commit, failures * LIMIT)
            for _ in range(3):
                bound.keep(never)
            assert len(caplog.records) == failures, "once for each LIMIT by which it has grown"
        assert f"fuser -v {file}-shm" in caplog.text
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    with overlapping_readers(file):
        bound.keep(never)
        assert log_bytes(file) > 3 * LIMIT, "not before it has grown"
        monkeypatch.setattr(wal, "FIRST_S", wal.LONGEST_S)
        grow(file, commit, 4 * LIMIT)
        bound.keep(never)
        assert log_bytes(file) == 0


def test_patience_doubles_with_each_failure(
    store: Store,
    file: Path,
    commit: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wal, "FIRST_S", 8.0)
    monkeypatch.setattr(wal, "_truncated", lambda file, end, give_up: False)
    bound = LogBound(file, LIMIT)
    with stopped_reader(file):
        for failures in range(1, 6):
            grow(file, commit, failures * LIMIT)
            bound.keep(never)
    waited = [record.getMessage().partition("up to ")[2].split(" s")[0] for record in caplog.records]
    assert waited == ["8", "16", "32", "64", "64"]


def test_waiting_for_readers_ends_when_the_service_stops(store: Store, file: Path, commit: Callable[[], None]) -> None:
    asked = []

    def stops() -> bool:
        asked.append(True)
        return len(asked) > 2

    with stopped_reader(file):
        grow(file, commit, LIMIT)
        LogBound(file, LIMIT).keep(stops)
    assert len(asked) == 3


def test_error_of_the_database_does_not_end_the_writer(
    store: Store, file: Path, commit: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    grow(file, commit, LIMIT)
    file.rename(file.with_name("moved"))
    LogBound(file, LIMIT).keep(never)
    assert "unable to open database file" in caplog.text


def test_log_shrinks_by_itself_after_the_last_reader(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the size from which the writer waits; SQLite never truncates a log without `journal_size_limit`."""
    monkeypatch.setattr(engines, "KEPT_BYTES", LIMIT)
    with open_store(prepared(f"sqlite:///{file}")) as store:
        with store.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE notes (text VARCHAR)")
        insert = partial(add_row, store)
        with stopped_reader(file):
            grow(file, insert, 6 * LIMIT)
        for _ in range(2):
            insert()
        assert log_bytes(file) == LIMIT


def test_log_of_a_server_is_not_ours() -> None:
    Store(create_engine("sqlite://"), readonly=False).bound_log(never)


def test_lock_of_an_open_file_hides_no_other_process(tmp_path: Path) -> None:
    """Linux lists it without a process; whoever may read the record can hold one."""
    file, shared = tmp_path / "record.db", tmp_path / "record.db-shm"
    shared.write_bytes(bytes(200))
    with shared.open("r+b") as nameless:
        fcntl.fcntl(nameless, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 120, 1, 0))
        assert "does not name" in wal.locked_by(file) and str(shared) in wal.locked_by(file)
        hold = f"import fcntl\nheld = open({str(shared)!r}, 'rb')\nfcntl.lockf(held, fcntl.LOCK_SH, 1, 121)\n"
        hold += "input(print(flush=True))"
        line = [sys.executable, "-c", hold]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            assert f"process {process.pid} of uid 0" in wal.locked_by(file)
            process.communicate(b"\n")

"""The writing thread: order, patience with a database that is away, bounds, and a clean end."""

import concurrent.futures
import logging
import os
import shutil
import sqlite3
import subprocess
import threading
from contextlib import closing

import pytest
from sqlalchemy.exc import OperationalError

from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.store import engines
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.soundness import damages
from slurm_migbatch.store.terms import TermOverError
from tests.support.waiting import eventually


class Record:
    """A store that can be away and that can refuse."""

    moved = False
    locked_by = ""

    def __init__(self):
        self.rows = []
        self.away = 0
        self.closed = False
        self.bounded = []
        self.gate = threading.Event()
        self.gate.set()

    def add(self, row):
        self.gate.wait(120)
        if self.away:
            self.away -= 1
            raise OperationalError("insert", {}, Exception("database is locked"))
        if row == "bad":
            raise ValueError("malformed")
        self.rows.append(row)
        return len(self.rows)

    def reconnect(self):
        pass

    def bound_log(self, give_up):
        self.bounded.append(give_up())

    def close(self):
        self.closed = True


def adding(row):
    """Work for the writer, on a `Record`."""
    return lambda record: record.add(row)


@pytest.fixture
def record():
    return Record()


@pytest.fixture
def writer(record):
    writer = StoreWriter(lambda: record, 10, first_wait=0.001)
    writer.start()
    yield writer
    record.gate.set()
    writer.stop(120)


def test_results_come_back_in_order(writer, record):
    futures = [writer.call(lambda s, n=n: s.add(n), "x") for n in range(5)]
    assert [f.result(120) for f in futures] == [1, 2, 3, 4, 5]
    assert record.rows == list(range(5))


def test_locked_database_is_waited_for_and_logged_once(writer, record, caplog):
    caplog.set_level(logging.INFO)
    record.away = 4
    assert writer.call(adding("a"), "x").result(120) == 1
    messages = [r.getMessage() for r in caplog.records]
    assert len([s for s in messages if "database is locked" in s]) == 1
    assert any("recovered after" in s for s in messages)


def test_store_that_cannot_be_opened_is_retried():
    record, tries = Record(), []

    def opener():
        tries.append(1)
        if len(tries) < 3:
            raise OperationalError("connect", {}, Exception("connection refused"))
        return record

    writer = StoreWriter(opener, 10, first_wait=0.001)
    writer.start()
    assert writer.call(adding("a"), "x").result(120) == 1
    assert writer.stop(120) == 0
    assert record.closed


def test_malformed_records_do_not_hold_up_the_rest(writer, record, caplog):
    bad = writer.call(adding("bad"), "x")
    writer.post(adding("good"), "x")
    with pytest.raises(ValueError, match="malformed"):
        bad.result(120)
    assert writer.call(adding("more"), "x").result(120) == 2
    assert writer.dropped == {"x": 1}


def test_messages_that_nodes_send_to_the_next_active_migbatchd_are_not_lost(writer):
    """The alert MigbatchRecordsLost would fire at every fail-over."""

    def after_the_term(_):
        raise TermOverError("migbatchd on ctl2 is now active")

    with pytest.raises(TermOverError):
        writer.call(after_the_term, "node events").result(120)
    assert writer.dropped == {}
    writer.post(after_the_term, "decisions")
    writer.call(adding("x"), "x").result(120)
    assert writer.dropped == {"decisions": 1}


def test_full_queue_refuses_calls_and_drops_posts(writer, record, caplog):
    record.gate.clear()
    for n in range(8):
        writer.call(lambda s, n=n: s.add(n), "events")
    with pytest.raises(Overloaded):
        writer.call(adding("refused"), "events")
    for n in range(4):
        writer.post(lambda s, n=n: s.add(f"d{n}"), "decision")
    assert writer.dropped == {"decision": 2}
    assert "lost" in caplog.text
    record.gate.set()
    assert writer.stop(120) == 0
    assert record.rows == [*range(8), "d0", "d1"]


def test_each_of_several_records_that_are_written_at_once_counts(writer, record):
    """Decisions come many at a time; while the database is away their number must not grow without a bound."""
    record.gate.clear()
    for n in range(4):
        writer.post(lambda s, n=n: s.add(n), "decisions", 6)
    assert len(writer) == 12
    assert writer.dropped == {"decisions": 12}
    with pytest.raises(Overloaded):
        writer.call(adding("refused"), "events")
    record.gate.set()
    assert writer.stop(120) == 0
    assert record.rows == [0, 1]


def test_readers_are_not_waited_for_while_the_queue_is_nearly_full(writer, record):
    record.gate.clear()
    for n in range(8):
        last = writer.call(lambda s, n=n: s.add(n), "x")
    writer.post(adding("one more"), "x")
    record.gate.set()
    last.result(120)
    assert record.bounded[:7] == [True, *[False] * 6], "8 wait after the first"


def test_newer_state_replaces_older_that_still_waits(writer, record):
    record.gate.clear()
    writer.post(adding("first"), "x")
    for n in range(5):
        writer.replace(lambda s, n=n: s.add(n), "jobs")
    record.gate.set()
    assert writer.stop(120) == 0
    assert record.rows == ["first", 4]


def test_cancelled_work_is_skipped(writer, record):
    record.gate.clear()
    writer.post(adding("first"), "x")
    given_up = writer.call(adding("given up"), "events")
    assert given_up.cancel()
    record.gate.set()
    assert writer.stop(120) == 0
    assert record.rows == ["first"]


def test_messages_that_nodes_send_again_do_not_fill_the_queue(writer, record):
    """While the database is away each of them is given up after some seconds, and comes again."""
    record.gate.clear()
    first = writer.call(adding(0), "x")
    for number in range(1, 30):
        future = writer.call(adding(number), "x")
        assert len(writer) <= 2
        assert future.cancel()
    last = writer.call(adding(30), "x")
    record.gate.set()
    assert (first.result(120), last.result(120)) == (1, 2)
    assert record.rows == [0, 30]


def test_stop_with_the_database_away_returns_how_much_is_unwritten(record):
    writer = StoreWriter(lambda: record, 10, first_wait=5.0)
    record.away = 10**6
    writer.start()
    writer.post(adding("a"), "x")
    writer.post(adding("b"), "x")
    assert writer.stop(120) == 2
    assert record.rows == []


def test_posts_of_many_threads_are_all_written(record):
    writer = StoreWriter(lambda: record, 10_000)
    writer.start()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for n in range(1000):
            pool.submit(writer.post, lambda s, n=n: s.add(n), "x")
    assert writer.stop(120) == 0
    assert sorted(record.rows) == list(range(1000))


def sequence(number):
    """Work that stores one event of a node; returns how many of its events are stored."""
    events = [{"seq": number, "ts": 1.7e9 + number, "kind": "note"}]
    return lambda store: store.ingest("n1", "a1", "b1", events)


def test_nothing_is_written_to_a_database_that_was_moved_away(tmp_path, caplog):
    """A node deletes what was acknowledged, and nobody looks for it in the moved file."""
    file, aside = tmp_path / "record.db", tmp_path / "aside.db"
    writer = StoreWriter(lambda: open_store(f"sqlite:///{file}"), 10, first_wait=0.001)
    writer.start()
    try:
        assert writer.call(sequence(1), "x").result(120).acked == 1
        file.rename(aside)
        later = writer.call(sequence(2), "x")
        eventually(lambda: "was moved or deleted" in writer.fault.error)
        assert not later.done()
        assert not file.exists()
        shutil.copyfile(aside, tmp_path / "copy.db").rename(file)  # without a log: the moved file is complete
        assert later.result(120).acked == 2
        assert writer.fault.error == ""
    finally:
        writer.stop(120)


LOCKING = """
import fcntl, os, struct, sys, time
os.setgid(65534)
os.setuid(65534)
handle = os.open(sys.argv[1] + "-shm", os.O_RDONLY)
fcntl.fcntl(handle, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 120, 1, 0))
print("locked", flush=True)
time.sleep(600)
"""


def test_user_who_keeps_the_record_locked_is_named(open_tmp_path, monkeypatch):
    """To read the record is enough for that."""
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 0.1)
    file = open_tmp_path / "record.db"
    writer = StoreWriter(lambda: open_store(f"sqlite:///{file}"), 10, first_wait=0.001)
    writer.start()
    try:
        assert writer.call(sequence(1), "x").result(120).acked == 1
        for path in open_tmp_path.iterdir():
            os.chown(path, 0, 65534)
        with subprocess.Popen(["/usr/bin/python3", "-ISc", LOCKING, str(file)], stdout=subprocess.PIPE) as locking:
            try:
                assert locking.stdout.readline() == b"locked\n"
                later = writer.call(sequence(2), "x")
                eventually(lambda: f"database is locked by process {locking.pid} of uid 65534" in writer.fault.error)
            finally:
                locking.kill()
        assert later.result(120).acked == 2
    finally:
        writer.stop(120)


def test_database_that_was_replaced_is_opened_again(tmp_path):
    file, other = tmp_path / "record.db", tmp_path / "other.db"
    open_store(f"sqlite:///{other}").close()
    writer = StoreWriter(lambda: open_store(f"sqlite:///{file}"), 10, first_wait=0.001)
    writer.start()
    try:
        before = writer.call(sequence(1), "x").result(120)
        other.replace(file)
        after = writer.call(sequence(2), "x").result(120)
        assert after.database != before.database and after.acked == 0
    finally:
        writer.stop(120)
    with open_store(f"sqlite:///{file}", readonly=True) as store, store.reading() as connection:
        assert list(damages(connection)) == []


def test_nothing_is_dropped_while_the_database_is_damaged(tmp_path, caplog):
    file, other = tmp_path / "record.db", tmp_path / "other.db"
    for path in (file, other):
        with open_store(f"sqlite:///{path}") as store:
            sequence(1)(store)
    with closing(sqlite3.connect(file)) as connection:
        ((page, size),) = connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name='node_events'"
        )
    with file.open("r+b") as raw:
        raw.seek((page - 1) * size)
        raw.write(b"\xff" * size)
    writer = StoreWriter(lambda: open_store(f"sqlite:///{file}"), 10, first_wait=0.001)
    writer.start()
    try:
        later = writer.call(sequence(2), "x")
        eventually(lambda: writer.fault.tries > 2)
        assert "malformed" in writer.fault.error and not later.done()
        assert writer.dropped == {}
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "is malformed" in warning.getMessage() and "INSERT" not in warning.getMessage()
        other.replace(file)
        assert later.result(120).acked == 2
    finally:
        writer.stop(120)

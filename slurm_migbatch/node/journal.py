"""Store the node's journal: who holds which slice, what is in flight, and the events not yet sent to the controller.

SQLite on local disk, WAL, synchronous=FULL: a transaction is on disk before the driver is changed (write-ahead),
and an event is stored in the same transaction as the change that it reports. No transaction is ever open
across a driver call. The journal only records; the driver is authoritative, and `repair.py` makes the two agree.

Life of a slice's row:

    (no row) -> intent -> held -> idle -> intent ...      idle -> evict -> (no row)
    idle, evict -> zombie      held -> lost      (made by hand and in use) foreign -> idle

`intent` and `evict` are in flight: they belong to an owner (`owner.py`) and are void once it is dead. Several intents,
also of several owners, may overlap one `evict`; the first of them that has the GPU's lock destroys the instance.

A slice may have a second holder: a row of its own for the same slot, `beside` the first one's, intent -> held. It
creates no instance and opens no device. When the first holder leaves, the second takes over its row (`leave`); the
slice is free when no holder is left. Triggers enforce at most two holders, both of one user, for every writer.

Life of a run:
starting -> running -> ending -> ended, or misfit -> ended.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# Conditions in queries are this package's own text; every value is bound.
# ruff: noqa: PTH101, PTH104, PTH108, PTH110, PTH116, PTH120, S608

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node import disk_reserve, effects
from slurm_migbatch.node.journal_rows import OCCUPYING, JournalRun, JournalSlice

NAME = "journal.db"
SCHEMA_VERSION = 2
APPLICATION_ID = 0x4D494742  # "MIGB"
KEEP_RUNS_S = 86400.0
"""How long ended runs stay; hand-offs without slices, which name them, are deleted earlier (`run_repair.TOMBSTONE_S`).
"""
MOST_EVENTS = 200_000
"""How many events stay while no controller takes them; beyond it the oldest are deleted, and the controller,
which finds them missing, requests a full state."""
_BUSY_S = 10.0
"""How long an access waits for another process's transaction."""
_POLL_S = 0.002
"""How often a transaction that waits for another process's tries to begin."""
TRIM_EVERY = 1000
MOST_TRIMMED = 5000
"""Most events that one transaction deletes: a hook waits for it."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE slices (
    id INTEGER PRIMARY KEY, gpu TEXT NOT NULL, profile TEXT NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('intent','evict','held','idle','zombie','foreign','lost')),
    gi INTEGER, ci INTEGER, mig_uuid TEXT, cap_gi INTEGER, cap_ci INTEGER,
    job INTEGER, restart INTEGER, ordinal INTEGER, uid INTEGER, warm INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT '', since REAL NOT NULL, reason TEXT NOT NULL DEFAULT '',
    beside INTEGER, shared INTEGER NOT NULL DEFAULT 0);
CREATE INDEX slices_job ON slices (job, restart);
CREATE INDEX slices_beside ON slices (beside);
CREATE TRIGGER slices_guest BEFORE INSERT ON slices WHEN NEW.beside IS NOT NULL AND (NOT EXISTS (
    SELECT 1 FROM slices h WHERE h.id=NEW.beside AND h.beside IS NULL AND h.state IN ('held','lost')
    AND h.uid=NEW.uid AND h.gpu=NEW.gpu AND h.profile=NEW.profile AND h.start=NEW.start AND h.size=NEW.size)
    OR EXISTS (SELECT 1 FROM slices g WHERE g.beside=NEW.beside AND g.id IS NOT NEW.id))
BEGIN SELECT RAISE(ABORT, 'a slice can only be shared by two jobs of one user'); END;
CREATE TRIGGER slices_host BEFORE INSERT ON slices WHEN EXISTS (
    SELECT 1 FROM slices g WHERE g.beside=NEW.id AND (NEW.state NOT IN ('held','lost') OR g.uid IS NOT NEW.uid
    OR g.gpu<>NEW.gpu OR g.profile<>NEW.profile OR g.start<>NEW.start OR g.size<>NEW.size))
BEGIN SELECT RAISE(ABORT, 'the slice has a second holder'); END;
CREATE TRIGGER slices_gone BEFORE DELETE ON slices WHEN EXISTS (SELECT 1 FROM slices WHERE beside=OLD.id)
BEGIN SELECT RAISE(ABORT, 'the slice has a second holder'); END;
CREATE TABLE runs (
    job INTEGER NOT NULL, restart INTEGER NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL, account TEXT NOT NULL,
    partition TEXT NOT NULL, marker TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('starting','running','ending','ended','misfit')),
    owner TEXT NOT NULL DEFAULT '', since REAL NOT NULL, exit_code INTEGER, PRIMARY KEY (job, restart)) WITHOUT ROWID;
CREATE INDEX runs_state ON runs (state, since);
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL);
"""
"""Slices' rows are only ever written by INSERT OR REPLACE, so there is no trigger on UPDATE. No hook may read all ended
runs: hence `runs_state`."""


class JournalError(RuntimeError):
    """The journal cannot be used: full disk, read-only, locked, or of a newer release. The message says which."""


class Corrupt(JournalError):
    """The file is damaged; it must be moved away and rebuilt from the driver."""


class Overlap(AssertionError):
    """A slot would have two owners; a bug in this program, stopped before it is written."""


class Journal:
    """An open journal. Use one per thread; any number of processes may have it open."""

    def __init__(self, path: str) -> None:
        """Open or create the journal at `path` (its directory must exist). Raises JournalError, Corrupt."""
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._patience_s = _BUSY_S
        try:
            try:
                self._open()
            except Corrupt:
                raise
            except JournalError:
                self.close()
                if not disk_reserve.release(path):
                    raise
                self._open()
            disk_reserve.keep(path)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path = self.path
        if not os.path.exists(path):
            _create(path)
        with _errors(path):
            quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
            self._db = sqlite3.connect(f"file:{quoted}?mode=rw", timeout=_BUSY_S, isolation_level=None, uri=True)
            self._db.execute("PRAGMA synchronous=FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise JournalError(f"{path} was written by a newer release (schema {version}); upgrade this node")
            tables = {row[0] for row in self._all("SELECT name FROM sqlite_master WHERE type='table'")}
            if version < SCHEMA_VERSION or not {"meta", "slices", "runs", "events"} <= tables:
                raise Corrupt(f"{path} is damaged, or of an older release: tables are missing")
            status = os.stat(path)
            self._file = (status.st_dev, status.st_ino)

    @property
    def built(self) -> bool:
        """Whether it was filled from the existing state when it was created (`rebuild.py`); true for older ones."""
        return bool(self.meta("built") or self.meta("boot_id") or self.slices() or self.runs())

    @property
    def closed(self) -> bool:
        """Whether it was closed: it was damaged, and no new one could be created."""
        return self._db is None

    @property
    def replaced(self) -> bool:
        """Whether the path now names another file: a damaged journal was moved away. This one must be closed."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._file

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise JournalError(f"{self.path} is closed")
        return self._db

    def _all(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement with bound values; return its rows."""
        with _errors(self.path):
            return self._connection.execute(statement, values).fetchall()

    def check(self) -> None:
        """Check the whole file; raises Corrupt."""
        answer = self._all("PRAGMA integrity_check(1)")[0][0]
        if answer != "ok":
            raise Corrupt(f"{self.path} is damaged: {answer}")

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def wait_at_most(self, seconds: float) -> None:
        """Limit how long a statement waits for another process that has the journal locked."""
        self._patience_s = seconds
        self._set_busy_timeout(seconds)

    def _set_busy_timeout(self, seconds: float) -> None:
        self._all(f"PRAGMA busy_timeout={round(seconds * 1000)}")

    @contextmanager
    def write(self) -> Iterator[None]:
        """Run one transaction: all of it is on disk when the block has ended, or nothing is. No driver call inside."""
        with _errors(self.path):
            self._begin()
            try:
                yield
                effects.point("commit")
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _begin(self) -> None:
        """Begin a transaction once no other process has one.

        SQLite's own wait tries less often the longer it lasts, at last ten times a second: if many hooks write, one
        that came early may wait until no other has anything left to write. Here all try equally often.
        """
        until = time.monotonic() + self._patience_s
        self._set_busy_timeout(0)
        try:
            while True:
                try:
                    self._connection.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if "database is locked" not in str(error) or time.monotonic() > until:
                        raise
                time.sleep(_POLL_S)
        finally:
            self._set_busy_timeout(self._patience_s)

    # -- meta --------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str:
        """Read a value of the journal itself; empty if it was never set."""
        rows = self._all("SELECT value FROM meta WHERE key=?", key)
        return str(rows[0][0]) if rows else ""

    def set_meta(self, key: str, value: str) -> None:
        """Set a value of the journal itself."""
        self._all("INSERT OR REPLACE INTO meta VALUES (?,?)", key, value)

    @property
    def identity(self) -> str:
        """The journal's random name; sequence numbers of events start again in another journal."""
        return self.meta("journal")

    # -- slices ------------------------------------------------------------------------------------------------

    def slices(self, where: str = "1", values: Iterable[object] = ()) -> list[JournalSlice]:
        """Read all slices, or those of an SQL condition with bound values, by GPU and placement."""
        rows = self._all(f"SELECT {_COLUMNS} FROM slices WHERE {where} ORDER BY gpu,start,id", *values)
        return [_slice(row) for row in rows]

    def slices_of(self, run: JournalRun) -> list[JournalSlice]:
        """Read the slices of a run."""
        return self.slices("job=? AND restart=?", (run.job, run.restart))

    def put(self, row: JournalSlice) -> JournalSlice:
        """Write a new row, or the row with its id. Raises Overlap instead of giving a place two owners.

        Second holders are exempt: triggers enforce their rules, with sqlite3.IntegrityError.
        """
        if row.state in OCCUPYING and row.beside is None:
            placement = row.slot.placement
            clash = self.slices(
                "gpu=? AND start<? AND start+size>? AND id IS NOT ? AND state<>'lost' AND beside IS NULL "
                "AND NOT (state='evict' AND (owner=? OR ?='intent'))",
                (row.gpu, placement.end, placement.start, row.id, row.owner, row.state),
            )
            if clash and row.state != "evict":
                raise Overlap(f"{row} ({row.state}) and {clash[0]} ({clash[0].state}) overlap")
        profile, placement = row.slot
        values = (row.gpu, profile.name, *placement, *row._replace(since=row.since or time.time())[2:])
        marks = ",".join("?" * len(values))
        self._all(f"INSERT OR REPLACE INTO slices ({_COLUMNS}) VALUES ({marks})", *values)
        return row._replace(id=self._all("SELECT last_insert_rowid()")[0][0])

    def drop(self, row: JournalSlice) -> None:
        """Delete a row."""
        self._all("DELETE FROM slices WHERE id=?", row.id)

    def guest_of(self, row: JournalSlice) -> JournalSlice | None:
        """Read the second holder's row of a slice; None if it has one holder."""
        rows = self.slices("beside=?", (row.id,))
        return rows[0] if rows else None

    def leave(self, row: JournalSlice) -> JournalSlice | None:
        """Remove the holder from `row`; part of the open transaction.

        A remaining holder takes over the slice, still in flight if it was. Without one the
        slice is idle. Returns the slice's row; None if that is not changed (a second holder left) or no
        longer exists (it was lost).
        """
        if row.beside is not None:
            self.drop(row)
            return None
        guest = self.guest_of(row)
        if guest is not None:
            self.drop(guest)
            successor = guest._replace(gi=row.gi, ci=row.ci, mig_uuid=row.mig_uuid, cap_gi=row.cap_gi)
            return self.put(successor._replace(cap_ci=row.cap_ci, beside=None, shared=True, id=row.id))
        if row.state == "lost":
            self.drop(row)
            return None
        return self.put(row.freed("idle"))

    # -- runs --------------------------------------------------------------------------------------------------

    def runs(self, where: str = "1", values: Iterable[object] = ()) -> list[JournalRun]:
        """Read all runs, or those of an SQL condition with bound values."""
        columns = ",".join(JournalRun._fields)
        rows = self._all(f"SELECT {columns} FROM runs WHERE {where} ORDER BY job,restart", *values)
        return [JournalRun(*row) for row in rows]

    def put_run(self, run: JournalRun) -> None:
        """Write or replace a run."""
        values = run._replace(since=run.since or time.time())
        self._all("INSERT OR REPLACE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?)", *values)

    def drop_run(self, run: JournalRun) -> None:
        """Forget a run."""
        self._all("DELETE FROM runs WHERE job=? AND restart=?", run.job, run.restart)

    def prune(self, now: float) -> None:
        """Forget runs that ended long ago."""
        self._all("DELETE FROM runs WHERE state='ended' AND since<?", now - KEEP_RUNS_S)

    # -- events ------------------------------------------------------------------------------------------------

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Spool one event for the controller, if there are too many instead of the oldest; in the open transaction."""
        body = json.dumps({"ts": round(time.time(), 3), "kind": kind, **fields}, separators=(",", ":"))
        with _errors(self.path):
            seq = self._connection.execute("INSERT INTO events (body) VALUES (?)", (body,)).lastrowid or 0
        if seq % TRIM_EVERY == 0:
            oldest = "DELETE FROM events WHERE seq<=? AND seq<(SELECT min(seq) FROM events)+?"
            self._all(oldest, seq - MOST_EVENTS, MOST_TRIMMED)

    def spooled(self, limit: int = 500, size: float = math.inf) -> list[dict[str, object]]:
        """Read the oldest events that were not acknowledged, in order: at most `size` bytes, but at least one."""
        rows: list[tuple[int, str]] = []
        with _errors(self.path):
            for seq, body in self._connection.execute("SELECT seq,body FROM events ORDER BY seq LIMIT ?", (limit,)):
                size -= len(body)
                if rows and size < 0:
                    break
                rows.append((seq, body))
        return [{"seq": seq, **json.loads(body)} for seq, body in rows]

    def spool_length(self) -> int:
        """Count the spooled events."""
        return int(self._all("SELECT count(*) FROM events")[0][0])

    @property
    def recorded(self) -> tuple[str, int]:
        """Controller database in which this journal is recorded, and up to which event; empty and 0 at first."""
        return self.meta("database"), int(self.meta("acked") or 0)

    def acknowledge(self, seq: int, database: str) -> None:
        """Record that the controller's `database` has stored everything up to `seq`, and drop those events."""
        with self.write():
            self._drop_acknowledged(seq, database)

    def spool_state(self, fields: Callable[[], Mapping[str, object]], seq: int, database: str) -> None:
        """Spool a `state` event for the controller's `database`, which has all up to `seq` but still lacks data.

        `fields` are read in the transaction that spools them, so that every event after it is later. Does nothing if
        one is waiting already.
        """
        with self.write():
            self._drop_acknowledged(seq, database)
            if not self._all("SELECT 1 FROM events WHERE seq=?", int(self.meta("told") or 0)):
                self.event("state", fields())
                self.set_meta("told", str(self._newest()))

    def _drop_acknowledged(self, seq: int, database: str) -> None:
        self._all("DELETE FROM events WHERE seq<=?", seq)
        if seq > self._newest():
            # The file is an older copy. New events need numbers that the controller does not have yet, and a message
            # about another database makes it request a full state.
            self._all("DELETE FROM sqlite_sequence WHERE name='events'")
            self._all("INSERT INTO sqlite_sequence (name,seq) VALUES ('events',?)", seq)
            database = ""
        if self.recorded != (database, seq):
            self.set_meta("database", database)
            self.set_meta("acked", str(seq))

    def _newest(self) -> int:
        """Return the number of the newest event, whether it is still spooled or not."""
        rows = self._all("SELECT seq FROM sqlite_sequence WHERE name='events'")
        return int(rows[0][0]) if rows else 0


#: of `slices`, in the order of JournalSlice's fields; a slot takes three
_COLUMNS = ",".join(("gpu", "profile", "start", "size", *JournalSlice._fields[2:]))


def _slice(row: Sequence[Any]) -> JournalSlice:
    slot = Slot(Profile.parse(row[1]), Placement(row[2], row[3]))
    return JournalSlice._make((row[0], slot, *row[4:14], bool(row[14]), *row[15:19], bool(row[19]), row[20]))


#: what operational errors of SQLite say of a damaged file; 3.26 has the last one instead of another error
_DAMAGED = ("malformed", "corrupt", "no such table", "unsupported file format")


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Translate SQLite's errors to JournalError and Corrupt."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if any(cause in text for cause in _DAMAGED):
            raise Corrupt(f"{path} is damaged: {text}") from error
        raise JournalError(f"{path}: {text}; check that the disk is local, writable and not full") from error
    except sqlite3.DatabaseError as error:
        if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
            raise
        raise Corrupt(f"{path} is damaged: {error}") from error


def _create(path: str) -> None:
    """Create a new journal under a temporary name and rename it into place, unless another process was faster.

    A write-ahead file left by an older journal would be applied to the new one, so it is moved away.
    """
    temporary = f"{path}.new"
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if os.path.exists(path):
            return
        for name in (temporary, f"{temporary}-wal", f"{temporary}-shm"):
            effects.point("unlink")
            with suppress(FileNotFoundError):
                os.unlink(name)
        with _errors(temporary):
            connection = sqlite3.connect(temporary, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
                connection.execute("INSERT INTO meta VALUES ('journal', ?)", (os.urandom(8).hex(),))
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            finally:
                connection.close()  # which also applies the write-ahead file and removes it
        os.chmod(temporary, 0o600)
        disk_reserve.keep_database(temporary)
        move_aside(path)
        effects.point("rename")
        os.rename(temporary, path)
        os.fsync(directory)
    finally:
        os.close(directory)


def move_aside(path: str) -> str:
    """Rename a damaged journal with its companions to `<path>.damaged-<time>`; returns the new name."""
    aside = f"{path}.damaged-{time.time_ns()}"
    for suffix in ("-wal", "-shm", ""):
        effects.point("rename")
        try:
            os.rename(path + suffix, aside + suffix)
        except FileNotFoundError:
            continue
    return aside

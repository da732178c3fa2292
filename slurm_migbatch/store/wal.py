"""Bound the write-ahead log of an SQLite file, which readers that overlap would let grow with every commit.

SQLite copies the log into the file after commits, except what is newer than the oldest snapshot in use, and begins the
log again only in an instant in which nobody reads from it. If each reader begins before another ends, as when two users
repeat `migacct`, there is no such instant.

Readers need not be held back for one. A TRUNCATE checkpoint that is tried again and again succeeds within three times
the longest age of a snapshot, however readers overlap, if nothing is written meanwhile (walCheckpoint and
walTryBeginRead in SQLite's wal.c):

1. A reader that begins takes the mark at the end of the log; while all four marks are in use, the newest of them. No
   reader takes the others, so one of them becomes free, and the next reader moves it to the end. A reader that cannot
   write the -shm file moves none; each try does it for them. Then nobody takes the newest of the old marks either.
2. When the snapshots of the old marks have ended, the whole log is copied. Who begins to read now uses the file only.
3. When those have ended who began before, the log is truncated.

So only the writer waits: longer after each failure, and again when the log has grown by another LIMIT_BYTES. The log is
bounded by the ages of snapshots; LONGEST_S is three times the default time limit of users' queries. What remains is a
process that is stopped with a snapshot: it is reported, and the log shrinks after its end.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from slurm_migbatch.store.sqlitefile import file_uri, log_bytes

log = logging.getLogger(__name__)

LIMIT_BYTES: Final = 64 << 20
"""Size beyond which the writer waits for readers until the log is truncated."""
LARGE_BYTES: Final = 4 * LIMIT_BYTES
"""Size that is reported to the administrator: readers that overlap ordinarily do not let it grow so far."""
KEPT_BYTES: Final = 16 << 20
"""Size to which SQLite itself truncates the log when it begins it again (`journal_size_limit`)."""
FIRST_S: Final = 1.0
LONGEST_S: Final = 64.0
"""How long the writer waits for readers at first, and at most; twice as long after each failure."""
_TRY_MS: Final = 100
_MIB: Final = 1 << 20


_WRITE_LOCKS: Final = range(120, 123)
"""Bytes of the -shm file that a writer locks, and who recovers the log (SQLite's wal.c, WAL_LOCK)."""


def locked_by(file: Path) -> str:
    """Return the other processes that keep this one from writing an SQLite file; empty if none is known.

    Who may read the -shm file can lock it without end. It is not opened: closing it would end SQLite's own locks.
    """
    try:
        status = file.with_name(f"{file.name}-shm").stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        found = set()
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()  # 13: POSIX ADVISORY READ 5645 fe:00:15343665 120 120
            if len(words) == 8 and words[5] == place and words[4] != str(os.getpid()):
                first, last = int(words[6]), math.inf if words[7] == "EOF" else int(words[7])
                if first <= _WRITE_LOCKS[-1] and last >= _WRITE_LOCKS[0]:
                    found.add(words[4])
        return ", ".join([_named(pid, file) for pid in sorted(found)])
    except (OSError, ValueError):
        return ""


def _named(pid: str, file: Path) -> str:
    """Return a process by its number in /proc/locks, which is -1 for a lock of an open file (F_OFD_SETLK)."""
    try:
        return f"process {pid} of uid {Path('/proc', pid).stat().st_uid}"
    except OSError:
        return f"a process that Linux does not name (`fuser -v {file}-shm` lists those that have the file open)"


class LogBound:
    """Truncates the log of one file when it is too long; for the thread that writes."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file, self._limit = file, limit
        self._failures = 0

    def keep(self, give_up: Callable[[], bool]) -> None:
        """Truncate the log if it is too long, waiting for readers until `give_up` returns true. Failures are logged."""
        size = log_bytes(self._file)
        if size <= self._limit:
            self._failures = 0
        elif size > self._limit * (self._failures + 1):
            self._truncate(size, give_up)

    def _truncate(self, size: int, give_up: Callable[[], bool]) -> None:
        patience_s = min(FIRST_S * 2**self._failures, LONGEST_S)
        try:
            done = _truncated(self._file, time.monotonic() + patience_s, give_up)
            why = f"there are readers (waited up to {patience_s:g} s)"
        except sqlite3.Error as error:
            done, why = False, str(error)
        if done:
            self._failures = 0
            return
        self._failures += 1
        log.log(
            logging.WARNING if size > LARGE_BYTES else logging.INFO,
            "the log of %s has %d MiB and cannot be truncated: %s; `fuser -v %s-shm` lists the processes that have it "
            "open: end one that is stopped or reads for very long",
            *(self._file, size // _MIB, why, self._file),
        )


def _truncated(file: Path, end: float, give_up: Callable[[], bool]) -> bool:
    """Truncate the log until a time (monotonic seconds); return whether it was done. Raises sqlite3.Error."""
    with closing(sqlite3.connect(file_uri(file, "mode=rw"), uri=True, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA busy_timeout={_TRY_MS}").fetchall()
        while True:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()  # moves a mark to the end of the log
            ((busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not busy:
                return True
            if give_up() or time.monotonic() >= end:
                return False

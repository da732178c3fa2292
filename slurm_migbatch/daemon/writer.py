"""Write to the database in a single thread, so that no event loop and no submission waits for it.

The queue is bounded. Events of nodes are refused when it is nearly full (the node keeps and resends them); the newest
state of the jobs replaces a queued older one; decisions are accepted until it is full.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import DatabaseError, DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.terms import TermOverError

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)
T = TypeVar("T")
_ADVICE = (
    "records wait in memory for the database; check for a locked or full disk, or a database that is down or damaged "
    "(migbatch db check)"
)


class Overloaded(RuntimeError):
    """The queue for the database is too long; send again later."""


class _Item:
    __slots__ = ("future", "label", "records", "work")

    def __init__(
        self, work: Callable[[Any], Any], label: str, future: concurrent.futures.Future[Any] | None, records: int = 1
    ) -> None:
        self.work, self.label, self.future, self.records = work, label, future, records


class StoreWriter:
    """Runs `work(store)` calls in order in its own thread and retries while the database is not available."""

    def __init__(self, opener: Callable[[], Store], limit: int, *, first_wait: float = 0.1) -> None:
        self._opener = opener
        self._limit = limit
        self._queue: deque[_Item] = deque()
        self._waiting = 0  # records of the items in it
        self._latest: dict[str, _Item] = {}
        self._news = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._store: Store | None = None
        self._gone: Path | None = None  # an SQLite file that was in use and is no longer there
        self.fault = FaultReporter("the database", _ADVICE, log, first=first_wait, longest=10.0)
        self._deposed = FaultReporter("records are dropped", "the active migbatchd records them", log)
        self._full = FaultReporter("records of decisions are lost", "the database has been down too long", log)
        #: dropped records, by label
        self.dropped: dict[str, int] = {}

    def start(self) -> None:
        """Start the thread; it opens the store."""
        self._thread.start()

    def stop(self, timeout: float) -> int:
        """Write the queue, for at most `timeout` seconds, close the store, and return how many were left unwritten."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._thread.join(timeout)
        return len(self)

    def __len__(self) -> int:
        with self._news:
            return self._waiting + len(self._latest)

    def call(self, work: Callable[[Store], T], label: str) -> concurrent.futures.Future[T]:
        """Queue work with an awaited result; that of a cancelled future is removed.

        Raises:
            Overloaded: the queue is longer than four fifths of the limit.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._news:
            if self._waiting >= self._limit * 4 // 5:
                raise Overloaded(f"{self._waiting} records are waiting for the database")
            self._append(item := _Item(work, label, future))
        future.add_done_callback(lambda done: self._remove(item) if done.cancelled() else None)
        return future

    async def answer(self, work: Callable[[Store], T], label: str) -> T:
        """Queue work and return its result, in an event loop; raises as `call` does, and what `work` raises."""
        return await asyncio.wrap_future(self.call(work, label))

    def _append(self, item: _Item) -> None:
        self._queue.append(item)
        self._waiting += item.records
        self._news.notify_all()

    def _remove(self, item: _Item) -> None:
        with self._news, contextlib.suppress(ValueError):
            self._queue.remove(item)
            self._waiting -= item.records

    def post(self, work: Callable[[Store], Any], label: str, records: int = 1) -> None:
        """Queue work without an awaited result; beyond the limit its `records` are dropped, counted and logged."""
        with self._news:
            if self._waiting < self._limit:
                self._append(_Item(work, label, None, records))
                self._full.succeeded()
            else:
                self.dropped[label] = self.dropped.get(label, 0) + records
                self._full.failed(f"{label}: more than {self._limit} records are waiting")

    def replace(self, work: Callable[[Store], Any], label: str) -> None:
        """Queue work that replaces pending work of the same label."""
        with self._news:
            self._latest[label] = _Item(work, label, None)
            self._news.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None and self._do(item):
            if self._store is not None:
                self._store.bound_log(self._is_pressed)
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.close()

    def _next(self) -> _Item | None:
        with self._news:
            self._news.wait_for(lambda: self._stopping or self._queue or self._latest)
            if self._queue:
                return self._queue[0]
            if self._latest:
                return self._latest.pop(next(iter(self._latest)))
            return None

    def _is_pressed(self) -> bool:
        """Return whether nothing but writing may take time: the service stops, or refuses messages of nodes."""
        return self._stopping or len(self) >= self._limit * 4 // 5

    def _do(self, item: _Item) -> bool:
        """Write one item; return False if the service stops and the database is down, else True."""
        while item.future is None or not item.future.cancelled():
            error = self._attempt(item)
            if error is None:
                break
            wait = self.fault.failed(self._cause(error))
            with self._news:
                if self._stopping:
                    return False
                self._news.wait_for(lambda: self._stopping, wait)
        with self._news:
            if self._queue and self._queue[0] is item:
                self._queue.popleft()
                self._waiting -= item.records
        return True

    def _attempt(self, item: _Item) -> Exception | None:
        """Write one item, or drop it; return the error if it is to be written again."""
        opened = False
        try:
            store = self._opened()
            opened = True
            result = item.work(store)
        except TermOverError as error:
            self._end_of_term(item, error)
        except Exception as error:
            if not opened or is_passing(error):
                if self._store is not None:
                    self._store.reconnect()
                return error
            log.exception("database operation failed: %s", item.label)
            self.dropped[item.label] = self.dropped.get(item.label, 0) + item.records
            _settle(item, error=error)
        else:
            self.fault.succeeded()
            _settle(item, result)
        return None

    def _cause(self, error: Exception) -> BaseException | str:
        """Return what is to be reported of an error; its own text has the statement, and with it texts of users."""
        cause = getattr(error, "orig", None) or error
        if self._store is None or "locked" not in str(cause):
            return cause
        by = self._store.locked_by
        return f"{cause} by {by}" if by else cause

    def _opened(self) -> Store:
        """Return the store, opened again if its file was replaced.

        Raises:
            FileNotFoundError: the file was moved or deleted; a new one is not created in its place, because the
                administrator may be about to put another one there.
        """
        if self._store is not None and self._store.moved:
            self._gone = self._store.file
            self._store.close()  # which also completes the moved file, and removes the log that was beside it
            self._store = None
        if self._store is None:
            if self._gone is not None and not self._gone.exists():
                raise FileNotFoundError(
                    f"{self._gone} was moved or deleted: put it back, or restart migbatchd to begin a new record"
                )
            self._store, self._gone = self._opener(), None
        return self._store

    def _end_of_term(self, item: _Item, error: TermOverError) -> None:
        if item.future is None:  # else the caller is told: a node sends its message to the active migbatchd
            self.dropped[item.label] = self.dropped.get(item.label, 0) + item.records
            self._deposed.failed(error)
        _settle(item, error=error)


def is_passing(error: Exception) -> bool:
    """Return whether the database may accept the same work later: locked, full, down; not malformed records.

    Also whether it is damaged, until another one is put in its place: in what is left of it nothing should be changed.
    """
    if isinstance(error, (OperationalError, InterfaceError, InternalError, PoolTimeout, OSError)):
        return True  # an InternalError: PostgreSQL has become a standby, or is damaged
    if type(error) is DatabaseError:  # not one of its subclasses: SQLite's for a damaged file
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _settle(item: _Item, result: Any = None, error: Exception | None = None) -> None:
    if item.future is None or not item.future.set_running_or_notify_cancel():
        return
    if error is not None:
        item.future.set_exception(error)
    else:
        item.future.set_result(result)

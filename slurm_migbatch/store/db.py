"""The store: how to open it, and the operations that the rest of migbatch performs on it."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, bindparam, func, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from slurm_migbatch.store import decisions, loans, progress, queries, wal
from slurm_migbatch.store.backup import keep_before_upgrade
from slurm_migbatch.store.engines import make_engine, one_state, sqlite_file, without_password
from slurm_migbatch.store.errors import OlderDatabaseError, StoreError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.migrations import migrate, pending
from slurm_migbatch.store.models import Run
from slurm_migbatch.store.queries import LeaseRow, RunFilter, RunRow
from slurm_migbatch.store.receipt import NOTHING, NodeReceipt, Receipt
from slurm_migbatch.store.terms import TermState, check_term, give_term, take_term

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_migbatch.profiling.measurement import Measurement
    from slurm_migbatch.store.measurements import Added
    from slurm_migbatch.store.retention import PruneCursor, Removed
    from slurm_migbatch.workload.lesson import Lesson

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ATTEMPTS = 4


def open_store(
    url: str,
    *,
    readonly: bool = False,
    backup: bool = True,
    term: int = 0,
    upgrading: Callable[[], object] = lambda: None,
) -> Store:
    """Open the database at `url`, an SQLAlchemy URL, and migrate it.

    Args:
        url: sqlite:////absolute/file, mariadb://... or postgresql://...
        readonly: do not write, not even migrations; works while migbatchd is down.
        backup: copy an SQLite file before it is migrated.
        term: the only term in which the store may write; 0: any.
        upgrading: called before a record of an older release is migrated, which takes long if it is large.

    Raises:
        StoreError: it cannot be used; the message says what to do. NetworkFilesystemError, NewerDatabaseError and
            OlderDatabaseError are subclasses.
    """
    engine = make_engine(url, readonly=readonly)
    file = sqlite_file(url)
    try:
        if readonly:
            with engine.connect() as connection, connection.begin():
                waiting = pending(connection, HISTORY)
            if waiting:
                raise OlderDatabaseError(
                    f"the database lacks {waiting[0]!r}, which this version of migbatch needs: start migbatchd, "
                    "it migrates the database"
                )
        else:

            def prepare(last: str) -> None:
                upgrading()
                if backup and file is not None:  # the backup of a server is its administrator's task
                    keep_before_upgrade(file, last)

            for name in migrate(engine, HISTORY, prepare):
                log.info("database migrated to %s", name)
    except SQLAlchemyError as error:
        engine.dispose()
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise StoreError(f"cannot use the database {without_password(url)}: {cause}") from error
    except StoreError:
        engine.dispose()
        raise
    return Store(engine, readonly=readonly, term=term, file=file)


def _number(session: Session) -> None:
    """Number the runs that became lessons in this transaction, as its last action.

    With the numbers a reader can continue after the last lesson that it has seen. The order of `Run.id` is not usable
    for this (a run that began first may end last), nor that of `ended` (a disconnected node reports ends late).
    `models._settle` marks such a run with -1 - n, where n is its previous number (0 for none), so that n is not
    assigned again.
    """
    session.flush()
    fresh = session.execute(select(Run.id, Run.lesson).where(Run.lesson < 0).order_by(Run.ended, Run.id)).all()
    if fresh:
        last = max(session.scalar(select(func.max(Run.lesson))) or 0, *(-1 - row.lesson for row in fresh))
        statement = update(Run).where(Run.__table__.c.id == bindparam("of")).values(lesson=bindparam("to"))
        session.connection().execute(statement, [{"of": row.id, "to": last + i} for i, row in enumerate(fresh, 1)])


def _inode(file: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if there is none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class Store:
    """The record of decisions, runs, leases and GPUs. Safe to use from several threads; close it at the end."""

    def __init__(self, engine: Engine, *, readonly: bool, term: int = 0, file: Path | None = None) -> None:
        """`term`: the only term in which this store may write; 0: any. `file`: of SQLite, None for a server."""
        self.engine = engine
        self.readonly = readonly
        self.term = term
        self.file = file
        self._inode = None if file is None or readonly else _inode(file)
        self._reading = one_state(engine)
        self._log = wal.LogBound(file, wal.LIMIT_BYTES) if file is not None and not readonly else None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Return the connections. On SQLite this also merges the write-ahead log into the file."""
        if self.moved:  # SQLite would leave the log, and apply it to whatever file has the name by then
            with suppress(SQLAlchemyError, sqlite3.Error), closing(self.engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.engine.dispose()

    @property
    def moved(self) -> bool:
        """Whether an SQLite file was moved, deleted or replaced since it was opened: further rows would be lost."""
        return self.file is not None and self._inode is not None and _inode(self.file) != self._inode

    @property
    def locked_by(self) -> str:
        """The processes that keep an SQLite file from being written, see `wal.locked_by`."""
        return "" if self.file is None else wal.locked_by(self.file)

    def reconnect(self) -> None:
        """Discard the connections to a server after an error: it may no longer be the primary at its address."""
        if self.file is None:
            self.engine.dispose()

    def bound_log(self, give_up: Callable[[], bool]) -> None:
        """Truncate the write-ahead log of an SQLite file if it is too long; `store.wal` says for whom this waits.

        Call it after writing, in the thread that writes. `give_up`: whether to wait no longer.
        """
        if self._log is not None:
            self._log.keep(give_up)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection with one consistent, read-only view of the data."""
        with self._reading.connect() as connection, connection.begin():
            yield connection

    def read(self, query: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of one query of this package, such as `loans.uses`, with these further arguments."""
        with self.reading() as connection:
            return query(connection, *args, **kwargs)

    def _write(self, work: Callable[[Session], _T]) -> _T:
        """Run `work` in one transaction, and repeat it from the start after a conflict with another writer.

        Raises:
            StoreError: the store is read-only.
            TermOverError: another process holds the term now.
            sqlalchemy.exc.DBAPIError: the database failed; nothing of `work` was kept.
        """
        if self.readonly:
            raise StoreError("the store was opened for reading only")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with Session(self.engine) as session, session.begin():
                    if self.term:
                        check_term(session, self.term)
                    result = work(session)
                    _number(session)
                    return result
            except (IntegrityError, OperationalError) as error:
                # two migbatchd on one server, a deadlock or a lost connection; a retry decides. SQLite has
                # already waited for its lock
                waited = isinstance(error, OperationalError) and self.engine.dialect.name == "sqlite"
                if waited or attempt == _ATTEMPTS:
                    raise
                time.sleep(0.05 * attempt)
        raise AssertionError("unreachable")

    def take_term(self, holder: str, seconds: float, own_term: int = 0) -> TermState:
        """Become or remain the active migbatchd on the host `holder`, for some seconds from now; return the current
        term, of this process or another. `own_term`: the number of this process's term; 0 for none.
        """
        return self._write(lambda session: take_term(session, holder, seconds, own_term))

    def give_term(self, own_term: int) -> None:
        """End this process's term, so that another need not wait for its expiry."""
        self._write(lambda session: give_term(session, own_term))

    def ingest(
        self,
        node: str,
        journal: str,
        boot_id: str,
        events: Sequence[Mapping[str, Any]],
        claim: NodeReceipt = NOTHING,
    ) -> Receipt:
        """Store a node's events and apply each once, however often and in whatever order they arrive.

        Args:
            node: Slurm's name of the node.
            journal: random id of the node's journal; its events are numbered from 1.
            boot_id: the node's current boot.
            events: JSON objects with "seq", "ts", "kind" and more; unknown ones are kept as they are.
            claim: the number up to which the node assumes its events to be recorded, and in which database.

        Returns:
            What the node can discard, and whether its whole state is known here.
        """
        from slurm_migbatch.store.ingest import ingest

        return self._write(lambda session: ingest(session, node, journal, boot_id, events, time.time(), claim))

    def record_decisions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store decisions of the submit filter, and update the runs that have their ids.

        All in one transaction, because commits dominate the cost of many submissions.
        """
        self._write(lambda session: decisions.record_decisions(session, rows, time.time()))

    def upsert_jobs(
        self, rows: Sequence[Mapping[str, Any]], *, live: Collection[int] | None = None, now: float | None = None
    ) -> None:
        """Store jobs as Slurm shows them.

        Args:
            rows: fields as in slurm.client.JobRow, by name, as far as known; for ended jobs also `exit_code`, either
                "code:signal" or the wait status that squeue shows (256 for exit code 1).
            live: ids of all jobs in Slurm; recorded jobs that are not among them have left Slurm. None: unknown.
            now: time of the query, unix seconds.
        """
        from slurm_migbatch.store.slurmjobs import upsert_jobs

        self._write(lambda session: upsert_jobs(session, rows, live, time.time() if now is None else now))

    def record_supply(self, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Store the slice counts that Slurm was given for a node."""
        self._write(lambda session: decisions.record_supply(session, node, ts, version, counts, why))

    def save_loans(self, rows: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Store the current loans (columns of `models.Loan` by name) and actions on jobs (`models.Action`).

        A loan is identified by job_id, restart and decided; an existing one gets the new values.
        """
        self._write(lambda session: loans.save_loans(session, rows, actions))

    def loans(
        self, jobs: Collection[int] = (), *, active: bool = False, since: float | None = None
    ) -> list[dict[str, Any]]:
        """Return loans by decision time: of these jobs (() for all), active ones, those still active at `since`."""
        return self.read(loans.loans, jobs, active=active, since=since)

    def actions(self, jobs: Collection[int] = (), limit: int = 1000) -> list[dict[str, Any]]:
        """Return the newest actions on jobs, oldest first."""
        return self.read(loans.actions, jobs, limit)

    def job_progress(self, jobs: Collection[int]) -> list[progress.RunProgressRow]:
        """Return the runs of these jobs by their latest reports, each job's in order."""
        return self.read(progress.reports, jobs)

    def lessons(self, since: int = 0, limit: int = 10_000) -> list[Lesson]:
        """Return ended runs in the order in which they became usable for learning, with request and prediction; only
        those after the `Lesson.number` `since`.

        A run about which something becomes known later (its last report, how it ended according to Slurm) is returned
        again under a higher number.
        """
        from slurm_migbatch.store.lessons import lessons

        return self.read(lessons, since, limit)

    def prune(
        self, before: float, lessons: int, place: PruneCursor | None = None, reports: float | None = None
    ) -> Removed:
        """Remove some of the rows that ended before a time, in one short transaction.

        Args:
            before: unix seconds; what is running, held or younger stays.
            lessons: number of runs used by the predictor; the figures of that many removed runs are kept.
            place: where the previous call stopped; None: from the beginning.
            reports: progress reports received before this time, and decisions before it that no run has, are removed;
                None: `before`.
        """
        from slurm_migbatch.store.retention import prune

        reports = before if reports is None else reports
        return self._write(lambda session: prune(session, before, lessons, place, reports))

    def add_measurements(self, rows: Iterable[Measurement]) -> Added:
        """Store measured points in one transaction; an existing point gets the new values."""
        from slurm_migbatch.store.measurements import add_measurements

        points = list(rows)
        return self._write(lambda session: add_measurements(session, points, time.time()))

    def measurements(
        self, model: str | None = None, kind: str | None = None, since: float | None = None
    ) -> list[Measurement]:
        """Return the measured points of a model (its exact name) and kind ("infer" or "train"), or of all.

        `since`: only those added or changed after that time (unix seconds).
        """
        from slurm_migbatch.store.measurements import measurements

        return self.read(measurements, model, kind, since)

    def inventory(self) -> dict[str, list[dict[str, Any]]]:
        """Return the GPUs of every node as last described, by node, ordered by index."""
        return self.read(queries.inventory)

    def leases(self) -> list[LeaseRow]:
        """Return the slices held now."""
        return self.read(queries.leases)

    def runs(self, wanted: RunFilter | None = None) -> list[RunRow]:
        """Return the runs with their slices, by job id."""
        return self.read(queries.runs, wanted or RunFilter())

    def decision(self, id: str) -> dict[str, Any] | None:
        """Return one complete decision, or None."""
        return self.read(queries.decision, id)

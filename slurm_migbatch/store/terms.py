"""The term of the active migbatchd: of several that share a database, one holds it, and only it writes.

One row has the number of the current term, its holder and its end, by the server's clock, so that the clocks of hosts
need not agree. An expired term can be taken over, under the next number. Every writer reads the number in the same
transaction (a fencing token: Kleppmann, Designing Data-Intensive Applications, 2017, section 8.4), so a process that
was suspended and resumes in another's term changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select, text, update
from sqlalchemy.orm import Session

from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.models import Term

_ROW = 1
_CLOCKS = {
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
}
_CLOCK = "SELECT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1000000.0"


class TermOverError(StoreError):
    """Another migbatchd has taken over: nothing is written here any more."""


class TermState(NamedTuple):
    """The current term: its number, its host ("" for none), and whether it is the caller's."""

    number: int
    holder: str
    own: bool


def take_term(session: Session, holder: str, seconds: float, own_term: int) -> TermState:
    """Renew term `own_term`, or take the next one if the current one has expired or is the holder's own; see Store."""
    row = session.scalar(select(Term).where(Term.id == _ROW).with_for_update())
    now = server_time(session.connection())
    if row is None:
        session.add(Term(id=_ROW, number=1, holder=holder, until=now + seconds))
        return TermState(1, holder, True)
    if own_term and row.number == own_term:
        row.until = now + seconds
        return TermState(own_term, holder, True)
    # the lock of the run directory prevents a second process on this host
    if row.until > now and row.holder != holder:
        return TermState(row.number, row.holder, False)
    row.number, row.holder, row.until = row.number + 1, holder, now + seconds
    return TermState(row.number, holder, True)


def give_term(session: Session, own_term: int) -> None:
    """End term `own_term` early; nothing if it has ended."""
    session.execute(update(Term).where(Term.id == _ROW, Term.number == own_term).values(holder="", until=0.0))


def check_term(session: Session, own_term: int) -> None:
    """Prevent a takeover of the term until the transaction ends. Raises TermOverError if it has happened."""
    row = session.execute(select(Term.number, Term.holder).where(Term.id == _ROW).with_for_update(read=True)).first()
    if row is None or row.number != own_term:
        holder = row.holder if row is not None else ""
        raise TermOverError(f"migbatchd on {holder or 'another host'} is now active; nothing is written here")


def server_time(connection: Connection) -> float:
    """Return the database server's clock, unix seconds."""
    return float(connection.scalar(text(_CLOCKS.get(connection.dialect.name, _CLOCK))) or 0.0)

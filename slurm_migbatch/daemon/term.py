"""Decide which of two migbatchd is active: the one whose slurmctld is primary, and that holds the term in the database.

With several SlurmctldHost migbatchd follows slurmctld: `scontrol ping` shows which of them answer, in order, and the
first that does is the primary or about to be (tested on 22.05, 24.11 and 26.05: a returning primary requests control,
and `scontrol takeover` ends the previous one). A primary also answers requests, unlike one that still waits.
slurmctld's own programs (SlurmctldPrimaryOnProg, SlurmctldPrimaryOffProg) speed this up.

Both sources may be wrong for a while, so nothing is done without a term (`store.terms`) that has not expired by this
host's own clock, counted from before the database was queried. The database rejects writes without a valid term;
`TermKeeper.check` blocks commands to Slurm.

With one SlurmctldHost migbatchd is always active. SQLite supports one host: with several SlurmctldHost, the first of
them is the active one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.tasks import with_timeout
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.settings import controllers
from slurm_migbatch.store.db import Store

log = logging.getLogger(__name__)

TERM_S: Final = 7.0
"""Seconds that a term lasts unless it is renewed, which happens about every second."""
LOOK_S: Final = 1.0
"""Seconds between two checks."""
PING_S: Final = 3.0
"""Timeout of the active one's `scontrol ping`, which is slow for a host that is switched off."""
PATIENCE_S: Final = 10.0
"""Seconds after which the active one retries what was not answered in time."""
ALONE_S: Final = 60.0
"""Seconds between two checks whether a second slurmctld has been configured."""


class AlwaysActive:
    """The role of a migbatchd that is the only one: always active."""

    why = ""

    def may_change_slurm(self) -> bool:
        """Return True."""
        return True

    def set_primary(self, primary: bool) -> None:
        """Change nothing."""


class TermKeeper:
    """Determines whether this migbatchd is active, and keeps its term.

    Attributes:
        active: whether it serves nodes, users and submissions.
        why: why it is not active, as a sentence for callers.
        number: the term that this process has; 0 for none.
        on_change: called in the event loop after `active` has changed.
        slurm: the client by which Slurm is queried; a reload may replace it.
    """

    def __init__(
        self,
        slurm: HistoryClient,
        open_store: Callable[[], Store] | None,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up. `open_store` opens a database that several hosts can use; None for SQLite."""
        self.slurm, self._open, self._clock = slurm, open_store, clock
        self.host = host or socket.gethostname()
        self.active = open_store is None
        self.why = "the primary slurmctld is not known yet"
        self.number = 0
        self.on_change: Callable[[], None] = lambda: None
        self._sole = False  # no term is needed
        self._until = self._names_due = self._ping_due = 0.0
        self._names: tuple[str, ...] = ()
        self._primary: bool | None = None  # reported by slurmctld
        self._store: Store | None = None
        self._nudged = asyncio.Event()
        # of its own: the term ends if it is not renewed in time, whatever other work waits for Slurm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="term")
        self._fault = FaultReporter(
            "cannot renew the term of the active migbatchd",
            "nothing is changed in Slurm until the database answers",
            log,
        )
        self._warned = ""

    # -- queries and reports ---------------------------------------------------------------------------------------

    def may_change_slurm(self) -> bool:
        """Return whether this process may change Slurm now."""
        return self.active and (self._sole or (self.number > 0 and self._clock() < self._until))

    def check(self) -> None:
        """Raise SlurmError if this process may not change Slurm."""
        if not self.may_change_slurm():
            raise SlurmError(f"no changes to Slurm by migbatchd on {self.host}: {self.why or 'its term is over'}")

    def set_primary(self, primary: bool) -> None:
        """Process slurmctld's report that it has become the primary on this host, or no longer is."""
        log.info("slurmctld of this host %s the primary", "has become" if primary else "is no more")
        self._primary = primary
        if not primary and self.number:
            self._stand_by("slurmctld of this host is not the primary")
            self.on_change()
        self._nudged.set()

    # -- checks ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check forever."""
        while True:
            self._nudged.clear()
            before = self.active
            wait = await asyncio.get_running_loop().run_in_executor(self._thread, self.refresh)
            if self.active != before:
                log.info("this migbatchd is %s", "active" if self.active else f"standby: {self.why}")
                self.on_change()
            with contextlib.suppress(asyncio.TimeoutError):
                await with_timeout(self._nudged.wait(), wait)

    def refresh(self) -> float:
        """Query Slurm and the database, and become active or standby; return the seconds until the next check."""
        if self.number and not self.active:
            return LOOK_S  # the service ends first, see `resign`
        if self.number:
            self._take()
        if not self._know_names():
            return LOOK_S
        if len(self._names) < 2:
            self._sole = self.active = True
            return ALONE_S
        if self._sole and self._open is not None:
            self._stand_by("slurm.conf now has a second SlurmctldHost")  # the running service has no term
        self._sole = False
        if self.host not in self._names and self.host.partition(".")[0] not in self._names:
            self._refuse(f"this host, {self.host}, is not a SlurmctldHost in slurm.conf ({', '.join(self._names)})")
            return ALONE_S
        if self._open is None:
            self._without_database()
            return ALONE_S
        self._follow(self._named())
        return LOOK_S

    def _know_names(self) -> bool:
        """Read slurm.conf's SlurmctldHost, only once if there are several; return whether they are known."""
        if self._names and (len(self._names) > 1 or self._clock() < self._names_due):
            return True
        try:
            self._names = tuple(controllers(self.slurm.settings())) or (self.host,)
        except SlurmError as error:
            log.debug("cannot determine the number of slurmctld: %s", error)
        self._names_due = self._clock() + ALONE_S / 2
        return bool(self._names)

    def _without_database(self) -> None:
        """Make only the first host active, because each host has its own SQLite file."""
        advice = "[store] url must name MariaDB or PostgreSQL for both to share one record (docs/install.md)"
        if self._is_this_host(self._names[0]):
            self._sole = self.active = True
            self._warn(f"slurm.conf has several SlurmctldHost, but SQLite supports one host: no fail-over; {advice}")
        else:
            self._refuse(f"migbatchd runs on {self._names[0]} only, because SQLite supports one host: {advice}")

    def _named(self) -> str | None:
        """Return the first slurmctld that answers; None if unknown now."""
        if self._clock() < self._ping_due:
            return None
        try:
            answering = self.slurm.ping(PING_S if self.number else None)
        except SlurmError as error:
            log.debug("cannot determine the primary slurmctld: %s", error)
            self._ping_due = self._clock() + PATIENCE_S if self.number else 0.0
            return None
        return next((name for name, up in answering.items() if up), None)

    def _follow(self, named: str | None) -> None:
        if named is not None and not self._is_this_host(named):
            self._primary = None  # its report is outdated
            self._stand_by(f"slurmctld's primary is {named}")
        elif self._primary is False:
            self._stand_by("slurmctld of this host is not the primary")
        elif not self.number and (named is not None or self._primary) and self._answers():
            self._take()

    def _answers(self) -> bool:
        """Return whether a slurmctld answers requests: a backup refuses them."""
        try:
            self.slurm.settings()
        except SlurmError as error:
            self.why = f"slurmctld does not answer: {error}"
            return False
        return True

    def _is_this_host(self, name: str) -> bool:
        return name in (self.host, self.host.partition(".")[0])

    # -- the term --------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Renew the term, or take one if none is held."""
        assert self._open is not None
        query_time = self._clock()
        try:
            if self._store is None:
                self._store = self._open()
            state = self._store.take_term(self.host, TERM_S, self.number)
        except Exception as error:
            if self._store is not None:
                self._store.reconnect()
            self._fault.failed(error)
            self.why = "the database does not answer"
            return
        self._fault.succeeded()
        if self.number and state.number != self.number:
            log.warning(
                "term %d is over: another migbatchd has taken over, or this one was inactive too long", self.number
            )
            self._stand_by(f"migbatchd on {state.holder} has taken over")
            return
        if not state.own:
            self.why = f"migbatchd on {state.holder} is active"
            return
        self._until = query_time + TERM_S
        if not self.number:
            log.info("term %d begins", state.number)
            self.number, self.active, self.why = state.number, True, ""

    def _stand_by(self, why: str) -> None:
        self.active, self.why = False, why

    def _refuse(self, why: str) -> None:
        self._stand_by(why)
        self._warn(why)

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text

    def resign(self) -> None:
        """Release the term, after everything that acted in it has ended; may block.

        In the thread of the checks: one that is in progress would renew the term or take the next one.
        """
        self._thread.submit(self._release).result()

    def _release(self) -> None:
        number, self.number, self._until = self.number, 0, 0.0
        if number and self._store is not None:
            try:
                self._store.give_term(number)
            except Exception as error:
                log.warning("term %d could not be released, it will expire: %s", number, error)

    def close(self) -> None:
        """Release the term and close the database; may block."""
        self.resign()
        self._thread.shutdown()
        self.active = False
        if self._store is not None:
            self._store.close()
            self._store = None


ActiveRole: TypeAlias = AlwaysActive | TermKeeper
"""Whether this migbatchd is the active one."""

"""Read and write the record for a round of the controller: through the store writer, with bounded waits."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.decide.snapshot import Answers, LendingPast, Questions
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.store import loans, queries, recent, work
from slurm_migbatch.store.db import Store

log = logging.getLogger(__name__)

_SAVE_S: Final = 5.0
"""How long a round waits for the database to store its intentions."""
_ANSWER_S: Final = 0.5
"""How long it waits for answers; later answers are used by a later round."""
_ALL: Final = 1_000_000
_DAY_S: Final = 86_400.0

Rows = Sequence[Mapping[str, Any]]


class WriterRecord:
    """See `controller.Record`."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._fault = FaultReporter("the record of loans", "nothing is lent until it is writable", log)
        self._asked: tuple[Questions, concurrent.futures.Future[Answers]] | None = None

    @property
    def available(self) -> bool:
        """Whether the database is not known to be down."""
        return not self._writer.fault.open

    def supply(self, node: str, at: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Store the new offer of `node`."""
        self._writer.post(lambda store: store.record_supply(node, at, version, counts, why), "supply changes")

    def save(self, loans: Rows, actions: Rows) -> bool:
        """Write loans and actions, and wait for it."""
        if not self.available:  # do not wait for the database
            return False
        try:
            self._writer.call(lambda store: store.save_loans(loans, actions), "loans").result(_SAVE_S)
        except concurrent.futures.TimeoutError:
            self._fault.failed(f"the database did not answer within {_SAVE_S:g} s")
            return False
        except Exception as error:
            self._fault.failed(error)
            return False
        self._fault.succeeded()
        return True

    def post(self, loans: Rows, actions: Rows) -> None:
        """Write loans and actions when possible."""
        self._writer.post(lambda store: store.save_loans(loans, actions), "loans", len(loans) + len(actions))

    def ask(self, questions: Questions) -> Answers:
        """Answer `questions`, or the previous ones if their answers did not arrive in time."""
        if self._asked is None:
            try:
                self._asked = questions, self._writer.call(lambda store: _answers(store, questions), "questions")
            except Overloaded as error:
                log.debug("not querying the record: %s", error)
                return Answers()
        pending, future = self._asked
        try:
            answers = future.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            return Answers()
        except Exception as error:
            log.debug("cannot query the record: %s", error)
            answers = Answers(pending)
        self._asked = None
        return answers


def _answers(store: Store, questions: Questions) -> Answers:
    arrays = store.read(work.array_runs, sorted(questions.arrays)) if questions.arrays else None
    throttles = store.actions(sorted(questions.throttled), _ALL) if questions.throttled else ()
    return Answers(
        questions,
        store.job_progress(questions.progress) if questions.progress else None,
        arrays,
        throttles,
        {name: store.decision(name) for name in questions.decisions},
    )


@dataclass(frozen=True)
class NodesPast:
    """The record's state of nodes when a service starts: GPUs, events of instances, leases, and offers.

    `removed` has the geometries, by UUID, of GPUs that their nodes do not report now.
    """

    inventory: Mapping[str, Rows]
    removed: Mapping[str, Geometry]
    events: Mapping[str, Rows]
    leases: Sequence[Any]
    offers: Mapping[str, Mapping[str, int]]


def nodes_past(store: Store) -> NodesPast:
    """Read what nodes held."""
    events = store.read(recent.instance_events, changes=True)
    removed = store.read(queries.geometries, removed=True)
    return NodesPast(store.inventory(), removed, events, store.leases(), store.read(queries.last_offers))


def lending_past(store: Store, now: float, history_s: float) -> LendingPast:
    """Read the initial state of lending; a forecast uses `history_s` seconds of history."""
    rows = store.loans(since=now - max(history_s, _DAY_S))
    going: Collection[int] = [row["job_id"] for row in rows if row["ended"] is None]
    used, freed = store.read(loans.uses, now - history_s), store.read(loans.freed, now - _DAY_S)
    return LendingPast(rows, used, freed, store.job_progress(going), store.actions())

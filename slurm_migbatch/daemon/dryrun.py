"""Log and record what would be done in a dry run; a decision that stays the same is logged once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from slurm_migbatch.daemon.actuator import change_of
from slurm_migbatch.decide.dispatch import stage as dispatching
from slurm_migbatch.decide.dispatch.arrays import Throttle
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.lending import stage as loans
from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.model import LoanOrder, OrderKind
from slurm_migbatch.decide.lending.stage import OrderOutcome

log = logging.getLogger(__name__)

_AGAIN_S: Final = 3600.0
"""Seconds after which an unchanged order is logged again."""


class DryRun:
    """Remembers logged orders; creates the rows for the record."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, OrderKind], tuple[str, float]] = {}
        self._changes: dict[str, str] = {}

    def recall(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Load from the record what was logged before a restart."""
        kinds = {kind.value for kind in OrderKind}
        for row in actions:
            if row["dry_run"] and row["kind"] in kinds:  # the rows of dispatch are in the same table
                self._orders[row["job_id"], OrderKind(row["kind"])] = row["after"] or "", row["ts"]

    def orders(self, orders: Sequence[LoanOrder], job_views: Mapping[int, JobView], now: float) -> list[dict[str, Any]]:
        """Return rows of orders on training jobs that were not logged yet."""
        rows = []
        for order in orders:
            key, (before, after) = (order.job, order.kind), change_of(order, job_views[order.job].row, now)
            logged = self._orders.get(key)
            if logged is None or logged[0] != after or now - logged[1] >= _AGAIN_S:
                self._orders[key] = after, now
                rows.append(loans.action_row(OrderOutcome(order, before, after, now), dry_run=True))
                log.info("dry run: would %s", order.kind.value, extra={"job": order.job, "why": order.why})
        for key in [key for key in self._orders if key[0] not in job_views]:
            del self._orders[key]
        return rows

    def changes(self, changes: Iterable[Retype | Throttle], now: float) -> list[dict[str, Any]]:
        """Return rows of changes of pending jobs that were not logged yet."""
        current: dict[str, str] = {}
        rows = []
        for change in changes:
            row = dispatching.action_row(change, now, dry_run=True)
            tasks = change.tasks if isinstance(change, Retype) else ()
            name = f"{row['job_id']} {tasks} {row['kind']}"
            current[name] = str(row["after"])
            if self._changes.get(name) != current[name]:
                rows.append(row)
                log.info("dry run: would %s", row["kind"], extra={"job": row["job_id"], "why": change.why})
        self._changes = current
        return rows

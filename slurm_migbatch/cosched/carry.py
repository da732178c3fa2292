"""Does what a round decided, through Slurm: what frees slices first, then all changes of GRES in one process.

Every call may be repeated without harm, and none is trusted: the next look at Slurm shows what became of it. An error
is told for each order that it may concern; where one process carried several, that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_migbatch.cosched.ledger import Sight
from slurm_migbatch.cosched.picture import Kind, Order
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.workload.loans import LOAN, retyped

HASTENED = "now+2"
"""Begin of a job that was requeued: not `now`, see `CliClient.hasten`."""


class Hands(Protocol):
    """What the co-scheduler asks of Slurm; every method may raise SlurmError. Jobs are named as Slurm prints them."""

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """`scontrol update` of many jobs in one process."""

    def signal(self, jobs: Sequence[str], name: str) -> None:
        """Send a signal ("USR1") to everything that these jobs run."""

    def requeue(self, jobs: Sequence[str]) -> None:
        """Put running batch jobs back into the queue."""


@dataclass(frozen=True)
class Done:
    """What became of an order: GRES or state before and after, when Slurm was called, what it objected."""

    order: Order
    before: str
    after: str
    at: float
    error: str = ""


def carry(orders: Sequence[Order], sights: Mapping[int, Sight], hands: Hands, clock: Callable[[], float]) -> list[Done]:
    """Carry the orders out; at most one process for each signal, one for requeues, one for updates."""
    done: list[Done] = []
    for kind in (Kind.SIGNAL, Kind.REQUEUE):
        by_signal: dict[str, list[Order]] = {}
        for order in orders:
            if order.kind is kind:
                by_signal.setdefault(order.signal if kind is Kind.SIGNAL else "", []).append(order)
        for signal, some in by_signal.items():
            names = [name_of(sights[order.job].row) for order in some]
            at = clock()
            call = (lambda: hands.signal(names, signal)) if kind is Kind.SIGNAL else (lambda: hands.requeue(names))  # noqa: B023 - called at once
            error = _tried(call)
            done += [Done(order, sights[order.job].row.state, signal or "PENDING", at, error) for order in some]
    updates: dict[str, Mapping[str, str]] = {}
    changing: list[tuple[Order, str, str]] = []
    for order in orders:
        if order.kind in (Kind.RELEASE, Kind.WITHDRAW, Kind.RETYPE):
            row = sights[order.job].row
            kind_of_slice = order.profile.gres_type if order.profile is not None else LOAN
            fields = retyped(row.gres, row.comment, kind_of_slice)
            if order.kind is Kind.RELEASE and row.reason.startswith("BeginTime"):
                fields["StartTime"] = HASTENED
            updates[name_of(row)] = fields
            changing.append((order, row.gres, fields["Gres"]))
    if updates:
        at = clock()
        error = _tried(lambda: hands.update_jobs(updates))
        done += [Done(order, before, after, at, error) for order, before, after in changing]
    return done


def name_of(row: JobRow) -> str:
    """The job as Slurm's commands take it: the id of an array's first task would mean all of them."""
    alone = row.array_job is not None and row.array_task is not None and row.array_task.isdigit()
    return f"{row.array_job}_{row.array_task}" if alone else str(row.job_id)


def _tried(call: Callable[[], None]) -> str:
    try:
        call()
    except SlurmError as error:
        return str(error) or type(error).__name__
    return ""

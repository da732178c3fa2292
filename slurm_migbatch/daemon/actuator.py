"""Apply a round's decisions on jobs through Slurm: first the changes that free slices, then all changes of GRES.

There is one process for each signal, one for requeues and one for updates, however many jobs there are. Every call is
idempotent, and no call is assumed to have succeeded: the next snapshot shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from slurm_migbatch.decide.actions import MoveOrder
from slurm_migbatch.decide.capacity.demand import waits_for_begin
from slurm_migbatch.decide.lending.ledger import JobView, first_task
from slurm_migbatch.decide.lending.model import GIVING, Kind, LoanOrder
from slurm_migbatch.decide.lending.stage import OrderOutcome
from slurm_migbatch.decide.supply.moves import MOVE
from slurm_migbatch.slurm.client import JobRow, SlurmError, SlurmRefused
from slurm_migbatch.workload.loans import GUEST, LOAN, away, emptied, retyped

KILLED_S = 3.0
"""A job that was requeued more recently is not started immediately, see `CliClient.shorten_requeue_delay`, unless on
another node. Its submission time is that of its requeue.
"""


class JobClient(Protocol):
    """Slurm operations used by lending (`slurm.client.SlurmClient`)."""

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Change many jobs by `scontrol update`."""

    def signal_all(self, job_ids: Iterable[int | str], name: str) -> None:
        """Send a signal ("USR1") to all processes of these jobs, including their batch scripts."""

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """Requeue running batch jobs."""

    def excluded_nodes(self, job_ids: Iterable[int | str]) -> Mapping[str, str]:
        """Return the nodes that jobs exclude, for jobs that exclude any, as Slurm writes them."""


def apply_orders(
    orders: Sequence[LoanOrder], job_views: Mapping[int, JobView], client: JobClient, clock: Callable[[], float]
) -> list[OrderOutcome]:
    """Apply the orders; return their results."""
    outcomes: list[OrderOutcome] = []
    names = {order.job: name_of(job_views[order.job].row, first_only=order.kind is Kind.RELEASE) for order in orders}

    def ask(some: Sequence[tuple[LoanOrder, str, str]], call: Callable[[], None]) -> None:
        at = clock()
        errors = _tried(call, [names[order.job] for order, _, _ in some])
        outcomes.extend(
            OrderOutcome(order, before, after, at, errors.get(names[order.job], "")) for order, before, after in some
        )

    for signal in dict.fromkeys(order.signal for order in orders if order.kind is Kind.SIGNAL):
        signalled = [
            (o, job_views[o.job].row.state, o.signal) for o in orders if o.kind is Kind.SIGNAL and o.signal == signal
        ]
        listed = [names[order.job] for order, _, _ in signalled]
        ask(signalled, lambda listed=listed, signal=signal: client.signal_all(listed, signal))  # type: ignore[misc]
    requeued = [(order, job_views[order.job].row.state, "PENDING") for order in orders if order.kind is Kind.REQUEUE]
    if requeued:
        ask(requeued, lambda: client.requeue_all([names[order.job] for order, _, _ in requeued]))
    updates: dict[str, Mapping[str, str]] = {}
    changing: list[tuple[LoanOrder, str, str]] = []
    for order in orders:
        if order.kind in (Kind.RELEASE, Kind.WITHDRAW, Kind.RETYPE, Kind.SHARE):
            row = job_views[order.job].row
            fields = _fields(order, row, clock())
            updates[names[order.job]] = fields
            changing.append((order, row.gres, fields["Gres"]))
    if changing:
        emptying = {names[o.job]: fields for o, _, _ in changing if (fields := emptied(job_views[o.job].row.gres))}
        excluding = [names[order.job] for order, before, _ in changing if order.away and not away(before)]
        ask(changing, lambda: _update(client, emptying, updates, excluding))
    return outcomes


def apply_moves(
    orders: Sequence[MoveOrder], rows: Mapping[int, JobRow], client: JobClient, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Signal training jobs to write a checkpoint, or requeue them; return the rows for the record."""
    signals = dict.fromkeys(order.signal for order in orders if order.signal)
    records: list[dict[str, Any]] = []
    for signal in (*signals, ""):
        chosen = [order for order in orders if order.signal == signal]
        names = {order.job: name_of(rows[order.job]) for order in chosen}
        if not names:
            continue
        at = clock()
        call = (
            partial(client.signal_all, names.values(), signal)
            if signal
            else partial(client.requeue_all, names.values())
        )
        errors = _tried(call, names.values())
        records.extend(
            {
                "ts": at,
                "job_id": order.job,
                "restart": order.restart,
                "kind": MOVE,
                "before": rows[order.job].state,
                "after": signal or "PENDING",
                "why": order.why,
                "dry_run": False,
                "outcome": errors.get(names[order.job], ""),
            }
            for order in chosen
        )
    return records


def _update(
    client: JobClient,
    emptying: Mapping[str, Mapping[str, str]],
    updates: Mapping[str, Mapping[str, str]],
    excluding: Sequence[str],
) -> None:
    """Update jobs: in two requests if Slurm keeps a job's former GRES request, else in one."""
    own = client.excluded_nodes(excluding) if excluding else {}
    refused: Mapping[str, str] = {job: f"its user excludes {nodes}, which is kept" for job, nodes in own.items()}
    emptying = {name: fields for name, fields in emptying.items() if name not in refused}
    if emptying:
        try:
            client.update_jobs(emptying)
        except SlurmRefused as refusal:
            refused = {**refused, **refusal.refused}
    accepted = {name: fields for name, fields in updates.items() if name not in refused}
    try:
        if accepted:
            client.update_jobs(accepted)
    except SlurmRefused as refusal:
        refused = {**refused, **refusal.refused}
    if refused:
        raise SlurmRefused(refused, len(updates))


def name_of(row: JobRow, *, first_only: bool = False) -> str:
    """Return the job id in the form that Slurm's commands need; the plain id of an array's first task means all tasks.

    Args:
        first_only: of array tasks that share the row, only the first.
    """
    task = first_task(row) if first_only or row.tasks == 1 else None
    return str(row.job_id) if task is None else f"{row.array_job}_{task}"


def _fields(order: LoanOrder, row: JobRow, now: float) -> dict[str, str]:
    kind = LOAN if order.profile is None else GUEST if order.kind is Kind.SHARE else order.profile.gres_type
    fields = retyped(row.gres, row.comment, kind, order.away)
    if order.kind in GIVING and waits_for_begin(row, now):
        # not in the future if possible: the scheduler might not run when it is reached (`BeginTimes`)
        fields["StartTime"] = "now" if order.away or now - row.submit >= KILLED_S else "now+2"
    if order.kind is Kind.SHARE:
        fields["ReqNodeList"] = order.node  # a guest's GRES does not name its host
    elif GUEST in row.gres and row.requested_nodes:
        fields["ReqNodeList"] = ""
    return fields


def _tried(call: Callable[[], None], names: Iterable[str]) -> Mapping[str, str]:
    """Call, and return Slurm's error for each of these jobs."""
    try:
        call()
    except SlurmRefused as refusal:
        return refusal.refused
    except SlurmError as error:
        return dict.fromkeys(names, str(error) or type(error).__name__)
    return {}

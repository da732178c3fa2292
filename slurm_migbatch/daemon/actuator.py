"""Apply a round's decisions on jobs through Slurm: first the changes that free slices, then all changes of GRES.

There is one process for each signal, one for requeues and one for updates, however many jobs there are. Every call is
idempotent, and no call is assumed to have succeeded: the next snapshot shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from slurm_migbatch.decide.actions import MoveOrder
from slurm_migbatch.decide.capacity.demand import waits_for_begin
from slurm_migbatch.decide.lending.ledger import first_task
from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.model import GIVING, LoanOrder, OrderKind
from slurm_migbatch.decide.lending.stage import OrderOutcome
from slurm_migbatch.decide.supply.moves import MOVE, PREEMPT
from slurm_migbatch.slurm.client import JobRow, SlurmClient, SlurmError, SlurmRefused
from slurm_migbatch.workload.loans import GUEST, LOAN, away, emptied, retyped

KILLED_S = 3.0
"""A job that was requeued more recently is not started immediately, see `CliClient.shorten_requeue_delay`, unless on
another node. Its submission time is that of its requeue.
"""


def apply_orders(
    orders: Sequence[LoanOrder], job_views: Mapping[int, JobView], client: SlurmClient, clock: Callable[[], float]
) -> list[OrderOutcome]:
    """Apply the orders; return their results."""
    outcomes: list[OrderOutcome] = []
    rows = {order.job: job_views[order.job].row for order in orders}
    names = {order.job: name_of(rows[order.job], first_only=order.kind is OrderKind.RELEASE) for order in orders}

    def apply(group: Sequence[LoanOrder], call: Callable[[list[str]], None]) -> None:
        if not group:
            return
        at = clock()
        errors = _call_for_jobs(call, [names[order.job] for order in group])
        for order in group:
            before, after = change_of(order, rows[order.job], at)
            outcomes.append(OrderOutcome(order, before, after, at, errors.get(names[order.job], "")))

    resume = partial(_resume, client, frozenset(names[job] for job, row in rows.items() if row.state == "SUSPENDED"))
    for signal in dict.fromkeys(order.signal for order in orders if order.kind is OrderKind.SIGNAL):
        signalled = [order for order in orders if order.kind is OrderKind.SIGNAL and order.signal == signal]
        apply(signalled, partial(resume, partial(client.signal_all, name=signal)))
    apply([order for order in orders if order.kind is OrderKind.REQUEUE], partial(resume, client.requeue_all))
    changing = [order for order in orders if order.kind not in (OrderKind.SIGNAL, OrderKind.REQUEUE)]
    now = clock()
    updates = {names[order.job]: _fields(order, rows[order.job], now) for order in changing}
    emptying = {names[order.job]: fields for order in changing if (fields := emptied(rows[order.job].gres))}
    excluding = [names[order.job] for order in changing if order.away and not away(rows[order.job].gres)]
    apply(changing, lambda _: _update(client, emptying, updates, excluding))
    return outcomes


def _resume(
    client: SlurmClient, suspended: frozenset[str], call: Callable[[list[str]], None], names: list[str]
) -> None:
    """Signal or requeue jobs, the suspended ones once they run: Slurm does not signal them, and holds them requeued."""
    if resumed := [name for name in names if name in suspended]:
        with suppress(SlurmRefused):  # it was resumed meanwhile
            client.resume_all(resumed)
    call(names)


def change_of(order: LoanOrder, row: JobRow, now: float) -> tuple[str, str]:
    """Return what an order changes: the job's state or GRES before, and the signal, state or GRES after."""
    if order.kind is OrderKind.SIGNAL:
        return row.state, order.signal
    if order.kind is OrderKind.REQUEUE:
        return row.state, "PENDING"
    return row.gres, _fields(order, row, now)["Gres"]


def apply_moves(
    orders: Sequence[MoveOrder], rows: Mapping[int, JobRow], client: SlurmClient, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Signal jobs that are moved or preempted, or end their runs; return the rows for the record.

    Like Slurm, preemption warns only the steps: a batch script that SIGTERM ends would have failed, and no failed job
    is requeued.
    """
    records: list[dict[str, Any]] = []
    kinds = dict.fromkeys((order.signal, order.cancel, order.preempts) for order in orders)
    for kind in sorted(kinds, key=lambda kind: not kind[0]):  # signals first
        signal, cancel, preempts = kind
        chosen = [order for order in orders if (order.signal, order.cancel, order.preempts) == kind]
        names = {order.job: name_of(rows[order.job]) for order in chosen}
        at = clock()
        call = partial(client.signal_all, name=signal, script=not preempts) if signal else client.requeue_all
        errors = _call_for_jobs(partial(_cancel, client) if cancel else call, [*names.values()])
        records.extend(
            {
                "ts": at,
                "job_id": order.job,
                "restart": order.restart,
                "kind": PREEMPT if preempts else MOVE,
                "before": rows[order.job].state,
                "after": signal or ("CANCELLED" if cancel else "PENDING"),
                "why": order.why,
                "dry_run": False,
                "outcome": errors.get(names[order.job], ""),
            }
            for order in chosen
        )
    return records


def _cancel(client: SlurmClient, names: Iterable[str]) -> None:
    for name in names:
        client.cancel(name, running=True)


def _update(
    client: SlurmClient,
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
    kind = LOAN if order.profile is None else GUEST if order.kind is OrderKind.SHARE else order.profile.gres_type
    fields = retyped(row.gres, row.comment, kind, order.away)
    if order.kind in GIVING and waits_for_begin(row, now):
        # not in the future if possible: the scheduler might not run when it is reached (`BeginTimes`)
        fields["StartTime"] = "now" if order.away or now - row.submit >= KILLED_S else "now+2"
    if order.kind is OrderKind.SHARE:
        fields["ReqNodeList"] = order.node  # a guest's GRES does not name its host
    elif GUEST in row.gres and row.requested_nodes:
        fields["ReqNodeList"] = ""
    return fields


def _call_for_jobs(call: Callable[[list[str]], None], names: list[str]) -> Mapping[str, str]:
    """Call with the names of jobs, and return Slurm's error for each of these."""
    try:
        call(names)
    except SlurmRefused as refusal:
        return refusal.refused
    except SlurmError as error:
        return dict.fromkeys(names, str(error) or type(error).__name__)
    return {}

"""Explain why a job waits, from the last decision."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from slurm_migbatch.decide.capacity.demand import could_run, given_up, waits_for_loan
from slurm_migbatch.decide.capacity.model import Mode
from slurm_migbatch.decide.supply.limits import MOST_COMBINATIONS
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.times import format_clock

TASK_LIMIT: Final = "JobArrayTaskLimit"
"""Slurm's reason for tasks held by the array's throttle."""
_GIVEN_UP: Final = (
    "; too few nodes listed its slices when Slurm examined it (BadConstraints), so it waits without a priority until "
    "they are offered, unless the site has as many catalog nodes as it needs nodes"
)


def why_not_started(
    job: int,
    row: JobRow | None,
    decided: SupplyDecision | None,
    now: float,
    lending: Collection[str] | None = None,
) -> str:
    """Return one sentence that says why a job has not started, as far as supply is concerned.

    Args:
        row: Slurm's row of it; None if Slurm does not list it.
        decided: the last decision on supply; None before the first.
        now: unix seconds.
        lending: partitions that lend; None if lending is disabled.
    """
    if decided is None:
        return "supply has not been planned yet"
    if row is None:
        return f"Slurm does not list job {job}"
    if row.unread:
        return f"Slurm's row of job {job} cannot be parsed ({row.reason}), so it is left alone"
    if not row.pending:
        return f"job {job} is {row.state.lower()}"
    if row.reason == TASK_LIMIT:
        return "its array is at its task limit; it starts when a task ends"
    if not could_run(row, now):
        if _requeued_too_often(row.reason):
            return (
                f"Slurm holds it ({row.reason}), because it has been requeued as often as MaxPreemptRequeue of "
                f"slurm.conf allows; an operator lets it continue by `scontrol release {job}`"
            )
        return f"Slurm holds it for another reason ({row.reason}); nothing is kept free for it"
    if waits_for_loan(row.gres):
        return without_loan(row, lending)
    if any(demand.job == job for demand in decided.put_off):
        return (
            f"jobs of the same user before it request {MOST_COMBINATIONS} other combinations of slices; it is planned "
            "when some of them have started"
        )
    return _by_plan(job, row, decided, now) + (_GIVEN_UP if given_up(row) else "")


def _requeued_too_often(reason: str) -> bool:
    """Return whether a reason is that of MaxPreemptRequeue, which Slurm has from 26.11 on, by name or in words."""
    words = reason.lower()
    return "preempt" in words and "requeue" in words


def without_loan(row: JobRow, lending: Collection[str] | None) -> str:
    """Return why a job that waits for a loan has none, if lending has not considered it."""
    waits, instead = "it waits for a loan of an idle slice", "request an explicit profile for a slice of its own"
    if lending is None:
        return f"{waits}, and lending is disabled ([lending] enabled = false): {instead}"
    if foreign := sorted(set(row.partitions).difference(lending)):
        return f"{waits}, and partition {', '.join(foreign)} does not lend ([lending] partitions): {instead}"
    return f"{waits}; the next round of lending decides on it"


def _by_plan(job: int, row: JobRow, decided: SupplyDecision, now: float) -> str:
    plan = decided.plan
    placed = plan.placed.get(job)
    if placed is not None:
        node_names = ", ".join(placed.nodes[:4])
        if placed.standing:
            free = "the whole node is free" if row.exclusive else "CPUs and memory are free, too"
            return f"its slices are offered on {node_names}; Slurm starts it there once {free}"
        return f"{node_names} is being updated to offer its slices"
    if job in plan.unplaceable:
        return (
            f"it is part of the heterogeneous job {row.het_job}, which needs separate nodes for each component, and "
            "there are too few nodes on which they can run"
        )
    reservations = [r for r in plan.reservations if r.job == job]
    if reservations:
        places = "; ".join(f"{slot} of GPU {gpu} on {node}" for node, gpu, slot in reservations[0].places)
        if reservations[0].at is None:
            return f"reserved: {places}; in use by a job without a time limit, so the start cannot be predicted"
        return f"reserved: {places}; free in {format_clock(max(0, int(reservations[0].at - now)))} at the latest"
    if any(demand.job == job and demand.loan for demand in decided.demands):
        return "it gets only slices that no other job needs, and there are none now"
    if job in plan.waiting:
        demand = next(demand for demand in decided.demands if demand.job == job)
        closed = sorted(node for node in demand.pool if decided.nodes[node].mode is Mode.CLOSED)
        if len(demand.pool) - len(closed) < demand.nodes:
            return f"Slurm starts no jobs on {', '.join(closed[:4])} now; `sinfo -R -n {closed[0]}` shows why"
        return "no GPU has room for it now, and jobs of higher priority hold the reservations"
    if avoided := sorted(decided.avoided.get(job, ())):
        return (
            f"its slices were offered on {', '.join(avoided[:4])}, and Slurm did not start it there, mostly for lack "
            "of CPUs or memory; they will be offered there again in some minutes"
        )
    return _too_few_nodes(row)


def _too_few_nodes(row: JobRow) -> str:
    if row.num_nodes > 1:
        return f"it needs {row.num_nodes} nodes, and fewer of the MIG nodes that it can use have such slices"
    return "no MIG node that it can use has such a slice"

"""Find the nodes where pending training jobs could run after a release, and running ones if stopped to grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from slurm_migbatch.decide.capacity.demand import begin_not_shown, waits_for_begin
from slurm_migbatch.decide.lending.inputs import ANY, LendingInputs
from slurm_migbatch.decide.lending.ledger import REQUEUE_DELAY_S, Ledger
from slurm_migbatch.decide.lending.loan import JobView, LoanHistory, State
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import drops_old_gres_type


@dataclass(frozen=True)
class LoanPool:
    """Where a pending job could run after a release.

    Attributes:
        away: where Slurm must not start it, see `pools_of`.
        early: whether it starts before Slurm's delay is over, on nodes where slurmd may still know its last run.
    """

    nodes: frozenset[str]
    away: frozenset[str] = frozenset()
    early: bool = False


def pools_of(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[int, LoanPool]:
    """Return where pending jobs could run after a release, if Slurm lets them run at all.

    Up to 23.02 slurmd often confuses the next run of a job with its last one, until the last run's credentials have
    expired: it starts no Prolog, so there is no slice, and the run ends at once. With these releases a job starts
    before Slurm's delay after a requeue is over on other nodes only. A job that may use no other node is tried there
    nevertheless, but only once; after that it waits until the delay is over.
    """
    demand_rows, early = [], set()
    for row in inputs.rows:
        job_view = job_views.get(row.job_id)
        if job_view is not None and row.pending and job_view.hints.waiting and row.job_id not in ledger.open:
            reason = row.reason
            if delayed(row, ledger.past.get(row.job_id), inputs.now):
                early.add(row.job_id)
                reason = "None"
            elif begin_not_shown(row, inputs.now):
                reason = "BeginTime"
            demand_rows.append(inputs.waiting.for_any_slice(row, reason))
        elif row.active and row.array_job is not None:
            demand_rows.append(row)  # it counts towards the limit of its array
    pool_demands = inputs.waiting.of(demand_rows, inputs)
    pools = {
        demand.job: _pool(job_views[demand.job].row, demand.pool, ledger, early=demand.job in early)
        for demand in pool_demands
        if demand.job in job_views
    }
    return {job: pool for job, pool in pools.items() if pool is not None}


def _pool(row: JobRow, nodes: frozenset[str], ledger: Ledger, *, early: bool) -> LoanPool | None:
    """Return the nodes for which a job may be released now; None if there are none."""
    if not row.restarts or drops_old_gres_type(row.gres):
        return _anywhere(nodes)
    confusing_nodes = ledger.taken_for_last(row.job_id)
    known = not early or bool(ledger.past.get(row.job_id, LoanHistory()).node)
    if known and not confusing_nodes:
        return LoanPool(nodes)
    if known and nodes - confusing_nodes:
        return LoanPool(nodes - confusing_nodes, away=confusing_nodes)
    return LoanPool(nodes, early=True) if row.restarts == 1 else None


def growth_nodes(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> dict[int, frozenset[str]]:
    """Return the nodes where each running loan may continue if stopped to grow; for its current node see `pools_of`."""
    rows = [
        _as_pending(job_views[job].row)
        for job, loan in ledger.open.items()
        if loan.state is State.RUNNING and job in job_views
    ]
    regions = {}
    for demand in inputs.growing.of(rows, inputs):
        row = job_views[demand.job].row
        others = demand.pool if drops_old_gres_type(row.gres) else demand.pool.difference(row.nodes)
        regions[demand.job] = others or (demand.pool if not row.restarts else others)
    return regions


_anywhere = lru_cache(maxsize=1024)(LoanPool)
"""Return the pool of a job that may start on each of these nodes; thousands of jobs share few pools."""


@lru_cache(maxsize=1 << 14)
def _as_pending(row: JobRow) -> JobRow:
    """Return the job as if it were pending for any slice. Cached, because rounds repeat the query."""
    return replace(row, state="PENDING", reason="None", nodes=(), gres=ANY, array_job=None)


def delayed(row: JobRow, past: LoanHistory | None, now: float) -> bool:
    """Return whether only Slurm's delay after a requeue keeps a job from starting."""
    if row.eligible is None or past is None or past.restart != row.restarts - 1:
        return False
    return waits_for_begin(row, now) and row.eligible <= now + REQUEUE_DELAY_S

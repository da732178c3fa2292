"""Find pending inference that has its slices but not its CPUs or memory, and the loans that end for it. Pure.

Slurm itself preempts for them as for slices, but only jobs that have run for PreemptExemptTime.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from slurm_migbatch.decide.capacity.demand import begin_not_shown
from slurm_migbatch.decide.lending.inputs import LendingInputs
from slurm_migbatch.decide.lending.ledger import Ledger
from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.model import Shortage
from slurm_migbatch.decide.lending.values import NOTHING, Resources
from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.slurm.client import JobRow, NodeRow

LASTING_S: Final = 3.0
"""A shortage must last for so long: the lists of jobs and of nodes are of slightly different times."""


def shortages(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> list[Shortage]:
    """Return the jobs that lack only CPUs or memory, also after jobs that are about to end have freed theirs.

    The backfill scheduler of 23.11 sets the reason of such a job to None.
    """
    if not ledger.open:
        return []
    waiting = [
        (row, placed)
        for row in inputs.rows
        if row.pending
        and (row.reason == "Resources" or (row.reason == "None" and not begin_not_shown(row, inputs.now)))
        and row.job_id not in job_views
        and (placed := inputs.plan.placed.get(row.job_id)) is not None
        and placed.standing
    ]
    if not waiting:
        return []
    free, nodes = coming_resources(inputs, ledger), {row.name: row for row in inputs.nodes}
    short_jobs = []
    for row, placed in waiting:
        found = {name: resources_of(row, nodes[name]).without(free[name]) for name in placed.nodes if name in free}
        lacks = {name: lacking for name, lacking in found.items() if any(lacking)}
        is_short = len(lacks) == len(placed.nodes) if row.num_nodes == 1 else bool(lacks)
        if is_short:
            short_jobs.append(Shortage(row.job_id, lacks, every=row.num_nodes > 1))
    return short_jobs


def lasting(found: Iterable[Shortage], since: dict[int, float], now: float) -> tuple[Shortage, ...]:
    """Return the shortages that have lasted for `LASTING_S`; updates `since`, the time when each was first found."""
    found = list(found)
    first_found = {shortage.job: since.get(shortage.job, now) for shortage in found}
    since.clear()
    since.update(first_found)
    return tuple(shortage for shortage in found if passed_s(first_found[shortage.job], now) >= LASTING_S)


def cheapest(lacking: Resources, loans: Collection[tuple[float, Resources, int]]) -> list[int] | None:
    """Return loans that free what a node lacks, those with the lowest losses first; None if all together do not.

    Args:
        loans: loss, CPUs and memory, and job of each.
    """
    chosen: list[tuple[float, Resources, int]] = []
    freed = NOTHING
    for loan in sorted(loans):
        if not any(lacking.without(freed)):
            break
        chosen.append(loan)
        freed = freed.plus(loan[1])
    if any(lacking.without(freed)):
        return None
    for loan in sorted(chosen, reverse=True):
        if not any(lacking.without(left := Resources(freed.cpus - loan[1].cpus, freed.memory - loan[1].memory))):
            chosen.remove(loan)
            freed = left
    return [job for _, _, job in chosen]


def too_small(row: JobRow, nodes: Iterable[NodeRow], obtainable: Mapping[str, Resources]) -> frozenset[str]:
    """Return the nodes that would lack CPUs or memory for a job even if every loan ended."""
    return frozenset(
        [
            node.name
            for node in nodes
            if node.name in obtainable and any(resources_of(row, node).without(obtainable[node.name]))
        ]
    )


def resources_of(row: JobRow, node: NodeRow) -> Resources:
    """Return what a job takes on a node; no memory where that is no consumable resource, or nothing of it is in use."""
    return Resources(row.cpus_per_node, row.memory_on(node) if node.memory_used else 0)


def coming_resources(inputs: LendingInputs, ledger: Ledger, *, of_every_loan: bool = False) -> dict[str, Resources]:
    """Return what of each node is free or about to be free, or could be if every loan ended."""
    nodes = {row.name: row for row in inputs.nodes if row.cpus}
    free = {name: Resources(node.cpus_free, node.memory - node.memory_used) for name, node in nodes.items()}
    for row in inputs.rows:
        loan = ledger.open.get(row.job_id)
        ends = row.state == "COMPLETING" or (row.active and loan is not None and (of_every_loan or loan.leaving))
        for name in row.nodes if ends else ():
            if name in free:
                free[name] = free[name].plus(resources_of(row, nodes[name]))
    return free

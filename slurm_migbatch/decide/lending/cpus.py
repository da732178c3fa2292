"""Find pending inference that has its slices but not its CPUs, and the loans that end for it. Pure.

Slurm itself preempts for CPUs as for slices, but only jobs that have run for PreemptExemptTime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from slurm_migbatch.decide.capacity.demand import begin_not_shown
from slurm_migbatch.decide.lending.inputs import LendingInputs
from slurm_migbatch.decide.lending.ledger import JobView, Ledger
from slurm_migbatch.decide.lending.model import CpuShortage
from slurm_migbatch.decide.snapshot import passed_s

LASTING_S: Final = 3.0
"""A shortage must last for so long: the lists of jobs and of nodes are of slightly different times."""


def shortages(inputs: LendingInputs, job_views: Mapping[int, JobView], ledger: Ledger) -> list[CpuShortage]:
    """Return the jobs that lack only CPUs, also after jobs that are about to end have freed theirs.

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
    free = coming_cpus(inputs, ledger)
    short_jobs = []
    for row, placed in waiting:
        needed = row.cpus_per_node
        lacks = {node: needed - free[node] for node in placed.nodes if needed > free.get(node, needed)}
        lacks_cpus = len(lacks) == len(placed.nodes) if row.num_nodes == 1 else bool(lacks)
        if lacks_cpus:
            short_jobs.append(CpuShortage(row.job_id, lacks, every=row.num_nodes > 1))
    return short_jobs


def lasting(found: Iterable[CpuShortage], since: dict[int, float], now: float) -> tuple[CpuShortage, ...]:
    """Return the shortages that have lasted for `LASTING_S`; updates `since`, the time when each was first found."""
    found = list(found)
    first_found = {shortage.job: since.get(shortage.job, now) for shortage in found}
    since.clear()
    since.update(first_found)
    return tuple(shortage for shortage in found if passed_s(first_found[shortage.job], now) >= LASTING_S)


def cheapest(lacking: int, loans: Collection[tuple[float, int, int]]) -> list[int] | None:
    """Return loans that free `lacking` CPUs, those with the lowest losses first; None if all together do not.

    Args:
        loans: loss, CPUs and job of each.
    """
    chosen: list[tuple[float, int, int]] = []
    freed = 0
    for loan in sorted(loans):
        if freed >= lacking:
            break
        chosen.append(loan)
        freed += loan[1]
    if freed < lacking:
        return None
    for loan in sorted(chosen, reverse=True):
        if freed - loan[1] >= lacking:
            chosen.remove(loan)
            freed -= loan[1]
    return [job for _, _, job in chosen]


def too_small(cpus: int, obtainable: Mapping[str, int]) -> frozenset[str]:
    """Return the nodes that would lack CPUs for a job even if every loan ended."""
    return frozenset([node for node, count in obtainable.items() if count < cpus])


def coming_cpus(inputs: LendingInputs, ledger: Ledger, *, of_every_loan: bool = False) -> Counter[str]:
    """Return how many CPUs of each node are free or about to be free, or could be if every loan ended."""
    free = Counter({row.name: row.cpus_free for row in inputs.nodes if row.cpus})
    for row in inputs.rows:
        loan = ledger.open.get(row.job_id)
        ends = row.state == "COMPLETING" or (row.active and loan is not None and (of_every_loan or loan.leaving))
        for node in row.nodes if ends else ():
            if node in free:
                free[node] += row.cpus_per_node
    return free

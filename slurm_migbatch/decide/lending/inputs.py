"""Define the parts of a snapshot that a lending round uses, and take them from Slurm's rows and nodes' reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from slurm_migbatch.decide.capacity.demand import DemandBook
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.lending.loan import JobView, Place
from slurm_migbatch.decide.snapshot import Run
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import loan_hints

_NOBODY: Final = (0, 0)
_NONE: Final[Mapping[int, JobView]] = MappingProxyType({})
ANY: Final = "gres:mig:1g.10gb:1"
"""GRES of a job for which any slice counts."""


class PoolBook:
    """Demands of jobs as if they were pending for any slice; those of unchanged jobs are kept from round to round."""

    def __init__(self) -> None:
        self._queue, self._demands = JobQueue(), DemandBook()
        #: by job, its row and what `for_any_slice` returned for it
        self._rows: dict[int, tuple[JobRow, JobRow]] = {}

    def for_any_slice(self, row: JobRow, reason: str) -> JobRow:
        """Return a pending job as if it requested any slice, with this reason; the same object while both are."""
        known = self._rows.get(row.job_id)
        if known is None or known[0] is not row or known[1].reason != reason:
            known = self._rows[row.job_id] = row, replace(row, gres=ANY, reason=reason)
        return known[1]

    def of(self, rows: Sequence[JobRow], inputs: LendingInputs) -> list[Demand]:
        """Return the demands; an unchanged row is the same object as before."""
        if len(self._rows) > 2 * len(rows):
            self._rows = {row.job_id: self._rows[row.job_id] for row in rows if row.job_id in self._rows}
        self._queue.update(rows)
        return self._demands.of(self._queue, inputs.nodes, inputs.facts.keys(), inputs.now)


@dataclass(frozen=True)
class LendingInputs:
    """The parts of a snapshot that a lending round uses.

    Attributes:
        plan: supply's plan of this round.
        wanted: the demands that the plan was made for.
        training_only: partitions that run only elastic training.
        waiting, growing: demands of pending jobs, and of running ones that could grow, cached from earlier snapshots.
    """

    now: float
    rows: Sequence[JobRow]
    nodes: Sequence[NodeRow]
    facts: Mapping[str, NodeFacts]
    plan: ClusterPlan
    wanted: Sequence[Demand]
    training_only: frozenset[str] = frozenset()
    waiting: PoolBook = field(default_factory=PoolBook)
    growing: PoolBook = field(default_factory=PoolBook)


def job_views_of(
    rows: Sequence[JobRow], partitions: Collection[str], before: Mapping[int, JobView] = _NONE
) -> dict[int, JobView]:
    """Return every elastic training job, in Slurm's order.

    Args:
        before: those of an earlier queue for the same partitions; that of an unchanged row is the same object.
    """
    job_views = {}
    for row in rows:
        known = before.get(row.job_id)
        if known is not None and known.row is row:
            job_views[row.job_id] = known
            continue
        hints = loan_hints(row.comment, row.partition, row.gres, partitions)
        if hints is not None:
            job_views[row.job_id] = JobView(row, hints)
    return job_views


def without_false_runs(facts: Mapping[str, NodeFacts], job_views: Mapping[int, JobView]) -> Mapping[str, NodeFacts]:
    """Return the nodes' reports without the runs of training jobs that Slurm has on other nodes.

    Their slices count as nobody's. root on a node can report any run; its job would be stopped for a slice that it does
    not hold.
    """
    rows = [job_view.row for job_view in job_views.values() if job_view.row.nodes]
    nodes_of_run = {(row.job_id, row.restarts): row.nodes for row in rows}

    def is_false(name: str, run: Run) -> bool:
        return name not in nodes_of_run.get(run, (name,))

    def without(name: str, gpu: GpuFacts) -> GpuFacts:
        leases = tuple([(slot, _NOBODY if is_false(name, run) else run) for slot, run in gpu.leases])
        return replace(gpu, leases=leases, guests=tuple([pair for pair in gpu.guests if not is_false(name, pair[1])]))

    corrected = {
        name: replace(node, gpus=tuple([without(name, gpu) for gpu in node.gpus]))
        for name, node in facts.items()
        if any(is_false(name, run) for gpu in node.gpus for _, run in gpu.holders)
    }
    return {**facts, **corrected} if corrected else facts


def places_of(facts: Mapping[str, NodeFacts]) -> dict[Run, Place]:
    """Return where each run has its slice."""
    return {
        run: (name, gpu.uuid, slot) for name, node in facts.items() for gpu in node.gpus for slot, run in gpu.holders
    }

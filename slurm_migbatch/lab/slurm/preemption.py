"""Choose the running jobs of lower tiers that the simulated slurmctld requeues for a job of a higher tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slurm_migbatch.lab.slurm.records import NodeRecord, Shape, SimulatedPartition
from slurm_migbatch.slurm.client import JobRow


class Preemption:
    """Find the jobs that may be preempted.

    Args:
        queue, partitions: jobs' rows by id, and partitions by name; both may change afterwards.
        exempt_s: how long a job must have run before.
    """

    def __init__(
        self, queue: Mapping[int, JobRow], partitions: Mapping[str, SimulatedPartition], exempt_s: float
    ) -> None:
        self._queue, self._partitions, self._exempt_s = queue, partitions, exempt_s

    def allowed(self, tier: int) -> bool:
        """Return whether jobs of a tier may preempt any others."""
        return any(p.preempted and p.tier < tier for p in self._partitions.values())

    def choose(
        self, shape: Shape, tier: int, pool: Iterable[NodeRecord], now: float
    ) -> list[tuple[str, list[int]]] | None:
        """Return enough nodes for a job with the jobs to preempt on each, the youngest first; None if too few."""
        chosen: list[tuple[str, list[int]]] = []
        for machine in pool:
            victims = self._victims(machine, shape, tier, now) if machine.open else None
            if victims is not None:
                chosen.append((machine.name, victims))
                if len(chosen) == shape.nodes:
                    return chosen
        return None

    def next_at(self, now: float) -> float | None:
        """Return when the exempt time of the next job ends; None if there is none."""
        exempt_ends = [
            row.start + self._exempt_s
            for row in self._queue.values()
            if row.state == "RUNNING" and row.start is not None and self._preemptable(row, math.inf)
            if row.start + self._exempt_s > now
        ]
        return min(exempt_ends, default=None)

    def _preemptable(self, row: JobRow, tier: float) -> bool:
        """Return whether jobs of a tier may preempt a job once its exempt time is over."""
        partition = self._partitions.get(row.partition)
        return partition is not None and partition.preempted and partition.tier < tier

    def _victims(self, machine: NodeRecord, shape: Shape, tier: int, now: float) -> list[int] | None:
        lacking = {kind: lack for kind, count in shape.need if (lack := max(1, count) - machine.free(kind)) > 0}
        rows = [self._queue[job] for job in machine.holdings]
        lower = [row for row in rows if self._preemptable(row, tier) and (row.start or 0.0) + self._exempt_s <= now]
        victims = []
        for row in sorted(lower, key=lambda row: (-(row.start or 0.0), -row.job_id)):
            if all(lack <= 0 for lack in lacking.values()):
                break
            taken = machine.holdings[row.job_id].taken
            if any(lack > 0 and taken.get(kind) for kind, lack in lacking.items()):
                victims.append(row.job_id)
                for kind in lacking:
                    lacking[kind] -= taken.get(kind, 0)
        return victims if all(lack <= 0 for lack in lacking.values()) else None

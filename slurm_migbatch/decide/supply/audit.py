"""Does any job hold more than Slurm gave it, or slices after Slurm has ended it?

A node reads a job's grant from its comment. Users cannot write that marker, but should one get past the submit filter,
what the node made is compared here with the GRES that slurmctld itself allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.capacity.model import Node
from slurm_migbatch.decide.capacity.sharing import guests
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow


@dataclass(frozen=True)
class Excess:
    """A job that holds slices on `node` beyond its allocation there."""

    job: int
    node: str
    surplus: Mapping[Profile, int]

    def __str__(self) -> str:
        listed = ", ".join(f"{n} x {p}" for p, n in sorted(self.surplus.items()))
        return f"job {self.job} holds {listed} on {self.node} that Slurm has not allocated to it"


def audit(nodes: Iterable[Node], jobs: Iterable[JobRow]) -> list[Excess]:
    """Jobs that are active in Slurm and hold more than their allocation.

    Jobs that Slurm no longer lists are none: their Epilog has not been heard of yet. Of a job whose row cannot be read
    nobody knows what it was allocated. A guest may hold one slice of any
    profile: that of its host.
    """
    jobs = list(jobs)
    sharing = guests(jobs)
    allowed = {row.job_id: slices(row.gres) for row in jobs if row.active}
    found: list[Excess] = []
    for node in nodes:
        held = Counter([(lease.job, lease.slot.profile) for gpu in node.gpus for lease in gpu.leases])
        surplus: dict[int, dict[Profile, int]] = {}
        for (job, profile), count in held.items():
            granted = allowed.get(job) if job is not None else None
            if job is not None and granted is not None and count > granted.get(profile, 0):
                surplus.setdefault(job, {})[profile] = count - granted.get(profile, 0)
        found.extend(
            Excess(job, node.name, more)
            for job, more in surplus.items()
            if job not in sharing or sum(more.values()) > 1
        )
    return found


@dataclass(frozen=True, order=True)
class Orphan:
    """A run that holds slices on `node` though Slurm does not have it there."""

    node: str
    job: int
    restart: int

    def __str__(self) -> str:
        return f"job {self.job} run {self.restart} holds slices on {self.node}, where Slurm no longer has it"


def orphans(held: Iterable[tuple[str, int, int]], jobs: Iterable[JobRow]) -> set[Orphan]:
    """Runs that hold slices (node, job, restart count) where no active job of Slurm's has a node of that name.

    Each run is one for a moment at its end, until its node has told of it. The restart count of a job in COMPLETING is
    the next run's already. A job whose row cannot be read may be anywhere.
    """
    there: dict[int, JobRow] = {row.job_id: row for row in jobs if row.active or row.unread}
    found = set()
    for node, job, restart in held:
        row = there.get(job)
        later = row is not None and row.state != "COMPLETING" and row.restarts > restart
        if row is None or later or (row.nodes and node not in row.nodes):
            found.add(Orphan(node, job, restart))
    return found

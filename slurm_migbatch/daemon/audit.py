"""Find jobs that hold more than Slurm allocated to them, to be cancelled once this is certain, and slices that are
not released.

Only Slurm decides how large a job's slices are. A node reads the grant from the job's comment, which the submit filter
protects. In case something bypasses the filter, the node's slices are compared here with the GRES that slurmctld itself
allocated; a job that holds more is cancelled, and the record has the reason.

A run whose Epilog died is ended by its node (`node/liveness.py`), which has the GPU and sees the steps. If the node
does not do that in time, the run is reported here; this module never ends a run on slurmctld's state alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_migbatch.decide.capacity.demand import profiles, slices
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.capacity.sharing import guests
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.gres import prefix_of

log = logging.getLogger(__name__)

#: consecutive snapshots of Slurm that must agree before a job is cancelled
CERTAIN = 2

#: seconds for a node to release what a killed Epilog did not release: two rounds of its agent, and the report
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Excess:
    """A job that holds slices on `node` beyond its allocation there."""

    job: int
    node: str
    surplus: Mapping[Profile, int]

    def __str__(self) -> str:
        listed = ", ".join(f"{n} x {p}" for p, n in sorted(self.surplus.items()))
        return f"job {self.job} holds {listed} on {self.node} that Slurm did not allocate to it"


def audit(facts: Mapping[str, NodeFacts], jobs: Iterable[JobRow]) -> list[Excess]:
    """Return jobs that are active in Slurm and hold more than their allocation.

    Jobs that Slurm no longer lists are not included: their Epilog has not reported yet. Nor are slices of an earlier
    run of a requeued job, which may have been of other profiles. For a job whose row cannot be parsed the allocation is
    unknown. A guest may hold one slice of any profile: that of its host. A report of a job that Slurm has on another
    node is not an excess of the job: `orphans` finds it.
    """
    jobs = list(jobs)
    sharing = guests(jobs)
    allowed = {row.job_id: (row.restarts, slices(_read(row.gres)), row.nodes) for row in jobs if row.active}
    excesses: list[Excess] = []
    for name, node in facts.items():
        held = Counter(
            (run[0], slot.profile)
            for gpu in node.gpus
            for slot, run in gpu.holders
            if run[0] in allowed and run[1] >= allowed[run[0]][0]
        )
        surplus: dict[int, dict[Profile, int]] = {}
        for (job, profile), count in held.items():
            _, granted, nodes = allowed[job]
            if (not nodes or name in nodes) and count > granted.get(profile, 0):
                surplus.setdefault(job, {})[profile] = count - granted.get(profile, 0)
        excesses.extend(
            Excess(job, name, extra) for job, extra in surplus.items() if job not in sharing or sum(extra.values()) > 1
        )
    return excesses


def _read(text: str) -> str:
    """Return the entries of a GRES that have the first prefix in it: Slurm reads no others."""
    entries = text.split(",")
    prefix = next(filter(None, (prefix_of(entry)[0] for entry in entries)), "")
    return ",".join(entry for entry in entries if entry.startswith(prefix))


@dataclass(frozen=True, order=True)
class Orphan:
    """A run that holds slices on `node` although Slurm does not have it there."""

    node: str
    job: int
    restart: int

    def __str__(self) -> str:
        return f"job {self.job} run {self.restart} holds slices on {self.node}, where Slurm no longer has it"


def orphans(held: Iterable[tuple[str, int, int]], jobs: Iterable[JobRow]) -> set[Orphan]:
    """Return runs that hold slices (node, job, restart count) but have no active job in Slurm on a node of that name.

    Every run is an orphan briefly at its end, until its node has reported the end. The restart count of a job in
    COMPLETING is already that of the next run. A job whose row cannot be parsed may be anywhere.
    """
    listed: dict[int, JobRow] = {row.job_id: row for row in jobs if row.active or row.unread}
    orphan_runs = set()
    for node, job, restart in held:
        row = listed.get(job)
        later = row is not None and row.state != "COMPLETING" and row.restarts > restart
        if row is None or later or (row.nodes and node not in row.nodes):
            orphan_runs.add(Orphan(node, job, restart))
    return orphan_runs


class Auditor:
    """Compares each snapshot of Slurm with the slices on the nodes."""

    def __init__(self) -> None:
        self._suspects: Counter[tuple[int, str]] = Counter()
        self._warned = False

    def check(
        self, facts: Mapping[str, NodeFacts], jobs: Iterable[JobRow], nodes: Iterable[NodeRow] = ()
    ) -> list[Excess]:
        """Return jobs that held too much in `CERTAIN` consecutive snapshots, each once while the excess lasts.

        There are none while no job's GRES shows any of the slices that are allocated by the rows of `nodes`: a later
        release of Slurm writes it in a form that is unknown here, and every job would be cancelled.
        """
        jobs = list(jobs)
        excesses = {(excess.job, excess.node): excess for excess in audit(facts, jobs)}
        if excesses and not any(slices(_read(row.gres)) for row in jobs if row.active) and any(map(_allocates, nodes)):
            if not self._warned:
                log.error("squeue shows no slices of jobs, though nodes have some in use: jobs are not compared")
                self._warned = True
            excesses = {}
        for key in [key for key in self._suspects if key not in excesses]:
            del self._suspects[key]
        self._suspects.update(excesses.keys())
        return [excess for key, excess in excesses.items() if self._suspects[key] == CERTAIN]


def _allocates(row: NodeRow) -> bool:
    """Return whether Slurm has allocated slices of the node."""
    return any(profiles(row.used).values())


class OrphanWatch:
    """Runs that hold slices for `PATIENCE_S` after Slurm has ended them."""

    def __init__(self) -> None:
        self._since: dict[Orphan, float] = {}
        self.present: frozenset[Orphan] = frozenset()

    def check(self, facts: Mapping[str, NodeFacts], jobs: Iterable[JobRow], now: float) -> list[Orphan]:
        """Process one snapshot; return the new ones among the `present` ones."""
        holders = ((name, *run) for name, node in facts.items() for gpu in node.gpus for _, run in gpu.holders)
        current = orphans(holders, jobs)
        self._since = {orphan: self._since.get(orphan, now) for orphan in current}
        before = self.present
        self.present = frozenset(o for o, since in self._since.items() if now - since >= PATIENCE_S)
        return sorted(self.present - before)

"""Ends jobs that hold more than Slurm allocated to them, once that is certain, and finds slices that nobody gives back.

Slurm alone decides how large a job's slices are. A node reads the grant from the job's comment, which the submit
filter guards; should anything get past it, the job ends here and the record says why.

A run whose Epilog died is ended by its node (`node/liveness.py`), which has the GPU and sees the steps. Where the node
does not do that in time, it is found and told of here; nothing is ended from here on slurmctld's word alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.capacity.model import Gpu, Lease, Node
from slurm_migbatch.decide.supply.audit import Excess, Orphan, audit, orphans
from slurm_migbatch.slurm.client import JobRow

#: looks at Slurm in a row that must agree before a job is cancelled
CERTAIN = 2

#: seconds that a node has to release what a dead Epilog left: two rounds of its agent, and the way here
PATIENCE_S = 120.0


class Auditor:
    """Compares each look at Slurm with what the nodes hold."""

    def __init__(self) -> None:
        self._suspects: Counter[tuple[int, str]] = Counter()

    def check(self, facts: Mapping[str, NodeFacts], jobs: Iterable[JobRow]) -> list[Excess]:
        """Jobs that `CERTAIN` looks in a row showed to hold too much; each is returned once for as long as it lasts."""
        found = {(excess.job, excess.node): excess for excess in audit(_nodes(facts), jobs)}
        for key in [key for key in self._suspects if key not in found]:
            del self._suspects[key]
        self._suspects.update(found.keys())
        return [excess for key, excess in found.items() if self._suspects[key] == CERTAIN]


class OrphanWatch:
    """Which runs hold slices for `PATIENCE_S` after Slurm has ended them."""

    def __init__(self) -> None:
        self._since: dict[Orphan, float] = {}
        self.present: frozenset[Orphan] = frozenset()

    def check(self, facts: Mapping[str, NodeFacts], jobs: Iterable[JobRow], now: float) -> list[Orphan]:
        """Take one look; those that are new among the `present` ones."""
        held = (
            (name, *run) for name, node in facts.items() for gpu in node.gpus for _, run in (*gpu.leases, *gpu.guests)
        )
        found = orphans(held, jobs)
        self._since = {orphan: self._since.get(orphan, now) for orphan in found}
        known = self.present
        self.present = frozenset(o for o, since in self._since.items() if now - since >= PATIENCE_S)
        return sorted(self.present - known)


def _nodes(facts: Mapping[str, NodeFacts]) -> Iterable[Node]:
    for name, node in facts.items():
        gpus = (
            Gpu(g.uuid, g.geometry, tuple(Lease(slot, run[0]) for slot, run in (*g.leases, *g.guests)))
            for g in node.gpus
        )
        yield Node(name, tuple(gpus))

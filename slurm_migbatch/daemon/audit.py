"""Ends jobs that hold more than Slurm allocated to them, once that is certain.

Slurm alone decides how large a job's slices are. A node reads the grant from the job's comment, which the submit
filter guards; should anything get past it, the job ends here and the record says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.supply.audit import Excess, audit
from slurm_migbatch.supply.model import Gpu, Lease, Node
from slurm_migbatch.supply.view import NodeFacts

#: looks at Slurm in a row that must agree before a job is cancelled
CERTAIN = 2


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


def _nodes(facts: Mapping[str, NodeFacts]) -> Iterable[Node]:
    for name, node in facts.items():
        gpus = (
            Gpu(g.uuid, g.geometry, tuple(Lease(slot, run[0]) for slot, run in (*g.leases, *g.guests)))
            for g in node.gpus
        )
        yield Node(name, tuple(gpus))

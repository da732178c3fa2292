"""Determine which nodes have the CPUs and the memory of jobs, once for all jobs that request the same."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final

from slurm_migbatch.slurm.client import JobRow, NodeRow

MOST_REQUESTS: Final = 64
"""Different requests for which all nodes are looked at in one round: users may request ever other numbers."""


class Enough:
    """Which of some nodes have the CPUs and the memory that a job requests, without those that other jobs have.

    Attributes:
        by_name: whether each node has enough.
        able: the number of nodes that have.
    """

    def __init__(self, row: JobRow, nodes: Iterable[NodeRow]) -> None:
        self.by_name = {node.name: row.has_resources_on(node) for node in nodes}
        self.able = sum(self.by_name.values())

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes that have enough."""
        return frozenset([name for name, enough in self.by_name.items() if enough])


class NodeResources:
    """The nodes of one snapshot, for any number of jobs."""

    def __init__(self, nodes: Iterable[NodeRow]) -> None:
        self._nodes = tuple(nodes)
        self._owned = any(node.owner for node in self._nodes)
        self._known: dict[tuple[frozenset[str], int, int, bool, str], Enough] = {}

    def of(self, row: JobRow, pool: frozenset[str]) -> Enough | None:
        """Return which nodes of the pool have enough for a job; None after `MOST_REQUESTS` other requests."""
        key = pool, row.cpus_per_node, row.memory_each, row.exclusive, row.user if self._owned else ""
        enough = self._known.get(key)
        if enough is None and len(self._known) < MOST_REQUESTS:
            enough = self._known[key] = Enough(row, [node for node in self._nodes if node.name in pool])
        return enough

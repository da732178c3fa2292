"""Determine on which nodes of the cluster a job could have slices: its pool."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.constraint import words_of
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.workload.excluded import OPEN, excluded_among
from slurm_migbatch.workload.loans import EXCLUDED_NODE_PREFIX, GRES, away

#: Name, partitions, features, reservations, whether it is now limited to jobs of a reservation, its other GRES, CPUs,
#: memory, and seconds until a coming reservation (0: none).
NodePoolFacts: TypeAlias = tuple[str, tuple[str, ...], frozenset[str], frozenset[str], bool, str, int, int, int]

#: Partition, features, requested nodes, reservation, number of nodes and other GRES of a job; `_size` of CPUs and of
#: memory, and `NodePools._free_time` for its shortest time limit.
_Asked: TypeAlias = tuple[str, str, str, str, int, tuple[gres.Gres, ...], int, int, float]
_CPUS: Final = 6
_MEMORY: Final = 7
_FREE_TIME: Final = 8

_NONE = frozenset[str]()
_MOST_POOLS = 4096


class NodePools:
    """Nodes of the cluster, and which of them a job can use.

    Args:
        facts: of each node with MIG GPUs.
        mixed: partitions with nodes that have no MIG GPUs.
    """

    def __init__(self, facts: Sequence[NodePoolFacts], mixed: frozenset[str]) -> None:
        self._facts = {fact[0]: fact for fact in facts}
        self._names = frozenset(self._facts)
        self._mixed = mixed
        #: the numbers of CPUs and the MiB that nodes have, in use or not, ascending
        self._cpus = sorted({fact[_CPUS] for fact in facts if fact[_CPUS]})
        self._memory = sorted({fact[_MEMORY] for fact in facts if fact[_MEMORY]})
        #: the seconds for which nodes are free until coming reservations, ascending
        self._free_times = sorted({fact[_FREE_TIME] for fact in facts if fact[_FREE_TIME]})
        self._in_partition: dict[str, set[str]] = {}
        self._with_feature: dict[str, set[str]] = {}
        for name, partitions, features, *_ in facts:
            for partition in partitions:
                self._in_partition.setdefault(partition, set()).add(name)
            for feature in features:
                self._with_feature.setdefault(feature, set()).add(name)
        self._set_aside = frozenset([fact[0] for fact in facts if fact[4]])
        #: by the request and the nodes to exclude
        self._pools: dict[tuple[_Asked, frozenset[str]], frozenset[str]] = {}
        #: one object for all equal pools, for fast comparison
        self._interned: dict[frozenset[str], frozenset[str]] = {}

    def has_others(self, row: JobRow) -> bool:
        """Return whether there are nodes without MIG GPUs in a partition of the job."""
        return not self._mixed.isdisjoint(row.partitions)

    def pool(self, row: JobRow, avoid: Collection[str]) -> frozenset[str]:
        """Return the nodes on which Slurm could start a job, without those to be avoided."""
        apart: frozenset[str] = away(row.gres) if EXCLUDED_NODE_PREFIX in row.gres else _NONE
        if OPEN in row.comment:
            apart = apart.union(excluded_among(row.comment, self._names))
        if avoid:
            apart = apart.union(avoid)
        others = _other_gres(row.gres) if "," in row.gres or GRES not in row.gres else ()
        cpus = _size(row.cpus, self._cpus) if row.num_nodes == 1 else 0
        memory = _size(row.memory_per_node, self._memory)
        free_time = self._free_time(row.least_time_s) if self._free_times else 0
        asked = (row.partition, row.features, row.requested_nodes, row.reservation, row.num_nodes)
        request = (*asked, others, cpus, memory, free_time)
        pool = self._pools.get((request, apart))
        if pool is None:
            pool = self._with_resources(cpus, _CPUS, self._found(row), row.num_nodes)
            pool = self._with_resources(memory, _MEMORY, pool, row.num_nodes).difference(apart)
            if free_time:
                pool = frozenset([name for name in pool if not 0 < self._facts[name][_FREE_TIME] < free_time])
            if others:
                pool = frozenset([name for name in pool if _has_others(others, self._facts[name][5])])
            if len(self._pools) + len(self._interned) > _MOST_POOLS:
                self._pools.clear()
                self._interned.clear()
            pool = self._pools[request, apart] = self._interned.setdefault(pool, pool)
        return pool

    def _free_time(self, limit_s: int | None) -> float:
        """Return the shortest of `_free_times` that is enough for a time limit; 0 if all are, infinite if none is."""
        number = len(self._free_times) if limit_s is None else bisect_left(self._free_times, limit_s)
        if number == 0:
            return 0
        return self._free_times[number] if number < len(self._free_times) else math.inf

    def _with_resources(self, size: int, index: Literal[6, 7], names: frozenset[str], count: int) -> frozenset[str]:
        """Return the nodes that have so many CPUs or MiB, or an unknown number; all of them if too few do."""
        # Slurm may distribute the tasks of a job that fits on no single node, although it shows one node for it
        enough = frozenset([name for name in names if not 0 < self._facts[name][index] < size]) if size else names
        return enough if len(enough) >= count else names

    def _found(self, row: JobRow) -> frozenset[str]:
        names: set[str] = set()
        for partition in row.partitions:
            names |= self._in_partition.get(partition, set())
        if row.requested_nodes:
            try:
                requested = set(expand(row.requested_nodes))
            except NodeListError:
                requested = set()
            if len(requested) >= row.num_nodes:
                names &= requested
        reserved: set[str] = set()
        if row.reservation:
            named = row.reservation.split(",")  # Slurm takes the one in which the job can start first
            reserved = {name for name in names if not self._facts[name][3].isdisjoint(named)}
        return self._satisfying(row.features, reserved or names - self._set_aside)

    def _satisfying(self, constraint: str, names: set[str]) -> frozenset[str]:
        """Return the nodes that satisfy a constraint, all of them if only Slurm can tell.

        Users may name any nodes by their features, each job others: no node is looked at that has none of these.
        """
        found = words_of(constraint)
        if found is None:
            return frozenset(names)
        words, any_of_them = found
        satisfying = set[str]() if any_of_them else names
        for word in words:
            having = self._with_feature.get(word, set())
            if any_of_them:
                satisfying |= names & having
            else:
                satisfying = satisfying & having
            if len(satisfying) == (len(names) if any_of_them else 0):
                break
        return frozenset(satisfying)


def node_facts(nodes: Iterable[NodeRow], supply: Collection[str]) -> tuple[list[NodePoolFacts], frozenset[str]]:
    """Return the properties of jobs that determine their pools; see `NodePools`."""
    facts: list[NodePoolFacts] = []
    mixed: set[str] = set()
    for node in nodes:
        if node.name in supply:
            facts.append((
                node.name, node.partitions, node.features, node.reservations, node.set_aside, node.other_gres,
                node.cpus, node.memory, node.free_for_s,
            ))  # fmt: skip
        elif node.open:
            mixed.update(node.partitions)
    return facts, frozenset(mixed)


def _size(needed: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the sizes of nodes, ascending, that is enough; 0 if all are, or none is."""
    number = bisect_left(sizes, needed)
    return sizes[number] if 0 < number < len(sizes) else 0


@lru_cache(maxsize=4096)
def _other_gres(text: str) -> tuple[gres.Gres, ...]:
    """Return the readable entries of a job's GRES other than MIG, without those with a count of 0."""
    return tuple([entry for entry in gres.readable(text) if entry.name != GRES and entry.count > 0])


@lru_cache(maxsize=4096)
def _has_others(asked: tuple[gres.Gres, ...], text: str) -> bool:
    """Return whether a node has these other GRES, in use or not. `text`: the node's, as Slurm shows them."""
    node_entries = gres.readable(text)
    for entry in asked:
        matching = [item for item in node_entries if item.name == entry.name and entry.type in (None, item.type)]
        wanted = [item for item in asked if item.name == entry.name and entry.type in (None, item.type)]
        if sum(item.count for item in matching) < sum(item.count for item in wanted):
            return False
    return True

"""Choose places: whole GPUs, packed, and slices by first or best fit. Places on one GPU are chosen by `mig.planning`.

GPUs with the same held slots are examined once for all (`SimulatedCluster.alike`), and so are nodes with the same
number of empty GPUs (`SimulatedCluster.by_empty`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Literal, TypeAlias

from slurm_migbatch.lab.sim.cluster import NodePart, Place, SimulatedCluster, bit_indexes, lowest
from slurm_migbatch.mig import planning
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile

Rule: TypeAlias = Literal["first", "best"]
_WARM = 16
"""Most GPUs of one arrangement to search for a reusable idle instance."""


def whole_gpus(cluster: SimulatedCluster, count: int, part: NodePart) -> list[Place] | None:
    """Choose `count` empty GPUs of the part, each as one place; return None if the part has fewer.

    They are on the fullest node with enough empty GPUs or, if no node has enough, on the emptiest nodes.
    """
    if (cluster.empty & part.gpus).bit_count() < count:
        return None
    by_empty = cluster.by_empty
    for free in range(count, len(by_empty)):
        nodes = by_empty[free] & part.nodes
        if nodes:
            return _of_node(cluster, lowest(nodes), count)
    places: list[Place] = []
    for free in range(len(by_empty) - 1, 0, -1):
        for node in bit_indexes(by_empty[free] & part.nodes):
            places += _of_node(cluster, node, count - len(places))
            if len(places) == count:
                return places
    return None


def _of_node(cluster: SimulatedCluster, node: int, count: int) -> list[Place]:
    of_node = cluster.nodes[node]
    empty = (cluster.empty >> of_node.start) & ((1 << len(of_node)) - 1)
    return [cluster.gpus[of_node.start + index].whole for index in islice(bit_indexes(empty), count)]


def slices(
    cluster: SimulatedCluster, profile: Profile, count: int, part: NodePart, rule: Rule = "best"
) -> list[Place] | None:
    """Choose `count` slices of `profile` in the part; None if not all fit.

    Rule `first` takes the first GPU with room, `best` the one with the least memory left; of equal GPUs `best` takes
    one that has the instance already, idle.
    """
    places: list[Place] = []
    among = part.gpus
    altered: dict[int, Layout] = {}
    for _ in range(count):
        best = _best_among(cluster, profile, among, rule)
        for gpu, used in altered.items():
            slot = _chosen(cluster.gpus[gpu].geometry, used, profile)
            if slot is not None:
                rank = (0, gpu) if rule == "first" else (_left(cluster.gpus[gpu].geometry, used), gpu)
                if best is None or rank < best[0]:
                    best = (rank, gpu, slot)
        if best is None:
            return None
        _, gpu, slot = best
        places.append(Place(gpu, slot))
        among &= ~(1 << gpu)
        altered[gpu] = altered.get(gpu, cluster.gpus[gpu].used).add(slot)
    return places


def _best_among(
    cluster: SimulatedCluster, profile: Profile, among: int, rule: Rule
) -> tuple[tuple[int, int], int, Slot] | None:
    """Return rank, GPU and slot of the place that the rule prefers on the GPUs `among` (as bits).

    None if the profile fits on none of them.
    """
    best: tuple[tuple[int, int], int, Slot] | None = None
    for geometry, used, gpus in cluster.arrangements(among):
        slot = _chosen(geometry, used, profile)
        if slot is not None:
            first = lowest(gpus)
            rank = (0, first) if rule == "first" else (_left(geometry, used), first)
            if best is None or rank < best[0]:
                if rule == "best":
                    first = _warm(cluster, gpus, slot, first)
                best = (rank, first, slot)
    return best


def _warm(cluster: SimulatedCluster, gpus: int, slot: Slot, first: int) -> int:
    return next((gpu for gpu in islice(bit_indexes(gpus), _WARM) if slot in cluster.gpus[gpu].layout.slots), first)


def _left(geometry: Geometry, used: Layout) -> int:
    return geometry.memory_slices - used.mask.bit_count()


@lru_cache(maxsize=1 << 15)
def _chosen(geometry: Geometry, used: Layout, profile: Profile) -> Slot | None:
    return planning.choose(geometry, used, profile) if profile in geometry else None

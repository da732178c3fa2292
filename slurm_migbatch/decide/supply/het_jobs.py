"""Assign separate nodes to the components of a heterogeneous job.

Slurm's backfill, which alone starts such jobs, counts each node that it has found for one component as entirely
taken when it looks for the next (https://slurm.schedmd.com/heterogeneous_jobs.html#limitations). So the offers must
allow every component to have nodes that no other component needs, although Slurm may then put several on
one node. If that is impossible, the job never starts.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign(wants: Sequence[tuple[int, Sequence[str]]]) -> list[list[str]] | None:
    """Return disjoint sets of nodes, one for each component; None if there are none.

    Earlier ones get their best candidates; later ones take what is left before any is moved for them. This is Slurm's
    order too, which takes the first sufficient nodes for the first component: what it takes for one component is thus
    not meant for another, as far as there is a choice.

    It is sufficient to name as many candidates for each as nodes are wanted in all: such a component can always be
    served.

    Args:
        wants: for each component the number of nodes and its candidates, the best first.
    """
    owner: dict[str, int] = {}
    for component, (count, _) in enumerate(wants):
        for _ in range(count):
            if not _find(component, wants, owner, set()):
                return None
    nodes_of: list[list[str]] = [[] for _ in wants]
    for node, component in owner.items():
        nodes_of[component].append(node)
    return [sorted(nodes, key=list(candidates).index) for nodes, (_, candidates) in zip(nodes_of, wants, strict=True)]


def _find(component: int, wants: Sequence[tuple[int, Sequence[str]]], owner: dict[str, int], seen: set[int]) -> bool:
    """Find one more node for a component: a free one, else one whose owner finds another (augmenting path).

    A component that has been `seen` need not be asked again: it has no free candidate, and all owners of its others are
    asked. So the depth of the search is limited by the number of components, not of nodes.
    """
    seen.add(component)
    candidates = wants[component][1]
    for node in candidates:
        if node not in owner:
            owner[node] = component
            return True
    for node in candidates:
        if owner[node] not in seen and _find(owner[node], wants, owner, seen):
            owner[node] = component
            return True
    return False

"""Group nodes that belong to the same pools: what a plan finds for one of them holds for all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence


class NodeClasses:
    """Nodes that belong to the same pools, numbered in the order of the first of each.

    Attributes:
        of_node: the class of each node, in their order.
        of_pool: the classes that make up each pool.
    """

    def __init__(
        self, names: Sequence[str], pools: Collection[frozenset[str]], before: NodeClasses | None = None
    ) -> None:
        """Classify nodes. `before`: the classes of an earlier round."""
        self._pools: Sequence[frozenset[str]] = tuple(pools)
        self._members: Mapping[str, tuple[int, ...]] = {}
        if before is not None and before.of_pool.keys() == set(pools) and before._members.keys() == set(names):
            self._pools, self._members = before._pools, before._members
        else:
            self._members = _members(names, self._pools)
        memberships = [self._members[name] for name in names]
        numbers = {membership: number for number, membership in enumerate(dict.fromkeys(memberships))}
        self.of_node = [numbers[membership] for membership in memberships]
        self.of_pool: dict[frozenset[str], list[int]] = {pool: [] for pool in self._pools}
        for membership, number in numbers.items():
            for pool_number in membership:
                self.of_pool[self._pools[pool_number]].append(number)
        self.count = len(numbers)


def _members(names: Iterable[str], pools: Iterable[frozenset[str]]) -> dict[str, tuple[int, ...]]:
    """Return the pools of each node."""
    members: dict[str, list[int]] = {name: [] for name in names}
    for number, pool in enumerate(pools):
        for name in pool:
            if name in members:
                members[name].append(number)
    return {name: tuple(numbers) for name, numbers in members.items()}

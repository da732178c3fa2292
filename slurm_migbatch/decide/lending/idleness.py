"""Remember since when the free space of each GPU has been free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

_MOST_AWAY: Final = 1000
"""GPUs that are not reported now and remembered all the same."""


@dataclass
class Idleness:
    """Since when all free space of each GPU (by UUID) has been free; loans count as free."""

    since: dict[str, float] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def update(self, uuid: str, taken: int, now: float) -> float:
        """Return since when (unix seconds) all free space of a GPU has been free.

        `taken`: bit mask of the memory slices in use by others than loans.
        """
        if self._taken.get(uuid, taken) & ~taken:
            self.since[uuid] = now
        self._taken[uuid] = taken
        return self.since.get(uuid, 0.0)

    def keep(self, uuids: Collection[str]) -> None:
        """Forget all other GPUs if many are stored: a node may report new UUIDs each time."""
        if len(self._taken) > 2 * len(uuids) + _MOST_AWAY:
            self.since = {uuid: at for uuid, at in self.since.items() if uuid in uuids}
            self._taken = {uuid: taken for uuid, taken in self._taken.items() if uuid in uuids}

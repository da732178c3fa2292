"""Hold demands in Slurm's order so that all of a kind can be skipped without looking at each.

A queue may have very many pending jobs of few kinds. A plan examines the first ones of each kind, until no more of it
fit and nothing more can be reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from slurm_migbatch.decide.capacity.model import Demand, DemandShape

ABSENT: Final = 0
"""In place of a number: there is no demand."""
UNSETTLED: Final = 254
"""In place of a number: the demand depends on more than the job's row."""
SHARED: Final = 255
"""Number of all kinds that have no number of their own."""


class KindNumbers:
    """Numbers of the kinds that occur: from 1 on for one kind each, `SHARED` for those for which there is none left.

    Attributes:
        counts: number of demands of each kind. `copies`: number of their copies, of all kinds.
    """

    def __init__(self) -> None:
        self.counts: Counter[DemandShape] = Counter()
        self.copies = 0
        self._numbers: dict[DemandShape, int] = {}
        self._free = list(range(1, UNSETTLED))

    def add(self, demand: Demand) -> int:
        """Count a demand; return the number of its kind."""
        kind = demand.kind
        self.copies += demand.copies
        self.counts[kind] += 1
        number = self._numbers.get(kind)
        if number is None:
            number = self._numbers[kind] = self._free.pop() if self._free else SHARED
        return number

    def remove(self, demand: Demand) -> None:
        """Do not count a demand any more; the number of a kind without any is given to another one."""
        kind = demand.kind
        self.copies -= demand.copies
        self.counts[kind] -= 1
        if not self.counts[kind]:
            del self.counts[kind]
            number = self._numbers.pop(kind)
            if number != SHARED:
                self._free.append(number)


class DemandQueue(list[Demand]):
    """Demands in Slurm's order.

    Attributes:
        kinds: the kinds that occur.
        numbers: a number for each demand: demands with the same one are of the same kind, unless it is `SHARED`, as for
            all components of heterogeneous jobs.
        copies: number of jobs and array tasks that request slices.
    """

    def __init__(self, demands: Iterable[Demand], kinds: Collection[DemandShape], numbers: bytes, copies: int) -> None:
        super().__init__(demands)
        self.kinds, self.numbers, self.copies = kinds, numbers, copies

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> DemandQueue:
        """Return any demands as a queue."""
        if isinstance(demands, DemandQueue):
            return demands
        copies = sum(demand.copies for demand in demands if demand.parts)
        return cls(demands, {demand.kind for demand in demands}, bytes([SHARED]) * len(demands), copies)

    def components(self) -> dict[int, list[int]]:
        """Return the positions of the components of each heterogeneous job."""
        found: dict[int, list[int]] = {}
        position = -1
        while (position := self.numbers.find(SHARED, position + 1)) >= 0:
            if (apart := self[position].apart) is not None:
                found.setdefault(apart, []).append(position)
        return found


class Rest:
    """Iterate over the demands of a queue, except those of kinds that are dropped meanwhile.

    The components of heterogeneous jobs are never skipped.
    """

    def __init__(self, demands: Sequence[Demand]) -> None:
        self._queue = DemandQueue.of(demands)
        self._dropped: set[DemandShape] = set()
        self._kept = bytearray(b"\1" * (SHARED + 1))
        self._open = self._queue.numbers.translate(self._kept)

    def __iter__(self) -> Iterator[tuple[int, Demand]]:
        """Yield each demand with its position."""
        queue, position = self._queue, -1
        while (position := self._open.find(1, position + 1)) >= 0:
            demand = queue[position]
            if demand.apart is not None or demand.kind not in self._dropped:
                yield position, demand

    def drop(self, position: int) -> None:
        """Skip all further demands of the kind of the demand at this position."""
        self._dropped.add(self._queue[position].kind)
        number = self._queue.numbers[position]
        if number != SHARED:
            self._kept[number] = 0
            self._open = self._queue.numbers.translate(self._kept)

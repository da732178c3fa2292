"""Choose the items of an optimizer step as a function of the step's number alone.

Neither the slice nor an interruption affects them, so a resumed run needs only the number of steps done. An epoch's
order is a Fisher-Yates shuffle by `random.Random.random`, whose sequence for a seed Python guarantees to
keep in all its versions (unlike that of `random.shuffle`).
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from slurm_migbatch.elastic.errors import ElasticError


class StepPosition(NamedTuple):
    """The position of a step in the data: its epoch, the items of that epoch before it, and its number of items."""

    epoch: int
    position: int
    size: int


class Sampler:
    """The order of a data set of `items` in batches of `batch`.

    An epoch takes every item once. Its last batch holds the remainder, or is dropped with `drop_last`. With `items`
    None the data has no end: step k takes the numbers k * batch to (k + 1) * batch - 1, unshuffled, of one endless
    epoch.
    """

    def __init__(
        self, items: int | None, batch: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        """Set up the sampler. Raises ElasticError if no step is possible."""
        if batch < 1 or (items is not None and items < 1):
            raise ElasticError(f"{items} items in batches of {batch} are invalid; both must be 1 or more")
        if items is not None and drop_last and items < batch:
            raise ElasticError(f"{items} items never fill a batch of {batch}, and drop_last leaves out the rest")
        self.items, self.batch, self.seed, self.shuffle, self.drop_last = items, batch, seed, shuffle, drop_last
        self._epoch = -1
        self._shuffled: Sequence[int] = ()

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; None if the data has no end."""
        if self.items is None:
            return None
        return self.items // self.batch if self.drop_last else -(-self.items // self.batch)

    def position_of(self, step: int) -> StepPosition:
        """Return the position of step number `step` (from 0)."""
        if self.items is None or (per_epoch := self.steps_per_epoch) is None:
            return StepPosition(0, step * self.batch, self.batch)
        epoch, within = divmod(step, per_epoch)
        position = within * self.batch
        return StepPosition(epoch, position, min(self.batch, self.items - position))

    def indices(self, step: int) -> Sequence[int]:
        """Return the items of a step, in their order."""
        epoch, position, size = self.position_of(step)
        if self.items is None or not self.shuffle:
            return range(position, position + size)
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, shuffled(self.items, f"{self.seed}/{epoch}")
        return self._shuffled[position : position + size]

    def draw(self, step: int) -> int:
        """Return the step's random seed (63 bits), the same in every run."""
        text = f"{self.seed}/step/{step}".encode()
        try:
            digest = hashlib.blake2b(text, digest_size=8).digest()
        except (AttributeError, TypeError, ValueError):  # a Python in FIPS mode
            digest = hashlib.sha256(text).digest()[:8]
        return int.from_bytes(digest, "big") >> 1


def shuffled(items: int, seed: str) -> Sequence[int]:
    """Shuffle the numbers below `items` by a seed."""
    uniform = random.Random(seed).random  # noqa: S311 - an order, not a secret
    order = array("Q", range(items))
    for last in range(items - 1, 0, -1):
        other = int(uniform() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order

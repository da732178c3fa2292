"""Split the batch of one optimizer step into micro-batches whose gradients are accumulated.

SJF-BSBF (arXiv 2407.13088) lets a job continue in less memory this way: the optimizer's batch stays the same, and so
does convergence. How the batch is split is our own rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def even(size: int, most: int) -> tuple[int, ...]:
    """Split `size` items into the fewest parts of at most `most`, equal to within one item, the larger ones first."""
    parts = -(-size // most)
    small, larger = divmod(size, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def fixed(size: int, micro: int) -> tuple[int, ...]:
    """Split `size` items into parts of `micro` items and one with the remainder."""
    full, rest = divmod(size, micro)
    return (micro,) * full + ((rest,) if rest else ())


@dataclass(frozen=True)
class Micro:
    """One forward and backward pass.

    Attributes:
        indices: the items, in their order.
        weight: share of the step's items. Gradients of the mean loss over this micro-batch, times the weight, add up to
            the gradient of the mean loss over the whole batch.
        last: whether the optimizer's step follows.
    """

    indices: Sequence[int]
    weight: float
    last: bool

    def __len__(self) -> int:
        return len(self.indices)


class Step:
    """One optimizer step: iterate over its micro-batches, sum their weighted gradients, then update.

    Attributes:
        number: steps done before this one, over the job's whole life. Learning rates are functions of it.
        epoch, position: where in the data the step begins.
        seed: for random numbers in this step, the same in every run.
        size: items of all micro-batches together.
        begun: whether an iteration over the micro-batches has begun.
        left: whether one has begun and not come to its end.
    """

    def __init__(
        self, number: int, epoch: int, position: int, seed: int, indices: Sequence[int], sizes: tuple[int, ...]
    ) -> None:
        self.number, self.epoch, self.position, self.seed = number, epoch, position, seed
        self.size = len(indices)
        self._indices, self._sizes = indices, sizes
        self.begun = self.left = False

    def __iter__(self) -> Iterator[Micro]:
        begin, self.begun, self.left = 0, True, True
        for size in self._sizes:
            end = begin + size
            yield Micro(self._indices[begin:end], size / self.size, end == self.size)
            begin = end
        self.left = False

    def __len__(self) -> int:
        """Count the micro-batches."""
        return len(self._sizes)

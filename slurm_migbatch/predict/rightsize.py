"""Slice and batch chosen together, for an inference job with a latency limit whose user names no batch.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541; only the abstracts were available, so this is a reconstruction) runs a
model where its efficacy is highest: throughput over latency and share of the GPU, within the latency limit. Weighed are
the batches of `Grid.ladder` on every slice that the job may have, by the figures that can be counted on, which are the
compiled table's: `gres_templates/migbatch_core.lua.j2` has the same search, in the same order.

The knee, the share from which a larger one gains little (5 % of latency for one more compute slice), needs no limit of
its own. Of two slices that keep the limits the larger has the better efficacy only if the square of the latencies'
ratio is above that of the shares; n to m slices within 5 % each is at most 1 / (1 - 0.05 (m - n))**2, and the shares of
all GPUs' profiles are further apart than that.

A service's items come one after the other: the time in which a batch comes together counts too, in which its first
item waits for its last. They come at `rate`, but to one instance not faster than it works, for then there are more
instances. At that pace a batch comes together while the one before it runs, which is about D-STACK's other limit, half
of the objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from slurm_migbatch.predict.cells import Array
from slurm_migbatch.workload.catalog import ProfileOffer

Number = TypeVar("Number", float, Array)


class Countable(Protocol):
    """What can be counted on of a slice at one batch: microseconds for the batch, thousandths of items per second,
    MiB."""

    @property
    def latency_us(self) -> int: ...  # noqa: D102
    @property
    def rate(self) -> int: ...  # noqa: D102
    @property
    def need_mib(self) -> int: ...  # noqa: D102


class Counted(NamedTuple):
    """The three numbers alone, rounded as `candidate.Figures` rounds."""

    latency_us: int
    rate: int
    need_mib: int


Ladder = Mapping[int, Mapping[str, Counted]]
"""What can be counted on, by batch (ascending) and GRES type; what is not known is missing."""


@dataclass(frozen=True)
class Terms:
    """What a batch on a slice must keep.

    Attributes:
        slo_us: longest time for one batch.
        rate: thousandths of items per second that one slice must do; None: any.
        arrivals: of a service, the thousandths of items per second that come (0: not told); None: all lie ready.
        mem_mib: what the user says that the job needs; None: what is predicted.
        assumed: the batch that `mem_mib` is of. What a larger one needs is what is predicted.
    """

    slo_us: int
    rate: int | None = None
    arrivals: int | None = None
    mem_mib: int | None = None
    assumed: int = 1

    def kept(self, offer: ProfileOffer, batch: int, known: Counted) -> bool:
        """Return whether batches of this size keep everything on a slice with these figures."""
        if (self.mem_mib is None or batch > self.assumed) and offer.memory_mib < known.need_mib:
            return False
        if self.mem_mib is not None and offer.memory_mib < self.mem_mib:
            return False
        if known.latency_us > self.slo_us or (self.rate is not None and known.rate < self.rate):
            return False
        if self.arrivals is None:
            return True
        pace = min(self.arrivals or known.rate, known.rate)
        # floats, as in Lua: the products are too long for its numbers
        return float(self.slo_us - known.latency_us) * float(pace) >= (batch - 1) * 1e9


def efficacy(batch: Number, seconds: Number, share: float = 1.0) -> Number:
    """Return D-STACK's throughput / (latency * share) = batch / (seconds**2 * share), in any unit of time."""
    return batch / (seconds * seconds * share)


def rightsize(
    offers: Iterable[ProfileOffer], ladder: Ladder, terms: Terms, shares: Mapping[str, float]
) -> tuple[ProfileOffer, int] | None:
    """Return slice and batch of the highest efficacy that keep the terms; of equals the cheaper, then the smaller one.

    Args:
        offers: the slices that the job may have, the cheapest first.
        ladder: what can be counted on of them.
        terms: what is to be kept.
        shares: how much of a GPU each slice is, by GRES type.
    """
    best, highest = None, 0.0
    for offer in offers:
        kind = offer.profile.gres_type
        for batch, figures in ladder.items():
            known = figures.get(kind)
            if known is None or not terms.kept(offer, batch, known):
                continue
            found = efficacy(float(batch), float(known.latency_us), shares[kind])
            if found > highest:
                best, highest = (offer, batch), found
    return best

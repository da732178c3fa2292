"""Choose slice and batch together for an inference job with a latency limit whose user names no batch.

The choice is the smallest slice on which some batch keeps all limits, and of those batches the smallest with nearly the
most throughput (`NEARLY`): a larger batch for little more throughput would come closer to the limit, and exceed it if
the prediction is optimistic. Candidates are the batches of `Grid.ladder`, with the conservative figures of the compiled
table: `gres_templates/migbatch_core.lua.j2` has the same search, in the same order.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541) also chooses batch and GPU share together under a latency objective,
but maximises throughput over latency and share, which buys latency below the limit with larger slices
(`migbatch eval batch` compares both). Its other constraint is kept here. A service's items arrive one after another, so
the time to assemble a batch counts, in which its first item waits for its last. Items arrive at `rate`, but
at one instance no faster than it works, because then there are more instances. At that pace a batch is assembled while
the one before it runs, which is about D-STACK's other limit, half of the objective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.predict.sheet import Counted, Ladder
from slurm_migbatch.workload.catalog import ProfileOffer

NEARLY: Final = (17, 20)
"""A batch with this share (17/20) of the most throughput is as good as the one that has the most."""


@dataclass(frozen=True)
class Terms:
    """Limits that a batch on a slice must keep.

    Attributes:
        slo_us: longest time for one batch.
        rate: thousandths of items per second required of one slice; None: any.
        arrivals: of a service, thousandths of items arriving per second (0: unknown); None: all items are ready.
        mem_mib: memory need from the user; None: as predicted.
        assumed: the batch that `mem_mib` is for. Larger ones need the predicted memory.
    """

    slo_us: int
    rate: int | None = None
    arrivals: int | None = None
    mem_mib: int | None = None
    assumed: int = 1

    def kept(self, offer: ProfileOffer, batch: int, known: Counted) -> bool:
        """Return whether batches of this size keep all limits on a slice with these figures."""
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


def rightsize(offers: Iterable[ProfileOffer], ladder: Ladder, terms: Terms) -> tuple[ProfileOffer, int] | None:
    """Return the first slice (they are in order of price) on which some batch keeps the terms by its conservative
    figures, and the smallest batch of nearly the most throughput there; None if there is none.
    """
    part, whole = NEARLY
    for offer in offers:
        batches = ladder.on(offer.profile.gres_type)
        rates = {batch: known.rate for batch, known in batches if terms.kept(offer, batch, known)}
        if rates:
            enough = part * max(rates.values())
            return offer, min(batch for batch, rate in rates.items() if whole * rate >= enough)
    return None

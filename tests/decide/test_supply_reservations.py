"""Reservations are made on the GPU that could hold the slice soonest, although only few GPUs are examined."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.supply.soonest import SoonestPlaces
from slurm_migbatch.decide.supply.stage import SupplyMemory, SupplySettings, plan_supply
from tests.support.changing_site import ChangingSite
from tests.support.examples import examples

FOUND = SoonestPlaces.first


@settings(max_examples=examples(300), deadline=None)
@given(rng=st.randoms(use_true_random=True), rounds=st.integers(1, 6))
def test_reserved_gpu_is_the_one_that_could_hold_the_slice_soonest(rng: random.Random, rounds: int) -> None:
    asked = []

    def compared(self, pool, profile):
        found = FOUND(self, pool, profile)
        gpus = [some for known, _ in self._fleet.open_nodes(pool) for some in self._fleet.on(known.node.name)]
        ranks = [(self.rank_of(at[0]), some.index) for some in gpus if (at := self.soonest(some, profile))]
        assert (found and (self.rank_of(found[0]), found[1].index)) == min(ranks, default=None)
        asked.append(found)
        return found

    site, memory = ChangingSite(rng, nodes=10, jobs=60), SupplyMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoonestPlaces, "first", compared)
        for _ in range(rounds):
            site.step(plan_supply(site.snapshot(), memory, SupplySettings()))

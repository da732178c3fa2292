"""Make room for a slice by moving claims of single slices: they have not started, so nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.decide.supply.fleet import Claim, Fleet, GpuClaims
from slurm_migbatch.mig.profile import Profile

#: Limits on the GPUs to examine, and on the depth, when making room for one kind of demand.
_TRIES = 200
_DEPTH = 3
#: Limit on the kinds of demands for which a plan tries that in vain: each job can name different nodes.
_FAILURES = 100


class RoomMaker:
    """Moves claims in one plan; `demands` are those that claims name by number."""

    def __init__(self, fleet: Fleet, demands: Sequence[Demand]) -> None:
        self._fleet, self._demands = fleet, demands
        self._tries = 0
        self._failures = 0

    def make(self, pool: frozenset[str], profile: Profile) -> bool:
        """Move claims so that `profile` fits somewhere in the pool; return whether that could be done."""
        if self._failures == _FAILURES:
            return False
        self._tries = 0
        made = self._move(pool, profile, frozenset(), _DEPTH)
        self._failures += not made
        return made

    def _move(self, pool: frozenset[str], profile: Profile, spared: frozenset[int], depth: int) -> bool:
        """Move claims of single slices from one GPU so that `profile` fits on it; all or nothing.

        Args:
            pool: nodes on which the room is needed.
            profile: what should fit.
            spared: GPUs that are being cleared already.
            depth: maximum number of GPUs cleared in a chain, each for claims that leave the one before.
        """
        tried: set[tuple[object, ...]] = set()
        for gpu_claims in self._fleet.claimed():
            if not gpu_claims.claims or gpu_claims.node not in pool or gpu_claims.index in spared:
                continue
            movable = sorted(claim for claim in gpu_claims.claims if self._is_movable(claim))
            key = (gpu_claims.shape, tuple(sorted(claim[2] for claim in movable)))
            if key in tried:
                continue
            tried.add(key)
            for staying_first in (movable, sorted(movable, key=lambda claim: claim[2], reverse=True)):
                self._tries += 1
                if self._tries > _TRIES:
                    return False
                mark = self._fleet.mark()
                if self._clear(gpu_claims, profile, staying_first, spared | {gpu_claims.index}, depth):
                    return True
                self._fleet.roll_back(mark)
        return False

    def _is_movable(self, claim: Claim) -> bool:
        demand = self._demands[claim[0]]
        return demand.apart is None and demand.kind.single

    def _clear(
        self, gpu_claims: GpuClaims, profile: Profile, movable: Sequence[Claim], spared: frozenset[int], depth: int
    ) -> bool:
        """Keep as many of `movable`, in order, as fit next to `profile`, and find other places for the rest."""
        fleet = self._fleet
        staying = [claim for claim in gpu_claims.claims if not self._is_movable(claim)]
        trial = fleet.book.claimed(gpu_claims.shape.condition, [*(claim[2] for claim in staying), profile])
        if trial is None:
            return False
        leaving = []
        for claim in movable:
            step = trial.add(claim[2])
            if step is None:
                leaving.append(claim)
            else:
                trial = step[1]
                staying.append(claim)
        # While the leaving claims look for a place, this GPU counts as holding `profile`, so none of them returns.
        fleet.change(gpu_claims, trial, ())
        for claim in leaving:
            pool = self._demands[claim[0]].pool
            place = fleet.find(pool, claim[2])
            if place is None and depth > 1 and self._move(pool, claim[2], spared, depth - 1):
                place = fleet.find(pool, claim[2])
            if place is None:
                return False
            fleet.claim(place, claim)
        staying.extend(gpu_claims.claims)  # claims placed here meanwhile fit next to `profile`
        settled = fleet.book.claimed(gpu_claims.shape.condition, [claim[2] for claim in staying])
        assert settled is not None
        fleet.change(gpu_claims, settled, staying)
        return True

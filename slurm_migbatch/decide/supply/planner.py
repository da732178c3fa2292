"""Plan which free slots to offer where: pure, deterministic, and the same for the simulator and migbatchd.

Demands are taken in Slurm's own order. Each gets the cheapest place: a slot that is offered already, else the
GPU on which a new one destroys the least useful space. Used slots are not changed. If a demand fits nowhere, claims of
more important demands are moved if that makes room (they have not started, so nothing is lost); otherwise
it gets a reservation: the slots that should be free soonest by the time limits of the jobs in them. Free space
inside a reservation goes to no job that would delay it, so a stream of small jobs cannot starve a large one. For
a demand with a long expected wait, one training job that can be restarted elsewhere may be chosen to be moved
(`decide.supply.moves`).

A reservation is kept from round to round until its demand starts or disappears, unless another place would be free
considerably sooner. Reservations are limited to an eighth of a pool's GPUs, and there is at least one: as in EASY
backfilling the first demand in the order is never starved, and little space is idle meanwhile. A reservation counts as
many GPUs as it has slots on. Time limits are often many times the run times, so most reservations last longer than is
necessary. While training jobs run that can be moved for a reservation, the limit is a quarter of the GPUs, because a
move ends a reservation soon.

Reserved space is used before the reservation's start only where Slurm plans the same start (`decide.supply.reserve`),
or for jobs that end in time, if no longer one could take their slots (`decide.supply.backfill`): Slurm decides which
job gets an offered slot, and that may be another one than the one for which the slot was planned.

The components of a heterogeneous job are served all together or not at all, each on nodes of its own (see `apart`);
so are their reservations.

Loans come last, whatever their priority, and get only what is left then: nothing is moved or reserved for them.

Unclaimed slots that are offered now stay offered; empty space is filled by preference.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import is_
from typing import TypeAlias

from slurm_migbatch.decide.capacity.by_kind import DemandQueue, Rest
from slurm_migbatch.decide.capacity.model import (
    ClusterPlan,
    Demand,
    DemandShape,
    Node,
    NodePlan,
    Placed,
    PlannedMove,
    Reservation,
    Restartable,
)
from slurm_migbatch.decide.supply.backfill import Backfill
from slurm_migbatch.decide.supply.fleet import Claim, Fleet, FleetMemory, GpuClaims
from slurm_migbatch.decide.supply.gpu_state import GpuState
from slurm_migbatch.decide.supply.het_jobs import assign
from slurm_migbatch.decide.supply.node_plans import node_plans
from slurm_migbatch.decide.supply.planned_starts import slices_not_to_count
from slurm_migbatch.decide.supply.reserve import Reserver
from slurm_migbatch.decide.supply.room import RoomMaker
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.settings import BACKFILL_WINDOW_S

#: Part of a pool's GPUs that may have reservations at once; the second if training jobs may be moved for them.
_RESERVED = 1 / 8
_RESERVED_IF_MOVABLE = 1 / 4
#: Limit on all reservations, for the planner's own speed.
_MAX_RESERVATIONS = 64


_Places: TypeAlias = list[tuple[Profile, str | GpuClaims]]


@dataclass(frozen=True)
class Moving:
    """The planner's input on moves.

    Attributes:
        leaving: demands of training jobs that are being moved and are not pending yet; a place is kept for each.
        wanting: jobs for which one more training job may be moved.
        candidates: the training jobs that may be moved, in the order in which they are tried.
        rows: Slurm's rows of the jobs in `wanting`; a job without an entry needs neither CPUs nor memory.
        movable: number of running training jobs that may be moved at some time.
    """

    leaving: tuple[Demand, ...] = ()
    wanting: frozenset[int] = frozenset()
    candidates: tuple[Restartable, ...] = ()
    rows: Mapping[int, JobRow] = field(default_factory=dict)
    movable: int = 0


NOTHING_MOVES = Moving()


@dataclass(frozen=True)
class _Standing:
    """A plan that is the same until `until`, as long as nothing but the time changes, and what it was made from."""

    plan: ClusterPlan
    nodes: Sequence[Node]
    preference: Sequence[Profile]
    movable: int
    window_s: float
    now: float
    until: float

    def holds(
        self,
        nodes: Sequence[Node],
        demands: Sequence[Demand],
        now: float,
        previous: Sequence[Reservation],
        preference: Sequence[Profile],
        moving: Moving,
        window_s: float,
    ) -> bool:
        """Return whether this is the plan for these arguments of `Planner.plan`."""
        return (
            self.now <= now < self.until
            and previous is self.plan.reservations
            and not moving.leaving
            and not moving.candidates
            and (preference, moving.movable, window_s) == (self.preference, self.movable, self.window_s)
            and len(nodes) == len(self.nodes)
            and all(map(is_, nodes, self.nodes))
            and len(demands) == len(self.plan.demands)
            and all(map(is_, demands, self.plan.demands))
        )


class Planner:
    """Makes plans. Keeps only caches between them: conditions of GPUs, plans of unchanged nodes, and the last plan."""

    def __init__(self) -> None:
        self._memory = FleetMemory()
        self._plans: Mapping[str, NodePlan] = {}
        self._standing: _Standing | None = None

    def plan(
        self,
        nodes: Sequence[Node],
        demands: Sequence[Demand],
        now: float,
        previous: Sequence[Reservation] = (),
        preference: Sequence[Profile] = (),
        *,
        anew: bool = False,
        moving: Moving = NOTHING_MOVES,
        window_s: float = BACKFILL_WINDOW_S,
    ) -> ClusterPlan:
        """Return the plan for the whole cluster.

        Args:
            demands: pending work that could start if there were supply, in Slurm's order.
            now: unix seconds.
            previous: the reservations of the last plan.
            preference: offers for empty space, tried in this order, repeatedly, until nothing fits; empty: one slice
                of each size.
            anew: whether the preference has changed, so that idle GPUs get new offers by it.
            moving: training jobs that are being moved or may be.
            window_s: how far ahead Slurm plans the starts of pending jobs, in seconds.
        """
        standing = self._standing
        if (
            standing is not None
            and not anew
            and standing.holds(nodes, demands, now, previous, preference, moving, window_s)
        ):
            return standing.plan
        self._memory.trim()
        making = _PlanRound(self._memory, nodes, demands, now, previous, moving, window_s)
        plan = making.run(tuple(preference), self._plans, anew=anew)
        self._plans = plan.nodes
        until = making.lasts_until(plan, previous)
        self._standing = None
        if now < until and not anew:
            self._standing = _Standing(plan, nodes, preference, moving.movable, window_s, now, until)
        return plan


class _PlanRound:
    """One plan in the making."""

    def __init__(
        self,
        memory: FleetMemory,
        nodes: Sequence[Node],
        demands: Sequence[Demand],
        now: float,
        previous: Sequence[Reservation],
        moving: Moving,
        window_s: float,
    ) -> None:
        #: pending demands, followed by the demands of training jobs that are being moved
        self.demands = [*demands, *moving.leaving, *(run.demand for run in moving.candidates)]
        self._moving, self._now = moving, now
        #: up to when Slurm plans the starts of pending jobs
        self._planned_until = now + window_s
        self._pending = DemandQueue.of(demands)
        #: number of pending demands
        self._queued = len(demands)
        self._moves: list[PlannedMove] = []
        self.fleet = Fleet(
            nodes,
            {kind.pool for kind in self._pending.kinds} | {demand.pool for demand in self.demands[self._queued :]},
            memory,
            _by_node(previous),
        )
        self._asleep = {node.name for node in self.fleet.nodes.values() if node.asleep}
        share = _RESERVED_IF_MOVABLE if moving.movable else _RESERVED
        self.reserver = Reserver(self.fleet, now, partial(_end, self.demands, now), previous, share, _MAX_RESERVATIONS)
        self._backfill = Backfill(self.fleet, self.reserver, demands, now)
        self.copies = defaultdict[int, int](int)  # by number of the demand
        self.unplaceable: set[int] = set()
        self._components = self._pending.components()
        #: kinds of demands that fitted nowhere; not tried again in this round, because space only shrinks
        self._hopeless: set[DemandShape | tuple[DemandShape, ...]] = set()
        #: those of them for which nothing could be reserved: only reserved space is tried for them
        self._done: set[DemandShape | tuple[DemandShape, ...]] = set()
        #: position of the first demand of each kind without a place for all of its copies
        self._waiting: dict[DemandShape, int] = {}
        #: by pool and slices, the nodes to try for demands of several slices; those without room are removed
        self._order: dict[tuple[frozenset[str], tuple[tuple[Profile, int], ...]], list[str]] = {}
        self._room = RoomMaker(self.fleet, self.demands)

    def run(
        self, preference: tuple[Profile, ...], before: Mapping[str, NodePlan], *, anew: bool = False
    ) -> ClusterPlan:
        """Make the plan; a node's plan that equals the one in `before` is the same object."""
        loans: list[int] = []
        for number in range(self._queued, self._queued + len(self._moving.leaving)):
            demand = self.demands[number]
            if (place := self.fleet.find(demand.pool, demand.slices[0])) is not None:
                self._claim(place, (number, 0, demand.slices[0]))
                self.fleet.commit()
        rest = Rest(self._pending)
        for number, demand in rest:
            if demand.apart is not None:
                if number == self._components[demand.apart][-1]:
                    self._serve_apart(self._components[demand.apart])
            elif demand.loan:
                loans.append(number)
            else:
                self._serve_copies(number, demand)
                if demand.kind in self._done and not self._backfill.may_place_shorter(number, demand.kind):
                    rest.drop(number)
        for number in loans:
            self._serve_copies(number, self.demands[number])
        uncounted = slices_not_to_count(self._placed_claims(), self._waiting, self.fleet.nodes, self._planned_until)
        # where training jobs may be moved for larger ones, the space that Slurm keeps free is where they go
        for name in sorted(uncounted)[: self._moving.movable]:
            del uncounted[name]
        return ClusterPlan(
            nodes=node_plans(self.fleet, preference, before, uncounted, anew=anew),
            reservations=tuple(self.reserver.made),
            placed=self._placed(),
            parts={(demand := self.demands[number]).job: demand.parts for number in sorted(self.copies)},
            demands=self._pending,
            waiting_count=self._waiting_count(),
            unplaceable=frozenset(self.unplaceable),
            unexplained=self.fleet.unexplained,
            moves=tuple(self._moves),
        )

    def lasts_until(self, plan: ClusterPlan, previous: Sequence[Reservation]) -> float:
        """Return until when the next plan is the same if nothing but the time changes.

        Claims end so long after the time of the plan. Places are free soonest at the same times as long as no slot in
        use should have ended, and reservations are kept if they are those of the plan before.
        """
        changing = plan.placed or self._moving.leaving or self._moving.candidates
        if changing or _with_times(plan.reservations) != _with_times(previous):
            return -math.inf
        next_end = min([admission.next_end for admission in self.fleet.admissions.values()], default=math.inf)
        return min(next_end, self.reserver.lasts_until)

    def _placed_claims(self) -> Iterator[tuple[str, int, Profile, float]]:
        """Yield the claims of pending demands: node, position, profile, and when they should end."""
        claims = chain(
            self.fleet.on_fixed,
            ((gpu.node, claim) for gpu in self.fleet.claimed() for claim in (*gpu.settled, *gpu.claims)),
        )
        for name, claim in claims:
            if claim[0] < self._queued:
                end = _end(self.demands, self._now, claim)
                yield name, claim[0], claim[2], math.inf if end is None else end

    def _placed(self) -> dict[int, Placed]:
        """Return the nodes and copies of the demands that have a place, and whether its slots are offered already."""
        copies, nodes = self.copies, defaultdict[int, list[str]](list)
        not_offered: set[int] = set()
        for name, claim in self.fleet.on_fixed:
            nodes[claim[0]].append(name)
        new_by_layouts: dict[tuple[int, int, int], frozenset[Profile]] = {}  # by the ids of the three layouts
        for gpu_claims in self.fleet.claimed():
            taken, free, occupied = gpu_claims.shape.taken, gpu_claims.gpu.free, gpu_claims.gpu.occupied
            key = (id(taken), id(free), id(occupied))
            new = new_by_layouts.get(key)
            if new is None:
                new = new_by_layouts[key] = _new(taken, free, occupied)
            for claim in (*gpu_claims.settled, *gpu_claims.claims):
                nodes[claim[0]].append(gpu_claims.node)
                if claim[2] in new:
                    not_offered.add(claim[0])
        return {
            self.demands[number].job: Placed(
                tuple(dict.fromkeys(nodes[number])), copies[number], number not in not_offered
            )
            for number in sorted(nodes)
            if number < self._queued
        }

    def _waiting_count(self) -> int:
        """Return the number of demands without a place for all of their copies."""
        empty = sum(not self.demands[i].parts for numbers in self._components.values() for i in numbers)
        served = sum(
            bool(self.demands[number].parts) and copies >= self.demands[number].copies
            for number, copies in self.copies.items()
        )
        return self._queued - empty - served

    # -- one demand --------------------------------------------------------------------------------------------

    def _serve_copies(self, number: int, demand: Demand) -> None:
        """Find room for each copy, or reserve it; nothing is reserved for a loan."""
        for copy in range(demand.copies):
            if self._serve(number, copy, demand) or self._backfill.place(number, copy, demand):
                self.copies[number] += 1
            else:
                if demand.loan:
                    return
                self._waiting.setdefault(demand.kind, number)
                if demand.kind in self._done:
                    return
                if demand.job in self._moving.wanting and not self._moves:
                    self._move_for(demand)
                if not self.reserver.reserve([demand], copy):
                    self._done.add(demand.kind)
                    return
            self.fleet.commit()

    def _serve(self, number: int, copy: int, demand: Demand) -> bool:
        """Claim places for one copy of a demand, moving other claims if necessary; return whether there are enough."""
        key = demand.kind
        if key in self._hopeless:
            return False
        if key.single:
            profile = key.slices[0]
            place = self.fleet.find(demand.pool, profile)
            if place is None:
                if demand.loan or not self._room.make(demand.pool, profile):
                    self._hopeless.add(key)
                    return False
                place = self.fleet.find(demand.pool, profile)
                assert place is not None
            self._claim(place, (number, copy, profile))
            return True
        places_by_node = self._candidates(demand, demand.nodes)
        if len(places_by_node) < demand.nodes:
            self._hopeless.add(key)
            return False
        self._take(number, copy, places_by_node.values())
        return True

    def _serve_apart(self, numbers: Sequence[int]) -> None:
        """Give each component of a heterogeneous job nodes of its own, or reserve nodes for all of them."""
        demands = [self.demands[number] for number in numbers]
        key = tuple(demand.kind for demand in demands)
        if key not in self._hopeless:
            most_nodes = sum(demand.nodes for demand in demands)
            options = [self._candidates(demand, most_nodes) for demand in demands]
            chosen = assign([(demand.nodes, list(places)) for demand, places in zip(demands, options, strict=True)])
            if chosen is not None:
                for number, places, names in zip(numbers, options, chosen, strict=True):
                    self._take(number, 0, [places[name] for name in names])
                    self.copies[number] += 1
                self._keep_clear(demands, chosen)
                self.fleet.commit()
                return
            self._hopeless.add(key)
        if not can_be_apart(demands):
            self.unplaceable.update(demand.job for demand in demands)
        elif key not in self._done:
            if self.reserver.reserve(demands, 0):
                self.fleet.commit()
            else:
                self._done.add(key)

    def _keep_clear(self, components: Sequence[Demand], nodes: Sequence[Sequence[str]]) -> None:
        """Hide the offers for a component on the nodes that are meant for a later one.

        Slurm takes the first sufficient node for the first component and does not reconsider it.
        """
        for i, earlier in enumerate(components):
            for later, names in zip(components[i + 1 :], nodes[i + 1 :], strict=True):
                if earlier.parts != later.parts:
                    for name in names:
                        self.fleet.hide(name, earlier.slices)

    def _take(self, number: int, copy: int, nodes: Iterable[_Places]) -> None:
        for places in nodes:
            for profile, place in places:
                self._claim(place, (number, copy, profile))

    def _claim(self, at: str | GpuClaims, claim: Claim) -> None:
        """Place the claim of a demand."""
        limit = self.demands[claim[0]].limit_s
        if limit is not None and limit < self.reserver.search.least_limit_s:
            self.reserver.search.least_limit_s = limit
        self.fleet.claim(at, claim)

    def _candidates(self, demand: Demand, most: int) -> dict[str, _Places]:
        """Return up to `most` nodes on which all slices fit, and where; those with the fewest changes first."""
        names = self._order.get((demand.pool, demand.parts))
        if names is None:
            names = self._order[demand.pool, demand.parts] = self._by_missing(demand.pool, demand.slices)
        places_by_node: dict[str, _Places] = {}
        looked_at = 0
        for name in names:
            looked_at += 1
            places = self.fleet.place_on(name, demand.slices)
            if places is not None:
                places_by_node[name] = places
                if len(places_by_node) == most:
                    break
        names[:looked_at] = places_by_node  # nodes without room now have none later in this plan
        return places_by_node

    def _by_missing(self, pool: frozenset[str], slices: tuple[Profile, ...]) -> list[str]:
        """Return the pool's nodes, those first that lack the fewest of `slices` among unclaimed offers.

        Of those that lack any, powered-down nodes are last.
        """
        needed = Counter(slices)
        ranked = []
        for name in self.fleet.candidate_nodes(pool, slices):
            unclaimed = self.fleet.spare(name)
            ranked.append((sum([max(0, n - unclaimed[profile]) for profile, n in needed.items()]), name))
        ranked.sort()
        if self._asleep:
            ranked.sort(key=lambda missing_on: missing_on[0] > 0 and missing_on[1] in self._asleep)
        return [name for _, name in ranked]

    # -- moving training jobs --------------------------------------------------------------------------------------

    def _move_for(self, demand: Demand) -> None:
        """Choose a training job to move: the demand fits in its place, and it fits elsewhere. Claim its new place."""
        if not demand.kind.single:
            return
        profile, row = demand.slices[0], self._moving.rows.get(demand.job)
        first_number = self._queued + len(self._moving.leaving)
        for number, run in enumerate(self._moving.candidates, first_number):
            if run.node not in demand.pool or run.node not in self.fleet.nodes or not self.fleet.plannable(run.node):
                continue
            gpu_claims = next(candidate for candidate in self.fleet.on(run.node) if candidate.gpu.uuid == run.gpu)
            changed_state = self._without(gpu_claims, run.slot, profile)
            if changed_state is None:
                continue
            mark = self.fleet.mark()
            self.fleet.change(gpu_claims, changed_state, gpu_claims.claims)
            place = self.fleet.find(run.demand.pool, run.slot.profile)
            self.fleet.roll_back(mark)
            if place is None:
                continue
            to = place if isinstance(place, str) else place.node
            # without CPUs and memory for the waiting job the move would be in vain, and the next one would be moved
            leaves_resources = row is None or run.leaves_resources(row, moves=to != run.node)
            if (to != run.node and to not in run.elsewhere) or not leaves_resources:
                continue
            if place is not gpu_claims:
                self._claim(place, (number, 0, run.slot.profile))
            self.fleet.commit()
            self._moves.append(PlannedMove(run.demand.job, demand.job))
            return

    def _without(self, gpu_claims: GpuClaims, slot: Slot, profile: Profile) -> GpuState | None:
        """Return the GPU with a slice of this profile instead of a used slot; None if it does not fit."""
        shape = gpu_claims.shape
        if gpu_claims.reserved or shape.future is not None or slot not in shape.used:
            return None
        return shape.instead(slot, profile)


def _new(taken: Layout, free: Layout, occupied: Layout) -> frozenset[Profile]:
    """Return the profiles of taken slots that are neither offered yet nor in use."""
    return frozenset([slot.profile for slot in taken.slots if slot not in free and slot not in occupied])


def _end(demands: Sequence[Demand], now: float, claim: Claim) -> float | None:
    """Return when a claim that starts now should be over."""
    limit = demands[claim[0]].limit_s
    return None if limit is None else now + limit


def _with_times(reservations: Iterable[Reservation]) -> list[tuple[Reservation, float | None]]:
    """Return the reservations with the part that their comparison leaves out."""
    return [(reservation, reservation.held_from) for reservation in reservations]


def _by_node(reservations: Iterable[Reservation]) -> dict[str, set[str]]:
    """Return by node the UUIDs of the GPUs with reserved slots."""
    gpus_of_node: dict[str, set[str]] = {}
    for reservation in reservations:
        for node, uuid, _ in reservation.places:
            gpus_of_node.setdefault(node, set()).add(uuid)
    return gpus_of_node


def can_be_apart(components: Sequence[Demand]) -> bool:
    """Return whether the pools have enough nodes for each component to have its own."""
    node_count = sum(demand.nodes for demand in components)
    return assign([(demand.nodes, list(islice(demand.pool, node_count))) for demand in components]) is not None

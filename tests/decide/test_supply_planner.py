"""Invariants of every plan, and a comparison with an exhaustive search."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Gpu, Lease, Mode, Node, Reservation
from slurm_migbatch.decide.supply import planner as planner_module
from slurm_migbatch.decide.supply import reserve as reserve_module
from slurm_migbatch.decide.supply.admission import When
from slurm_migbatch.decide.supply.backfill import Backfill
from slurm_migbatch.decide.supply.fleet import Fleet, GpuClaims
from slurm_migbatch.decide.supply.planner import NOTHING_MOVES, Moving, Planner
from slurm_migbatch.decide.supply.reserve import Reserver
from slurm_migbatch.decide.supply.soonest import SoonestPlaces
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples
from tests.support.supply_gpus import A30, H100, P, layout, layouts, slot, up_to

NOW = 1000.0
PROFILES = [info.profile for info in H100.profiles]
PLAIN = [p for p in PROFILES if not p.suffix]
MOVING = st.sampled_from([NOTHING_MOVES, Moving(movable=1)])


def demand(job: int, want: str, pool: str = "n1", **kw: object) -> Demand:
    parts = []
    for word in want.split():
        count, _, name = word.rpartition("*")
        parts.append((P(name), int(count or 1)))
    return Demand(job, tuple(parts), frozenset(pool.split()), **kw)  # type: ignore[arg-type]


def node(name: str, *gpus: Gpu, **kw: object) -> Node:
    used: Counter[Profile] = Counter(lease.slot.profile for g in gpus for lease in g.leases if lease.job is not None)
    return Node(name, gpus, **{"used": used, **kw})  # type: ignore[arg-type]


def gpu(
    name: str, used: str = "", offered: str = "", until: float | None = NOW + 600, geometry: Geometry = H100
) -> Gpu:
    leases = tuple(Lease(slot(word), 900 + i, until) for i, word in enumerate(used.split()))
    return Gpu(name, geometry, leases, layout(offered))


def plan(
    nodes: Sequence[Node], demands: Sequence[Demand], previous: Sequence[Reservation] = (), **kw: object
) -> ClusterPlan:
    return Planner().plan(nodes, demands, NOW, previous, **kw)  # type: ignore[arg-type]


# -- single cases --------------------------------------------------------------------------------------------------


def test_demands_are_served_in_order_and_the_rest_waits() -> None:
    found = plan([node("n1", gpu("a"))], [demand(1, "4g.40gb"), demand(2, "3g.40gb"), demand(3, "1g.10gb")])
    assert set(found.placed) == {1, 2}
    assert found.nodes["n1"].layouts["a"] == layout("4g.40gb@0 3g.40gb@4")


def test_lower_priority_jobs_do_not_get_reserved_slots() -> None:
    found = plan([node("n1", gpu("a"))], [demand(1, "4g.40gb"), demand(2, "7g.80gb"), demand(3, "3g.40gb")])
    assert set(found.placed) == {1}
    assert found.nodes["n1"].layouts["a"] == layout("4g.40gb@0")
    assert [r.job for r in found.reservations] == [2]
    assert found.waiting == (2, 3)


@pytest.mark.parametrize("want", ["1g.10gb", "2*1g.10gb"])
def test_new_slots_are_planned_on_powered_down_nodes_last(want: str) -> None:
    half = "3g.40gb@4"  # the awake node loses more useful space by the claim
    sleeping, awake = node("n1", gpu("a", half), asleep=True), node("n2", gpu("b"))
    everywhere = [demand(job, want, "n1 n2") for job in range(1, 5)]
    found = plan([sleeping, awake], everywhere[:1])
    assert found.placed[1].nodes == ("n2",)
    full = plan([sleeping, node("n2", gpu("b", "7g.80gb@0"))], everywhere[:1])
    assert full.placed[1].nodes == ("n1",), "it is powered up if no other node has room"
    offered = plan([node("n1", gpu("a", half, "1g.10gb@0 1g.10gb@1"), asleep=True), awake], everywhere[:1])
    assert offered.placed[1] == (("n1",), 1, True), "Slurm may start the job there at any moment"


def test_a_node_that_has_booted_is_no_longer_the_last_choice() -> None:
    planner, same, other = Planner(), gpu("a"), node("n2", gpu("b", "1g.10gb@0"))
    wants = [demand(1, "1g.10gb", "n1 n2")]
    chosen = []
    for asleep in (False, True, False):
        other = dataclasses.replace(other, asleep=not asleep)
        found = planner.plan([node("n1", same, asleep=asleep), other], wants, NOW)
        chosen.append(found.placed[1].nodes)
    assert chosen == [("n1",), ("n2",), ("n1",)]


def test_reservation_is_made_where_the_claim_ends_first() -> None:
    nodes = [node("n1", gpu("a"), gpu("b"))]
    limits = [(3600.0, 6), (60.0, 1), (600.0, 7)]
    wants = [demand(job, "1g.10gb", copies=n, limit_s=limit) for job, (limit, n) in enumerate(limits, 1)]
    found = plan(nodes, [*wants, demand(4, "1g.10gb")])
    assert [(r.job, r.places[0][1], r.at) for r in found.reservations] == [(4, "a", NOW + 60)]


def test_failed_reservation_is_not_retried_for_jobs_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    reserve = Reserver.reserve

    def counted(self: Reserver, demands: Sequence[Demand], copy: int) -> bool:
        tried.extend(demand.job for demand in demands)
        return reserve(self, demands, copy)

    monkeypatch.setattr(Reserver, "reserve", counted)
    nodes = [node("n1", gpu("a", "4g.40gb@0"))]
    wants = [demand(1 + i, ("7g.80gb", "2*3g.40gb")[i % 2]) for i in range(200)]
    found = plan(nodes, [*wants, demand(500, "1g.10gb")])
    assert [r.job for r in found.reservations] == [1], "one GPU is reserved once"
    assert tried == [1, 2, 3, 500], "the pool is full: nothing of these kinds is tried again"
    assert found.waiting == (*range(1, 201), 500)
    tried.clear()
    too_large = [demand(1 + i, "3*7g.80gb") for i in range(200)]
    apart = [demand(201 + i, "2*7g.80gb", "n1 n2", apart=201 + i // 2 * 2) for i in range(200)]
    found = plan([*nodes, node("n2", gpu("b"))], [*too_large, *apart, demand(500, "7g.80gb")])
    assert [r.job for r in found.reservations] == [500], "no node can ever hold the others"
    assert tried == [1, 201, 202, 500]


def test_room_is_tried_for_few_of_many_jobs_that_each_exclude_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    mark = Fleet.mark

    def counted(self: Fleet) -> int:
        tried.append(1)
        return mark(self)

    monkeypatch.setattr(Fleet, "mark", counted)
    names = [f"n{i}" for i in range(100)]  # more than can be reserved
    first = demand(1, "4g.40gb", " ".join(names), copies=100)
    attempts = {}
    for count in (200, 600):
        tried.clear()
        pools = [" ".join(sorted({*names} - {*pair})) for pair in islice(combinations(names, 2), count)]
        wants = [demand(2 + i, "7g.80gb", pool) for i, pool in enumerate(pools)]
        found = plan([node(name, gpu("a")) for name in names], [first, *wants])
        assert len(found.waiting) == count
        attempts[count] = len(tried)
    assert attempts[200] > 0
    assert attempts[600] == attempts[200], "a user's jobs can name any number of node sets"


def test_offer_is_kept_if_no_job_gains_by_a_change() -> None:
    nodes = [node("n1", gpu("a", "", "1g.10gb@0 1g.10gb@5"), gpu("b", "", "7g.80gb@0"))]
    found = plan(nodes, [demand(1, "1g.10gb"), demand(2, "1g.10gb")])
    assert all(placed.standing for placed in found.placed.values())
    assert set(layout("1g.10gb@0 1g.10gb@5")) <= set(found.nodes["n1"].layouts["a"])
    assert found.nodes["n1"].layouts["b"] == layout("7g.80gb@0")


def test_idle_instances_are_used_first() -> None:
    warm = Gpu("b", H100, (), layout("2g.20gb@2"), layout("2g.20gb@2"))
    nodes = [node("n1", gpu("a", "", "2g.20gb@0")), node("n2", warm)]
    assert plan(nodes, [demand(1, "2g.20gb", "n1 n2")]).placed[1].nodes == ("n2",)


def test_claim_is_moved_for_a_job_that_fits_nowhere_else() -> None:
    """The 1g offered on the empty GPU would suit job 1, but only that GPU can have a 7g."""
    nodes = [node("n1", gpu("a", "", "1g.10gb@6"), gpu("b", "1g.10gb@0 1g.10gb@1"))]
    found = plan(nodes, [demand(1, "1g.10gb"), demand(2, "7g.80gb")])
    assert set(found.placed) == {1, 2}
    assert found.nodes["n1"].layouts["a"] == layout("7g.80gb@0")


def test_reservations_of_whole_nodes_take_an_eighth_of_the_gpus_not_all() -> None:
    names = [f"n{i}" for i in range(4)]
    nodes = [node(n, gpu(f"{n}a", "7g.80gb@0", until=NOW + 86_400), *(gpu(f"{n}{x}") for x in "bcd")) for n in names]
    wide = [demand(i, "4*7g.80gb", " ".join(names)) for i in (1, 2)]
    small = [demand(i, "7g.80gb", " ".join(names), limit_s=600) for i in range(3, 12)]
    found = plan(nodes, [*wide, *small])
    assert [r.job for r in found.reservations] == [1], "an eighth of 16 GPUs, and the first is never starved"
    assert sum(job in found.placed for job in range(3, 12)) == 9, "three free GPUs on each of the other nodes"


def test_reservation_takes_the_gpu_that_is_free_soonest_and_keeps_it() -> None:
    nodes = [
        node("n1", gpu("a", "1g.10gb@0", until=NOW + 5000)),
        node("n2", gpu("b", "3g.40gb@0 1g.10gb@5", until=NOW + 300)),
    ]
    wants = [demand(1, "7g.80gb", "n1 n2"), demand(2, "1g.10gb", "n1 n2", copies=40)]
    first = plan(nodes, wants)
    assert [(r.job, r.places[0][1], r.at) for r in first.reservations] == [(1, "b", NOW + 300)]
    assert first.nodes["n2"].offers == {}
    assert first.placed[2].copies == 6
    again = plan(nodes, wants, first.reservations)
    assert again.reservations == first.reservations


def test_reservation_stays_if_another_place_is_only_a_little_sooner() -> None:
    kept = (Reservation(1, 0, (("n1", "a", slot("7g.80gb@0")),), NOW + 330),)
    nodes = [
        node("n1", gpu("a", "1g.10gb@0", until=NOW + 330)),
        node("n2", gpu("b", "1g.10gb@0", until=NOW + 300)),
    ]
    assert plan(nodes, [demand(1, "7g.80gb", "n1 n2")], kept).reservations == kept
    much_sooner = [nodes[0], node("n2", gpu("b", "1g.10gb@0", until=NOW + 10))]
    assert plan(much_sooner, [demand(1, "7g.80gb", "n1 n2")], kept).reservations[0].places[0][1] == "b"


def test_a_reservation_ends_with_its_job() -> None:
    kept = (Reservation(1, 0, (("n1", "a", slot("7g.80gb@0")),), NOW + 330),)
    found = plan([node("n1", gpu("a", "1g.10gb@0"))], [], kept)
    assert found.reservations == ()
    assert found.nodes["n1"].offers


def test_several_slices_are_reserved_on_one_node() -> None:
    nodes = [
        node("n1", gpu("a", "4g.40gb@0"), gpu("b", "7g.80gb@0", until=None)),
        node("n2", gpu("c", "7g.80gb@0", until=NOW + 900), gpu("d", "3g.40gb@4")),
    ]
    found = plan(nodes, [demand(1, "2*3g.40gb", "n1 n2"), demand(2, "1g.10gb", "n1 n2", copies=20)])
    (reservation,) = found.reservations
    assert {name for name, _, _ in reservation.places} == {"n1"}
    assert len(reservation.places) == 2
    assert reservation.at == NOW + 600


def test_free_slices_of_a_reservation_stay_on_offer_when_the_job_that_it_waits_for_ends_early() -> None:
    """Else Slurm counts one slice that is free while the job's Epilog runs, and gives it to a job that wants one."""
    wants = [demand(1, "2*7g.80gb"), demand(2, "7g.80gb")]
    free = gpu("b", offered="7g.80gb@0")
    running = plan([node("n1", gpu("a", "7g.80gb@0", until=NOW + 3600), free)], wants)
    assert running.nodes["n1"].offers == {P("7g.80gb"): 1}, "Slurm counts two, and plans the start itself"
    ended = [node("n1", gpu("a", "7g.80gb@0", until=NOW), free, used=Counter())]
    assert plan(ended, wants, running.reservations).nodes["n1"] == running.nodes["n1"]
    overrun = [node("n1", gpu("a", "7g.80gb@0", until=NOW), free)]
    assert plan(overrun, wants).nodes["n1"].offers == {}, "Slurm does not know when it ends"
    divided = [node("n1", gpu("a", "4g.40gb@0", until=NOW), free, used=Counter())]
    assert plan(divided, wants).nodes["n1"].offers == {}
    two = (gpu("a", "7g.80gb@0", until=NOW), gpu("c", "7g.80gb@0", until=NOW))
    for in_use, offers in ((2, {}), (1, {}), (0, {P("7g.80gb"): 1})):
        nodes = [node("n1", *two, free, used=Counter({P("7g.80gb"): in_use}))]
        assert plan(nodes, [demand(1, "3*7g.80gb"), wants[1]]).nodes["n1"].offers == offers


def test_free_slices_of_a_reservation_are_not_offered_while_a_job_is_stopped_for_it() -> None:
    """Slurm expects the job to run until its time limit, so it would give the free slices to others meanwhile."""
    wants = [demand(1, "2*7g.80gb"), demand(2, "7g.80gb")]
    busy, free = gpu("a", "7g.80gb@0", until=NOW + 5), gpu("b", offered="7g.80gb@0")
    assert plan([node("n1", busy, free)], wants).nodes["n1"].offers == {P("7g.80gb"): 1}
    stopped = dataclasses.replace(busy, leases=tuple(lease._replace(stopping=True) for lease in busy.leases))
    assert plan([node("n1", stopped, free)], wants).nodes["n1"].offers == {}


def test_reserved_space_is_used_for_short_jobs_until_the_reserved_one_has_waited_for_too_long() -> None:
    nodes = [node("n1", gpu("a", "7g.80gb@0", until=NOW + 2000), gpu("b"))]
    wants, planner = [demand(1, "2*7g.80gb", limit_s=12.5), demand(2, "1g.10gb", limit_s=500)], Planner()
    first = planner.plan(nodes, wants, NOW)
    assert set(first.placed) == {2} and first.nodes["n1"].offers == {P("1g.10gb"): 1}
    assert planner.plan(nodes, wants, NOW + 199, first.reservations).placed
    assert not planner.plan(nodes, wants, NOW + 200, first.reservations).placed
    for limit_s in (1995, None):  # too long
        assert not plan(nodes, [wants[0], demand(2, "1g.10gb", limit_s=limit_s)]).placed
    endless = [node("n1", gpu("a", "7g.80gb@0", until=None), gpu("b"))]
    assert not plan(endless, wants).placed, "it may start at any time"


def test_reserved_space_is_not_offered_if_a_longer_job_with_a_reservation_on_the_same_gpu_could_take_it() -> None:
    nodes = [
        node("n1", gpu("a", "1g.10gb@0 3g.40gb@4", until=NOW + 2000)),
        node("n2", gpu("b", "7g.80gb@0", until=NOW + 9000)),
    ]
    large, short = demand(1, "4g.40gb", "n1 n2", limit_s=4000), demand(3, "1g.10gb", "n1 n2", limit_s=100)
    longer = demand(2, "1g.10gb", limit_s=5000)
    found = plan(nodes, [large, longer, short])
    assert [(r.job, r.places[0][1], r.at) for r in found.reservations] == [(1, "a", NOW + 2000), (2, "a", NOW + 2000)]
    assert not found.placed and not found.offers()
    assert set(plan(nodes, [large, short]).placed) == {3}


def test_reserved_space_is_used_once_a_job_that_slurm_could_start_there_would_end_too_late() -> None:
    nodes = [node("n1", gpu("a", "7g.80gb@0", until=NOW + 2000), gpu("b", offered="7g.80gb@0"))]
    wants = [demand(1, "2*7g.80gb"), demand(2, "7g.80gb", limit_s=600), demand(3, "1g.10gb", limit_s=100)]
    planner = Planner()
    found = planner.plan(nodes, wants, NOW)
    for after_s, placed in ((0, set()), (1380, set()), (1400, {3})):
        found = planner.plan(nodes, wants, NOW + after_s, found.reservations)
        assert set(found.placed) == placed


def test_reserved_nodes_without_room_are_looked_at_once_for_jobs_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    slots_on = Backfill._slots_on

    def counted(self: Backfill, node: str, *more: Any) -> Any:
        looked_at.append(node)
        return slots_on(self, node, *more)

    monkeypatch.setattr(Backfill, "_slots_on", counted)
    names = [f"n{i}" for i in range(8)]
    nodes = [node(name, gpu(f"{name}-{i}", "1g.10gb@0", until=NOW + 2000)) for i, name in enumerate(names)]
    large = demand(1, "7g.80gb", " ".join(names), nodes=8)
    short = [demand(2 + i, "2*1g.10gb", " ".join(names), limit_s=300) for i in range(40)]
    found = plan(nodes, [large, *short])
    assert len(found.placed) == 3 * len(names)
    assert len(looked_at) == len(found.placed) + len(names)


def test_slices_in_use_that_a_reservation_waits_for_too_long_are_held_back() -> None:
    def held_back(nodes: Sequence[Node], want: str, after_s: float, limit_s: float | None = 12.5) -> dict[str, int]:
        wants, planner = [demand(1, want, limit_s=limit_s)], Planner()
        first = planner.plan(nodes, wants, NOW)
        assert not first.nodes["n1"].held_back
        later = planner.plan(nodes, wants, NOW + after_s, first.reservations)
        assert later.reservations[0].held_from == first.reservations[0].held_from
        return {profile.name: n for profile, n in later.nodes["n1"].held_back.items()}

    full = [node("n1", gpu("a", "7g.80gb@0", until=NOW + 300), gpu("b", "7g.80gb@0", until=NOW + 900))]
    assert held_back(full, "1g.10gb", 199) == {}
    assert held_back(full, "1g.10gb", 200) == {"7g.80gb": 1}, "only that of the GPU with the reservation"
    assert held_back(full, "1g.10gb", 599, limit_s=1000) == {}
    assert held_back(full, "1g.10gb", 600, limit_s=1000) == {"7g.80gb": 1}, "it should have been free long ago"
    assert held_back(full, "7g.80gb", 299) == {}, "Slurm gives the next one to the first job"
    assert held_back(full, "2*7g.80gb", 200) == {}, "Slurm keeps both for it, because it knows when the later one ends"
    unlimited = [node("n1", gpu("a", "7g.80gb@0", until=None), gpu("b", "7g.80gb@0"))]
    assert held_back(unlimited, "2*7g.80gb", 200) == {"7g.80gb": 2}
    assert held_back(unlimited, "2*7g.80gb", 14_399, None) == {}
    assert held_back(unlimited, "2*7g.80gb", 14_400, None) == {"7g.80gb": 2}
    mixed = [node("n1", gpu("a", "3g.40gb@0 2g.20gb@4 1g.10gb@6"))]
    assert held_back(mixed, "4g.40gb", 200) == {"3g.40gb": 1}, "the others are beside it"
    assert held_back(mixed, "7g.80gb", 200) == {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}


def test_several_nodes_are_reserved_together() -> None:
    nodes = [node(f"n{i}", gpu(f"g{i}", "1g.10gb@0", until=NOW + 100 * i)) for i in range(1, 5)]
    pool = "n1 n2 n3 n4"
    found = plan(nodes, [demand(1, "7g.80gb", pool, nodes=2), demand(2, "1g.10gb", pool, copies=99)])
    (reservation,) = found.reservations
    assert [name for name, _, _ in reservation.places] == ["n1", "n2"]
    assert reservation.at == NOW + 200
    assert not found.nodes["n1"].offers
    assert not found.nodes["n2"].offers


def test_reservations_are_bounded_by_a_share_of_the_pool() -> None:
    nodes = [node(f"n{i}", gpu(f"g{i}", "1g.10gb@0")) for i in range(8)]
    wants = [demand(1, "7g.80gb", " ".join(n.name for n in nodes), copies=30)]
    for moving, most in ((NOTHING_MOVES, 1), (Moving(movable=1), 2)):
        found = plan(nodes, wants, moving=moving)
        assert len(found.reservations) == most
        assert found.waiting == (1,)


def test_node_with_unexplained_slices_in_use_keeps_its_layout() -> None:
    lost = node("n1", gpu("a", "", "1g.10gb@0"), used={P("1g.10gb"): 1, P("2g.20gb"): 1})
    found = plan([lost], [demand(1, "7g.80gb")])
    assert found.nodes["n1"].layouts["a"] == layout("1g.10gb@0")
    assert found.unexplained == {"n1": {P("2g.20gb"): 1}}
    assert found.nodes["n1"].fixed


def test_frozen_and_closed_nodes_keep_their_plan_and_only_frozen_ones_offer() -> None:
    for mode, standing in ((Mode.FROZEN, True), (Mode.CLOSED, False)):
        found = plan([node("n1", gpu("a", "", "1g.10gb@0"), mode=mode)], [demand(1, "1g.10gb"), demand(2, "7g.80gb")])
        assert found.nodes["n1"].layouts["a"] == layout("1g.10gb@0")
        assert (1 in found.placed) is standing
        assert 2 not in found.placed
        assert bool(found.offers()) is standing


def test_a_withdrawn_node_offers_nothing() -> None:
    found = plan([node("n1", gpu("a", "2g.20gb@0", "1g.10gb@6"), mode=Mode.WITHDRAWN)], [demand(1, "1g.10gb")])
    assert found.nodes["n1"].layouts["a"] == layout("2g.20gb@0")
    assert found.nodes["n1"].offers == {}
    assert found.nodes["n1"].withdrawn == {P("1g.10gb")}


def test_capacity_without_demand_is_filled_with_preferred_profiles() -> None:
    found = plan([node("n1", gpu("a"))], [], preference=(P("1g.20gb"),))
    assert found.nodes["n1"].offers == {P("1g.20gb"): 4}
    mixed = plan([node("n1", gpu("a", geometry=A30))], [], preference=(P("1g.6gb"), P("2g.12gb")))
    assert mixed.nodes["n1"].offers == {P("1g.6gb"): 2, P("2g.12gb"): 1}


def test_gpus_that_have_none_of_the_preferred_profiles_offer_the_default() -> None:
    nodes = [node("n1", gpu("a")), node("n2", gpu("b", geometry=A30))]
    found = plan(nodes, [], preference=(P("1g.20gb"),))
    assert found.nodes["n1"].offers == {P("1g.20gb"): 4}
    assert found.nodes["n2"].offers == plan(nodes[1:], []).nodes["n2"].offers != {}


# -- invariants ----------------------------------------------------------------------------------------------------


# Strategies that many draws share: to construct and validate one takes longer than to draw from it.
BOOLEAN, ONE_TO_THREE = st.booleans(), st.integers(1, 3)
UNTIL = st.one_of(st.none(), st.floats(NOW, NOW + 5000))
HOLDER = st.one_of(st.just(None), st.integers(1, 50), st.integers(1, 50))
MISCOUNTED, MISCOUNT = st.lists(st.sampled_from(PLAIN), max_size=1), st.sampled_from([-1, 1, 1])
MODES = st.sampled_from([Mode.OPEN] * 5 + [Mode.FROZEN, Mode.CLOSED, Mode.WITHDRAWN])
TOTAL = st.sampled_from([10**6, 14])
QUEUED = st.integers(0, 8)
PARTS = st.dictionaries(st.sampled_from(PROFILES), st.integers(1, 2), min_size=1, max_size=2)
LIMIT = st.sampled_from([None, 60.0, 3600.0])


@cache
def pools(names: tuple[str, ...]) -> st.SearchStrategy[set[str]]:
    return st.sets(st.sampled_from(names), min_size=1)


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    nodes = []
    for i in range(draw(ONE_TO_THREE)):
        gpus = []
        for j in range(draw(up_to(1, 2))):
            used = draw(layouts())
            offered = draw(layouts(used))
            leases = tuple(Lease(s, draw(HOLDER), draw(UNTIL)) for s in used.slots)
            warm = Layout(s for s in offered.slots if draw(BOOLEAN))
            gpus.append(Gpu(f"g{i}{j}", H100, leases, offered, warm))
        used_counts = Counter(le.slot.profile for g in gpus for le in g.leases if le.job is not None)
        for profile in draw(MISCOUNTED):
            used_counts[profile] += draw(MISCOUNT)
        mode, total = draw(MODES), draw(TOTAL)
        nodes.append(Node(f"n{i}", tuple(gpus), used=used_counts, mode=mode, total=total))
    return nodes


@st.composite
def queues(draw: st.DrawFn, names: Sequence[str]) -> list[Demand]:
    found = []
    for job in range(100, 100 + draw(QUEUED)):
        parts = draw(PARTS)
        pool = draw(pools(tuple(names)))
        found.append(
            Demand(
                job,
                tuple(parts.items()),
                frozenset(pool),
                nodes=draw(up_to(1, len(pool))),
                copies=draw(ONE_TO_THREE),
                limit_s=draw(LIMIT),
            )
        )
    return found


def ends_before(demand: Demand, reservation: Reservation) -> bool:
    """Whether a job that starts now ends, by its time limit, before the one with the reservation starts."""
    return demand.limit_s is not None and reservation.at is not None and NOW + demand.limit_s < reservation.at


@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_every_plan_is_valid_and_moves_no_slot_in_use(data: st.DataObject) -> None:
    nodes = data.draw(clusters())
    queue = data.draw(queues([n.name for n in nodes]))
    found = plan(nodes, queue, moving=data.draw(MOVING))
    for node in nodes:
        new = found.nodes[node.name]
        free: Counter[Profile] = Counter()
        held = node.unmatched
        for g in node.gpus:
            after = new.layouts[g.uuid]
            everything = after.union(Layout(le.slot for le in g.leases))
            H100.check(everything)
            leased = Layout(le.slot for le in g.leases if le.job is not None)
            assert set(leased) <= set(after)
            removed = g.offered.minus(after)
            if node.mode is not Mode.WITHDRAWN:
                assert not any(held[s.profile] for s in removed.slots), "a slot that may be in use was withdrawn"
            assert {s.profile for s in removed.slots} <= new.withdrawn
            free.update(after.minus(leased).counts())
            if new.fixed:
                assert after == leased.union(g.offered)
        assert all(0 < n <= free[p] - held[p] for p, n in new.offers.items())
        assert all(0 < n <= node.leased[p] for p, n in new.held_back.items())
        assert not (new.fixed and new.held_back)
    for reservation in found.reservations:
        for name, uuid, place in reservation.places:
            g = next(g for n in nodes if n.name == name for g in n.gpus if g.uuid == uuid)
            taken = Layout(le.slot for le in g.leases)
            owner = next(d for d in queue if d.job == reservation.job)
            up_to_it = queue[: queue.index(owner) + 1]
            offered = found.nodes[name].layouts[uuid].minus(taken)
            for s in offered.slots:
                if s.placement.overlaps(place.placement):
                    fixed = s in g.offered.slots and next(n for n in nodes if n.name == name).unmatched[s.profile]
                    holders = {r.job for r in found.reservations if any(uuid == at for _, at, _ in r.places)}
                    others = [d for d in queue if s.profile in dict(d.parts) and name in d.pool]
                    short = all(ends_before(d, reservation) for d in others if d.job not in holders)
                    is_meant = any(s.profile in dict(d.parts) for d in up_to_it) or short
                    assert fixed or is_meant, f"{s} lies in {reservation}"


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_plans_converge_when_they_are_carried_out(data: st.DataObject) -> None:
    nodes = data.draw(clusters())
    queue = data.draw(queues([n.name for n in nodes]))
    planner, moving = Planner(), data.draw(MOVING)
    found = planner.plan(nodes, queue, NOW, moving=moving)
    for _ in range(4):
        nodes = [_carried_out(node, found) for node in nodes]
        before, found = found, planner.plan(nodes, queue, NOW, found.reservations, moving=moving)
        assert found == Planner().plan(nodes, queue, NOW, before.reservations, moving=moving), (
            "the planner's cache changes its plan"
        )
    assert found.nodes == {
        name: dataclasses.replace(plan, withdrawn=frozenset()) for name, plan in before.nodes.items()
    }
    assert [(r.job, r.places) for r in found.reservations] == [(r.job, r.places) for r in before.reservations]


class _LooksAtAll(SoonestPlaces):
    """Searches every GPU again for each reservation, and fails where that finds another place."""

    def first(self, pool: frozenset[str], profile: Profile) -> tuple[When, GpuClaims, Slot] | None:
        found = super().first(pool, profile)
        fleet, best = self._fleet, None
        for name in sorted(pool & fleet.nodes.keys(), key=fleet.first_index.__getitem__):
            for gpu in fleet.on(name) if fleet.plannable(name) else ():
                soonest = self.soonest(gpu, profile)
                if soonest is not None and (best is None or self.rank_of(soonest[0]) < best[0]):
                    best = self.rank_of(soonest[0]), soonest[0], gpu, soonest[1]
        assert found == (None if best is None else best[1:])
        return found


@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_reservation_is_where_a_search_of_all_gpus_finds_it(data: st.DataObject) -> None:
    nodes = data.draw(clusters())
    planner, found = Planner(), ClusterPlan({})
    with pytest.MonkeyPatch.context() as context:
        context.setattr(reserve_module, "SoonestPlaces", _LooksAtAll)
        for now in (NOW, NOW + 1, NOW + data.draw(st.floats(0, 5000))):
            queue = data.draw(queues([n.name for n in nodes]))
            found = planner.plan(nodes, queue, now, found.reservations, moving=data.draw(MOVING))
            nodes = [_carried_out(node, found) if data.draw(BOOLEAN) else node for node in nodes]


def _carried_out(node: Node, found: ClusterPlan) -> Node:
    gpus = []
    for g in node.gpus:
        taken = Layout(le.slot for le in g.leases)
        offered = Layout(s for s in found.nodes[node.name].layouts[g.uuid].slots if s not in taken)
        gpus.append(dataclasses.replace(g, offered=offered))
    return dataclasses.replace(node, gpus=tuple(gpus))


# -- against an exhaustive search ----------------------------------------------------------------------------------


def _assignments(wishes: Sequence[Profile], gpus: int) -> Iterator[tuple[int, ...]]:
    return product(range(-1, gpus), repeat=len(wishes))


def best_served(used: Sequence[Layout], wishes: Sequence[Profile], geometry: Geometry) -> tuple[bool, ...]:
    """Which wishes can be served, in order of priority, by trying every GPU for each."""
    best: tuple[bool, ...] = (False,) * len(wishes)
    for chosen in _assignments(wishes, len(used)):
        served = tuple(c >= 0 for c in chosen)
        if served <= best:
            continue
        for g, taken in enumerate(used):
            mine = [w for w, c in zip(wishes, chosen, strict=True) if c == g]
            if len(plan_free(geometry, taken, mine)) != len(mine):
                break
        else:
            best = served
    return best


@settings(max_examples=examples(150), deadline=None)
@given(
    used=st.lists(layouts(most=4), min_size=1, max_size=2),
    wishes=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=5),
    offers=st.booleans(),
    data=st.data(),
)
def test_planner_serves_what_an_exhaustive_search_serves(
    used: list[Layout], wishes: list[Profile], offers: bool, data: st.DataObject
) -> None:
    gpus = [
        Gpu(f"g{i}", H100, tuple(Lease(s, 9) for s in u.slots), data.draw(layouts(u)) if offers else EMPTY)
        for i, u in enumerate(used)
    ]
    queue = [Demand(i, ((w, 1),), frozenset({"n1"})) for i, w in enumerate(wishes)]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(planner_module, "_MAX_RESERVATIONS", 0)
        found = plan([node("n1", *gpus)], queue)
    assert tuple(i in found.placed for i in range(len(wishes))) == best_served(used, wishes, H100)


def _all_slots(found: ClusterPlan) -> list[Slot]:
    return [s for n in found.nodes.values() for lay in n.layouts.values() for s in lay.slots]


def test_a_thousand_nodes_and_ten_thousand_jobs_are_planned_consistently() -> None:
    nodes = [node(f"n{i}", *(gpu(f"n{i}g{j}", "1g.10gb@0" if j % 3 else "") for j in range(8))) for i in range(1000)]
    pool = frozenset(n.name for n in nodes)
    queue = [Demand(i, ((PLAIN[i % len(PLAIN)], 1),), pool, limit_s=600) for i in range(10_000)]
    found = plan(nodes, queue)
    offered = Counter(s.profile for s in _all_slots(found))
    wanted = Counter(PLAIN[i % len(PLAIN)] for i in found.placed)
    assert all(offered[p] >= n for p, n in wanted.items())
    assert len(found.placed) + len(found.waiting) == 10_000

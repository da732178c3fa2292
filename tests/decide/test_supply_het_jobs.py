"""Heterogeneous jobs: Slurm starts one only if each component can have nodes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Gpu, Lease, Node
from slurm_migbatch.decide.supply.het_jobs import assign
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.examples import examples
from tests.support.supply_gpus import H100, P, layout, slot
from tests.support.supply_world import World

NOW = 1000.0


# -- disjoint nodes --------------------------------------------------------------------------------------------------


@st.composite
def wishes(draw: st.DrawFn) -> list[tuple[int, list[str]]]:
    names = [f"n{i}" for i in range(draw(st.integers(1, 5)))]
    return [
        (draw(st.integers(1, 2)), draw(st.lists(st.sampled_from(names), unique=True)))
        for _ in range(draw(st.integers(1, 3)))
    ]


def possible(wants: Sequence[tuple[int, list[str]]], taken: frozenset[str] = frozenset()) -> bool:
    if not wants:
        return True
    (count, names), *others = wants
    free = [n for n in names if n not in taken]
    return any(possible(others, taken | set(chosen)) for chosen in permutations(free, count))


@settings(max_examples=examples(300), deadline=None)
@given(wants=wishes())
def test_disjoint_nodes_are_found_exactly_when_they_exist(wants: list[tuple[int, list[str]]]) -> None:
    found = assign(wants)
    assert (found is not None) is possible(wants)
    if found is not None:
        assert [len(nodes) for nodes in found] == [count for count, _ in wants]
        assert all(set(nodes) <= set(names) for nodes, (_, names) in zip(found, wants, strict=True))
        chosen = [name for nodes in found for name in nodes]
        assert len(set(chosen)) == len(chosen)


@settings(max_examples=examples(300), deadline=None)
@given(wants=wishes())
def test_candidates_beyond_the_number_of_wanted_nodes_do_not_matter(wants: list[tuple[int, list[str]]]) -> None:
    most = sum(count for count, _ in wants)
    assert (assign(wants) is None) is (assign([(count, names[:most]) for count, names in wants]) is None)


@pytest.mark.parametrize("components", [2, 3, 20])
def test_nodes_are_searched_on_sites_of_thousands_of_nodes(components: int) -> None:
    names = [f"n{number}" for number in range(2000)]
    each = len(names) // components
    assert assign([(each + 1, names)] * components) is None
    found = assign([(each, names)] * (components - 1) + [(each, names[:each])])
    assert found is not None
    assert len({name for nodes in found for name in nodes}) == each * components


def test_first_component_keeps_its_preferred_node_if_the_next_has_a_choice() -> None:
    assert assign([(1, ["n1", "n2"]), (1, ["n1", "n2"])]) == [["n1"], ["n2"]]
    assert assign([(1, ["n1", "n2"]), (1, ["n1"])]) == [["n2"], ["n1"]]
    assert assign([(2, ["n1", "n2", "n3"]), (1, ["n2", "n1"])]) == [["n1", "n3"], ["n2"]]


# -- plans -----------------------------------------------------------------------------------------------------------


def node(name: str, used: str = "", offered: str = "", gpus: int = 1, until: float | None = NOW + 600) -> Node:
    leases = tuple(Lease(slot(word), 900 + i, until) for i, word in enumerate(used.split()))
    rest = tuple(Gpu(f"{name}-{i}", H100) for i in range(1, gpus))
    counts = layout(used).counts()
    return Node(name, (Gpu(f"{name}-0", H100, leases, layout(offered)), *rest), used=counts)


def component(job: int, want: str, pool: str, nodes: int = 1) -> Demand:
    parts = tuple((P(word), 1) for word in want.split())
    return Demand(job, parts, frozenset(pool.split()), nodes=nodes, limit_s=600, apart=1)


def plan(nodes: Sequence[Node], queue: Sequence[Demand], before: ClusterPlan | None = None) -> ClusterPlan:
    return Planner().plan(nodes, queue, NOW, before.reservations if before else ())


def test_components_get_different_nodes_although_one_node_offers_both() -> None:
    nodes = [node("n1", offered="7g.80gb@0"), node("n2", offered="3g.40gb@4 1g.20gb@0")]
    found = plan(nodes, [component(1, "3g.40gb", "n1 n2"), component(2, "1g.20gb", "n1 n2")])
    assert found.placed[1].nodes == ("n2",)
    assert found.placed[2].nodes == ("n1",)
    assert P("1g.20gb") in found.nodes["n1"].offers


def test_components_are_placed_or_reserved_all_or_none() -> None:
    nodes = [node("n1"), node("n2", used="7g.80gb@0")]
    queue = [component(1, "3g.40gb", "n1 n2"), component(2, "7g.80gb", "n1 n2")]
    other = Demand(9, ((P("1g.10gb"), 9),), frozenset({"n1", "n2"}))
    found = plan(nodes, [*queue, other])
    assert not found.placed
    assert {r.job for r in found.reservations} == {1, 2}
    assert {r.places[0][0] for r in found.reservations} == {"n1", "n2"}
    assert {r.at for r in found.reservations} == {NOW + 600}
    assert plan(nodes, [*queue, other], found).reservations == found.reservations
    assert set(found.waiting) == {1, 2, 9}
    assert not found.unplaceable


def test_no_reservation_for_components_that_never_fit_on_separate_nodes() -> None:
    found = plan([node("n1", gpus=4)], [component(1, "3g.40gb", "n1"), component(2, "1g.20gb", "n1")])
    assert not found.placed
    assert not found.reservations
    assert found.unplaceable == {1, 2}


def test_component_is_not_moved_to_the_node_of_another_component() -> None:
    """Job 3 could have a GPU if the component there moved to the other node, but that has the other component."""
    nodes = [node("n1"), node("n2", used="4g.40gb@0")]
    queue = [component(1, "1g.10gb", "n1 n2"), component(2, "1g.10gb", "n1 n2")]
    found = plan(nodes, [*queue, Demand(3, ((P("7g.80gb"), 1),), frozenset({"n1", "n2"}), limit_s=600)])
    assert {found.placed[1].nodes, found.placed[2].nodes} == {("n1",), ("n2",)}
    assert 3 not in found.placed


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_components_are_on_separate_nodes_in_every_plan(data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(data.draw(st.integers(1, 4)))]
    slots = sorted(H100.slots)
    nodes = []
    for name in names:
        used = Layout()
        for _ in range(data.draw(st.integers(0, 3))):
            fits = [s for s in slots if H100.fits(used, s)]
            if fits:
                used = used.add(data.draw(st.sampled_from(fits)))
        nodes.append(Node(name, (Gpu(name, H100, tuple(Lease(s, 9, NOW + 60) for s in used.slots)),), used.counts()))
    queue = []
    for group in range(data.draw(st.integers(1, 3))):
        for i in range(data.draw(st.integers(2, 3))):
            parts = ((data.draw(st.sampled_from(H100.profiles)).profile, 1),) if data.draw(st.integers(0, 5)) else ()
            pool = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1)))
            count = data.draw(st.integers(1, len(pool)))
            queue.append(Demand(group * 10 + i, parts, pool, nodes=count, limit_s=60, apart=group))
    found = plan(nodes, queue)
    placed_on = {job: set(placed.nodes) for job, placed in found.placed.items()}
    reserved_on = {r.job: {name for name, _, _ in r.places} for r in found.reservations}
    for group in {d.apart for d in queue}:
        members = [d for d in queue if d.apart == group and d.parts]
        for places in (placed_on, reserved_on):
            assert len({d.job in places for d in members}) <= 1, "only some components have places"
            if members and members[0].job in places:
                assert [len(places[d.job]) for d in members] == [d.nodes for d in members]
                assert sum(d.nodes for d in members) == len(set().union(*(places[d.job] for d in members)))


# -- from the queue --------------------------------------------------------------------------------------------------

ROW = JobRow(1, partition="gpu", reason="None", gres="gres/mig:2g.20gb:1", eligible=0.0)
NODES = [NodeRow(name, frozenset({"IDLE"}), partitions=("gpu",)) for name in ("n1", "n2")]
PLAIN = NodeRow("plain", frozenset({"IDLE"}), partitions=("gpu",))


def grouped(rows: Sequence[JobRow], nodes: Sequence[NodeRow] = NODES) -> list[tuple[int, int | None]]:
    return [(d.job, d.apart) for d in demands(rows, nodes, {"n1", "n2"}, NOW)]


def test_components_are_queued_together_at_the_place_of_the_last() -> None:
    first, second = replace(ROW, job_id=4, het_job=4), replace(ROW, job_id=5, het_job=4)
    between = replace(ROW, job_id=9)
    assert grouped([second, between, first]) == [(9, None), (4, 4), (5, 4)]


@pytest.mark.parametrize("change", [{"reason": "JobHeldUser"}, {"num_nodes": 3}, {"partition": "other"}])
def test_component_that_cannot_start_holds_back_the_others(change: dict[str, object]) -> None:
    first, second = replace(ROW, job_id=4, het_job=4), replace(ROW, job_id=5, het_job=4)
    assert grouped([first, replace(second, **change)]) == []  # type: ignore[arg-type]
    assert grouped([replace(first, **change), second]) == []  # type: ignore[arg-type]


def test_component_without_slices_takes_a_mig_node_if_no_other_is_up() -> None:
    rows = [replace(ROW, job_id=4, het_job=4, gres=""), replace(ROW, job_id=5, het_job=4)]
    assert grouped(rows) == [(4, 4), (5, 4)]
    assert grouped(rows, [*NODES, PLAIN]) == [(5, 4)]
    assert grouped(rows, [*NODES, replace(PLAIN, states=frozenset({"DOWN"}))]) == [(4, 4), (5, 4)]
    assert grouped([replace(row, gres="") for row in rows]) == []


# -- whole rounds ----------------------------------------------------------------------------------------------------


def test_heterogeneous_job_starts_although_its_profiles_were_not_offered() -> None:
    world = World(nodes=2, gpus=1)
    world.step()
    jobs = world.slurm.submit_het("mig:3g.40gb:1", "mig:1g.20gb:1")
    world.steps(3)
    assert world.running() == set(jobs)
    assert len({node for job in jobs for node in world.slurm.queue[job].nodes}) == 2
    assert not world.nodes.misfits


def test_heterogeneous_job_starts_although_one_node_offered_both_profiles() -> None:
    world = World(nodes=2, gpus=2)
    world.step()
    # n1 gets 3g and 1g.20gb for these pending jobs, and goes on offering both after they have ended
    early = [world.slurm.submit(f"mig:{kind}:1", runs=2) for kind in ("3g.40gb", "1g.20gb")]
    world.steps(5)
    assert not set(early) & set(world.slurm.queue)
    jobs = world.slurm.submit_het("mig:3g.40gb:1", "mig:1g.20gb:1")
    world.steps(3)
    assert world.running() == set(jobs)


def test_first_component_does_not_take_the_only_node_for_the_second() -> None:
    """Both nodes offer 1g, and n1 comes first, but only n1 has room for 3g."""
    world = World(nodes=2, gpus=1)
    world.slurm.set_node("n2", partitions=("gpu", "second"))
    world.step()
    long = [world.slurm.submit(f"mig:{kind}:1", runs=5000, partition="second") for kind in ("4g.40gb", "2g.20gb")]
    world.steps(3)
    assert world.running() == set(long)
    assert all(world.nodes.free(name)[P("1g.10gb")] for name in ("n1", "n2"))
    jobs = world.slurm.submit_het("mig:1g.10gb:1", "mig:3g.40gb:1")
    world.steps(3)
    assert [world.slurm.queue[job].nodes for job in jobs] == [("n2",), ("n1",)]


def test_heterogeneous_job_on_a_one_node_cluster_waits_with_a_reason() -> None:
    world = World(nodes=1, gpus=2)
    world.step()
    jobs = world.slurm.submit_het("mig:3g.40gb:1", "mig:1g.20gb:1")
    other = world.slurm.submit("mig:7g.80gb:1", priority=1)
    world.steps(3)
    assert world.running() == {other}
    for job in jobs:
        assert f"heterogeneous job {jobs[0]}" in world.loop.why(job)
        assert "too few nodes" in world.loop.why(job)


def test_heterogeneous_job_is_not_starved_by_small_jobs() -> None:
    world = World(nodes=2, gpus=1)
    for _ in range(14):
        world.slurm.submit("mig:1g.10gb:1", runs=10, limit=20)
    world.steps(3)
    jobs = world.slurm.submit_het("mig:7g.80gb:1", "mig:4g.40gb:1", limit=20)
    for _ in range(80):
        waiting = sum(r.pending for r in world.slurm.queue.values())
        for _ in range(max(0, 10 - waiting)):
            world.slurm.submit("mig:1g.10gb:1", runs=world.random.uniform(1, 20), limit=20)
        world.step()
        if set(jobs) <= world.running():
            break
    assert set(jobs) <= world.running()
    assert not world.nodes.misfits


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 4), data=st.data())
def test_heterogeneous_jobs_among_others_all_complete(seed: int, nodes: int, data: st.DataObject) -> None:
    world = World(nodes=nodes, gpus=2, seed=seed)
    world.step()
    kinds = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    for _ in range(data.draw(st.integers(1, 6))):
        wants = [f"mig:{world.random.choice(kinds)}:1" for _ in range(world.random.randint(2, nodes))]
        world.slurm.submit_het(*wants, runs=5, priority=world.random.randint(1, 3))
        world.slurm.submit(f"mig:{world.random.choice(kinds)}:1", runs=world.random.uniform(1, 20))
        world.steps(world.random.randrange(3))
    for _ in range(300):
        world.step(2)
        if not world.slurm.queue:
            break
    assert not world.slurm.queue
    assert not world.nodes.misfits


def test_simulated_slurm_starts_components_on_separate_nodes() -> None:
    world = World(nodes=1)
    world.slurm.set_node("n1", gres={"1g.10gb": 2})
    world.slurm.submit_het("mig:1g.10gb:1", "mig:1g.10gb:1")
    assert world.slurm.schedule() == []
    world.slurm.add_node("n2", {"1g.10gb": 1})
    assert [row.nodes for row in world.slurm.schedule()] == [("n1",), ("n2",)]

"""All demands of a kind can be skipped at once, and a plan is the same as if each were looked at."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.by_kind import SHARED, DemandQueue, KindNumbers, Rest
from slurm_migbatch.decide.capacity.demand import DemandBook
from slurm_migbatch.decide.capacity.model import Demand, DemandShape, Gpu, Lease, Node
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.decide.supply.stage import SupplyMemory, SupplySettings, plan_supply
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.changing_site import ChangingSite
from tests.support.examples import examples
from tests.support.supply_gpus import H100, P

NOW = 1_000_000.0
POOLS = [frozenset({"n1"}), frozenset({"n1", "n2"})]
SIZES = [P("1g.10gb"), P("2g.20gb"), P("7g.80gb")]


def wants(rng: random.Random, job: int) -> Demand:
    parts, apart = ((rng.choice(SIZES), rng.choice([1, 1, 1, 2])),), job if rng.random() < 0.05 else None
    return Demand(job, parts, rng.choice(POOLS), limit_s=rng.choice([None, 60]), apart=apart)


def numbered(demands: list[Demand], own: int = 253) -> DemandQueue:
    """The queue with numbers for the first `own` kinds, as a book gives them."""
    numbers, listed = dict[DemandShape, int](), bytearray()
    for demand in demands:
        if demand.apart is None and (demand.kind in numbers or len(numbers) < own):
            listed.append(numbers.setdefault(demand.kind, len(numbers) + 1))
        else:
            listed.append(SHARED)
    return DemandQueue(demands, {demand.kind for demand in demands}, bytes(listed), sum(d.copies for d in demands))


@settings(max_examples=examples(200), deadline=None)
@given(rng=st.randoms(use_true_random=True), own=st.sampled_from([0, 2, 253]))
def test_demands_of_dropped_kinds_are_skipped_and_components_are_not(rng: random.Random, own: int) -> None:
    demands = [wants(rng, job) for job in range(rng.randint(0, 60))]
    dropping = {job for job in range(len(demands)) if rng.random() < 0.2}
    gone, expected = set[DemandShape](), []
    for position, demand in enumerate(demands):
        if demand.apart is not None or demand.kind not in gone:
            expected.append((position, demand))
            if position in dropping:
                gone.add(demand.kind)
    rest, found = Rest(numbered(demands, own)), []
    for position, demand in rest:
        found.append((position, demand))
        if position in dropping:
            rest.drop(position)
    assert found == expected


def test_number_of_a_kind_without_demands_is_given_to_another_kind() -> None:
    numbers = KindNumbers()
    demands = [Demand(count, ((SIZES[0], count),), POOLS[0], copies=2) for count in range(1, 301)]
    first = [numbers.add(demand) for demand in demands]
    own = [number for number in first if number != SHARED]
    assert len(set(own)) == len(own) < 300 == len(numbers.counts)
    assert numbers.add(demands[0]) == first[0]
    numbers.remove(demands[1])
    numbers.remove(demands[0])
    assert numbers.add(Demand(1000, ((SIZES[0], 1),), POOLS[1])) == first[1]
    assert demands[0].kind in numbers.counts and demands[1].kind not in numbers.counts
    assert numbers.copies == 2 * 299 + 1


@settings(max_examples=examples(100), deadline=None)
@given(rng=st.randoms(use_true_random=True), rounds=st.integers(2, 8))
def test_demands_with_one_number_are_of_one_kind(rng: random.Random, rounds: int) -> None:
    site, queue, book = ChangingSite(rng, jobs=20), JobQueue(), DemandBook()
    for _ in range(rounds):
        queue.update(site.queue)
        avoid = {row.job_id: {"n0"} for row in site.queue if rng.random() < rng.choice([0, 0.1])}
        found = book.of(queue, tuple(site.rows.values()), site.facts.keys(), site.now, avoid)
        assert len(found.numbers) == len(found)
        assert found.kinds == {demand.kind for demand in found}
        assert found.copies == sum(demand.copies for demand in found if demand.parts)
        by_number: dict[int, DemandShape] = {}
        for demand, number in zip(found, found.numbers, strict=True):
            if number != SHARED:
                assert demand.apart is None
                assert by_number.setdefault(number, demand.kind) == demand.kind
        for happens in rng.choices([site._submit, site._start, site._end, site._reorder, site._twice, site._node], k=3):
            happens()


@settings(max_examples=examples(100), deadline=None)
@given(rng=st.randoms(use_true_random=True), own=st.sampled_from([1, 253]))
def test_plan_is_the_same_as_without_numbers(rng: random.Random, own: int) -> None:
    nodes = []
    for name in ("n1", "n2"):
        used = plan_free(H100, EMPTY, rng.choices(SIZES, k=rng.randint(0, 4))).slots
        leases = tuple(Lease(slot, 900 + i, NOW + rng.choice([60, 600])) for i, slot in enumerate(used))
        nodes.append(Node(name, (Gpu(f"GPU-{name}", H100, leases),)))
    demands = [wants(rng, job) for job in range(rng.randint(0, 60))]
    alone = Planner().plan(nodes, demands, NOW)
    assert Planner().plan(nodes, numbered(demands, own), NOW) == alone
    placed = {job: found.copies for job, found in alone.placed.items()}
    assert alone.waiting == tuple(demand.job for demand in demands if placed.get(demand.job, 0) < demand.copies)
    assert alone.waiting_count == len(alone.waiting)


@settings(max_examples=examples(200), deadline=None)
@given(rng=st.randoms(use_true_random=True))
def test_plan_while_nothing_but_the_time_changes_is_the_same_as_a_new_one(rng: random.Random) -> None:
    nodes = []
    for name in ("n1", "n2"):
        gpus = []
        for number in range(rng.randint(1, 9)):
            used = plan_free(H100, EMPTY, rng.choices(SIZES, k=rng.randint(1, 7))).slots
            ends = [rng.choice([None, NOW + rng.choice([50, 300, 5000]) * rng.random()]) for _ in used]
            leases = tuple(Lease(slot, 900 + i, end) for i, (slot, end) in enumerate(zip(used, ends, strict=True)))
            gpus.append(Gpu(f"GPU-{name}-{number}", H100, leases))
        nodes.append(Node(name, tuple(gpus)))
    demands = [wants(rng, job) for job in range(rng.randint(1, 20))]
    planner, now, reservations = Planner(), NOW, ()
    for _ in range(rng.randint(2, 12)):
        fresh = Planner().plan(nodes, demands, now, reservations)
        plan = planner.plan(nodes, demands, now, reservations)
        assert plan == fresh
        assert [found.held_from for found in plan.reservations] == [found.held_from for found in fresh.reservations]
        reservations = plan.reservations
        now += rng.choice([0.0, 1.0, 20.0, 200.0, 1000.0]) * rng.random()


def test_plan_of_a_node_stays_the_same_object_while_it_is_equal() -> None:
    nodes = [Node("n1", (Gpu("GPU-n1", H100),)), Node("n2", (Gpu("GPU-n2", H100),))]
    planner = Planner()
    first = planner.plan(list(nodes), [], NOW)
    for changed in (1, 0, 0, 1):  # the node becomes another object, and what is known of it is computed again
        nodes[changed] = replace(nodes[changed])
        plan = planner.plan(list(nodes), [], NOW, first.reservations)
        assert all(plan.nodes[name] is first.nodes[name] for name in ("n1", "n2"))


def test_standing_plan_ends_when_slots_should_have_ended() -> None:
    gpu = Gpu("GPU-n1", H100, (Lease(plan_free(H100, EMPTY, [P("7g.80gb")]).slots[0], 900, NOW + 60),))
    nodes, demands = [Node("n1", (gpu,))], [Demand(1, ((P("7g.80gb"), 1),), POOLS[0], limit_s=60)]
    planner, plans = Planner(), []
    for now in (NOW, NOW + 1, NOW + 2, NOW + 59, NOW + 61):
        plans.append(planner.plan(nodes, demands, now, plans[-1].reservations if plans else ()))
    assert plans[1] is plans[2] is plans[3]
    assert [plan.reservations[0].at for plan in plans[3:]] == [NOW + 60, NOW + 61]


def test_plan_looks_at_few_of_many_equal_jobs() -> None:
    nodes = [Node("n1", (Gpu("GPU-n1", H100),))]
    demands = [Demand(job, ((P("7g.80gb"), 1),), POOLS[0], limit_s=60) for job in range(5000)]

    class Counted(DemandQueue):
        looked_at = 0

        def __getitem__(self, position):  # type: ignore[no-untyped-def]
            Counted.looked_at += 1
            return super().__getitem__(position)

    plan = Planner().plan(nodes, Counted(demands, {demands[0].kind}, bytes([1]) * 5000, 5000), NOW)
    assert list(plan.placed) == [0] and [reservation.job for reservation in plan.reservations] == [1]
    assert plan.waiting_count == 4999 and Counted.looked_at < 10


def test_same_queue_again_is_planned_like_a_new_one() -> None:
    site, memory, options = ChangingSite(random.Random(3), jobs=30), SupplyMemory(), SupplySettings()
    plan_supply(site.snapshot(), memory, options)
    site.step(plan_supply(site.snapshot(), memory, options))
    snapshot = site.snapshot()
    memory.queue.update(snapshot.jobs)
    version = memory.queue.version
    fresh = plan_supply(snapshot, SupplyMemory(memory.reservations, dict(memory.standing)), options)
    assert plan_supply(snapshot, memory, options).plan == fresh.plan
    assert plan_supply(snapshot, memory, options).plan.nodes == fresh.plan.nodes
    assert memory.queue.version == version


def test_rows_of_arrays_and_pipelines_are_listed_in_the_order_of_the_queue() -> None:
    rows = [
        JobRow(3, array_job=3, array_task="1-4", tasks=4),
        JobRow(9, comment="migbatch: pipeline=p"),
        JobRow(1, array_job=1, array_task="2", state="RUNNING"),
        JobRow(2, comment="migbatch: model=x pipeline=p [mig:1g.10gb:1#abc]", state="RUNNING"),
    ]
    queue = JobQueue.of([JobRow(7), *rows])
    assert queue.of_arrays() == [rows[0], rows[2]] and queue.of_pipelines() == [rows[1], rows[3]]
    assert not queue.any_decided(), "only pending jobs count"
    queue.update([JobRow(8, comment="[mig:1g.10gb:1#abc]"), rows[2]])
    assert queue.of_arrays() == [rows[2]] and queue.of_pipelines() == [] and queue.any_decided()
    queue.update([rows[2]])
    assert not queue.any_decided()


def test_node_that_has_changed_is_seen_although_the_queue_is_the_same() -> None:
    site, memory = ChangingSite(random.Random(5), jobs=30), SupplyMemory()
    snapshot = site.snapshot()
    first = plan_supply(snapshot, memory, SupplySettings())
    name = next(iter(first.nodes))
    site.rows[name] = NodeRow(name, frozenset({"DRAIN"}), {"none": 14}, {}, site.rows[name].partitions)
    nodes = tuple(site.rows.values())
    again = plan_supply(replace(snapshot, nodes=nodes), memory, SupplySettings())
    assert again.plan.nodes == plan_supply(replace(snapshot, nodes=nodes), SupplyMemory(), SupplySettings()).plan.nodes
    assert not again.plan.nodes[name].open

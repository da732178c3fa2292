"""Loans in supply: they get what other jobs leave, cost them nothing, and a node's spare `loan` count stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import DemandBook
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Gpu, Lease, Node
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.examples import examples
from tests.support.supply_gpus import H100, P, layout, slot
from tests.support.supply_world import World

NOW = 1000.0
PLAIN = [info.profile.gres_type for info in H100.profiles if not info.profile.suffix]


def want(job: int, profile: str, *, loan: bool = False, copies: int = 1) -> Demand:
    return Demand(job, ((P(profile), 1),), frozenset({"n1"}), copies=copies, limit_s=600.0, loan=loan)


def gpu(name: str, used: str = "", offered: str = "") -> Gpu:
    leases = tuple(Lease(slot(word), 900 + i, NOW + 600) for i, word in enumerate(used.split()))
    return Gpu(name, H100, leases, layout(offered))


def plan(gpus: Sequence[Gpu], wanted: Sequence[Demand]) -> ClusterPlan:
    return Planner().plan([Node("n1", tuple(gpus))], wanted, NOW)


def test_loan_is_placed_last_whatever_its_priority() -> None:
    found = plan([gpu("a")], [want(1, "4g.40gb", loan=True), want(2, "4g.40gb")])
    assert set(found.placed) == {2} and found.waiting == (1,)
    both = plan([gpu("a")], [want(1, "3g.40gb", loan=True), want(2, "4g.40gb")])
    assert set(both.placed) == {1, 2}


def test_nothing_is_reserved_for_a_loan() -> None:
    found = plan([gpu("a", used="1g.10gb@0")], [want(1, "7g.80gb", loan=True), want(2, "3g.40gb")])
    assert found.reservations == () and found.waiting == (1,) and set(found.placed) == {2}


def test_loan_is_not_placed_on_reserved_slots() -> None:
    found = plan([gpu("a", used="1g.10gb@0")], [want(1, "7g.80gb"), want(2, "1g.10gb", loan=True)])
    assert [reservation.job for reservation in found.reservations] == [1] and found.waiting == (1, 2)


def test_claims_of_others_are_not_moved_for_a_loan() -> None:
    used = "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3"
    gpus = [gpu("a", used=used, offered="1g.10gb@4"), gpu("b", used=f"{used} 1g.10gb@4")]
    # the small job takes the slot that is offered; for an ordinary large one it is moved to the other GPU
    assert set(plan(gpus, [want(1, "1g.10gb"), want(2, "3g.40gb")]).placed) == {1, 2}
    assert set(plan(gpus, [want(1, "1g.10gb"), want(2, "3g.40gb", loan=True)]).placed) == {1}


@settings(max_examples=examples(200), deadline=None)
@given(
    wanted=st.lists(st.tuples(st.sampled_from(PLAIN), st.booleans(), st.integers(1, 3)), max_size=8),
    used=st.sampled_from(["", "1g.10gb@0", "3g.40gb@4", "2g.20gb@0 2g.20gb@4"]),
    gpus=st.integers(1, 2),
)
def test_loans_do_not_change_the_plan_for_other_jobs(wanted: list[tuple[str, bool, int]], used: str, gpus: int) -> None:
    requests = [want(number, name, loan=loan, copies=copies) for number, (name, loan, copies) in enumerate(wanted)]
    machines = [gpu(f"g{number}", used) for number in range(gpus)]
    lent, alone = plan(machines, requests), plan(machines, [demand for demand in requests if not demand.loan])
    loans = {demand.job for demand in requests if demand.loan}
    assert {job: placed for job, placed in lent.placed.items() if job not in loans} == dict(alone.placed)
    assert lent.reservations == alone.reservations
    assert tuple(job for job in lent.waiting if job not in loans) == alone.waiting


def test_loan_predicate_is_applied_to_each_row() -> None:
    rows = [
        JobRow(1, partition="train", gres="gres/mig:2g.20gb:1", comment="loan"),
        JobRow(2, partition="train", gres="gres/mig:2g.20gb:1"),
        JobRow(3, partition="train", gres="gres/mig:loan:1", comment="loan"),
        JobRow(4, partition="train", gres="gres:mig:loan:2,gres:mig:2g.20gb:0", comment="loan"),
    ]
    nodes = [NodeRow("n1", frozenset({"IDLE"}), partitions=("train",))]
    found = DemandBook().of(JobQueue.of(rows), nodes, {"n1"}, NOW, loan=lambda row: row.comment == "loan")
    assert [(demand.job, demand.loan) for demand in found] == [(1, True), (2, False)]


def lending(world: World) -> World:
    """The same world, in which elastic jobs of the usual partition are loans."""
    world.settings = SupplySettings(stuck_s=30, lending=frozenset({"gpu"}))
    world.new_loop()
    return world


def test_released_loan_gets_a_slot_or_waits_while_the_site_is_full() -> None:
    world = lending(World(gpus=1))
    world.step()
    first = world.slurm.submit("gres/mig:7g.80gb:1", comment="[mig:7g.80gb:1#loan0001]", priority=5000, runs=5)
    world.steps(2)
    assert first in world.running()
    second = world.slurm.submit("gres/mig:3g.40gb:1", comment="[mig:3g.40gb:1#loan0002]")
    waits = world.slurm.submit("gres/mig:loan:1", comment="[mig:loan:1#loan0003]", reason="ReqNodeNotAvail")
    report = world.step()
    assert report.reservations == () and "no other job needs" in world.loop.why(second)
    assert "waits for a loan" in world.loop.why(waits)
    world.steps(8)
    assert second in world.running() and not world.nodes.misfits


def test_spare_loan_count_of_a_node_is_not_changed() -> None:
    world = World(nodes=1, gpus=1)
    machine = world.slurm.machines["n1"]
    world.slurm.set_node("n1", conf={**machine.conf, "loan": 1}, gres={**machine.gres, "loan": 1})
    world.steps(2)
    job = world.slurm.submit("gres:mig:7g.80gb:1")
    world.steps(2)
    assert job in world.running()
    assert machine.gres["loan"] == 1 and sum(machine.gres.values()) == sum(machine.conf.values())
    assert all("mig:loan:1" in text for update in world.slurm.updates for text in update.values())
    world.slurm.calls.clear()
    world.steps(3)
    assert set(world.slurm.calls) == {"jobs", "nodes"}
    world.slurm.reconfigure()
    world.steps(2)
    assert "INVAL" not in machine.states and machine.gres["loan"] == 1


def test_demand_is_not_a_loan_by_default() -> None:
    assert {field.name: field.default for field in dataclasses.fields(Demand)}["loan"] is False

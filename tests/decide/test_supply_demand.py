"""Which jobs of the queue count as demand, and on which nodes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from slurm_migbatch.daemon.audit import audit
from slurm_migbatch.decide.capacity import nodepools
from slurm_migbatch.decide.capacity.demand import DemandBook, could_run, demands, profiles, slices
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.slurm.client import UNREAD, WHOLE, JobRow, NodeRow
from tests.support.supply_gpus import P

NOW = 1000.0
ROW = JobRow(1, partition="gpu", reason="None", gres="gres/mig:2g.20gb:1", eligible=0.0)
NODES = [
    NodeRow("n1", frozenset({"IDLE"}), partitions=("gpu",), features=frozenset({"h100", "nvlink"})),
    NodeRow("n2", frozenset({"IDLE"}), partitions=("gpu", "train"), features=frozenset({"a100"})),
    NodeRow("plain", frozenset({"IDLE"}), partitions=("gpu",)),
]
SUPPLY = {"n1", "n2"}


@pytest.mark.parametrize(
    ("reason", "runs"),
    [
        ("None", True),
        ("Resources", True),
        ("Priority", True),
        ("ReqNodeNotAvail, UnavailableNodes:migcatalog", True),
        ("ReqNodeNotAvail,_UnavailableNodes:migcatalog", True),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions", True),
        ("No suitable topology unit found", True),  # 26.05
        ("Insufficient_resources_in_topology_unit", True),
        ("Required nodes lack available resources", True),
        ("BeginTime", False),
        ("Dependency", False),
        ("DependencyNeverSatisfied", False),
        ("JobHeldUser", False),
        ("JobHeldAdmin", False),
        ("AssocGrpGRES", False),
        ("AssocGrpCpuLimit", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("JobArrayTaskLimit", False),
        ("Licenses", False),
        ("Reservation", False),
        ("PartitionDown", False),
        ("PartitionTimeLimit", False),
        ("BadConstraints", False),
        ("launch_failed_requeued_held", False),
        ("SomethingNew", False),
    ],
)
def test_pending_reason_decides_whether_a_job_could_run(reason: str, runs: bool) -> None:
    assert could_run(replace(ROW, reason=reason, eligible=NOW + 600), NOW) is runs


def test_job_with_dependencies_counts_once_they_have_ended() -> None:
    waiting = replace(ROW, reason="None", after=(7,), eligible=None)
    assert not could_run(waiting, NOW)
    assert could_run(replace(waiting, eligible=NOW), NOW) and could_run(replace(waiting, after=()), NOW)
    assert not demands([waiting], NODES, SUPPLY, NOW) and demands([replace(waiting, after=())], NODES, SUPPLY, NOW)


def test_job_with_a_begin_time_counts_once_it_is_near() -> None:
    assert could_run(replace(ROW, reason="BeginTime", eligible=NOW + 3), NOW)
    assert not could_run(replace(ROW, reason="BeginTime", eligible=NOW + 60), NOW)
    assert not could_run(replace(ROW, state="RUNNING"), NOW)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gres:mig:2g.20gb:1,gres:mig:1g.10gb.me:3", {P("2g.20gb"): 1, P("1g.10gb+me"): 3}),
        ("gres/mig:1g.10gb:2,gres/gpu:h100:1", {P("1g.10gb"): 2}),
        ("mig:auto:1,mig:none:4,mig:2", {}),
        ("mig:1g.10gb:0", {}),
        ("", {}),
        ("mig:a:b:c:d", {}),
    ],
)
def test_slices_are_parsed_from_gres(text: str, found: dict[object, int]) -> None:
    assert slices(text) == found


def test_profiles_leave_out_the_filler() -> None:
    assert profiles({"1g.10gb": 2, "none": 7, "7g.80gb": 0}) == {P("1g.10gb"): 2}


def pools(**change: object) -> list[frozenset[str]]:
    return [d.pool for d in demands([replace(ROW, **change)], NODES, SUPPLY, NOW)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "pool"),
    [
        ({}, {"n1", "n2"}),
        ({"partition": "train"}, {"n2"}),
        ({"partition": "train,gpu"}, {"n1", "n2"}),
        ({"requested_nodes": "n[1]"}, {"n1"}),
        ({"features": "h100"}, {"n1"}),
        ({"features": "h100&nvlink"}, {"n1"}),
        ({"features": "h100|a100"}, {"n1", "n2"}),
        ({"features": "[h100*1&a100*1]"}, {"n1", "n2"}),
    ],
)
def test_pool_is_the_nodes_on_which_a_job_may_run(change: dict[str, object], pool: set[str]) -> None:
    assert pools(**change) == [pool]


class Counted(frozenset[str]):
    """Features of a node that count how often they are compared with a constraint or read."""

    looks = 0

    def isdisjoint(self, other: Iterable[object]) -> bool:
        Counted.looks += 1
        return super().isdisjoint(other)

    def __iter__(self) -> Iterator[str]:
        Counted.looks += 1
        return super().__iter__()


def test_nodes_are_not_looked_at_again_for_each_of_many_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may name other nodes for each of thousands of jobs, and rounds must not take longer for everybody."""
    monkeypatch.setattr(nodepools, "_MOST_POOLS", 10)
    monkeypatch.setattr(Counted, "looks", 0)
    names = [f"n{number}" for number in range(20)]
    nodes = [
        NodeRow(name, frozenset({"IDLE"}), partitions=("gpu",), features=Counted({name, "h100"})) for name in names
    ]
    pairs = [(one, two) for one in names for two in names if one < two]
    jobs = [replace(ROW, job_id=job, features="|".join(pair)) for job, pair in enumerate(pairs, 1)]
    queue, book, added = JobQueue(), DemandBook(), replace(ROW, job_id=1000, features="n1|n2|n3")
    for listed in (jobs, jobs, [*jobs, added]):
        queue.update(listed)
        found = book.of(queue, nodes, set(names), NOW)
        assert [each.pool for each in found[: len(pairs)]] == [frozenset(pair) for pair in pairs]
        assert Counted.looks <= 2 * len(nodes)
    assert found[-1].pool == {"n1", "n2", "n3"}


@pytest.mark.parametrize("change", [{"partition": "other"}, {"features": "h100&a100"}, {"num_nodes": 3}, {"gres": ""}])
def test_job_that_can_run_nowhere_is_no_demand(change: dict[str, object]) -> None:
    assert pools(**change) == []


@pytest.mark.parametrize(
    ("asked", "pool"),
    [
        ("gres/mig:2g.20gb:1,gres/fpga:1", {"n1", "n2"}),
        ("gres:fpga:2,gres:mig:2g.20gb:1", {"n1"}),
        ("gres/mig:2g.20gb:1,gres/fpga:u280", {"n1"}),
        ("gres/mig:2g.20gb:1,gres/fpga:u280:1,gres/fpga:u50:1", {"n1"}),
        ("gres/mig:2g.20gb:1,gres/fpga:1,gres/fpga:1", {"n1"}),
        ("gres/mig:2g.20gb:1,gres/nic:1G", {"n2"}),
        ("gres/mig:2g.20gb:1,gres/gpu:0", {"n1", "n2"}),
        ("gres/mig:2g.20gb:1,gres/gpu:a b:0", {"n1", "n2"}),
        ("gres/mig:2g.20gb:1", {"n1", "n2"}),
        ("gres/mig:2g.20gb:1,gres/fpga:3", set()),
        ("gres/mig:2g.20gb:1,gres/vpu:1", set()),
    ],
)
def test_a_job_runs_only_on_nodes_that_have_its_other_gres(asked: str, pool: set[str]) -> None:
    """An offer elsewhere would never be taken."""
    gres = {"n1": "gpu:h100:4,fpga:u280:1,fpga:u50:1", "n2": "fpga:1,nic:4294967296"}
    nodes = [replace(node, other_gres=gres.get(node.name, "")) for node in NODES]
    found = demands([replace(ROW, gres=asked)], nodes, SUPPLY, NOW)
    assert [set(demand.pool) for demand in found] == ([pool] if pool else [])


def test_array_demands_no_more_tasks_than_its_throttle_lets_run() -> None:
    pending = replace(ROW, job_id=5, array_job=5, array_task="4-99%6", tasks=96, throttle=6)
    running = [replace(ROW, job_id=6 + i, array_job=5, array_task=str(i), state="RUNNING") for i in range(4)]
    assert [d.copies for d in demands([pending, *running], NODES, SUPPLY, NOW)] == [2]
    full = [*running, *(replace(r, job_id=r.job_id + 10) for r in running)]
    assert demands([pending, *full], NODES, SUPPLY, NOW) == []


def test_demands_keep_queue_order_and_leave_out_nodes_to_avoid() -> None:
    rows = [replace(ROW, job_id=9), replace(ROW, job_id=3)]
    found = DemandBook().of(JobQueue.of(rows), NODES, SUPPLY, NOW, {3: {"n1"}})
    assert [(d.job, d.pool) for d in found] == [(9, {"n1", "n2"}), (3, {"n2"})]


@pytest.mark.parametrize(("listed", "pool"), [("n1", {"n2"}), ("n[2-3],plain", {"n1"}), ("n7", {"n1", "n2"})])
def test_nodes_excluded_in_the_comment_are_not_in_the_pool(listed: str, pool: set[str]) -> None:
    for marker in ("[mig:2g.20gb:1#7fq3k]", "[mig:2g.20gb:1#loan7fq3k]", "[mig:loan:1#loan7fq3k]"):
        assert pools(comment=f"migbatch: mem=12gib [mig-exclude:{listed}] {marker}") == [pool]
    assert pools(comment=f"[mig-exclude:n[1-2]] {marker}") == []


def test_excluded_nodes_that_do_not_exist_take_no_memory() -> None:
    """A user can write a thousand others into the comment of each job."""
    comment = "[mig-exclude:n{}x[1-1000]] [mig:2g.20gb:1#7fq3k]"
    queue = JobQueue.of([replace(ROW, job_id=number, comment=comment.format(number)) for number in range(1, 65)])
    book = DemandBook()
    tracemalloc.start()
    try:
        assert len(book.of(queue, NODES, SUPPLY, NOW)) == 64
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


def test_audit_reports_surplus_slices_but_not_late_events() -> None:
    from tests.support.supply_gpus import H100, slot

    def held(*leases: tuple[str, int]) -> dict[str, NodeFacts]:
        return {"n1": NodeFacts((GpuFacts("a", H100, tuple((slot(text), (job, 0)) for text, job in leases)),))}

    running = replace(ROW, state="RUNNING", nodes=("n1",))
    assert audit(held(("2g.20gb@0", 1)), [running]) == []
    assert audit(held(("2g.20gb@0", 1), ("2g.20gb@2", 1)), [running])[0].surplus == {P("2g.20gb"): 1}
    assert audit(held(("3g.40gb@0", 1)), [running])[0].surplus == {P("3g.40gb"): 1}
    assert audit(held(("3g.40gb@0", 77)), [running]) == []
    assert audit(held(("3g.40gb@0", 1)), [replace(running, restarts=1)]) == [], "its previous run on another slice"
    assert audit(held(("3g.40gb@0", 1)), [replace(running, state="COMPLETING")])
    assert audit(held(("3g.40gb@0", 1)), [replace(running, state="COMPLETED")]) == []
    assert audit(held(("3g.40gb@0", 1)), [JobRow(1, state=UNREAD)]) == []
    assert audit(held(("7g.80gb@0", 1)), [replace(running, nodes=("n2",))]) == [], (
        "a node whose report alone says that it runs there"
    )
    odd = replace(running, gres=f"{running.gres},gres:gpu:a\x1fb:0")
    assert audit(held(("2g.20gb@0", 1)), [odd]) == []
    for unread in ("gres/gpu:0,mig:3g.40gb:1", "mig:3g.40gb:1,gres/gpu:0", "gres:gpu:0,gres/mig:3g.40gb:1"):
        job = replace(running, gres=unread)
        assert audit(held(("3g.40gb@0", 1)), [job])[0].surplus == {P("3g.40gb"): 1}, "Slurm skips it"
    assert audit(held(("3g.40gb@0", 1)), [odd])[0].surplus == {P("3g.40gb"): 1}


def test_a_job_on_one_node_can_use_only_nodes_with_enough_cpus_if_there_are_any() -> None:
    nodes = [replace(NODES[0], cpus=8), replace(NODES[1], cpus=64)]
    pools = {
        (cpus, count): demands([replace(ROW, cpus=cpus, num_nodes=count)], nodes, SUPPLY, NOW)[0].pool
        for cpus, count in [(8, 1), (9, 1), (65, 1), (40, 2)]
    }
    assert pools == {(8, 1): SUPPLY, (9, 1): {"n2"}, (65, 1): SUPPLY, (40, 2): SUPPLY}


def test_a_job_can_use_only_nodes_with_the_memory_that_it_requests_on_each() -> None:
    nodes = [replace(NODES[0], memory=250_000), replace(NODES[1], memory=500_000)]
    pools = {
        (memory, count): demands([replace(ROW, memory_per_node=memory, num_nodes=count)], nodes, SUPPLY, NOW)[0].pool
        for memory, count in [(250_000, 1), (250_001, 1), (WHOLE, 1), (250_001, 2)]
    }
    assert pools == {(250_000, 1): SUPPLY, (250_001, 1): {"n2"}, (WHOLE, 1): SUPPLY, (250_001, 2): SUPPLY}

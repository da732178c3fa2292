"""Slices in use that are not counted, because Slurm would keep the node free for the next job that wants one."""

from __future__ import annotations

from collections import Counter

import pytest

from slurm_migbatch.decide.capacity.model import Demand, Gpu, Lease, Node
from slurm_migbatch.decide.supply.planner import NOTHING_MOVES, Moving, Planner
from slurm_migbatch.mig.profile import Profile
from tests.support.supply_gpus import H100, P, slot
from tests.support.supply_world import World

NOW = 1000.0


def want(job: int, name: str, limit_s: float | None = 3600.0, pool: str = "n1", count: int = 1) -> Demand:
    return Demand(job, ((P(name), count),), frozenset(pool.split()), limit_s=limit_s)


def hidden(
    *demands: Demand, until: float | None = NOW + 600, moving: Moving = NOTHING_MOVES, window_s: float = 86_400.0
) -> dict[Profile, int]:
    """Return what is not counted on a node with 4g.40gb in use on one of two GPUs, and 3g.40gb on the other."""
    leases = [(Lease(slot("4g.40gb@0"), 1, until),), (Lease(slot("3g.40gb@0"), 2, until),)]
    gpus = tuple(Gpu(uuid, H100, of) for uuid, of in zip("ab", leases, strict=True))
    used = Counter({P("4g.40gb"): 1, P("3g.40gb"): 1})
    plan = Planner().plan([Node("n1", gpus, used=used)], demands, NOW, moving=moving, window_s=window_s)
    return dict(plan.nodes["n1"].held_back)


def test_slices_in_use_are_not_counted_while_slurm_would_start_no_longer_job_beside_them() -> None:
    assert hidden(want(10, "4g.40gb"), want(11, "2g.20gb")) == {P("4g.40gb"): 1}
    assert hidden(want(10, "4g.40gb"), want(11, "2g.20gb", limit_s=None)) == {P("4g.40gb"): 1}


@pytest.mark.parametrize(
    ("demands", "until"),
    [
        ([want(10, "4g.40gb"), want(11, "2g.20gb", limit_s=300)], NOW + 600),  # ends before the planned start
        ([want(11, "2g.20gb"), want(10, "4g.40gb")], NOW + 600),  # Slurm starts it before it plans
        ([want(10, "4g.40gb")], NOW + 600),
        ([want(11, "2g.20gb")], NOW + 600),
        ([want(10, "4g.40gb", pool="n2"), want(11, "2g.20gb")], NOW + 600),
        ([want(10, "4g.40gb"), want(11, "2g.20gb", None)], None),  # without a time limit Slurm plans no start
        ([want(10, "4g.40gb"), want(11, "2g.20gb", None)], NOW + 86_401),  # nor beyond bf_window
        ([want(10, "4g.40gb"), want(12, "4g.40gb", count=2), want(11, "2g.20gb")], NOW + 600),  # planned by Slurm
    ],
)
def test_slices_in_use_are_counted_otherwise(demands: list[Demand], until: float | None) -> None:
    assert hidden(*demands, until=until) == {}


def test_slices_are_counted_or_not_by_the_cluster_s_own_backfill_window() -> None:
    jobs, days = (want(10, "4g.40gb"), want(11, "2g.20gb", None)), 86_400.0
    assert hidden(*jobs, until=NOW + 5 * days, window_s=7 * days) == {P("4g.40gb"): 1}
    assert hidden(*jobs, until=NOW + 0.5 * days, window_s=0.4 * days) == {}
    assert hidden(*jobs, window_s=0.0) == {}, "Slurm does not backfill"


@pytest.mark.parametrize(("movable", "nodes"), [(0, ["n1", "n2", "n3"]), (1, ["n2", "n3"]), (3, []), (9, [])])
def test_as_many_nodes_as_training_jobs_may_be_moved_are_left_as_slurm_keeps_them(
    movable: int, nodes: list[str]
) -> None:
    names, lease = ["n1", "n2", "n3"], Lease(slot("4g.40gb@0"), 1, NOW + 600)
    cluster = [Node(name, (Gpu(name, H100, (lease,)),), used=Counter({P("4g.40gb"): 1})) for name in names]
    demands = [want(10, "4g.40gb", pool="n1 n2 n3"), *(want(11 + n, "2g.20gb", pool=names[n]) for n in range(3))]
    plan = Planner().plan(cluster, demands, NOW, moving=Moving(movable=movable))
    assert [name for name in names if plan.nodes[name].held_back] == nodes


def test_job_starts_in_free_space_although_slurm_plans_others_on_every_node() -> None:
    world = World(nodes=2, gpus=2)
    running = [world.slurm.submit("mig:4g.40gb:1", runs=400, limit=600) for _ in range(4)]
    world.steps(5)
    assert world.running() == set(running)
    waiting = [world.slurm.submit("mig:4g.40gb:1", runs=400, limit=600) for _ in range(4)]
    world.steps(3)
    small = [world.slurm.submit("mig:2g.20gb:1", runs=2000, limit=3000) for _ in range(4)]
    world.steps(10)
    assert world.running() == {*running, *small}
    world.steps(390)
    assert world.running() == {*waiting, *small}, "the next jobs start as the first ones end"
    assert not world.nodes.misfits

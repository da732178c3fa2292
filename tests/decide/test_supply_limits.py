"""One user's jobs of several slices in many combinations cost a plan no more than a hundred do."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.decide.explain import why_not_started
from slurm_migbatch.decide.supply.limits import MOST_COMBINATIONS, within_limits
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from tests.support.supply_gpus import P
from tests.support.supply_world import World

POOL = frozenset({"n1"})
MOST = MOST_COMBINATIONS
ONE, TWO = P("1g.10gb"), P("2g.20gb")


def wants(job: int, *counts: tuple[Profile, int], apart: int | None = None) -> Demand:
    return Demand(job, counts, POOL, apart=apart)


def rows(*users: tuple[int, Iterable[Demand]]) -> dict[int, JobRow]:
    return {demand.job: JobRow(demand.job, uid=uid) for uid, demands in users for demand in demands}


def many(first: int, kinds: int = MOST + 50) -> list[Demand]:
    return [wants(first + i, (ONE, 2 + i)) for i in range(kinds)]


def test_further_combinations_of_a_user_are_put_off_and_those_of_others_are_not() -> None:
    hers, his = many(1), [wants(1000, (ONE, 500), (TWO, 1)), wants(1001, (TWO, 3))]
    planned, put_off = within_limits([*hers, *his], rows((1, hers), (2, his)))
    assert planned == [*hers[:MOST], *his]
    assert put_off == hers[MOST:]


def test_equal_jobs_and_jobs_of_one_slice_are_never_put_off() -> None:
    different, equal = many(1), [wants(1000 + i, (ONE, 2)) for i in range(50)]
    single = [Demand(2000 + i, ((ONE, 1),), frozenset({"n1", f"m{i}"})) for i in range(300)]
    planned, put_off = within_limits([*different, *equal, *single], rows((1, [*different, *equal, *single])))
    assert planned == [*different[:MOST], *equal, *single]
    assert put_off == different[MOST:]


def test_components_of_a_heterogeneous_job_are_planned_or_put_off_together() -> None:
    jobs = [[wants(10 * i + k, (ONE, 1 + i), (TWO, k + 1), apart=10 * i) for k in range(3)] for i in range(1, 60)]
    large = [wants(10_000 + k, (ONE, 1), (TWO, 100 + k), apart=10_000) for k in range(MOST + 20)]
    parts = [demand for job in jobs for demand in job]
    planned, put_off = within_limits([*large, *parts], rows((1, [*large, *parts])))
    assert (planned, put_off) == (large, parts)
    planned, put_off = within_limits(parts, rows((1, parts)))
    assert [*planned, *put_off] == parts
    assert len(planned) == 3 * -(-MOST // 3)


def test_short_queues_are_returned_as_they_are() -> None:
    demands = many(1, MOST)
    assert within_limits(demands, {}) == (demands, ())
    equal = demands[:3] * MOST
    assert within_limits(equal, {})[0] is equal


def test_job_that_is_put_off_says_so_and_starts_later() -> None:
    world = World(nodes=1, gpus=8)
    kinds = [(ones, twos) for ones in range(1, 30) for twos in range(1, 14)][: MOST + 3]
    for ones, twos in kinds:
        world.slurm.submit(f"gres/mig:1g.10gb:{ones},gres/mig:2g.20gb:{twos}", runs=5.0)
    report = world.step()
    last = max(world.slurm.jobs(), key=lambda row: row.job_id)
    decision = world.loop.decision
    assert decision is not None
    assert f"{MOST} other combinations" in why_not_started(last.job_id, last, decision.supply, world.clock.time())
    assert (report.pending, report.waiting) == (len(kinds), len(kinds) - len(decision.supply.plan.placed))
    for _ in range(2000):
        world.step()
        if not any(row.pending for row in world.slurm.jobs()):
            break
    assert not any(row.pending for row in world.slurm.jobs())

"""However many small jobs keep coming, large jobs start, in Slurm's order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.supply_world import World

LIMIT = 40  # seconds of every small job's time limit


def flood(world: World, seconds: int, large: list[int], keep: int = 12) -> dict[int, float]:
    """Keep `keep` small jobs pending at all times; returns when each of `large` started, in seconds from now."""
    begun = world.clock.time()
    started: dict[int, float] = {}
    for _ in range(seconds):
        waiting = sum(r.pending for r in world.slurm.queue.values())
        for _ in range(max(0, keep - waiting)):
            small = world.random.choice(["1g.10gb", "1g.10gb", "1g.20gb", "2g.20gb"])
            world.slurm.submit(f"mig:{small}:1", runs=world.random.uniform(1, LIMIT), limit=LIMIT)
        world.step()
        for job in large:
            if job in world.running():
                started.setdefault(job, world.clock.time() - begun)
        if len(started) == len(large):
            break
    return started


@pytest.mark.parametrize("want", ["mig:7g.80gb:1", "mig:4g.40gb:2", "mig:3g.40gb:3", "mig:7g.80gb:2", "mig:1g.10gb:9"])
def test_large_job_waits_no_longer_than_the_time_limits_of_earlier_jobs(want: str) -> None:
    world = World(gpus=2)
    flood(world, 30, [-1])
    job = world.slurm.submit(want, limit=LIMIT)
    started = flood(world, 200, [job])
    assert job in started
    # the jobs that ran or were about to run when it was submitted, and those ahead of it in the queue
    assert started[job] <= 3 * LIMIT
    assert not world.nodes.misfits


def test_large_job_is_not_reserved_the_slice_of_a_suspended_job() -> None:
    """Slurm moves the end of a suspended job only when it is resumed: it is over soon, and the job holds its slice."""
    world = World(gpus=2)
    suspended = world.slurm.submit("mig:1g.10gb:1", runs=10**6, limit=LIMIT)
    world.steps(5)
    assert suspended in world.running()
    world.slurm.queue[suspended] = replace(world.slurm.queue[suspended], state="SUSPENDED")
    flood(world, 2 * LIMIT, [-1])
    job = world.slurm.submit("mig:7g.80gb:1", limit=LIMIT)
    started = flood(world, 200, [job])
    assert world.slurm.queue[suspended].end < world.clock.time()
    assert started[job] <= 3 * LIMIT


def test_a_job_on_two_nodes_is_not_starved() -> None:
    world = World(nodes=3, gpus=1)
    flood(world, 30, [-1])
    job = world.slurm.submit("mig:7g.80gb:1", num_nodes=2, limit=LIMIT)
    assert job in flood(world, 200, [job])
    assert not world.nodes.misfits


def test_no_slices_are_offered_to_jobs_on_a_node_that_has_too_few_cpus_for_them() -> None:
    world = World(nodes=2)
    world.slurm.machines["n1"].cpus = 8
    world.step()
    large = [world.slurm.submit("mig:7g.80gb:1", runs=1000, limit=1000, cpus=32) for _ in range(12)]
    small = world.slurm.submit("mig:2g.20gb:1", cpus=2)
    world.steps(10)
    assert world.running() == {*large[:2], small}


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_large_jobs_of_equal_priority_start_in_order(seed: int) -> None:
    world = World(gpus=2, seed=seed)
    flood(world, 20, [-1])
    large = [world.slurm.submit("mig:7g.80gb:1", runs=10, limit=LIMIT) for _ in range(3)]
    started = flood(world, 500, large)
    assert [started.get(job) for job in large] == sorted(started.values())
    assert len(started) == 3


def test_low_priority_large_job_does_not_delay_high_priority_small_jobs() -> None:
    world = World(gpus=1)
    world.step()
    low = world.slurm.submit("mig:7g.80gb:1", priority=1)
    blocker = world.slurm.submit("mig:1g.10gb:1", runs=50, limit=60, priority=5)
    world.steps(3)
    assert world.running() == {blocker}
    small = [world.slurm.submit("mig:1g.10gb:1", runs=5, priority=9) for _ in range(4)]
    world.steps(4)
    assert set(small) <= world.running()
    assert low not in world.running()


def test_reservation_stays_in_its_place_until_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(nodes=2, gpus=2)
    flood(world, 30, [-1])
    job = world.slurm.submit("mig:7g.80gb:1", limit=LIMIT)
    seen = []
    for _ in range(120):
        for _ in range(max(0, 12 - sum(r.pending for r in world.slurm.queue.values()))):
            world.slurm.submit("mig:1g.10gb:1", runs=world.random.uniform(1, LIMIT), limit=LIMIT)
        report = world.step()
        seen.extend(r.places for r in report.reservations if r.job == job)
        if job in world.running():
            break
    assert job in world.running()
    assert len(set(seen)) <= 1


def test_slices_that_are_kept_for_a_large_job_are_used_by_jobs_that_end_in_time() -> None:
    world = World(gpus=3)
    world.slurm.submit("mig:7g.80gb:1", runs=2000, limit=2000)
    world.steps(3)
    large = world.slurm.submit("mig:7g.80gb:3", runs=100, limit=4000)
    long = world.slurm.submit("mig:7g.80gb:1", runs=100, limit=4000)
    short = [world.slurm.submit("mig:7g.80gb:1", runs=500, limit=1000) for _ in range(2)]
    world.steps(5)
    assert world.running().issuperset(short)
    world.steps(1600)
    late = world.slurm.submit("mig:7g.80gb:1", runs=50, limit=100)
    world.steps(5)
    assert late in world.running()
    world.steps(385)
    assert long not in world.running()
    assert large not in world.running()
    world.steps(10)
    assert large in world.running()
    assert not world.nodes.misfits


@pytest.mark.parametrize("blocker", ["mig:1g.10gb:1", "mig:7g.80gb:1"])
def test_slices_are_kept_for_a_large_job_if_slurm_cannot_know_when_it_starts(blocker: str) -> None:
    """Slurm plans with the counts of today, or with no time limit; then it would give the slices to any job."""
    world = World(gpus=2)
    world.slurm.submit(blocker, runs=2000, limit=2000 if "1g" in blocker else None)
    world.steps(3)
    large = world.slurm.submit("mig:7g.80gb:2", runs=100, limit=4000)
    world.step()
    other = world.slurm.submit("mig:7g.80gb:1", runs=500, limit=3000)
    world.steps(20)
    assert not {large, other} & world.running()
    world.steps(2000)
    assert large in world.running()


def with_reservation(gpus: int) -> tuple[World, int]:
    """Return a node on which one GPU is in use for 2000 s, and a job that waits for all of them."""
    world = World(gpus=gpus)
    world.slurm.submit("mig:7g.80gb:1", runs=2000, limit=2000)
    world.steps(3)
    large = world.slurm.submit(f"mig:7g.80gb:{gpus}", runs=100, limit=4000)
    world.steps(3)
    return world, large


def small(world: World, limit: int, want: str = "mig:1g.10gb:2") -> int:
    return world.slurm.submit(want, runs=500, limit=limit)


def test_reserved_space_is_used_for_jobs_that_end_before_the_start() -> None:
    """Of any profile, as long as no job that could take the slices lasts longer."""
    world, large = with_reservation(gpus=2)
    short, shorter = small(world, 1500), small(world, 600, "mig:3g.40gb:1")
    world.steps(5)
    assert {short, shorter} <= world.running()
    world.steps(600)
    long, late = small(world, 3000, "mig:2g.20gb:1"), small(world, 1500, "mig:4g.40gb:1")
    world.steps(5)
    assert not {long, late} & world.running(), "one is too long, the other would end too late"
    world.steps(1400)
    assert large in world.running()
    assert not world.nodes.misfits


def test_reserved_space_is_not_offered_while_a_longer_job_could_take_the_slices() -> None:
    world, large = with_reservation(gpus=2)
    long, short = small(world, 3000), small(world, 600)
    world.steps(5)
    assert not {long, short} & world.running()
    world.slurm.cancel(long)
    world.steps(5)
    assert short in world.running()
    world.steps(2000)
    assert large in world.running()


def test_reserved_slices_are_not_divided_while_slurm_could_start_a_job_in_them() -> None:
    world, large = with_reservation(gpus=3)
    backfilled = [world.slurm.submit("mig:7g.80gb:1", runs=300, limit=600) for _ in range(3)]
    short = small(world, 600)
    world.steps(5)
    assert world.running().issuperset(backfilled[:2]) and short not in world.running(), "by Slurm"
    world.steps(320)
    assert backfilled[2] in world.running() or backfilled[2] not in world.slurm.queue
    world.steps(5)
    assert short in world.running()
    world.steps(1690)
    assert large in world.running()
    assert not world.nodes.misfits


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["mig:7g.80gb:1", "mig:7g.80gb:3"])
def test_reserved_slices_are_divided_while_jobs_wait_for_them_that_slurm_cannot_start_there(blocked: str) -> None:
    """One would end too late, the other needs more of them than are free."""
    world, large = with_reservation(gpus=3)
    other = world.slurm.submit(blocked, runs=100, limit=2500 if blocked.endswith(":1") else 600)
    short = small(world, 600)
    world.steps(5)
    assert short in world.running() and other not in world.running()
    world.steps(2000)
    assert large in world.running()
    assert not world.nodes.misfits


def with_small_job_in_reserved_space() -> tuple[World, int]:
    """Return three nodes that a job waits for until 2000 s have passed, and on one of them a short job that ends."""
    world = World(nodes=3, gpus=1)
    world.slurm.submit("mig:7g.80gb:1", runs=2000, limit=2000)
    world.steps(3)
    large = world.slurm.submit("mig:7g.80gb:1", runs=100, limit=4000, num_nodes=3)
    world.steps(3)
    short = small(world, 600)
    world.steps(5)
    assert short in world.running() and large not in world.running()
    return world, large


def wide(world: World, limit: int) -> int:
    return world.slurm.submit("mig:7g.80gb:1", runs=100, limit=limit, num_nodes=2)


def test_reserved_space_is_left_to_an_earlier_job_on_several_nodes_that_slurm_can_backfill_when_small_jobs_end() -> (
    None
):
    world, large = with_small_job_in_reserved_space()
    on_two = wide(world, 1000)
    in_time = small(world, 400)
    world.steps(5)
    assert in_time in world.running()
    later = [small(world, 1200) for _ in range(4)]
    world.steps(500)
    assert on_two in world.running() and not world.running().intersection(later)
    world.steps(110)
    assert world.running().intersection(later)
    world.steps(1380)
    assert large in world.running()
    assert not world.nodes.misfits


def test_reserved_space_is_not_left_to_a_job_that_is_not_offered_it_before_slurm_can_backfill_it() -> None:
    """A longer job could take the slice; once the small job has ended, Slurm plans the start of the large one."""
    world, large = with_small_job_in_reserved_space()
    longer = world.slurm.submit("mig:7g.80gb:1", runs=100, limit=2500)
    whole = world.slurm.submit("mig:7g.80gb:1", runs=100, limit=1000)
    in_time = small(world, 400)
    world.steps(5)
    assert in_time in world.running()
    late = small(world, 1200)
    world.steps(400)
    assert late not in world.running()
    world.steps(210)
    assert whole not in world.slurm.queue and longer in world.slurm.queue, "it has run"
    world.steps(1390)
    assert large in world.running()
    assert not world.nodes.misfits


@pytest.mark.parametrize(("earlier", "limit"), [(False, 1000), (True, 1800)])
def test_reserved_space_is_not_left_to_a_job_on_several_nodes_that_comes_later_or_would_end_too_late(
    earlier: bool, limit: int
) -> None:
    world, large = with_small_job_in_reserved_space()
    if earlier:
        wide(world, limit)
    other = small(world, 1200)
    if not earlier:
        wide(world, limit)
    world.steps(5)
    assert other in world.running()
    world.steps(2000)
    assert large in world.running()
    assert not world.nodes.misfits


@pytest.mark.parametrize("longer", [False, True])
def test_a_job_on_several_nodes_that_ends_in_time_gets_reserved_space_unless_a_longer_one_could_take_it(
    longer: bool,
) -> None:
    """Slurm does not plan the start of the large job, because a small one divides a GPU until then."""
    world = World(nodes=3, gpus=1)
    world.slurm.submit("mig:1g.10gb:1", runs=2000, limit=2000)
    world.steps(3)
    large = world.slurm.submit("mig:7g.80gb:1", runs=100, limit=4000, num_nodes=3)
    world.steps(3)
    if longer:
        world.slurm.submit("mig:7g.80gb:1", runs=100, limit=3000)
    else:
        world.slurm.submit("mig:7g.80gb:1", runs=300, limit=300)
    world.steps(5)
    on_two = wide(world, 1000)
    other = small(world, 1000)
    world.steps(280)
    assert on_two not in world.running() and (other in world.running()) == longer
    world.steps(30)
    assert (on_two in world.running()) != longer
    world.steps(1700)
    assert large in world.running()
    assert not world.nodes.misfits


def test_new_slices_are_made_on_the_first_node_whichever_reported_last() -> None:
    world = World(nodes=3, gpus=2)
    world.step()
    jobs = []
    for _ in range(3):
        jobs.append(world.slurm.submit("mig:7g.80gb:1", runs=1000))
        world.steps(5)
    assert [world.slurm.queue[job].nodes for job in jobs] == [("n1",), ("n1",), ("n2",)]


@pytest.mark.parametrize(
    ("others", "limit", "want"),
    [
        ("7g.80gb", LIMIT, "mig:1g.10gb:1"),
        ("7g.80gb", LIMIT, "mig:3g.40gb:2"),
        ("1g.10gb", LIMIT, "mig:7g.80gb:1"),
        ("2g.20gb", LIMIT, "mig:3g.40gb:1"),
        ("7g.80gb", None, "mig:7g.80gb:2"),
    ],
)
def test_job_starts_in_its_turn_although_slurm_starts_the_next_job_of_the_same_slice_at_once(
    others: str, limit: int | None, want: str
) -> None:
    """Slurm gives a slice whose job has ended to a pending job for the same one before migbatchd can change it."""
    world = World(gpus=2)
    world.step()

    def slurm_first() -> None:
        waiting = sum(row.pending for row in world.slurm.queue.values())
        for _ in range(max(0, 4 - waiting)):
            world.slurm.submit(f"mig:{others}:1", runs=world.random.uniform(5, LIMIT), limit=limit)
        world.clock.sleep(1.0)
        world.finish()
        world.start()
        world.prologs()
        world.nodes.report()
        world.nodes.poll()
        world.round()

    for _ in range(60):
        slurm_first()
    job = world.slurm.submit(want, runs=10, limit=LIMIT)
    for _ in range(20 * LIMIT):
        slurm_first()
        if job in world.running():
            break
    assert job in world.running()
    assert not world.nodes.misfits

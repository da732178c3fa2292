"""GPUs are divided only where the gain exceeds the restarts, legally, and no more often than hysteresis allows."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.daemon import record
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.capacity import LendingCapacity
from slurm_migbatch.decide.lending.division import MARGIN, divide
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.loan import State
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, LentSlot, SlotReference, Target, usual_speed
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples
from tests.support.layouts import layouts
from tests.support.loan_world import LoanWorld, MakeWorld
from tests.support.stores import Away

H100 = geometry("h100-80gb")
ONE, TWO, THREE, FOUR, ALL = (Profile.parse(p) for p in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
ROOT = {info.profile: usual_speed(H100, info.profile) for info in H100.profiles if not info.profile.suffix}
LAYOUTS = [layout for layout in layouts(H100) if all(not profile.suffix for profile in layout.profiles)]
NOW = 100_000.0
RULES = Hysteresis(first_s=300, growth=2, most_s=3600, loan_s=600, idle_s=0, rest_s=0, gain=1.35)
RESTART_S = 35.0


def slot(profile: Profile, start: int) -> Slot:
    return next(candidate for candidate in H100.info(profile).slots if candidate.placement.start == start)


def runs(job: int, where: Slot, gpu: int = 0, since: float = 0.0, **more: object) -> ElasticJob:
    place = SlotReference("n0", gpu, where)
    return ElasticJob(job, ROOT, place=place, since=since, restart_s=RESTART_S, **more)  # type: ignore[arg-type]


def waits(job: int, speeds: Mapping[Profile, float] = ROOT, **more: object) -> ElasticJob:
    return ElasticJob(job, speeds, restart_s=RESTART_S, **more)  # type: ignore[arg-type]


def gpu(*jobs: ElasticJob, number: int = 0, taken: tuple[Slot, ...] = ()) -> GpuCapacity:
    lent = tuple(LentSlot(job.place.slot, job.job) for job in jobs if job.place is not None)
    return GpuCapacity("n0", number, H100, taken, lent)


def test_whole_gpu_is_divided_for_a_waiting_job() -> None:
    host = runs(1, slot(ALL, 0))
    found = lend([gpu(host)], [host, waits(2)], {}, NOW, RULES)
    assert found.lacking == {2: "capacity"}
    (division,) = found.divisions
    assert (division.node, division.gpu, division.jobs) == ("n0", 0, 2)
    assert sorted(division.profiles.values()) == [THREE, FOUR]


@pytest.mark.parametrize(
    "host",
    [
        runs(1, slot(ALL, 0), since=NOW - 299),
        runs(1, slot(ALL, 0), since=NOW - 599, restarts=1),
        replace(runs(1, slot(ALL, 0)), restart_s=500.0),
        replace(runs(1, slot(ALL, 0)), nodes=frozenset({"n1"})),
        runs(1, slot(ALL, 0), left_s=60.0),
        runs(1, slot(ALL, 0), needs_s=60.0),
        runs(1, slot(ALL, 0), shares=True),
    ],
)
def test_gpu_is_not_divided_when_its_job_should_not_be_restarted(
    host: ElasticJob,
) -> None:
    """It began a short time ago, restarts at too high a cost, could not come back, ends soon or shares its slice."""
    assert lend([gpu(host)], [host, waits(2)], {}, NOW, RULES).divisions == ()


@pytest.mark.parametrize(
    "job", [waits(2, needs_s=40.0), waits(2, left_s=40.0), waits(2, shares=True), waits(2, cpus=5)]
)
def test_no_gpu_is_divided_for_a_job_that_ends_soon_shares_or_lacks_cpus(job: ElasticJob) -> None:
    host = runs(1, slot(ALL, 0))
    capacity = replace(gpu(host), cpus=4)
    assert lend([capacity], [host, job], {}, NOW, RULES).divisions == ()
    assert lend([capacity], [host, waits(2, cpus=4)], {}, NOW, RULES).divisions


def test_divisions_on_a_node_need_cpus_for_all_of_their_jobs() -> None:
    hosts = [runs(number, slot(ALL, 0), gpu=number) for number in range(2)]
    capacities = [replace(gpu(host, number=number), cpus=4) for number, host in enumerate(hosts)]
    waiting = [waits(10, cpus=3), waits(11, cpus=3)]
    (division,) = lend(capacities, [*hosts, *waiting], {}, NOW, RULES).divisions
    assert 11 not in division.profiles


def test_no_gpu_is_divided_for_a_job_that_fits_on_a_slice_about_to_be_free() -> None:
    host, leaves = runs(1, slot(ALL, 0)), runs(2, slot(ALL, 0), gpu=1, since=NOW)
    soon = replace(gpu(leaves, number=1), reclaimed=math.inf, leaving=(slot(ALL, 0),))
    large = waits(3, speeds={FOUR: 0.7, ALL: 1.0})
    assert lend([gpu(host), soon], [host, leaves, large], {}, NOW, RULES).divisions == ()
    promised = waits(4, target=Target(FOUR, "n0", NOW + 60, 1))
    found = lend([gpu(host), soon], [host, leaves, promised, large], {}, NOW, RULES)
    assert [division.gpu for division in found.divisions] == [0], "that slice is for another job"


def test_two_divisions_never_name_the_same_job() -> None:
    first = replace(runs(1, slot(THREE, 0)), speeds={ONE: 0.2, TWO: 0.2, THREE: 0.2, FOUR: 0.9, ALL: 1.0})
    second = replace(runs(2, slot(ONE, 0), gpu=2), speeds={ONE: 0.25, TWO: 0.7})
    host = runs(3, slot(ALL, 0), gpu=1)
    taken = (slot(THREE, 4), slot(TWO, 2), slot(ONE, 1))
    capacities = [gpu(first, taken=(slot(THREE, 4),)), gpu(host, number=1), gpu(second, number=2, taken=taken)]
    divisions = divide(capacities, [first, second, host], [], NOW, RULES, 8)
    named = [job for division in divisions for job in division.profiles]
    assert divisions and len(named) == len(set(named))


def test_division_keeps_room_for_the_reserve() -> None:
    host = runs(1, slot(THREE, 0))
    for division in lend([gpu(host)], [host, waits(2)], {THREE: 1}, NOW, RULES).divisions:
        assert len(plan_free(H100, EMPTY, [THREE, *division.profiles.values()])) == len(division.profiles) + 1


def test_jobs_that_keep_their_slice_in_a_division_are_not_stopped() -> None:
    hosts = [runs(1, slot(THREE, 0)), runs(2, slot(THREE, 4))]
    (division,) = lend([gpu(*hosts)], [*hosts, waits(3)], {}, NOW, RULES).divisions
    assert division.jobs == 3
    assert division.profiles == {1: TWO, 3: TWO}


def test_job_on_a_small_slice_moves_to_a_divided_gpu_where_it_gains_more() -> None:
    small = [runs(number, slot(ONE, number), since=NOW - 3600) for number in range(7)]
    small[3] = replace(small[3], speeds={**ROOT, ONE: 0.1})
    large = runs(9, slot(ALL, 0), gpu=1)
    (division,) = lend([gpu(*small), gpu(large, number=1)], [*small, large], {}, NOW, RULES).divisions
    assert (division.gpu, division.jobs) == (1, 2)
    assert set(division.profiles) == {3, 9}


def test_no_more_jobs_are_stopped_than_may_be_released_in_a_round() -> None:
    hosts = [runs(number, slot(ALL, 0), gpu=number) for number in range(6)]
    jobs = [*hosts, *(waits(10 + number) for number in range(6))]
    found = lend([gpu(host, number=number) for number, host in enumerate(hosts)], jobs, {}, NOW, RULES, releases=4)
    stopped = [job for division in found.divisions for job in division.profiles]
    assert 0 < len(stopped) <= 4


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[GpuCapacity], list[ElasticJob], list[ElasticJob]]:
    """GPUs with any layout, with slots of inference and loans of jobs that may or may not be changed; waiting jobs."""
    capacities, jobs, number = [], [], 0
    for index in range(draw(st.integers(1, 3))):
        on_gpu, taken = [], []
        for where in draw(st.sampled_from(LAYOUTS)).slots:
            kind = draw(st.sampled_from(["job", "job", "young", "inference"]))
            if kind == "inference":
                taken.append(where)
                continue
            number += 1
            on_gpu.append(runs(number, where, index, since=NOW - (10 if kind == "young" else 4000)))
        jobs += on_gpu
        capacities.append(gpu(*on_gpu, number=index, taken=tuple(taken)))
    waiting = [waits(100 + extra) for extra in range(draw(st.integers(0, 4)))]
    return capacities, [*jobs, *waiting], waiting


@settings(max_examples=examples(300), deadline=None)
@given(clusters())
def test_every_division_fits_beside_the_remaining_slots_and_does_more_work(
    cluster: tuple[list[GpuCapacity], list[ElasticJob], list[ElasticJob]],
) -> None:
    capacities, jobs, waiting = cluster
    known = {job.job: job for job in jobs}
    for division in divide(capacities, jobs, waiting, NOW, RULES, 8):
        capacity = capacities[division.gpu]
        staying = [loan for loan in capacity.lent if loan.job not in division.profiles]
        used = Layout((*capacity.taken, *(loan.slot for loan in staying)))
        assert len(plan_free(H100, used, division.profiles.values())) == len(division.profiles)
        assert all(known[job].place is None or NOW - known[job].since >= 300 for job in division.profiles)
        before = sum(known[loan.job].speeds[loan.slot.profile] for loan in capacity.lent)
        moved = [known[job] for job in division.profiles if job not in {loan.job for loan in capacity.lent}]
        before += sum(job.speeds[job.place.slot.profile] for job in moved if job.place is not None)
        after = sum(ROOT[profile] for profile in division.profiles.values())
        after += sum(ROOT[loan.slot.profile] for loan in staying)
        restarts = sum(ROOT[profile] for profile in division.profiles.values()) * RESTART_S / RULES.loan_s
        assert after - before - restarts > MARGIN - 1e-9


def test_round_evaluates_few_divisions_even_on_a_large_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = LendingCapacity.__init__

    def counted(self: LendingCapacity, *args: object) -> None:
        built.append(1)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LendingCapacity, "__init__", counted)
    hosts = [runs(number, slot(ALL, 0), gpu=number, since=NOW - 4000) for number in range(200)]
    curves = [{profile: speed ** (1 + number / 1000) for profile, speed in ROOT.items()} for number in range(200)]
    hosts = [replace(host, speeds=curve) for host, curve in zip(hosts, curves, strict=True)]
    waiting = [ElasticJob(1000 + number, curve, restart_s=RESTART_S) for number, curve in enumerate(curves)]
    capacities = [gpu(host, number=number) for number, host in enumerate(hosts)]
    divide(capacities, [*hosts, *waiting], waiting, NOW, RULES, 8)
    assert len(built) <= 4 * 8 * 3


def test_gpu_is_divided_between_two_jobs_and_one_grows_after_the_other_ends(world: MakeWorld) -> None:
    w = world()
    first = w.train(needs=5000)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    second = w.train(needs=300)
    w.until(lambda: len(w.loaned()) == 2, 400)
    assert sorted(w.loaned().values()) == ["3g.40gb", "4g.40gb"]
    assert w.training[first].saved > 0, "it wrote a checkpoint before it was stopped"
    assert w.row(first).restarts == 1
    w.until(lambda: second not in w.slurm.queue, 2000)
    w.until(lambda: w.loaned().get(first) == "7g.80gb", 2000)


def divided(w: LoanWorld, **second: Any) -> tuple[int, int]:
    """A job on the whole GPU, and the job for which it has just been stopped."""
    first = w.train(needs=5000)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    other = w.train(needs=5000, **second)
    w.until(lambda: bool(w.slurm.signals))
    return first, other


def test_stopped_job_continues_even_if_a_blackout_has_begun_meanwhile(world: MakeWorld) -> None:
    w = world()
    first, second = divided(w)
    w.control.observer._blackout = lambda now: True
    w.until(lambda: bool(w.row(first).restarts))
    w.until(lambda: first in w.loaned(), 60)
    w.step()
    assert second not in w.loaned() and "blackout" in w.why(second)
    for _ in range(900):
        w.step()
    assert w.row(first).restarts == 1


@pytest.mark.parametrize("when", ["signalled", "requeued", "pending"])
def test_stopped_job_continues_at_once_even_if_migbatchd_was_restarted(world: MakeWorld, when: str) -> None:
    w = world()
    first, second = divided(w)
    w.until(lambda: when != "requeued" or bool(w.slurm.requeues))
    w.until(lambda: when != "pending" or w.row(first).pending)
    w.restart()
    w.until(lambda: len(w.loaned()) == 2, 60)
    assert sorted(w.loaned().values()) == ["3g.40gb", "4g.40gb"]
    assert [w.row(job).restarts for job in (first, second)] == [1, 0]


def test_no_job_is_stopped_for_another_slice_while_the_database_is_away(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be released again before the database is back."""
    w = world()
    first = w.train(needs=5000)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    for _ in range(310):
        w.step()
    real = w.writer._store
    with monkeypatch.context() as patch:
        patch.setattr(record, "_SAVE_S", 0.2)  # it waits in vain
        w.writer._store = Away()  # type: ignore[assignment]
        w.train(needs=300)
        for _ in range(60):
            w.step()
    w.writer._store = real
    assert not w.slurm.signals and w.loaned() == {first: "7g.80gb"}
    assert w.lending.ledger.open[first].state is State.RUNNING and first not in w.lending.ledger.targets


def test_whole_gpu_that_is_about_to_be_free_goes_to_the_next_job(world: MakeWorld) -> None:
    """As in a chain of jobs, each of which is submitted when the previous one has ended."""
    w = world(gpus=2)
    w.late = 4
    first, second = w.train(needs=5000), w.train(needs=400)
    w.until(lambda: len(w.loaned()) == 2)
    w.until(lambda: second not in w.slurm.queue, 500)
    third = w.train(needs=300)
    w.until(lambda: w.loaned() == {first: "7g.80gb", third: "7g.80gb"}, 60)
    assert not w.slurm.signals


def test_job_that_lacks_cpus_beside_a_running_job_does_not_stop_it(world: MakeWorld) -> None:
    w = world()
    first = w.train(needs=5000, cpus=60)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    w.train(needs=300, cpus=32)
    for _ in range(400):
        w.step()
    assert w.loaned() == {first: "7g.80gb"} and not w.slurm.signals


def test_job_whose_divided_gpu_is_empty_does_not_wait_for_another_gpu(world: MakeWorld) -> None:
    w = world(gpus=2, grace_s=30.0)
    quick, slow = w.train(needs=5000), w.train(needs=5000, after=None)
    w.until(lambda: len(w.loaned()) == 2)
    for _ in range(310):
        w.step()
    for _ in range(2):
        w.train(needs=5000, priority=200)
    w.until(lambda: bool(w.row(quick).restarts))
    w.until(lambda: w.loaned().get(quick) == "4g.40gb", 15)
    w.until(lambda: len(w.loaned()) == 4, 60)
    assert w.loaned()[slow] == "4g.40gb"


def test_jobs_of_a_division_are_released_together_so_that_all_fit(world: MakeWorld) -> None:
    """Otherwise supply may place the slices of the first ones such that no room is left for the last one."""
    w = world()
    first = w.train(needs=5000)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    for _ in range(310):
        w.step()
    for _ in range(2):
        w.train(needs=5000)
    w.until(lambda: len(w.loaned()) == 3, 60)
    assert sorted(w.loaned().values()) == ["2g.20gb", "2g.20gb", "3g.40gb"]


def test_quota_that_a_stopped_job_needs_is_not_given_to_another(world: MakeWorld) -> None:
    w = world(quota={"ml": 2})
    small = w.train(needs=10**6, hints="signal=usr1 max=2g.20gb", account="ml")
    others = [w.train(needs=60, hints="max=1g.10gb", account="web") for _ in range(6)]
    w.until(lambda: len(w.loaned()) == 7)
    w.until(lambda: not set(others) & set(w.slurm.queue))
    late = w.train(needs=10**6, hints="min=2g.20gb max=2g.20gb", account="ml")
    w.until(lambda: bool(w.row(small).restarts), 400)
    w.until(lambda: small in w.loaned(), 60)
    assert w.loaned() == {small: "2g.20gb"} and "quota" in w.why(late)


def test_waiting_job_gets_a_division_or_a_shared_slice_but_not_both(world: MakeWorld) -> None:
    w = world(share=True, gpus=2)
    first = w.train(needs=5000, hints="signal=usr1 mem=5GB")
    w.train(needs=5000, hints="signal=usr1 min=7g.80gb max=7g.80gb mem=5GB")
    w.until(lambda: len(w.loaned()) == 2)
    for _ in range(310):
        w.step()
    third = w.train(needs=200, hints="signal=usr1 min=3g.40gb mem=5GB")
    w.slurm.change(third, time_limit_s=250)
    for _ in range(60):
        w.step()
    assert {first, third} <= w.running()
    assert not (w.row(first).restarts and w.nodes.second), "one of the two is enough"


def test_host_that_shares_its_slice_is_not_stopped_for_a_third_job(world: MakeWorld) -> None:
    """The guest would keep the slice."""
    w = world(share=True)
    host = w.train(needs=5000, hints="signal=usr1 mem=20GB")
    w.until(lambda: host in w.loaned())
    for _ in range(100):
        w.step()
    guest = w.train(needs=1500, hints="signal=usr1 min=7g.80gb max=7g.80gb mem=20GB")
    w.slurm.change(guest, time_limit_s=2000)
    w.until(lambda: guest in w.running())
    for _ in range(250):
        w.step()
    w.train(needs=600, hints="signal=usr1 min=3g.40gb")
    for _ in range(60):
        w.step()
    assert w.nodes.second and w.row(host).restarts == 0


HINTS = ("signal=usr1", "", "signal=usr1 max=2g.20gb", "signal=usr1 min=2g.20gb", "signal=usr1 min=3g.40gb")
EVENTS = ("train", "train", "infer", "infer", "infer", "restart", "vanish")


@pytest.mark.slow
@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.randoms(use_true_random=False))
def test_all_jobs_run_after_random_events_and_stops_respect_the_hysteresis(
    world: MakeWorld, draw: random.Random
) -> None:
    w = world(nodes=draw.choice([1, 2]), gpus=draw.choice([1, 2]), settle_s=30.0)
    most = 2 * sum(len(gpus) for gpus in w.nodes.held.values())
    events: dict[int, list[str]] = {}
    for _ in range(14):
        events.setdefault(draw.randint(0, 600), []).append(draw.choice(EVENTS))
    jobs: list[int] = []
    for second in range(650):
        for event in events.get(second, ()):
            left = [job for job in jobs if job in w.slurm.queue]
            if event == "train" and len(left) < most:
                after, hints = draw.choice([1.0, 1.0, None]), draw.choice(HINTS)
                # a job that has run for long without a checkpoint keeps its GPU, and others wait for its end
                jobs.append(w.train(needs=draw.choice([150, 10**6]) if hints else 150, hints=hints, after=after))
            elif event == "infer":
                w.infer(draw.choice(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]), runs=draw.choice([20, 60]))
            elif event == "restart":
                w.restart()
            elif event == "vanish" and set(left) & w.running():
                w.vanish(draw.choice(sorted(set(left) & w.running())))
        w.step()
    # a job without a checkpoint, for whose end others may wait, needs at most 150 / 0.378 = 397 s on the smallest slice
    w.until(lambda: all(w.row(job).state == "RUNNING" for job in jobs if job in w.slurm.queue), 450)
    for _ in range(60):
        w.step()
    assert not set(w.lending.ledger.targets) - set(w.slurm.queue)
    with w.store() as store:
        stopped = [row for row in store.loans() if row["cause"] in ("grow", "divide") and row["ended"]]
    hysteresis = w.rules.hysteresis
    for row in stopped:
        assert row["ended"] - row["started"] >= min(
            hysteresis.most_s, hysteresis.first_s * hysteresis.growth ** row["restart"]
        )

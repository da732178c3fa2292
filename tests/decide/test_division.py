"""GPUs are divided anew where that pays for the restarts, legally, and no more often than jobs can bear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.allocation import Hysteresis, RestartCosts
from slurm_migbatch.decide.lending.capacity import LendingCapacity
from slurm_migbatch.decide.lending.division import MARGIN, divide
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, LentSlot, SlotReference, usual_speed
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.layout import Layout, Slot, layouts
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples
from tests.support.loan_world import LoanWorld

H100 = geometry("h100-80gb")
ONE, TWO, THREE, FOUR, ALL = (Profile.parse(p) for p in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
ROOT = {info.profile: usual_speed(H100, info.profile) for info in H100.profiles if not info.profile.suffix}
LAYOUTS = [layout for layout in layouts(H100) if all(not profile.suffix for profile in layout.profiles)]
NOW = 100_000.0
RULES = Hysteresis(first_s=300, growth=2, most_s=3600, loan_s=600, idle_s=0, rest_s=0, gain=1.35)
COSTS = RestartCosts(35.0, 35.0)


def slot(profile: Profile, start: int) -> Slot:
    return next(one for one in H100.info(profile).slots if one.placement.start == start)


def runs(job: int, where: Slot, gpu: int = 0, since: float = 0.0, **more: object) -> ElasticJob:
    place = SlotReference("n0", gpu, where)
    return ElasticJob(job, ROOT, place=place, since=since, costs=COSTS, **more)  # type: ignore[arg-type]


def waits(job: int, **more: object) -> ElasticJob:
    return ElasticJob(job, ROOT, costs=COSTS, **more)  # type: ignore[arg-type]


def gpu(*jobs: ElasticJob, number: int = 0, taken: tuple[Slot, ...] = ()) -> GpuCapacity:
    lent = tuple(LentSlot(job.place.slot, job.job) for job in jobs if job.place is not None)
    return GpuCapacity("n0", number, H100, taken, lent)


def test_a_whole_gpu_is_divided_for_a_job_that_waits() -> None:
    host = runs(1, slot(ALL, 0))
    found = lend([gpu(host)], [host, waits(2)], {}, NOW, RULES)
    assert found.lacking == {2: "room"}
    (division,) = found.divisions
    assert (division.node, division.gpu, division.jobs) == ("n0", 0, 2)
    assert sorted(division.profiles.values()) == [THREE, FOUR]
    assert division.gain > MARGIN


@pytest.mark.parametrize(
    "host",
    [
        runs(1, slot(ALL, 0), since=NOW - 299),
        runs(1, slot(ALL, 0), since=NOW - 599, restarts=1),
        replace(runs(1, slot(ALL, 0)), costs=RestartCosts(500.0, 500.0)),
        replace(runs(1, slot(ALL, 0)), nodes=frozenset({"n1"})),
    ],
)
def test_a_job_that_began_lately_or_could_not_come_back_or_pays_too_much_is_left_alone(host: ElasticJob) -> None:
    assert lend([gpu(host)], [host, waits(2)], {}, NOW, RULES).divisions == ()


def test_jobs_that_keep_their_slice_are_not_stopped() -> None:
    hosts = [runs(1, slot(THREE, 0)), runs(2, slot(THREE, 4))]
    (division,) = lend([gpu(*hosts)], [*hosts, waits(3)], {}, NOW, RULES).divisions
    assert division.jobs == 3
    assert division.profiles == {1: TWO, 3: TWO}


def test_a_job_on_a_small_slice_moves_to_where_it_is_worth_more() -> None:
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
    """GPUs with any layout, its slots inference's or loans of jobs that may be changed or not; jobs that wait."""
    spaces, jobs, number = [], [], 0
    for index in range(draw(st.integers(1, 3))):
        here, taken = [], []
        for where in draw(st.sampled_from(LAYOUTS)).slots:
            kind = draw(st.sampled_from(["job", "job", "young", "inference"]))
            if kind == "inference":
                taken.append(where)
                continue
            number += 1
            here.append(runs(number, where, index, since=NOW - (10 if kind == "young" else 4000)))
        jobs += here
        spaces.append(gpu(*here, number=index, taken=tuple(taken)))
    waiting = [waits(100 + extra) for extra in range(draw(st.integers(0, 4)))]
    return spaces, [*jobs, *waiting], waiting


@settings(max_examples=examples(300), deadline=None)
@given(clusters())
def test_every_division_fits_beside_what_stays_and_does_more_work(
    cluster: tuple[list[GpuCapacity], list[ElasticJob], list[ElasticJob]],
) -> None:
    spaces, jobs, waiting = cluster
    known = {job.job: job for job in jobs}
    for division in divide(spaces, jobs, waiting, NOW, RULES, 8):
        space = spaces[division.gpu]
        staying = [loan for loan in space.lent if loan.job not in division.profiles]
        used = Layout((*space.taken, *(loan.slot for loan in staying)))
        assert len(plan_free(H100, used, division.profiles.values())) == len(division.profiles)
        assert all(known[job].place is None or NOW - known[job].since >= 300 for job in division.profiles)
        before = sum(known[loan.job].speeds[loan.slot.profile] for loan in space.lent)
        moved = [known[job] for job in division.profiles if job not in {loan.job for loan in space.lent}]
        before += sum(job.speeds[job.place.slot.profile] for job in moved if job.place is not None)
        after = sum(ROOT[profile] for profile in division.profiles.values())
        after += sum(ROOT[loan.slot.profile] for loan in staying)
        assert after - before >= division.gain > MARGIN


def test_a_round_asks_for_few_divisions_however_large_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = LendingCapacity.__init__

    def counted(self: LendingCapacity, *args: object) -> None:
        built.append(1)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LendingCapacity, "__init__", counted)
    hosts = [runs(number, slot(ALL, 0), gpu=number, since=NOW - 4000) for number in range(200)]
    curves = [{profile: speed ** (1 + number / 1000) for profile, speed in ROOT.items()} for number in range(200)]
    hosts = [replace(host, speeds=curve) for host, curve in zip(hosts, curves, strict=True)]
    waiting = [ElasticJob(1000 + number, curve, costs=COSTS) for number, curve in enumerate(curves)]
    spaces = [gpu(host, number=number) for number, host in enumerate(hosts)]
    divide(spaces, [*hosts, *waiting], waiting, NOW, RULES, 8)
    assert len(built) <= 4 * 8 * 3


def test_two_jobs_share_a_gpu_that_one_had_and_grow_when_one_has_ended(tmp_path: Path) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/record.db")
    first = w.train(needs=5000)
    w.until(lambda: w.loaned() == {first: "7g.80gb"})
    second = w.train(needs=300)
    w.until(lambda: len(w.loaned()) == 2, 400)
    assert sorted(w.loaned().values()) == ["3g.40gb", "4g.40gb"]
    assert w.training[first].saved > 0, "it wrote a checkpoint before it was stopped"
    assert w.row(first).restarts == 1
    w.until(lambda: second not in w.slurm.queue, 2000)
    w.until(lambda: w.loaned().get(first) == "7g.80gb", 2000)
    w.close()

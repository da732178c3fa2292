"""Lending of slices: legal on any cluster, keeps the reserve of inference and Slurm's order; sizes by brute force."""

import itertools
import math
import random
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.loan import JobView, Loan, State
from slurm_migbatch.decide.lending.model import LendingRules, LendingView, WaitingInference
from slurm_migbatch.decide.lending.reclaim import lent_sets_for
from slurm_migbatch.decide.lending.reclaim import reclaim_loans as reclaim_for
from slurm_migbatch.decide.lending.values import (
    ElasticJob,
    GpuCapacity,
    Grow,
    LentSlot,
    Release,
    SlotReference,
    Target,
    usual_speed,
    within,
)
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import LoanHints
from tests.support.examples import examples
from tests.support.layouts import layouts

H100, A30 = geometry("h100-80gb"), geometry("a30")
ONE, DOUBLE, TWO, THREE, FOUR, ALL = (
    Profile.parse(p) for p in ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
)
PLAIN = (ONE, DOUBLE, TWO, THREE, FOUR, ALL)
ROOT = {profile: usual_speed(H100, profile) for profile in PLAIN}
LAYOUTS = {
    gpu.name: [layout for layout in layouts(gpu) if all(not p.suffix for p in layout.profiles)] for gpu in (H100, A30)
}
NOW = 100_000.0
RULES = Hysteresis(first_s=300, growth=2, most_s=3600, loan_s=600, idle_s=120, rest_s=900, gain=1.35)


def slot(profile, start):
    return next(candidate for candidate in H100.info(profile).slots if candidate.placement.start == start)


def gpu(number=0, taken=(), lent=(), node="n0", **more):
    return GpuCapacity(node, number, H100, tuple(taken), tuple(lent), **more)


def waits(job, speeds=ROOT, **more):
    return ElasticJob(job, speeds, **more)


def goes_to(profile, node="n0", index=0):
    return Target(profile, node, NOW + 60, index)


def runs(job, where, speeds=ROOT, **more):
    return ElasticJob(job, speeds, place=where, **more)


# -- any cluster -----------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw):
    """GPUs with any legal layout, divided between inference and loans; waiting jobs; a reserve."""
    capacities, elastic_jobs, job = [], [], itertools.count()
    names = ["n0", "n1"]
    for number in range(draw(st.integers(1, 4))):
        node = draw(st.sampled_from(names))
        model = draw(st.sampled_from([H100, H100, A30]))
        layout = draw(st.sampled_from(LAYOUTS[model.name]))
        taken, lent = [], []
        for held in layout.slots:
            if draw(st.booleans()):
                taken.append(held)
                continue
            name = next(job)
            lent.append(LentSlot(held, name))
            speeds = {**ROOT, **{p: usual_speed(A30, p) for p in within(A30, None, None)}}
            since = draw(st.sampled_from([0.0, NOW - 10]))
            elastic_jobs.append(
                runs(name, SlotReference(node, number, held), speeds, account=draw(st.sampled_from("ab")), since=since)
            )
        idle = draw(st.sampled_from([0.0, NOW - 10]))
        capacities.append(GpuCapacity(node, number, model, tuple(taken), tuple(lent), idle_since=idle))
    speed = st.sampled_from([0.0, 0.2, 0.4, 0.6, 1.0])
    for _ in range(draw(st.integers(0, 8))):
        elastic_jobs.append(
            ElasticJob(
                next(job),
                draw(st.dictionaries(st.sampled_from(PLAIN), speed, max_size=6)),
                account=draw(st.sampled_from("ab")),
                nodes=draw(st.sampled_from([None, frozenset({"n0"}), frozenset({"n1", "n2"})])),
                left_s=draw(st.sampled_from([50.0, 5000.0])),
            )
        )
    reserve = draw(st.dictionaries(st.sampled_from([*PLAIN, Profile.parse("2g.12gb")]), st.integers(1, 3), max_size=2))
    return capacities, draw(st.permutations(elastic_jobs)), reserve, draw(st.sampled_from([sys.maxsize, 0, 2]))


def granted(capacities, found):
    """By GPU: its geometry, what remains used after the grows, and the profiles of grants and grows."""
    moved = {grow.job for grow in found.grows}
    result = {}
    for capacity in capacities:
        kept = [loan.slot for loan in capacity.lent if loan.job not in moved]
        profiles = [
            grant.profile
            for grant in [*found.grants, *found.grows]
            if (grant.node, grant.gpu) == (capacity.node, capacity.gpu)
        ]
        result[capacity.node, capacity.gpu] = capacity.geometry, Layout([*capacity.taken, *kept]), profiles
    return result


def layouts_after(capacities, found):
    """Used layouts after all grants and grows have been carried out."""
    after = {}
    for where, (model, used, profiles) in granted(capacities, found).items():
        placed = plan_free(model, used, sorted(profiles, reverse=True))
        assert Counter(placed.profiles) == Counter(profiles)
        after[where] = used.union(placed)
    return after


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters())
def test_grants_are_legal_on_every_gpu_and_meet_each_jobs_constraints(cluster):
    capacities, elastic_jobs, reserve, releases = cluster
    found = lend(capacities, elastic_jobs, reserve, NOW, RULES, releases)
    for (node, number), used in layouts_after(capacities, found).items():
        next(capacity for capacity in capacities if (capacity.node, capacity.gpu) == (node, number)).geometry.check(
            used
        )
    by_job = {elastic_job.job: elastic_job for elastic_job in elastic_jobs}
    every: list[Release | Grow] = [*found.grants, *found.grows]
    for grant in every:
        trainee = by_job[grant.job]
        assert trainee.speeds[grant.profile] > 0
        assert trainee.nodes is None or grant.node in trainee.nodes
        capacity = next(capacity for capacity in capacities if (capacity.node, capacity.gpu) == (grant.node, grant.gpu))
        assert RULES.may_lend(NOW, capacity.idle_since, capacity.reclaimed)
    waiting = [elastic_job.job for elastic_job in elastic_jobs if elastic_job.place is None]
    assert sorted([*(grant.job for grant in found.grants), *found.lacking]) == sorted(waiting)
    assert all(by_job[grant.job].place is not None for grant in found.grows)


def places(gpus, reserve, most):
    """How many of the reserve's profiles can be placed together with the grants, by trying every way."""
    best = 0
    wanted = [profile for profile, count in reserve.items() for _ in range(count)]
    for division in itertools.product(range(len(gpus) + 1), repeat=len(wanted)):
        met = 0
        for number, (model, used, profiles) in enumerate(gpus):
            mine = [profile for profile, at in zip(wanted, division, strict=True) if at == number]
            together = sorted([*profiles, *mine], reverse=True)
            if len(plan_free(model, used, together)) != len(together):
                break
            met += len(mine)
        else:
            best = max(best, met)
            if best >= most:
                return best
    return best


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters())
def test_grants_leave_the_reserve_its_room(cluster):
    capacities, elastic_jobs, reserve, releases = cluster
    found = lend(capacities, elastic_jobs, reserve, NOW, RULES, releases)
    kept = sum(reserve.values()) - sum(found.short.values())
    assert places(list(granted(capacities, found).values()), reserve, kept) >= kept


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters())
def test_grants_respect_the_limit_of_a_round_and_the_order_of_slurm(cluster):
    capacities, elastic_jobs, reserve, releases = cluster
    found = lend(capacities, elastic_jobs, reserve, NOW, RULES, releases)
    assert len(found.grants) + len(found.grows) <= releases
    # No job goes without a slice for the sake of a job behind it.
    half = len(elastic_jobs) // 2
    first = [
        elastic_job for number, elastic_job in enumerate(elastic_jobs) if number < half or elastic_job.place is not None
    ]
    begin = lend(capacities, first, reserve, NOW, RULES, releases)
    begun = {grant.job for grant in found.grants if grant.reserved}
    for job, why in begin.lacking.items():
        # the more jobs wait, the smaller the fair share for which one starts in the reserve's space
        assert found.lacking.get(job) == why or (why == "reserve" and job in begun)
    assert found == lend(capacities, elastic_jobs, reserve, NOW, RULES, releases)


# -- sizes -----------------------------------------------------------------------------------------------------------


def best_sum(capacities, elastic_jobs, worths):
    """The greatest sum of worths in which every job has a slice, by brute force."""
    options = [
        [(p, at) for p in worths[elastic_job.job] for at in range(len(capacities))] for elastic_job in elastic_jobs
    ]
    best = 0.0
    for chosen in itertools.product(*options):
        worth = sum(worths[elastic_job.job][p] for elastic_job, (p, _) in zip(elastic_jobs, chosen, strict=True))
        if worth > best and all(
            len(plan_free(capacity.geometry, capacity.used, sorted((p for p, at in chosen if at == i), reverse=True)))
            == sum(at == i for _, at in chosen)
            for i, capacity in enumerate(capacities)
        ):
            best = worth
    return best


@st.composite
def few(draw, gpus, most):
    capacities = [gpu(i, draw(st.sampled_from(LAYOUTS[H100.name])).slots) for i in range(gpus)]
    elastic_jobs = []
    for job in range(draw(st.integers(1, most))):
        curve = draw(st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
        speeds = dict(zip((ONE, TWO, THREE, ALL), sorted(curve), strict=True))
        for small in draw(st.sets(st.sampled_from([ONE, TWO]), max_size=1)):
            speeds[small] = 0.0
        elastic_jobs.append(waits(job, speeds))
    return capacities, elastic_jobs


def compared(capacities, elastic_jobs):
    """The sum of worths that was reached and the greatest possible one; None if a job got nothing."""
    found = lend(capacities, elastic_jobs, {}, NOW, RULES)
    if found.lacking:
        return None
    share = max(
        1.0, sum(7 - sum(s.profile.compute for s in capacity.taken) for capacity in capacities) / len(elastic_jobs)
    )
    worths = {}
    for elastic_job in elastic_jobs:
        useful = sorted(p for p in elastic_job.speeds if elastic_job.speeds[p] > 0)
        fair = ([useful[0]] + [p for p in useful if p.compute <= share])[-1]
        worths[elastic_job.job] = {p: elastic_job.speeds[p] / elastic_job.speeds[fair] for p in useful}
    return sum(worths[grant.job][grant.profile] for grant in found.grants), best_sum(capacities, elastic_jobs, worths)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(few(gpus=1, most=3))
def test_sizes_on_one_gpu_are_close_to_the_best_possible(cluster):
    sums = compared(*cluster)
    assert sums is None or 0.75 * sums[1] <= sums[0] <= sums[1] + 1e-9


@pytest.mark.parametrize(("gpus", "cases", "exact"), [(1, 150, 0.97), (2, 40, 0.9)])
def test_sizes_are_optimal_in_most_random_cases(gpus, cases, exact):
    draw = random.Random(7)
    ratios = []
    while len(ratios) < cases:
        capacities = [gpu(i, draw.choice(LAYOUTS[H100.name]).slots if draw.random() < 0.6 else ()) for i in range(gpus)]
        elastic_jobs = []
        for job in range(draw.randint(1, 3)):
            curve = sorted(draw.uniform(0.05, 1.0) for _ in range(4))
            speeds = dict(zip((ONE, TWO, THREE, ALL), curve, strict=True))
            elastic_jobs.append(waits(job, speeds | ({ONE: 0.0} if draw.random() < 0.3 else {})))
        sums = compared(capacities, elastic_jobs)
        if sums is not None:
            ratios.append(sums[0] / sums[1])
    assert sum(ratio > 1 - 1e-9 for ratio in ratios) >= exact * cases
    assert sum(ratios) >= 0.99 * cases


def test_every_job_gets_a_slice_before_any_job_gets_a_larger_one():
    found = lend([gpu()], [waits(job) for job in range(7)], {}, NOW, RULES)
    assert Counter(grant.profile for grant in found.grants) == {ONE: 7}
    assert not found.lacking


def test_single_job_gets_the_smallest_slice_with_its_highest_speed():
    (grant,) = lend([gpu()], [waits("j")], {}, NOW, RULES).grants
    assert grant.profile == ALL
    flat = dict.fromkeys(PLAIN, 0.8)
    assert lend([gpu()], [waits("j", flat)], {}, NOW, RULES).grants[0].profile == ONE


def test_jobs_get_a_gpu_each_else_the_one_that_gains_more_the_larger_slice():
    found = lend([gpu(0), gpu(1)], [waits("a"), waits("b")], {}, NOW, RULES)
    assert {(grant.profile, grant.gpu) for grant in found.grants} == {(ALL, 0), (ALL, 1)}
    steep, flat = {ONE: 0.1, THREE: 0.4, FOUR: 0.6}, {ONE: 0.5, THREE: 0.55, FOUR: 0.6}
    found = lend([gpu()], [waits("flat", flat), waits("steep", steep)], {}, NOW, RULES)
    assert {grant.job: grant.profile for grant in found.grants} == {"flat": THREE, "steep": FOUR}


def test_loan_is_placed_where_it_leaves_the_largest_free_space():
    capacities = [gpu(0), gpu(1, taken=[slot(FOUR, 0)])]
    (grant,) = lend(capacities, [waits("j", {ONE: 1.0})], {}, NOW, RULES).grants
    assert grant.gpu == 1


# -- what is not lent ------------------------------------------------------------------------------------------------


def why(capacities, *elastic_jobs, reserve=None, releases=8):
    found = lend(capacities, elastic_jobs, reserve or {}, NOW, RULES, releases)
    return [found.lacking.get(elastic_job.job, "given") for elastic_job in elastic_jobs]


def test_each_reason_for_not_lending_is_reported():
    assert why([gpu()], waits("a", {Profile.parse("1g.24gb"): 1.0})) == ["profile"]
    assert why([gpu()], waits("a", {ONE: 0.0})) == ["profile"]
    assert why([gpu(taken=[slot(FOUR, 0)])], waits("a", {FOUR: 1.0})) == ["capacity"]
    large, running = on(ALL, 0, "r")
    crowded = gpu(1, taken=[slot(FOUR, 0), slot(TWO, 4)])
    assert why([large, crowded], running, waits("a"), reserve={ONE: 1})[1:] == ["reserve"]
    assert why([gpu(idle_since=NOW - 60)], waits("a")) == ["idle"]
    assert why([gpu(reclaimed=NOW - 60)], waits("a")) == ["idle"]
    assert why([gpu()], waits("a"), waits("b"), releases=1) == ["given", "round"]


def test_job_kept_out_only_by_the_reserve_gets_its_fair_share_or_nothing():
    found = lend([gpu()], [waits("a"), waits("b")], {ALL: 1}, NOW, RULES)
    assert [(grant.job, grant.profile, grant.reserved) for grant in found.grants] == [
        ("a", FOUR, True),
        ("b", THREE, True),
    ]
    assert found.short == {ALL: 1}
    assert not lend([gpu()], [waits("a")], {ONE: 1}, NOW, RULES).grants[0].reserved
    large, running = on(ALL, 0, "r")
    fits_one = gpu(1, taken=[slot(FOUR, 0), slot(TWO, 4)])
    found = lend([large, fits_one], [running, waits("a")], {ONE: 1}, NOW, RULES)
    assert (found.grants, found.short) == ((), {})


def test_rest_of_the_reserve_is_kept_when_jobs_start_in_it():
    found = lend([gpu(0), gpu(1)], [waits(job, {ALL: 1.0}) for job in "ab"], {ALL: 1}, NOW, RULES)
    assert [(grant.job, grant.reserved) for grant in found.grants] == [("a", False), ("b", True)]
    assert found.short == {ALL: 1}
    found = lend([gpu(0), gpu(1)], [waits("a", {ALL: 1.0})], {THREE: 4}, NOW, RULES, 1)
    assert [grant.reserved for grant in found.grants] == [True]
    assert found.short == {THREE: 2}
    assert not lend([gpu()], [waits("a")], {ALL: 1}, NOW, RULES, 0).grants


def test_reserve_is_placed_on_gpus_that_may_not_be_lent_if_possible():
    capacities = [gpu(0), gpu(1, idle_since=NOW - 60)]
    found = lend(capacities, [waits("a")], {ALL: 1}, NOW, RULES)
    assert [grant.gpu for grant in found.grants] == [0]
    assert not found.short


def test_training_only_gpus_are_lent_first_and_hold_no_reserve():
    capacities = [gpu(0, own=True, idle_since=NOW), gpu(1)]
    found = lend(capacities, [waits("a"), waits("b")], {ALL: 1}, NOW, RULES)
    assert [grant.gpu for grant in found.grants] == [0, 0]
    assert lend(capacities[:1], [waits("a")], {ALL: 1}, NOW, RULES).short == {ALL: 1}
    leaving = gpu(0, own=True, reclaimed=math.inf)
    assert lend([leaving], [waits("a")], {}, NOW, RULES).lacking == {"a": "idle"}


def test_reserve_without_room_is_reported_and_the_rest_is_lent():
    found = lend([gpu(taken=[slot(FOUR, 0)])], [waits("a")], {FOUR: 2}, NOW, RULES)
    assert found.short == {FOUR: 2}
    assert [grant.profile for grant in found.grants] == [THREE]


# -- growing ---------------------------------------------------------------------------------------------------------


def on(profile, start, job, **more):
    placed = slot(profile, start)
    return gpu(lent=[LentSlot(placed, job)]), runs(job, SlotReference("n0", 0, placed), **more)


def test_job_grows_into_the_placement_of_its_own_slice_when_it_pays():
    capacity, job = on(ONE, 0, "j", restart_s=30, left_s=5000)
    (grow,) = lend([capacity], [job], {}, NOW, RULES).grows
    assert (grow.before, grow.profile, grow.gpu) == (ONE, ALL, 0)
    assert grow.faster == pytest.approx(7**0.5)
    # On the whole GPU, its fair share, it works (600 - 370) / 600 of the time: a little more than 7**-0.5.
    capacity, job = on(ONE, 0, "j", restart_s=370, left_s=5000)
    assert [grow.profile for grow in lend([capacity], [job], {}, NOW, RULES).grows] == [ALL]


@pytest.mark.parametrize(
    "more",
    [
        {"since": NOW - 200},
        {"since": NOW - 1000, "restarts": 3},
        {"left_s": 30.0},
        {"restart_s": 400},
        {"speeds": {ONE: 0.8, ALL: 1.0}},
    ],
    ids=["too soon", "too often", "nearly done", "too dear", "too little"],
)
def test_job_does_not_grow_too_soon_too_often_or_for_too_little(more):
    capacity, job = on(ONE, 0, "j", **({"left_s": 5000.0, "speeds": ROOT} | more))
    assert lend([capacity], [job], {}, NOW, RULES).grows == ()


def test_job_whose_slice_is_already_promised_grows_only_elsewhere():
    _, job = on(ONE, 0, "j", left_s=5000.0)
    capacities = [gpu(0, taken=[slot(THREE, 0)]), gpu(1)]
    (grow,) = lend(capacities, [job], {}, NOW, RULES).grows
    assert grow.gpu == 1


def test_stopped_jobs_get_their_larger_slices_before_other_jobs_get_any():
    """Otherwise jobs that come back at once would each get the smallest slice again, and the restart be wasted."""
    jobs = [waits(0), waits(1, target=goes_to(FOUR)), waits(2, target=goes_to(THREE)), waits(3)]
    found = lend([gpu()], jobs, {}, NOW, RULES)
    assert {grant.job: grant.profile for grant in found.grants} == {1: FOUR, 2: THREE}
    assert found.lacking == {0: "capacity", 3: "capacity"}


def test_target_that_no_longer_has_room_is_ignored():
    found = lend([gpu(taken=[slot(FOUR, 0)])], [waits(1, target=goes_to(FOUR))], {}, NOW, RULES)
    assert [(grant.job, grant.profile) for grant in found.grants] == [(1, THREE)]


def test_stopped_jobs_get_their_target_slices_before_the_reserve():
    """No job is stopped for inference that is only expected, and no GPU stays empty for it because of a division."""
    jobs = [waits(1, target=goes_to(FOUR)), waits(2, target=goes_to(THREE)), waits(3)]
    found = lend([gpu()], jobs, {ALL: 1}, NOW, RULES)
    assert {grant.job: grant.profile for grant in found.grants} == {1: FOUR, 2: THREE}
    assert found.short == {ALL: 1}


def test_targets_on_several_gpus_are_granted_where_they_were_planned():
    capacities = [gpu(0), gpu(1, taken=[slot(THREE, 4)])]
    jobs = [waits(1, target=goes_to(THREE, index=0)), waits(2, target=goes_to(FOUR, index=1))]
    found = lend([*capacities], [*jobs, waits(3, target=goes_to(FOUR, index=0))], {}, NOW, RULES)
    assert {grant.job: (grant.profile, grant.gpu) for grant in found.grants} == {
        1: (THREE, 0),
        2: (FOUR, 1),
        3: (FOUR, 0),
    }


@pytest.mark.parametrize("more", [{"needs_s": 30.0}, {"shares": True}])
def test_job_that_reports_it_ends_soon_or_shares_its_slice_is_not_grown(more):
    capacity, job = on(ONE, 0, "j", left_s=5000.0, **more)
    assert lend([capacity], [job], {}, NOW, RULES).grows == ()


def test_no_job_grows_while_another_waits_for_the_room():
    capacity, job = on(ONE, 0, "j", left_s=5000)
    assert lend([capacity], [job, waits("w", {ALL: 1.0})], {}, NOW, RULES).grows == ()
    assert len(lend([capacity], [job, waits("w", {THREE: 1.0})], {}, NOW, RULES).grows) == 1


# -- reclaiming ------------------------------------------------------------------------------------------------------


def ended_for(starts, capacities, elastic_jobs):
    """The loans reclaimed for inference jobs of these profiles, and the GPUs after those jobs have started."""
    job_of = {number: elastic_job.job for number, elastic_job in enumerate(elastic_jobs)}
    number_of = {job: number for number, job in job_of.items()}
    view = LendingView(
        now=NOW,
        capacities=tuple(
            replace(capacity, lent=tuple(replace(loan, job=number_of[loan.job]) for loan in capacity.lent))
            for capacity in capacities
        ),
        starts=tuple(
            WaitingInference(1000 + number, (profile,), frozenset(capacity.node for capacity in capacities))
            for number, profile in enumerate(starts)
        ),
        elastic_jobs=tuple(replace(elastic_job, job=number_of[elastic_job.job]) for elastic_job in elastic_jobs),
        loans={
            number_of[elastic_job.job]: Loan(
                number_of[elastic_job.job], 0, elastic_job.since, str(elastic_job.place.slot.profile), State.RUNNING
            )
            for elastic_job in elastic_jobs
            if elastic_job.place is not None
        },
        job_views={number: JobView(JobRow(number), LoanHints()) for number in job_of},
    )
    orders, after_start = reclaim_for(view, LendingRules(hysteresis=RULES))
    return [job_of[order.job] for order in orders], after_start


def test_three_small_loans_are_reclaimed_for_one_large_inference_job():
    small = [slot(ONE, start) for start in (0, 1, 2)]
    capacity = gpu(taken=[slot(THREE, 4)], lent=[LentSlot(held, i) for i, held in enumerate(small)])
    jobs = [runs(i, SlotReference("n0", 0, held)) for i, held in enumerate(small)]
    assert lent_sets_for(THREE, [capacity]) == [frozenset(SlotReference("n0", 0, held) for held in small)]
    assert ended_for([THREE], [capacity], jobs)[0] == [0, 1, 2]


def test_loan_of_least_loss_is_reclaimed_and_all_its_room_is_used():
    capacities = [
        gpu(0, [slot(THREE, 4)], [LentSlot(slot(FOUR, 0), "large")]),
        gpu(1, [slot(THREE, 4)], [LentSlot(slot(THREE, 0), "new")]),
    ]
    jobs = [
        runs("large", SlotReference("n0", 0, slot(FOUR, 0)), since=0.0),
        runs("new", SlotReference("n0", 1, slot(THREE, 0)), since=NOW - 10),
    ]
    assert ended_for([THREE], capacities, jobs)[0] == ["large"]
    assert ended_for([ONE, TWO], capacities, jobs)[0] == ["large"]
    assert ended_for([THREE, THREE], capacities, jobs)[0] == ["large", "new"]
    assert ended_for([THREE, THREE, ONE], capacities, jobs)[0] == ["large", "new"]
    assert ended_for([ALL], capacities, jobs)[0] == []


def test_loan_with_the_cheapest_restart_is_reclaimed_and_one_at_its_limit_of_restarts_last():
    capacities = [gpu(i, [slot(THREE, 4)], [LentSlot(slot(FOUR, 0), name)]) for i, name in enumerate("abc")]
    a, b, c = (runs(name, SlotReference("n0", i, slot(FOUR, 0)), since=0.0) for i, name in enumerate("abc"))
    jobs = [replace(a, restart_s=90.0), replace(b, restart_s=30.0), replace(c, restart_s=10.0, restarts=99)]
    assert ended_for([THREE], capacities, jobs)[0] == ["b"]
    assert ended_for([THREE] * 3, capacities, jobs)[0] == ["b", "a", "c"]
    assert ended_for([THREE], capacities, [replace(job, since=NOW) for job in jobs])[0] == ["b"]
    worn = [replace(job, restarts=99 + number, since=NOW) for number, job in enumerate(reversed(jobs))]
    assert ended_for([THREE], capacities, worn)[0] == ["c"]


def test_loan_beside_inference_is_reclaimed_before_one_on_a_gpu_of_training_alone():
    """Else inference on small parts of every GPU leaves no room for a job that needs a whole one."""
    capacities = [
        gpu(0, lent=[LentSlot(slot(THREE, 0), "cheap"), LentSlot(slot(THREE, 4), "alone")]),
        gpu(1, [slot(THREE, 4)], [LentSlot(slot(FOUR, 0), "beside")]),
    ]
    cheap, alone, beside = (
        runs(name, SlotReference("n0", number, place), since=0.0, restart_s=restart_s)
        for name, number, place, restart_s in (
            ("cheap", 0, slot(THREE, 0), 10.0),
            ("alone", 0, slot(THREE, 4), 20.0),
            ("beside", 1, slot(FOUR, 0), 90.0),
        )
    )
    jobs = [cheap, alone, beside]
    assert ended_for([ONE], capacities, jobs)[0] == ["beside"]
    assert ended_for([ONE, ALL], capacities, jobs)[0] == ["beside", "cheap", "alone"]
    assert ended_for([FOUR, THREE], capacities, jobs)[0] == ["beside", "cheap"]
    assert ended_for([ONE], capacities, [cheap, alone, replace(beside, since=NOW)])[0] == ["cheap"]


def test_room_of_a_reclaimed_loan_is_for_the_job_it_is_reclaimed_for():
    """Both places would fit job 8 once their loans are about to end, and job 11 needs the one on n0."""
    old, both = [slot(ONE, at) for at in (4, 5, 6)], frozenset({"n0", "n1"})
    places = [
        SlotReference("n0", 0, slot(DOUBLE, 4)),
        SlotReference("n0", 0, slot(FOUR, 0)),
        SlotReference("n1", 0, slot(ONE, 1)),
        SlotReference("n1", 0, slot(ONE, 2)),
    ]
    loans = {job: Loan(job, 0, NOW - 10, str(place.slot.profile), State.RUNNING) for job, place in enumerate(places, 1)}
    view = LendingView(
        now=NOW,
        capacities=(
            gpu(taken=[slot(ONE, 6)], lent=[LentSlot(places[job - 1].slot, job) for job in (1, 2)]),
            gpu(node="n1", taken=[slot(ONE, 3), *old], lent=[LentSlot(places[job - 1].slot, job) for job in (3, 4)]),
        ),
        about_to_be_free={("n1", 0): slot(ONE, 3).placement.mask},
        starts=(WaitingInference(8, (TWO,), both), WaitingInference(11, (ONE,), both, nodes=2)),
        elastic_jobs=tuple(
            runs(job, place, {ONE: 0.1} if job == 4 else ROOT, since=NOW - 10) for job, place in enumerate(places, 1)
        ),
        loans=loans,
        job_views={job: JobView(JobRow(job), LoanHints()) for job in loans},
    )
    orders, _ = reclaim_for(view, LendingRules(hysteresis=RULES))
    assert {order.job: order.inference for order in orders} == {4: 8, 1: 11}
    ending = {job: replace(loan, state=State.REQUEUED) if job in (1, 4) else loan for job, loan in loans.items()}
    forgotten, _ = reclaim_for(replace(view, loans=ending), LendingRules(hysteresis=RULES))
    assert [order.job for order in forgotten] == [2]
    later, _ = reclaim_for(replace(view, loans=ending, ends_for={4: 8, 1: 11}), LendingRules(hysteresis=RULES))
    assert later == []


class Name(str):
    """A name of a node that counts how often any is looked up."""

    __slots__ = ()
    seen = 0

    def __hash__(self):
        Name.seen += 1
        return super().__hash__()


class Number(int):
    """The number of a job that counts how often any is compared."""

    seen = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Number.seen += 1
        return super().__eq__(other)

    def __ne__(self, other):
        Number.seen += 1
        return super().__ne__(other)


def test_each_node_is_looked_at_alone_for_a_job_of_several_slices():
    def looked_up(nodes):
        names = [Name(f"n{number}") for number in range(nodes)]
        start = WaitingInference(1, (ALL, ONE), frozenset(names))
        view = LendingView(now=NOW, capacities=tuple(gpu(taken=[slot(ONE, 0)], node=name) for name in names))
        Name.seen = 0
        reclaim_for(replace(view, starts=(start,)), LendingRules(hysteresis=RULES))
        return Name.seen

    assert looked_up(200) < 12 * looked_up(20)


def test_waiting_jobs_for_which_no_loan_ends_are_not_compared_with_each_other():
    def compared(jobs):
        capacity, job = on(ONE, 0, 1)
        starts = tuple(WaitingInference(Number(2 + i), (ALL,) * (2 + i), frozenset({"n0"})) for i in range(jobs))
        view = LendingView(now=NOW, capacities=(capacity,), starts=starts, elastic_jobs=(job,), ends_for={1: 5})
        Number.seen = 0
        reclaim_for(view, LendingRules(hysteresis=RULES))
        return Number.seen

    assert compared(200) < 12 * compared(20)


def test_no_loan_is_reclaimed_where_there_is_room():
    capacity, job = on(ONE, 0, "j")
    assert lent_sets_for(THREE, [capacity]) == []
    assert ended_for([THREE], [capacity], [job])[0] == []


def test_limit_on_compute_can_require_loans_outside_the_placement_to_end():
    # 4g + 3g use all seven compute slices, though no slot covers one of the memory slices.
    capacity = gpu(lent=[LentSlot(slot(FOUR, 0), "a"), LentSlot(slot(TWO, 4), "b"), LentSlot(slot(ONE, 6), "c")])
    found = lent_sets_for(THREE, [capacity])
    assert {frozenset(reference.slot for reference in lent_set) for lent_set in found} == {
        frozenset({slot(TWO, 4), slot(ONE, 6)}),
        frozenset({slot(FOUR, 0)}),
    }


@given(st.sampled_from(LAYOUTS[H100.name]), st.lists(st.booleans(), min_size=7, max_size=7), st.sampled_from(PLAIN))
def test_lent_sets_are_minimal_and_complete(layout, marks, profile):
    taken = [held for held, mark in zip(layout.slots, marks, strict=False) if mark]
    lent = [held for held in layout.slots if held not in taken]
    capacity = gpu(taken=taken, lent=[LentSlot(held, i) for i, held in enumerate(lent)])

    def fits(ended):
        left = Layout(held for held in layout.slots if held not in ended)
        return any(H100.fits(left, held) for held in H100.info(profile).slots)

    sets = [frozenset(some) for count in range(len(lent) + 1) for some in itertools.combinations(lent, count)]
    enough = [some for some in sets if fits(some)]
    least = {some for some in enough if not any(other < some for other in enough)}
    assert {frozenset(loan.slot for loan in lent_set) for lent_set in lent_sets_for(profile, [capacity])} == least - {
        frozenset()
    }


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters(), st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4))
def test_inference_has_room_after_the_reclaimed_loans_have_ended(cluster, starts):
    capacities, elastic_jobs, _, _ = cluster
    ended, after_start = ended_for(starts, capacities, elastic_jobs)
    running = {elastic_job.job for elastic_job in elastic_jobs if elastic_job.place is not None}
    assert running.issuperset(ended)
    assert len(set(ended)) == len(ended)
    for capacity in capacities:
        after = after_start[capacity.node, capacity.gpu]
        after.geometry.check(after.used)
        stays = {loan.slot for loan in capacity.lent if loan.job not in ended}
        assert {loan.slot for loan in after.lent} == stays
    started = sum(len(after_start[capacity.node, capacity.gpu].taken) - len(capacity.taken) for capacity in capacities)
    assert started <= len(starts)
    if started < len(starts):  # a job that could not start has no room even if every loan had ended
        empty = [
            replace(capacity, taken=after_start[capacity.node, capacity.gpu].taken, lent=()) for capacity in capacities
        ]
        assert any(
            all(
                profile not in capacity.geometry
                or not any(capacity.geometry.fits(capacity.used, held) for held in slots)
                for capacity in empty
                for slots in [capacity.geometry.info(profile).slots if profile in capacity.geometry else ()]
            )
            for profile in starts
        )


# -- helpers ---------------------------------------------------------------------------------------------------------


def test_profiles_within_min_and_max_have_no_suffix():
    assert within(H100, TWO, FOUR) == (FOUR, THREE, TWO)
    assert within(H100, None, ONE) == (ONE,)
    assert within(H100, DOUBLE, TWO) == (TWO, DOUBLE)
    assert within(A30, TWO, None) == (Profile.parse("4g.24gb"),)


def test_usual_speed_is_the_square_root_of_the_compute_share():
    assert [round(usual_speed(H100, p), 3) for p in (ONE, TWO, THREE, FOUR, ALL)] == [0.378, 0.535, 0.655, 0.756, 1.0]
    assert plan_free(H100, EMPTY, [THREE])
    assert Slot.of("1g.10gb", 6, 1) == slot(ONE, 6)

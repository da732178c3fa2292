"""Lending of slices: legal on any cluster, keeps the reserve of inference and Slurm's order; sizes by brute force."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.allocation import Hysteresis, RestartCosts
from slurm_migbatch.decide.lending.grants import lend
from slurm_migbatch.decide.lending.least_loss import rooms_for
from slurm_migbatch.decide.lending.ledger import JobView, Loan, State
from slurm_migbatch.decide.lending.model import LendingRules, LendingView, WaitingInference
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
LAYOUTS = {gpu.name: [one for one in layouts(gpu) if all(not p.suffix for p in one.profiles)] for gpu in (H100, A30)}
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
    spaces, elastic_jobs, job = [], [], itertools.count()
    names = ["n0", "n1"]
    for number in range(draw(st.integers(1, 4))):
        node = draw(st.sampled_from(names))
        model = draw(st.sampled_from([H100, H100, A30]))
        layout = draw(st.sampled_from(LAYOUTS[model.name]))
        taken, lent = [], []
        for one in layout.slots:
            if draw(st.booleans()):
                taken.append(one)
                continue
            name = next(job)
            lent.append(LentSlot(one, name))
            speeds = {**ROOT, **{p: usual_speed(A30, p) for p in within(A30, None, None)}}
            since = draw(st.sampled_from([0.0, NOW - 10]))
            elastic_jobs.append(
                runs(name, SlotReference(node, number, one), speeds, account=draw(st.sampled_from("ab")), since=since)
            )
        idle = draw(st.sampled_from([0.0, NOW - 10]))
        spaces.append(GpuCapacity(node, number, model, tuple(taken), tuple(lent), idle_since=idle))
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
    return spaces, draw(st.permutations(elastic_jobs)), reserve, draw(st.sampled_from([None, 0, 2]))


def decided(spaces, elastic_jobs, found):
    """Used layouts after all grants and grows have been carried out."""
    moved = {grow.job for grow in found.grows}
    used = {}
    for space in spaces:
        kept = [one.slot for one in space.lent if one.job not in moved]
        used[space.node, space.gpu] = Layout([*space.taken, *kept])
    for one in [*found.grants, *found.grows]:
        where = one.place.node, one.place.gpu
        assert used[where].free_of(one.place.slot.placement)
        used[where] = used[where].add(one.place.slot)
    return used


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters())
def test_grants_are_legal_on_every_gpu_and_meet_each_jobs_constraints(cluster):
    spaces, elastic_jobs, reserve, releases = cluster
    found = lend(spaces, elastic_jobs, reserve, NOW, RULES, releases)
    for (node, number), used in decided(spaces, elastic_jobs, found).items():
        next(space for space in spaces if (space.node, space.gpu) == (node, number)).geometry.check(used)
    by_job = {one.job: one for one in elastic_jobs}
    every: list[Release | Grow] = [*found.grants, *found.grows]
    for one in every:
        trainee = by_job[one.job]
        assert one.place.slot.profile == one.profile
        assert trainee.speeds[one.profile] > 0
        assert trainee.nodes is None or one.place.node in trainee.nodes
        space = next(space for space in spaces if (space.node, space.gpu) == one.place[:2])
        assert RULES.may_lend(NOW, space.idle_since, space.reclaimed)
    waiting = [one.job for one in elastic_jobs if one.place is None]
    assert sorted([*(one.job for one in found.grants), *found.lacking]) == sorted(waiting)
    assert all(by_job[one.job].place is not None for one in found.grows)


def places(spaces, used, reserve, most):
    """How many of the reserve's profiles can be placed beside the used slots, by trying every way."""
    best = 0
    wanted = [profile for profile, count in reserve.items() for _ in range(count)]
    where = [(space.geometry, used[space.node, space.gpu]) for space in spaces]
    for division in itertools.product(range(len(where) + 1), repeat=len(wanted)):
        met = 0
        for number, (model, layout) in enumerate(where):
            mine = [profile for profile, at in zip(wanted, division, strict=True) if at == number]
            if len(plan_free(model, layout, mine)) != len(mine):
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
    spaces, elastic_jobs, reserve, releases = cluster
    found = lend(spaces, elastic_jobs, reserve, NOW, RULES, releases)
    kept = sum(reserve.values()) - sum(found.short.values())
    assert places(spaces, decided(spaces, elastic_jobs, found), reserve, kept) >= kept


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters())
def test_grants_respect_the_limit_of_a_round_and_the_order_of_slurm(cluster):
    spaces, elastic_jobs, reserve, releases = cluster
    found = lend(spaces, elastic_jobs, reserve, NOW, RULES, releases)
    assert releases is None or len(found.grants) + len(found.grows) <= releases
    # No job goes without a slice for the sake of a job behind it.
    half = len(elastic_jobs) // 2
    first = [one for number, one in enumerate(elastic_jobs) if number < half or one.place is not None]
    begin = lend(spaces, first, reserve, NOW, RULES, releases)
    assert begin.lacking.items() <= found.lacking.items()
    assert found == lend(spaces, elastic_jobs, reserve, NOW, RULES, releases)


# -- sizes -----------------------------------------------------------------------------------------------------------


def best_sum(spaces, elastic_jobs, worths):
    """The greatest sum of worths in which every job has a slice, by brute force."""
    options = [[(p, at) for p in worths[one.job] for at in range(len(spaces))] for one in elastic_jobs]
    best = 0.0
    for chosen in itertools.product(*options):
        worth = sum(worths[one.job][p] for one, (p, _) in zip(elastic_jobs, chosen, strict=True))
        if worth > best and all(
            len(plan_free(space.geometry, space.used, sorted((p for p, at in chosen if at == i), reverse=True)))
            == sum(at == i for _, at in chosen)
            for i, space in enumerate(spaces)
        ):
            best = worth
    return best


@st.composite
def few(draw, gpus, most):
    spaces = [gpu(i, draw(st.sampled_from(LAYOUTS[H100.name])).slots) for i in range(gpus)]
    elastic_jobs = []
    for job in range(draw(st.integers(1, most))):
        curve = draw(st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
        speeds = dict(zip((ONE, TWO, THREE, ALL), sorted(curve), strict=True))
        for small in draw(st.sets(st.sampled_from([ONE, TWO]), max_size=1)):
            speeds[small] = 0.0
        elastic_jobs.append(waits(job, speeds))
    return spaces, elastic_jobs


def compared(spaces, elastic_jobs):
    """The sum of worths that was reached and the greatest possible one; None if a job got nothing."""
    found = lend(spaces, elastic_jobs, {}, NOW, RULES)
    if found.lacking:
        return None
    share = max(1.0, sum(7 - sum(s.profile.compute for s in space.taken) for space in spaces) / len(elastic_jobs))
    worths = {}
    for one in elastic_jobs:
        useful = sorted(p for p in one.speeds if one.speeds[p] > 0)
        fair = ([useful[0]] + [p for p in useful if p.compute <= share])[-1]
        worths[one.job] = {p: one.speeds[p] / one.speeds[fair] for p in useful}
    assert all(one.worth == pytest.approx(worths[one.job][one.profile]) for one in found.grants)
    return sum(one.worth for one in found.grants), best_sum(spaces, elastic_jobs, worths)


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
        spaces = [gpu(i, draw.choice(LAYOUTS[H100.name]).slots if draw.random() < 0.6 else ()) for i in range(gpus)]
        elastic_jobs = []
        for job in range(draw.randint(1, 3)):
            curve = sorted(draw.uniform(0.05, 1.0) for _ in range(4))
            speeds = dict(zip((ONE, TWO, THREE, ALL), curve, strict=True))
            elastic_jobs.append(waits(job, speeds | ({ONE: 0.0} if draw.random() < 0.3 else {})))
        sums = compared(spaces, elastic_jobs)
        if sums is not None:
            ratios.append(sums[0] / sums[1])
    assert sum(ratio > 1 - 1e-9 for ratio in ratios) >= exact * cases
    assert sum(ratios) >= 0.99 * cases


def test_every_job_gets_a_slice_before_any_job_gets_a_larger_one():
    found = lend([gpu()], [waits(job) for job in range(7)], {}, NOW, RULES)
    assert Counter(one.profile for one in found.grants) == {ONE: 7}
    assert not found.lacking


def test_single_job_gets_the_smallest_slice_with_its_highest_speed():
    (grant,) = lend([gpu()], [waits("j")], {}, NOW, RULES).grants
    assert grant.profile == ALL
    flat = dict.fromkeys(PLAIN, 0.8)
    assert lend([gpu()], [waits("j", flat)], {}, NOW, RULES).grants[0].profile == ONE


def test_jobs_get_a_gpu_each_else_the_one_that_gains_more_the_larger_slice():
    found = lend([gpu(0), gpu(1)], [waits("a"), waits("b")], {}, NOW, RULES)
    assert {(one.profile, one.place.gpu) for one in found.grants} == {(ALL, 0), (ALL, 1)}
    steep, flat = {ONE: 0.1, THREE: 0.4, FOUR: 0.6}, {ONE: 0.5, THREE: 0.55, FOUR: 0.6}
    found = lend([gpu()], [waits("flat", flat), waits("steep", steep)], {}, NOW, RULES)
    assert {one.job: one.profile for one in found.grants} == {"flat": THREE, "steep": FOUR}


def test_loan_is_placed_where_it_leaves_the_largest_free_space():
    spaces = [gpu(0), gpu(1, taken=[slot(FOUR, 0)])]
    (grant,) = lend(spaces, [waits("j", {ONE: 1.0})], {}, NOW, RULES).grants
    assert grant.place == SlotReference("n0", 1, slot(ONE, 6))


# -- what is not lent ------------------------------------------------------------------------------------------------


def why(spaces, *elastic_jobs, reserve=None, releases=None):
    found = lend(spaces, elastic_jobs, reserve or {}, NOW, RULES, releases)
    return [found.lacking.get(one.job, "given") for one in elastic_jobs]


def test_each_reason_for_not_lending_is_reported():
    assert why([gpu()], waits("a", {Profile.parse("1g.24gb"): 1.0})) == ["profile"]
    assert why([gpu()], waits("a", {ONE: 0.0})) == ["profile"]
    assert why([gpu(taken=[slot(FOUR, 0)])], waits("a", {FOUR: 1.0})) == ["room"]
    large, running = on(ALL, 0, "r")
    crowded = gpu(1, taken=[slot(FOUR, 0), slot(TWO, 4)])
    assert why([large, crowded], running, waits("a"), reserve={ONE: 1})[1:] == ["reserve"]
    assert why([gpu(idle_since=NOW - 60)], waits("a")) == ["idle"]
    assert why([gpu(reclaimed=NOW - 60)], waits("a")) == ["idle"]
    assert why([gpu()], waits("a"), waits("b"), releases=1) == ["given", "round"]


def test_job_kept_out_only_by_the_reserve_gets_its_fair_share_or_nothing():
    found = lend([gpu()], [waits("a"), waits("b")], {ALL: 1}, NOW, RULES)
    assert [(one.job, one.profile, one.reserved) for one in found.grants] == [("a", FOUR, True), ("b", THREE, True)]
    assert found.short == {ALL: 1}
    assert not lend([gpu()], [waits("a")], {ONE: 1}, NOW, RULES).grants[0].reserved
    large, running = on(ALL, 0, "r")
    room_for_one = gpu(1, taken=[slot(FOUR, 0), slot(TWO, 4)])
    found = lend([large, room_for_one], [running, waits("a")], {ONE: 1}, NOW, RULES)
    assert (found.grants, found.short) == ((), {})


def test_rest_of_the_reserve_is_kept_when_jobs_start_in_it():
    found = lend([gpu(0), gpu(1)], [waits(job, {ALL: 1.0}) for job in "ab"], {ALL: 1}, NOW, RULES)
    assert [(one.job, one.reserved) for one in found.grants] == [("a", False), ("b", True)]
    assert found.short == {ALL: 1}
    found = lend([gpu(0), gpu(1)], [waits("a", {ALL: 1.0})], {THREE: 4}, NOW, RULES, 1)
    assert [one.reserved for one in found.grants] == [True]
    assert found.short == {THREE: 2}
    assert not lend([gpu()], [waits("a")], {ALL: 1}, NOW, RULES, 0).grants


def test_reserve_is_placed_on_gpus_that_may_not_be_lent_if_possible():
    spaces = [gpu(0), gpu(1, idle_since=NOW - 60)]
    found = lend(spaces, [waits("a")], {ALL: 1}, NOW, RULES)
    assert [one.place.gpu for one in found.grants] == [0]
    assert not found.short


def test_training_only_gpus_are_lent_first_and_hold_no_reserve():
    spaces = [gpu(0, own=True, idle_since=NOW), gpu(1)]
    found = lend(spaces, [waits("a"), waits("b")], {ALL: 1}, NOW, RULES)
    assert [one.place.gpu for one in found.grants] == [0, 0]
    assert lend(spaces[:1], [waits("a")], {ALL: 1}, NOW, RULES).short == {ALL: 1}
    leaving = gpu(0, own=True, reclaimed=math.inf)
    assert lend([leaving], [waits("a")], {}, NOW, RULES).lacking == {"a": "idle"}


def test_reserve_without_room_is_reported_and_the_rest_is_lent():
    found = lend([gpu(taken=[slot(FOUR, 0)])], [waits("a")], {FOUR: 2}, NOW, RULES)
    assert found.short == {FOUR: 2}
    assert [one.profile for one in found.grants] == [THREE]


# -- growing ---------------------------------------------------------------------------------------------------------


def on(profile, start, job, **more):
    one = slot(profile, start)
    return gpu(lent=[LentSlot(one, job)]), runs(job, SlotReference("n0", 0, one), **more)


def test_job_grows_into_the_placement_of_its_own_slice_when_it_pays():
    space, job = on(ONE, 0, "j", costs=RestartCosts(30, 30), left_s=5000)
    (grow,) = lend([space], [job], {}, NOW, RULES).grows
    assert (grow.before, grow.profile, grow.place.slot) == (ONE, ALL, slot(ALL, 0))
    assert grow.faster == pytest.approx(7**0.5)
    # On the whole GPU, its fair share, it works 570 of 600 s.
    assert grow.gain == pytest.approx(570 / 600 - 7**-0.5)


@pytest.mark.parametrize(
    "more",
    [
        {"since": NOW - 200},
        {"since": NOW - 1000, "restarts": 3},
        {"left_s": 30.0},
        {"costs": RestartCosts(400, 400)},
        {"speeds": {ONE: 0.8, ALL: 1.0}},
    ],
    ids=["too soon", "too often", "nearly done", "too dear", "too little"],
)
def test_job_does_not_grow_too_soon_too_often_or_for_too_little(more):
    space, job = on(ONE, 0, "j", **({"left_s": 5000.0, "speeds": ROOT} | more))
    assert lend([space], [job], {}, NOW, RULES).grows == ()


def test_job_whose_slice_is_already_promised_grows_only_elsewhere():
    _, job = on(ONE, 0, "j", left_s=5000.0)
    spaces = [gpu(0, taken=[slot(THREE, 0)]), gpu(1)]
    (grow,) = lend(spaces, [job], {}, NOW, RULES).grows
    assert grow.place.gpu == 1


def test_stopped_jobs_get_their_larger_slices_before_other_jobs_get_any():
    """Otherwise jobs that come back at once would each get the smallest slice again, and the restart be wasted."""
    jobs = [waits(0), waits(1, target=goes_to(FOUR)), waits(2, target=goes_to(THREE)), waits(3)]
    found = lend([gpu()], jobs, {}, NOW, RULES)
    assert {grant.job: grant.profile for grant in found.grants} == {1: FOUR, 2: THREE}
    assert found.lacking == {0: "room", 3: "room"}


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
    spaces = [gpu(0), gpu(1, taken=[slot(THREE, 4)])]
    jobs = [waits(1, target=goes_to(THREE, index=0)), waits(2, target=goes_to(FOUR, index=1))]
    found = lend([*spaces], [*jobs, waits(3, target=goes_to(FOUR, index=0))], {}, NOW, RULES)
    assert {grant.job: (grant.profile, grant.place.gpu) for grant in found.grants} == {
        1: (THREE, 0),
        2: (FOUR, 1),
        3: (FOUR, 0),
    }


@pytest.mark.parametrize("more", [{"needs_s": 30.0}, {"shares": True}])
def test_job_that_reports_it_ends_soon_or_shares_its_slice_is_not_grown(more):
    space, job = on(ONE, 0, "j", left_s=5000.0, **more)
    assert lend([space], [job], {}, NOW, RULES).grows == ()


def test_no_job_grows_while_another_waits_for_the_room():
    space, job = on(ONE, 0, "j", left_s=5000)
    assert lend([space], [job, waits("w", {ALL: 1.0})], {}, NOW, RULES).grows == ()
    assert len(lend([space], [job, waits("w", {THREE: 1.0})], {}, NOW, RULES).grows) == 1


# -- reclaiming ------------------------------------------------------------------------------------------------------


def called_back(starts, spaces, elastic_jobs):
    """The loans reclaimed for inference jobs of these profiles, and the GPUs after those jobs have started."""
    job_of = {number: one.job for number, one in enumerate(elastic_jobs)}
    number_of = {job: number for number, job in job_of.items()}
    view = LendingView(
        now=NOW,
        spaces=tuple(
            replace(space, lent=tuple(replace(one, job=number_of[one.job]) for one in space.lent)) for space in spaces
        ),
        starts=tuple(
            WaitingInference(1000 + number, (profile,), frozenset(space.node for space in spaces))
            for number, profile in enumerate(starts)
        ),
        elastic_jobs=tuple(replace(one, job=number_of[one.job]) for one in elastic_jobs),
        loans={
            number_of[one.job]: Loan(number_of[one.job], 0, one.since, str(one.place.slot.profile), State.RUNNING)
            for one in elastic_jobs
            if one.place is not None
        },
        job_views={number: JobView(JobRow(number), LoanHints()) for number in job_of},
    )
    orders, ground = reclaim_for(view, LendingRules(hysteresis=RULES))
    return [job_of[order.job] for order in orders], ground


def test_three_small_loans_are_reclaimed_for_one_large_inference_job():
    small = [slot(ONE, start) for start in (0, 1, 2)]
    space = gpu(taken=[slot(THREE, 4)], lent=[LentSlot(one, i) for i, one in enumerate(small)])
    jobs = [runs(i, SlotReference("n0", 0, one)) for i, one in enumerate(small)]
    assert rooms_for(THREE, [space]) == [frozenset(SlotReference("n0", 0, one) for one in small)]
    assert called_back([THREE], [space], jobs)[0] == [0, 1, 2]


def test_loan_of_least_loss_is_reclaimed_and_all_its_room_is_used():
    spaces = [
        gpu(0, [slot(THREE, 4)], [LentSlot(slot(FOUR, 0), "large")]),
        gpu(1, [slot(THREE, 4)], [LentSlot(slot(THREE, 0), "new")]),
    ]
    jobs = [
        runs("large", SlotReference("n0", 0, slot(FOUR, 0)), since=0.0),
        runs("new", SlotReference("n0", 1, slot(THREE, 0)), since=NOW - 10),
    ]
    assert called_back([THREE], spaces, jobs)[0] == ["large"]
    assert called_back([ONE, TWO], spaces, jobs)[0] == ["large"]
    assert called_back([THREE, THREE], spaces, jobs)[0] == ["large", "new"]
    assert called_back([THREE, THREE, ONE], spaces, jobs)[0] == ["large", "new"]
    assert called_back([ALL], spaces, jobs)[0] == []


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
        spaces=(
            gpu(taken=[slot(ONE, 6)], lent=[LentSlot(places[job - 1].slot, job) for job in (1, 2)]),
            gpu(node="n1", taken=[slot(ONE, 3), *old], lent=[LentSlot(places[job - 1].slot, job) for job in (3, 4)]),
        ),
        passing={("n1", 0): slot(ONE, 3).placement.mask},
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


def test_no_loan_is_reclaimed_where_there_is_room():
    space, job = on(ONE, 0, "j")
    assert rooms_for(THREE, [space]) == []
    assert called_back([THREE], [space], [job])[0] == []


def test_limit_on_compute_can_require_loans_outside_the_placement_to_end():
    # 4g + 3g use all seven compute slices, though no slot covers one of the memory slices.
    space = gpu(lent=[LentSlot(slot(FOUR, 0), "a"), LentSlot(slot(TWO, 4), "b"), LentSlot(slot(ONE, 6), "c")])
    found = rooms_for(THREE, [space])
    assert {frozenset(one.slot for one in room) for room in found} == {
        frozenset({slot(TWO, 4), slot(ONE, 6)}),
        frozenset({slot(FOUR, 0)}),
    }


@given(st.sampled_from(LAYOUTS[H100.name]), st.lists(st.booleans(), min_size=7, max_size=7), st.sampled_from(PLAIN))
def test_rooms_are_minimal_and_complete(layout, marks, profile):
    taken = [one for one, mark in zip(layout.slots, marks, strict=False) if mark]
    lent = [one for one in layout.slots if one not in taken]
    space = gpu(taken=taken, lent=[LentSlot(one, i) for i, one in enumerate(lent)])

    def room(gone):
        left = Layout(one for one in layout.slots if one not in gone)
        return any(H100.fits(left, one) for one in H100.info(profile).slots)

    sets = [frozenset(some) for count in range(len(lent) + 1) for some in itertools.combinations(lent, count)]
    enough = [some for some in sets if room(some)]
    least = {some for some in enough if not any(other < some for other in enough)}
    assert {frozenset(one.slot for one in some) for some in rooms_for(profile, [space])} == least - {frozenset()}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(clusters(), st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4))
def test_inference_has_room_after_the_reclaimed_loans_have_ended(cluster, starts):
    spaces, elastic_jobs, _, _ = cluster
    ended, ground = called_back(starts, spaces, elastic_jobs)
    running = {one.job for one in elastic_jobs if one.place is not None}
    assert running.issuperset(ended)
    assert len(set(ended)) == len(ended)
    for space in spaces:
        after = ground.spaces[space.node, space.gpu]
        after.geometry.check(after.used)
        stays = {one.slot for one in space.lent if one.job not in ended}
        assert {one.slot for one in after.lent} == stays
    started = sum(len(ground.spaces[space.node, space.gpu].taken) - len(space.taken) for space in spaces)
    assert started <= len(starts)
    if started < len(starts):  # a job that could not start has no room even if every loan had ended
        empty = [replace(space, taken=ground.spaces[space.node, space.gpu].taken, lent=()) for space in spaces]
        assert any(
            all(
                profile not in space.geometry or not any(space.geometry.fits(space.used, one) for one in slots)
                for space in empty
                for slots in [space.geometry.info(profile).slots if profile in space.geometry else ()]
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

"""Pairs of jobs on one slice: small cases computed by hand, and invariants."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.lending import pairs as sharing_pairs
from slurm_migbatch.decide.lending.pair_finish import apart, finishes, together
from slurm_migbatch.decide.lending.pairs import (
    UNKNOWN_S,
    Host,
    Pair,
    Sharer,
    SharingRules,
    pairs,
    partings,
    renewals,
    shortest_first,
)
from slurm_migbatch.decide.lending.run_lengths import LengthErrors
from slurm_migbatch.decide.lending.sharing_queue import StepBudget
from slurm_migbatch.mig.profile import Profile

P2, P1 = Profile(2, 20), Profile(1, 10)
NO_MARGIN = SharingRules(gain=0.0, spare=0.0)
ONLY_EQUALS = SharingRules(
    measured={("bert", "bert", ""): 1.4, ("bert", "other", ""): 9.0, ("other", "bert", ""): 9.0}, gain=0.0
)


def sharer(job, left=1000.0, *, uid=7, app="bert", memory=5000.0, limit=None):
    return Sharer(job, uid, app, left, limit, memory)


def host(job, left=1000.0, *, memory_mib=20000.0, profile=P2, **values):
    return Host(sharer(job, left, **values), profile, memory_mib)


def everywhere(*jobs, speed=1.0):
    return {job: {P1: speed, P2: speed} for job in jobs}


def found(running, waiting, rules=NO_MARGIN, speeds=None):
    jobs = [host.sharer.job for host in running] + [guest.job for guest in waiting]
    return [(pair.guest, pair.host) for pair in pairs(running, waiting, speeds or everywhere(*jobs), rules)]


@pytest.mark.parametrize(("slowdown", "shares"), [(1.0, True), (1.49, True), (1.5, False), (2.0, False)])
def test_equal_jobs_share_if_the_slowdown_is_below_one_and_a_half(slowdown, shares):
    rules = SharingRules(slowdown=slowdown, gain=0.0, spare=0.0)
    assert found([host(1)], [sharer(2)], rules) == ([(2, 1)] if shares else [])


def test_unknown_slowdown_follows_from_the_activity_of_both_on_slices_of_the_profile():
    rules = SharingRules(measured={("gpt", "bert", "1g.10gb"): 1.2}, assumed={"1g.10gb": 1.9}, gain=0.0)
    busy, idle = (replace(sharer(job), activity={"2g.20gb": share}) for job, share in ((1, 0.9), (2, 0.2)))
    assert rules.slow(busy, busy, P2) > 2.0 > 1.5 > rules.slow(busy, idle, P2) > rules.slow(idle, idle, P2) > 1.0
    assert rules.slow(busy, sharer(3), P2) == 1.5 and rules.slow(busy, busy, P1) == 1.9
    assert rules.slow(sharer(1, app="gpt"), sharer(2), P1) == 1.2 and rules.slow(sharer(1, app="gpt"), busy, P2) == 1.5


def test_busy_jobs_do_not_share_where_idle_ones_do():
    for share, expected in ((0.95, []), (0.2, [(2, 1)])):
        first, second = (replace(sharer(job), activity={"2g.20gb": share}) for job in (1, 2))
        assert found([Host(first, P2, 20_000.0)], [second]) == expected


def test_short_guest_shares_with_a_long_host_despite_a_large_slowdown():
    """1.75 * (1 - 1/3.5) = 1.25 < (1 + 10000/100) / 2; with host and guest exchanged it does not pay."""
    rules = SharingRules(slowdown=1.75, gain=0.0)
    assert found([host(1, 10000.0)], [sharer(2, 100.0)], rules) == [(2, 1)]
    assert found([host(1, 100.0)], [sharer(2, 10000.0)], rules) == []


def test_finish_times_of_a_pair_match_a_hand_computed_case():
    """100 s beside 300 s at 1.2 and 1.4: the guest ends at 120 s, the host has done 120/1.4 s by then: 334.3 s."""
    rules = SharingRules(measured={("a", "b", ""): 1.2, ("b", "a", ""): 1.4}, gain=0.0)
    ends = finishes(100, 300, 1.2, 1.4)
    assert ends == pytest.approx((120.0, 334.2857), abs=1e-3)
    assert together(100, 300, 1.2, 1.4) == pytest.approx(sum(ends) / 2) and apart(100, 300) == 350.0
    (pair,) = pairs([host(1, 300, app="b")], [sharer(2, 100, app="a")], everywhere(1, 2), rules)
    assert pair == Pair(1, 2, pair.why)
    assert "beside job 1 on its 2g.20gb" in pair.why and "123 s sooner" in pair.why and "1.20 and 1.40" in pair.why


def test_measured_slowdowns_replace_the_default_where_they_are_known():
    bad = {("bert", "gpt", ""): 3.0, ("gpt", "bert", ""): 3.0}
    rules = SharingRules(slowdown=1.1, measured=bad, gain=0.0)
    assert found([host(1, app="gpt")], [sharer(2)], rules) == []
    assert found([host(1, app="gpt")], [sharer(2, app="vgg")], rules) == [(2, 1)]


def test_only_jobs_of_the_same_user_share():
    rules = SharingRules(slowdown=1.1)
    assert found([host(1, uid=7)], [sharer(2, uid=8)], rules) == []
    assert found([host(1, uid=7), host(3, uid=8)], [sharer(2, uid=8)], rules) == [(2, 3)]


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [(10000.0, 8000.0, True), (10000.0, 8001.0, False), (None, 1.0, False), (1.0, None, False)],
)
def test_memory_of_both_jobs_must_fit_with_a_tenth_to_spare(first, second, shares):
    rules = SharingRules(slowdown=1.1)
    assert found([host(1, memory=first)], [sharer(2, memory=second)], rules) == ([(2, 1)] if shares else [])


def test_pair_is_refused_if_sharing_would_exceed_a_time_limit():
    rules = SharingRules(slowdown=1.2)
    assert found([host(1, 1000.0, limit=1199.0)], [sharer(2, 1000.0)], rules) == []
    assert found([host(1, 1000.0, limit=1201.0)], [sharer(2, 1000.0)], rules) == [(2, 1)]
    assert found([host(1, 1000.0)], [sharer(2, 1000.0, limit=1199.0)], rules) == []


def test_job_of_unknown_length_is_assumed_to_take_half_its_limit():
    rules = SharingRules(slowdown=1.4, gain=0.0)
    assert found([host(1, None, limit=1000.0)], [sharer(2, 100.0)], rules) == [(2, 1)]
    assert found([host(1, None)], [sharer(2, math.inf)], rules) == [(2, 1)], "two unknown jobs"
    assert UNKNOWN_S > 86400


def test_sharing_is_refused_if_it_makes_a_time_limit_too_likely_to_be_hit():
    """Beside a guest that slows it down 1.2 times, the host does 900 s of work in its 1000 s."""
    rules = SharingRules(slowdown=1.2, late=0.02)
    running, waiting = [host(1, None, limit=1000.0)], [sharer(2, 500.0)]
    assert found(running, waiting, rules) == []
    assert found(running, waiting, replace(rules, late=0.2)) == [(2, 1)]
    resumes = [replace(running[0], sharer=replace(running[0].sharer, resumes=True))]
    assert found(resumes, waiting, rules) == [(2, 1)], "it is stopped before its limit, and continues"
    beyond = [replace(running[0], sharer=replace(running[0].sharer, limit_s=0.0, ran_s=1200.0, whole_s=1000.0))]
    assert found(beyond, waiting, rules) == [(2, 1)], "its limit does not end it"


def test_host_past_its_expected_end_is_not_assumed_to_end_at_once():
    """A job waits for a slice that is free in 10 s, but not for one whose job is long past its limit."""
    rules = ONLY_EQUALS
    errors = LengthErrors(0.0, 1.5)
    soon = Sharer(3, 7, "other", None, 20.0, 5000.0, whole_s=20.0, errors=errors)
    over = replace(soon, limit_s=0.0, ran_s=20_000.0)
    assert found([host(1), Host(soon, P2, 20000.0)], [sharer(2)], rules) == []
    assert found([host(1), Host(over, P2, 20000.0)], [sharer(2)], rules) == [(2, 1)]


# -- ending pairs ------------------------------------------------------------------------------------------------------


def parted(slow, guest_left=1000.0, restart_s=60.0, rules=NO_MARGIN):
    running = [replace(host(1, 5000.0), guest=sharer(2, guest_left))]
    both = {(2, 1): slow[0], (1, 2): slow[1]}
    ends = partings(running, everywhere(1, 2), rules, lambda job, beside: both[job, beside], restart_s)
    return [(pair.guest, pair.host) for pair in ends]


def test_pair_slower_than_one_job_alone_is_ended_if_a_restart_costs_less():
    assert parted((3.0, 3.0)) == [(2, 1)]
    assert parted((3.0, 3.0), guest_left=50.0) == [], "the guest ends in 150 s, which costs the host 50"
    assert parted((1.9, 1.9)) == []
    assert parted((1.0, 30.0)) == [], "the guest is as fast as alone"
    assert parted((None, None)) == [], "not known yet"
    assert parted((None, 9.0), rules=SharingRules(slowdown=1.5)) == [(2, 1)]


def test_pair_that_would_be_ended_is_not_started():
    rules = SharingRules(measured={("bert", "bert", ""): 2.3}, depth=0, gain=0.0)
    assert found([host(1, 10000.0)], [sharer(2, 10.0)], rules) == []
    assert found([host(1, 10000.0)], [sharer(2, 10.0)], replace(rules, measured={("bert", "bert", ""): 2.2})) == [
        (2, 1)
    ]


def test_job_that_reaches_its_limit_only_by_sharing_gets_a_new_limit():
    rules = SharingRules()
    due = Sharer(1, 7, limit_s=50.0, ran_s=500.0, whole_s=1000.0, resumes=True)
    assert renewals([due], rules, 60.0) == [1]
    others = [
        replace(due, limit_s=61.0),
        replace(due, ran_s=970.0),
        replace(due, resumes=False),
        replace(due, limit_s=None, whole_s=None),
        replace(due, ran_s=50.0, whole_s=200.0),
    ]
    assert [renewals([other], rules, 60.0) for other in others] == [[]] * 5


def test_slices_that_become_free_are_foreseen_for_jobs_in_slurms_order():
    """The slice free in 10 s goes to the longer job, first in the queue; so the shorter does not wait for it."""
    rules = ONLY_EQUALS
    running = [host(1, 4000.0), host(3, 10.0, app="other")]
    assert found(running, [sharer(5, 900.0), sharer(2, 800.0)], rules) == [(2, 1)]
    assert found(running, [sharer(2, 800.0)], rules) == []


def test_speeds_give_run_times_and_the_profiles_on_which_a_job_fits():
    rules = SharingRules(slowdown=1.1)
    assert found([host(1)], [sharer(2)], rules, {1: {P2: 0.3}, 2: {P1: 0.2}}) == []
    assert found([host(1)], [sharer(2)], rules, {1: {P2: 0.3}, 2: {P2: 0.2}}) == [(2, 1)]
    assert found([host(1)], [sharer(2)], rules, {2: {P2: 0.2}}) == []
    assert found([host(1)], [sharer(2, limit=3000.0)], rules, {1: {P2: 0.3}, 2: {P2: 0.3}}) == [], "takes 3333 s alone"


def test_pairs_with_the_earliest_mean_finish_are_chosen_one_guest_per_host():
    rules = SharingRules(slowdown=1.1)
    running = [host(1, 5000.0), host(3, 1000.0), host(4, 3000.0)]
    waiting = [sharer(2, 1000.0), sharer(5, 1000.0), sharer(6, 1000.0), sharer(7, 1000.0)]
    assert found(running, waiting, rules) == [(2, 3), (5, 4), (6, 1)]
    assert found(running, waiting, SharingRules(slowdown=1.1, most=1)) == [(2, 3)]


def test_pair_test_requires_a_margin_of_gain():
    assert found([host(1)], [sharer(2)], SharingRules(slowdown=1.49, gain=0.0, depth=0)) == [(2, 1)]
    assert found([host(1)], [sharer(2)], SharingRules(slowdown=1.49, depth=0)) == []


# -- the order of guests -----------------------------------------------------------------------------------------------


def test_users_shortest_job_is_offered_a_host_first_ties_in_slurms_order():
    rules = SharingRules(slowdown=1.1, most=1, depth=0)
    waiting = [sharer(2, 900.0), sharer(3, 100.0), sharer(4, 100.0)]
    assert found([host(1, 5000.0)], waiting, rules) == [(3, 1)]
    assert [job.job for job in shortest_first(waiting, everywhere(2, 3, 4), rules)] == [3, 4, 2]


def test_job_without_a_stated_length_is_ranked_by_a_part_of_its_limit():
    waiting = [sharer(2, None, limit=4000.0), sharer(3, 1500.0), sharer(4, None), sharer(5, None, limit=1000.0)]
    turns = shortest_first(waiting, everywhere(2, 3, 4, 5), SharingRules())
    assert [job.job for job in turns] == [5, 3, 2, 4]
    assert [job.job for job in shortest_first(waiting, {}, SharingRules())] == [2, 3, 4, 5], (
        "it is unknown where they run"
    )


def test_slurms_order_is_kept_between_users():
    waiting = [sharer(2, 900.0, uid=7), sharer(3, 50.0, uid=8), sharer(4, 100.0, uid=7)]
    rules = SharingRules(slowdown=1.1, most=2)
    assert [job.job for job in shortest_first(waiting, everywhere(2, 3, 4), rules)] == [4, 3, 2]
    running = [host(1, 5000.0, uid=7), host(5, 5000.0, uid=8), host(6, 5000.0, uid=7)]
    assert found(running, waiting, rules) == [(4, 1), (3, 5)]


# -- sharing now, or waiting for an own slice --------------------------------------------------------------------------


def test_job_waits_for_a_slice_free_soon_although_the_pair_test_passes():
    """At 1.4 two equal jobs gain, but a slice of its own in 10 s gains more: 1000 and 1010 s, not 1400 twice."""
    running, waiting = [host(1), host(3, 10.0, app="other")], [sharer(2)]
    rules = ONLY_EQUALS
    assert found(running, waiting, rules) == []
    assert found(running, waiting, replace(rules, depth=0)) == [(2, 1)]


def test_shared_slice_is_not_free_before_both_jobs_have_ended():
    rules = ONLY_EQUALS
    soon = replace(host(3, 10.0, app="other"), guest=sharer(4, 5000.0, app="other"))
    running = [host(1), soon]
    speeds = everywhere(1, 2, 3, 4)
    assert [(pair.guest, pair.host) for pair in pairs(running, [sharer(2)], speeds, rules)] == [(2, 1)]


def test_next_free_slice_goes_to_a_shorter_solo_job_and_the_other_shares():
    """The slice free in 10 s goes to the shorter job, which shares with no other; so the other one shares."""
    rules = ONLY_EQUALS
    running = [host(1), host(3, 10.0, app="other")]
    waiting = [replace(sharer(5, 990.0), solo=True), sharer(2)]
    assert found(running, waiting, rules) == [(2, 1)]
    assert found(running, [sharer(2)], rules) == []


def test_many_equal_jobs_share_although_the_pair_test_refuses_each_pair():
    """Four jobs of 100 s at 1.6: in turn their ends add up to 1000 s, in pairs to less (see test_lookahead)."""
    rules = SharingRules(slowdown=1.6)
    waiting = [sharer(job) for job in (2, 3, 4)]
    (pair,) = pairs([host(1)], waiting, everywhere(1, 2, 3, 4), rules)
    assert (pair.guest, pair.host) == (2, 1)
    assert "its user's 3 pending jobs end sooner on average" in pair.why and "1.60 and 1.60" in pair.why
    assert found([host(1)], waiting, replace(rules, depth=0)) == []


def test_resting_pair_is_not_tried_and_another_host_is():
    rules = SharingRules(slowdown=1.1)
    running, waiting = [host(1, 5000.0), host(3, 5000.0)], [sharer(2, 100.0)]
    speeds = everywhere(1, 2, 3)
    assert [pair.host for pair in pairs(running, waiting, speeds, rules)] == [1]
    assert [pair.host for pair in pairs(running, waiting, speeds, rules, [(2, 1)])] == [3]
    assert pairs(running, waiting, speeds, rules, [(2, 1), (2, 3)]) == []


# -- bounds ------------------------------------------------------------------------------------------------------------


def crowd(hosts, jobs, users=1):
    """That many slices and pending jobs, of varying lengths."""
    lengths = [100.0 + 977 * n % 9000 for n in range(max(hosts, jobs))]
    running = [host(n, lengths[n], uid=n % users) for n in range(hosts)]
    return running, [sharer(hosts + n, lengths[n], uid=n % users) for n in range(jobs)]


@pytest.mark.parametrize(("hosts", "jobs", "users"), [(12, 100, 1), (64, 300, 1), (400, 600, 1), (400, 600, 40)])
def test_round_stays_within_its_budget_of_simulation_steps(monkeypatch, hosts, jobs, users):
    """Simulation stops with the steps; what a rule starts now is simulated to its end, three times at most."""
    spent = []

    class Counted(StepBudget):
        def __init__(self, steps):
            super().__init__(steps)
            self.given = steps
            spent.append(self)

    monkeypatch.setattr(sharing_pairs, "StepBudget", Counted)
    running, waiting = crowd(hosts, jobs, users)
    rules = SharingRules(slowdown=1.2)
    assert pairs(running, waiting, everywhere(*range(hosts + jobs)), rules)
    assert sum(run.given for run in spent) <= rules.steps
    assert sum(run.given - run.left for run in spent) <= 1.75 * rules.steps + 3 * hosts


def test_pair_test_decides_if_the_simulation_steps_do_not_suffice():
    running, waiting = [host(1)], [sharer(job) for job in (2, 3, 4)]
    assert found(running, waiting, SharingRules(slowdown=1.6, steps=0)) == []
    assert found(running, waiting, SharingRules(slowdown=1.2, steps=0)) == [(2, 1)]


times = st.one_of(st.none(), st.floats(0.1, 1e6))
sharers = st.builds(
    Sharer,
    job=st.integers(1, 40),
    uid=st.integers(1, 2),
    app=st.sampled_from(["a", "b"]),
    left_s=times,
    limit_s=times,
    memory_mib=st.one_of(st.none(), st.floats(1, 2e4)),
)
slowdowns = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"])), st.floats(0.5, 4), max_size=4
)


@given(
    st.lists(sharers, max_size=6, unique_by=lambda sharer: sharer.job),
    st.lists(sharers, max_size=6, unique_by=lambda sharer: sharer.job),
    slowdowns,
    st.floats(1, 2.5),
    st.sampled_from([0, 1, 16]),
    st.sampled_from([0, 20, 8000]),
)
def test_every_pair_has_one_user_and_keeps_memory_and_time_limits(first, waiting, measured, slowdown, depth, steps):
    running = [Host(job, P2, 20000.0) for job in first]
    rules = SharingRules(slowdown=slowdown, measured=measured, depth=depth, steps=steps)
    by_job, guests = {host.sharer.job: host for host in running}, {guest.job: guest for guest in waiting}
    speeds = everywhere(*by_job, *guests, speed=0.5)
    answer = pairs(running, waiting, speeds, rules)
    assert answer == pairs(running, waiting, speeds, rules)
    turns = [job.job for job in shortest_first(waiting, speeds, rules)]
    assert sorted(turns) == sorted(guests)
    assert [pair.guest for pair in answer] == [job for job in turns if job in {pair.guest for pair in answer}]
    assert len({pair.host for pair in answer}) == len({pair.guest for pair in answer}) == len(answer) <= rules.most
    for pair in answer:
        host, guest = by_job[pair.host], guests[pair.guest]
        assert host.sharer.uid == guest.uid and pair.host != pair.guest
        assert host.sharer.memory_mib + guest.memory_mib <= 0.9 * host.memory_mib
        slow = rules.slow(guest, host.sharer, host.profile), rules.slow(host.sharer, guest, host.profile)
        assert min(slow) >= 1
        if guest.left_s is not None and host.sharer.left_s is not None:
            own, its = max(1.0, guest.left_s / 0.5), max(1.0, host.sharer.left_s / 0.5)
            own, its = min(own, UNKNOWN_S), min(its, UNKNOWN_S)
            ends = finishes(own, its, *slow)
            assert depth or sum(ends) / 2 < apart(own, its)
            assert all(
                job.limit_s is None or end <= job.limit_s for job, end in zip((guest, host.sharer), ends, strict=True)
            )


@given(
    st.lists(sharers, max_size=6, unique_by=lambda sharer: sharer.job),
    st.lists(sharers, max_size=6, unique_by=lambda sharer: sharer.job),
    st.lists(st.sampled_from("gs-"), min_size=6, max_size=6),
)
def test_no_slice_has_three_jobs_and_solo_jobs_never_share(first, waiting, kinds):
    """On average a third of the running jobs has a guest, and a third of the pending jobs is solo."""
    running = [
        Host(job, P2, 20000.0, Sharer(100 + job.job, job.uid, memory_mib=1.0) if kind == "g" else None)
        for job, kind in zip(first, kinds, strict=False)
    ]
    waiting = [replace(sharer, solo=kind == "s") for sharer, kind in zip(waiting, kinds, strict=False)]
    speeds = everywhere(*range(150))
    for pair in pairs(running, waiting, speeds, SharingRules(slowdown=1.1)):
        assert next(host for host in running if host.sharer.job == pair.host).guest is None
        assert not next(guest for guest in waiting if guest.job == pair.guest).solo


def test_running_job_is_never_paired_with_itself():
    assert found([host(1, 5000.0)], [sharer(1, 100.0)], SharingRules(slowdown=1.1)) == []

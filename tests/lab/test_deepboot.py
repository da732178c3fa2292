"""Which jobs are lent slices and which give them back, against brute force and on generated clusters."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.deepboot import (
    ReclaimCandidate,
    Replica,
    RestartCosts,
    SliceCount,
    Surge,
    allocate,
    ats_worth,
    displaced,
    protect_s,
    reclaim,
    serve,
)
from tests.support.examples import examples


def worth_of(worths, chosen):
    return sum(offers[choice] for offers, choice in zip(worths, chosen, strict=True) if choice is not None)


def brute(worths, capacity):
    best = 0.0
    for chosen in itertools.product(*([None, *offers] for offers in worths)):
        used = Counter()
        for choice in chosen:
            if choice is not None:
                used[choice.kind] += choice.count
        if all(used[kind] <= capacity.get(kind, 0) for kind in used):
            best = max(best, worth_of(worths, chosen))
    return best


def jobs(kinds, most=6):
    offers = st.dictionaries(
        st.builds(SliceCount, st.sampled_from(kinds), st.integers(1, most)), st.floats(0.01, 10), max_size=4
    )
    return st.lists(offers, max_size=5)


@given(jobs(["7g"]), st.integers(0, 10))
def test_allocation_of_one_kind_is_optimal(worths, capacity):
    chosen = allocate(worths, {"7g": capacity})
    assert worth_of(worths, chosen) == pytest.approx(brute(worths, {"7g": capacity}), abs=1e-6)


@given(jobs(["1g", "2g", "7g"]), st.dictionaries(st.sampled_from(["1g", "2g", "7g"]), st.integers(0, 8), max_size=3))
def test_allocation_never_exceeds_capacity_and_uses_only_offered_choices(worths, capacity):
    chosen = allocate(worths, capacity)
    used = Counter()
    for offers, choice in zip(worths, chosen, strict=True):
        if choice is not None:
            assert choice in offers
            used[choice.kind] += choice.count
    assert all(used[kind] <= capacity.get(kind, 0) for kind in used)


def test_allocation_of_two_kinds_equals_the_one_found_by_hand():
    a = {SliceCount("1g", 2): 1.0, SliceCount("7g", 1): 4.0}
    b = {SliceCount("7g", 1): 2.5, SliceCount("1g", 2): 0.5}
    assert allocate([a, b], {"1g": 2, "7g": 1}) == [SliceCount("7g", 1), SliceCount("1g", 2)]


def test_worth_falls_with_the_number_of_restarts():
    assert ats_worth(4.0, 2.0, changed=False, age_s=100, restarts=9) == 2.0
    assert ats_worth(4.0, 2.0, changed=True, age_s=100, restarts=0) == pytest.approx(2 * 100 / 110)
    assert ats_worth(4.0, 2.0, changed=True, age_s=100, restarts=10) == 0.0


def test_restart_costs_equal_those_in_the_table_of_the_paper():
    bert = RestartCosts(103, 5)
    assert bert.seconds(0, 4) == 103
    assert bert.seconds(4, 2) == 5
    assert bert.seconds(2, 4) == pytest.approx(5 + 98 / 2)
    assert bert.seconds(4, 4, kept=False) == 103
    assert bert.seconds(4, 0) == 0


def test_idle_replica_is_protected_for_a_time_that_depends_on_its_hits():
    replica = Replica(0, "bert", hits=2, busy=False, idle_since=100.0)
    assert protect_s(2) == 60
    assert protect_s(50) == 120
    assert replica.protected(159)
    assert not replica.protected(160)
    assert Replica(0, "bert").protected(1e9)


def test_most_hit_replica_serves_and_least_hit_unprotected_one_is_displaced():
    first = Replica(0, "a", hits=1, busy=False, idle_since=0.0)
    second = Replica(1, "a", hits=5, busy=False, idle_since=0.0)
    other = Replica(2, "b", hits=9, busy=False, idle_since=990.0)
    assert serve("a", [first, second, other]) is second
    assert serve("c", [first, second, other]) is None
    assert displaced([first, second, other], 1000.0) is first
    assert displaced([other], 1000.0) is None


def loan(job, slots, own=0, least=1, since=0.0, hits=0, speed=None, full=30.0, resize=3.0):
    count = len(slots) + own
    return ReclaimCandidate(
        job,
        frozenset(slots),
        count,
        least,
        speed or [float(n) for n in range(count + 1)],
        RestartCosts(full, resize),
        since,
        hits,
    )


def test_job_that_loses_least_gives_its_slices_back():
    flat = loan("flat", [1, 2], own=2, speed=[0, 1, 1.2, 1.3, 1.35])
    steep = loan("steep", [3, 4], own=2)
    lent_sets = [frozenset([slot]) for slot in (1, 2, 3, 4)]
    found = reclaim([flat, steep], lent_sets, 2, now=10_000)
    assert set(found.slots) == {1, 2}
    assert (found.served, found.stopped) == (2, ())


def test_two_slices_are_reclaimed_from_one_job_rather_than_one_from_each():
    a, b = (loan(name, slots, own=8) for name, slots in (("a", [1, 2]), ("b", [3, 4])))
    found = reclaim([a, b], [frozenset([slot]) for slot in (1, 3, 2, 4)], 2, now=10_000)
    assert set(found.slots) in ({1, 2}, {3, 4})


def test_three_small_loans_are_reclaimed_for_one_large_instance():
    small = [loan(f"s{n}", [f"0:{n}"]) for n in range(3)]
    big = loan("big", ["1:0"], speed=[0, 50.0])
    found = reclaim([*small, big], [frozenset(f"0:{n}" for n in range(3)), frozenset(["1:0"])], 1, now=10_000)
    assert set(found.slots) == {"0:0", "0:1", "0:2"}
    assert found.stopped == ("s0", "s1", "s2")


def test_protection_of_idle_replicas_can_be_disabled():
    idle = Replica(0, "bert", hits=9, busy=False, idle_since=100.0)
    assert displaced([idle], 100.0) is None
    assert displaced([idle], 100.0, times=0.0) is idle


def test_surge_calls_grow_while_they_follow_one_another_within_the_window():
    surge = Surge(growth=2.0, window_s=90.0)
    assert [surge.call(at, 1, 32) for at in (0, 10, 20, 30, 40, 50, 60)] == [1, 2, 4, 8, 16, 32, 32]
    assert surge.call(200, 1, 32) == 1
    assert surge.call(210, 5, 32) == 5
    steady = Surge(growth=1.0)
    assert [steady.call(at, 1, 32) for at in range(5)] == [1] * 5


def test_protected_jobs_are_reclaimed_last_however_little_they_lose():
    young = loan("young", [1], own=1, since=9_990.0, speed=[0, 1, 1.001])
    often = loan("often", [2], own=1, since=9_800.0, hits=9, speed=[0, 1, 1.001])
    old = loan("old", [3], own=1)
    lent_sets = [frozenset([slot]) for slot in (1, 2, 3)]
    assert reclaim([young, often, old], lent_sets, 1, now=10_000).slots == (3,)
    assert reclaim([young, often, old], lent_sets, 2, now=10_000).slots[0] == 3


@settings(max_examples=examples(150))
@given(data=st.data(), count=st.integers(1, 8), starts=st.integers(0, 10))
def test_no_more_loans_are_reclaimed_than_needed(data, count, starts):
    loans, lent_sets, slot = [], [], 0
    for job in range(count):
        lent = data.draw(st.integers(1, 4))
        slots = [(job, slot + n) for n in range(lent)]
        slot += lent
        own = data.draw(st.integers(0, 3))
        least = data.draw(st.integers(1, lent + own))
        since = data.draw(st.sampled_from([0.0, 990.0]))
        loans.append(loan(job, slots, own=own, least=least, since=since))
        lent_sets += [frozenset([slot_number]) for slot_number in slots]
    lent_sets = data.draw(st.permutations(lent_sets))
    found = reclaim(loans, lent_sets, starts, now=1000.0)
    assert found == reclaim(loans, lent_sets, starts, now=1000.0)
    assert found.served == len(found.slots) == len(set(found.slots)) == min(starts, slot)
    reclaimed = Counter(job for job, _ in found.slots)
    for candidate in loans:
        assert (candidate.job in found.stopped) == (
            reclaimed[candidate.job] > 0 and candidate.count - reclaimed[candidate.job] < candidate.least
        )
        assert reclaimed[candidate.job] <= len(candidate.slots)
    if any(loans[job].protected(1000.0) for job in reclaimed):
        assert all(
            reclaimed[candidate.job] == len(candidate.slots) for candidate in loans if not candidate.protected(1000.0)
        )

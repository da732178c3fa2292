"""Pollux's division of GPUs: by hand, against trying everything, and what its places keep to."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.pollux import PolluxJob, divide, harmonic_mean, penalty, place, speedup
from tests.support.examples import examples

OLD = 1e9
"""So old that a restart costs next to nothing."""


def job(*speeds, fair=1.0, have=0, age=OLD, restarts=0):
    return PolluxJob(dict(enumerate(speeds, start=1)), fair, have, age, restarts)


def test_a_restart_costs_the_less_the_older_and_the_more_the_oftener():
    assert penalty(60.0, 0) == pytest.approx(60 / 90)
    assert penalty(60.0, 1) == pytest.approx(30 / 90)
    assert penalty(60.0, 3) == 0.0
    assert penalty(3570.0, 0) == pytest.approx(3570 / 3600)


def test_what_a_job_has_is_worth_all_of_its_speedup():
    kept = job(1, 2, 3, fair=2.0, have=2, age=60.0)
    assert speedup(kept, 2) == 1.0
    assert speedup(kept, 3) == pytest.approx(1.5 * 60 / 90)
    assert speedup(kept, 0) == 0.0


def test_equals_get_equal_parts():
    assert divide([job(1, 2, 3, 4), job(1, 2, 3, 4)], 4) == [2, 2]


def test_gpus_go_where_they_are_worth_something():
    """One gains nothing from a second GPU, the other all."""
    assert divide([job(1, 1, 1, 1), job(1, 2, 3, 4)], 4) == [1, 3]


def test_nobody_goes_empty_where_there_is_enough():
    """The sum of speedups would be 8 with all of it given to one; the harmonic mean is not."""
    assert divide([job(1, 2, 4, 8), job(1, 1, 1, 1)], 4) == [3, 1]


def test_a_young_job_is_left_alone_and_an_old_one_is_not():
    """Two more GPUs would make it three times as fast: 60 s after its start only two thirds of that count, which is
    still twice. Ten times restarted it is worth nothing."""
    assert divide([job(1, 2, 3, have=1, age=60.0)], 3) == [3]
    assert divide([job(1, 1.2, 1.4, have=1, age=60.0)], 3) == [1]
    assert divide([job(1, 1.2, 1.4, have=1)], 3) == [3]
    assert divide([job(1, 2, 3, have=1, age=300.0, restarts=10)], 3) == [1]


jobs = st.lists(
    st.builds(
        lambda speeds, fair, have, age, restarts: PolluxJob(
            dict(enumerate(sorted(speeds), start=1)), fair, min(have, len(speeds)), age, restarts
        ),
        st.lists(st.floats(0.5, 8), min_size=1, max_size=4),
        st.floats(0.5, 4),
        st.integers(0, 4),
        st.floats(0, 5000),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(60))
@given(jobs, st.integers(1, 8))
def test_no_division_has_a_greater_harmonic_mean(found, gpus):
    counts = divide(found, gpus)
    assert sum(counts) <= gpus
    possible = itertools.product(*([0, *each.speeds] for each in found))
    most = max(harmonic_mean(found, each) for each in possible if sum(each) <= gpus)
    assert harmonic_mean(found, counts) == pytest.approx(most, rel=1e-6)


def test_places_are_the_tightest_and_what_is_unchanged_stays():
    free = {0: 4, 1: 1, 2: 2}
    assert place({"a": 2}, {}, {"a": 1}, free) == {"a": {2: 2}}
    assert place({"a": 3, "b": 1}, {"b": {2: 1}}, {"a": 1, "b": 1}, free) == {"a": {0: 3}, "b": {2: 1}}
    assert place({"a": 2}, {"a": {1: 1}}, {"a": 1}, {0: 2, 1: 1}) == {"a": {1: 2}}


def test_a_node_holds_one_spread_job_at_most():
    """Six GPUs need two of three nodes; the next that is spread finds one node, and shrinks to what is on it."""
    found = place({"a": 6, "b": 5}, {}, {"a": 1, "b": 1}, {0: 4, 1: 4, 2: 4})
    assert found == {"a": {0: 4, 1: 2}, "b": {2: 4}}
    rigid = place({"a": 6, "b": 5}, {}, {"a": 6, "b": 5}, {0: 4, 1: 4, 2: 4})
    assert rigid == {"a": {0: 4, 1: 2}}


def test_who_gets_nothing_has_no_place():
    assert place({"a": 0, "b": 1}, {"a": {0: 1}}, {"a": 1, "b": 1}, {0: 0}) == {"b": {0: 1}}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_places_fit(asked, sizes):
    wanted = {number: count for number, (count, _) in enumerate(asked)}
    least = {number: low for number, (_, low) in enumerate(asked)}
    found = place(wanted, {}, least, dict(enumerate(sizes)))
    for node, size in enumerate(sizes):
        assert sum(nodes.get(node, 0) for nodes in found.values()) <= size
        assert sum(node in nodes and len(nodes) > 1 for nodes in found.values()) <= 1
    for number, nodes in found.items():
        assert least[number] <= sum(nodes.values()) <= wanted[number]

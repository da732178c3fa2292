"""Pollux's division of GPUs: by hand, against exhaustive search, and the constraints of its placement."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.pollux import PolluxJob, divide, penalty, place
from tests.support.examples import examples

OLD = 1e9
"""So old that a restart costs next to nothing."""


def job(*speeds, fair=1.0, have=0, age=OLD, restarts=0):
    return PolluxJob(dict(enumerate(speeds, start=1)), fair, have, age, restarts)


def speedup(job, count):
    """The speedup over the fair share with `count` GPUs, reduced if that is a change; 0 without GPUs."""
    if not count:
        return 0.0
    changed = count != job.have
    return job.speeds[count] / job.fair * (penalty(job.age_s, job.restarts, job.delay_s) if changed else 1.0)


def test_restart_penalty_depends_on_job_age_and_number_of_restarts():
    assert penalty(60.0, 0) == pytest.approx(60 / 90)
    assert penalty(60.0, 1) == pytest.approx(30 / 90)
    assert penalty(60.0, 3) == 0.0
    assert penalty(3570.0, 0) == pytest.approx(3570 / 3600)


def test_current_allocation_counts_without_restart_penalty():
    kept = job(1, 2, 3, fair=2.0, have=2, age=60.0)
    assert speedup(kept, 2) == 1.0
    assert speedup(kept, 3) == pytest.approx(1.5 * 60 / 90)
    assert speedup(kept, 0) == 0.0


def test_equal_jobs_get_equal_numbers_of_gpus():
    assert divide([job(1, 2, 3, 4), job(1, 2, 3, 4)], 4) == [2, 2]


def test_gpus_go_to_the_job_that_gains_from_them():
    """One job gains nothing from a second GPU, the other scales linearly."""
    assert divide([job(1, 1, 1, 1), job(1, 2, 3, 4)], 4) == [1, 3]


def test_every_job_gets_a_gpu_if_there_are_enough():
    """All GPUs for one job would give a sum of speedups of 8, but not the greatest harmonic mean."""
    assert divide([job(1, 2, 4, 8), job(1, 1, 1, 1)], 4) == [3, 1]


def test_young_or_often_restarted_job_is_restarted_only_for_a_large_gain():
    """Two more GPUs would make the job three times as fast: 60 s after its start only two thirds of that count, which
    is still a factor of two. After ten restarts the gain counts for nothing."""
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


def harmonic_mean(found, counts):
    return len(found) / sum(1 / (speedup(one, count) + 1e-3) for one, count in zip(found, counts, strict=True))


@settings(max_examples=examples(60))
@given(jobs, st.integers(1, 8))
def test_division_has_the_greatest_possible_harmonic_mean(found, gpus):
    counts = divide(found, gpus)
    assert sum(counts) <= gpus
    possible = itertools.product(*([0, *candidate.speeds] for candidate in found))
    most = max(harmonic_mean(found, candidate) for candidate in possible if sum(candidate) <= gpus)
    assert harmonic_mean(found, counts) == pytest.approx(most, rel=1e-6)


def test_placement_uses_the_tightest_node_and_keeps_unchanged_jobs():
    free = {0: 4, 1: 1, 2: 2}
    assert place({"a": 2}, {}, {"a": 1}, free) == {"a": {2: 2}}
    assert place({"a": 3, "b": 1}, {"b": {2: 1}}, {"a": 1, "b": 1}, free) == {"a": {0: 3}, "b": {2: 1}}
    assert place({"a": 2}, {"a": {1: 1}}, {"a": 1}, {0: 2, 1: 1}) == {"a": {1: 2}}


def test_node_holds_at_most_one_distributed_job():
    """Six GPUs need two of three nodes; the next distributed job finds one node, and shrinks to its GPUs."""
    found = place({"a": 6, "b": 5}, {}, {"a": 1, "b": 1}, {0: 4, 1: 4, 2: 4})
    assert found == {"a": {0: 4, 1: 2}, "b": {2: 4}}
    rigid = place({"a": 6, "b": 5}, {}, {"a": 6, "b": 5}, {0: 4, 1: 4, 2: 4})
    assert rigid == {"a": {0: 4, 1: 2}}


def test_job_without_gpus_has_no_placement():
    assert place({"a": 0, "b": 1}, {"a": {0: 1}}, {"a": 1, "b": 1}, {0: 0}) == {"b": {0: 1}}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_placement_respects_node_sizes_and_job_limits(asked, sizes):
    wanted = {number: count for number, (count, _) in enumerate(asked)}
    least = {number: low for number, (_, low) in enumerate(asked)}
    found = place(wanted, {}, least, dict(enumerate(sizes)))
    for node, size in enumerate(sizes):
        assert sum(nodes.get(node, 0) for nodes in found.values()) <= size
        assert sum(node in nodes and len(nodes) > 1 for nodes in found.values()) <= 1
    for number, nodes in found.items():
        assert least[number] <= sum(nodes.values()) <= wanted[number]

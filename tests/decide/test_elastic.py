"""How many tasks of an array run at once, by stepping arrays through time."""

import heapq
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.dispatch.elasticity import Array, at_once
from tests.support.examples import examples

SPARE = 1.1
"""Tasks may take so much longer than expected."""


def step_array(pending, task_s, deadline, most):
    """Run an array whose number of concurrent tasks is chosen again whenever a task ends; return the end, the highest
    number, and how often the number changed."""
    running, now, current, highest, changes = [], 0.0, None, 0, 0
    while pending or running:
        rest = tuple(end - now for end in running)
        count = at_once(Array(pending, rest, task_s, deadline), now, most, current=current)
        changes += current is not None and count != current
        current = count
        while pending and len(running) < count:
            heapq.heappush(running, now + task_s)
            pending -= 1
        highest = max(highest, len(running))
        now = heapq.heappop(running)
    return now, highest, changes


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 60), st.floats(1, 50), st.floats(1, 500), st.integers(1, 20))
def test_array_meets_a_feasible_deadline_with_the_fewest_concurrent_tasks(tasks, task_s, deadline, most):
    possible = math.ceil(tasks / most) * task_s * SPARE <= deadline * (1 - 1e-6)
    end, highest, changes = step_array(tasks, task_s, deadline, most)
    assert highest <= most
    if possible:
        assert end <= deadline * (1 + 1e-6)
        waves = math.floor(deadline / (task_s * SPARE) * (1 + 1e-9))
        assert highest == min(tasks, math.ceil(tasks / waves))
        assert changes <= 1 + tasks


def test_array_that_cannot_meet_its_deadline_gets_the_allowed_maximum():
    assert at_once(Array(100, (), 10.0, 5.0), 0.0, 8) == 8
    assert at_once(Array(100, (), 10.0, -5.0), 0.0, 8) == 8
    assert at_once(Array(0, (3.0,), 10.0, 5.0), 0.0, 8) == 1
    with pytest.raises(ValueError, match="at least one concurrent task"):
        at_once(Array(1, (), 1.0, 1.0), 0.0, 0)


def test_running_tasks_count_with_their_remaining_time():
    # 100 s left beside spare time: a slot that is free in 40 s runs 6 more tasks of 10 s, a new one 10
    assert at_once(Array(6, (40.0,), 10.0, 110.0), 0.0, 8) == 1
    assert at_once(Array(7, (40.0,), 10.0, 110.0), 0.0, 8) == 2
    # of two running slots the one that is busy longer remains
    assert at_once(Array(6, (40.0, 10.0), 10.0, 110.0), 0.0, 8) == 1
    assert at_once(Array(7, (40.0, 10.0), 10.0, 110.0), 0.0, 8) == 2


def test_number_of_tasks_is_lowered_only_with_twice_the_spare_time():
    # 2 at once would be just enough, 3 with twice the spare time; the number is 4 now
    array = Array(19, (), 10.0, 110.0)
    assert at_once(array, 0.0, 8) == 2
    assert at_once(array, 0.0, 8, current=4) == 3
    assert at_once(array, 0.0, 8, current=2) == 2


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 60), st.floats(1, 50), st.floats(1, 500), st.integers(1, 20), st.floats(1.0, 1.1))
def test_spare_time_covers_tasks_that_are_slower_than_expected(tasks, task_s, deadline, most, slower):
    assume(math.ceil(tasks / most) * task_s * 1.1 <= deadline * (1 - 1e-6))
    running, now, pending, current = [], 0.0, tasks, None
    while pending or running:
        rest = tuple(max(end - now, 0.0) / slower for end in running)
        current = at_once(Array(pending, rest, task_s, deadline), now, most, current=current)
        while pending and len(running) < current:
            heapq.heappush(running, now + task_s * slower)
            pending -= 1
        now = heapq.heappop(running)
    assert now <= deadline * (1 + 1e-6)

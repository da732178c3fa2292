"""Assignment of pending work: no slice idles that could finish work in time, and no work is late unnecessarily."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.paris_elsa import trial
from slurm_migbatch.decide.paris_elsa.assignment import PATIENCE, Central, StockCosts, Waiting, WorkClass, assign
from slurm_migbatch.decide.paris_elsa.trial import bounded_rate, stream
from slurm_migbatch.lab.papers.pariselsa import early, elsa, first_idle

SMALL, LARGE = 0, 1
#: light work is cheapest on the small slice, heavy work meets its limit on the large one only
LIGHT = WorkClass(1, 10.0, (4.0, 2.0))
HEAVY = WorkClass(1, 10.0, (20.0, 6.0))
BOARD = StockCosts([LIGHT, HEAVY], [1.0, 7.0], [2, 1])


def test_preferred_kind_is_the_cheapest_slice_within_the_limit():
    assert [kinds[0] for kinds in BOARD.allowed] == [SMALL, LARGE]
    assert StockCosts([HEAVY], [1.0, 7.0], [2, 0]).allowed == [[]]


def test_arriving_work_takes_the_cheapest_idle_slice_that_is_fast_enough():
    queue = Central(BOARD)
    assert [queue.arrive(Waiting(0.0, 0, i)) for i in range(4)] == [SMALL, SMALL, LARGE, None]
    assert queue.release(2.0, LARGE) == Waiting(0.0, 0, 3)


def test_heavy_work_never_takes_a_slice_that_is_too_slow():
    queue = Central(BOARD, [2, 0])
    assert queue.arrive(Waiting(0.0, 1)) is None
    assert queue.release(1.0, SMALL) is None
    assert queue.release(3.0, LARGE) == Waiting(0.0, 1)


def test_released_slice_first_takes_work_that_prefers_its_kind():
    queue = Central(BOARD, [0, 0])
    queue.wait(Waiting(0.0, 0, 1))
    queue.wait(Waiting(0.5, 1, 2))
    assert queue.release(1.0, LARGE).name == 2


def test_light_work_takes_the_large_slice_only_when_it_has_no_slack_left():
    for now, taken in ((5.9, 2), (6.5, 1)):
        queue = Central(BOARD, [0, 0])
        queue.wait(Waiting(0.0, 0, 1))  # must start on the small slice by 6, on the large by 8
        queue.wait(Waiting(5.5, 1, 2))
        assert queue.release(now, LARGE).name == taken


def test_work_too_late_for_a_slice_does_not_block_later_work_on_it():
    """At 7 the first is too late for the small slice (6) and needs the large one (by 8); the second is not too late."""
    queue = Central(BOARD, [0, 0])
    queue.wait(Waiting(0.0, 0, 1))
    queue.wait(Waiting(3.0, 0, 2))
    assert queue.release(7.0, SMALL).name == 2
    assert queue.release(7.5, LARGE).name == 1


def test_late_work_yields_to_work_in_time_only_for_a_limited_time():
    queue = Central(BOARD, [0, 0])
    queue.wait(Waiting(0.0, 1, 1))
    queue.wait(Waiting(4.9, 1, 2))
    assert queue.release(5.0, LARGE).name == 2
    queue.wait(Waiting(PATIENCE * 10.0, 1, 3))
    assert queue.release(PATIENCE * 10.0 + 1, LARGE).name == 1
    assert queue.release(PATIENCE * 10.0 + 2, LARGE).name == 3


def test_elsa_takes_the_smallest_slice_with_slack_else_the_least_late_one():
    assert elsa(0.0, LIGHT, [[5.0, 9.0], [0.0]])[:2] == (SMALL, 0)
    assert elsa(0.0, LIGHT, [[7.0, 5.5], [0.0]])[:2] == (SMALL, 1)
    assert elsa(0.0, LIGHT, [[7.0, 9.0], [6.0]])[:2] == (LARGE, 0)
    assert elsa(0.0, LIGHT, [[8.0, 9.0], [11.0]]) == (SMALL, 0, 12.0)
    assert elsa(0.0, LIGHT, [[7.0, 9.0], [9.0]])[:2] == (SMALL, 0)
    assert elsa(0.0, LIGHT, [[5.0], [0.0]], alpha=2.0)[:2] == (LARGE, 0)
    assert elsa(100.0, LIGHT, [[5.0], [20.0]], alpha=9.0) == (LARGE, 0, 100.0 + LIGHT.seconds[LARGE]), "both are idle"
    assert elsa(0.0, LIGHT, [[5.0], [0.0]], beta=2.0)[:2] == (LARGE, 0)
    assert elsa(0.0, WorkClass(1, 1.0, (math.inf, math.inf)), [[0.0], [0.0]]) is None


works = st.builds(
    lambda limit, seconds: WorkClass(1.0, limit, tuple(seconds)),
    st.floats(1, 20),
    st.lists(st.floats(0.5, 25) | st.just(math.inf), min_size=3, max_size=3),
)


@given(
    st.lists(works, min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 3)), max_size=8),
)
def test_assign_leaves_no_idle_slice_that_could_finish_work_in_time(kinds, idle, items):
    board = StockCosts(kinds, [1.0, 2.0, 4.0], [n + 1 for n in idle])
    waiting = [Waiting(arrived, number % len(kinds), name) for name, (arrived, number) in enumerate(items)]
    pairs = assign(30.0, waiting, idle, board)
    started = {item.name for item, _ in pairs}
    assert len(started) == len(pairs)
    taken = [sum(kind == k for _, kind in pairs) for k in range(3)]
    assert all(t <= n for t, n in zip(taken, idle, strict=True))

    def slack(item, kind):
        work = kinds[item.work]
        return item.arrived + work.limit_s - 30.0 - work.seconds[kind]

    for item in waiting:
        if item.name not in started:
            assert not any(slack(item, k) > 1e-6 for k in range(3) if taken[k] < idle[k])
    for item, kind in pairs:  # work that starts on a kind where it is late would be late on every stocked kind
        if slack(item, kind) < -1e-6:
            assert not any(slack(item, k) > 1e-6 for k in range(3))


@given(st.integers(0, 10_000), st.lists(st.integers(0, 2), min_size=3, max_size=3).filter(any), st.floats(0.2, 3))
def test_central_latencies_equal_those_of_a_step_by_step_simulation(seed, stock, load):
    chance = np.random.Generator(np.random.PCG64(seed))
    kinds = [
        WorkClass(1, 8.0, (3.0, 2.0, 1.0)),
        WorkClass(2, 8.0, (9.0, 5.0, 2.5)),
        WorkClass(1, 8.0, (math.inf, 7.0, 4.0)),
    ]
    if not (stock[1] or stock[2]):
        stock[2] = 1
    arrivals = stream(kinds, 40, chance, allowed=1.0)
    board = StockCosts(kinds, [1.0, 2.0, 4.0], stock)
    found = trial.central(board, arrivals, load)
    expected = stepped(board, arrivals, load)
    if max(expected) <= trial.WORST:
        assert found == pytest.approx(expected)
    else:
        assert found is None


def stepped(board, arrivals, rate):
    """The same latencies, by calling `assign` at every event, with a list as the queue."""
    coming = [Waiting(t, w, i) for i, (t, w) in enumerate(zip(arrivals.at(rate), arrivals.works, strict=True))]
    busy, waiting, latency = [], [], [math.inf] * len(coming)
    idle = list(board.stock)
    while coming or busy:
        if busy and (not coming or min(busy)[0] <= coming[0].arrived):
            now, kind = min(busy)
            busy.remove((now, kind))
        else:
            item = coming.pop(0)
            now, kind = item.arrived, None
            for k in board.allowed[item.work]:
                if idle[k]:
                    idle[k] -= 1
                    waiting_for = [(item, k)]
                    break
            else:
                waiting.append(item)
                waiting_for = []
        if kind is not None:
            only = [int(k == kind) for k in range(len(idle))]
            waiting_for = assign(now, waiting, only, board)
            if not waiting_for:
                idle[kind] += 1
                waiting_for = assign(now, waiting, idle, board) if waiting else []
                for _, k in waiting_for:
                    idle[k] -= 1
        for item, k in waiting_for:
            if item in waiting:
                waiting.remove(item)
            end = now + board.works[item.work].seconds[k]
            latency[item.name] = (end - item.arrived) / board.works[item.work].limit_s
            busy.append((end, k))
    return latency


def test_bounded_rate_equals_the_service_rate_of_the_slices():
    """Work of 1 s with a limit of 1 s, one every 1/r s: in time exactly up to one per second."""
    work = [WorkClass(1.0, 1.0, (1.0,))]
    even = trial.Stream(tuple(float(i) for i in range(1, 200)), (0,) * 199, (0,))
    for way in (trial.central, early, first_idle):
        assert bounded_rate(way, StockCosts(work, [1.0], [1]), even, 0.3) == pytest.approx(1.0, rel=0.006)
        assert bounded_rate(way, StockCosts(work, [1.0], [3]), even, 5.0) == pytest.approx(3.0, rel=0.006)


def test_bounded_rate_is_zero_for_work_that_cannot_end_in_time():
    chance = np.random.Generator(np.random.PCG64(1))
    slow = [WorkClass(1.0, 1.0, (1.5,)), WorkClass(1.0, 1.0, (0.5,))]
    board = StockCosts(slow, [1.0], [4])
    assert bounded_rate(trial.central, board, stream(slow, 200, chance), 1.0) == 0.0
    assert (
        bounded_rate(
            first_idle, StockCosts([WorkClass(1, 1, (math.inf,))], [1.0], [1]), trial.Stream((1.0,), (0,), (1,)), 1
        )
        == 0
    )


def test_exact_stream_has_the_mix_given_by_the_shares():
    kinds = [WorkClass(3.0, 1.0, (1.0,)), WorkClass(1.0, 1.0, (1.0,), group=1)]
    drawn = stream(kinds, 400, np.random.Generator(np.random.PCG64(3)), exact=True)
    assert (drawn.works.count(0), drawn.works.count(1)) == (300, 100)
    assert drawn.may_be_late == (15, 5)

"""Share or wait: closed forms against stepping, and plans against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.lending.lookahead import (
    FASTEST,
    NEVER,
    PAIR,
    RULES,
    TrainingStart,
    apply,
    begin,
    choose,
    pair_test,
    plan,
    rollout,
)
from slurm_migbatch.decide.lending.pair_finish import apart, finishes, pays, together
from slurm_migbatch.decide.lending.sharing_queue import QueuedTraining, SharingQueue
from slurm_migbatch.lab.sim.policies.sharing import GangQueue
from tests.support.sharing_rules import ANY

SECONDS = st.floats(1.0, 1e4)
SLOW = st.floats(1.0, 3.0)


def stepped(own, other, slow_own, slow_other, start=0.0):
    """Ends of both jobs, event by event; the newcomer starts at `start`."""
    left = {"own": own, "other": other}
    slow = {"own": slow_own, "other": slow_other}
    ends, now = {}, 0.0
    while left:
        running = [name for name in left if name == "other" or now >= start]
        rate = {name: 1 / slow[name] if len(running) == 2 else 1.0 for name in running}
        moments = {name: left[name] / rate[name] for name in running}
        if "own" in left and now < start:
            moments["start"] = start - now
        first = min(moments, key=moments.__getitem__)
        step = moments[first]
        for name in running:
            left[name] -= rate[name] * step
        now = start if first == "start" else now + step
        if first != "start":
            del left[first]
            ends[first] = now
    return ends["own"], ends["other"]


@given(SECONDS, SECONDS, SLOW, SLOW)
def test_closed_forms_equal_a_step_by_step_simulation_of_the_pair(own, other, slow_own, slow_other):
    ends = stepped(own, other, slow_own, slow_other)
    assert finishes(own, other, slow_own, slow_other) == pytest.approx(ends)
    assert together(own, other, slow_own, slow_other) == pytest.approx(sum(ends) / 2)
    assert apart(own, other) == pytest.approx(sum(stepped(own, other, slow_own, slow_other, start=other)) / 2)


@given(SECONDS, SECONDS, SLOW, SLOW)
def test_sharing_pays_exactly_below_the_two_known_thresholds(own, other, slow_own, slow_other):
    if slow_own * own >= slow_other * other:
        left, right = slow_other * (1 - 1 / (2 * slow_own)), 1.0
    else:
        left, right = slow_own * (1 - 1 / (2 * slow_other)), (1 + other / own) / 2
    assume(abs(left - right) > 1e-6)
    assert pays(own, other, slow_own, slow_other) == (left < right)


def test_equal_jobs_share_below_a_slowdown_of_one_and_a_half():
    assert pays(100, 100, 1.49, 1.49)
    assert not pays(100, 100, 1.51, 1.51)


@given(SECONDS, SECONDS, SLOW, SLOW, st.floats(0.0, 1.0))
def test_starting_between_now_and_the_end_of_the_other_job_is_never_better(own, other, slow_own, slow_other, share):
    between = sum(stepped(own, other, slow_own, slow_other, start=share * other)) / 2
    best = min(together(own, other, slow_own, slow_other), apart(own, other))
    assert between >= best * (1 - 1e-9)


# -- the queue -------------------------------------------------------------------------------------------------


def board_of(gpus, jobs, xi, running=(), queue=SharingQueue):
    """Jobs are (need, left); those of `running` are put on empty GPUs first. Apps are numbers."""
    board = queue(gpus, lambda own, other: xi[int(own) % len(xi)][int(other) % len(xi)])
    for number, (need, left) in enumerate(running):
        board.run(QueuedTraining(number, str(number), need, left), need, [])
    first = len(running)
    tasks = [QueuedTraining(first + n, str(first + n), need, left) for n, (need, left) in enumerate(jobs)]
    for task in tasks:
        task.turn = task.key
    board.queue = sorted(tasks, key=lambda task: (task.left, task.key))
    return board


@st.composite
def boards(draw):
    gpus, queue = draw(st.integers(1, 4)), draw(st.sampled_from([SharingQueue, GangQueue]))
    job = st.tuples(st.integers(1, gpus if queue is GangQueue else 1), st.floats(1.0, 100.0))
    jobs = draw(st.lists(job, min_size=1, max_size=6))
    xi = draw(st.lists(st.lists(st.floats(1.0, 2.5), min_size=3, max_size=3), min_size=3, max_size=3))
    return gpus, jobs, xi, (), queue


def played(board, rule):
    """Sum of the ends, by time steps that examine every job each time: a slow equivalent of `rollout`."""
    total, left = 0.0, {task.key: task.left for task in board.queue}
    board.retest()
    while board.tasks or board.queue:
        board.start(rule)
        rate = {
            task.key: 1 / max([1.0, *(board.slowdown(task.app, other.app) for other in task.partners)])
            for task in board.tasks.values()
        }
        key = min(rate, key=lambda job: (left[job] / rate[job], job))
        step = left[key] / rate[key]
        for job, speed in rate.items():
            left[job] -= speed * step
        board.now += step
        total += board.now
        board.end(board.tasks[key])
    return total


@given(boards(), st.sampled_from(RULES))
def test_rollout_equals_a_simulation_that_examines_every_job(made, rule):
    assert rollout(board_of(*made), rule) == pytest.approx(played(board_of(*made), rule), rel=1e-6)


@given(boards(), st.sampled_from(RULES))
def test_every_gpu_is_accounted_for_and_held_by_at_most_two_jobs(made, rule):
    board = board_of(*made)
    gpus = made[0]
    board.retest()
    while board.queue or board.tasks:
        board.start(rule)
        shared = sum(sum(task.partners.values()) for task in board.tasks.values())
        assert board.free + board.lone + shared / 2 == gpus
        assert board.lone == sum(task.alone for task in board.tasks.values())
        assert set(board.single) == {task for task in board.tasks.values() if task.alone}
        for task in board.tasks.values():
            assert task.alone + sum(task.partners.values()) == task.need
            assert all(other.partners[task] == count for other, count in task.partners.items())
        first = min(board.tasks.values(), key=lambda task: (task.remaining(board.now) / task.rate, task.key))
        board.now += first.remaining(board.now) / first.rate
        board.end(first)
    assert board.free == gpus


@given(boards(), st.sampled_from([ANY, *RULES]))
def test_pairs_that_were_refused_need_no_second_test(made, rule):
    """With `retest` before each start every pair is tested; without it only those that a start might accept."""
    board, tested = board_of(*made), board_of(*made)
    board.retest()
    while tested.queue or tested.tasks:
        assert [task.key for task, *_ in board.start(rule)] == [start.key for start in begin(tested, rule)]
        for queue in (board, tested):
            queue.now, first = queue.first_end()
            queue.end(first)


@given(boards())
def test_chosen_rule_has_the_least_mean_finish(made):
    totals = {rule: rollout(board_of(*made), rule) for rule in RULES}
    rule, total = choose(board_of(*made))
    assert totals[rule] == total <= min(totals.values()) * (1 + 1e-9)
    assert all(totals[earlier] > total for earlier in RULES[: RULES.index(rule)]), "of equal rules the first is taken"


@given(boards())
def test_rollout_stops_once_it_exceeds_the_least_total(made):
    total = rollout(board_of(*made), PAIR)
    assert rollout(board_of(*made), PAIR, total * 1.001) == pytest.approx(total)
    assert rollout(board_of(*made), PAIR, total * 0.5) == math.inf


def test_partners_are_chosen_in_the_order_of_their_mean_finish():
    board = board_of(2, [(1, 10.0)], [[1.2]], running=[(1, 500.0), (1, 50.0)])
    assert begin(board, PAIR) == [TrainingStart(2, 0, ((1, 1),))]


def test_gang_takes_empty_gpus_first_and_then_partners():
    board = board_of(4, [(4, 10.0)], [[1.1]], [(2, 500.0), (1, 50.0)], GangQueue)
    assert begin(board, PAIR) == [TrainingStart(2, 1, ((1, 1), (0, 2)))]
    assert board.free == 0
    assert list(board.single) == [board.tasks[2]]  # on the one that was empty
    assert board.tasks[2].rate == pytest.approx(1 / 1.1)


def test_a_job_that_has_a_partner_takes_no_other():
    board = board_of(1, [(1, 10.0), (1, 20.0)], [[1.1]], running=[(1, 100.0)])
    assert [start.key for start in begin(board, ANY)] == [1]
    assert [task.key for task in board.queue] == [2]


def test_job_that_ends_frees_its_partner():
    board = board_of(1, [(1, 10.0)], [[1.5]], running=[(1, 100.0)])
    begin(board, ANY)
    board.now = 15.0
    assert board.tasks[0].remaining(board.now) == pytest.approx(90.0)
    board.end(board.tasks[1])
    assert board.tasks[0].rate == 1.0


def best_of_all(gpus, jobs, xi):
    """The least sum of finishes over every order and every way to share or to wait, for jobs of one GPU each."""
    least = math.inf

    def go(board, total):
        nonlocal least
        if total >= least:
            return
        if not board.tasks and not board.queue:
            least = total
            return
        for number, task in enumerate(tuple(board.queue)):
            options = [(1, [])] if board.free else []
            options += [(0, [(other, 1)]) for other in board.single]
            for empty, beside in options:
                with board.trial():
                    del board.queue[number]
                    board.run(task, empty, beside)
                    go(board, total)
        if board.tasks:
            with board.trial():
                board.now, first = board.first_end()
                board.end(first)
                go(board, total + board.now)

    go(board_of(gpus, jobs, xi), 0.0)
    return least


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.just(1), st.floats(1.0, 100.0)), min_size=1, max_size=3).map(sorted), st.floats(1.0, 2.2))
def test_plan_on_one_gpu_is_close_to_the_optimum(jobs, xi):
    least = best_of_all(1, jobs, [[xi]])
    found = min(rollout(board_of(1, jobs, [[xi]]), rule) for rule in RULES)
    assert least * (1 - 1e-9) <= found <= 1.15 * least


def test_plan_waits_where_the_pair_rule_is_myopic():
    # a gang beside two jobs: each pair by itself gains at 1.4, but all three end at 14 (42); in turn 10, 10, 20 (40)
    def made():
        return board_of(2, [(2, 10.0)], [[1.4]], [(1, 10.0), (1, 10.0)], GangQueue)

    assert begin(made(), PAIR) == [TrainingStart(2, 0, ((0, 1), (1, 1)))]
    assert rollout(made(), PAIR) == pytest.approx(42.0)
    assert rollout(made(), NEVER) == pytest.approx(40.0)
    assert plan(made()) == []


def test_plan_shares_for_throughput_where_the_pair_rule_refuses():
    # four equal jobs on one GPU at 1.6: in turn 100, 200, 300, 400 (1000); in pairs 160, 160, 320, 320 (960)
    def made():
        return board_of(1, [(1, 100.0)] * 3, [[1.6]], running=[(1, 100.0)])

    assert begin(made(), PAIR) == []
    assert rollout(made(), NEVER) == pytest.approx(1000.0)
    assert rollout(made(), FASTEST) == pytest.approx(960.0)
    assert plan(made()) == [TrainingStart(1, 0, ((0, 1),))]


@given(boards(), st.integers(0, 3))
def test_plan_can_be_applied_and_finishes_no_later_than_any_rule(made, depth):
    board = board_of(*made)
    starts = plan(board, depth=10 + depth)
    keys = [start.key for start in starts]
    assert len(set(keys)) == len(keys)
    twin = board_of(*made)
    apply(twin, starts)
    assert [(t.key, t.alone) for t in board.tasks.values()] == [(t.key, t.alone) for t in twin.tasks.values()]
    least = min(rollout(board_of(*made), rule) for rule in RULES)
    assert min(rollout(_resumed(made, starts), rule, hold=True) for rule in RULES) <= least * (1 + 1e-9)


def _resumed(made, starts):
    board = board_of(*made)
    apply(board, starts)
    return board


def test_jobs_beyond_the_depth_start_on_gpus_that_would_stay_empty():
    board = board_of(2, [(2, 30.0), (2, 31.0), (1, 50.0)], [[3.0]], [(1, 20.0)], GangQueue)
    assert plan(board, depth=1) == [TrainingStart(3, 1, ())]


def test_job_that_can_never_fit_is_not_waited_for():
    board = board_of(1, [(3, 1.0), (1, 10.0), (1, 10.0)], [[1.1]], queue=GangQueue)
    assert [start.key for start in plan(board)] == [1, 2]


@pytest.mark.parametrize(("steps", "pending"), [(1000, 64), (16, 2), (1, 1)])
def test_plan_simulates_fewer_pending_jobs_if_its_budget_would_not_suffice(monkeypatch, steps, pending):
    depths, trial = set(), SharingQueue.trial

    def noted(queue, waiting, case=None):
        depths.add(waiting)
        return trial(queue, waiting, case)

    monkeypatch.setattr(SharingQueue, "trial", noted)
    board = board_of(2, [(1, 100.0)] * 6, [[1.6]], running=[(1, 100.0), (1, 100.0)])
    board.budget.left = steps
    plan(board)
    assert depths == {pending}


def test_plan_with_a_single_rule_follows_that_rule():
    made = 3, [(1, 10.0), (2, 20.0), (1, 30.0)], [[1.3]]
    running = [(2, 50.0), (1, 40.0)]
    assert plan(board_of(*made, running, GangQueue), (PAIR,)) == begin(board_of(*made, running, GangQueue), PAIR)


def test_plan_is_deterministic():
    jobs = [(1 + n % 3, 10.0 + 7 * (n * n % 11)) for n in range(12)]
    xi = [[1.1, 1.4, 1.9], [1.2, 1.7, 1.3], [2.1, 1.0, 1.5]]
    assert len({tuple(plan(board_of(4, jobs, xi, queue=GangQueue))) for _ in range(3)}) == 1


def state(board):
    """Everything of a queue, by job."""
    tasks = {*board.tasks.values(), *board.queue}
    return (
        (board.free, board.lone, board.now, list(board.single), list(board.tasks.values()), list(board.queue)),
        {task: (task.left, task.alone, dict(task.partners), task.rate, task.since) for task in tasks},
        board.first_end(),
    )


@given(boards(), st.sampled_from([ANY, *RULES]), st.sampled_from(RULES), st.integers(0, 3))
def test_trial_changes_nothing(made, first, rule, ended):
    board = board_of(*made)
    begin(board, first)
    for _ in range(min(ended, len(board.tasks))):
        board.now, task = board.first_end()
        board.end(task)
    for task in board.queue[1:]:
        task.cases = (3.0, 300.0)
    before, total = state(board), None
    for case in (None, 1, None):
        with board.trial(4, case):
            begin(board, ANY)
            with board.trial():
                rolled = rollout(board, rule)
            assert rollout(board, rule) == rolled
            total = rolled if total is None and case is None else total
        assert state(board) == before
    assert rolled == total


def is_near(own, other, slow_own, slow_other):
    """Return whether a pair is so near the limit of a rule that rounding decides."""
    mean, serial = together(own, other, slow_own, slow_other), apart(own, other)
    return any(abs(mean - factor * serial) < 1e-9 * serial for factor in (1.0, 0.95, 0.8, 0.5))


@given(
    st.sampled_from([ANY, *RULES, pair_test(0.05), pair_test(0.5)]), SECONDS, SECONDS, SLOW, SLOW, st.floats(0.0, 1.0)
)
def test_refused_partner_is_still_refused_when_less_of_it_remains(rule, own, other, slow_own, slow_other, share):
    """Therefore a start tests each pair once."""
    if rule is None:
        return
    before = rule(own, other, slow_own, slow_other)
    after = rule(own, share * other, slow_own, slow_other)
    assert before is not None or after is None or is_near(own, share * other, slow_own, slow_other)


@given(
    st.sampled_from([ANY, *RULES, pair_test(0.05), pair_test(0.5)]), SECONDS, SECONDS, SLOW, SLOW, st.floats(1.0, 100.0)
)
def test_refused_partner_is_refused_for_a_longer_job_too(rule, own, other, slow_own, slow_other, times):
    """Therefore a queue, the shortest first, need not be tested beyond the first of equal jobs that is refused."""
    if rule is None:
        return
    before = rule(own, other, slow_own, slow_other)
    after = rule(times * own, other, slow_own, slow_other)
    assert before is not None or after is None or is_near(times * own, other, slow_own, slow_other)

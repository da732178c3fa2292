"""How many tasks of an elastic array run at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.free import FreeCapacity, NodeCapacity
from slurm_migbatch.decide.dispatch.arrays import (
    HISTORY,
    START_S,
    ArrayHistory,
    Bounds,
    ElasticArray,
    Task,
    Throttle,
    elastic_arrays,
    had,
    known,
    session_s,
    throttles,
)
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.slurm.client import JobRow
from tests.support.dispatch_site import H100, NOW, P, job

POOL = frozenset({"h1"})
HINTS = "migbatch: model=resnet-50 items=600 deadline=2m"
RATE = 600 / 18.0


def array(number: int = 9, **changes: object) -> ElasticArray:
    fields: dict[str, object] = {
        "array": number, "user": "ann", "comment": HINTS, "profile": P("1g.10gb"), "each": 1, "pending": 12,
        "running": (), "throttle": None, "deadline_s": 120, "items": 600, "predicted_s": 18.0, "pool": POOL,
    }  # fmt: skip
    return ElasticArray(**{**fields, **changes})  # type: ignore[arg-type]


def free_capacity(gpus: int = 2) -> FreeCapacity:
    return FreeCapacity({"h1": frozenset({P("1g.10gb")})}, lambda _: NodeCapacity([(H100, EMPTY)] * gpus, Counter()))


def history(*arrays: ElasticArray, bounds: Bounds | None = None) -> ArrayHistory:
    """The history when these arrays are seen for the first time."""
    past = ArrayHistory(bounds or Bounds())
    for elastic in arrays:
        past.served.learn(elastic.array, elastic.user, had(elastic, NOW - HISTORY * session_s(arrays), NOW))
    return past


def limits(*arrays: ElasticArray, bounds: Bounds | None = None, gpus: int = 2, scarce: bool = False) -> list[Throttle]:
    return throttles(NOW, arrays, history(*arrays, bounds=bounds), free_capacity(gpus), lambda array: scarce)


def limits_by_array(
    *arrays: ElasticArray, bounds: Bounds | None = None, gpus: int = 2, scarce: bool = False
) -> dict[int, int]:
    changes = limits(*arrays, bounds=bounds, gpus=gpus, scarce=scarce)
    return {change.array.array: change.after for change in changes}


def ours(throttle: int, asked: int | None = None) -> Bounds:
    """Bounds after migbatchd has set the throttle of array 9."""
    return Bounds({9: asked}, {9: throttle})


# -- which arrays ------------------------------------------------------------------------------------------------------


def rows(**changes: object) -> list[JobRow]:
    comment = f"{HINTS} [mig:1g.10gb:1#abc12345]"
    waiting = job(9, "1g.10gb", array_job=9, array_task="3-12%4", tasks=10, throttle=4, comment=comment, **changes)
    running = [
        replace(waiting, job_id=9 + n, array_task=str(n), tasks=1, throttle=None, state="RUNNING", start=NOW - n)
        for n in (1, 2)
    ]
    return [waiting, *running, job(7), job(30, array_job=30, array_task="1-3", tasks=3, comment="")]


def test_an_array_with_a_deadline_and_items_is_elastic() -> None:
    (found,) = elastic_arrays(rows())
    assert (found.array, found.pending, found.running, found.throttle) == (9, 10, (NOW - 2, NOW - 1), 4)
    assert (found.deadline_s, found.items, found.profile, found.each) == (120, 600, P("1g.10gb"), 1)
    assert found.first == NOW - 2 and found.task_s is None


@pytest.mark.parametrize(
    "comment", ["", "migbatch: model=x items=5", f"{HINTS} role=train", "migbatch: deadline=2m", f"{HINTS} odd=1"]
)
def test_array_with_other_hints_is_not_elastic(comment: str) -> None:
    assert elastic_arrays([replace(row, comment=comment) for row in rows()]) == []


def test_an_array_without_pending_tasks_needs_no_throttle() -> None:
    assert elastic_arrays(rows()[1:]) == []


# -- what the deadline needs -------------------------------------------------------------------------------------------


def test_throttle_is_the_fewest_concurrent_tasks_that_meet_the_deadline() -> None:
    # 20 s each including its start, with a margin of a tenth: five in sequence within 120 s
    (found,) = limits(array())
    assert found.after == 3
    assert found.why == "12 tasks to start, 20 s each (predicted), 120 s to the deadline: 3 at once"


def test_the_deadline_runs_from_the_start_of_the_first_task() -> None:
    begun = known(array(pending=10, throttle=3), [Task(NOW - 60, NOW - 42, True), Task(NOW - 60, None)], RATE, POOL)
    assert limits_by_array(begun, bounds=ours(3)) == {9: 5}


def test_measured_tasks_count_more_than_the_prediction() -> None:
    ended = [Task(NOW - 60, NOW - 60 + 8.0, True), Task(NOW - 60, NOW - 50, True), Task(NOW - 60, NOW - 1, False)]
    slow = known(array(pending=9), ended, 12.0, POOL)
    assert slow.task_s == 9.0 + START_S and "(measured)" in limits(slow, scarce=True)[0].why
    assert limits_by_array(slow) == {9: 3}


def test_array_with_unknown_task_duration_keeps_its_throttle() -> None:
    assert limits_by_array(array(predicted_s=None)) == {}


def test_late_array_may_run_all_its_pending_tasks_at_once() -> None:
    late = known(array(throttle=3), [Task(NOW - 500, NOW - 400, True)], RATE, POOL)
    assert limits_by_array(late, bounds=ours(3)) == {9: 12}


def test_throttle_is_lowered_only_with_twice_the_margin_unless_others_wait() -> None:
    # 21 s each: five in sequence within 120 s with the margin of a tenth, four with twice that margin
    slack = array(pending=15, throttle=4, predicted_s=19.0)
    assert limits_by_array(slack, bounds=ours(4)) == {}
    assert limits_by_array(slack, bounds=ours(4), scarce=True) == {9: 3}


def test_throttle_above_the_number_of_tasks_is_not_changed() -> None:
    assert limits_by_array(array(pending=2, running=(NOW - 30,), throttle=9, deadline_s=30)) == {}


# -- the user's bound --------------------------------------------------------------------------------------------------


def test_throttle_set_by_the_user_is_an_upper_bound() -> None:
    bounds = Bounds()
    tight = array(throttle=2, deadline_s=60)
    assert limits_by_array(tight, bounds=bounds) == {} and bounds.of(9, 2) == 2
    assert limits_by_array(array(throttle=8), bounds=Bounds(), scarce=True) == {9: 3}


def test_user_bound_is_kept_after_migbatchd_has_set_the_throttle() -> None:
    bounds = Bounds()
    assert bounds.of(9, 8) == 8
    bounds.set(9, 3)
    assert bounds.of(9, 3) == 8
    assert bounds.of(9, 5) == 5  # the user has changed the throttle
    assert bounds.of(9, None) is None


def action(before: str, after: str, **changes: object) -> dict[str, object]:
    return {
        "job_id": 9,
        "kind": "throttle",
        "before": before,
        "after": after,
        "dry_run": False,
        "outcome": None,
        **changes,
    }


def test_replay_after_restart_does_not_take_a_set_throttle_for_the_users() -> None:
    past = [action("8", "3"), action("3", "2"), action("8", "7", dry_run=True), action("8", "7", outcome="no")]
    bounds = Bounds()
    bounds.replay(past)
    assert bounds.of(9, 2) == 8
    bounds.replay([action("none", "4", job_id=10)])
    assert bounds.of(10, 4) is None
    assert bounds.of(10, 6) == 6


def test_throttle_that_was_recorded_but_never_set_is_not_a_bound() -> None:
    bounds = Bounds()
    bounds.replay([action("none", "3")])
    assert bounds.of(9, None) is None


def test_replay_after_restart_uses_the_last_throttle_the_user_set() -> None:
    bounds = Bounds()
    bounds.replay([action("none", "3"), action("5", "4")])
    assert bounds.of(9, 4) == 5


def test_throttle_that_slurm_did_not_set_leaves_the_previous_one_ours() -> None:
    bounds = Bounds()
    assert bounds.of(9, None) is None
    bounds.set(9, 3)
    assert bounds.of(9, 3) is None
    bounds.set(9, 8)
    assert bounds.of(9, 3) is None  # Slurm refused 8, or did not answer
    assert bounds.last(9) == 8 and bounds.of(9, 8) is None
    bounds.replay([action("none", "3", job_id=10), action("3", "8", job_id=10), action("3", "8", job_id=10)])
    assert bounds.of(10, 3) is None


@given(
    pending=st.integers(1, 60),
    running=st.lists(st.floats(0, 300), max_size=8),
    asked=st.none() | st.integers(1, 30),
    task_s=st.floats(0.1, 400),
    deadline=st.integers(1, 2000),
    scarce=st.booleans(),
)
def test_throttle_is_at_least_one_and_at_most_the_user_bound(
    pending: int, running: list[float], asked: int | None, task_s: float, deadline: int, scarce: bool
) -> None:
    elastic = array(
        pending=pending,
        running=tuple(NOW - r for r in running),
        throttle=asked,
        predicted_s=task_s,
        deadline_s=deadline,
    )
    for change in limits(elastic, scarce=scarce):
        assert 1 <= change.after <= min(asked or 1 << 30, pending + len(running))


# -- several users -----------------------------------------------------------------------------------------------------


def both(served: float = 0.0) -> list[ElasticArray]:
    run = Task(NOW - served, None, False)
    ann = known(array(1, user="ann", pending=40), [run], RATE, POOL)
    bob = array(2, user="bob", pending=40)
    return [ann, bob]


def test_scarce_supply_goes_to_the_least_served_user() -> None:
    shares = limits_by_array(*both(served=60.0), gpus=1)
    assert shares[1] + shares[2] == 8  # seven slices, and one more task that waits in Slurm's order
    assert shares[2] > shares[1] >= 1


def test_sufficient_supply_meets_the_needs_of_every_user() -> None:
    alone = {elastic.array: limits_by_array(elastic, gpus=9)[elastic.array] for elastic in both()}
    assert limits_by_array(*both(), gpus=9) == alone


def test_one_users_arrays_are_not_rationed_against_each_other() -> None:
    mine = [replace(elastic, user="ann") for elastic in both()]
    assert limits_by_array(*mine, gpus=1) == {
        elastic.array: limits_by_array(elastic, gpus=1)[elastic.array] for elastic in mine
    }


def test_reason_of_a_rationed_throttle_names_the_users_share() -> None:
    changes = limits(*both(60.0), gpus=1)
    assert any("is the share of ann, as users need more than there is" in change.why for change in changes)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ann", "bob", "eve"]), st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=6
    ),
    st.integers(0, 2),
)
def test_shares_do_not_exceed_needs_or_supply(members: list[tuple[str, int, int]], gpus: int) -> None:
    arrays = [
        array(n, user=user, pending=pending, running=(NOW - 1.0,) * running)
        for n, (user, pending, running) in enumerate(members, start=1)
    ]
    needs = {
        array.array: limits_by_array(array, gpus=9).get(array.array, array.pending + len(array.running))
        for array in arrays
    }
    shares = {array.array: limits_by_array(*arrays, gpus=gpus).get(array.array, needs[array.array]) for array in arrays}
    assert all(1 <= shares[n] <= needs[n] for n in needs)
    if len({user for user, _, _ in members}) > 1 and sum(needs.values()) > gpus * 7 + sum(m[2] for m in members):
        assert sum(shares.values()) <= max(gpus * 7 + sum(m[2] for m in members) + 1, len(arrays))

"""How many tasks each user runs at once where several need more than there is, step by step through sessions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.dispatch.elasticity import Array, at_once, ends_in_time, work_s
from slurm_migbatch.decide.dispatch.shares import AHEAD, CROWDED, LATE, LATER, Claim, ServedTime, Share, shares
from tests.support.examples import examples

NOW = 1000.0


def claim(array: int, user: str, need: int, **changes: object) -> Claim:
    fields: dict[str, object] = {
        "array": array, "user": user, "units": 1, "need": need, "task_s": 20.0, "session_s": 120.0, "due": NOW + 120.0,
        "work": need * 100.0,
    }  # fmt: skip
    return Claim(**{**fields, **changes})  # type: ignore[arg-type]


def tasks(capacity: int, *claims: Claim, served: Mapping[str, float] | None = None) -> dict[int, int]:
    return {array: share.tasks for array, share in shares(NOW, claims, capacity, served or {}).items()}


# -- the order of claims -----------------------------------------------------------------------------------------------


def test_earliest_deadline_gets_its_need_and_the_later_one_the_rest() -> None:
    early = claim(1, "ann", 6)
    later = claim(2, "bob", 4, due=NOW + 600.0, work=1500.0)
    assert shares(NOW, [early, later], 8, {}) == {1: Share(6), 2: Share(2, LATER)}


def test_array_that_cannot_meet_its_deadline_gets_what_others_leave() -> None:
    late, early = claim(1, "ann", 8, kept=False), claim(2, "bob", 5)
    assert shares(NOW, [late, early], 8, {}) == {1: Share(3, LATE), 2: Share(5)}


def test_if_not_all_deadlines_can_be_met_the_most_served_user_yields() -> None:
    ann, bob = claim(1, "ann", 6), claim(2, "bob", 6)
    for served, winner, loser in (({"ann": 9.0}, 2, 1), ({"bob": 9.0}, 1, 2)):
        found = shares(NOW, [ann, bob], 8, served)
        assert found[winner] == Share(6) and found[loser] == Share(2, CROWDED)


def test_user_served_more_than_the_fair_share_does_not_come_first() -> None:
    early = claim(1, "ann", 6)
    later = claim(2, "bob", 4, due=NOW + 600.0, session_s=600.0, work=1500.0)
    lead = 8 * 120.0 / 2
    assert tasks(8, early, later, served={"ann": 2 * lead}) == {1: 6, 2: 2}  # the largest allowed lead over the mean
    found = shares(NOW, [early, later], 8, {"ann": 2 * lead + 1})
    assert found == {1: Share(4, AHEAD), 2: Share(4)}
    shorter = replace(early, session_s=60.0)
    assert shares(NOW, [shorter, later], 8, {"ann": 2 * lead})[1] == Share(4, AHEAD)


def test_service_instances_precede_deadlines_within_the_fair_share() -> None:
    service = claim(1, "ann", 3, due=None, session_s=600.0, work=0.0)
    batch = claim(2, "bob", 7, work=450.0)
    assert tasks(8, service, batch) == {1: 3, 2: 5}
    assert tasks(8, service, batch, served={"ann": 6000.0}) == {1: 1, 2: 7}


def test_without_reachable_deadlines_the_least_served_user_comes_first() -> None:
    ann, bob = (claim(n, user, 9, kept=False) for n, user in ((1, "ann"), (2, "bob")))
    assert tasks(6, ann, bob, served={"ann": 40.0}) == {1: 3, 2: 4}  # one task above capacity waits in Slurm's order


claims = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "eve"]),
        st.sampled_from([1, 2, 3, 4, 7]),
        st.integers(1, 20),
        st.none() | st.floats(1, 5000),
        st.floats(1, 5000),
        st.floats(0, 5000),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(400))
@given(claims, st.integers(0, 40), st.dictionaries(st.sampled_from(["ann", "bob", "eve"]), st.floats(0, 1e5)))
def test_shares_are_between_one_and_the_need_and_within_capacity(
    found: list[tuple[str, int, int, float | None, float, float, bool]], capacity: int, served: dict[str, float]
) -> None:
    given_claims = [
        Claim(n, user, units, need, 10.0, session, None if left is None else NOW + left, work, kept)
        for n, (user, units, need, left, session, work, kept) in enumerate(found, 1)
    ]
    result = shares(NOW, given_claims, capacity, served)
    assert result.keys() == {claimed.array for claimed in given_claims}
    for claimed in given_claims:
        assert 1 <= result[claimed.array].tasks <= claimed.need
        assert bool(result[claimed.array].why) == (result[claimed.array].tasks < claimed.need)
    used = sum(result[claimed.array].tasks * claimed.units for claimed in given_claims)
    least = sum(claimed.units for claimed in given_claims)
    assert used <= max(capacity, least) + max(claimed.units for claimed in given_claims)


# -- over time ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """An array on slices of one compute slice."""

    number: int
    user: str
    pending: int
    task_s: float
    deadline_s: float
    ends: list[float] = field(default_factory=list)
    done: float = 0.0


def play(batches: Sequence[Batch], capacity: int, *, deadlines: bool) -> dict[int, float]:
    """Run arrays, each task as soon as its array's share and the free slices allow; returns the end of each array."""
    now, served = 0.0, ServedTime()
    for batch in batches:
        served.learn(batch.number, batch.user, 0.0)
    while any(batch.pending or batch.ends for batch in batches):
        served.count(now, {b.number: (b.user, len(b.ends)) for b in batches}, 10 * max(b.deadline_s for b in batches))
        counts = _counts(now, batches, capacity, served.spent, deadlines)
        free = capacity - sum(len(batch.ends) for batch in batches)
        for batch in batches:
            for _ in range(min(free, counts.get(batch.number, 0) - len(batch.ends), batch.pending)):
                heapq.heappush(batch.ends, now + batch.task_s)
                batch.pending, free = batch.pending - 1, free - 1
        now = min(batch.ends[0] for batch in batches if batch.ends)
        for batch in batches:
            while batch.ends and batch.ends[0] <= now:
                batch.done = heapq.heappop(batch.ends)
    return {batch.number: batch.done for batch in batches}


def _counts(
    now: float, batches: Sequence[Batch], capacity: int, spent: Mapping[str, float], deadlines: bool
) -> dict[int, int]:
    found = []
    for batch in batches:
        if not batch.pending:
            continue
        left = Array(batch.pending, tuple(end - now for end in batch.ends), batch.task_s, batch.deadline_s)
        most = batch.pending + len(batch.ends)
        kept = deadlines and ends_in_time(left, now, most)
        need = at_once(left, now, most)
        found.append(
            Claim(
                batch.number, batch.user, 1, need, batch.task_s, batch.deadline_s, batch.deadline_s, work_s(left), kept
            )
        )
    if sum(claimed.need for claimed in found) <= capacity:
        return {claimed.array: claimed.need for claimed in found}
    return {number: share.tasks for number, share in shares(now, found, capacity, spent).items()}


def test_deadline_first_meets_a_deadline_that_least_served_first_misses() -> None:
    def both() -> list[Batch]:
        return [Batch(1, "ann", 35, 20.0, 125.0), Batch(2, "bob", 100, 20.0, 600.0)]

    fair = play(both(), 8, deadlines=False)
    assert fair[1] > 125.0, "half of the slices are too few"
    first = play(both(), 8, deadlines=True)
    assert first[1] <= 125.0 and first[2] <= 600.0


@settings(max_examples=examples(100), deadline=None)
@given(
    capacity=st.integers(4, 16),
    count=st.integers(5, 40),
    other=st.integers(5, 60),
    slack=st.floats(1.3, 4.0),
)
def test_deadlines_that_can_all_be_met_are_met(capacity: int, count: int, other: int, slack: float) -> None:
    """First the one array alone, then both, with allowance for the spare time and for indivisible tasks."""
    task_s = 1.0
    first = (math.ceil(count / (capacity - 1)) + 2) * task_s * slack
    second = first + (math.ceil((count + other) / (capacity - 1)) + 4) * task_s * slack
    done = play(
        [Batch(1, "ann", count, task_s, first), Batch(2, "bob", other, task_s, second)], capacity, deadlines=True
    )
    assert done[1] <= first and done[2] <= second


def endless(capacity: int, false_s: float, true_s: float, sessions: int) -> tuple[float, float]:
    """Ann and Bob each always have an array that could use all slices; returns what each was served.

    Ann states `told_s` as the deadline of each array, Bob the true one. Above capacity, both wait alike.
    """
    step, now, served = min(false_s, true_s) / 8, 0.0, ServedTime()
    total = {"ann": 0.0, "bob": 0.0}
    for number, user in ((1, "ann"), (2, "bob")):
        served.learn(number, user, 0.0)
    running = {1: ("ann", 0), 2: ("bob", 0)}
    while now < sessions * true_s:
        found = [
            Claim(
                number,
                user,
                1,
                capacity,
                step,
                stated_s,
                now + stated_s - now % stated_s,
                0.9 * (capacity - 1) * (stated_s - now % stated_s),
            )
            for number, user, stated_s in ((1, "ann", false_s), (2, "bob", true_s))
        ]
        given_tasks = shares(now, found, capacity, served.spent)
        over = sum(share.tasks for share in given_tasks.values()) - capacity
        running = {n: (user, given_tasks[n].tasks) for n, user in ((1, "ann"), (2, "bob"))}
        if over > 0:  # the last to come waits: the one with more tasks
            larger = max(running, key=lambda n: running[n][1])
            running[larger] = running[larger][0], running[larger][1] - over
        now += step
        served.count(now, running, 10 * true_s)
        for user, units in running.values():
            total[user] += units * step
    return total["ann"], total["bob"]


@settings(max_examples=examples(40), deadline=None)
@given(capacity=st.integers(2, 14), factor=st.floats(0.05, 1.0), sessions=st.integers(5, 40))
def test_false_deadlines_bring_no_gain_over_several_sessions(capacity: int, factor: float, sessions: int) -> None:
    true_s = 600.0
    ann, bob = endless(capacity, factor * true_s, true_s, sessions)
    fair = (ann + bob) / 2
    lead = capacity * factor * true_s / 2  # gained once, and again as served time decays over ten sessions
    grain = capacity * factor * true_s / 8 * 2
    assert ann - fair <= (lead + grain) * (1 + sessions / 10)
    assert ann - fair <= 0.1 * fair * (1 + 10 / sessions) + grain * (1 + sessions / 10)


def test_gain_shrinks_the_further_a_stated_deadline_is_from_the_true_one() -> None:
    gains = [
        (ann - bob) / (ann + bob) for ann, bob in (endless(7, factor * 600.0, 600.0, 40) for factor in (0.05, 0.2, 1.0))
    ]
    assert gains[0] <= gains[1] + 0.01 and gains[0] < 0.02


# -- served time -------------------------------------------------------------------------------------------------------


def test_served_time_decays_and_outlives_its_array() -> None:
    served = ServedTime()
    served.count(NOW, {1: ("ann", 4)}, 1000.0)
    assert served.spent == {}
    served.learn(1, "ann", 50.0)
    served.learn(1, "ann", 50.0)  # counted once
    served.count(NOW + 10, {1: ("ann", 4)}, 1000.0)
    assert served.spent["ann"] == pytest.approx(50 * math.exp(-0.01) + 40)
    served.count(NOW + 10, {}, 0.0)
    assert served.spent["ann"] == pytest.approx(50 * math.exp(-0.01) + 40) and served.seen == set()
    served.count(NOW + 1010, {}, 0.0)
    assert served.spent["ann"] == pytest.approx((50 * math.exp(-0.01) + 40) / math.e)
    served.count(NOW + 1e6, {}, 0.0)
    assert served.spent == {}

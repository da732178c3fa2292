"""Queue structures, compared with straightforward implementations of the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.queueing import Lanes, RunningClaim, Shadow, level, may_backfill, shadow, victims

entries = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=40)


@given(entries, st.lists(st.integers(0, 6), max_size=40))
def test_lanes_return_the_same_first_fit_as_a_scan_of_the_queue(
    pushed: list[tuple[int, int]], asked: list[int]
) -> None:
    lanes: Lanes[int, str] = Lanes()
    plain: list[tuple[tuple[int, int], int, str]] = []
    for number, (key, need) in enumerate(pushed):
        lanes.push((key, number), need, f"x{number}")
        plain.append(((key, number), need, f"x{number}"))
    plain.sort()
    for free in asked:
        assert lanes.ordered(7) == [(need, item) for _, need, item in plain[:7]]
        expected = next((entry for entry in plain if entry[1] <= free), None)
        found = lanes.first(free.__ge__)
        if expected is None:
            assert found is None
            continue
        assert found == expected[1:]
        assert lanes.pop(expected[1]) == expected[2]
        plain.remove(expected)
        assert len(lanes) == len(plain)


@given(entries, st.data())
def test_lanes_can_drop_any_entry(pushed: list[tuple[int, int]], data: st.DataObject) -> None:
    lanes: Lanes[int, int] = Lanes()
    left = {}
    for number, (key, need) in enumerate(pushed):
        lanes.push((key, number), need, number)
        left[(key, number)] = (need, number)
    while left:
        key = data.draw(st.sampled_from(sorted(left)))
        need, _ = left.pop(key)
        lanes.drop(key, need)
        assert lanes.ordered(100) == [entry for _, entry in sorted(left.items())]
        with pytest.raises(KeyError):
            lanes.drop(key, need)


def test_long_queue_stays_correct_after_many_removals() -> None:
    lanes: Lanes[str, int] = Lanes()
    for number in range(5000):
        lanes.push(number, "one", number)
    assert [lanes.pop("one") for _ in range(4000)] == list(range(4000))
    lanes.push(-1, "one", -1)
    assert lanes.first() == ("one", -1)
    lanes.drop(4500, "one")
    assert len(lanes) == 1000


def test_reservation_is_at_the_time_when_enough_will_be_free() -> None:
    holdings = [RunningClaim(5, 1), RunningClaim(9, 2), RunningClaim(20, 4)]
    assert shadow(3, 1, holdings, 0) == Shadow(9, 1)
    assert shadow(1, 1, holdings, 3) == Shadow(3, 0)
    assert shadow(8, 1, holdings, 0) == Shadow(20, 0)
    assert shadow(2, 1, holdings, 7) == Shadow(7, 0)  # it should have ended
    with pytest.raises(ValueError, match="9 are needed and there will never be more than 8"):
        shadow(9, 1, holdings, 0)


def test_backfill_job_must_end_before_the_reservation_or_use_spare_gpus() -> None:
    reserved = Shadow(10, 1)
    assert may_backfill(2, 5, 2, 5, reserved)
    assert not may_backfill(2, 6, 2, 5, reserved)
    assert may_backfill(1, 600, 2, 5, reserved)
    assert not may_backfill(1, 1, 0, 5, reserved)


def test_queue_level_changes_at_its_service_limits() -> None:
    assert [level(attained, (10, 100)) for attained in (0, 9.9, 10, 99, 100, 1e9)] == [0, 0, 1, 1, 2, 2]


@given(st.integers(0, 12), st.integers(0, 4), st.lists(st.integers(1, 4), max_size=6))
def test_victims_free_enough_and_none_of_them_is_unnecessary(need: int, free: int, held: list[int]) -> None:
    chosen = victims(need, free, [(count, number) for number, count in enumerate(held)])
    if chosen is None:
        assert free + sum(held) < need
        return
    freed = free + sum(held[number] for number in chosen)
    assert freed >= need
    assert all(freed - held[number] < need for number in chosen)
    if free >= need:
        assert not chosen

"""How one queue becomes the next, and what is derived from it."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import DemandBook, demands
from slurm_migbatch.decide.capacity.edits import Edit, edits
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.slurm.client import JobRow
from tests.support.changing_site import ChangingSite
from tests.support.examples import examples

Item = tuple[int, int]


def _item(number: int) -> Item:
    """A new object, equal to others of the same number."""
    return (number, -number)


def _applied(before: tuple[Item, ...], found: list[Edit]) -> list[Item]:
    return [item for start, end, new in found for item in (*before[start:end], *new)]


@settings(max_examples=examples(300), deadline=None)
@given(rng=st.randoms(use_true_random=True), size=st.sampled_from([0, 1, 5, 200, 5000]))
def test_edits_turn_one_sequence_into_the_next(rng: random.Random, size: int) -> None:
    before = tuple(_item(number) for number in range(size))
    now = list(before)
    for _ in range(rng.randint(0, 6)):
        at, length = rng.randint(0, len(now)), rng.choice([1, 2, 100])
        change = rng.randint(0, 3)
        if change == 0:
            del now[at : at + length]
        elif change == 1:
            now[at:at] = [_item(rng.randint(0, size)) for _ in range(length)]
        elif change == 2:
            now[at : at + length] = [_item(item[0]) for item in now[at : at + length]]
        else:
            now.insert(rng.randint(0, len(now)), now.pop(at) if at < len(now) else _item(-1))
    found = edits(before, tuple(now))
    made = _applied(before, found)
    assert len(made) == len(now)
    assert all(item is other for item, other in zip(made, now, strict=True))
    places = [place for start, end, _ in found for place in (start, end)]
    assert sorted(places) == places, "rows that stay keep their order"


def test_unchanged_sequence_is_one_edit() -> None:
    items = tuple(_item(number) for number in range(10_000))
    assert edits(items, tuple(items)) == [(0, 10_000, ())]


def test_inserting_or_removing_many_objects_keeps_the_rest_unchanged() -> None:
    items = tuple(_item(number) for number in range(10_000))
    some = tuple(_item(number) for number in range(700))
    assert edits(items, (*items[:50], *some, *items[50:])) == [(0, 50, some), (50, 10_000, ())]
    assert edits(items, (*items[:50], *items[750:])) == [(0, 50, ()), (750, 10_000, ())]


def test_one_replaced_object_among_many_is_found() -> None:
    items = tuple(_item(number) for number in range(10_000))
    new = _item(7777)
    assert edits(items, (*items[:7777], new, *items[7778:])) == [(0, 7777, (new,)), (7778, 10_000, ())]


@settings(max_examples=examples(100), deadline=None)
@given(rng=st.randoms(use_true_random=True), rounds=st.integers(2, 8))
def test_updated_queue_equals_one_built_anew(rng: random.Random, rounds: int) -> None:
    site, queue, book = ChangingSite(rng, jobs=20), JobQueue(), DemandBook()
    for _ in range(rounds):
        jobs, alone = tuple(site.queue), JobQueue.of(site.queue)
        queue.update(jobs)
        assert (queue.jobs, queue.rows, queue.guests) == (jobs, alone.rows, alone.guests)
        assert queue.running == alone.running
        for node in site.rows:
            assert sorted(map(id, queue.holders(node))) == sorted(map(id, alone.holders(node)))
        nodes = tuple(site.rows.values())
        assert book.of(queue, nodes, site.facts.keys(), site.now) == demands(jobs, nodes, site.facts.keys(), site.now)
        for happens in rng.choices([site._submit, site._start, site._end, site._reorder, site._twice, site._node], k=3):
            happens()


def test_same_rows_in_another_sequence_are_the_same_queue() -> None:
    rows = [JobRow(1), JobRow(2), JobRow(3)]
    queue = JobQueue.of(rows)
    version = queue.version
    queue.update(tuple(rows))
    assert queue.version == version
    for other in (rows[:2], [rows[1], rows[0], rows[2]], [*rows[:2], replace(rows[2])]):
        queue.update(other)
        assert queue.version > version
        assert (queue.jobs, list(queue.rows)) == (tuple(other), [row.job_id for row in queue.rows.values()])
        version = queue.version


def test_jobs_that_take_a_signal_are_listed_in_the_order_of_the_queue() -> None:
    rows = [JobRow(number, state="RUNNING", comment="migbatch: role=train signal=usr1") for number in (3, 1, 2)]
    queue = JobQueue.of([JobRow(9), *rows])
    assert [row.job_id for row in queue.signalled()] == [3, 1, 2]
    assert [queue.count_signalled(lambda row, job=job: row.job_id == job) for job in (2, 9)] == [1, 0]
    queue.update([rows[1], replace(rows[0], comment="")])
    assert queue.signalled() == [rows[1]]

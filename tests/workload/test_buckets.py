"""Buckets round to the more demanding side, by a bounded amount."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.workload.buckets import Grid, bucket_of, preferred, rate_of, up
from slurm_migbatch.workload.hints import Hints

GRID = Grid("tok", (64, 128, 512), (1, 2, 4, 8, 16, 32), 128)
positive = st.integers(100, 10**15)


@given(positive)
def test_a_limit_is_tightened_by_at_most_an_eighth(value: int) -> None:
    assert value * 0.875 <= preferred(value, ceiling=False) <= value


@given(positive)
def test_a_rate_is_raised_by_at_most_a_seventh(value: int) -> None:
    assert value <= preferred(value, ceiling=True) <= value * 8 / 7 + 1


@given(positive, st.booleans())
def test_preferred_numbers_are_unchanged(value: int, ceiling: bool) -> None:
    rounded = preferred(value, ceiling=ceiling)
    assert preferred(rounded, ceiling=ceiling) == preferred(rounded, ceiling=not ceiling) == rounded


@given(positive, positive)
def test_preferred_keeps_the_order(one: int, two: int) -> None:
    low, high = sorted((one, two))
    assert preferred(low, ceiling=False) <= preferred(high, ceiling=False)


@given(st.integers(1, 1000))
def test_value_is_rounded_up_to_an_edge(value: int) -> None:
    edge = up(value, GRID.inputs)
    assert edge >= value and (edge in GRID.inputs or edge == 1024)


def test_edges_double_beyond_the_last_one() -> None:
    assert [up(value, GRID.batches) for value in (32, 33, 64, 65, 65536)] == [32, 64, 64, 128, 65536]


def test_inputs_beyond_the_last_edge_are_rounded_by_at_most_an_eighth() -> None:
    """1280 pixels counted as 2048: 2.56 times the memory."""
    grid = Grid("px", (224, 640, 1024), (8,), 640)
    assert [grid.up_input(size) for size in (640, 700, 1024, 1025, 1280, 1300, 1920, 2048, 2049, 3840)] == [
        640, 1024, 1024, 1152, 1280, 1408, 1920, 2048, 2304, 3840
    ]  # fmt: skip


@given(st.integers(1, 10**12), st.integers(1, 10**7))
def test_rate_is_the_smallest_that_meets_the_deadline(items: int, seconds: int) -> None:
    assert rate_of(items, seconds) * seconds >= items * 1000 > (rate_of(items, seconds) - 1) * seconds


def test_bucket_name_holds_all_its_parts() -> None:
    bucket = bucket_of(Hints(batch=20, input=100, slo_us=210_000, items=1000, deadline_s=10), "bert", GRID)
    assert bucket.name == "bert/infer/b32/128tok/slo200000us/rate100000"
    assert bucket_of(Hints(role="train"), "bert", GRID).name == "bert/train/b8/128tok/any/any"


@pytest.mark.parametrize("edges", [(), (2, 1), (1, 1), (0, 1)])
def test_edges_must_ascend(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Grid("tok", edges, (1,), 1)

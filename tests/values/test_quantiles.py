"""Quantiles are values that occur, by the nearest rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.values.quantiles import quantile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantile_is_the_smallest_value_that_covers_the_share(values: list[float], share: float) -> None:
    q = quantile(values, share)
    assert q in values
    assert sum(v <= q for v in values) >= share * len(values) - 1e-9
    assert all(sum(v <= w for v in values) < share * len(values) + 1e-9 for w in values if w < q)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.01, 1), (0.07, 7), (0.5, 50), (0.55, 55), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_quantile_of_an_exact_share_is_the_value_at_its_rank(share: float, value: int) -> None:
    assert quantile(range(100, 0, -1), share) == value

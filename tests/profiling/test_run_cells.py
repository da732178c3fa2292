"""The points of a run, and which of them are ruled out by memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.profiling.cells import MAX_CELLS, CellError, MeasurementCell, numbers, open_cells, product
from slurm_migbatch.profiling.measurement import Measurement

small = st.integers(1, 64)
cells = st.builds(MeasurementCell, small, st.none() | small, st.integers(1, 4))


def row(cell, ran=True):
    return Measurement(
        gpu="cpu",
        model="m",
        batch=cell.batch,
        input_size=cell.input_size,
        procs=cell.procs,
        latency_s=1.0 if ran else None,
    )


@pytest.mark.parametrize(
    ("text", "doubling", "expected"),
    [
        ("1,2,8", False, (1, 2, 8)),
        ("8, 2,2", False, (2, 8)),
        ("1-3", False, (1, 2, 3)),
        ("1-48", True, (1, 2, 4, 8, 16, 32, 48)),
        ("3-12,100", True, (3, 6, 12, 100)),
        ("5-5", True, (5,)),
    ],
)
def test_number_lists_and_ranges_are_parsed(text, doubling, expected):
    assert numbers(text, doubling=doubling) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "8-1", "0-3", "a", "1.5", "1-2-3", "1-999999999"])
def test_invalid_number_list_is_refused_with_advice(text):
    with pytest.raises(CellError, match=r"write"):
        numbers(text)


def test_cells_are_ordered_ascending_with_the_batch_varying_fastest():
    assert product([4, 1], [512, 128], [2, 1])[:3] == (
        MeasurementCell(1, 128),
        MeasurementCell(4, 128),
        MeasurementCell(1, 512),
    )
    assert product([2], [None], [1]) == (MeasurementCell(2, None, 1),)


def test_too_many_points_are_refused():
    with pytest.raises(CellError, match="too many"):
        product(range(1, MAX_CELLS), [1, 2], [1])


@given(cells, cells, cells)
def test_needing_at_least_is_a_partial_order(a, b, c):
    assert a.needs_at_least(a)
    if a.needs_at_least(b) and b.needs_at_least(a):
        assert a == b
    if a.needs_at_least(b) and b.needs_at_least(c):
        assert a.needs_at_least(c)


@given(st.sets(small, min_size=1, max_size=5), st.sets(small, max_size=3), cells)
def test_larger_cells_are_closed_after_one_that_did_not_fit(batches, inputs, full):
    grid = product(batches, inputs or {None}, [1, 2])
    left = open_cells(grid, [row(full, ran=False)])
    for cell in grid:
        same_input = cell.input_size == full.input_size
        if same_input and cell.procs >= full.procs and cell.batch >= full.batch:
            assert cell not in left
        if cell.batch < full.batch or cell.procs < full.procs:
            assert cell in left
    assert left == sorted(left, key=grid.index)


@given(st.lists(cells, max_size=6), st.data())
def test_measured_cells_are_not_open(grid, data):
    done = data.draw(st.sets(st.sampled_from(grid))) if grid else set()
    assert set(open_cells(grid, [row(cell) for cell in done])) == set(grid) - done

"""Which points are measured for a service with a latency limit: those at which it would run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict.cells import Cells
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.points import choose, next_point, next_within
from slurm_migbatch.predict.surface import TIME, Belief
from slurm_migbatch.profiling.measurement import Measurement
from tests.support.examples import examples

SLICES = ((1, 14 / 108), (2, 28 / 108), (3, 42 / 108), (7, 98 / 108))


def grid(slices=SLICES, batches=(1, 2, 4, 8, 16, 32)):
    """Cells of one process, by slice and batch."""
    pairs = [(compute, sm, batch) for compute, sm in slices for batch in batches]
    ones = np.ones(len(pairs))
    return Cells(
        np.array([float(batch) for *_, batch in pairs]),
        np.array([sm for _, sm, _ in pairs]),
        np.array([compute / 8 for compute, *_ in pairs]),
        ones,
        ones,
        ones,
    )


def test_best_batch_of_the_slice_with_most_throughput_per_sm_is_measured_first():
    cells = grid(slices=SLICES[:2], batches=(1, 2, 4))
    seconds = np.array([1.0, 1.5, 2.5, 0.9, 1.2, 1.7])
    assert next_within(cells, seconds, 0, 2.0) == 1  # 2 in 1.5 s on the small slice, 4 in 1.7 s on twice as much
    assert next_within(cells, seconds, 0, 3.0) == 2


def test_next_point_is_the_nearest_over_the_limit_that_may_raise_throughput():
    cells = grid(slices=SLICES[:1], batches=(4, 1, 2, 8, 16))
    assert next_within(cells, np.array([1.0, 0.9, 0.95, 1.8, 3.0]), 1, 1.5) == 3
    assert next_within(cells, np.array([1.0, 0.9, 0.95, 1.8, 4.1]), 4, 1.5) is None  # 16 in 4.1 s is less than 4 in 1 s


def test_fastest_point_is_measured_when_none_is_predicted_within_the_limit():
    cells = grid(slices=SLICES[:1], batches=(4, 1, 2))
    assert next_within(cells, np.array([5.0, 3.0, 4.0]), 0, 1.0) == 1


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.floats(-0.7, 0.7), min_size=24, max_size=24),
    st.lists(st.floats(-0.7, 0.7), min_size=24, max_size=24),
    st.floats(0.05, 2.0),
)
def test_best_point_of_every_slice_is_measured_despite_wrong_predictions(noise, error, limit_s):
    """Points left unmeasured at the end are predicted no better than the best measured point within the limit."""
    cells = grid()
    truth = 0.02 * cells.batch / cells.sm * 0.1 * np.exp(noise) + 0.03
    guess = truth * np.exp(error)
    order, left = [], list(range(len(cells)))
    while left:
        rows = [*order, *left]
        seconds = np.where(np.arange(len(rows)) < len(order), truth[rows], guess[rows])
        chosen = next_within(cells.take(rows), seconds, len(order), limit_s)
        if chosen is None:
            break
        assert chosen >= len(order)
        order.append(rows[chosen])
        left.remove(rows[chosen])
    for i in left:
        kept = [j for j in order if cells.sm[j] == cells.sm[i] and truth[j] <= limit_s]
        assert max(cells.batch[j] / truth[j] for j in kept) >= cells.batch[i] / guess[i]


@pytest.mark.parametrize(
    ("batches", "chosen"),
    [
        ((1, 2, 4, 8, 16, 32), [(7, 4), (2, 32), (1, 8)]),
        ((64, 128, 256, 512), [(7, 64), (2, 512), (1, 128)]),
        ((4, 8), [(7, 4), (2, 8), (1, 8)]),
    ],
)
def test_first_points_differ_in_slice_and_batch_whatever_the_smallest_batch(batches, chosen):
    cells = grid(batches=batches)
    belief = Belief(np.zeros(9), np.eye(9))
    done, left = [], list(range(len(cells)))
    for _ in chosen:
        done.append(next_point(TIME, belief, cells, done, left))
        left.remove(done[-1])
    assert [(cells.memory[i] * 8, cells.batch[i]) for i in done] == chosen


def test_first_points_are_of_the_usual_input_size():
    cells = replace(grid(slices=SLICES[:1] * 3, batches=(4,)), work=np.array([0.25, 1.0, 16.0]))
    assert next_point(TIME, Belief(np.zeros(9), np.eye(9)), cells, [], [0, 1, 2]) == 1


def row(compute, batch, seconds):
    """A row of resnet50 on a slice of an A100; None where it was not measured."""
    return Measurement(
        gpu="a100-80gb", model="resnet50", family="cnn", kind="infer", profile=f"{compute}g.{10 * compute}gb",
        compute_slices=compute, memory_slices=compute, sm_count=14 * compute, batch=batch, procs=1,
        throughput_per_s=None if seconds is None else batch / seconds, latency_s=seconds,
    )  # fmt: skip


def test_chosen_points_are_near_the_latency_limit():
    open_ = [row(compute, 2**k, None) for compute in (1, 2) for k in range(8)]
    knowledge = ModelKnowledge()
    first = choose([], open_, knowledge, 0.05)
    tight = choose([], open_, knowledge, 0.01)
    assert open_[tight].batch < open_[first].batch
    done = [row(open_[first].compute_slices, open_[first].batch, 0.2)]  # four times over the limit
    left = [point for i, point in enumerate(open_) if i != first]
    assert left[choose(done, left, knowledge, 0.05)].batch < open_[first].batch
    assert choose(done, [], knowledge, 0.05) is None

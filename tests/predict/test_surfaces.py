"""The form of the curves: derivatives are right, more hardware is faster, points improve predictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.sim.relative import relative_speed
from slurm_migbatch.predict.cells import Cells
from slurm_migbatch.predict.fewshot import adapt
from slurm_migbatch.predict.known import Doubts
from slurm_migbatch.predict.population import pool
from slurm_migbatch.predict.recommend import advise
from slurm_migbatch.predict.surface import MEMORY, TIME, Surface
from tests.support.laboratory import A100, MODELS, known, measure, truth


def grid(batches: list[int], shares: list[tuple[float, float]], procs: int = 1, work: float = 1.0) -> Cells:
    points = [(b, sm, memory) for sm, memory in shares for b in batches]
    column = [np.array(values, dtype=float) for values in zip(*points, strict=True)]
    ones = np.ones(len(points))
    return Cells(column[0], column[1], column[2], procs * ones, work * ones, work * ones)


SHARES = [(14 / 108, 1 / 8), (42 / 108, 4 / 8), (1.0, 1.0)]


@pytest.mark.parametrize("surface", [TIME, MEMORY], ids=["time", "memory"])
@given(seed=st.integers(0, 10_000), procs=st.integers(1, 4), work=st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_derivatives_are_those_of_the_values(surface: Surface, seed: int, procs: int, work: float) -> None:
    cells = grid([1, 7, 64], SHARES, procs, work)
    size = len(surface.names)
    theta = surface.expected(known("resnet50"), A100.facts, "infer")
    theta = theta + surface.spread(Doubts(1, 1, 1)) * np.random.default_rng(seed).standard_normal(size)
    _, slopes = surface.value(theta, cells)
    for i in range(size):
        step = np.zeros(size)
        step[i] = 1e-6
        difference = (surface.value(theta + step, cells)[0] - surface.value(theta - step, cells)[0]) / 2e-6
        np.testing.assert_allclose(slopes[:, i], difference, rtol=1e-4, atol=1e-6)


@given(name=st.sampled_from(MODELS), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_larger_batches_take_longer_and_need_more(name: str, seed: int) -> None:
    cells = grid(list(range(1, 200)), [SHARES[0]])
    for surface, theta in ((TIME, truth(name, seed)), (MEMORY, MEMORY.expected(known(name), A100.facts, "infer"))):
        assert (np.diff(surface.value(theta, cells)[0]) > 0).all()


def test_batch_that_fills_the_device_is_larger_for_smaller_items() -> None:
    """Images of a seventh of the side take as long as if the device worked on a batch of a 49th of the size."""
    theta = TIME.expected(known("resnet50"), A100.facts, "infer")
    theta[[0, 6]] = -30.0  # neither the host nor the copy limits the speed
    whole, small = (TIME.curve(theta, grid([1, 49], SHARES[2:], work=work)) for work in (1.0, 1 / 49))
    assert small[1] == pytest.approx(whole[0])
    assert small[1] - small[0] < 0.5 < whole[1] - whole[0]


@given(name=st.sampled_from(MODELS), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_more_points_reduce_error_and_uncertainty(name: str, seed: int) -> None:
    rows = measure(name, truth(name, seed), noise=0.0)
    model = known(name)
    cells = Cells.of_rows(rows, A100, model)
    logs = np.log([row.seconds or 0.0 for row in rows])
    prior = pool(TIME, "infer", ()).prior(name, model, A100)
    error, width = [], []
    for points in ([], list(range(0, len(rows), 13)), list(range(len(rows)))):
        belief = adapt(TIME, prior, cells.take(points), logs[points], 0.05)
        value, deviation = belief.predict(TIME, cells)
        error.append(float(np.abs(value - logs).mean()))
        width.append(float(deviation.mean()))
    assert width[0] > width[1] > width[2]
    assert error[2] < 0.02 and error[2] < error[0]


def test_adapting_to_no_points_returns_the_prior() -> None:
    prior = pool(TIME, "infer", ()).prior("x", known("vgg16"), A100)
    nothing = Cells(*(np.zeros(0) for _ in range(6)))
    assert adapt(TIME, prior, nothing, np.zeros(0), 0.1) is prior


def test_relative_speed_of_an_unmeasured_model_is_an_expectation() -> None:
    """For a model without measurements, the relative speed on a small slice is neither that of a host-bound model nor
    that of a saturated one."""
    model = known("resnet50")
    sure = pool(TIME, "train", ()).prior("x", model, A100)
    small, whole = grid([256], [SHARES[0]]), grid([256], [SHARES[2]])
    saturated = relative_speed(adapt(TIME, sure, whole, np.log([0.5]), 0.01), small, whole)[0]
    assert 0.08 < saturated < 0.25
    assert 0.08 < relative_speed(sure, small, whole)[0] < 0.9
    assert relative_speed(sure, whole, whole)[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="counterpart"):
        relative_speed(sure, small, grid([1, 2], [SHARES[2]]))


def test_the_batch_of_best_efficacy_is_the_knee() -> None:
    batches = [1, 2, 4, 8, 16, 32]
    seconds = np.array([[0.010, 0.010, 0.010, 0.010, 0.020, 0.040], [0.010, 0.010, 0.010, 0.020, 0.040, 0.080]])
    memory = np.array([[100.0 * b for b in batches], [200.0 * b for b in batches]])
    alone = advise(batches, seconds, memory, 10_000)
    assert alone is not None and (alone.batch, alone.copies) == (8, 1)
    cut = advise(batches, seconds, memory, 450)
    assert cut is not None and (cut.batch, cut.copies) == (4, 1), "two processes would double the rate, but need 800"
    both = advise(batches, seconds, memory, 850)
    assert both is not None and (both.batch, both.copies) == (8, 1)
    assert advise(batches[:3], seconds[:, :3], memory[:, :3], 10_000) is not None
    small = advise(batches[:3], seconds[:, :3], memory[:, :3], 10_000)
    assert small is not None and small.copies == 2, "the host sets the pace, so a second process doubles the rate"
    assert advise(batches, seconds, memory, 50) is None

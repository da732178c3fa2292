"""The goodput model against figures worked out by hand, and its fit against models that generated the data."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.goodput import Goodput, GoodputError, Observed, Steps, fit
from tests.support.examples import examples

PLAIN = Steps(alpha_c=0.1, beta_c=0.01, alpha_n=0.2, beta_n=0.02, alpha_r=0.05, beta_r=0.005, gamma=1.0)


def job(steps=PLAIN, **changes):
    given = {"noise": 1000.0, "first_batch": 32, "largest_batch": 1024, "least_local": 8, "most_local": 64}
    return Goodput(steps, **{**given, **changes})


def test_step_times_match_figures_worked_out_by_hand():
    assert PLAIN.gradient_s(10) == pytest.approx(0.2)
    assert PLAIN.exchange_s(1, 1) == 0.0
    assert PLAIN.exchange_s(4, 1) == pytest.approx(0.06)
    assert PLAIN.exchange_s(4, 2) == pytest.approx(0.24)
    assert PLAIN.iteration_s(4, 2, 10) == pytest.approx(0.44)
    assert PLAIN.iteration_s(4, 2, 10, accumulated=2) == pytest.approx(0.84)
    assert PLAIN.throughput(4, 2, 10, accumulated=1) == pytest.approx(80 / 0.64)


def test_fully_overlapped_phases_cost_the_longer_one():
    hidden = Steps(0.1, 0.01, 0.2, 0.02, 0.05, 0.005, 10.0)
    assert hidden.iteration_s(2, 1, 40) == pytest.approx(0.5, rel=1e-3)


def test_larger_batch_has_lower_statistical_efficiency():
    model = job()
    assert model.efficiency(32) == 1.0
    assert model.efficiency(1024) == pytest.approx(1032 / 2024)


def test_single_replica_above_the_first_batch_size_accumulates_gradients():
    best = job(noise=1e9).best(1)
    assert best.batch > 32
    assert best.accumulated >= 1
    assert best.batch == best.local * (best.accumulated + 1)


def test_without_noise_the_first_batch_is_best():
    assert job(noise=0.0, most_local=32).best(1).batch == 32


def test_more_replicas_than_the_largest_batch_supports_are_impossible():
    assert job().best(128) is not None
    assert job().best(129) is None
    assert job().speedup(129) == 0.0
    assert job().best(1, nodes=2) is None


def test_inconsistent_batch_limits_are_refused():
    with pytest.raises(GoodputError, match="first batch"):
        job(first_batch=2048)
    with pytest.raises(GoodputError, match="replica's batch"):
        job(least_local=100)


@settings(max_examples=examples(60), deadline=None)
@given(
    replicas=st.integers(1, 64),
    nodes=st.integers(1, 16),
    noise=st.floats(0, 1e5),
)
def test_best_batch_respects_all_limits(replicas, nodes, noise):
    model = job(noise=noise)
    best = model.best(replicas, nodes)
    if best is None:
        assert nodes > replicas or replicas * model.least_local > model.largest_batch
        return
    assert best.batch == replicas * best.local * (best.accumulated + 1)
    assert best.local <= model.most_local
    assert best.batch >= model.first_batch
    assert best.goodput <= model.steps.throughput(replicas, nodes, best.local, best.accumulated) * (1 + 1e-9)


def rows_of(steps, layouts, locals_=(8, 16, 32, 64, 128)):
    return [Observed(n, k, m, steps.gradient_s(m), steps.iteration_s(k, n, m)) for n, k in layouts for m in locals_]


def test_fit_recovers_the_model_that_generated_the_steps():
    true = Steps(0.05, 0.002, 0.12, 0.004, 0.03, 0.001, 1.6)
    rows = rows_of(true, [(1, 1), (1, 2), (1, 3), (1, 4), (2, 8), (3, 12), (4, 16)])
    found = fit(rows)
    errors = [math.log(found.iteration_s(r.replicas, r.nodes, r.local) / r.step_s) for r in rows]
    assert np.sqrt(np.mean(np.square(errors))) < 0.02


def test_unmeasured_exchange_times_take_optimistic_values():
    alone = fit(rows_of(PLAIN, [(1, 1)]))
    assert alone.exchange_s(8, 1) < 1e-5
    node = fit(rows_of(PLAIN, [(1, 1), (1, 2), (1, 4)]))
    assert node.exchange_s(8, 2) >= 1.1 * node.exchange_s(8, 1) * (1 - 1e-9)


@pytest.mark.parametrize("rows", [[], [Observed(1, 1, 8, 0.0, 0.1)], [Observed(1, 1, 8, 0.1, math.nan)]])
def test_fit_refuses_empty_or_invalid_data(rows):
    with pytest.raises(GoodputError):
        fit(rows)

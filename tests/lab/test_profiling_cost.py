"""Slices used and limits broken, by the share of the grid that was measured."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.evaluate import placing, profiling
from slurm_migbatch.lab.evaluate.heldout import folds
from slurm_migbatch.lab.evaluate.scenarios import GUARD, services
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.state import Learned
from tests.support.small_laboratory import laboratory, samples


def least(rates: list[float], slices: list[int], wanted: float) -> int:
    """The fewest slices, by exhaustive search over up to three instances of each kind."""
    found = [
        sum(n * size for n, size in zip(counts, slices, strict=True))
        for counts in product(range(4), repeat=len(rates))
        if sum(n * rate for n, rate in zip(counts, rates, strict=True)) >= wanted
    ]
    return min(found)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 7]), st.integers(1, 50)), min_size=1, max_size=4), st.data())
def test_plan_uses_the_fewest_slices(cells: list[tuple[int, int]], data: st.DataObject) -> None:
    slices, rates = [size for size, _ in cells], [float(rate) for _, rate in cells]
    wanted = float(data.draw(st.integers(1, max(int(rate) for rate in rates) * 2)))
    made = placing.plan(np.array(rates), np.array(slices, dtype=float), np.ones(len(cells), dtype=bool), wanted)
    assert made is not None
    assert sum(count * rates[i] for i, count in made.instances.items()) >= wanted
    assert made.slices == sum(count * slices[i] for i, count in made.instances.items())
    assert made.slices <= least(rates, slices, min(wanted, 3 * sum(rates)))


def test_only_allowed_cells_are_used() -> None:
    allowed = np.array([False, True])
    made = placing.plan(np.array([100.0, 1.0]), np.array([1.0, 1.0]), allowed, 3.0)
    assert made is not None and made.instances == {1: 3}
    assert placing.plan(np.array([100.0]), np.array([1.0]), np.array([False]), 3.0) is None


def test_plan_for_a_very_high_rate_is_found() -> None:
    made = placing.plan(np.array([1.0, 1.9]), np.array([1.0, 2.0]), np.array([True, True]), 1e7)
    assert made is not None and made.slices == pytest.approx(1e7, rel=1e-2)


def test_plan_below_the_wanted_rate_is_extended() -> None:
    made = placing.InstancePlan({0: 2}, 2.0)
    slices = np.array([1.0])
    assert placing.topped_up(made, np.array([5.0]), slices, 10.0) == 2.0
    assert placing.topped_up(made, np.array([4.0]), slices, 10.0) == 3.0


def scenarios(folder: Path, latency: str, rate: str) -> Path:
    (folder / "raw").mkdir(exist_ok=True)
    (folder / "raw" / "SLO_latency.csv").write_text(latency)
    (folder / "raw" / "SLO_req_rate.csv").write_text(rate)
    return folder


def test_parvagpu_scenarios_have_one_column_per_model_in_order(tmp_path: Path) -> None:
    found = samples(laboratory(models=("vgg16", "resnet50"), source="ParvaGPU"))
    data = scenarios(tmp_path, "100,N/A\n200,50.5", "10,N/A\n20,30")
    served, why = services(data, found)
    assert [(s.scenario, s.sample.model, s.rate) for s in served] == [
        ("S1", "resnet50", 10.0), ("S2", "resnet50", 20.0), ("S2", "vgg16", 30.0),
    ]  # fmt: skip
    assert [s.limit_s for s in served] == pytest.approx([GUARD * 0.1, GUARD * 0.2, GUARD * 0.0505])
    assert "2 scenarios" in why


@pytest.mark.parametrize("latency", ["100\n200", "100,100,100\n200,50,50", "100,100"])
def test_synthetic_services_replace_scenarios_that_do_not_fit_the_table(tmp_path: Path, latency: str) -> None:
    found = samples(laboratory(models=("vgg16", "resnet50"), source="ParvaGPU"))
    served, why = services(scenarios(tmp_path, latency, "10,1\n20,30"), found)
    assert "synthetic" in why and {s.sample.model for s in served} == {"vgg16", "resnet50"}


def test_each_stage_adds_points_and_no_point_is_measured_twice() -> None:
    fold = next(iter(folds(laboratory(procs=(1, 2)), ModelKnowledge(), learn=lambda rows, knowledge: Learned())))
    found = list(profiling.stages(fold.samples[0], fold, 0.8))
    assert {f"{k} points" for k in range(4)} | {"5%", "10%", "20%", "50%", "100%"} == {s.label for s in found}
    assert len(found) == 9
    for stage, following in pairwise(found):
        assert following.done[: len(stage.done)] == stage.done
    for stage in found:
        assert len(set(stage.done)) == len(stage.done)
        np.testing.assert_array_equal(stage.value[list(stage.done)], fold.samples[0].logs[list(stage.done)])
    assert len(found[-1].done) == len(fold.samples[0].logs)


def test_fully_measured_grid_has_no_extra_slices_and_no_broken_limits(tmp_path: Path) -> None:
    rows = laboratory(noise=0.05, procs=(1, 2), models=("vgg16", "resnet50"), batches=(1, 8, 32))
    result = profiling.evaluate(tmp_path, rows)
    assert result["services"] == 12
    last = [total for total in result["totals"] if total["measured"] == "100%"]
    assert {total["way"] for total in last} == {profiling.PREDICTED, profiling.MARGIN, profiling.MEASURED}
    for total in last:
        assert (total["extra"], total["broken"], total["short"], total["slices"]) == (0.0, 0, 0, total["best"])
    assert {bar["target"] for bar in result["bars"]} == {profiling.EXTRA_TARGET, profiling.BROKEN_TARGET}
    assert result == profiling.evaluate(tmp_path, rows)

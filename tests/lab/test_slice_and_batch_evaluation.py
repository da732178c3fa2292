"""Slice and batch under a limit: the variants are compared on the same cases, by the measured table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate.batches import EFFICACY, OURS, POINTS, USUAL, WAYS, evaluate
from slurm_migbatch.lab.evaluate.choice import FACTORS
from tests.support.small_laboratory import added, laboratory

#: few of the laboratory's models, where it is not their figures that matter
FEW = ("resnet50", "vgg16", "bert-base")


def test_every_variant_has_every_case_and_ours_uses_no_larger_slices() -> None:
    result = evaluate(laboratory())
    rows = {(row["points"], row["way"]): row for row in result["rows"]}
    assert set(rows) == {(points, way) for points in POINTS for way in WAYS}
    assert len({row["cases"] for row in rows.values()}) == 1
    for points in POINTS:
        assert rows[points, OURS]["share"] <= rows[points, EFFICACY]["share"] <= rows[points, USUAL]["share"]
        assert all(0 <= rows[points, way]["kept"] <= 1 for way in WAYS)
        assert all(0 <= rows[points, way]["items_per_share"] <= 1 + 1e-6 for way in WAYS)
    assert result["decides"] == "slurm_migbatch.predict.selection.Chooser.choose"


@pytest.mark.parametrize(
    ("gpu", "profiles"),
    [
        ("NVIDIA H200", {"7g.80gb": "7g.141gb", "3g.40gb": "3g.71gb", "2g.20gb": "2g.35gb", "1g.10gb": "1g.18gb"}),
        ("h200-141gb", {"7g.80gb": "7g.141gb", "3g.40gb": "3g.71gb", "2g.20gb": "2g.35gb", "1g.10gb": "1g.18gb"}),
        ("NVIDIA A100-SXM4-80GB", {}),
    ],
)
def test_gpus_are_recognised_by_their_names_in_measurements(gpu: str, profiles: dict[str, str]) -> None:
    rows = [replace(row, gpu=gpu, profile=profiles.get(row.profile, row.profile)) for row in laboratory(models=FEW)]
    assert all(row["cases"] for row in evaluate(rows)["rows"])


def test_after_three_exact_points_every_rule_keeps_the_limits() -> None:
    """Slices have the shares of the GPU's SMs that they had when they were measured, not of the largest slice's."""
    rows = evaluate(laboratory(added, models=FEW))["rows"]
    assert [row["kept"] for row in rows if row["points"] == 3] == [1.0] * len(WAYS)


def test_unknown_model_has_no_cases_before_its_first_measurement() -> None:
    renamed = [replace(row, model=f"our-{row.model}", family="", params=None) for row in laboratory(models=FEW)]
    assert {row["points"] for row in evaluate(renamed)["rows"]} == set(POINTS) - {0}


def test_model_that_would_be_refused_has_no_choice_before_its_first_measurement() -> None:
    """The name resembles a public language model's, so that the request of a user is refused until it is measured."""
    near, (first, *_) = "vit-large-patch14-336", sorted(FEW)
    rows = [replace(row, model=near if row.model == first else row.model) for row in laboratory(models=FEW)]
    result = evaluate(rows)
    assert {row["points"] for row in result["rows"]} == set(POINTS)
    (without,) = result["no_choice"]
    assert (without["points"], without["models"]) == (0, [near])
    assert without["cases"] % len(FACTORS) == 0


def test_empty_table_is_refused() -> None:
    with pytest.raises(NotMeasurable, match="no model"):
        evaluate([])

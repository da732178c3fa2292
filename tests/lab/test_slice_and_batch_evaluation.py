"""Slice and batch under a limit: the ways are compared on the same cases, by the measured table."""

from __future__ import annotations

import pytest

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate.batches import EFFICACY, OURS, POINTS, USUAL, WAYS, evaluate
from tests.support.small_laboratory import laboratory


def test_every_way_has_every_case_and_ours_no_larger_slices() -> None:
    result = evaluate(laboratory())
    rows = {(row["points"], row["way"]): row for row in result["rows"]}
    assert set(rows) == {(points, way) for points in POINTS for way in WAYS}
    assert len({row["cases"] for row in rows.values()}) == 1
    for points in POINTS:
        assert rows[points, OURS]["share"] <= rows[points, EFFICACY]["share"] <= rows[points, USUAL]["share"]
        assert all(0 <= rows[points, way]["kept"] <= 1 for way in WAYS)
        assert all(0 <= rows[points, way]["items_per_share"] <= 1 + 1e-6 for way in WAYS)
    assert result["decides"] == "slurm_migbatch.predict.selection.Chooser.choose"


def test_without_a_table_nothing_is_measured() -> None:
    with pytest.raises(NotMeasurable, match="no model"):
        evaluate([])

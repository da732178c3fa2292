"""Measured points in the store: each is kept once, the last import counts, and they are read as written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.measurements import digest
from slurm_migbatch.store.models import MeasuredPoint

FAST = Measurement("a100", "net", profile="7g.80gb", batch=8, throughput_per_s=400.1, latency_s=0.02, source="here")
SLOW = replace(FAST, profile="1g.10gb", throughput_per_s=100.3, latency_s=0.08, memory_mib=3000.5, input_size=224)
OOM = replace(SLOW, batch=512, throughput_per_s=None, latency_s=None, memory_mib=None)
TRAIN = replace(FAST, kind="train", model="other")


def test_points_are_read_as_they_were_written(store: Store) -> None:
    assert store.add_measurements([FAST, SLOW, OOM, TRAIN]) == (4, 0, 0)
    assert store.measurements() == [FAST, SLOW, OOM, TRAIN]
    assert store.measurements(model="net") == [FAST, SLOW, OOM]
    assert store.measurements(kind="train") == [TRAIN]
    assert store.measurements("net", "train") == []


def test_serving_points_are_distinct_by_engine_precision_and_length(store: Store) -> None:
    served = replace(FAST, kind="serve", engine="vllm", precision="awq", output=128, ttft_s=0.2, tpot_s=0.01)
    others = [replace(served, engine="sglang"), replace(served, precision=""), replace(served, output=256)]
    assert store.add_measurements([FAST, served, *others]) == (5, 0, 0)
    assert store.measurements(kind="serve") == [served, *others]
    assert store.add_measurements([replace(served, tpot_s=0.02)]) == (0, 1, 0)


def test_training_points_are_distinct_by_tuning(store: Store) -> None:
    adapters = replace(TRAIN, tuning="lora/adamw")
    assert store.add_measurements([TRAIN, adapters]) == (2, 0, 0)
    assert store.measurements(kind="train") == [TRAIN, adapters]
    assert store.add_measurements([replace(adapters, latency_s=0.01)]) == (0, 1, 0)


def test_repeated_import_changes_nothing(store: Store) -> None:
    store.add_measurements([FAST, SLOW])
    with store.reading() as connection:
        before = connection.execute(select(MeasuredPoint.batch_id, MeasuredPoint.imported)).all()
    assert store.add_measurements([SLOW, FAST]) == (0, 0, 2)
    with store.reading() as connection:
        assert connection.execute(select(MeasuredPoint.batch_id, MeasuredPoint.imported)).all() == before


def test_later_import_replaces_a_point_and_marks_it(store: Store) -> None:
    """Two points without an input size are the same point too, although NULL equals nothing in SQL."""
    store.add_measurements([FAST, SLOW])
    better = replace(FAST, throughput_per_s=410.0, params=1e6)
    assert store.add_measurements([better, SLOW, OOM]) == (1, 1, 1)
    assert store.measurements() == [better, SLOW, OOM]
    with store.reading() as connection:
        marks = connection.execute(select(func.count(MeasuredPoint.batch_id.distinct()))).scalar()
    assert marks == 2
    nothing = replace(FAST, throughput_per_s=None, latency_s=None)
    assert store.add_measurements([nothing]) == (0, 1, 0)
    assert store.measurements()[0] == nothing


def test_last_of_duplicate_points_in_one_import_counts(store: Store) -> None:
    assert store.add_measurements([FAST, replace(FAST, latency_s=0.03)]) == (1, 0, 0)
    assert store.measurements() == [replace(FAST, latency_s=0.03)]


def test_more_points_than_one_statement_holds_are_imported(store: Store) -> None:
    rows = [replace(FAST, batch=batch) for batch in range(1, 1502)]
    assert store.add_measurements(rows) == (1501, 0, 0)
    assert store.add_measurements(rows) == (0, 0, 1501)
    assert store.add_measurements([]) == (0, 0, 0)


def test_model_names_are_compared_exactly(store: Store) -> None:
    """On no database may names that differ only in case or in an accent be one point."""
    rows = [replace(FAST, model=name) for name in ("net", "Net", "nét")]
    assert store.add_measurements(rows) == (3, 0, 0)
    assert store.measurements(model="net") == [rows[0]]


def test_digest_of_a_point_does_not_change() -> None:
    """Existing databases contain it."""
    assert digest(FAST) == "877f7df5b720387f722a4d94a3afa918fad5bd0b8267e75ad8acf79e09539395"


def test_read_only_store_reads_and_refuses_to_write(store: Store, url: str) -> None:
    store.add_measurements([FAST])
    with open_store(url, readonly=True) as reader:
        assert reader.measurements() == [FAST]
        with pytest.raises(StoreError, match="reading only"):
            reader.add_measurements([SLOW])


points = st.builds(
    Measurement,
    gpu=st.sampled_from(("a", "b")),
    model=st.sampled_from(("m", "n")),
    batch=st.integers(1, 2),
    input_size=st.none() | st.integers(1, 2),
    latency_s=st.none() | st.floats(1e-300, 1e300),
    memory_mib=st.none() | st.floats(1e-6, 1e6),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(points, max_size=5), max_size=4))
def test_store_keeps_the_last_values_of_every_point(tmp_path: Path, imports: list[list[Measurement]]) -> None:
    path = tmp_path / "map.db"
    path.unlink(missing_ok=True)
    expected: dict[tuple[object, ...], Measurement] = {}
    with open_store(f"sqlite:///{path}") as store:
        for rows in imports:
            new = {row.point: row for row in rows}
            fresh = sum(point not in expected for point in new)
            same = sum(expected.get(point) == row for point, row in new.items())
            assert store.add_measurements(rows) == (fresh, len(new) - fresh - same, same)
            expected |= new
        assert {row.point: row for row in store.measurements()} == expected

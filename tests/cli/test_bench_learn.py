"""`migbatch bench learn` learns from generated runs and measures what it reports. No time is compared with a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm_migbatch.lab.bench.learn import measure


@pytest.fixture
def own_priority() -> Iterator[None]:
    """The benchmark raises this process above the Slurm daemons of other tests; afterwards it is restored."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.mark.slow
@pytest.mark.usefixtures("own_priority")
def test_learning_benchmark_refits_and_reports_its_bars() -> None:
    found = measure(runs=400, models=300)
    assert [refit["outcome"] for refit in found["refit"].values()] == ["taken", "taken"]
    first = found["refit"]["first"]["check"]
    assert first["candidate"]["time"]["error"] < first["current"]["time"]["error"]
    assert found["prediction"]["known"] == 300
    assert [bar["name"] for bar in found["bars"]] == [
        "refit on 400 runs (s)",
        "prediction p99 with 300 models (ms)",
    ]

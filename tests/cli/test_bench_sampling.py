"""`migbatch bench sampling` reads every slice and reports the cost. No test compares a time with a limit."""

from __future__ import annotations

from slurm_migbatch.lab.bench.sampling import measure


def test_sampling_benchmark_reads_every_slice_and_reports_its_bar() -> None:
    found = measure(rounds=3)
    assert found["slices"] == 7
    assert found["memory"]["n"] == found["activity"]["n"] == 21
    assert found["core_share"] > 0 and found["most_core_share"] == 0.05
    assert [bar["name"] for bar in found["bars"]] == ["share of a core, 8 full GPUs"]

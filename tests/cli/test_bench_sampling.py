"""`migbatch bench sampling` looks at every slice and says what it costs. Nothing is held against the clock."""

from __future__ import annotations

from slurm_migbatch.lab.bench.sampling import measure


def test_a_short_one() -> None:
    found = measure(rounds=3)
    assert found["slices"] == 7
    assert found["memory"]["n"] == found["activity"]["n"] == 21
    assert found["core_share"] > 0 and found["most_core_share"] == 0.05
    assert [bar["name"] for bar in found["bars"]] == ["share of a core, 8 full GPUs"]

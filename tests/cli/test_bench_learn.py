"""`migbatch bench learn` learns from what it makes up, and measures what it says. Nothing is held against the clock."""

from slurm_migbatch.lab.bench.learn import measure


def test_a_small_one() -> None:
    found = measure(runs=150, models=40)
    assert [refit["outcome"] for refit in found["refit"].values()] == ["taken", "taken"]
    first = found["refit"]["first"]["check"]
    assert first["candidate"]["time"]["error"] < first["current"]["time"]["error"]
    assert found["prediction"]["known"] == 40
    assert [bar["name"] for bar in found["bars"]] == [
        "refit on 150 runs (s)",
        "prediction p99 with 40 models (ms)",
    ]

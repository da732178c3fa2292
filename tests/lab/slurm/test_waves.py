"""The wave of `bench live`: its prediction by the simulated Slurm, its settings, and its training job."""

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_migbatch.config import Config, loads, render
from slurm_migbatch.config.schema import LendingConfig
from slurm_migbatch.lab.bench.wavebed import install
from slurm_migbatch.lab.experiments.wave import Wave, WaveRequest, WaveTraining, draw
from slurm_migbatch.lab.slurm.waves import TrainingCosts, config, predict, settings


def test_prediction_of_a_small_wave_matches_figures_worked_out_by_hand() -> None:
    wave = Wave(
        (WaveRequest(50.0, "7g.80gb", 20.0),), (WaveTraining(0.0, 100, 1.0, "7g.80gb", "7g.80gb"),) * 2, 300.0, 2, 1
    )
    costs = TrainingCosts(start_s=5.0, restart_s=5.0, checkpoint_s=3.0, every_s=1000.0)
    alone = predict(wave, False, costs)
    # One after the other on the one GPU: 5 + 100, twice, and the time that Slurm and the hooks take.
    assert alone["jct_s"] == pytest.approx((106 + 214) / 2, abs=6)
    assert alone["p95_s"] < 2 and alone["restarts"] == 0
    lent = predict(wave, True, costs)
    # The second does about 45 s of work on inference's GPU, is reclaimed, and does the rest when a GPU is free again.
    assert lent["restarts"] == 0.5
    assert lent["jct_s"] < 0.9 * alone["jct_s"]
    assert lent["p95_s"] < 3 + 5
    assert alone["unfinished"] == lent["unfinished"] == 0


def test_lending_shortens_the_mean_jct_of_a_wave_deterministically() -> None:
    wave = draw(1, requests=45, trainings=24, day_s=180.0)
    half, lent = predict(wave, False), predict(wave, True)
    assert lent == predict(wave, True)
    assert lent["jct_s"] < 0.8 * half["jct_s"]
    assert lent["p95_s"] <= half["p95_s"] + 8.0
    assert lent["restarts"] <= 3.0
    assert half["restarts"] == half["unfinished"] == lent["unfinished"] == 0


def test_settings_are_the_shipped_ones_scaled_by_the_day_length() -> None:
    wave = draw(1)
    shipped = loads(render())
    assert shipped.lending == Config().lending
    changed = settings(wave)
    assert set(changed) == {"lending", "cluster"} and set(changed["cluster"]) == {"poll_s"}
    found = config(wave)
    scale = wave.day_s / shipped.lending.day_s
    for name in LendingConfig.__dataclass_fields__:
        before, after = getattr(shipped.lending, name), getattr(found.lending, name)
        if name in ("enabled", "partitions"):
            continue
        if name in ("day_s", "min_idle_s", "rest_s", "horizon_s", "payback_s"):
            assert after == max(before * scale, 1.0 if before else 0.0), name
        else:
            assert after == before, name


def test_training_job_runs_from_its_installed_library_and_resumes(tmp_path: Path) -> None:
    library = install(tmp_path / "library")
    command = [sys.executable, "-I", library / "wave_training.py", library, tmp_path / "steps", "5", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("begin 0") and lines[-1] == "end 5"
    again = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    assert again[0].startswith("begin 5"), again

"""The day of `bench live --moves`: how it is drawn, its prediction by the simulated Slurm, and its evaluation."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.config import Config
from slurm_migbatch.config.schema import MovesConfig
from slurm_migbatch.lab.bench import livemoves, wavebed
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import movewave
from slurm_migbatch.lab.experiments.fragmentation import RESTARTABLE, Draw, Outcome, ServedJob
from slurm_migbatch.lab.experiments.movewave import MoveWave
from slurm_migbatch.lab.studies.placement import PodKind
from slurm_migbatch.mig.profile import Profile
from tests.support.experiments import measured_once

THREE, FOUR, ALL = (Profile.parse(name) for name in ("3g.40gb", "4g.40gb", "7g.80gb"))
KINDS = [
    PodKind(ALL, 600.0, False),
    PodKind(ALL, 30.0, True),
    PodKind(FOUR, 3000.0, True),
    PodKind(THREE, 1200.0, False),
    PodKind(THREE, 10 * movewave.LONGEST_S, False),
]
#: A training job beside a job that ends soon, a job that stays on the other GPU, and one that needs a whole GPU.
IN_THE_WAY = MoveWave(
    Draw(
        (0.0, 3.0, 6.0, 15.0),
        (PodKind(FOUR, 10.0, True), PodKind(THREE, 100.0, False), PodKind(FOUR, 110.0, True), PodKind(ALL, 5.0, True)),
    ),
    scale=0.01,
    nodes=1,
    gpus=2,
)


def busy(wave: MoveWave) -> float:
    """The work of the jobs as a share of the capacity of all GPUs until the last arrival."""
    work = sum(kind.profile.compute * kind.seconds for kind in wave.drawn.kinds)
    return work / (wave.drawn.times[-1] * wave.nodes * wave.gpus * 7)


@pytest.mark.parametrize("seed", range(1, 6))
def test_every_drawn_day_has_the_configured_load(seed: int) -> None:
    wave = movewave.draw(KINDS, seed)
    assert busy(wave) == pytest.approx(movewave.LOAD, rel=1e-3)
    assert len(wave.drawn.times) == len(wave.drawn.kinds) == movewave.JOBS
    assert list(wave.drawn.times) == sorted(wave.drawn.times)
    assert wave == movewave.draw(KINDS, seed) != movewave.draw(KINDS, seed + 1)
    assert wave.trainings == sum(not kind.served for kind in wave.drawn.kinds)


def test_times_are_compressed_and_limits_are_whole_minutes() -> None:
    short, scale = movewave.compressed(KINDS)
    assert [kind.profile for kind in short] == [kind.profile for kind in KINDS]
    assert short[0].seconds == pytest.approx(600 * scale, abs=0.05)
    assert short[1].seconds == movewave.SHORTEST_S > 30 * scale
    assert short[4].seconds == pytest.approx(movewave.LONGEST_S * scale, abs=0.05)
    for kind, limit_s in zip(IN_THE_WAY.drawn.kinds, IN_THE_WAY.limits_s, strict=True):
        assert limit_s % 60 == 0 and 2 * kind.seconds <= limit_s < 2 * kind.seconds + 60


@pytest.mark.parametrize("moves", [False, True])
def test_settings_are_the_shipped_ones_scaled_like_the_jobs(moves: bool) -> None:
    changed, found, shipped = movewave.settings(IN_THE_WAY, moves), movewave.config(IN_THE_WAY, moves), Config()
    assert set(changed) == {"moves", "cluster"} and set(changed["cluster"]) == {"poll_s"}
    for name in MovesConfig.__dataclass_fields__:
        before, after = getattr(shipped.moves, name), getattr(found.moves, name)
        if name == "enabled":
            assert after is moves
        else:
            assert after == pytest.approx(before * (0.01 if name in ("after_s", "gain_s", "rest_s") else 1.0)), name
    assert replace(found, moves=shipped.moves, cluster=shipped.cluster) == shipped


def test_only_the_training_job_in_the_way_is_moved() -> None:
    still, moved = movewave.predict(IN_THE_WAY, False), movewave.predict(IN_THE_WAY, True)
    assert [job.restarts for job in still if job] == [0, 0, 0, 0]
    assert [job.restarts for job in moved if job] == [0, 1, 0, 0]
    waits = [(job.wait_s, other.wait_s) for job, other in zip(still, moved, strict=True) if job and other]
    assert waits[3][0] > 80, "until the training has ended"
    assert waits[3][1] < 30
    late = movewave.predict(IN_THE_WAY, True, release=(22, 5))
    training, early = late[1], moved[1]
    assert training is not None and early is not None
    assert training.jct_s > early.jct_s + 60, "older Slurm releases delay requeued jobs"


def test_figures_count_restarts_of_inference_separately() -> None:
    wave = movewave.draw(KINDS, 1, jobs=movewave.WARM + 20)
    outcome = [ServedJob(1.0, 11.0, restarts=1 if kind.served else 2) for kind in wave.drawn.kinds]
    found = movewave.figures(wave, outcome)
    assert (found["wait_s"], found["jct_s"]) == (1.0, 11.0)
    assert found["inference_restarts"] == len(wave.drawn.kinds) - wave.trainings
    assert found["restarts"] == found["inference_restarts"] + 2 * wave.trainings


def test_interval_of_the_wait_ratio_comes_from_blocks_of_consecutive_jobs() -> None:
    count = movewave.WARM + 10 * movewave.BLOCKS
    still = [ServedJob(10.0, 20.0)] * count
    assert movewave.wait_over(still, still) == (1.0, 1.0, 1.0)
    assert movewave.wait_over([ServedJob(5.0, 15.0)] * count, still) == pytest.approx((0.5, 0.5, 0.5))
    uneven = [ServedJob(0.0 if (number - movewave.WARM) % 20 < 10 else 16.0, 30.0) for number in range(count)]
    ratio, low, high = movewave.wait_over(uneven, still)
    assert low < ratio < high and low < 1.0 < high
    nothing = movewave.wait_over([ServedJob(0.0, 1.0)] * count, [ServedJob(0.0, 1.0)] * count)
    assert nothing == (1.0, -math.inf, math.inf)


def test_training_jobs_are_submitted_with_the_options_that_moves_need(tmp_path: Path) -> None:
    found = livemoves.plans(IN_THE_WAY, tmp_path)
    inference, training = found[wavebed.INFERENCE_USER], found[wavebed.TRAINING_USER]
    assert [job.at for job in inference] == [0.0, 6.0, 15.0] and [job.at for job in training] == [3.0]
    assert f"--comment={RESTARTABLE}" in training[0].options and "--requeue" in training[0].options
    assert not any("comment" in word for job in inference for word in job.options)
    assert {word for word in training[0].options if word.startswith(("--gres", "--time"))} == {
        "--gres=mig:3g.40gb:1",
        "--time=4",
    }
    steps, step_s = shlex.split(training[0].wrap)[-2:]
    # the job sleeps for step_s over the speed of its slice, the square root of 3/7
    assert int(steps) * float(step_s) / math.sqrt(3 / 7) == pytest.approx(100.0, rel=1e-3)


def test_bars_compare_moves_with_the_same_day_without_moves() -> None:
    fine = {"wait_s": 8.0, "jct_s": 30.0, "inference_moves": 0, "inference_restarts": 0, "failed": 0, "steps_lost": 0}
    ours = {**fine, "predicted": {"jct_s": 30.0}}
    still = {**ours, "wait_s": 10.0, "jct_s": 32.0}
    assert [bar.ok for bar in livemoves.bars(ours, still)] == [True] * 6 + [True] * (
        len(livemoves.bars(ours, still)) - 6
    )
    names = {bar.name for bar in livemoves.bars({**ours, "wait_s": 11.0, "inference_moves": 1}, still) if not bar.ok}
    assert names == {"mean wait with moves relative to no moves", "inference jobs that were moved or restarted"}


@pytest.mark.slow
def test_command_prints_one_json_object_or_a_table(openb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, but with the simulated Slurm instead of the real one, which takes minutes."""

    def run(wave: MoveWave, moves: bool, *_more: object) -> tuple[Outcome, dict[str, object]]:
        figures = {"moves": 3, "inference_moves": 0, "away_s": 4.0, "away_max_s": 6.0, "failed": 0, "steps_lost": 0}
        still = {**figures, "moves": 0, "away_s": None, "away_max_s": None}
        return movewave.predict(wave, moves), {**(figures if moves else still), "rpcs": 100, "makespan_s": 60.0}

    monkeypatch.setattr(livemoves, "run", run)
    monkeypatch.setattr(livemoves, "DRAWS", 2)
    monkeypatch.setattr(movewave, "JOBS", 24)
    measured_once(monkeypatch, livemoves)
    words = ["live", "--moves", "--data", str(openb)]
    done = CliRunner().invoke(bench, [*words, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    result = json.loads(done.stdout)
    assert set(result["ways"]) == {"moves", "nothing moved"}
    assert result["ways"]["moves"]["configuration"] != result["ways"]["nothing moved"]["configuration"]
    assert result["configuration"] == result["ways"]["moves"]["configuration"]
    table = CliRunner().invoke(bench, words, standalone_mode=False).stdout
    for text in ("first fit, computed", "nothing moved", result["configuration"], "predicted for 2 such days"):
        assert text in table
    assert "[moves] enabled=True" in table and "steps lost that a checkpoint had saved: 0" in table


def test_missing_or_unexpected_options_are_refused(openb: Path) -> None:
    for words, text in (
        (["--moves"], "--moves needs --data DIR"),
        (["--data", str(openb)], "--data is for --moves"),
    ):
        done = CliRunner().invoke(bench, ["live", *words])
        assert done.exit_code == 2 and text in done.output

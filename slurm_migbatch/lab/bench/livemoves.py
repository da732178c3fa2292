"""Measure moves on a real Slurm: the same day with and without, and the simulated Slurm's prediction of both.

Two nodes of four simulated H100s, and jobs on slices of any size (`experiments.movewave`). *moves*: migbatchd's
decision with the default configuration plus `movewave.settings`. *nothing moved*: the same with `[moves] enabled =
false`. First fit is computed for comparison: no Slurm, no delay, and a start takes no time, so it is stronger than
any real site.

Training jobs are those of `bench.live`. Waits are until the first start; waits of a training job between its runs are
part of its completion time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.decide.lending.values import usual_speed
from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.bench import wavebed
from slurm_migbatch.lab.experiments import fragmentation, movewave
from slurm_migbatch.lab.experiments.fragmentation import Outcome, ServedJob
from slurm_migbatch.lab.experiments.movewave import MoveWave
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.testbed.slurmroot import SlurmRoot

OURS: Final = "moves"
STILL: Final = fragmentation.STILL.rpartition(", ")[2]
FIRST: Final = f"{fragmentation.FIRST}, computed"
TARGET_PREDICTION: Final = 0.10
DRAWS: Final = 20
STEP_S: Final = 0.2


def measure(data: Path, seed: int = 1, progress: Progress = silent, slurm_root: str = "") -> dict[str, Any]:
    """Run the whole experiment: both ways, each on its own test bed, one after the other (root, about 20 minutes).

    Raises:
        NotMeasurable: the trace is missing, a job was refused, or did not end.
        TestbedError: the test bed failed.
        TraceError: the trace cannot be read.
    """
    kinds = movewave.kinds_of(data)
    wave = movewave.draw(kinds, seed)
    release = SlurmRoot(Path(slurm_root).absolute() if slurm_root else None).version()
    progress(f"the simulator, {DRAWS} days", 0)
    scatter = movewave.scatter(kinds, range(1, DRAWS + 1), release)
    ways: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, Outcome] = {}
    for name, moves in ((STILL, False), (OURS, True)):
        predicted = movewave.figures(wave, movewave.predict(wave, moves, release))
        progress(f"{name}: {len(wave.drawn.kinds)} jobs on a real Slurm", 0)
        outcomes[name], move_figures = run(wave, moves, progress, slurm_root)
        settled = provenance(DECIDES, movewave.config(wave, moves))
        ways[name] = {**movewave.figures(wave, outcomes[name]), **move_figures, **settled, "predicted": predicted}
    over = [round(value, 4) for value in movewave.wait_over(outcomes[OURS], outcomes[STILL])]
    return {
        "bench": "live --moves",
        "seed": seed,
        "slurm": list(release),
        "jobs": len(wave.drawn.kinds),
        "trainings": wave.trainings,
        "warm": movewave.WARM,
        "compression": round(1.0 / wave.scale, 1),
        "day_s": round(wave.drawn.times[-1], 1),
        "nodes": wave.nodes,
        "gpus": wave.gpus,
        "load": movewave.LOAD,
        **provenance(DECIDES, movewave.config(wave, True)),
        "changed": movewave.settings(wave, True),
        "ways": ways,
        "computed": {FIRST: movewave.figures(wave, movewave.first_fit(wave))},
        "wait_over_still": over,
        "scatter": scatter,
        "bars": [bar.to_dict() for bar in bars(ways[OURS], ways[STILL])],
    }


def bars(ours: Mapping[str, Any], still: Mapping[str, Any]) -> list[Bar]:
    """Return the figures with targets: the day with moves compared with the one without."""
    found = [
        Bar("mean wait with moves relative to no moves", fragmentation.ratio(ours["wait_s"], still["wait_s"]), 1.0),
        Bar("mean completion time with moves relative to no moves", ours["jct_s"] / still["jct_s"], 1.0),
    ]
    ways = (ours, still)
    zeros = {
        "inference jobs that were moved or restarted": ("inference_moves", "inference_restarts"),
        "jobs that did not complete": ("failed",),
        "steps lost that a checkpoint had saved": ("steps_lost",),
    }
    found += [Bar(name, float(sum(way[key] for way in ways for key in keys)), 0.0) for name, keys in zeros.items()]
    for name, way in ((OURS, ours), (STILL, still)):
        error = abs(way["jct_s"] / way["predicted"]["jct_s"] - 1.0)
        found.append(Bar(f"{name}: error of the predicted mean completion time", error, TARGET_PREDICTION))
    return found


def run(
    wave: MoveWave, moves: bool, progress: Progress = silent, slurm_root: str = ""
) -> tuple[Outcome, dict[str, Any]]:
    """Run one way on its own test bed (with the Slurm of `slurm_root`, if given); return jobs, and figures of moves."""
    with wavebed.bed_for(wave, movewave.settings(wave, moves), slurm_root, {}) as bed:
        library = wavebed.install(bed.directory / "elastic")
        played = wavebed.play(bed, plans(wave, library), progress)
    remaining = {user: iter(jobs) for user, jobs in played.jobs.items()}
    jobs = [next(remaining[_user(kind.served)]) for kind in wave.drawn.kinds]
    outcome: Outcome = [ServedJob(job.started - job.submitted, job.ended - job.submitted, job.runs - 1) for job in jobs]
    inference = {job.job for job in played.jobs[wavebed.INFERENCE_USER]}
    pauses_s = [pause for job in jobs for pause in job.pauses_s]
    return outcome, {
        "moves": len(played.moved),
        "inference_moves": sum(1 for job in played.moved if job in inference),
        "away_s": round(statistics.fmean(pauses_s), 2) if pauses_s else None,
        "away_max_s": round(max(pauses_s), 2) if pauses_s else None,
        "failed": sum(played.failed(user) for user in played.jobs),
        "steps_lost": played.steps_lost,
        "drained_nodes": list(played.drained),
        "rpcs": played.rpcs,
        "makespan_s": played.makespan_s,
    }


def _user(served: bool) -> str:
    return wavebed.INFERENCE_USER if served else wavebed.TRAINING_USER


def plans(wave: MoveWave, library: Path) -> dict[str, list[wavebed.WaveJob]]:
    """Return the submissions of each user; `library`: of `wavebed.install`.

    Each step of a training job takes `STEP_S` seconds on its slice.
    """
    jobs_by_user: dict[str, list[wavebed.WaveJob]] = {wavebed.INFERENCE_USER: [], wavebed.TRAINING_USER: []}
    gpu = geometry(wave.gpu_type)
    for at, kind, limit_s in zip(wave.drawn.times, wave.drawn.kinds, wave.limits_s, strict=True):
        options = ("-p", "gpu", f"--gres=mig:{kind.profile.name}:1", f"--time={limit_s // 60}")
        if kind.served:
            job = wavebed.WaveJob(at, (*options, "-o", "/dev/null"), f"sleep {kind.seconds}")
        else:
            training_options = ("--requeue", "--open-mode=append", f"--comment={fragmentation.RESTARTABLE}")
            step_s = round(STEP_S * usual_speed(gpu, kind.profile), 4)
            command = wavebed.training_command(library, max(1, round(kind.seconds / STEP_S)), step_s)
            job = wavebed.WaveJob(at, (*options, *training_options), command)
        jobs_by_user[_user(kind.served)].append(job)
    return jobs_by_user

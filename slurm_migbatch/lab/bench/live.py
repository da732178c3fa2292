"""Measure lending on a real Slurm: the same wave with and without, and the simulated Slurm's prediction of both.

Two nodes of four simulated H100s. Inference uses the first half of the nodes. *half*: training has only the other half,
under the same migbatchd, with the same elastic jobs and sizes. *lending*: it may also use idle slices
of the first half.

Both use migbatchd's decision, with the default configuration plus `waves.settings`. Every figure is read from the
record that migbatchd keeps and from the training jobs' own output.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.bench import wavebed
from slurm_migbatch.lab.experiments.wave import Wave, draw
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.slurm import waves
from slurm_migbatch.slurm.times import format_clock
from slurm_migbatch.values.quantiles import quantile

TARGET_JCT: Final = 0.70
TARGET_DELAY_S: Final = 5.0
TARGET_RESTARTS: Final = 3.0
TARGET_PREDICTION: Final = 0.10


def measure(
    seed: int = 1,
    wave: Wave | None = None,
    progress: Progress = silent,
    slurm_root: str = "",
) -> dict[str, Any]:
    """Run the whole experiment: both ways, each on its own test bed, one after the other (root, about 20 minutes).

    Raises:
        NotMeasurable: a job was refused, or did not end.
        TestbedError: the test bed failed.
    """
    wave = wave or draw(seed)
    ways: dict[str, dict[str, Any]] = {}
    for name, lending in (("half", False), ("lending", True)):
        progress(f"{name}: the simulator", 0)
        predicted = waves.predict(wave, lending)
        progress(f"{name}: {len(wave.requests)} inference and {len(wave.trainings)} training jobs on a real Slurm", 0)
        ways[name] = {**run(wave, lending, progress, slurm_root), "predicted": predicted}
    return {
        "bench": "live",
        "seed": seed,
        "requests": len(wave.requests),
        "trainings": len(wave.trainings),
        "day_s": wave.day_s,
        "nodes": wave.nodes,
        "gpus": wave.gpus,
        **provenance(DECIDES, waves.config(wave)),
        "changed": waves.settings(wave),
        "ways": ways,
        "bars": [bar.to_dict() for bar in _bars(ways["half"], ways["lending"])],
    }


def _bars(half: Mapping[str, Any], lending: Mapping[str, Any]) -> list[Bar]:
    bars = [
        Bar("mean JCT of training relative to no lending", lending["jct_s"] / half["jct_s"], TARGET_JCT),
        Bar(
            "p95 start delay of inference above that without lending [s]",
            lending["p95_s"] - half["p95_s"],
            TARGET_DELAY_S,
        ),
        Bar("restarts per training job", lending["restarts"], TARGET_RESTARTS),
        Bar("inference jobs that did not complete", float(lending["inference_failed"] + half["inference_failed"]), 0.0),
        Bar("training jobs that did not complete", float(lending["training_failed"] + half["training_failed"]), 0.0),
        Bar("steps lost that a checkpoint had saved", float(lending["steps_lost"] + half["steps_lost"]), 0.0),
    ]
    for name, way in (("half", half), ("lending", lending)):
        error = abs(way["jct_s"] / way["predicted"]["jct_s"] - 1.0)
        bars.append(Bar(f"{name}: error of the predicted mean JCT", error, TARGET_PREDICTION))
    return bars


def run(wave: Wave, lending: bool, progress: Progress = silent, slurm_root: str = "") -> dict[str, Any]:
    """Run one way on its own test bed (with the Slurm of `slurm_root`, if given); return its figures."""
    exempt = {"PreemptExemptTime": format_clock(waves.exempt_s(wave))}
    with wavebed.bed_for(wave, waves.settings(wave), slurm_root, _partitions(wave, lending), exempt) as bed:
        library = wavebed.install(bed.directory / "elastic")
        played = wavebed.play(bed, _plans(wave, library), progress)
    inference, training = played.jobs[wavebed.INFERENCE_USER], played.jobs[wavebed.TRAINING_USER]
    delays = [job.started - job.submitted for job in inference if job.started]
    jct = [job.ended - job.submitted for job in training]
    return {
        "jct_s": round(statistics.fmean(jct), 2),
        "jct_p95_s": round(quantile(jct, 0.95), 2),
        "mean_delay_s": round(statistics.fmean(delays), 2),
        "p95_s": round(quantile(delays, 0.95), 2),
        "restarts": round(statistics.fmean(job.runs - 1 for job in training), 3),
        "restarts_max": max(job.runs - 1 for job in training),
        "inference_failed": played.failed(wavebed.INFERENCE_USER),
        "training_failed": played.failed(wavebed.TRAINING_USER),
        "steps_lost": played.steps_lost,
        "drained_nodes": list(played.drained),
        "rpcs": played.rpcs,
        "makespan_s": played.makespan_s,
    }


def _partitions(wave: Wave, lending: bool) -> dict[str, str]:
    names = [f"n{number}" for number in range(1, wave.nodes + 1)]
    half = wave.nodes // 2
    return {"gpu": ",".join(names[:half]), "train": ",".join(names if lending else names[half:])}


def _plans(wave: Wave, library: Path) -> dict[str, list[wavebed.WaveJob]]:
    """Return the submissions of each user: inference by one, training by another."""
    inference = [
        wavebed.WaveJob(
            request.at,
            ("--time=60", "-p", "gpu", f"--gres=mig:{request.profile}:1", "-o", "/dev/null"),
            f"sleep {request.seconds}",
        )
        for request in wave.requests
    ]
    training = [
        wavebed.WaveJob(
            job.at,
            (
                *("--time=60", "-p", "train", "--gres=mig:auto", "--requeue", "--open-mode=append"),
                f"--comment=migbatch: role=train min={job.least} max={job.most} signal=usr1",
            ),
            wavebed.training_command(library, job.steps, job.step_s),
        )
        for job in wave.trainings
    ]
    return {wavebed.INFERENCE_USER: inference, wavebed.TRAINING_USER: training}

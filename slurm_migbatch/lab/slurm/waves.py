"""Predict the wave of `bench live` on the simulated Slurm, with migbatchd's own controller."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.decide.lending.values import usual_speed
from slurm_migbatch.lab.experiments.wave import Wave, WaveRequest, WaveTraining
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.lab.slurm.run import SimulatedSite, SiteNode, SlurmSimulation, Submission
from slurm_migbatch.lab.slurm.work import Fixed, SimulatedTraining
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.values.quantiles import quantile

LIMIT_S: Final = 3600
_UNTIL_S: Final = 20_000.0
#: keys of [lending] that are durations of the load, not of a start or a checkpoint
_SCALED: Final = ("min_idle_s", "rest_s", "horizon_s", "payback_s")
_LEAST_S: Final = 1.0


def settings(wave: Wave) -> dict[str, dict[str, Any]]:
    """Return the changes of a wave's migbatch.toml to the default, by section.

    Lending is enabled. Durations that depend on the load are scaled by the ratio of the wave's day to a real day, to at
    least 1 s each, and rounds are `POLL_S` apart. Durations of starts, checkpoints and grace time keep their
    defaults: a wave does not make them shorter.
    """
    shipped = Config()
    scale = wave.day_s / shipped.lending.day_s
    lending: dict[str, Any] = {"enabled": True, "partitions": ("train",), "day_s": wave.day_s}
    for name in _SCALED:
        duration_s = getattr(shipped.lending, name)
        lending[name] = max(duration_s * scale, _LEAST_S) if duration_s else duration_s
    return {"lending": lending, "cluster": {"poll_s": POLL_S}}


def exempt_s(wave: Wave) -> int:
    """Return PreemptExemptTime, scaled like the other durations of the load."""
    return max(1, round(SlurmSettings().exempt_s * wave.day_s / Config().lending.day_s))


def config(wave: Wave) -> Config:
    """Return the configuration of a wave: the default one plus `settings`."""
    shipped, changed = Config(), settings(wave)
    return replace(
        shipped,
        lending=replace(shipped.lending, **changed["lending"]),
        cluster=replace(shipped.cluster, **changed["cluster"]),
    )


POLL_S: Final = 0.5
"""Seconds between two rounds."""


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of the wave's training jobs besides their steps, seconds: see `work.SimulatedTraining`."""

    start_s: float = 2.0
    restart_s: float = 2.0
    every_s: float = 20.0
    checkpoint_s: float = 0.1


def site(wave: Wave, lending: bool) -> SimulatedSite:
    """Return the wave's cluster.

    Inference has the first half of the nodes; training has the other half or, with lending, all nodes.
    """
    gpu, half = geometry(wave.gpu_type), wave.nodes // 2
    names = [("gpu", *(["train"] if lending else [])) if number < half else ("train",) for number in range(wave.nodes)]
    return SimulatedSite(
        tuple(SiteNode(f"n{number + 1}", (gpu,) * wave.gpus, parts) for number, parts in enumerate(names)),
        (SimulatedPartition("gpu", 10), SimulatedPartition("train", 1, preempted=True)),
        SlurmSettings(listing_s=0.02, update_s=0.004, exempt_s=exempt_s(wave)),
    )


def workload(wave: Wave, costs: TrainingCosts) -> list[Submission]:
    """Return every job of the wave, named infer or train, in the form that the submit filter returns."""
    gpu = geometry(wave.gpu_type)
    return [
        *(_inference(request) for request in wave.requests),
        *(_training(training, costs, lambda profile: usual_speed(gpu, profile)) for training in wave.trainings),
    ]


def _inference(request: WaveRequest) -> Submission:
    fields = {"user": "mbalice", "uid": 1001}
    return Submission(
        request.at,
        f"mig:{request.profile}:1",
        lambda: Fixed(request.seconds),
        "gpu",
        LIMIT_S,
        name="infer",
        fields=fields,
    )


def _training(training: WaveTraining, costs: TrainingCosts, speed: Callable[[Profile], float]) -> Submission:
    comment = f"migbatch: role=train min={training.least} max={training.most} signal=usr1 [mig:loan:1#loan0001]"
    fields = {"user": "mbbob", "uid": 1002, "comment": comment}
    return Submission(
        training.at,
        "mig:loan:1",
        lambda: SimulatedTraining(
            training.work_s, speed, costs.start_s, costs.restart_s, costs.every_s, costs.checkpoint_s
        ),
        "train",
        LIMIT_S,
        name="train",
        fields=fields,
    )


def predict(wave: Wave, lending: bool, costs: TrainingCosts = TrainingCosts()) -> dict[str, Any]:
    """Simulate the wave with migbatchd's controller and return its figures, named like those of `bench.live.run`.

    Raises Stuck.
    """
    simulation = SlurmSimulation(site(wave, lending), workload(wave, costs))
    configuration = config(wave)
    outcome = simulation.run(ServiceController(simulation, configuration), pace_of(configuration), _UNTIL_S)
    trained = [job for job in outcome.jobs.values() if job.name == "train"]
    served = [job for job in outcome.jobs.values() if job.name == "infer"]
    delays = [job.start - job.submit for job in served if job.start is not None]
    return {
        "jct_s": round(statistics.fmean(job.end - job.submit for job in trained), 2),
        "mean_delay_s": round(statistics.fmean(delays), 2),
        "p95_s": round(quantile(delays, 0.95), 2),
        "restarts": round(statistics.fmean(job.restarts for job in trained), 3),
        "unfinished": len(wave.requests) + len(wave.trainings) - len(trained) - len(delays),
    }

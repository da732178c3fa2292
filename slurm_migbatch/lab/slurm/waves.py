"""The wave of `bench live` as a workload of the simulated Slurm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurm_migbatch.decide.lending.values import usual_speed
from slurm_migbatch.lab.experiments.wave import Request, Wave
from slurm_migbatch.lab.experiments.wave import Training as WaveTraining
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.run import Site, SiteNode, Submission
from slurm_migbatch.lab.slurm.work import Fixed, Training
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

LIMIT_S = 3600


@dataclass(frozen=True)
class TrainingCosts:
    """What a training of the wave costs beside its steps, seconds: see `work.Training`."""

    start_s: float = 2.0
    restart_s: float = 2.0
    every_s: float = 20.0
    checkpoint_s: float = 0.1


def site(wave: Wave, lending: bool) -> Site:
    """The wave's cluster: inference has the first half of the nodes, training the other or, with lending, all."""
    gpu, half = geometry(wave.gpu_type), wave.nodes // 2
    names = [("gpu", *(["train"] if lending else [])) if number < half else ("train",) for number in range(wave.nodes)]
    return Site(tuple(SiteNode(f"n{number + 1}", (gpu,) * wave.gpus, parts) for number, parts in enumerate(names)))


def workload(
    wave: Wave, costs: TrainingCosts = TrainingCosts(), speed: Callable[[Geometry, Profile], float] = usual_speed
) -> list[Submission]:
    """Every job of the wave, named infer or train, as the submit filter leaves it."""
    gpu = geometry(wave.gpu_type)
    return [
        *(_inference(one) for one in wave.requests),
        *(_training(one, costs, lambda profile: speed(gpu, profile)) for one in wave.trainings),
    ]


def _inference(one: Request) -> Submission:
    fields = {"user": "mbalice", "uid": 1001}
    return Submission(
        one.at, f"mig:{one.profile}:1", lambda: Fixed(one.seconds), "gpu", LIMIT_S, name="infer", fields=fields
    )


def _training(one: WaveTraining, costs: TrainingCosts, speed: Callable[[Profile], float]) -> Submission:
    comment = f"migbatch: role=train min={one.least} max={one.most} signal=usr1 [mig:loan:1#loan0001]"
    fields = {"user": "mbbob", "uid": 1002, "comment": comment}
    return Submission(
        one.at,
        "mig:loan:1",
        lambda: Training(one.work_s, speed, costs.start_s, costs.restart_s, costs.every_s, costs.checkpoint_s),
        "train",
        LIMIT_S,
        name="train",
        fields=fields,
    )

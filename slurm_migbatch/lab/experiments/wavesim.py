"""What the simulator expects of a wave: the same work, the same rules, the same costs as on the real Slurm.

Training runs on slices of its own half and, with lending, on what inference leaves of the other; what differs from the
real thing is that starts, checkpoints and looks at the queue take as long as they are said to, every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.decide.lending.values import usual_speed
from slurm_migbatch.lab.experiments.lending import figures
from slurm_migbatch.lab.experiments.wave import Wave
from slurm_migbatch.lab.sim.cluster import Cluster, Place
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import Costs, Job
from slurm_migbatch.lab.sim.policies.slicelending import SliceLending, SliceWay
from slurm_migbatch.lab.sim.run import Run
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

_FIRST_TRAINING: Final = 1_000_000


@dataclass(frozen=True)
class Overheads:
    """Seconds that things take beside the work.

    Attributes:
        infer_start_s: of inference, from submission to its first item, where there is room.
        train_start_s: of training, from its release to its first step. `train_restart_s`: the same when it comes back.
        checkpoint_s: from being told to stop until its slice can be had by others.
        look_s: between looks at the queue: then loans end and training is released. Inference that has room does not
            wait for it.
    """

    infer_start_s: float = 2.0
    train_start_s: float = 5.0
    train_restart_s: float = 5.0
    checkpoint_s: float = 2.0
    look_s: float = 2.0


LENDING: Final[Mapping[str, Any]] = {
    "enabled": True,
    "partitions": ("train",),
    "min_idle_s": 0.0,
    "horizon_s": 5.0,
    "payback_s": 30.0,
    "grace_s": 10.0,
    "start_s": 30.0,
    "most_releases": 64,
    "restart_s": 5.0,
    "checkpoint_s": 0.1,
}
"""`[lending]` of a wave, on the real Slurm and here. Times are as compressed as the day is."""


class _Speeds:
    """Inference runs at 1 on what it asks for, training as fast as is usual of its slice."""

    def __init__(self, gpu: Geometry, speed: Callable[[Geometry, Profile], float]) -> None:
        self.gpu, self.of = gpu, speed

    def speed(self, job: Job, places: Sequence[Place], _steps: int = 1) -> float:
        """See `sim.speeds.Speeds`."""
        return 1.0 if job.kind == "infer" else self.of(self.gpu, places[0].slot.profile)

    def slowdown(self, _run: Run, others: Sequence[Run]) -> float:
        """Nobody shares a slice here; as many times slower as there are."""
        return 1.0 + len(others)


def jobs(wave: Wave, costs: Overheads) -> list[Job]:
    """The wave as the simulator has it."""
    infer, train = Costs(costs.infer_start_s), Costs(costs.train_start_s, costs.train_restart_s, costs.checkpoint_s)
    inference = [
        Job(n, f"infer{n}", one.at, one.seconds, "infer", profile=Profile.parse(one.profile), costs=infer)
        for n, one in enumerate(wave.requests)
    ]
    training = [
        Job(
            _FIRST_TRAINING + n,
            f"train{n}",
            one.at,
            one.work_s,
            profile=Profile.parse(one.least),
            largest=Profile.parse(one.most),
            costs=train,
        )
        for n, one in enumerate(wave.trainings)
    ]
    return [*inference, *training]


def predict(
    wave: Wave,
    lending: bool,
    costs: Overheads = Overheads(),
    config: LendingConfig | None = None,
    speed: Callable[[Geometry, Profile], float] = usual_speed,
) -> dict[str, Any]:
    """The wave with lending or without it.

    Args:
        wave: the work and its cluster; inference has the first half of the nodes.
        lending: whether inference's half is lent.
        costs: what starts and ends take.
        config: the rules; where not given those of `LENDING`.
        speed: of training on a slice, the whole GPU being 1.

    Returns:
        What `lending.figures` returns, and "end_s" and "refused": when all was done, inference jobs that never ran.
    """
    gpu = geometry(wave.gpu_type)
    cluster = Cluster.of(gpu, wave.nodes * wave.gpus, wave.gpus)
    half = wave.nodes // 2 * wave.gpus
    if config is None:
        config = LendingConfig(**LENDING, day_s=wave.day_s)
    way = SliceWay(lend=lending, look_s=costs.look_s, round_s=costs.look_s)
    policy = SliceLending(range(half, wave.nodes * wave.gpus), range(half), config, way)
    result = Simulation(cluster, jobs(wave, costs), policy, _Speeds(gpu, speed)).run()
    last = max((run.ended for run in result.runs if run.ended is not None), default=math.nan)
    return {
        **figures(result, policy.reclaims),
        "end_s": last,
        "refused": sum(run.started is None for run in result.runs if run.job.kind == "infer"),
    }

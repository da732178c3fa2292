"""Define a day of jobs on slices of any size, compressed to minutes, with moves of training jobs for larger slices.

One value for both sides of `migbatch bench live --moves`: it is submitted to a real Slurm, and the simulator predicts
the result. Jobs are those of `bench fragmentation`: pods of Alibaba's openb trace that request a
share of a GPU, at random times (Poisson); those that are not latency sensitive are training jobs that can be restarted.
All times are divided such that they are `MEAN_S` on average; jobs longer than `LONGEST_S` in the trace count as that
long, jobs shorter than `SHORTEST_S` in the wave as that. Arrivals are stretched until the day's work is `LOAD`
of the GPUs' capacity until the last arrival: few random jobs would leave some days nearly idle.

Starts, checkpoints and restarts are not compressed, nor are time limits, which Slurm keeps in whole
minutes: they are `fragmentation.LIMIT` times the run time, rounded up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.config import Config
from slurm_migbatch.lab.bars import mean_with_interval
from slurm_migbatch.lab.experiments import fragmentation
from slurm_migbatch.lab.experiments.fragmentation import Draw, Outcome
from slurm_migbatch.lab.papers.placement import FirstFit
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.records import SlurmSettings
from slurm_migbatch.lab.slurm.run import SimulatedSite, SlurmSimulation
from slurm_migbatch.lab.slurm.waves import POLL_S, TrainingCosts
from slurm_migbatch.lab.slurm.work import Fixed, SimulatedTraining, Work
from slurm_migbatch.lab.studies.placement import PlacementCluster, PodKind, populations

POPULATION: Final = "parts of a GPU"
LOAD: Final = 0.9
JOBS: Final = 120
WARM: Final = 15
"""Jobs that are not counted: the cluster fills up."""
MEAN_S: Final = 25.0
LONGEST_S: Final = 14_400.0
SHORTEST_S: Final = 2.0
BLOCKS: Final = 7
MULTIFACTOR: Final = (23, 11)
"""From this (tested) release on priority/multifactor is Slurm's default: without weights all jobs
have the same priority, and a requeued one comes after all pending ones.
"""
COSTS: Final = TrainingCosts(start_s=0.2, restart_s=0.2)
"""`bench/wave_training.py` makes its first step 0.1 to 0.2 s after its begin."""
_SCALED: Final = ("after_s", "gain_s", "rest_s")
"""Keys of [moves] that are durations of the load, not of a checkpoint."""


@dataclass(frozen=True)
class MoveWave:
    """The work, and the cluster it is for.

    Attributes:
        drawn: the jobs and their arrivals, in seconds of the wave.
        scale: seconds of the wave for each second of the trace.
        nodes, gpus, gpu_type: nodes, GPUs of each, and their model.
    """

    drawn: Draw
    scale: float
    nodes: int = 2
    gpus: int = 4
    gpu_type: str = "h100-80gb"

    @property
    def limits_s(self) -> list[int]:
        """Time limit of each job, whole minutes in seconds."""
        return [60 * math.ceil(fragmentation.LIMIT * kind.seconds / 60) for kind in self.drawn.kinds]

    @property
    def trainings(self) -> int:
        """Jobs that may be moved."""
        return sum(1 for kind in self.drawn.kinds if not kind.served)


def compressed(kinds: Sequence[PodKind]) -> tuple[list[PodKind], float]:
    """Return the kinds of jobs with the times of a wave, and the ratio of its seconds to the trace's."""
    cut = [replace(kind, seconds=min(kind.seconds, LONGEST_S)) for kind in kinds]
    scale = MEAN_S / statistics.fmean(kind.seconds for kind in cut)
    return [replace(kind, seconds=round(max(SHORTEST_S, kind.seconds * scale), 1)) for kind in cut], scale


def kinds_of(data: Path) -> list[PodKind]:
    """Return the kinds of jobs of the trace in `data`, openb's directory or one that holds it.

    Raises NotMeasurable, TraceError.
    """
    return populations(data, geometry(MoveWave.gpu_type))[0][POPULATION]


def draw(kinds: Sequence[PodKind], seed: int, jobs: int = JOBS) -> MoveWave:
    """Draw a wave at random from kinds of the trace."""
    short, scale = compressed(kinds)
    gpus = MoveWave.nodes * MoveWave.gpus
    drawn = fragmentation.draw(short, LOAD, seed, gpus, jobs)
    work = sum(kind.profile.compute * kind.seconds for kind in drawn.kinds)
    stretch = work / (LOAD * gpus * geometry(MoveWave.gpu_type).compute_slices) / drawn.times[-1]
    return MoveWave(Draw(tuple(round(at * stretch, 2) for at in drawn.times), drawn.kinds), scale)


def settings(wave: MoveWave, moves: bool) -> dict[str, dict[str, Any]]:
    """Return the changes of a wave's migbatch.toml to the default, by section.

    Durations of the load are compressed like the jobs, and rounds are more frequent. Durations of starts
    and checkpoints (grace_s) are the defaults.
    """
    shipped = Config().moves
    scaled = {name: round(getattr(shipped, name) * wave.scale, 3) for name in _SCALED}
    return {"moves": {"enabled": moves, **scaled}, "cluster": {"poll_s": POLL_S}}


def config(wave: MoveWave, moves: bool) -> Config:
    """Return the configuration of a wave: the default one plus `settings`."""
    shipped, changed = Config(), settings(wave, moves)
    return replace(
        shipped,
        moves=replace(shipped.moves, **changed["moves"]),
        cluster=replace(shipped.cluster, **changed["cluster"]),
    )


def predict(
    wave: MoveWave,
    moves: bool,
    release: tuple[int, int] = SlurmSettings.release,
) -> Outcome:
    """Simulate the wave with migbatchd's controller on the simulated Slurm of that release. Raises Stuck."""
    site = SimulatedSite.of(geometry(wave.gpu_type), wave.nodes, wave.gpus)
    site = replace(site, slurm=replace(site.slurm, release=release, requeued_last=release >= MULTIFACTOR))
    simulation = SlurmSimulation(site, fragmentation.workload(wave.drawn, wave.limits_s, _work))
    settled = config(wave, moves)
    return fragmentation.of_jobs(wave.drawn, simulation.run(ServiceController(simulation, settled), pace_of(settled)))


def _work(kind: PodKind) -> Work:
    if kind.served:
        return Fixed(kind.seconds)
    return SimulatedTraining(
        kind.seconds, fragmentation.full_speed, COSTS.start_s, COSTS.restart_s, COSTS.every_s, COSTS.checkpoint_s
    )


def first_fit(wave: MoveWave) -> Outcome:
    """Place each job on the first GPU with room, without Slurm, delays, starts and moves."""
    place = PlacementCluster(geometry(wave.gpu_type), wave.nodes * wave.gpus, FirstFit()).place
    return fragmentation.at_once(wave.drawn, place, queued=True)


def figures(wave: MoveWave, outcome: Outcome) -> dict[str, float]:
    """Return waits (until the first start) and completion times, seconds, of the jobs that are counted.

    `restarts` are those of all jobs together, `inference_restarts` those of jobs other than training jobs.
    """
    found = fragmentation.figures(wave.drawn, outcome, geometry(wave.gpu_type), True, WARM)
    runs = [(kind.served, served.restarts) for kind, served in zip(wave.drawn.kinds, outcome, strict=True) if served]
    return {
        **{name: round(value, 2) for name, value in found.items()},
        "restarts": sum(restarts for _, restarts in runs),
        "inference_restarts": sum(restarts for served, restarts in runs if served),
    }


def wait_over(outcome: Outcome, baseline: Outcome) -> tuple[float, float, float]:
    """Return the mean wait relative to a baseline of the same wave, and the ends of its 95 % confidence interval.

    By the differences of `BLOCKS` blocks of consecutive jobs, because waits of neighbours depend on
    each other. It is the scatter of this day's jobs, not of other days.
    """
    waits = [[served.wait_s if served else 0.0 for served in of[WARM:]] for of in (outcome, baseline)]
    mean = statistics.fmean(waits[1])
    differences = np.array(waits[0]) - np.array(waits[1])
    blocks = [float(block.mean()) for block in np.array_split(differences, BLOCKS)]
    _, low, high = mean_with_interval(blocks)
    ratio = fragmentation.ratio(statistics.fmean(waits[0]), mean)
    return (ratio, 1.0 + low / mean, 1.0 + high / mean) if mean else (ratio, -math.inf, math.inf)


def scatter(kinds: Sequence[PodKind], seeds: Sequence[int], release: tuple[int, int]) -> dict[str, Any]:
    """Return the simulator's predictions of other days: ratios of wait and completion time with moves to those without.

    Of each the mean over the draws, the ends of its 95 % confidence interval, the least and the largest.
    """
    ratios: dict[str, list[float]] = {"wait_s": [], "jct_s": []}
    for seed in seeds:
        wave = draw(kinds, seed)
        with_moves, without = (figures(wave, predict(wave, moves, release)) for moves in (True, False))
        for name, draws in ratios.items():
            draws.append(fragmentation.ratio(with_moves[name], without[name]))
    return {
        "draws": len(seeds),
        **{name: [round(v, 3) for v in (*mean_with_interval(r), min(r), max(r))] for name, r in ratios.items()},
    }

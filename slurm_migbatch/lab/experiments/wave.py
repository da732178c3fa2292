"""Define a wave of work: inference with a day pattern, and training jobs that always wait.

One value for both sides of `migbatch bench live`: it is submitted to a real Slurm, and the simulator predicts
the result. Time is compressed: a day lasts some minutes, while starts, checkpoints and restarts take their
normal time, so lending is harder here than on a real day.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

MIX: Final = (("1g.10gb", 0.5), ("2g.20gb", 0.25), ("3g.40gb", 0.2), ("7g.80gb", 0.05))
"""Profiles of inference jobs, and how often each is drawn."""
SPREAD: Final = 0.67
"""Of the logarithm of an inference job's time, as in `experiments.lendslices`."""
MEAN_S: Final = 12.0
"""Mean time of an inference job."""
TRAIN_S: Final = 40.0
"""Mean time of a training job on a whole GPU, in steps of `STEP_S`."""
STEP_S: Final = 0.2
BOUNDS: Final = ("2g.20gb", "4g.40gb")
"""Profiles between which training jobs are elastic."""
SWING: Final = 0.8
"""Highest and lowest rate of a day are 1 + SWING and 1 - SWING times the mean: 9 to 1."""


@dataclass(frozen=True)
class WaveRequest:
    """An inference job: it arrives `at` seconds after the wave's begin, and works for so many `seconds`."""

    at: float
    profile: str
    seconds: float


@dataclass(frozen=True)
class WaveTraining:
    """An elastic training job: `steps` steps, each of which takes `step_s` seconds on a whole GPU."""

    at: float
    steps: int
    step_s: float
    least: str
    most: str

    @property
    def work_s(self) -> float:
        """Seconds on a whole GPU."""
        return self.steps * self.step_s


@dataclass(frozen=True)
class Wave:
    """The work and its cluster: inference uses the first half of the nodes, training the other.

    `day_s` is the length of a day.
    """

    requests: tuple[WaveRequest, ...]
    trainings: tuple[WaveTraining, ...]
    day_s: float
    nodes: int = 2
    gpus: int = 4
    gpu_type: str = "h100-80gb"


def draw(seed: int, *, requests: int = 90, trainings: int = 48, day_s: float = 360.0) -> Wave:
    """Draw a wave at random.

    Args:
        requests: inference jobs in the day; their rate follows it, lowest at its begin.
        trainings: training jobs; they arrive within the first third of the day, so that some always wait.
        day_s: length of the day, seconds.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, not a secret
    names = [name for name, _ in MIX]
    weights = [weight for _, weight in MIX]
    arrivals: list[float] = []
    while len(arrivals) < requests:  # thinning
        at = rng.uniform(0.0, day_s)
        if rng.uniform(0.0, 1.0 + SWING) < 1.0 - SWING * math.cos(2 * math.pi * at / day_s):
            arrivals.append(at)
    centre = math.log(MEAN_S) - SPREAD**2 / 2
    inference = tuple(
        WaveRequest(
            round(at, 2), rng.choices(names, weights)[0], round(max(1.0, rng.lognormvariate(centre, SPREAD)), 2)
        )
        for at in sorted(arrivals)
    )
    jobs = []
    for number in range(trainings):
        at = number * day_s / 3 / trainings
        steps = max(20, round(rng.uniform(0.5, 1.5) * TRAIN_S / STEP_S))
        jobs.append(WaveTraining(round(at, 2), steps, STEP_S, *BOUNDS))
    return Wave(inference, tuple(jobs), day_s)

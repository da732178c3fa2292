"""Philly under the lending policy: what is made up is as it says, and lending really lends."""

from __future__ import annotations

import pytest

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.experiments import lentphilly
from slurm_migbatch.lab.experiments.lentphilly import BUSY, case, play
from slurm_migbatch.lab.papers.goodput import Goodput, Steps
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policies.lending import GoodputSpeeds
from slurm_migbatch.lab.traces.trace import Trace

MODEL = Goodput(Steps(0.05, 0.001, 0.02, 0.001, 0.01, 0.0005, 1.5), 4000.0, 128, 4096, 32, 1024)
LEARNING = GoodputSpeeds({"cifar10": MODEL, "bert": MODEL}, 8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs on each side."""
    monkeypatch.setattr(lentphilly, "OWN", 8)
    monkeypatch.setattr(lentphilly, "LENT", 8)


TRACE = Trace("t", tuple(SimulatedJob(n, f"j{n}", 400.0 * n, 4000.0, gpus=1 + n % 3) for n in range(60)))


def test_jobs_keep_their_durations_on_what_they_asked_for() -> None:
    made = case(TRACE, LEARNING)
    assert {job.app for job in made.train} == {"cifar10", "bert"}
    for before, job in zip(TRACE.jobs, made.train, strict=True):
        assert job.gpus == before.gpus
        assert job.work == pytest.approx(before.work * LEARNING.of(job.app, job.gpus))
        assert job.least == max(1, job.gpus // 2)
        assert job.gpus <= job.most <= 2 * job.gpus


def test_inference_needs_its_share_and_follows_the_day() -> None:
    days = Trace("t", tuple(SimulatedJob(n, f"j{n}", 100.0 * n, 10.0) for n in range(int(10 * DAY_S / 100))))
    made = case(days, LEARNING)
    assert len(made.infer) == len(days.jobs)
    needed = sum(job.work for job in made.infer) / days.jobs[-1].arrival
    assert needed == pytest.approx(BUSY * 8, rel=0.05)
    night = sum(0 <= job.arrival % DAY_S < 0.25 * DAY_S for job in made.infer)
    noon = sum(0.375 * DAY_S <= job.arrival % DAY_S < 0.625 * DAY_S for job in made.infer)
    assert noon > 2 * night
    assert made == case(days, LEARNING)


def test_training_holds_more_than_its_own_and_copies_grow_alike() -> None:
    made = case(TRACE, LEARNING, 6 * 3600.0)
    one, two = play(made, LEARNING), play(made, LEARNING, 2)
    assert one["trained_on"] > 8
    assert two["gpus"] == 2 * one["gpus"]
    for what in ("jobs", "sessions"):  # copies come up to an hour later, so some after the end
        assert 1.8 * one[what] < two[what] <= 2 * one[what]
    assert two["trained_on"] > 16
    assert one["cpu_s"] > 0

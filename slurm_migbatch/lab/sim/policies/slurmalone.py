"""Simulate Slurm without migbatch: the same simulated Slurm, with whole GPUs for every job.

A job gets as many GPUs as it has slices or GPUs in the trace. migbatchd's rounds run, but have nothing to change: each
GPU is offered as its full profile only, and nothing is lent, moved or re-typed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.lab.sim.policies.migbatch import MigbatchParams, play
from slurm_migbatch.lab.sim.registry import NamedPolicy, NoParams, Setup
from slurm_migbatch.lab.sim.result import SimulationResult


def _play(_params: NoParams, setup: Setup) -> SimulationResult:
    shipped = Config()
    full = setup.geometry.full.profile.name
    config = replace(
        shipped,
        supply=replace(shipped.supply, preference=(full,)),
        lending=replace(shipped.lending, enabled=False),
        moves=replace(shipped.moves, enabled=False),
    )
    jobs = tuple(replace(job, profile=None) for job in setup.jobs)
    return play(MigbatchParams(), config, replace(setup, jobs=jobs))


SLURM: Final = NamedPolicy(
    "Slurm without migbatch: whole GPUs for every job, on the same simulated Slurm", NoParams, _play
)

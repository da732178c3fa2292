"""What the experiments with a bar run: migbatchd's decisions with the configuration that ships, and how they say so."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from slurm_migbatch.config import Config, text_of
from slurm_migbatch.decide.core import decide
from slurm_migbatch.decide.paris_elsa.preference import Class, preference
from slurm_migbatch.lab.slurm.run import RoundTiming
from slurm_migbatch.mig.geometry import Geometry

DECIDES: Final = f"{decide.__module__}.{decide.__qualname__}"
"""migbatchd's decision as a whole."""
IDLE_S: Final = 600.0
"""Seconds between two rounds while nothing happens, at the most; the service's own are more frequent. They become
fewer slowly, for what waits a few seconds before it is done."""


def provenance(decides: str, config: Config) -> dict[str, str]:
    """Name what decides, and the digest of the configuration that it has, as it is rendered."""
    return {"decides": decides, "configuration": hashlib.sha256(text_of(config).encode()).hexdigest()[:16]}


def learned(gpus: Mapping[Geometry, int], classes: Sequence[Class]) -> Config:
    """Return the shipped configuration on a site that has run for a while.

    What free space is best offered as migbatchd finds by itself from its record (`daemon.offer_tuner`); a simulation
    has no record, so the same function's answer stands in [supply] preference, and nothing else differs.
    """
    config = Config()
    names = tuple(profile.name for profile in preference(gpus, classes))
    return replace(config, supply=replace(config.supply, preference=names))


def pace(config: Config) -> RoundTiming:
    """Return when rounds are run: as often as the service's as long as anything happens."""
    poll_s = config.cluster.poll_s
    return RoundTiming(every_s=poll_s, soon_s=poll_s, idle_s=IDLE_S, growth=2.0)

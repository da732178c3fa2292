"""Provide migbatchd's decision with the default configuration, and its name, to the experiments with targets."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from slurm_migbatch.config import Config, text_of
from slurm_migbatch.decide.core import decide
from slurm_migbatch.decide.paris_elsa.preference import HORIZON_S, Class, preference
from slurm_migbatch.lab.slurm.run import RoundTiming
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile

DECIDES: Final = f"{decide.__module__}.{decide.__qualname__}"
"""migbatchd's decision as a whole."""
IDLE_S: Final = 600.0
"""Longest time between two rounds without events; the service's own are more frequent. The frequency falls slowly, for
work that waits a few seconds before its end.
"""


def provenance(decides: str, config: Config) -> dict[str, str]:
    """Return the name of the decision function, and a digest of the rendered configuration."""
    return {"decides": decides, "configuration": hashlib.sha256(text_of(config).encode()).hexdigest()[:16]}


def learned(gpus: Mapping[Geometry, int], classes: Sequence[Class]) -> Config:
    """Return the default configuration as it works on a site that has run for a while.

    migbatchd derives the offers for free space from its record (`daemon.offer_tuner`). A simulation has no record, so
    the result of the same function is set as [supply] preference; nothing else differs from the default.
    """
    config = Config()
    names = tuple(profile.name for profile in preference(gpus, classes))
    return replace(config, supply=replace(config.supply, preference=names))


def learned_from(granted: Iterable[tuple[Profile, float]], span_s: float, gpus: Mapping[Geometry, int]) -> Config:
    """Return `learned` for a site that received jobs with these granted profiles and run times (s) in `span_s`."""
    times: dict[Profile, list[float]] = {}
    for profile, seconds in granted:
        times.setdefault(profile, []).append(seconds)
    classes = [Class(len(of) * HORIZON_S / span_s, statistics.fmean(of), profile) for profile, of in times.items()]
    return learned(gpus, classes)


def pace(config: Config) -> RoundTiming:
    """Return the times of rounds: while there are events, rounds are as frequent as migbatchd's."""
    poll_s = config.cluster.poll_s
    return RoundTiming(every_s=poll_s, soon_s=poll_s, idle_s=IDLE_S, growth=2.0)

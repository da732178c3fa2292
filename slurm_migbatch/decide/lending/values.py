"""The input of lending of slices and its decisions: GPUs with their slots, training jobs, an admin's limits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from slurm_migbatch.decide.lending.allocation import RestartCosts
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.profile import Profile

Reason: TypeAlias = Literal["profile", "round", "reserve", "idle", "room"]
"""Why a job got nothing: no GPU has a profile of use to it; its account has its share; enough was released this round;
inference is expected to need the room; free space has not been idle, or at rest after a reclaim, for long enough; there
is no room."""


class SlotReference(NamedTuple):
    """A slot on a GPU of the cluster."""

    node: str
    gpu: int
    slot: Slot

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}:{self.slot}"


@dataclass(frozen=True)
class LentSlot:
    """A slot that a training job has."""

    slot: Slot
    job: Hashable


@dataclass(frozen=True)
class GpuCapacity:
    """One GPU of a node that may lend.

    Attributes:
        taken: slots of inference and of anybody else that is no loan; what was promised to them too.
        lent: slots of loans, those that are about to end too (until they have).
        idle_since: since when its free space has been as large as it is, unix seconds.
        reclaimed: when a loan was last reclaimed here; infinite: nothing may be lent here now.
        own: whether it is training's: its node is in no partition but those for training only. Nothing is kept
            for inference there, and no rest is needed.
    """

    node: str
    gpu: int
    geometry: Geometry
    taken: tuple[Slot, ...] = ()
    lent: tuple[LentSlot, ...] = ()
    idle_since: float = 0.0
    reclaimed: float | None = None
    own: bool = False

    @cached_property
    def used(self) -> Layout:
        """All slots on it; raises LayoutError where they overlap."""
        return Layout((*self.taken, *(loan.slot for loan in self.lent)))


@dataclass(frozen=True)
class Target:
    """The slice that a job is to get when it is back in the queue, because it was stopped for that.

    Attributes:
        node: where there was room for it.
        until: after this moment (unix seconds) the job is served like any other.
    """

    profile: Profile
    node: str
    until: float


@dataclass(frozen=True)
class ElasticJob:
    """A training job.

    Attributes:
        speeds: of each profile that it may have, its speed relative to the whole GPU; 0 where it does not fit.
        nodes: where it may run; None: anywhere.
        place: where it runs; None: it waits.
        since: when it started.
        restarts: how often it was stopped so far, for whatever reason. `hits`: by a reclaim or by Slurm's preemption.
        left_s: seconds that it would still need on the whole GPU; infinite where that is not known.
        needs_s: the same by what it said of itself; None: it did not.
        reported: whether its present run has reported anything.
        target: the slice that it is to get next; None: any.
    """

    job: Hashable
    speeds: Mapping[Profile, float]
    account: str = ""
    nodes: frozenset[str] | None = None
    place: SlotReference | None = None
    since: float = 0.0
    restarts: int = 0
    hits: int = 0
    costs: RestartCosts = field(default_factory=lambda: RestartCosts(60.0, 60.0))
    left_s: float = math.inf
    needs_s: float | None = None
    reported: bool = False
    target: Target | None = None

    @property
    def changes(self) -> int:
        """How often it was stopped for another reason than that its slice was needed, at the most."""
        return max(0, self.restarts - self.hits)


@dataclass(frozen=True)
class Release:
    """A waiting job is released with a profile, thought to start at a place (supply may find it another)."""

    job: Hashable
    profile: Profile
    place: SlotReference
    worth: float


@dataclass(frozen=True)
class Grow:
    """A running job is worth stopping, to start again on a larger profile.

    `faster` is the new speed over the old one; `gain` the worth left of it when the restart is paid, over `stay_s`
    seconds.
    """

    job: Hashable
    before: Profile
    profile: Profile
    place: SlotReference
    faster: float
    gain: float
    stay_s: float


@dataclass(frozen=True)
class Division:
    """How a GPU is to be divided anew.

    Attributes:
        profiles: what each job is to get there that does not keep its slice.
        jobs: how many jobs are on it then.
        gain: how much more work is done then, in whole GPUs, restarts paid.
    """

    node: str
    gpu: int
    profiles: Mapping[Hashable, Profile]
    jobs: int
    gain: float


@dataclass(frozen=True)
class Lending:
    """One round's decisions. `short`: what of the reserve has no room even if nothing more is lent."""

    grants: tuple[Release, ...]
    grows: tuple[Grow, ...]
    divisions: tuple[Division, ...]
    lacking: Mapping[Hashable, Reason]
    short: Mapping[Profile, int]


def usual_speed(geometry: Geometry, profile: Profile) -> float:
    """Return the speed to expect of unknown training: the square root of its share of compute slices.

    MISO's table (32 model and batch pairs on an A100) has means of 0.376, 0.530, 0.700 and 0.765 for 1g to 4g; this
    gives 0.378, 0.535, 0.655 and 0.756.
    """
    return math.sqrt(geometry.info(profile).compute_slices / geometry.compute_slices)


def within(geometry: Geometry, least: Profile | None, most: Profile | None) -> tuple[Profile, ...]:
    """Return the GPU's profiles without suffix from `least` to `most`, in compute and in memory."""
    return tuple(
        info.profile
        for info in geometry.profiles
        if not info.profile.suffix
        and (least is None or (info.profile.compute >= least.compute and info.profile.memory_gb >= least.memory_gb))
        and (most is None or (info.profile.compute <= most.compute and info.profile.memory_gb <= most.memory_gb))
    )

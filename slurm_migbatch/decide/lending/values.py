"""Define the values of lending: GPUs with their slots, training jobs, an administrator's limits, decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot, layout_of
from slurm_migbatch.mig.profile import Profile

Reason: TypeAlias = Literal["profile", "round", "reserve", "idle", "resources", "capacity"]
"""Why a job got nothing: no GPU has a useful profile for it; enough was released this round;
the space is reserved for inference; free space has not been idle, or at rest after a reclaim, for long enough; nodes
with capacity lack CPUs or memory for it; no GPU has the capacity.
"""


class SlotReference(NamedTuple):
    """A slot on a GPU of the cluster."""

    node: str
    gpu: int
    slot: Slot

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}:{self.slot}"


class Resources(NamedTuple):
    """CPUs and MiB on a node."""

    cpus: int
    memory: int

    def without(self, other: Resources) -> Resources:
        """Return what is left of it, not below 0."""
        return Resources(max(0, self.cpus - other.cpus), max(0, self.memory - other.memory))

    def plus(self, other: Resources) -> Resources:
        """Return the sum."""
        return Resources(self.cpus + other.cpus, self.memory + other.memory)

    def __str__(self) -> str:
        """Return the names of those that are not 0, for messages."""
        return " and ".join(name for name, count in (("CPUs", self.cpus), ("memory", self.memory)) if count > 0)


NOTHING: Final = Resources(0, 0)
"""No CPUs and no memory."""


@dataclass(frozen=True)
class LentSlot:
    """A slot that a training job has."""

    slot: Slot
    job: int


@dataclass(frozen=True)
class GpuCapacity:
    """One GPU of a node that may lend.

    Attributes:
        taken: slots of inference and of any other holder except loans; those that supply plans for one, too.
        lent: slots of loans, including those that are about to end (until they have).
        idle_since: since when all its free space has been free, unix seconds.
        reclaimed: when a loan was last reclaimed here; infinite: nothing may be lent here now.
        own: whether it is training-only: its node is in no other partition. Nothing is reserved for inference there,
            and no rest after a reclaim is needed.
        leaving: slots of loans that are about to end, and that training gets then.
        cpus: free CPUs of its node, without those for jobs that were released or stopped to start there; infinite:
            unknown. `memory`: the same in MiB; also infinite where memory is no consumable resource.
    """

    node: str
    gpu: int
    geometry: Geometry
    taken: tuple[Slot, ...] = ()
    lent: tuple[LentSlot, ...] = ()
    idle_since: float = 0.0
    reclaimed: float | None = None
    own: bool = False
    leaving: tuple[Slot, ...] = ()
    cpus: float = math.inf
    memory: float = math.inf

    @cached_property
    def used(self) -> Layout:
        """All slots on it; raises LayoutError if they overlap."""
        return layout_of((*self.taken, *[loan.slot for loan in self.lent]))


@dataclass(frozen=True)
class Target:
    """The slice for a job that was stopped for it, once it is pending again.

    Attributes:
        node, gpu: where there was room for it.
        until: after this time (unix seconds) the job is served like any other.
    """

    profile: Profile
    node: str
    until: float
    gpu: int = 0


@dataclass(frozen=True)
class ElasticJob:
    """A training job.

    Attributes:
        speeds: of each profile that it may have, its speed relative to the whole GPU; 0 if it does not fit.
        nodes: where it may run; None: anywhere.
        place: where it runs; None: it is pending.
        since: when it started.
        restarts: how often it was stopped so far, for any reason. `hits`: by a reclaim or by Slurm's preemption.
        restart_s: seconds of its speed that it loses if it is stopped, and starts again.
        left_s: remaining seconds on the whole GPU; infinite if unknown.
        needs_s: the same, as the job itself states it; None: it does not.
        reported: whether its current run has reported anything.
        target: the slice that it is to get next; None: any.
        cpus: number of CPUs that it requests; 0: unknown. `memory`: MiB that it holds, or requests if it is pending.
        stopped: whether it is pending only because it was stopped for another slice.
        shares: whether it shares its slice or is about to, so that it is not stopped for another one.
    """

    job: int
    speeds: Mapping[Profile, float]
    account: str = ""
    nodes: frozenset[str] | None = None
    place: SlotReference | None = None
    since: float = 0.0
    restarts: int = 0
    hits: int = 0
    restart_s: float = 60.0
    left_s: float = math.inf
    needs_s: float | None = None
    reported: bool = False
    target: Target | None = None
    cpus: int = 0
    memory: int = 0
    stopped: bool = False
    shares: bool = False

    @property
    def ends_s(self) -> float:
        """Maximum remaining seconds on the whole GPU, by its time limit and its own statement."""
        return self.left_s if self.needs_s is None else min(self.left_s, self.needs_s)

    @cached_property
    def speed_items(self) -> tuple[tuple[Profile, float], ...]:
        """The speeds in a hashable form."""
        return tuple(self.speeds.items())

    @property
    def changes(self) -> int:
        """Upper bound on how often it was stopped for another reason than that its slice was needed."""
        return max(0, self.restarts - self.hits)


@dataclass(frozen=True)
class Release:
    """A pending job is released with a profile, and is expected on a GPU (supply may find another).

    `reserved`: inference is expected to need the space.
    """

    job: int
    profile: Profile
    node: str
    gpu: int
    reserved: bool = False


@dataclass(frozen=True)
class Grow:
    """A running job is worth stopping, to start again on a larger profile, on a GPU that has room for it.

    `faster` is the new speed over the old one.
    """

    job: int
    before: Profile
    profile: Profile
    node: str
    gpu: int
    faster: float


@dataclass(frozen=True)
class Division:
    """A new division of a GPU.

    Attributes:
        profiles: profile of each job there that does not keep its slice.
        jobs: number of jobs on it then.
    """

    node: str
    gpu: int
    profiles: Mapping[int, Profile]
    jobs: int


@dataclass(frozen=True)
class Lending:
    """One round's decisions. `short`: the part of the reserve that does not fit even if nothing more is lent."""

    grants: tuple[Release, ...]
    grows: tuple[Grow, ...]
    divisions: tuple[Division, ...]
    lacking: Mapping[int, Reason]
    short: Mapping[Profile, int]


def usual_speed(geometry: Geometry, profile: Profile) -> float:
    """Return the expected speed of unknown training: the square root of its share of compute slices.

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

"""Define the planner's input and result as plain values. Times are unix seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from math import inf
from operator import itemgetter
from typing import NamedTuple

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot, layout_of
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import WHOLE, JobRow
from slurm_migbatch.slurm.preemption import Ending

_slot_of = itemgetter(0)


class Lease(NamedTuple):
    """A slot that is taken: by a run of a job, or by a zombie (an instance that could not be destroyed; job None).

    `until` is when it should be free by the job's time limit; None without a limit. With `guest` Slurm does not
    count it under its profile: the job started as a guest of another, which has ended. With `stopping` migbatchd stops
    the job, and `until` is when it should have ended.
    """

    slot: Slot
    job: int | None = None
    until: float | None = None
    guest: bool = False
    stopping: bool = False


@dataclass(frozen=True, init=False)
class Gpu:
    """One GPU.

    Attributes:
        offered: the free slots of the plan that the node has now.
        warm: the idle instances that lie on it.
        occupied: slots of jobs and zombies; `leased`: of jobs alone.
        free: slots of the plan that touch none that is occupied.
        busy: occupied slots in their order, each with the time at which it should be free.
    """

    uuid: str
    geometry: Geometry
    leases: tuple[Lease, ...]
    offered: Layout
    warm: Layout
    # computed once: an unchanged GPU is the same object from round to round
    occupied: Layout = field(init=False, repr=False, compare=False)
    leased: Layout = field(init=False, repr=False, compare=False)
    free: Layout = field(init=False, repr=False, compare=False)
    busy: tuple[tuple[Slot, float | None], ...] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        uuid: str,
        geometry: Geometry,
        leases: tuple[Lease, ...] = (),
        offered: Layout = EMPTY,
        warm: Layout = EMPTY,
    ) -> None:
        occupied = leased = layout_of(tuple([lease.slot for lease in leases]))
        jobs = tuple([lease.slot for lease in leases if lease.job is not None])
        if len(jobs) < len(leases):
            leased = layout_of(jobs)
        busy = [(lease.slot, lease.until) for lease in leases]
        busy.sort(key=_slot_of)
        free = offered.clear_of(occupied.mask)
        self.__dict__.update(uuid=uuid, geometry=geometry, leases=leases, offered=offered, warm=warm)
        self.__dict__.update(occupied=occupied, leased=leased, free=free, busy=tuple(busy))


class Mode(Enum):
    """Allowed changes to a node's supply."""

    OPEN = "open"  # plan freely
    FROZEN = "frozen"  # its offers remain and count; nothing is changed, because the node might not receive it
    WITHDRAWN = "withdrawn"  # used slots only: Slurm would start jobs there that fail
    CLOSED = "closed"  # Slurm starts nothing there; its plan remains, and its offers are not counted


@dataclass(frozen=True)
class Node:
    """One node: its GPUs, Slurm's counts in use, and the constant sum of its mig counts.

    `unlocated` are the slices of running jobs without a lease yet: their slots are unknown. `asleep`: it is powered
    down, so a job there waits until it has booted. `uncounted`: slices of jobs that Slurm's counts in use lack. After
    slurmctld was restarted they have, of a type with count 0 in slurm.conf, only those of the first job (22.05 to
    26.05), and after `scontrol reconfigure` sometimes none (24.11 and 26.05).
    """

    name: str
    gpus: tuple[Gpu, ...]
    used: Mapping[Profile, int] = field(default_factory=dict)
    unlocated: Mapping[Profile, int] = field(default_factory=dict)
    total: int = 1 << 30
    mode: Mode = Mode.OPEN
    asleep: bool = False
    uncounted: Mapping[Profile, int] = field(default_factory=dict)

    @cached_property
    def leased(self) -> Counter[Profile]:
        """Slices of jobs that have a lease, as far as Slurm counts them under their profiles."""
        leases = [lease for gpu in self.gpus for lease in gpu.leases if lease.job is not None and not lease.guest]
        return Counter([lease.slot.profile for lease in leases])

    @cached_property
    def kinds(self) -> frozenset[Profile]:
        """The profiles that its GPUs can have."""
        return frozenset([info.profile for gpu in self.gpus for info in gpu.geometry.profiles])

    @cached_property
    def unmatched(self) -> Counter[Profile]:
        """Slices that are in use on unknown free slots.

        The larger of two bounds: Slurm's counts beyond the leases, and jobs without a lease. The first alone is too low
        if a node has reported neither the end of one job nor the start of another.
        """
        leased = self.leased
        beyond_leases = Counter({p: n - leased[p] for p, n in self.used.items() if n > leased[p]})
        return beyond_leases | Counter(self.unlocated) if self.unlocated else beyond_leases


class DemandShape:
    """Pool, slices on each node and number of nodes of a demand; the hash is computed once.

    `slices`: one profile for each slice on a node, the largest first. `single`: whether this is one slice in total.
    """

    __slots__ = ("_hash", "_key", "pool", "single", "slices")

    def __init__(self, pool: frozenset[str], parts: tuple[tuple[Profile, int], ...], nodes: int) -> None:
        self._key = (pool, parts, nodes)
        self.pool = pool
        self._hash = hash(self._key)
        self.slices = tuple(sorted((p for p, n in parts for _ in range(n)), reverse=True))
        self.single = nodes == 1 and len(self.slices) == 1

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, DemandShape) and self._hash == other._hash and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash


#: Demands of one shape usually share one object.
_shape_of = lru_cache(maxsize=256)(DemandShape)


@dataclass(frozen=True)
class Demand:
    """Needs of pending work, in Slurm's order of consideration.

    `parts` are slices on each of `nodes` nodes; `copies` equal jobs (array tasks). `pool` names the nodes on which
    Slurm could start it. `limit_s` is its time limit. Demands that share a value of `apart` (components of one
    heterogeneous job) are useful only all together, each on nodes of its own; such a component may have no parts.
    A `loan` gets only what is left after all others; nothing is moved or reserved for it.
    """

    job: int
    parts: tuple[tuple[Profile, int], ...]
    pool: frozenset[str]
    nodes: int = 1
    copies: int = 1
    limit_s: float | None = None
    apart: int | None = None
    loan: bool = False

    #: the properties of the demand that determine where it fits
    kind: DemandShape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.__dict__["kind"] = _shape_of(self.pool, self.parts, self.nodes)

    @property
    def slices(self) -> tuple[Profile, ...]:
        """One profile for each slice on a node, the largest first."""
        return self.kind.slices


@dataclass(frozen=True)
class Reservation:
    """Slots that are reserved for a demand that fits nowhere now: `(node, gpu, slot)`, one for each slice.

    Free space in them goes to no job that would delay it. `copy` distinguishes the tasks of an array. `at` is when the
    last of them should be free; None if something without a time limit blocks it. From `held_from` on no other job
    should get a slice that it waits for, because it has waited much longer than its own or the others' time limits.
    """

    job: int
    copy: int
    places: tuple[tuple[str, str, Slot], ...]
    at: float | None
    held_from: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Restartable:
    """A running training job that may be stopped and restarted elsewhere.

    Attributes:
        demand: its needs after that.
        node, gpu, slot: its current place.
        until: the end of its time limit; None: it has none.
        elsewhere: the other nodes with enough free CPUs and memory for it.
        cpus: its CPUs; `cpus_free`: those that no job or only a loan has on its node.
        memory, memory_free: MiB in the same way; `memory_all`: all of its node's.
    """

    demand: Demand
    node: str
    gpu: str
    slot: Slot
    until: float | None
    elsewhere: frozenset[str] = frozenset()
    cpus: int = 0
    cpus_free: int = 0
    memory: int = 0
    memory_free: float = inf
    memory_all: int = 0

    def leaves_resources(self, row: JobRow, *, moves: bool) -> bool:
        """Return whether its node has CPUs and memory for a pending job; `moves`: if it restarts on another node."""
        cpus, memory = (self.cpus, self.memory) if moves else (0, 0)
        needed = self.memory_all if row.memory_per_node == WHOLE else row.memory_each
        return row.cpus <= self.cpus_free + cpus and needed <= self.memory_free + memory


@dataclass(frozen=True)
class PlannedMove:
    """A running job to stop, and the pending job that gets its place.

    `ending`: how it ends, if the pending job preempts it; None: it is moved, and restarts elsewhere.
    """

    job: int
    waiting: int
    ending: Ending | None = None


@dataclass(frozen=True)
class NodePlan:
    """The new plan of a node.

    `layouts`: GPU uuid -> every slot that its jobs may have, used and free. `offers`: free slots by profile that Slurm
    may count. `withdrawn`: profiles with an unused slot in the old plan that is not in this one.
    `fixed`: the slots must not be changed now, only Slurm's counts. `open`: Slurm may start jobs there. `held_back`:
    slices in use by profile for which a reservation has waited too long: once they end, no other job should get them;
    and those for which Slurm would keep the node free (`supply.planned_starts`).
    """

    node: str
    layouts: Mapping[str, Layout]
    offers: Mapping[Profile, int]
    withdrawn: frozenset[Profile] = frozenset()
    fixed: bool = False
    open: bool = True
    held_back: Mapping[Profile, int] = field(default_factory=dict)


class Placed(NamedTuple):
    """A demand for which supply was found: on which nodes, and how many of its copies.

    `standing`: whether all of it is already offered, so that Slurm only has to start it.
    """

    nodes: tuple[str, ...]
    copies: int
    standing: bool


@dataclass(frozen=True)
class ClusterPlan:
    """The plans of all nodes."""

    nodes: Mapping[str, NodePlan]
    reservations: tuple[Reservation, ...] = ()
    placed: Mapping[int, Placed] = field(default_factory=dict)
    #: slices of each of these jobs on each of its nodes
    parts: Mapping[int, tuple[tuple[Profile, int], ...]] = field(default_factory=dict)
    #: the demands that it was made for
    demands: Sequence[Demand] = ()
    #: number of jobs in `waiting`
    waiting_count: int = 0
    #: those of them that can never start: components that cannot have nodes of their own, even if all nodes are free
    unplaceable: frozenset[int] = frozenset()
    #: node -> profiles that Slurm counts as used beyond what leases and plan explain; the node is left unchanged
    unexplained: Mapping[str, Mapping[Profile, int]] = field(default_factory=dict)
    moves: tuple[PlannedMove, ...] = ()

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Jobs without supply for all of their copies now, loans last; some have a reservation."""
        placed, none = self.placed, Placed((), 0, False)
        waiting = [d for d in self.demands if d.parts and placed.get(d.job, none).copies < d.copies]
        return tuple(dict.fromkeys([d.job for loan in (False, True) for d in waiting if d.loan is loan]))

    def given(self) -> dict[str, Counter[Profile]]:
        """Return by node how many slices the demands that have a place get there at most, by profile.

        The plan does not say on how many of its nodes each copy is.
        """
        counts: dict[str, Counter[Profile]] = {}
        for job, placed in self.placed.items():
            for profile, count in self.parts.get(job, ()):
                for node in placed.nodes:
                    counts.setdefault(node, Counter())[profile] += count * placed.copies
        return counts

    def offers(self) -> Counter[Profile]:
        """Return the number of free slots by profile, over all nodes on which Slurm starts jobs."""
        total: Counter[Profile] = Counter()
        for node in self.nodes.values():
            if node.open:
                for profile, count in node.offers.items():
                    total[profile] += count
        return total

"""Define the data of the simulated slurmctld: settings, partitions, nodes, jobs, and what runs the jobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from slurm_migbatch.lab.slurm.clock import TimedEvent
from slurm_migbatch.site import PREEMPT_EXEMPT
from slurm_migbatch.slurm.client import WHOLE, JobRow
from slurm_migbatch.slurm.times import parse_duration

_EXEMPT_S: Final = parse_duration(PREEMPT_EXEMPT) or 0.0


@dataclass(frozen=True)
class SlurmSettings:
    """Behaviour of the simulated Slurm; times in seconds.

    Attributes:
        release: of Slurm; up to 23.02 a new GRES of a pending job is added to the old one.
        cycle_s: longest time from a change (a submission, an end, an update) to the scheduling pass that considers it;
            also the minimum time between two passes. Slurm's own is about 1 with `bf_interval=1`.
        backfill_s: minimum time between two passes that backfill; passes between them stop at the first job of a
            partition that has to wait for resources, like Slurm's main scheduler.
        backfill_depth: jobs that get a reservation in one pass (bf_max_job_test).
        backfill_window_s: how far ahead reservations are made (bf_window).
        requeue_delay_s: time after a requeue before which the job may not begin.
        requeued_last: whether a requeued job comes after those of its priority that were submitted before its
            requeue, as in Slurm with priority/multifactor, where jobs may have the same priority. With priority/basic
            each job has a priority of its own and keeps its position.
        exempt_s: how long a job must have run before it may be preempted (PreemptExemptTime; the default is what
            `migbatch install` writes).
        over_limit_s: how far a job may exceed its time limit (OverTimeLimit).
        kill_s: from SIGTERM to the end of the Epilog, for jobs on nodes that are not simulated.
        listing_s, update_s: duration of one listing of jobs or nodes, and of one change request.
    """

    release: tuple[int, int] = (24, 11)
    cycle_s: float = 1.0
    backfill_s: float = 1.0
    backfill_depth: int = 500
    backfill_window_s: float = 86_400.0
    requeue_delay_s: float = 120.0
    requeued_last: bool = False
    exempt_s: float = _EXEMPT_S
    over_limit_s: float = 0.0
    kill_s: float = 2.0
    listing_s: float = 0.0
    update_s: float = 0.0

    @property
    def forgets(self) -> bool:
        """Whether a new GRES replaces a pending job's earlier request."""
        return self.release >= (23, 11)


@dataclass(frozen=True)
class SimulatedPartition:
    """A partition: its PriorityTier, and whether its jobs may be requeued for jobs of a higher tier (PreemptMode)."""

    name: str
    tier: int = 1
    preempted: bool = False


class Holding(NamedTuple):
    """A job's resources on each of its nodes: GRES by type, CPUs, and when its limit ends it (infinite: never)."""

    taken: Mapping[str, int]
    cpus: int
    end: float
    memory: int = 0  # MiB


@dataclass
class NodeRecord:
    """slurmctld's data of a node. Change `gres`, `states` and `completing` through `Slurmctld.set_node` only.

    Attributes:
        conf: slurm.conf's and slurmd's mig counts by type. `gres`: the current counts. `used`: counts held by jobs.
        completing: number of jobs whose Epilogs have not run; until they have, no job is started on the node.
        memory: MiB; 0: memory is not simulated, and jobs start whatever they request.
        holdings: resources that each running job holds on the node, by job id.
        version: increases with every change that affects when a job could start on the node.
    """

    name: str
    index: int
    conf: dict[str, int]
    gres: dict[str, int]
    partitions: tuple[str, ...] = ()
    states: set[str] = field(default_factory=lambda: {"IDLE"})
    features: frozenset[str] = frozenset()
    cpus: int = 64
    memory: int = 0
    reason: str = ""
    other_gres: str = ""
    used: Counter[str] = field(default_factory=Counter)
    cpus_used: int = 0
    memory_used: int = 0
    completing: int = 0
    holdings: dict[int, Holding] = field(default_factory=dict)
    version: int = 0

    @property
    def open(self) -> bool:
        """Whether the node's state allows jobs to be started on it."""
        return self.states <= {"IDLE", "MIXED", "ALLOCATED"}

    def free(self, kind: str) -> int:
        """Return how many of a type could be given to a job now.

        Below zero if less is configured than in use.
        """
        return self.gres.get(kind, 0) - self.used[kind]

    def lacks(self, shape: Shape) -> tuple[int, int]:
        """Return how many CPUs and MiB are missing for a job to start now; none if below 1."""
        return (
            shape.cpus - (self.cpus - self.cpus_used),
            self.needed(shape) - (self.memory - self.memory_used) if self.memory else 0,
        )

    def needed(self, shape: Shape) -> int:
        """Return the MiB that a job takes."""
        return self.memory if shape.memory == WHOLE else shape.memory


class Shape(NamedTuple):
    """Properties that decide where a pending job can start.

    Jobs of equal shape wait for the same resources; only their time limits differ.
    """

    partition: str
    need: tuple[tuple[str, int], ...]  # GRES by type on each node; 0: one must be free, but none is taken
    nodes: int = 1
    requested: str = ""
    features: str = ""
    cpus: int = 0  # on each node
    array: int | None = None  # id of an array with a throttle
    het: int | None = None
    excluded: str = ""
    memory: int = 0  # MiB on each node, or `WHOLE`


@dataclass
class QueuedArray:
    """A job array: its pending tasks that share a row, how many run, and how many may."""

    waiting: list[int]
    throttle: int | None = None
    running: int = 0


@dataclass
class Facts:
    """Data of a job besides its row.

    Attributes:
        submitted, started: its first submission and its first start; unix seconds.
        priority: its priority when not held.
        node, job: GRES by type, from --gres (on each node) and from options like --gpus (in all). A Slurm that does
            not forget (`SlurmSettings.forgets`) keeps types with count 0, and the job then needs a free one of them.
        after: its state after its Epilogs have run: "PENDING" or an end state.
        epilogs: nodes on which its Epilog has not ended.
        killed: when it was last signalled to end.
        limit: the timer of its time limit.
        excluded: nodes that it must not have.
    """

    submitted: float
    priority: int
    node: dict[str, int]
    job: dict[str, int]
    started: float | None = None
    after: str = ""
    epilogs: tuple[str, ...] = ()
    killed: float = -math.inf
    limit: TimedEvent | None = None
    excluded: str = ""


@dataclass(frozen=True)
class EndedJob:
    """A job that has left the queue: unix times of its first submission, first start and end."""

    job_id: int
    name: str
    submit: float
    start: float | None
    end: float
    restarts: int
    state: str
    row: JobRow


class Machines(Protocol):
    """Interface of what runs jobs: the simulated nodes."""

    def launch(self, row: JobRow) -> None:
        """Run Prologs and script of a job that was given its nodes.

        `Slurmctld.completed` and `Slurmctld.released` are called when they have ended.
        """

    def signal(self, row: JobRow, name: str) -> None:
        """Deliver a signal to script and steps."""

    def terminate(self, row: JobRow) -> None:
        """Send SIGTERM, SIGKILL after KillWait, and run the Epilogs; then call `Slurmctld.released`.

        The job's resources are already free.
        """


class NoMachines:
    """`Machines` without nodes: jobs run until the caller ends them; killed jobs are released after `kill_s`."""

    def __init__(self, kill_s: float, after: Callable[[float, Callable[[], object]], object]) -> None:
        self._kill_s, self._after = kill_s, after
        self.released: Callable[[int], object] = lambda job: None

    def launch(self, row: JobRow) -> None:
        """Do nothing."""

    def signal(self, row: JobRow, name: str) -> None:
        """Do nothing."""

    def terminate(self, row: JobRow) -> None:
        """Release the job after `kill_s`."""
        self._after(self._kill_s, lambda: self.released(row.job_id))


def positive(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts without zeros."""
    return {kind: count for kind, count in counts.items() if count > 0}

"""Define what the controller needs of Slurm: rows of jobs and nodes, a few commands, and errors.

Backends (`cli.py` over Slurm's own commands, and others) implement `SlurmClient` and return the same rows
for any Slurm version. A backend that cannot observe raises `SlurmError`; it never returns fewer jobs than there
are, because an empty observation would look like an empty queue and free every slice. A job of which it can read
only the id is `UNREAD`: neither pending nor active, but present.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, Final, Protocol, cast

from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from slurm_migbatch.slurm.preemption import PreemptionRules
from slurm_migbatch.slurm.states import WAITING


class SlurmError(RuntimeError):
    """Slurm did not answer or refused; nothing may be concluded from it."""


class SlurmTimeout(SlurmError):
    """Slurm did not answer in time; a change may be carried out all the same, now or later."""


class SlurmRefused(SlurmError):
    """Slurm refused some of several changes; the others are done.

    Attributes:
        refused: job id or node name, as it was given -> Slurm's message.
    """

    def __init__(self, refused: Mapping[str, str], asked: int) -> None:
        reasons = [f"{name}: {why}" for name, why in list(refused.items())[:5]]
        omitted = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        of = f"{len(refused)} of {asked} changes" if asked > 1 else "the change"
        super().__init__(f"Slurm rejected {of}: {'; '.join(reasons)}{omitted}")
        self.refused = dict(refused)


#: Base states in which a job holds or may still hold its allocation.
ACTIVE = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
)

#: Slurm's limit of one string of a job, in bytes; it checks it after the submit filter.
SLURM_LIMIT: Final = 1024

#: State of a job whose row could not be read; only its id is known, and `reason` says why.
UNREAD = "UNREAD"

#: Largest difference between hosts' clocks, s; the smallest time limit is a minute.
_CLOCKS_S: Final = 30.0

POWERED_DOWN: Final = "POWERED_DOWN"
#: Node flags of a reservation with MAINT: Slurm starts its jobs there, and no others.
_MAINTENANCE: Final = frozenset({"MAINT", "MAINTENANCE"})
#: Node flags (scontrol's spelling) that keep Slurm from starting jobs on a node, `POWERED_DOWN` alone excepted.
CLOSED_STATES = frozenset(
    {
        "BLOCKED",  # by a job with --exclusive=topo, from 24.05 on: sinfo(1)
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "ERROR",
        "FAIL",
        "FAILING",
        "FUTURE",
        "INVAL",
        "INVALID_REG",
        *_MAINTENANCE,
        "NOT_RESPONDING",
        "NO_RESPOND",
        POWERED_DOWN,
        "POWERING_DOWN",
        "POWER_DOWN",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "UNKNOWN",
    }
)

#: Node flags by which Slurm saves power, and that of a node that it has given up.
_SILENT_STATES: Final = frozenset({POWERED_DOWN, "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP", "DOWN"})


WHOLE: Final = -1
"""In `JobRow.memory_per_node`: all memory of each node, as with `--mem=0` and on sites without a default."""
OTHERS: Final = 0
"""In `JobRow.after`: the job waits for other jobs too, whose ids were not read."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job as Slurm shows it. Times are unix seconds.

    Array tasks that have not been started share one row with the array's own id, with
    `array_task` such as "4-400:2%4" and `tasks` their number; one that was requeued or changed
    individually has its own row. `start` of a pending job is Slurm's estimate, if any.
    """

    job_id: int
    array_job: int | None = None
    array_task: str | None = None
    het_job: int | None = None
    uid: int = 0
    user: str = ""
    account: str = ""
    partition: str = ""  # comma-separated if a pending job may go to several
    name: str = ""
    state: str = "PENDING"
    reason: str = ""
    priority: int = 0
    submit: float = 0.0
    start: float | None = None
    end: float | None = None
    time_limit_s: int | None = None  # None: unlimited or not set
    nodes: tuple[str, ...] = ()
    num_nodes: int = 1
    requested_nodes: str = ""
    gres: str = ""  # --gres per node as Slurm shows it, "gres:mig:1g.10gb:2" or "gres/mig:..."
    comment: str = ""
    restarts: int = 0
    eligible: float | None = None  # earliest start; None: depends on something else (another job, a hold)
    features: str = ""  # --constraint
    cpus: int = 0  # total over all nodes
    tasks: int = 1  # array tasks in this row
    throttle: int | None = None  # array tasks that may run at once (%n); None: no limit
    reservation: str = ""  # --reservation, comma-separated if several; read only while a node is reserved
    gid: int | None = None
    qos: str = ""
    wckey: str = ""
    #: jobs that it still waits for (--dependency), ascending, of arrays the array's id; `OTHERS` first: not all of them
    after: tuple[int, ...] = ()
    memory_per_node: int = 0  # MiB, or `WHOLE`; 0: it requests memory per CPU, or it is unknown
    memory_per_cpu: int = 0  # MiB
    time_min_s: int | None = None  # --time-min; read only while a node will be reserved
    exclusive: bool = False  # --exclusive, or its partition's: only nodes without other jobs

    @property
    def least_time_s(self) -> int | None:
        """The shortest time limit with which Slurm may start it: backfill shortens --time down to --time-min."""
        return self.time_min_s or self.time_limit_s

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of its partitions; a pending job may have several."""
        return tuple([name for name in self.partition.split(",") if name])

    @property
    def cpus_per_node(self) -> int:
        """CPUs that it takes on each of its nodes."""
        return -(-self.cpus // max(1, self.num_nodes))

    def memory_on(self, node: NodeRow) -> int:
        """Return the MiB that it takes on a node."""
        return node.memory if self.memory_per_node == WHOLE else self.memory_each

    @property
    def memory_each(self) -> int:
        """MiB that it takes on each of its nodes, or `WHOLE`."""
        return self.memory_per_node or self.memory_per_cpu * self.cpus_per_node

    def has_resources_on(self, node: NodeRow) -> bool:
        """Return whether other jobs leave it a node with enough CPUs and memory, as far as they are known."""
        if (self.exclusive and node.cpus_used) or node.owner not in ("", self.user):
            return False
        return (not node.cpus or self.cpus_per_node <= node.cpus_free) and self.memory_on(node) <= node.memory_free

    @property
    def pending(self) -> bool:
        """Whether it is pending, for any reason."""
        return self.state in WAITING

    @property
    def active(self) -> bool:
        """Whether it holds an allocation, or is releasing it."""
        return self.state in ACTIVE

    @property
    def running(self) -> bool:
        """Whether its processes may run. Those of STOPPED may: SIGCONT from anywhere but Slurm leaves that state."""
        return self.state in ("RUNNING", "STOPPED")

    @property
    def unread(self) -> bool:
        """Whether it exists, pending or running, but nothing else is known of it."""
        return self.state == UNREAD

    def with_ending_run_count(self, now: float) -> JobRow:
        """Return the row with the restart count of the run that is still ending, if the job has been requeued.

        From the moment of a requeue, also by preemption, Slurm shows COMPLETING with the count of the next run, that
        run's expected start and end, and the old submit time (22.05 to 26.05). The submit time and the next run's begin
        time change only with PENDING. `now`: unix seconds.
        """
        ended = self.end is not None and self.end <= now + _CLOCKS_S
        if self.state != "COMPLETING" or not self.restarts or ended:
            return self
        return replace(self, restarts=self.restarts - 1, start=None, end=None)


_OpenRow: Any = make_dataclass("_OpenRow", [row.name for row in fields(JobRow)], slots=True, eq=False, repr=False)


def row_of(*values: object) -> JobRow:
    """Return a row from the values of all fields, in the order of the fields.

    Takes a fifth of the time of `JobRow(...)`, because a frozen dataclass calls a function for each field. The object
    is created as a class that is not frozen and has the same slots; then its class becomes `JobRow`.
    """
    row = _OpenRow(*values)
    row.__class__ = JobRow
    return cast(JobRow, row)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as Slurm shows it; counts are of the gres `mig` alone, by type ("1g.10gb.me")."""

    name: str
    states: frozenset[str]
    gres: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    partitions: tuple[str, ...] = ()
    reason: str = ""
    features: frozenset[str] = frozenset()
    cpus: int = 0
    cpus_used: int = 0
    other_gres: str = ""  # gres other than mig, which a new Gres= has to repeat: "gpu:h100:4"
    reservations: frozenset[str] = frozenset()  # active jobs that hold it
    set_aside: bool = False  # whether it is now limited to jobs of a reservation
    free_for_s: int = 0  # until a coming reservation limits it to its jobs, rounded up; 0: none is known
    memory: int = 0  # MiB, without those reserved for the system
    memory_used: int = 0  # MiB of jobs; 0 if memory is no consumable resource of the site
    owner: str = ""  # the only user who may use it while he has jobs there (--exclusive=user, or their partition's)

    @property
    def cpus_free(self) -> int:
        """CPUs that no job has."""
        return self.cpus - self.cpus_used

    @property
    def memory_free(self) -> float:
        """MiB that no job has; infinite if memory is no consumable resource, or no job has any."""
        return self.memory - self.memory_used if self.memory_used else math.inf

    @property
    def open(self) -> bool:
        """Whether Slurm may start jobs on it, at least of its reservation; a powered-down node is powered up for it."""
        return not self._closing or self.asleep

    @property
    def asleep(self) -> bool:
        """Whether it is powered down to save power and will be powered up for a job."""
        return POWERED_DOWN in self.states and not self._closing - {POWERED_DOWN}

    @property
    def _closing(self) -> frozenset[str]:
        """The flags that keep Slurm from starting jobs on it."""
        closing = self.states & CLOSED_STATES
        return closing - _MAINTENANCE if closing and self.reservations else closing

    @property
    def dynamic(self) -> bool:
        """Whether its slurmd was started with -Z: slurm.conf has no line for it."""
        return "DYNAMIC_NORM" in self.states

    @property
    def waking(self) -> bool:
        """Whether it is being powered up for a job and has not registered yet."""
        return "POWERING_UP" in self.states

    @property
    def silenced(self) -> bool:
        """Whether its host may be off: Slurm has powered it down (SuspendProgram), is about to, waits for it to come up
        again, or lists it as down.
        """
        return bool(self.states & _SILENT_STATES)

    @property
    def invalid(self) -> bool:
        """Whether slurmctld rejected the node's registration (for migbatch: the sum of the mig counts differs)."""
        return bool(self.states & {"INVAL", "INVALID_REG"})


def on_nodes(rows: Iterable[JobRow], nodes: frozenset[str]) -> list[JobRow]:
    """Return the jobs that have one of the nodes."""
    return [row for row in rows if not nodes.isdisjoint(row.nodes)]


class SlurmClient(Protocol):
    """What the controller needs of Slurm. Every method may raise SlurmError."""

    def jobs(self) -> list[JobRow]:
        """Return every pending job and every job that still holds an allocation.

        Pending jobs come in the order in which Slurm considers them (partition tier, priority, age).
        """

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        """Return the jobs that hold an allocation on one of these nodes; much cheaper if the queue is long."""

    def nodes(self) -> list[NodeRow]:
        """Return every node, in any state, except those whose row cannot be read."""

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """Set nodes' GRES: node name -> the whole string, such as "mig:1g.10gb:7,mig:none:9".

        Other gres of a node (gpu) must be part of the string. If Slurm refuses some, the rest is still done and
        `SlurmRefused` names those refused.
        """

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Run `scontrol update JobId=... Key=value ...` for any number of jobs at once.

        Args:
            updates: job id as Slurm writes it ("123", "123_4", "123_[5-7]") -> keys as scontrol spells them (Gres,
                Comment, StartTime, ArrayTaskThrottle, TimeLimit) -> value.

        If Slurm refuses some, the rest is still done and `SlurmRefused` names those refused. Facts (22.05, 24.11,
        26.05):

        - `Gres` of a pending job keeps its submit and eligible times and its priority, as long as some node lists the
          new type, even if it is DOWN. With a type that no node lists the job gets reason BadConstraints and priority
          0, and loses its place in the queue when it is re-typed back. Up to 23.02 the job needs the old type as well
          from then on, though Slurm shows the new one only (`workload/loans.py` has the workaround).
        - `Gres` of a job that has started, or is being started, is refused ("no longer pending execution").
        - `Gres` of a job array's own id re-types the tasks that share its row; running ones are left alone without an
          error. That of "N_4" re-types this task, which then is a row of its own in `jobs` and is detached from its
          array: neither "N" nor "N_[0-9]" reaches it, only "N_4".
        - A job that was just requeued may be re-typed at once, while it is still COMPLETING.
        - `ArrayTaskThrottle` counts for the whole array: 0 means no limit.
        """

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """Requeue running batch jobs. Slurm then delays their start by minutes: `shorten_requeue_delay`.

        Jobs that are pending, completing or ended are not requeued: without this check, Slurm would run a job again
        that has just completed. If Slurm refuses some (unknown, or not to be requeued), the rest is still done and
        `SlurmRefused` names those refused.
        """

    def resume_all(self, job_ids: Iterable[int | str]) -> None:
        """Resume suspended jobs, before they are requeued: by `scontrol suspend` a job loses its priority, and it would
        be held after the requeue. If Slurm refuses some, the rest is still done and `SlurmRefused` names those refused.
        """

    def excluded_nodes(self, job_ids: Iterable[int | str]) -> Mapping[str, str]:
        """Return the nodes that jobs exclude (ExcNodeList) in Slurm's form, for the jobs that exclude any.

        Other text of a job's user may look like this field; then the job seems to exclude nodes.
        """

    def shorten_requeue_delay(self, job_id: int | str) -> None:
        """Reduce the start delay of a requeued job that is pending again to the two seconds that slurmd needs."""

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        """Send a signal ("USR1") to running jobs; jobs that are not running (any more) get none, without an error.

        Args:
            job_ids: of jobs, or of single array tasks as "123_4" (not by their numeric id, see `CliClient`).
            name: the signal without "SIG".
            script: whether the batch script and all its children get it as well as the steps.

        If Slurm refuses some, the others get theirs and `SlurmRefused` names those refused.
        """

    def cancel(self, job_id: int | str, *, running: bool = False) -> None:
        """Cancel a job, or one task of an array ("123_4"); it is no error if it has already ended.

        `running`: only if it is running, for example not once it has been requeued.
        """

    def default_partition(self) -> str:
        """Return the partition of jobs that name none; empty if there is none."""

    def gpu_defaults(self) -> Mapping[str, GpuDefaults]:
        """Return what jobs get for each GPU without requesting it, of each partition that has such defaults."""

    def hidden_partitions(self) -> Collection[str]:
        """Return the partitions that Slurm does not list for everybody, or takes jobs for from root only."""

    def preemption(self) -> PreemptionRules:
        """Return which jobs Slurm may preempt for which others."""

    def backfill_window_s(self) -> float:
        """Return how far ahead Slurm plans the starts of pending jobs, in seconds; 0: it does not backfill."""

    def version(self) -> tuple[int, int]:
        """Return Slurm's release, such as (24, 11)."""


def merge_partitions(rows: Iterable[JobRow]) -> list[JobRow]:
    """Merge a listing with a row per job and partition into one row per job, at the position of its first row.

    Slurm considers such a job once per partition; the first position is the earliest at which it can start.
    """
    merged: dict[int, JobRow] = {}
    partitions: dict[int, list[str]] = {}
    for row in rows:
        first = merged.setdefault(row.job_id, row)
        if first is row and "," not in row.partition:
            continue
        names = partitions.setdefault(row.job_id, [])
        for part in (first, row):
            names.extend(p for p in part.partitions if p not in names)
    for job_id, names in partitions.items():
        row = merged[job_id]
        if len(names) > 1 and row.pending:
            merged[job_id] = replace(row, partition=",".join(names))
    return list(merged.values())

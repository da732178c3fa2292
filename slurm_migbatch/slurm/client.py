"""Slurm as the controller needs it: rows of jobs and nodes, a few commands, and one error.

Backends (`cli.py` over Slurm's own commands; others may follow) implement `SlurmClient` and return the same rows
whatever the Slurm version. A backend that cannot observe raises `SlurmError`; it never returns fewer rows than there
are, because an empty observation would look like an empty queue and free every slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol


class SlurmError(RuntimeError):
    """Slurm could not be asked or refused; nothing may be concluded from it.

    Attributes:
        command: what was run, as an argument list (empty for backends without commands).
        exit_code: its exit status; None where it did not end (timeout) or could not be started.
        stderr: what it said, shortened.
    """

    def __init__(
        self, message: str, command: Sequence[str] = (), exit_code: int | None = None, stderr: str = ""
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.exit_code = exit_code
        self.stderr = stderr


#: Base states in which a job holds or may still hold its allocation.
ACTIVE = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
)

#: Node flags (scontrol's spelling) with which Slurm starts nothing on a node.
CLOSED_STATES = frozenset(
    {
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
        "MAINT",
        "MAINTENANCE",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWER_DOWN",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "UNKNOWN",
    }
)


@dataclass(frozen=True)
class JobRow:
    """One job as Slurm shows it. Times are unix seconds.

    The tasks of a job array that have not been started yet share one row, of the array's own id, with
    `array_task` such as "4-400:2%4" and `tasks` their number. `start` of a pending job is Slurm's estimate, if any.
    """

    job_id: int
    array_job: int | None = None
    array_task: str | None = None
    het_job: int | None = None
    uid: int = 0
    user: str = ""
    account: str = ""
    partition: str = ""  # names joined by commas where a pending job may go to several
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
    eligible: float | None = None  # not before this; None: depends on something else (another job, a hold)
    features: str = ""  # --constraint
    cpus: int = 0  # in all
    tasks: int = 1  # array tasks that this row stands for
    throttle: int | None = None  # array tasks that may run at once (%n); None: no limit

    @property
    def pending(self) -> bool:
        """Whether it waits for resources (or for something else first)."""
        return self.state == "PENDING"

    @property
    def active(self) -> bool:
        """Whether it holds an allocation, or is giving it back."""
        return self.state in ACTIVE


@dataclass(frozen=True)
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
    other_gres: str = ""  # gres other than mig, as a new Gres= has to repeat it: "gpu:h100:4"

    @property
    def open(self) -> bool:
        """Whether Slurm may start jobs on it."""
        return not self.states & CLOSED_STATES

    @property
    def invalid(self) -> bool:
        """Whether slurmctld rejected the node's registration (for us: the mig counts differ in sum)."""
        return bool(self.states & {"INVAL", "INVALID_REG"})


class SlurmClient(Protocol):
    """What the controller asks of Slurm. Every method may raise SlurmError."""

    def jobs(self) -> list[JobRow]:
        """Every pending job and every job that still holds an allocation.

        Pending jobs come in the order in which Slurm considers them (partition tier, priority, age).
        """

    def nodes(self) -> list[NodeRow]:
        """Every node, whatever its state."""

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """Set nodes' GRES: node name -> the whole string, such as "mig:1g.10gb:7,mig:none:9".

        Other gres of a node (gpu) must be part of the string. Where Slurm refuses some, the rest is still done and
        the error names those refused.
        """

    def update_job(self, job_id: int, **fields: str) -> None:
        """`scontrol update JobId=... Key=value`: keys as scontrol spells them (Gres, Comment, StartTime)."""

    def requeue(self, job_id: int) -> None:
        """Put a running batch job back into the queue. Slurm then delays its start by about two minutes: `hasten`."""

    def hasten(self, job_id: int) -> None:
        """Drop the start delay of a requeued job that is pending again, but for the two seconds that slurmd needs."""

    def hold(self, job_id: int) -> None:
        """Keep a pending job from starting."""

    def release(self, job_id: int) -> None:
        """Undo `hold`."""

    def cancel(self, job_id: int) -> None:
        """End a job for good; one that has gone already is no error."""

    def default_partition(self) -> str:
        """The partition of jobs that name none; empty where there is no such."""

    def version(self) -> tuple[int, int]:
        """Slurm's release, such as (24, 11)."""


def merge_partitions(rows: Iterable[JobRow]) -> list[JobRow]:
    """One row per job from a listing that has one per job and partition, at the place of the first.

    Slurm considers such a job once per partition; the first place is the one at which it can start.
    """
    found: dict[int, JobRow] = {}
    partitions: dict[int, list[str]] = {}
    for row in rows:
        found.setdefault(row.job_id, row)
        names = partitions.setdefault(row.job_id, [])
        names.extend(p for p in row.partition.split(",") if p and p not in names)
    merged = []
    for job_id, row in found.items():
        names = partitions[job_id]
        merged.append(row if len(names) < 2 or not row.pending else replace(row, partition=",".join(names)))
    return merged

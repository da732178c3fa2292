"""Keep what the simulated slurmctld knows: the nodes' GRES, and the jobs that wait and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.pending import Key, PendingQueue
from slurm_migbatch.lab.slurm.placing import Placing
from slurm_migbatch.lab.slurm.records import (
    EndedJob,
    Facts,
    NodeRecord,
    QueuedArray,
    Shape,
    SimulatedPartition,
    SlurmSettings,
    positive,
)
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError
from slurm_migbatch.slurm.taskexpr import expand_tasks, fold_tasks

GRES: Final = "mig"
PRIORITY: Final = 1000
"""Priority of jobs submitted without one: they start in the order of their submission."""
REFUSED: Final = "Requested node configuration is not available"
NO_SUCH_JOB: Final = "Job dependency problem"
_STARTABLE: Final = frozenset(
    {"", "None", "Resources", "Priority", "ReqNodeNotAvail", "BeginTime", "JobArrayTaskLimit"}
)


class SimulatedQueue(ABC):
    """Nodes and jobs of `Slurmctld`, and what users and admins change of them; it starts no job.

    Args:
        partitions: those with a tier or preemption of their own; others have tier 1.
    """

    def __init__(self, clock: VirtualClock, settings: SlurmSettings, partitions: Iterable[SimulatedPartition]) -> None:
        self.clock, self.settings = clock, settings
        self.partitions = {partition.name: partition for partition in partitions}
        self.machines: dict[str, NodeRecord] = {}
        self.queue: dict[int, JobRow] = {}
        self.arrays: dict[int, QueuedArray] = {}
        #: jobs that have left the queue
        self.ended_jobs: dict[int, EndedJob] = {}
        #: those in `ended_jobs` that were tasks of an array, by array
        self.ended_tasks: dict[int, list[EndedJob]] = {}
        #: called with the row of every job whose state changes, and None for one that has left: (job, row)
        self.on_change: Callable[[int, JobRow | None], object] = lambda job, row: None
        self._facts: dict[int, Facts] = {}
        self._pending = PendingQueue()
        self._placing = Placing(self.machines)
        self._active: dict[int, None] = {}
        self._node_rows: dict[str, tuple[int, NodeRow]] = {}
        #: jobs that wait for a job, by its id
        self._waiting_for: dict[int, list[int]] = {}
        self._next = 1

    @abstractmethod
    def _due(self) -> None:
        """Have a pass run soon, as something has changed."""

    # -- the cluster -----------------------------------------------------------------------------------------------

    def add_node(
        self,
        name: str,
        conf: Mapping[str, int],
        *,
        partitions: Iterable[str] = ("gpu",),
        states: Iterable[str] = ("IDLE",),
        features: Iterable[str] = (),
        cpus: int = 64,
    ) -> NodeRecord:
        """Add a node; `conf` are its mig counts by type in slurm.conf and gres.conf."""
        machine = NodeRecord(
            name,
            len(self.machines),
            dict(conf),
            positive(conf),
            tuple(partitions),
            set(states),
            frozenset(features),
            cpus,
        )
        self.machines[name] = machine
        for partition in machine.partitions:
            self.partitions.setdefault(partition, SimulatedPartition(partition))
        self._placing.regrouped()
        self._touch(machine)
        return machine

    def set_node(self, name: str, **changes: Any) -> None:
        """Change a node as root can: any field but its name, its order and what jobs hold on it."""
        machine = self.machines[name]
        for key, value in changes.items():
            if key not in ("gres", "conf", "states", "completing", "features", "partitions", "reason", "cpus"):
                raise ValueError(f"{key} of a node is not to be set")
            setattr(machine, key, value)
        if {"partitions", "features"} & set(changes):
            self._placing.regrouped()
        self._placing.configured()
        self._touch(machine)

    def reconfigure(self) -> None:
        """Do what `scontrol reconfigure` or a restart of slurmctld does.

        slurmd registers, and counts are those of slurm.conf again.
        """
        for machine in self.machines.values():
            self._registered(machine)
            machine.gres = positive(machine.conf)
            self._placing.configured()
            self._touch(machine)

    def restart_slurmd(self) -> None:
        """Restart slurmd, with the effect that this has on 22.05.

        Its registration restores the counts of the types whose count in gres.conf is above 0, and only those.
        """
        for machine in self.machines.values():
            self._registered(machine)
            machine.gres.update(positive(machine.conf))
            self._placing.configured()
            self._touch(machine)

    def register(self) -> None:
        """Let slurmd of every node register, as it does regularly.

        Counts stay; a node whose sum of counts differs from slurm.conf's becomes INVAL.
        """
        for machine in self.machines.values():
            self._registered(machine)

    def _registered(self, machine: NodeRecord) -> None:
        if sum(machine.gres.values()) != sum(machine.conf.values()):
            machine.states = {"IDLE", "DRAIN", "INVALID_REG"}
            self._placing.configured()
            self._touch(machine)

    def _touch(self, machine: NodeRecord) -> None:
        self._placing.changed(machine)
        self._due()

    # -- submissions ------------------------------------------------------------------------------------------------

    def submit(
        self,
        want: str,
        *,
        limit: int | None = None,
        priority: int = PRIORITY,
        tasks: int = 1,
        array: str = "",
        held: bool = False,
        begin: float | None = None,
        after: Iterable[int] = (),
        **fields: Any,
    ) -> int:
        """Submit a batch job.

        Args:
            want: its --gres (on each node), such as "mig:1g.10gb:2".
            limit: --time, seconds.
            priority: of two jobs in partitions of one tier the higher goes first.
            tasks: of a job array with tasks 0 to n-1; or `array`: --array, such as "1-8:2%4".
            held: whether it waits for `release`.
            begin: --begin, unix seconds.
            after: --dependency=afterok:..., ids of jobs or arrays.
            fields: of `JobRow`: partition, name, user, comment, num_nodes, requested_nodes, features, cpus, ...

        Raises:
            SlurmError: no node lists its request, or it depends on a job that never existed.
        """
        row = self._row(want, limit, priority, fields)
        facts = Facts(row.submit, priority, positive(gres_list.readable_counts(row.gres, GRES)), {})
        if not self._placing.listed(self._shape(row, facts)):
            raise SlurmError(f"Batch job submission failed: {REFUSED}")
        task_expression, _, throttle = array.partition("%")
        expanded = expand_tasks(task_expression) if task_expression else range(tasks) if tasks > 1 else ()
        task_numbers = sorted(set(expanded))
        self._next += 1
        self._facts[row.job_id] = facts
        if task_numbers:
            self.arrays[row.job_id] = QueuedArray(task_numbers, int(throttle or 0) or None)
            row = self._array_row(replace(row, array_job=row.job_id))
        if held:
            row = replace(row, priority=0, reason="JobHeldUser", eligible=None)
        elif begin is not None and begin > self.clock.time():
            row = replace(row, reason="BeginTime", eligible=begin)
        row = self._dependent(row, after)
        if row.eligible is not None and row.eligible > self.clock.time():
            self._wake(row.job_id, row.eligible)
        self._put(row)
        return row.job_id

    def _dependent(self, row: JobRow, after: Iterable[int]) -> JobRow:
        """Return the row of a job with dependencies; raises SlurmError if one of them never existed."""
        dependencies = sorted(set(after))
        for job in dependencies:
            if not (job in self.queue or job in self.arrays or job in self.ended_jobs):
                raise SlurmError(f"Batch job submission failed: {NO_SUCH_JOB}")
            self._waiting_for.setdefault(job, []).append(row.job_id)
        return self._awaited(replace(row, after=tuple(dependencies))) if dependencies else row

    def _awaited(self, row: JobRow) -> JobRow:
        """Return the row of a job with dependencies, without those that have completed."""
        states = {job: self._end_state(job) for job in row.after}
        unfinished = tuple(job for job, state in states.items() if state != "COMPLETED")
        if not unfinished:
            now = self.clock.time()
            return replace(row, after=(), reason="None", eligible=now if row.eligible is None else row.eligible)
        failed = any(states[job] for job in unfinished)
        reason = "DependencyNeverSatisfied" if failed else "Dependency"
        return replace(row, after=unfinished, reason=reason, eligible=None)

    def _end_state(self, job: int) -> str:
        """Return the end state of a job, or of an array as a whole; empty if it has not ended."""
        if job in self.arrays:
            if self.arrays[job].waiting or any(row.array_job == job for row in self.queue.values()):
                return ""
            states = {task.state for task in self.ended_tasks.get(job, ())}
            return "COMPLETED" if states <= {"COMPLETED"} else "FAILED"
        return self.ended_jobs[job].state if job in self.ended_jobs else ""

    def submit_het(self, *wants: str, **fields: Any) -> list[int]:
        """Submit a heterogeneous job with a component for each of `wants`; the keywords are those of `submit`."""
        first = self._next
        jobs = []
        for want in wants:
            jobs.append(self.submit(want, **fields))
            self.change(jobs[-1], het_job=first)
        return jobs

    def _row(self, want: str, limit: int | None, priority: int, fields: Mapping[str, Any]) -> JobRow:
        now = self.clock.time()
        values: dict[str, Any] = {"partition": "gpu", "submit": now, "eligible": now, "reason": "None", **fields}
        return JobRow(self._next, gres=self.spelled(want), time_limit_s=limit, priority=priority, **values)

    def spelled(self, want: str) -> str:
        """Return GRES in the form of this release: "gres/mig:1g.10gb:1", up to 23.02 "gres:mig:..."."""
        prefix = "gres/" if self.settings.forgets else "gres:"
        entries = [gres_list.prefix_of(entry)[1] for entry in gres_list.split(want)]
        return ",".join(prefix + entry for entry in entries if entry)

    def change(self, job: int, **fields: Any) -> None:
        """Change any field of a job's row, also those that only slurmctld can; a new `gres` replaces all its needs."""
        row = replace(self.queue[job], **fields)
        if "gres" in fields:
            facts = self._facts[job]
            facts.node, facts.job = positive(gres_list.readable_counts(row.gres, GRES)), {}
        self._put(row)

    # -- the queue -------------------------------------------------------------------------------------------------

    def order(self) -> list[JobRow]:
        """Return pending jobs in Slurm's order, then those that hold or release an allocation."""
        return [*self._pending.rows, *map(self.queue.__getitem__, self._active)]

    @property
    def waiting(self) -> int:
        """Number of rows of pending jobs."""
        return len(self._pending)

    def _put(self, row: JobRow) -> None:
        """Set the job's row and update the queue."""
        self.queue[row.job_id] = row
        if row.pending:
            self._active.pop(row.job_id, None)
            shape = self._shape(row, self._facts[row.job_id]) if self._may(row) else None
            self._pending.put(row, self._key(row), shape)
            self._due()
        else:
            self._pending.drop(row.job_id)
            self._active[row.job_id] = None
        self.on_change(row.job_id, row)

    def _note(self, job: int, reason: str) -> None:
        """Set only the reason of a pending job; this causes no pass and no `on_change`."""
        row = self.queue[job]
        if row.reason != reason:
            self.queue[job] = row = replace(row, reason=reason)
            self._pending.renew(row)

    def _may(self, row: JobRow) -> bool:
        """Return whether the job waits only for resources."""
        if row.priority <= 0 or row.eligible is None or row.eligible > self.clock.time():
            return False
        return row.reason.partition(",")[0] in _STARTABLE

    def _tier(self, row: JobRow) -> int:
        return max((self.partitions[name].tier for name in row.partitions if name in self.partitions), default=1)

    def _key(self, row: JobRow) -> Key:
        task = int((row.array_task or "0").partition("%")[0].partition(",")[0].partition("-")[0])
        leader = row.array_job or row.het_job or row.job_id
        submit = int(row.submit) if self.settings.requeued_last else 0
        return Key(-self._tier(row), -row.priority, submit, leader, task, row.job_id)

    def _shape(self, row: JobRow, facts: Facts) -> Shape:
        need = dict(facts.node)
        for kind, count in facts.job.items():
            need[kind] = need.get(kind, 0) + -(-count // row.num_nodes)
        array = self.arrays.get(row.array_job) if row.array_job is not None else None
        return Shape(
            row.partition,
            tuple(sorted(need.items())),
            row.num_nodes,
            row.requested_nodes,
            row.features,
            row.cpus_per_node,
            row.array_job if array is not None and array.throttle is not None else None,
            row.het_job,
            facts.excluded,
            row.memory_each,
        )

    def _wake(self, job: int, when: float) -> None:
        """Have the job examined again at `when`, its begin time."""

        def begin() -> None:
            row = self.queue.get(job)
            if row is not None and row.pending and row.eligible is not None and row.eligible <= self.clock.time():
                self._put(replace(row, reason="None") if row.reason == "BeginTime" else row)

        self.clock.at(when, begin)

    # -- arrays ----------------------------------------------------------------------------------------------------

    def _array_row(self, row: JobRow) -> JobRow:
        """Return the row that an array's waiting tasks share, updated by them."""
        assert row.array_job is not None
        array = self.arrays[row.array_job]
        throttle = array.throttle if len(array.waiting) > 1 else None  # Slurm shows it only for several tasks
        text = fold_tasks(array.waiting) + (f"%{throttle}" if throttle else "")
        return replace(row, array_task=text, tasks=len(array.waiting), throttle=throttle)

    def split(self, row: JobRow, task: int) -> JobRow:
        """Give a task that shares its array's row a row of its own; the last task keeps the array's row."""
        assert row.array_job is not None
        array = self.arrays[row.array_job]
        array.waiting.remove(task)
        task_row = replace(row, array_task=str(task), tasks=1, throttle=None)
        if array.waiting:
            task_row = replace(task_row, job_id=self._next)
            self._next += 1
            shared = self._facts[row.job_id]
            self._facts[task_row.job_id] = replace(shared, node=dict(shared.node), job=dict(shared.job))
            self._put(self._array_row(row))
        self._put(task_row)
        return task_row

    def throttled(self, array_id: int, throttle: int | None) -> None:
        """Let this many tasks of an array run at once; None: unlimited."""
        array = self.arrays[array_id]
        array.throttle = throttle
        for row in [row for row in self.queue.values() if row.array_job == array_id and row.pending]:
            self._put(self._array_row(row) if row.job_id == array_id and row.tasks == len(array.waiting) else row)

    # -- rows ------------------------------------------------------------------------------------------------------

    def node_row(self, machine: NodeRecord) -> NodeRow:
        """Return the node's row, with the fields that scontrol shows."""
        cached = self._node_rows.get(machine.name)
        if cached is not None and cached[0] == machine.version:
            return cached[1]
        row = NodeRow(
            machine.name,
            frozenset(machine.states),
            gres=dict(machine.gres),
            used=Counter(machine.used),
            partitions=machine.partitions,
            reason=machine.reason,
            features=machine.features,
            cpus=machine.cpus,
            cpus_used=machine.cpus_used,
            memory=machine.memory,
            memory_used=machine.memory_used,
            other_gres=machine.other_gres,
        )
        self._node_rows[machine.name] = machine.version, row
        return row

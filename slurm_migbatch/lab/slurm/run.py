"""Run a workload on the simulated Slurm and nodes, with a controller that is called as in migbatchd's loop.

The controller is one function: it gets a `ControllerInput` and carries out its decision through the simulation's
`slurm` and `nodes`. Its calls of Slurm take virtual time, in which jobs start and end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slurm_migbatch.install.reported import most_counts
from slurm_migbatch.lab.slurm.client import SimulatedSlurm
from slurm_migbatch.lab.slurm.clock import START, VirtualClock
from slurm_migbatch.lab.slurm.jobqueue import NO_SUCH_JOB, PRIORITY
from slurm_migbatch.lab.slurm.nodes import NodeDelays, SimulatedNodes
from slurm_migbatch.lab.slurm.processes import SimulatedProcesses
from slurm_migbatch.lab.slurm.records import EndedJob, SimulatedPartition, SlurmSettings
from slurm_migbatch.lab.slurm.work import Fixed, Work
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.site import WAITING
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError

_IN_VAIN: Final = 1000


@dataclass(frozen=True)
class Submission:
    """One sbatch.

    Attributes:
        at: seconds after the begin of the simulation.
        gres: output of the submit filter: "mig:2g.20gb:1", "mig:loan:1"; if the simulation has a filter, the
            user's request: "mig:auto", "gpu:2".
        work: returns the job's work; called once for each job or array task.
        limit_s: --time, seconds.
        tasks: number of tasks of an array; `array`: its --array, if that is not 0 to tasks-1.
        after: --dependency=afterok, as indexes of earlier submissions in the workload.
        begin_s: --begin=now+..., seconds.
        fields: of `JobRow`: comment, user, uid, account, num_nodes, features, requested_nodes, cpus.
    """

    at: float
    gres: str
    work: Callable[[], Work] = lambda: Fixed(100.0)
    partition: str = "gpu"
    limit_s: int | None = None
    priority: int = PRIORITY
    name: str = ""
    tasks: int = 1
    array: str = ""
    after: tuple[int, ...] = ()
    begin_s: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteNode:
    """A node: its GPUs, and the partitions that it is in."""

    name: str
    gpus: tuple[Geometry, ...]
    partitions: tuple[str, ...] = ("gpu",)
    features: tuple[str, ...] = ()
    cpus: int = 256

    @property
    def counts(self) -> dict[str, int]:
        """Counts of slurm.conf: the smallest slices of each GPU, and enough filler for any layout and for guests."""
        counts: dict[str, int] = {}
        for gpu in self.gpus:
            smallest = min(gpu.profiles, key=lambda info: (info.memory_slices, info.profile.suffix, info.profile))
            kind = smallest.profile.gres_type
            counts[kind] = counts.get(kind, 0) + smallest.max_instances
        counts["none"] = counts.get("none", 0) + sum(counts.values())
        return counts


@dataclass(frozen=True)
class SimulatedSite:
    """A cluster, and all its durations.

    Attributes:
        catalog_nodes: number of catalog nodes; a job for more nodes is refused if no nodes offer its profile.
    """

    nodes: tuple[SiteNode, ...]
    partitions: tuple[SimulatedPartition, ...] = (SimulatedPartition("gpu", 10), SimulatedPartition("train", 1))
    slurm: SlurmSettings = field(default_factory=lambda: SlurmSettings(listing_s=0.02, update_s=0.004))
    times: NodeDelays = field(default_factory=NodeDelays)
    catalog_nodes: int = 2

    @classmethod
    def of(cls, gpu: Geometry, nodes: int, per_node: int) -> SimulatedSite:
        """Return a site of equal nodes, each with `per_node` GPUs."""
        return cls(tuple(SiteNode(f"n{number + 1}", (gpu,) * per_node) for number in range(nodes)))

    def catalog(self) -> dict[str, int]:
        """Return the counts that the DOWN catalog nodes list.

        These are, of every profile, as many as one node could have, and the waiting types.
        """
        counts = dict(WAITING)
        for node in self.nodes:
            for kind, count in most_counts(node.gpus).items():
                counts[kind] = max(counts.get(kind, 0), count)
        return counts


@dataclass(frozen=True)
class RoundTiming:
    """When the controller is called; seconds.

    Attributes:
        every_s: time between two rounds while there are events; `soon_s`: the same after events of a node, or if the
            last round requested another soon.
        idle_s: longest time between two rounds without events. `growth`: factor between successive such pauses;
            infinite: the first one is already `idle_s` long.
        rests: whether there are no rounds while there are neither pending jobs nor events; without lending they would
            have no effect.
        round_s: duration of a round besides its calls of Slurm.
    """

    every_s: float = 1.0
    soon_s: float = 0.2
    idle_s: float = 30.0
    growth: float = math.inf
    rests: bool = False
    round_s: float = 0.0


@dataclass(frozen=True)
class ControllerInput:
    """Input of the controller: queue and nodes at one moment, and the nodes' events since the last round."""

    now: float
    jobs: Sequence[JobRow]
    nodes: Sequence[NodeRow]
    events: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]


Controller = Callable[[ControllerInput], "bool | None"]
"""One round; true if another should follow soon."""


@dataclass(frozen=True)
class WorkloadOutcome:
    """Result of a workload.

    Attributes:
        jobs: every job and array task that ended, by id; times are unix seconds.
        submissions: the job id of each submission, in their order; None if it was refused.
        refusals: the message of each refused submission, by its index in the workload.
        begin: unix seconds of the submission time 0.
        misfits: jobs that found no slice.
        rounds: number of calls of the controller.
    """

    jobs: Mapping[int, EndedJob]
    submissions: tuple[int | None, ...]
    refusals: Mapping[int, str]
    begin: float
    misfits: tuple[int, ...]
    rounds: int


class Stuck(RuntimeError):
    """Jobs are left that can never start; the message names some of them."""


class SlurmSimulation:
    """A site with a workload.

    Args:
        begin: unix seconds of the submission time 0.
    """

    def __init__(self, site: SimulatedSite, workload: Sequence[Submission], begin: float = START) -> None:
        self.clock = VirtualClock(begin)
        self.begin = begin
        self.slurm = SimulatedSlurm(self.clock, site.slurm, site.partitions, auto=True)
        self.nodes = SimulatedNodes(self.clock, self.slurm, times=site.times, auto=True)
        self.processes = SimulatedProcesses(self.clock, self.slurm, self.nodes, self._work)
        for node in site.nodes:
            self.slurm.add_node(
                node.name, node.counts, partitions=node.partitions, features=node.features, cpus=node.cpus
            )
            self.nodes.add(node.name, *node.gpus)
        names = dict.fromkeys(name for node in site.nodes for name in node.partitions)
        for number in range(1, site.catalog_nodes + 1):
            self.slurm.add_node(f"migcatalog{number}", site.catalog(), partitions=names, states=("DOWN",), cpus=256)
        #: changes a submission before Slurm gets it; raises SlurmError if it is refused
        self.submit_filter: Callable[[Submission], Submission] = lambda submission: submission
        #: index of each submission in the workload, by job id (by the array's id for an array)
        self.numbers: dict[int, int] = {}
        self._submissions: list[int | None] = [None] * len(workload)
        self._refusals: dict[int, str] = {}
        self._of: dict[int, Submission] = {}
        self._left = len(workload)
        self._events: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
        self._news = self._soon = True
        self.nodes.on_events = self._on_events
        self.slurm.on_change = self._changed
        for number, submission in enumerate(workload):
            self.clock.at(
                begin + submission.at,
                lambda number=number, submission=submission: self._submit(number, submission),  # type: ignore[misc]
            )

    def run(
        self, controller: Controller, pace: RoundTiming = RoundTiming(), until: float = math.inf
    ) -> WorkloadOutcome:
        """Run until all jobs have ended, for at most `until` seconds. Raises Stuck."""
        rounds = in_vain = 0
        last, idle = self.clock.now, pace.every_s
        while (self._left or self.slurm.queue) and self.clock.now - self.begin < until:
            self._news = self._soon = False
            again = controller(self._observe())
            rounds += 1
            if pace.round_s:
                self.clock.sleep(pace.round_s)
            last = self.clock.now
            self._soon = self._soon or bool(again)
            idle = min(pace.idle_s, idle * pace.growth)
            in_vain += 1
            if self._wait(pace, last, idle, self.begin + until):
                idle, in_vain = pace.every_s, 0
            self._check(in_vain)
        return WorkloadOutcome(
            self.slurm.ended_jobs,
            tuple(self._submissions),
            dict(self._refusals),
            self.begin,
            tuple(self.nodes.misfits),
            rounds,
        )

    def _wait(self, pace: RoundTiming, last: float, idle: float, end: float) -> bool:
        """Let time pass until the next round is due, at most to `end`; return whether there were events."""
        while True:
            due = min(end, last + (pace.soon_s if self._soon else pace.every_s if self._news else idle))
            following = self.clock.following
            resting = pace.rests and not (self._soon or self._news or self.slurm.waiting)
            if following is None or (following > due and not resting):
                if self._left or self.slurm.queue:
                    self.clock.until(due)
                break
            self.clock.step()
            if not (self._left or self.slurm.queue):
                break
        return self._news or self._soon

    def _observe(self) -> ControllerInput:
        rows = self.slurm.nodes()
        jobs = self.slurm.jobs()
        events, self._events = self._events, []
        return ControllerInput(self.clock.now, jobs, rows, events)

    def _check(self, in_vain: int) -> None:
        """Raise Stuck after so many successive rounds without events that none will change anything."""
        if in_vain >= _IN_VAIN and self.clock.following is None and not self._left:
            waiting = [f"{row.job_id} ({row.gres}, {row.reason})" for row in self.slurm.queue.values()][:5]
            raise Stuck(f"there are no further events and {len(self.slurm.queue)} jobs are left: {', '.join(waiting)}")

    # -- events -----------------------------------------------------------------------------------------------------

    def _submit(self, number: int, submission: Submission) -> None:
        self._left -= 1
        try:
            submission = self.submit_filter(submission)
            job = self.slurm.submit(
                submission.gres,
                limit=submission.limit_s,
                priority=submission.priority,
                tasks=submission.tasks,
                array=submission.array,
                partition=submission.partition,
                name=submission.name,
                begin=self.clock.time() + submission.begin_s if submission.begin_s else None,
                after=self._ids(submission.after),
                **submission.fields,
            )
        except SlurmError as error:
            self._refusals[number] = str(error).removeprefix("Batch job submission failed: ")
            return
        self._submissions[number] = job
        self.numbers[job] = number
        self._of[job] = submission

    def _ids(self, after: Sequence[int]) -> list[int]:
        """Return the ids of submissions that another has to wait for; raises SlurmError if one was refused."""
        ids = [job for number in after if (job := self._submissions[number]) is not None]
        if len(ids) < len(after):
            raise SlurmError(f"Batch job submission failed: {NO_SUCH_JOB}")
        return ids

    def _work(self, row: JobRow) -> Work:
        return self._of[row.array_job or row.job_id].work()

    def _on_events(self, node: str, events: Sequence[Mapping[str, Any]]) -> None:
        self._events.append((node, events))
        self._news = self._soon = True

    def _changed(self, _job: int, _row: JobRow | None) -> None:
        self._news = True

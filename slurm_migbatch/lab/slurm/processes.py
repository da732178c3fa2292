"""Simulate the processes of jobs: they run between Prolog and Epilog, as fast as their slices and neighbours allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_migbatch.lab.slurm.clock import TimedEvent, VirtualClock
from slurm_migbatch.lab.slurm.nodes import SimulatedNodes
from slurm_migbatch.lab.slurm.slurmctld import Slurmctld
from slurm_migbatch.lab.slurm.work import Work
from slurm_migbatch.node.journal_rows import JournalSlice as Slice
from slurm_migbatch.slurm.client import JobRow


class Neighbourhood(Protocol):
    """Slowdowns of jobs on one GPU."""

    @property
    def wide(self) -> bool:
        """Whether jobs on other slices of the GPU slow a job down, too."""

    def share(self, job: int, held: Sequence[Slice]) -> float:
        """Return a job's speed as a share of its speed alone; `held` are all held slices of its GPUs."""


@dataclass(frozen=True)
class Halved:
    """Each of two jobs on one slice runs at `part` of its speed alone; jobs on other slices have no effect."""

    part: float = 0.6
    wide: bool = False

    def share(self, job: int, held: Sequence[Slice]) -> float:
        """See Neighbourhood."""
        own_slots = {(row.gpu, row.slot) for row in held if row.job == job}
        return self.part if any(row.job != job and (row.gpu, row.slot) in own_slots for row in held) else 1.0


@dataclass
class _Process:
    """A job between its Prolog and its end: its work, and its next event."""

    row: JobRow
    work: Work | None = None
    event: TimedEvent | None = None
    share: float = 1.0


class SimulatedProcesses:
    """The processes of all jobs on simulated nodes: the `records.Machines` of the simulated slurmctld.

    Args:
        slurm: the simulated slurmctld whose jobs run.
        work: returns a job's work; called once for each job.
    """

    def __init__(
        self, clock: VirtualClock, slurm: Slurmctld, nodes: SimulatedNodes, work: Callable[[JobRow], Work]
    ) -> None:
        self.clock, self.slurm, self.nodes = clock, slurm, nodes
        #: how much jobs on one GPU slow each other down
        self.neighbourhood: Neighbourhood = Halved()
        self._work = work
        self._works: dict[int, Work] = {}
        self._processes: dict[int, _Process] = {}
        slurm.nodes_run = self

    def launch(self, row: JobRow) -> None:
        """See records.Machines."""
        process = self._processes[row.job_id] = _Process(row)
        process.event = self.clock.after(self.nodes.times.prolog_s, lambda: self._launched(process))

    def _launched(self, process: _Process) -> None:
        row = process.row
        took = self.nodes.run_prologs(row)
        if took is None:
            self.slurm.requeued(row.job_id)
            return
        process.event = self.clock.after(took, lambda: self._began(process))

    def _began(self, process: _Process) -> None:
        row = process.row
        work = self._works.get(row.job_id)
        if work is None:
            work = self._works[row.job_id] = self._work(row)
        held = self.nodes.held_by(row.job_id)
        process.work = work
        work.begin(self.clock.now, [slice_row.slot.profile for slice_row in held], row.restarts)
        self._paced(held)
        self._follow(process)

    def _paced(self, slice_rows: Iterable[Slice]) -> None:
        """Set the current speed of all runs on these slots; with a wide neighbourhood, of all on these GPUs."""
        wide = self.neighbourhood.wide
        slots = {(slice_row.gpu, slice_row.slot) for slice_row in slice_rows if wide or slice_row.shared}
        gpus = {gpu for gpu, _ in slots}
        jobs = {
            row.job: None
            for gpu in sorted(gpus)
            for row in self.nodes.held_on([gpu])
            if wide or (gpu, row.slot) in slots
        }
        for job in jobs:
            process = self._processes.get(job or 0)
            if process is None or process.work is None:
                continue
            share = self.neighbourhood.share(process.row.job_id, self._slices_around(process.row.job_id))
            if share != process.share:
                process.share = share
                process.work.pace(self.clock.now, share)
                self._follow(process)

    def _slices_around(self, job: int) -> list[Slice]:
        """Return all held slices of the GPUs that a job is on."""
        return self.nodes.held_on({slice_row.gpu for slice_row in self.nodes.held_by(job)})

    def _follow(self, process: _Process) -> None:
        """Set the job's next event to its end at the current speed."""
        assert process.work is not None
        if process.event is not None:
            process.event.cancel()
        end = process.work.end_at()
        process.event = self.clock.at(end, lambda: self._ended(process)) if end < float("inf") else None

    def _ended(self, process: _Process) -> None:
        job = process.row.job_id
        self._processes.pop(job, None)
        self._works.pop(job, None)
        self.slurm.completed(job)
        self.clock.after(self.nodes.times.epilog_s, lambda: self._left(job))

    def _left(self, job: int) -> None:
        slice_rows = self.nodes.held_by(job)
        self.nodes.epilog(job)
        self._paced(slice_rows)
        self.slurm.released(job)

    def signal(self, row: JobRow, _name: str) -> None:
        """See records.Machines."""
        process = self._processes.get(row.job_id)
        if process is None or process.work is None:
            return
        now = self.clock.now
        saved_at = process.work.usr(now)
        if saved_at is not None:
            took = saved_at - now
            self.clock.at(saved_at, lambda: self._saved(process, took))
        self._follow(process)

    def _saved(self, process: _Process, took: float) -> None:
        if self._processes.get(process.row.job_id) is process:
            self.nodes.progress(process.row.job_id, checkpoint=self.clock.now, ckpt_s=round(took, 3))

    def terminate(self, row: JobRow) -> None:
        """See records.Machines."""
        process = self._processes.pop(row.job_id, None)
        end = self.clock.now
        if process is not None:
            if process.event is not None:
                process.event.cancel()
            if process.work is not None:
                end = process.work.term(self.clock.now, self.nodes.times.kill_wait_s)
        self.clock.at(end + self.nodes.times.epilog_s, lambda: self._left(row.job_id))

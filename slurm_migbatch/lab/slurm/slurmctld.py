"""Simulate slurmctld: the queue, the GRES counts of the nodes, and which job starts when.

It behaves like the real one (tests/support/contract.py tests both):

- Order is partition tier, priority, job id (with `SlurmSettings.requeued_last` submit time before job id). A
  pass goes through the queue in this order. A job that finds nodes starts: the tasks of an array one after the other
  as far as its throttle allows, the components of a heterogeneous job all at once and each on nodes of its own.
- A job whose resources exist on nodes but are held by other jobs (Resources) gets a reservation of whole nodes at the
  time at which the limits of running jobs let it start. A later job starts on these nodes only if its own limit ends
  it before that: conservative backfill. Heterogeneous jobs get no reservations. A job that requests a type that no
  node which is up lists (ReqNodeNotAvail) blocks no other. In passes without backfill the first job that waits for
  resources blocks its partition and its nodes.
- A job of a higher tier may preempt running jobs of a preemptible partition that hold the same type of GRES; they are
  requeued.
- A node on which a job is COMPLETING gets no other job; the GRES are free from the moment the job ends.
- A requeued job is COMPLETING until its Epilogs have run, then PENDING with one more restart, a new submit time, and
  two minutes' delay (BeginTime).
- A job waits with reason Dependency until the jobs that it names have completed (afterok); if one of them has ended
  otherwise it waits forever (DependencyNeverSatisfied).
- A request that no node lists, DOWN ones included, is refused.

Not modelled: licenses, QOS and association limits, other kinds of dependencies, advance reservations, job steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from slurm_migbatch.lab.slurm.clock import TimedEvent, VirtualClock
from slurm_migbatch.lab.slurm.jobqueue import GRES, SimulatedQueue
from slurm_migbatch.lab.slurm.pending import Key
from slurm_migbatch.lab.slurm.placing import Reservations
from slurm_migbatch.lab.slurm.preemption import Preemption
from slurm_migbatch.lab.slurm.records import (
    EndedJob,
    Facts,
    Holding,
    Machines,
    NoMachines,
    Shape,
    SimulatedPartition,
    SlurmSettings,
    positive,
)
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, SlurmError


@dataclass
class _Pass:
    """One pass through the queue.

    Attributes:
        hopeful: shapes of which a job may still start in this pass.
        kept: reservations of backfill; None in a pass of the main scheduler.
        depth: how many more jobs get a reservation.
        shut: nodes kept free for jobs that did not start (in a pass of the main scheduler).
        longest: longest time limit that the reservations allow a job of a shape; seconds.
    """

    hopeful: set[Shape]
    kept: Reservations | None
    depth: int
    shut: set[str] = field(default_factory=set)
    longest: dict[Shape, float] = field(default_factory=dict)


class Slurmctld(SimulatedQueue):
    """Simulated slurmctld; the module says how it behaves. `client.SimulatedSlurm` adds migbatchd's queries.

    Args:
        partitions: those with a tier or preemption of their own; others have tier 1.
        auto: whether passes run by themselves after changes; otherwise only `schedule` runs one.
    """

    def __init__(
        self,
        clock: VirtualClock,
        settings: SlurmSettings | None = None,
        partitions: Iterable[SimulatedPartition] = (),
        *,
        auto: bool = False,
    ) -> None:
        super().__init__(clock, settings or SlurmSettings(), partitions)
        self.auto = auto
        nobody = NoMachines(self.settings.kill_s, clock.after)
        nobody.released = self.released
        #: what runs the jobs
        self.nodes_run: Machines = nobody
        self._preemption = Preemption(self.queue, self.partitions, self.settings.exempt_s)
        self._preempting: dict[int, tuple[str, ...]] = {}
        self._pass: TimedEvent | None = None
        self._exempt: TimedEvent | None = None
        self._last_pass = self._last_backfill = -math.inf

    # -- a pass ----------------------------------------------------------------------------------------------------

    def _due(self) -> None:
        if not self.auto or self._pass is not None or not self._pending.buckets:
            return
        self._pass = self.clock.at(max(self.clock.time(), self._last_pass + self.settings.cycle_s), self._cycle)

    def _cycle(self) -> None:
        self._pass = None
        now = self.clock.time()
        backfill = now >= self._last_backfill + self.settings.backfill_s
        self.schedule(backfill)
        if not backfill and self._pass is None and self._pending.buckets:
            self._pass = self.clock.at(self._last_backfill + self.settings.backfill_s, self._cycle)

    def schedule(self, backfill: bool = True) -> list[JobRow]:
        """Pass through the queue once; return the rows of the started jobs."""
        now = self._last_pass = self.clock.time()
        if backfill:
            self._last_backfill = now
        reservations = Reservations(self._placing, now, self.settings.backfill_window_s) if backfill else None
        state = _Pass(self._hopeful(), reservations, self.settings.backfill_depth)
        started: list[JobRow] = []
        candidates = [(bucket[0], 0, shape) for shape, bucket in self._pending.buckets.items()] if state.hopeful else []
        heapify(candidates)
        while candidates and state.hopeful:
            key, place, shape = heappop(candidates)
            bucket = self._pending.buckets.get(shape, [])
            if place >= len(bucket):  # the job started together with another component of its heterogeneous job
                state.hopeful.discard(shape)
                continue
            if shape in state.hopeful and self._length(key.job) <= state.longest.get(shape, math.inf):
                rows = self._start_next(key, shape, state.shut, reservations)
                if rows:
                    started += rows
                    bucket = self._pending.buckets.get(shape, [])
                    if not bucket or not self._may_fit(shape):
                        state.hopeful.discard(shape)
                    if place < len(bucket):
                        heappush(candidates, (bucket[place], place, shape))
                    continue
                self._explain(key.job, shape)
                self._bound(state, shape, bucket[place + 1 :])
            self._keep_back(state, key, shape)
            if reservations is not None and place + 1 < len(bucket) and (shape in state.hopeful or state.depth > 0):
                heappush(candidates, (bucket[place + 1], place + 1, shape))
            else:
                state.hopeful.discard(shape)
        return started

    def _hopeful(self) -> set[Shape]:
        """Return shapes of which a job may start; set the reason of the first job of every other shape."""
        shapes = set()
        for shape, bucket in list(self._pending.buckets.items()):
            if self._may_fit(shape):
                shapes.add(shape)
            else:
                self._explain(bucket[0].job, shape)
        return shapes

    def _bound(self, state: _Pass, shape: Shape, later: Sequence[Key]) -> None:
        """Let backfill start no further job of this shape with a time limit longer than reservations allow."""
        if state.kept is not None and shape.het is None:
            state.longest[shape] = state.kept.longest_s(shape)
            if all(self._length(other.job) > state.longest[shape] for other in later):
                state.hopeful.discard(shape)

    def _keep_back(self, state: _Pass, key: Key, shape: Shape) -> None:
        """Reserve nodes for a job that did not start."""
        if not self._placing.offered(shape):
            return
        if state.kept is None:
            state.shut.update(machine.name for machine in self._placing.pool(shape))
            state.hopeful.discard(shape)
        elif state.depth > 0 and shape.het is None:
            state.depth -= 1
            state.kept.reserve(shape, self.queue[key.job].time_limit_s)

    def _length(self, job: int) -> float:
        limit = self.queue[job].time_limit_s
        return math.inf if limit is None else limit

    def _may_fit(self, shape: Shape) -> bool:
        """Return whether a job of this shape may start if no earlier job starts or gets a reservation."""
        if shape.array is not None and not self._task_allowed(shape.array):
            return False
        return self._placing.fit(shape) is not None

    def _explain(self, job: int, shape: Shape) -> None:
        """Set the reason why the job did not start, and preempt others for it if allowed."""
        reason = self._why(shape)
        self._note(job, reason)
        if reason == "Resources":
            self._preempt(job, shape)

    def _task_allowed(self, array_id: int) -> bool:
        array = self.arrays[array_id]
        return array.throttle is None or array.running < array.throttle

    def _why(self, shape: Shape) -> str:
        if shape.array is not None and not self._task_allowed(shape.array):
            return "JobArrayTaskLimit"
        return "Resources" if self._placing.offered(shape) else "ReqNodeNotAvail"

    def _start_next(self, key: Key, shape: Shape, shut: set[str], reservations: Reservations | None) -> list[JobRow]:
        """Start the first job of a shape, or the first task of an array, if it finds nodes."""
        if shape.array is not None and not self._task_allowed(shape.array):
            return []
        row = self.queue[key.job]
        if row.het_job is not None:
            return self._start_het(row, reservations) if reservations is not None and row.job_id == row.het_job else []
        nodes = self._placing.fit(shape, shut, reservations, row.time_limit_s)
        if nodes is None:
            return []
        if row.array_job is not None and row.job_id == row.array_job and row.tasks >= 1 and row.restarts == 0:
            array = self.arrays[row.array_job]
            if array.waiting and row.tasks == len(array.waiting):
                row = self.split(row, array.waiting[0])
        return [self._start(row, nodes)]

    def _start_het(self, leader: JobRow, reservations: Reservations) -> list[JobRow]:
        """Start all components at once, each on nodes that no earlier one took."""
        rows = [row for row in self._pending.rows if row.het_job == leader.job_id]
        taken: set[str] = set()
        placed = []
        for row in rows:
            if not self._may(row):
                return []
            nodes = self._placing.fit(self._shape(row, self._facts[row.job_id]), taken, reservations, row.time_limit_s)
            if nodes is None:
                return []
            taken.update(nodes)
            placed.append((row, nodes))
        return [self._start(row, nodes) for row, nodes in placed]

    def _start(self, row: JobRow, nodes: tuple[str, ...]) -> JobRow:
        now = self.clock.time()
        facts = self._facts[row.job_id]
        shape = self._shape(row, facts)
        end = None if row.time_limit_s is None else now + row.time_limit_s
        self._preempting.pop(row.job_id, None)
        taken = {kind: count for kind, count in shape.need if count}
        for name in nodes:
            machine = self.machines[name]
            machine.used.update(taken)
            memory = machine.needed(shape) if machine.memory else 0
            machine.cpus_used += shape.cpus
            machine.memory_used += memory
            machine.holdings[row.job_id] = Holding(taken, shape.cpus, math.inf if end is None else end, memory)
            self._placing.changed(machine)
        if row.array_job is not None:
            self.arrays[row.array_job].running += 1
        row = replace(row, state="RUNNING", reason="None", start=now, end=end, nodes=nodes)
        facts.started = now if facts.started is None else facts.started
        if end is not None and self.settings.over_limit_s < math.inf:
            kill_time = end + self.settings.over_limit_s
            facts.limit = (
                None
                if kill_time == math.inf
                else self.clock.at(kill_time, lambda: self._over_limit(row.job_id, row.restarts))
            )
        self._put(row)
        if math.floor(now) <= facts.killed:
            # slurmd treats a credential issued in the second in which it was told to kill the job as revoked
            self.kill(row.job_id, "FAILED")
        else:
            self.nodes_run.launch(row)
        return self.queue.get(row.job_id, row)

    def _preempt(self, job: int, shape: Shape) -> None:
        """Requeue running jobs of lower tiers, the youngest first, if that makes room on enough nodes."""
        tier = self._tier(self.queue[job])
        if not self._preemption.allowed(tier):
            return
        if any(self.machines[name].completing for name in self._preempting.get(job, ())):
            return
        now = self.clock.time()
        chosen = self._preemption.choose(shape, tier, self._placing.pool(shape), now)
        if chosen is None:
            self._preempt_later(now)
            return
        self._preempting[job] = tuple(name for name, _ in chosen)
        for victim in dict.fromkeys(victim for _, victims in chosen for victim in victims):
            self.requeued(victim)

    def _preempt_later(self, now: float) -> None:
        """Schedule a pass for the moment from which the next job may be preempted."""
        if not self.auto or self._exempt is not None:
            return
        exempt_end = self._preemption.next_at(now)
        if exempt_end is not None:
            self._exempt = self.clock.at(exempt_end, self._no_longer_exempt)

    def _no_longer_exempt(self) -> None:
        self._exempt = None
        self._due()

    # -- jobs end --------------------------------------------------------------------------------------------------

    def completed(self, job: int, state: str = "COMPLETED") -> None:
        """Record that the job's script has ended; its Epilogs run now, and `released` follows."""
        if job in self.queue and self.queue[job].state == "RUNNING":
            self._leave(job, state)

    def released(self, job: int) -> None:
        """Record that the Epilog has run on all nodes of the job."""
        row, facts = self.queue.get(job), self._facts.get(job)
        if row is None or facts is None or row.state != "COMPLETING":
            return
        for name in facts.epilogs:
            self.machines[name].completing -= 1
            self._touch(self.machines[name])
        facts.epilogs = ()
        if facts.after == "PENDING":
            self._pend_again(row)
        else:
            self._remove_job(row, facts.after)

    def finish(self, job: int, state: str = "COMPLETED") -> JobRow:
        """End the job and its Epilogs at once; return its row before that."""
        row = self.queue[job]
        self.completed(job, state)
        self.released(job)
        return row

    def requeued(self, job: int) -> None:
        """Requeue a running job."""
        self.kill(job, "PENDING")

    def kill(self, job: int, after: str) -> None:
        """Signal a running job to end; `after` is its end state, or PENDING for a requeue."""
        if self.queue[job].state in ("RUNNING", "SUSPENDED"):
            self._leave(job, after)
            self._facts[job].killed = self.clock.time()
            self.nodes_run.terminate(self.queue[job])

    def _over_limit(self, job: int, restarts: int) -> None:
        row = self.queue.get(job)
        if row is not None and row.restarts == restarts and row.state == "RUNNING":
            self.kill(job, "TIMEOUT")

    def _leave(self, job: int, after: str) -> None:
        row, facts = self.queue[job], self._facts[job]
        if facts.limit is not None:
            facts.limit.cancel()
        facts.after, facts.epilogs = after, row.nodes
        for name in row.nodes:
            machine = self.machines[name]
            holding = machine.holdings.pop(job)
            machine.used.subtract(holding.taken)
            machine.cpus_used -= holding.cpus
            machine.memory_used -= holding.memory
            machine.completing += 1
            self._placing.changed(machine)
        if row.array_job is not None:
            self.arrays[row.array_job].running -= 1
        self._put(replace(row, state="COMPLETING", end=self.clock.time()))
        self._due()

    def _pend_again(self, row: JobRow) -> None:
        now = self.clock.time()
        begin = now + self.settings.requeue_delay_s
        row = replace(
            row,
            state="PENDING",
            nodes=(),
            start=None,
            end=None,
            restarts=row.restarts + 1,
            reason="BeginTime",
            submit=now,
            eligible=begin,
        )
        if not row.priority:  # it was suspended
            row = replace(row, reason="JobHeldAdmin", eligible=None)
        self._put(row)
        self._wake(row.job_id, begin)

    def _remove_job(self, row: JobRow, state: str) -> None:
        facts = self._facts.pop(row.job_id)
        self._pending.drop(row.job_id)
        self._active.pop(row.job_id, None)
        self._preempting.pop(row.job_id, None)
        del self.queue[row.job_id]
        end = self.clock.time() if row.end is None else row.end
        ended = EndedJob(row.job_id, row.name, facts.submitted, facts.started, end, row.restarts, state, row)
        self.ended_jobs[row.job_id] = ended
        if row.array_job is not None:
            if row.job_id == row.array_job:
                self.arrays[row.array_job].waiting.clear()  # the tasks that share this row
            self.ended_tasks.setdefault(row.array_job, []).append(ended)
        self.on_change(row.job_id, None)
        for waiting in self._waiting_for.get(row.job_id if row.array_job is None else row.array_job, ()):
            if waiting in self.queue and self.queue[waiting].after:
                self._put(self._awaited(self.queue[waiting]))
        self._due()

    def taken_back(self, job: int) -> JobRow:
        """Requeue an ended job in held state; raises SlurmError if it is unknown."""
        ended = self.ended_jobs.pop(job, None)
        if ended is None:
            raise SlurmError("Invalid job id specified")
        row = ended.row
        if row.array_job is not None:
            self.ended_tasks[row.array_job].remove(ended)
        need = positive(gres_list.readable_counts(row.gres, GRES))
        self._facts[job] = Facts(ended.submit, row.priority, need, {}, ended.start)
        self._pend_again(row)
        held = replace(self.queue[job], priority=0, reason="job requeued in held state", eligible=None)
        self._put(held)
        return held

    def cancelled(self, job: int) -> None:
        """Cancel a job."""
        row = self.queue.get(job)
        if row is None:
            return
        if row.pending:
            self._remove_job(row, "CANCELLED")
        elif row.state == "COMPLETING":
            if self._facts[job].after == "PENDING":
                self._facts[job].after = "CANCELLED"
        else:
            self.kill(job, "CANCELLED")

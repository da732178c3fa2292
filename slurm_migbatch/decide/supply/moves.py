"""Move training jobs: one that can be restarted is preempted for a larger slice and restarts where its own fits.

A GPU of which a third is in use cannot take a job that needs all of it, even with much free space on other GPUs. If
a job has waited for a while and moving one training job would let it start much sooner than its reservation, that
training job is signalled to write a checkpoint and requeued. The planner then has both in the queue and places them.

A training job is moved only if it declares that it can be: `role=train` and `signal=` in its hints, one slice of its
own on one node. Inference is never moved, nor are jobs without such hints. A loan is reclaimed by lending
(`decide.lending`).

The effect of a move is read from the next snapshots and not from Slurm's answer: an order without effect is repeated a
few times, then the job is never tried again. A service that starts reads the active moves and preemptions from the
record; before that it begins none.

A job that is preempted for a pending one (`decide.supply.preemption`) is stopped in the same way, with SIGTERM and the
grace time of its QOS or partition; it is not placed elsewhere.

From Slurm 23.11 on a requeued training job starts again at once. Up to 23.02 slurmd may confuse the run with the last
one and start no Prolog (`decide.lending.pools.pools_of`), so there it waits for Slurm's delay of two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slurm_migbatch.decide.actions import MoveOrder
from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import slices, waits_for_begin
from slurm_migbatch.decide.capacity.model import Demand, Gpu, Node, PlannedMove, Reservation, Restartable
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.snapshot import ClusterSnapshot, passed_s
from slurm_migbatch.decide.supply.resources import NodeResources
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.preemption import Ending
from slurm_migbatch.workload.loans import GRES, drops_old_gres_type, is_marked

SOON_S: Final = 5.0
"""The slice of a training job that is being moved, or of a loan that is requeued, counts as free after this time."""
_CLOCKS_S: Final = 2.0
"""Largest lag of a node's clock."""
_AGAIN_S: Final = 15.0
"""A requeue without effect is repeated after this time."""
_TRIES: Final = 3
AT_ONCE: Final = 4
"""Most jobs at once for which others are stopped."""
_LATELY_S: Final = 600.0
"""Older moves in the record are over."""
_STUCK_S: Final = 600.0
"""A run that is still active so long after its requeue has a process that cannot be killed."""
_NOWHERE: Final = frozenset[str]()
MOVE: Final = "move"
PREEMPT: Final = "preempt"
"""Names of both steps of a move, and of a preemption, in the record."""


def is_stuck(requeued: float | None, now: float) -> bool:
    """Return whether a run that was requeued at this time (unix seconds; None: not at all) may never end."""
    return requeued is not None and passed_s(requeued, now) > _STUCK_S


@dataclass(frozen=True)
class MoveRules:
    """When a training job may be moved. Times in seconds.

    Attributes:
        after_s: minimum age of a job's reservation before another is moved for it.
        gain_s: minimum gain in its start, by time limits; the training job must have at least as long to run.
        rest_s: minimum time between the start of a training job and its move; twice as long for each restart.
        grace_s: time for its checkpoint.
    """

    after_s: float = 5.0
    gain_s: float = 180.0
    rest_s: float = 300.0
    grace_s: float = 60.0


@dataclass(frozen=True)
class Move:
    """An active move; unix seconds.

    Attributes:
        job, restart: the run that is moved.
        waiting: the job for which it is moved; 0: unknown, it was begun by an earlier service.
        why: the reason, as a sentence.
        signalled, requeued: when Slurm was last called for it; None: not yet.
        checkpoint: whether a checkpoint came after the signal.
        tries: how often it was requeued, or cancelled.
        ending: how it ends, if it is preempted; None: it is moved.
    """

    job: int
    restart: int
    waiting: int
    why: str
    signalled: float | None = None
    checkpoint: bool = False
    requeued: float | None = None
    tries: int = 0
    ending: Ending | None = None

    def free_at(self, now: float) -> float:
        """Return when its slices should be free."""
        if self.ending is None or self.requeued is not None:
            return now + SOON_S
        return max(now, (self.signalled or now) + self.ending.grace_s) + SOON_S


@dataclass
class MoveMemory:
    """State of moves between decisions.

    Attributes:
        moves: active ones, by the job that is moved.
        waits: since when each job has had a reservation.
        fixed: jobs that could not be requeued, and are not tried again.
        loaded: whether the record was read.
        later: pending jobs for which nothing is preempted before this time.
        freed: pending jobs for which others were preempted: their tasks then, until when nothing more is preempted for
            their users if they do not start, and how often that was in vain before.
    """

    moves: dict[int, Move] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    loaded: bool = False
    later: dict[int, float] = field(default_factory=dict)
    freed: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def served(self) -> set[int]:
        """The jobs for which others are being stopped; 0 for one that is unknown."""
        return {move.waiting for move in self.moves.values()}

    def load(self, actions: Iterable[Mapping[str, Any]], now: float, ending_of: Callable[[int], Ending | None]) -> None:
        """Add the moves and preemptions that an earlier service has begun, from the record, oldest first.

        `ending_of`: returns how a job ends if it is preempted; None: it is not listed, or no longer preemptible.
        """
        for row in actions:
            if row["kind"] not in (MOVE, PREEMPT) or row["outcome"] or now - row["ts"] > _LATELY_S:
                continue
            job, restart = row["job_id"], row["restart"]
            ending = ending_of(job) if row["kind"] == PREEMPT else None
            if row["kind"] == PREEMPT and ending is None:
                continue
            move = self.moves.get(job)
            if move is None or move.restart != restart:
                move = Move(job, restart, 0, row["why"] or "", signalled=row["ts"], ending=ending)
            if row["after"] in ("PENDING", "CANCELLED"):
                move = replace(move, requeued=row["ts"], tries=move.tries + 1)
            self.moves[job] = move
        self.loaded = True

    def follow(self, snapshot: ClusterSnapshot, queue: JobQueue) -> list[int]:
        """Update the moves by their outcomes; return the requeued jobs that wait for Slurm's delay."""
        for run, report in snapshot.reports:
            move = self.moves.get(run[0])
            if move is None or move.restart != run[1] or move.signalled is None or report.checkpoint is None:
                continue
            if report.checkpoint >= move.signalled - _CLOCKS_S:
                self.moves[move.job] = replace(move, checkpoint=True)
        start_now = []
        for job, move in list(self.moves.items()):
            row = queue.rows.get(job)
            going = row is not None and row.active and row.state != "SUSPENDED" and not _is_withdrawn(move, queue)
            if row is not None and going and not is_stuck(move.requeued, snapshot.now) and not _is_next(row, move):
                continue
            del self.moves[job]
            if row is None or move.ending is not None:  # a preempted job waits, while the other one starts
                continue
            if row.pending and drops_old_gres_type(row.gres) and waits_for_begin(row, snapshot.now):
                start_now.append(job)
        self.fixed &= queue.rows.keys()
        return start_now

    def note(self, reservations: Iterable[Reservation], now: float) -> None:
        """Record which jobs have a reservation now."""
        self.waits = {reservation.job: self.waits.get(reservation.job, now) for reservation in reservations}

    def due(self, now: float, rules: MoveRules, queue: JobQueue) -> tuple[MoveOrder, ...]:
        """Return the orders for active moves."""
        orders = []
        for job, move in list(self.moves.items()):
            row = queue.rows[job]
            if not row.running:
                continue
            grace_s = rules.grace_s if move.ending is None else move.ending.grace_s
            if move.signalled is None and (signal := _signal_of(move, row)):
                orders.append(MoveOrder(job, move.restart, move.why, signal, preempts=move.ending is not None))
                self.moves[job] = replace(move, signalled=now)
            elif move.requeued is None:
                if move.checkpoint or move.signalled is None or passed_s(move.signalled, now) >= grace_s:
                    orders.append(self._end(move, now))
            elif passed_s(move.requeued, now) >= _AGAIN_S:
                if move.tries < _TRIES:
                    orders.append(self._end(move, now))
                else:
                    del self.moves[job]
                    self.fixed.add(job)
        return tuple(orders)

    def _end(self, move: Move, now: float) -> MoveOrder:
        self.moves[move.job] = replace(move, requeued=now, tries=move.tries + 1)
        ending = move.ending
        # like Slurm, which cancels preempted jobs that it cannot requeue
        cancel = ending is not None and (ending.cancel or move.tries == _TRIES - 1)
        return MoveOrder(move.job, move.restart, move.why, cancel=cancel, preempts=ending is not None)

    def begin(self, planned: Sequence[PlannedMove], queue: JobQueue) -> None:
        """Begin the moves and preemptions that have been chosen."""
        for move in planned:
            why = f"job {move.waiting} needs a larger slice that fits in its place; it restarts elsewhere"
            if move.ending is not None:
                why = f"job {move.waiting}, which may preempt it, needs a slice of another profile in its place"
            restart = queue.rows[move.job].restarts
            self.moves[move.job] = Move(move.job, restart, move.waiting, why, ending=move.ending)


def wanting(memory: MoveMemory, reservations: Iterable[Reservation], now: float, rules: MoveRules) -> frozenset[int]:
    """Return the jobs for which others may be stopped: those with a long expected wait that have waited for a while.

    None while as much is being stopped as may be at once.
    """
    served = memory.served
    if not memory.loaded or len(served) >= AT_ONCE or 0 in served:
        return frozenset()
    return frozenset(
        reservation.job
        for reservation in reservations
        if now - memory.waits.get(reservation.job, now) >= rules.after_s
        and (reservation.at is None or reservation.at - now > rules.gain_s)
        and reservation.job not in served
    )


def restartable(
    memory: MoveMemory,
    snapshot: ClusterSnapshot,
    queue: JobQueue,
    nodes: Mapping[str, Node],
    demand: Callable[[JobRow], Demand | None],
    rules: MoveRules,
) -> tuple[Restartable, ...]:
    """Return the training jobs that may be moved, those with the lowest loss first: small ones, with much left to do.

    Args:
        memory: active moves.
        demand: returns the needs of a running job after a restart; None if it could not restart.
    """
    now, rows = snapshot.now, queue.signalled()
    slurm_nodes = {row.name: row for row in snapshot.nodes} if rows else {}
    candidates, resources = [], NodeResources(slurm_nodes.values())
    for row in rows:
        if not _may_move(row, now, rules) or row.job_id in memory.moves or row.job_id in memory.fixed:
            continue
        node = nodes.get(row.nodes[0])
        needed = demand(row)
        if node is None or needed is None:
            continue
        leases = [(gpu.uuid, lease) for gpu in node.gpus for lease in gpu.leases if lease.job == row.job_id]
        if len(leases) == 1 and not leases[0][1].guest and needed.slices == (leases[0][1].slot.profile,):
            enough = resources.of(row, needed.pool)
            elsewhere = _NOWHERE if enough is None else enough.names
            slurm_node = slurm_nodes.get(node.name) or NodeRow(node.name, frozenset())
            # lending takes back the CPUs and the memory of loans once a job has its slice
            loans = [loan for loan in queue.holders(node.name) if is_marked(loan.comment)]
            cpus = slurm_node.cpus_free + sum([loan.cpus_per_node for loan in loans])
            free = slurm_node.memory_free + sum([loan.memory_on(slurm_node) for loan in loans])
            (uuid, lease), held = leases[0], row.memory_on(slurm_node)
            run = Restartable(
                needed, node.name, uuid, lease.slot, row.end, elsewhere, row.cpus, cpus, held, free, slurm_node.memory
            )
            candidates.append(run)
    return tuple(
        sorted(candidates, key=lambda run: (run.slot.profile.compute, run.slot.placement.size, -_end(run.until)))
    )


def leaving(nodes: dict[str, Node], ends: Mapping[int, float], queue: JobQueue) -> dict[str, Node]:
    """Return the nodes; on them the slices of jobs that are being stopped become free at the times `ends`."""
    changed = dict(nodes) if ends else nodes
    for job, end in ends.items():
        row = queue.rows.get(job)
        for name in row.nodes if row is not None else ():
            node = changed.get(name)
            if node is not None:
                gpus = [_with_end(gpu, job, end) for gpu in node.gpus]
                changed[name] = replace(node, gpus=tuple(gpus))
    return changed


def _with_end(gpu: Gpu, job: int, end: float) -> Gpu:
    if all(lease.job != job for lease in gpu.leases):
        return gpu
    leases = [lease._replace(until=end, stopping=True) if lease.job == job else lease for lease in gpu.leases]
    return replace(gpu, leases=tuple(leases))


def may_restart(row: JobRow) -> bool:
    """Return whether a job is a training job that may be moved while it runs."""
    if row.state != "RUNNING" or GRES not in row.gres or len(row.nodes) != 1 or row.het_job is not None:
        return False
    if is_marked(row.comment):
        return False
    hints = hints_of(row.comment)
    return hints is not None and hints.role == "train" and bool(hints.signal) and sum(slices(row.gres).values()) == 1


def _may_move(row: JobRow, now: float, rules: MoveRules) -> bool:
    if row.start is None or now - row.start < rules.rest_s * 2 ** min(row.restarts, 30):
        return False
    if row.end is not None and row.end - now < rules.gain_s:
        return False
    return may_restart(row)


def _signal_of(move: Move, row: JobRow) -> str:
    """Return the signal before a run ends; empty for none."""
    if move.ending is not None:
        return "TERM" if move.ending.grace_s else ""
    hints = hints_of(row.comment)
    return (hints.signal or "").upper() if hints is not None else ""


def _is_withdrawn(move: Move, queue: JobQueue) -> bool:
    """Return whether the job for which another is preempted no longer waits, before that one's grace time is over."""
    if move.ending is None or move.requeued is not None or not move.waiting:
        return False
    waiting = queue.rows.get(move.waiting)
    return waiting is None or not waiting.pending


def _is_next(row: JobRow, move: Move) -> bool:
    """Return whether a row is of a later run than the one that was moved."""
    return row.running and row.restarts != move.restart


def _end(until: float | None) -> float:
    return float("inf") if until is None else until


def why_moved(job: int, memory: MoveMemory) -> str:
    """Return which jobs are stopped for a pending job; empty for none. What their hints say is for their own users."""
    stopped = [move for move in memory.moves.values() if move.waiting == job]
    if not stopped:
        return ""
    jobs = ", ".join(f"job {move.job}" for move in stopped)  # so that each can be hidden from other users
    how = "moved" if stopped[0].ending is None else "preempted"
    return f"{jobs} {'is' if len(stopped) == 1 else 'are'} {how} for it"

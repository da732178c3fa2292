"""Preempt running jobs for a pending job whose slices need other profiles than theirs.

Slurm preempts a job only if the pending one could start on the GRES that this frees, and it counts GRES by profile: a
job that needs a 7g slice preempts jobs with a 7g slice, and none with smaller ones in its place. Here jobs with slices
of any profile are chosen, by the site's own rules (`slurm.preemption`), if Slurm has no way to preempt for the pending
job itself. Those are chosen that lose least: the time that they have run times the memory slices that they have.

A pending job may not start all the same, for a reason that is not known here (`--exclusive=user` beside a job of
another user, other GRES in use). So while a job waits for which others were preempted, nothing more is preempted for
its user, each time for twice as long.

How they are stopped is in `decide.supply.moves`. Loans are not chosen: lending reclaims them (`decide.lending`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from slurm_migbatch.decide.capacity.model import Demand, Gpu, Mode, Node, PlannedMove, Reservation
from slurm_migbatch.decide.snapshot import ClusterSnapshot
from slurm_migbatch.decide.supply.moves import MoveMemory
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.preemption import Ending
from slurm_migbatch.workload.loans import is_marked

GAIN_S: Final = 60.0
"""Nothing is preempted for a job that should start sooner, by time limits."""
_SEARCH_S: Final = 15.0
"""A job for which nothing can be preempted is looked at again after this time."""
AGAIN_S: Final = 600.0
"""If a job has not started this long after others were preempted for it, more may be."""
_MOST_DOUBLED: Final = 6
"""How often this time is doubled at most."""
_MOST_NODES: Final = 512
"""Nodes to examine for one job; others the next time."""


class _Victims(NamedTuple):
    """Jobs to preempt on a node; `lost`: the seconds that they have run, times their memory slices."""

    lost: float
    node: str
    endings: Mapping[int, Ending]


def preempted_for(
    snapshot: ClusterSnapshot,
    jobs: Collection[int],
    reservations: Sequence[Reservation],
    demands: Iterable[Demand],
    nodes: Mapping[str, Node],
    rows: Mapping[int, JobRow],
    memory: MoveMemory,
) -> tuple[PlannedMove, ...]:
    """Return the jobs to preempt, for one pending job.

    Args:
        jobs: the pending jobs for which others may be stopped (`moves.wanting`).
        reservations: those of the plan, in Slurm's order.
        demands: the needs of pending jobs.
        rows: the queue by job id.
        memory: `later` and `freed` are updated.
    """
    rules, now, later = snapshot.preemption, snapshot.now, memory.later
    _forget_started(memory, rows)
    for job in [job for job, at in later.items() if not now < at <= now + AGAIN_S or job not in rows]:
        del later[job]
    in_order = dict.fromkeys(reservation.job for reservation in reservations if reservation.job in jobs)
    able = [job for job in in_order if job not in later and rules.may_preempt(rows[job])]
    if able and memory.freed:
        in_vain = _users_in_vain(memory, rows, now)
        able = [job for job in able if rows[job].uid not in in_vain]
    if not able:
        return ()
    job = able[0]  # one in each round: the search is costly where many nodes have many jobs
    demand = next((demand for demand in demands if demand.job == job and demand.apart is None), None)
    others = [reservation for reservation in reservations if reservation.job != job]
    search = _PreemptionSearch(snapshot, rows, {*memory.fixed, *memory.moves}, others)
    endings = {} if demand is None else search.for_job(rows[job], demand, nodes)
    later[job] = now + (AGAIN_S if endings else _SEARCH_S)
    if endings:
        times = _times_in_vain(memory, rows, rows[job].uid)
        memory.freed[job] = rows[job].tasks, now + _pause_s(times), times
    return tuple(PlannedMove(victim, job, ending) for victim, ending in endings.items())


def _forget_started(memory: MoveMemory, rows: Mapping[int, JobRow]) -> None:
    """Forget the jobs for which others were preempted if they, or one of their tasks, have started."""
    for job, (tasks, _, _) in list(memory.freed.items()):
        row = rows.get(job)
        if row is None or not row.pending or row.tasks < tasks:
            del memory.freed[job]
            memory.later.pop(job, None)


def _users_in_vain(memory: MoveMemory, rows: Mapping[int, JobRow], now: float) -> set[int]:
    """Return the users of jobs that do not start although others were preempted for them."""
    served = memory.served
    return {
        rows[job].uid
        for job, (_, until, times) in memory.freed.items()
        if job not in served and now < until <= now + _pause_s(times)
    }


def _times_in_vain(memory: MoveMemory, rows: Mapping[int, JobRow], uid: int) -> int:
    """Return how often jobs were preempted for a user's pending jobs in vain."""
    served = memory.served
    found = [times for job, (_, _, times) in memory.freed.items() if rows[job].uid == uid and job not in served]
    return 1 + max(found, default=-1)


def _pause_s(times: int) -> float:
    return AGAIN_S * 2.0 ** min(times, _MOST_DOUBLED)


class _PreemptionSearch:
    """Searches the jobs to preempt for one pending job; `taken`: jobs that are not preempted for it."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        rows: Mapping[int, JobRow],
        taken: Collection[int],
        others: Iterable[Reservation],
    ) -> None:
        self._rules, self._now = snapshot.preemption, snapshot.now
        self._rows, self._taken = rows, frozenset(taken)
        self._slurm_nodes = {row.name: row for row in snapshot.nodes}
        #: memory slices that are reserved for others, by GPU
        self._reserved: dict[str, int] = {}
        for reservation in others:
            for _, uuid, slot in reservation.places:
                self._reserved[uuid] = self._reserved.get(uuid, 0) | slot.placement.mask

    def for_job(self, waiting: JobRow, demand: Demand, nodes: Mapping[str, Node]) -> Mapping[int, Ending]:
        """Return which jobs end and how; nothing if they would not suffice, or if Slurm can preempt by itself."""
        found: list[_Victims] = []
        by_slurm = 0
        if waiting.exclusive:  # Slurm would have to empty whole nodes
            return {}
        for name in self._examined(demand.pool):
            node, slurm_node = nodes.get(name), self._slurm_nodes.get(name)
            if node is None or slurm_node is None or node.mode is not Mode.OPEN or node.asleep or node.unmatched:
                continue
            endings = self._endings(waiting, node)
            if not (endings or demand.nodes > 1) or not self._leaves_resources(waiting, slurm_node, endings):
                continue
            victims = self._victims(demand, node, endings)
            if (endings or victims is not None) and _can_preempt_itself(demand, node, endings):
                by_slurm += 1
                if by_slurm == demand.nodes:
                    return {}
            if victims is not None and self._leaves_resources(waiting, slurm_node, victims.endings):
                found.append(victims)
        found.sort(key=lambda victims: (victims.lost, victims.node))
        if len(found) < demand.nodes:
            return {}
        return {job: end for victims in found[: demand.nodes] for job, end in victims.endings.items()}

    def _examined(self, pool: Collection[str]) -> Sequence[str]:
        """Return the nodes to examine now."""
        names = sorted(pool)
        begin = int(self._now // _SEARCH_S) * _MOST_NODES % len(names) if len(names) > _MOST_NODES else 0
        return [*names[begin:], *names[:begin]][:_MOST_NODES]

    def _endings(self, waiting: JobRow, node: Node) -> dict[int, Ending]:
        """Return the jobs on a node that may be preempted, and how they end."""
        leases = [lease for gpu in node.gpus for lease in gpu.leases]
        fixed = {lease.job for lease in leases if lease.guest or lease.stopping}
        endings = {}
        for job in {lease.job for lease in leases if lease.job is not None} - fixed - self._taken:
            row = self._rows.get(job)
            if row is None or not row.running or row.het_job is not None or is_marked(row.comment):
                continue
            ending = self._rules.ending(row, waiting, self._now)
            if ending is not None:
                endings[job] = ending
        return endings

    def _victims(self, demand: Demand, node: Node, endings: Mapping[int, Ending]) -> _Victims | None:
        """Return which of these jobs make room for the slices of one node with the least loss; None: they cannot."""
        sizes: Counter[int] = Counter()
        for lease in (lease for gpu in node.gpus for lease in gpu.leases if lease.job in endings):
            sizes[lease.job or 0] += lease.slot.placement.size
        lost = {job: size * (self._now - (self._rows[job].start or self._now)) for job, size in sizes.items()}
        ending: set[int] = set()
        placed: dict[str, list[Slot]] = {}
        for profile in demand.slices:
            options = [
                (sum(lost[job] for job in more), len(more), number, slot, more)
                for number, gpu in enumerate(node.gpus)
                for slot, jobs in self._openings(gpu, profile, placed.get(gpu.uuid, ()), ending)
                if jobs <= endings.keys()
                for more in [jobs - ending]
            ]
            if not options:
                return None
            _, _, number, slot, more = min(options, key=lambda option: option[:4])
            ending |= more
            placed.setdefault(node.gpus[number].uuid, []).append(slot)
        if not ending and demand.nodes == 1:
            return None  # there is room, and another reason why it does not start
        return _Victims(sum(lost[job] for job in ending), node.name, {job: endings[job] for job in sorted(ending)})

    def _openings(
        self, gpu: Gpu, profile: Profile, placed: Sequence[Slot], ending: set[int]
    ) -> Iterable[tuple[Slot, set[int]]]:
        """Yield each slot that a GPU may have for a profile, with the jobs in its place (0: what is no job)."""
        if profile not in gpu.geometry:
            return
        blocked = self._reserved.get(gpu.uuid, 0)
        for slot in placed:
            blocked |= slot.placement.mask
        for slot in gpu.geometry.info(profile).slots:
            mask = slot.placement.mask
            if mask & blocked:
                continue
            jobs = {lease.job or 0 for lease in gpu.leases if lease.slot.placement.mask & mask}
            staying = [lease.slot.profile for lease in gpu.leases if (lease.job or 0) not in jobs | ending]
            if gpu.geometry.admits((*staying, *(other.profile for other in placed), profile)):
                yield slot, jobs

    def _leaves_resources(self, waiting: JobRow, node: NodeRow, endings: Iterable[int]) -> bool:
        """Return whether the node has CPUs and memory for the pending job once these jobs have ended."""
        rows = [self._rows[job] for job in endings]
        cpus = node.cpus_free + sum(row.cpus_per_node for row in rows)
        memory = node.memory_free + sum(row.memory_on(node) for row in rows)
        return (not node.cpus or waiting.cpus_per_node <= cpus) and waiting.memory_on(node) <= memory


def _can_preempt_itself(demand: Demand, node: Node, endings: Mapping[int, Ending]) -> bool:
    """Return whether Slurm counts enough slices of the profiles on a node, free or of jobs that it may preempt."""
    counted: Counter[Profile] = Counter()
    for gpu in node.gpus:
        counted.update(slot.profile for slot in gpu.free.slots)
        counted.update(lease.slot.profile for lease in gpu.leases if lease.job in endings)
    return all(counted[profile] >= count for profile, count in demand.parts)

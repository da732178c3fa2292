"""Decide which slots to offer on each node: the supply stage of a decision.

`decide.supply.planner` plans for the queue; this module builds its input from the cluster and turns its result into
actions. An offer that a job does not take for a while is made on another node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Final

from slurm_migbatch.decide.actions import MoveOrder, Offer
from slurm_migbatch.decide.capacity import sharing as sharers
from slurm_migbatch.decide.capacity.demand import DemandBook, given_up, waits_for_begin
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Node, Reservation
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Run
from slurm_migbatch.decide.supply.limits import within_limits
from slurm_migbatch.decide.supply.moves import (
    MoveMemory,
    MoveRules,
    leaving,
    may_restart,
    restartable,
    wanting,
)
from slurm_migbatch.decide.supply.nodes import KnownNodes
from slurm_migbatch.decide.supply.planner import NOTHING_MOVES, Moving, Planner
from slurm_migbatch.decide.supply.preemption import GAIN_S, preempted_for
from slurm_migbatch.decide.supply.resources import NodeResources
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import GRES, drops_old_gres_type, is_marked

_FREE: Final = "free space"
"""Reason to rearrange a node without a job."""

NOTHING_ENDS: Final[Mapping[int, float]] = MappingProxyType({})
HURRIED_S: Final = 600.0
HURRIES: Final = 3
"""A job that nodes requeue is started without Slurm's delay at most so often in so many seconds."""
UNEXPLAINED_S: Final = 30.0
"""A node where Slurm counts more slices than are known is noted after so long."""
RESOURCES_S: Final = 15.0
"""An offer that is not taken for so long is made elsewhere if its node lacks the CPUs or the memory and another one has
them.
"""
_RESOURCES_AVOID_S: Final = 60.0
"""For how long such a node is not considered again."""
_RESOURCES_MOST: Final = 64
"""How many further nodes without CPUs or memory are then avoided for the job, which would be offered there next."""
_KINDS: Final = 3
"""If so many unequal jobs of a user did not start on a node, it is not offered to his others while other users wait."""
EXAMINE_S: Final = 30.0
"""Slurm is told at most so often to examine a job again that it has given up."""
_ENOUGH: Final = "as many catalog nodes ([cluster] catalog_nodes) as it has nodes prevent that"
_GAPS: Final = 3
"""Between two snapshots, which are usually seconds apart, an offer counts as not taken for at most `stuck_s` divided by
this.
"""


@dataclass(frozen=True)
class SupplySettings:
    """Settings of supply. Times in seconds.

    Attributes:
        stuck_s: an offer that is not taken for so long is made elsewhere.
        avoid_s: for how long such a node is not considered again for that job and equal ones.
        preference: offers for empty space; empty: the snapshot's preference, else one slice of each size.
        lending: partitions whose elastic training jobs get only what others leave.
        moves: when a training job is moved for a larger slice; None: never.
    """

    stuck_s: float = 90.0
    avoid_s: float = 600.0
    preference: tuple[Profile, ...] = ()
    lending: frozenset[str] = frozenset()
    moves: MoveRules | None = None


@dataclass
class SupplyMemory:
    """State of supply between decisions.

    Attributes:
        reservations: slots that the last plan keeps free.
        standing: offers to a job that are not taken: nodes, tasks, and since when.
        avoided: nodes on which a job did not start though it could, and until when they are avoided.
        sent_back: runs that nodes requeued and that Slurm does not show as pending yet.
        hurried: when such jobs were started without the delay, in the last `HURRIED_S` seconds.
        pairs: second job -> first job of a slice that they are to share.
        preference: the last offers for empty space.
        moves: jobs that are moved for larger slices, or preempted.
        unexplained: nodes where Slurm counts more than is known there, and since when.
        watched: time of the last snapshot.
        examined: when Slurm was last told to examine a job again that it had given up.
    """

    reservations: tuple[Reservation, ...] = ()
    standing: dict[int, tuple[tuple[str, ...], int, float]] = field(default_factory=dict)
    avoided: dict[int, dict[str, float]] = field(default_factory=dict)
    sent_back: set[Run] = field(default_factory=set)
    hurried: dict[int, tuple[float, ...]] = field(default_factory=dict)
    pairs: Mapping[int, int] = field(default_factory=dict)
    preference: tuple[Profile, ...] | None = None
    moves: MoveMemory = field(default_factory=MoveMemory)
    unexplained: dict[str, float] = field(default_factory=dict)
    watched: float | None = None
    examined: dict[int, float] = field(default_factory=dict)
    #: caches; they change no decision
    planner: Planner = field(default_factory=Planner, repr=False)
    queue: JobQueue = field(default_factory=JobQueue, repr=False)
    nodes: KnownNodes = field(default_factory=KnownNodes, repr=False)
    demands: DemandBook = field(default_factory=DemandBook, repr=False)
    offers: dict[str, Offer] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SupplyDecision:
    """The plan of one snapshot.

    Attributes:
        plan: the planner's result, made for `demands` on `nodes`.
        sharing: nodes on which slices are shared or are to be.
        offers: one for each node of the plan.
        start_now: requeued jobs that need not wait for Slurm's delay, and jobs that Slurm has to examine again.
        moves: orders for jobs that are moved for larger slices, or preempted.
        notes: sentences about nodes and jobs that need attention.
        avoided: nodes on which a job, or an equal one, did not start though its slices were offered there.
        put_off: further demands, not planned because their users have too many kinds before them (`supply.limits`).
    """

    plan: ClusterPlan
    demands: Sequence[Demand]
    nodes: Mapping[str, Node]
    sharing: Mapping[str, sharers.NodeGuests] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    start_now: tuple[int, ...] = ()
    moves: tuple[MoveOrder, ...] = ()
    notes: tuple[str, ...] = ()
    avoided: Mapping[int, frozenset[str]] = field(default_factory=dict)
    put_off: Sequence[Demand] = ()

    @property
    def shared(self) -> Mapping[int, str]:
        """Second jobs with a place next to another job in a plan, acknowledged or not, and its node."""
        return {guest: node for node, sharing in self.sharing.items() for guest in sharing.places}


def plan_supply(
    snapshot: ClusterSnapshot,
    memory: SupplyMemory,
    settings: SupplySettings,
    ending: Mapping[int, float] = NOTHING_ENDS,
) -> SupplyDecision:
    """Plan the offers of every node for the queue of this snapshot; updates `memory`.

    `ending`: loans that are ending, by job, and when their slices should be free. The job for which they end should
    get its reservation there, so that no other job gets the part that is free already. Meanwhile no move begins,
    because they may make the room for which a training job would be moved.
    """
    notes: list[str] = []
    queue = memory.queue
    queue.update(snapshot.jobs)
    if snapshot.past is not None and not memory.moves.loaded:
        rows, preemption = queue.rows, snapshot.preemption
        memory.moves.load(
            snapshot.past.actions, snapshot.now, lambda job: preemption.ending_of(rows[job]) if job in rows else None
        )
    start_now = (*_start_now(snapshot, memory), *memory.moves.follow(snapshot, queue))
    nodes, sharing = memory.nodes.of(snapshot, queue, memory.pairs, notes)
    avoided = _avoided(memory, snapshot.now, settings.avoid_s)
    elastic = _elastic(settings.lending) if settings.lending else None
    all_wanted = memory.demands.of(queue, snapshot.nodes, nodes.keys(), snapshot.now, avoided, elastic)
    wanted, put_off = within_limits(all_wanted, queue.rows)
    preference = settings.preference or snapshot.preference
    anew = memory.preference is not None and preference != memory.preference
    memory.preference = preference
    nodes = leaving(nodes, ending, queue)
    moving = NOTHING_MOVES
    stops = settings.moves is not None or bool(snapshot.preemption.kind)
    if stops:
        ends = {job: move.free_at(snapshot.now) for job, move in memory.moves.moves.items()}
        nodes = leaving(nodes, ends, queue)
    if settings.moves is not None:
        moving = _moving(snapshot, nodes, memory, settings.moves, may_begin=not ending)
    plan = memory.planner.plan(
        list(nodes.values()),
        wanted,
        snapshot.now,
        memory.reservations,
        preference,
        anew=anew,
        moving=moving,
        window_s=snapshot.backfill_window_s,
    )
    memory.reservations = plan.reservations
    moves = _stopped(snapshot, plan, wanted, nodes, memory, settings, may_begin=not ending) if stops else ()
    _watch_offers(snapshot, plan, wanted, memory, settings)
    again = _examine_again(plan, memory, snapshot.now)
    notes.extend(f"Slurm had given up job {job} (BadConstraints); {_ENOUGH}" for job in again)
    start_now = (*start_now, *again)
    due = plan.given() if sharing else {}
    sharing = {node: replace(shared, due=due.get(node, {})) for node, shared in sharing.items()}
    memory.offers = _offers(plan, nodes, sharing, memory.offers)
    notes.extend(_unexplained(plan, memory, snapshot.now))
    offers = tuple(memory.offers.values())
    return SupplyDecision(plan, wanted, nodes, sharing, offers, start_now, moves, tuple(notes), avoided, put_off)


def _moving(
    snapshot: ClusterSnapshot, nodes: Mapping[str, Node], memory: SupplyMemory, rules: MoveRules, *, may_begin: bool
) -> Moving:
    """Return the planner's input on training jobs that are being moved or may be."""
    queue, moves, now = memory.queue, memory.moves, snapshot.now

    def demand_of_running(row: JobRow) -> Demand | None:
        return memory.demands.of_running(queue, row)

    needed = tuple(
        demand
        for job, move in moves.moves.items()
        if move.ending is None and (demand := demand_of_running(queue.rows[job])) is not None and demand.slices
    )
    wanting_jobs = wanting(moves, memory.reservations, now, rules) if may_begin else frozenset()
    candidates = restartable(moves, snapshot, queue, nodes, demand_of_running, rules) if wanting_jobs else ()
    rows = {job: queue.rows[job] for job in wanting_jobs if job in queue.rows} if candidates else {}
    return Moving(needed, wanting_jobs, candidates, rows, movable=queue.count_signalled(may_restart))


def _stopped(
    snapshot: ClusterSnapshot,
    plan: ClusterPlan,
    wanted: Sequence[Demand],
    nodes: Mapping[str, Node],
    memory: SupplyMemory,
    settings: SupplySettings,
    *,
    may_begin: bool,
) -> tuple[MoveOrder, ...]:
    """Begin the moves of a plan, and preemptions; return the orders for all that are active."""
    moves, queue, now, rules = memory.moves, memory.queue, snapshot.now, settings.moves or MoveRules()
    moves.note(plan.reservations, now)
    moves.begin(plan.moves, queue)
    if snapshot.preemption.kind and may_begin:
        jobs = wanting(moves, plan.reservations, now, replace(rules, gain_s=GAIN_S))
        moves.begin(preempted_for(snapshot, jobs, plan.reservations, wanted, nodes, queue.rows, moves), queue)
    return moves.due(now, rules, queue)


def is_elastic(row: JobRow, lending: Collection[str]) -> bool:
    """Return whether a pending job is an elastic training job; hints are not parsed, because the queue may be long."""
    names = row.partitions if is_marked(row.comment) else ()
    return bool(names) and all(name in lending for name in names)


@lru_cache(maxsize=16)
def _elastic(lending: frozenset[str]) -> Callable[[JobRow], bool]:
    return lambda row: is_elastic(row, lending)


def _offers(
    plan: ClusterPlan,
    nodes: Mapping[str, Node],
    sharing: Mapping[str, sharers.NodeGuests],
    before: Mapping[str, Offer],
) -> dict[str, Offer]:
    """Return the offer of each node; an unchanged one is the same object."""
    reasons = _reasons(plan)
    offers: dict[str, Offer] = {}
    for name, node_plan in plan.nodes.items():
        offer, node = before.get(name), nodes[name]
        shared, why = sharing.get(name, sharers.ALONE), reasons.get(name, _FREE)
        if (
            offer is None
            or offer.plan is not node_plan
            or offer.state is not node
            or offer.why != why
            or (offer.sharing is not shared and offer.sharing != shared)
        ):
            offer = Offer(node_plan, node, shared, why)
        offers[name] = offer
    return offers


# -- offers that are not taken -----------------------------------------------------------------------------------------


def _avoided(memory: SupplyMemory, now: float, avoid_s: float) -> dict[int, frozenset[str]]:
    """Return the nodes to avoid for each job: those on which it or an equal job did not start, as for array tasks, or
    `_KINDS` unequal ones of its user.
    """
    # `until` is later than `avoid_s` from now if the clock was set back
    memory.avoided = {
        job: kept
        for job, names in memory.avoided.items()
        if (kept := {name: until for name, until in names.items() if now < until <= now + avoid_s})
    }
    if not memory.avoided:
        return {}
    rows = memory.queue.rows
    avoided = {job: frozenset(names) for job, names in memory.avoided.items()}
    together: dict[tuple[object, ...], frozenset[str]] = {}
    for job, names in avoided.items():
        if (row := rows.get(job)) is not None and row.het_job is None:
            together[_kind(row)] = together.get(_kind(row), frozenset()) | names
    users, often = {kind[0] for kind in together}, _often_unused(memory, now)
    equal = {
        row.job_id: together.get(_kind(row), frozenset()) | often.get(row.uid, frozenset())
        for row in rows.values()
        if row.pending and row.uid in users and row.het_job is None
    }
    return {**avoided, **{job: names for job, names in equal.items() if names}}


def _often_unused(memory: SupplyMemory, now: float) -> dict[int, frozenset[str]]:
    """Return by user the nodes on which `_KINDS` unequal jobs of his did not start; none unless other users wait.

    Nodes that are avoided because other jobs have their CPUs or memory do not count: smaller jobs may start there.
    """
    rows, kinds = memory.queue.rows, dict[int, dict[str, set[tuple[object, ...]]]]()
    for job, names in memory.avoided.items():
        counted = [name for name, until in names.items() if until > now + _RESOURCES_AVOID_S]
        if counted and (row := rows.get(job)) is not None and row.het_job is None:
            kind = _kind(row)
            for name in counted:
                kinds.setdefault(row.uid, {}).setdefault(name, set()).add(kind)
    found = {uid: frozenset(name for name, of in nodes.items() if len(of) >= _KINDS) for uid, nodes in kinds.items()}
    several = any(found.values()) and len({row.uid for row in rows.values() if row.pending and GRES in row.gres}) > 1
    return found if several else {}


def _kind(row: JobRow) -> tuple[object, ...]:
    """Return what equal jobs have in common, the user first."""
    return (
        *(row.uid, row.account, row.partition, row.name, row.gres, row.cpus, row.num_nodes),
        *(row.memory_per_node, row.memory_per_cpu, row.exclusive),
        *(row.features, row.requested_nodes, row.reservation, row.time_limit_s, row.time_min_s),
    )


def _watch_offers(
    snapshot: ClusterSnapshot,
    plan: ClusterPlan,
    wanted: Sequence[Demand],
    memory: SupplyMemory,
    settings: SupplySettings,
) -> None:
    """Record offers to a job that are not taken; after `stuck_s` avoid these nodes for it.

    Slurm has a reason then that migbatchd does not know. If it is known, because other jobs have the node's CPUs or
    memory, or the node exclusively, and there is a node with enough, `RESOURCES_S` is enough. Time does not count in
    which there were no snapshots, mostly because slurmctld was down and could start nothing, or by which the clock was
    set.
    """
    now = snapshot.now
    passed = now - (now if memory.watched is None else memory.watched)
    memory.watched, uncounted = now, passed - min(max(passed, 0.0), settings.stuck_s / _GAPS)
    previous_standing, memory.standing = memory.standing, {}
    rows, resources = memory.queue.rows, NodeResources(node for node in snapshot.nodes if node.cpus)

    @cache
    def pools() -> Mapping[int, frozenset[str]]:
        return {demand.job: demand.pool for demand in reversed(wanted)}

    for job, placed in plan.placed.items():
        row = rows.get(job)
        if not placed.standing or row is None or not row.pending:
            continue
        previous = previous_standing.get(job)
        if previous is None or previous[:2] != (placed.nodes, row.tasks):
            memory.standing[job] = (placed.nodes, row.tasks, now)
            continue
        since = previous[2] + uncounted
        if now - since >= settings.stuck_s:
            memory.avoided.setdefault(job, {}).update(dict.fromkeys(placed.nodes, now + settings.avoid_s))
        elif now - since >= RESOURCES_S and (
            lacking := _nodes_without_resources(row, placed.nodes, pools(), resources)
        ):
            memory.avoided.setdefault(job, {}).update(dict.fromkeys(lacking, now + _RESOURCES_AVOID_S))
        else:
            memory.standing[job] = (placed.nodes, row.tasks, since)
    memory.avoided = {job: names for job, names in memory.avoided.items() if job in rows and rows[job].pending}


def _nodes_without_resources(
    row: JobRow, offered: Collection[str], pools: Mapping[int, frozenset[str]], resources: NodeResources
) -> list[str]:
    """Return the nodes on which other jobs have the CPUs or the memory of a job.

    None unless its slices are offered on one of them, and enough other nodes have CPUs and memory.
    """
    enough = resources.of(row, pools.get(row.job_id, frozenset()))
    lacking = [] if enough is None else [name for name in offered if not enough.by_name.get(name, True)]
    if enough is None or not lacking:
        return []
    able = enough.able - sum(enough.by_name.get(name, False) for name in offered)
    if able < len(lacking):
        return []
    return [*lacking, *islice((name for name, has in enough.by_name.items() if not has), _RESOURCES_MOST)]


# -- requeued jobs, notes and reasons ----------------------------------------------------------------------------------


def _start_now(snapshot: ClusterSnapshot, memory: SupplyMemory) -> list[int]:
    """Return jobs that a node requeued and that wait only for Slurm's delay.

    A job that is requeued repeatedly waits for it, to limit the load of slurmctld and the node.
    """
    memory.sent_back.update(snapshot.sent_back)
    listed, now = memory.queue.rows, snapshot.now
    memory.hurried = {job: times for job, times in memory.hurried.items() if times[-1] > now - HURRIED_S}
    start_now = []
    for run in sorted(memory.sent_back):
        job, restart = run
        row = listed.get(job)
        if row is None or row.restarts > restart + row.pending:  # a later run
            memory.sent_back.discard(run)
        elif row.pending:
            memory.sent_back.discard(run)
            times = tuple(time for time in memory.hurried.get(job, ()) if time > now - HURRIED_S)
            if waits_for_begin(row, now) and len(times) < HURRIES and not _may_miss_a_prolog(row):
                memory.hurried[job] = (*times, now)
                start_now.append(job)
    return start_now


def _may_miss_a_prolog(row: JobRow) -> bool:
    """Return whether a node may run a requeued job without its Prolog, unless the job waits for Slurm's delay.

    Slurm up to 23.02 may send the end of a job to a node before the node has begun its Prolog, as when another node of
    the job was faster to send it back; if the job returns soon, that node starts its tasks at once.
    """
    return (row.num_nodes > 1 or row.het_job is not None) and not drops_old_gres_type(row.gres)


def _examine_again(plan: ClusterPlan, memory: SupplyMemory, now: float) -> list[int]:
    """Return jobs that Slurm has given up and whose slices are offered now; each at most once in `EXAMINE_S`."""
    memory.examined = {job: at for job, at in memory.examined.items() if now - EXAMINE_S < at <= now}
    rows = memory.queue.rows
    again = [job for job, placed in plan.placed.items() if placed.standing and job in rows and given_up(rows[job])]
    again = [job for job in again if job not in memory.examined]
    memory.examined.update(dict.fromkeys(again, now))
    return again


def _unexplained(plan: ClusterPlan, memory: SupplyMemory, now: float) -> list[str]:
    """Return notes on nodes where Slurm has counted more than is known for `UNEXPLAINED_S`; updates `memory`.

    Shorter is usual: a node reports the end of a job before slurmctld takes its GRES back.
    """
    memory.unexplained = {name: memory.unexplained.get(name, now) for name in plan.unexplained}
    return [
        f"Slurm counts {', '.join(f'{n} x {p}' for p, n in counts.items())} on {name} that are neither on the node "
        "nor in its plan; its offer is left unchanged until it reports"
        for name, counts in plan.unexplained.items()
        if now >= memory.unexplained[name] + UNEXPLAINED_S
    ]


def _reasons(plan: ClusterPlan) -> dict[str, str]:
    """Return why nodes are rearranged, for those that are not rearranged for free space alone."""
    jobs: dict[str, list[int]] = {}
    reserved: dict[str, dict[int, None]] = {}
    for job, placed in plan.placed.items():
        if not placed.standing:
            for node in placed.nodes:
                jobs.setdefault(node, []).append(job)
    for reservation in plan.reservations:
        for node, _, _ in reservation.places:
            reserved.setdefault(node, {})[reservation.job] = None
    reasons: dict[str, list[str]] = {}
    for node, job_ids in jobs.items():
        listed = ", ".join(str(job) for job in job_ids[:5]) + (" and others" if len(job_ids) > 5 else "")
        reasons[node] = ["for job " + listed]
    for node, reserved_jobs in reserved.items():
        listed = ", ".join(str(job) for job in list(reserved_jobs)[:5])
        reasons.setdefault(node, []).append("reserved for job " + listed)
    return {node: "; ".join(parts) for node, parts in reasons.items()}

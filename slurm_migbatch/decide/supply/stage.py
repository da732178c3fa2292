"""Decide which slots to offer on each node: the supply stage of a decision.

What the queue needs is planned by `decide.supply.planner`; here it is told of the cluster, and its answer becomes
actions.
 An offer that stands for a job and is not taken for a while is sought on other nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_migbatch.decide.actions import Offer, StartNow
from slurm_migbatch.decide.capacity import sharing as sharers
from slurm_migbatch.decide.capacity.demand import GRES, demands, profiles, slices
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.capacity.gpu_view import KnownGpu
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Gpu, Mode, Node, Reservation
from slurm_migbatch.decide.snapshot import ClusterSnapshot, PlanStatus
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import is_marked

_UNTOLD = PlanStatus()


@dataclass(frozen=True)
class SupplySettings:
    """How supply decides. Times in seconds.

    Attributes:
        stuck_s: an offer that stands for so long and is not taken is sought elsewhere.
        avoid_s: for how long such a node is not considered again for that job.
        preference: what to offer in empty space; empty: what the snapshot prefers, else one slice of each size.
        lending: partitions whose elastic training jobs get only what others leave.
    """

    stuck_s: float = 90.0
    avoid_s: float = 600.0
    preference: tuple[Profile, ...] = ()
    lending: frozenset[str] = frozenset()


@dataclass
class SupplyMemory:
    """What supply remembers from one decision to the next.

    Attributes:
        reservations: slots that the last plan keeps free.
        standing: offers that stand for a job and are not taken: nodes, tasks, and since when.
        avoided: nodes on which a job did not start though it could, and until when they are avoided.
        sent_back: jobs that nodes returned and that Slurm does not show as pending yet.
        pairs: second job -> first job of a slice that they are to share.
        preference: what empty space was offered as last.
    """

    reservations: tuple[Reservation, ...] = ()
    standing: dict[int, tuple[tuple[str, ...], int, float]] = field(default_factory=dict)
    avoided: dict[int, dict[str, float]] = field(default_factory=dict)
    sent_back: set[int] = field(default_factory=set)
    pairs: Mapping[int, int] = field(default_factory=dict)
    preference: tuple[Profile, ...] | None = None
    #: these save work and carry no meaning from round to round
    planner: Planner = field(default_factory=Planner, repr=False)
    known: dict[str, KnownGpu] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SupplyDecision:
    """The plan of one snapshot.

    Attributes:
        plan: the planner's answer, made for `demands` on `nodes`.
        sharing: nodes on which slices are shared or are to be.
        offers: one for each node of the plan.
        start_now: requeued jobs that need not wait out Slurm's delay.
        notes: sentences about nodes that need somebody's attention.
    """

    plan: ClusterPlan
    demands: Sequence[Demand]
    nodes: Mapping[str, Node]
    sharing: Mapping[str, sharers.Sharing] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    start_now: tuple[StartNow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def shared(self) -> Mapping[int, str]:
        """Second jobs whose place beside another job is in a plan, acknowledged or not, and its node."""
        return {guest: node for node, found in self.sharing.items() for guest in found.places}


def plan_supply(snapshot: ClusterSnapshot, memory: SupplyMemory, settings: SupplySettings) -> SupplyDecision:
    """Plan what every node offers, for the queue of this snapshot; `memory` is brought up to it."""
    notes: list[str] = []
    start_now = _start_now(snapshot, memory)
    nodes, sharing = _nodes(snapshot, memory, notes)
    avoided = _avoided(memory, snapshot.now)
    lending = settings.lending
    elastic = (lambda row: is_elastic(row, lending)) if lending else None
    wanted = demands(snapshot.jobs, snapshot.nodes, nodes.keys(), snapshot.now, avoided, elastic)
    preference = settings.preference or snapshot.preference
    anew = memory.preference is not None and preference != memory.preference
    memory.preference = preference
    plan = memory.planner.plan(list(nodes.values()), wanted, snapshot.now, memory.reservations, preference, anew=anew)
    memory.reservations = plan.reservations
    _watch_offers(snapshot, plan, memory, settings)
    due = sharers.due(plan, wanted) if sharing else {}
    sharing = {node: replace(found, due=due.get(node, {})) for node, found in sharing.items()}
    reasons = _Reasons(plan)
    offers = tuple(
        Offer(node_plan, nodes[node_plan.node], sharing.get(node_plan.node, sharers.ALONE), reasons.of(node_plan.node))
        for node_plan in plan.nodes.values()
    )
    notes.extend(_unexplained(plan))
    return SupplyDecision(plan, wanted, nodes, sharing, offers, start_now, tuple(notes))


def is_elastic(row: JobRow, lending: Collection[str]) -> bool:
    """Tell whether a pending job is an elastic training job; asked for every one, so its hints are not read."""
    return is_marked(row.comment) and all(name in lending for name in row.partition.split(","))


# -- what the planner is told ------------------------------------------------------------------------------------------


def _nodes(
    snapshot: ClusterSnapshot, memory: SupplyMemory, notes: list[str]
) -> tuple[dict[str, Node], dict[str, sharers.Sharing]]:
    jobs, now = snapshot.jobs, snapshot.now
    rows = {row.name: row for row in snapshot.nodes}
    ends = {row.job_id: _until(row, now) for row in jobs if row.active or row.unread}
    running = _by_node(jobs)
    listed, started = {row.job_id: row for row in jobs}, sharers.guests(jobs)
    sharing: dict[str, sharers.Sharing] = {}
    found = {}
    present = {gpu.uuid for facts in snapshot.inventory.values() for gpu in facts.gpus}
    memory.known = {uuid: known for uuid, known in memory.known.items() if uuid in present}
    for name, facts in snapshot.inventory.items():
        row = rows.get(name)
        if row is None:
            continue
        if not sum(row.gres.values()):
            if facts.gpus:
                notes.append(f"{name} has MIG GPUs, but slurm.conf gives it no gres mig, so nothing can be offered")
            continue
        if row.invalid:
            notes.append(
                f"Slurm holds {name} for invalid ({row.reason or 'no reason'}): the sum of its mig counts in "
                f"slurm.conf and gres.conf must be the same; then scontrol update NodeName={name} State=RESUME"
            )
        status = snapshot.plans.get(name, _UNTOLD)
        if memory.pairs or started:
            places = {} if status.plan is None else status.plan.guests
            used = row.used.get(sharers.GUEST, 0)
            shared = sharers.sharing(name, facts, memory.pairs, listed, started, used, places)
            if shared != sharers.ALONE:
                sharing[name] = shared
        gpus, problems = _gpus(name, facts, status, ends, started, now, memory.known)
        notes.extend(problems)
        mode = _mode(row, facts, status)
        unlocated = _unlocated(running.get(name, []), facts) + Counter(sharing.get(name, sharers.ALONE).unlocated)
        found[name] = Node(
            name=name,
            gpus=gpus,
            used=profiles(row.used),
            unlocated=unlocated,
            total=status.total,
            mode=Mode.FROZEN if problems and mode is Mode.OPEN else mode,
        )
    if sharing:
        sharing = sharers.without_strays(sharing, jobs)
    return found, sharing


def _gpus(
    name: str,
    facts: NodeFacts,
    status: PlanStatus,
    ends: Mapping[int, float | None],
    guests: Collection[int],
    now: float,
    cache: dict[str, KnownGpu],
) -> tuple[tuple[Gpu, ...], list[str]]:
    """Return the GPUs of a node for the planner, and a sentence for each whose report is impossible."""
    gpus, problems = [], []
    for gpu in facts.gpus:
        known = cache.get(gpu.uuid)
        rows = () if status.plan is None else tuple(status.plan.gpus.get(gpu.uuid, ()))
        until, alone = sharers.ends(gpu, ends, now), sharers.whose(gpu, guests)
        if known is None or known.facts is not gpu or (known.until, known.guests, known.rows) != (until, alone, rows):
            known = cache[gpu.uuid] = KnownGpu.of(gpu, rows, until, alone)
        if known.gpu is not None:
            gpus.append(known.gpu)
        else:
            problems.append(
                f"{name}: what it says of GPU {gpu.uuid} cannot be ({known.contradiction}); the node is left as it is"
            )
    return tuple(gpus), problems


def _mode(row: NodeRow, facts: NodeFacts, status: PlanStatus) -> Mode:
    if not row.open:
        return Mode.CLOSED
    if not facts.healthy or not facts.gpus:
        return Mode.WITHDRAWN
    if not status.reachable or (status.plan is not None and not status.acknowledged):
        return Mode.FROZEN
    return Mode.OPEN


def _by_node(jobs: Sequence[JobRow]) -> dict[str, list[JobRow]]:
    """Return by node the jobs that have MIG slices; one that is completing may have given them back."""
    found: dict[str, list[JobRow]] = {}
    for row in jobs:
        if row.active and row.state != "COMPLETING" and GRES in row.gres:
            for node in row.nodes:
                found.setdefault(node, []).append(row)
    return found


def _unlocated(running: Sequence[JobRow], facts: NodeFacts) -> Counter[Profile]:
    located = {run for gpu in facts.gpus for _, run in gpu.leases}
    found: Counter[Profile] = Counter()
    for row in running:
        if (row.job_id, row.restarts) not in located:
            found.update(slices(row.gres))
    return found


def _until(row: JobRow, now: float) -> float | None:
    if row.state == "COMPLETING":
        return now
    return row.end


# -- offers that are not taken -----------------------------------------------------------------------------------------


def _avoided(memory: SupplyMemory, now: float) -> dict[int, frozenset[str]]:
    for job, names in list(memory.avoided.items()):
        kept = {name: until for name, until in names.items() if until > now}
        if kept:
            memory.avoided[job] = kept
        else:
            del memory.avoided[job]
    return {job: frozenset(names) for job, names in memory.avoided.items()}


def _watch_offers(snapshot: ClusterSnapshot, plan: ClusterPlan, memory: SupplyMemory, settings: SupplySettings) -> None:
    """Note offers that stand for a job and are not taken: Slurm knows a reason why not, and we do not."""
    now = snapshot.now
    before, memory.standing = memory.standing, {}
    tasks = {row.job_id: row.tasks for row in snapshot.jobs if row.pending}
    for job, placed in plan.placed.items():
        if not placed.standing or job not in tasks:
            continue
        old = before.get(job)
        if old is None or old[:2] != (placed.nodes, tasks[job]):
            memory.standing[job] = (placed.nodes, tasks[job], now)
        elif now - old[2] < settings.stuck_s:
            memory.standing[job] = old
        else:
            memory.avoided.setdefault(job, {}).update(dict.fromkeys(placed.nodes, now + settings.avoid_s))
    for job in [job for job in memory.avoided if job not in tasks]:
        del memory.avoided[job]


# -- small things ------------------------------------------------------------------------------------------------------


def _start_now(snapshot: ClusterSnapshot, memory: SupplyMemory) -> tuple[StartNow, ...]:
    """Return jobs that a node sent back and that wait for nothing but the delay of their requeue."""
    memory.sent_back.update(snapshot.sent_back)
    listed = {row.job_id: row for row in snapshot.jobs}
    found = []
    for job in sorted(memory.sent_back):
        row = listed.get(job)
        if row is None:
            memory.sent_back.discard(job)
        elif row.pending:
            memory.sent_back.discard(job)
            if row.reason == "BeginTime":
                found.append(StartNow(job))
    return tuple(found)


def _unexplained(plan: ClusterPlan) -> list[str]:
    return [
        f"Slurm counts {', '.join(f'{n} x {p}' for p, n in counts.items())} on {name} that neither the node nor "
        "its plan accounts for; the node's offer is left alone until it reports"
        for name, counts in plan.unexplained.items()
    ]


class _Reasons:
    """Why nodes are rearranged, by a plan."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._jobs: dict[str, list[int]] = {}
        self._reserved: dict[str, dict[int, None]] = {}
        for job, placed in plan.placed.items():
            if not placed.standing:
                for node in placed.nodes:
                    self._jobs.setdefault(node, []).append(job)
        for reservation in plan.reservations:
            for node, _, _ in reservation.places:
                self._reserved.setdefault(node, {})[reservation.job] = None

    def of(self, node: str) -> str:
        """Return the reason for one node's new offer."""
        jobs, reserved = self._jobs.get(node, []), list(self._reserved.get(node, ()))
        parts = []
        if jobs:
            parts.append("for job " + ", ".join(str(j) for j in jobs[:5]) + (" and others" if len(jobs) > 5 else ""))
        if reserved:
            parts.append("kept free for job " + ", ".join(str(j) for j in reserved[:5]))
        return "; ".join(parts) or "free space"

"""Build the planner's input of nodes, cached between rounds for unchanged ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from slurm_migbatch.decide.capacity import sharing as sharers
from slurm_migbatch.decide.capacity.demand import held, profiles, unlocated
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.capacity.gpu_view import KnownGpu
from slurm_migbatch.decide.capacity.model import Mode, Node
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.snapshot import ClusterSnapshot, PlanStatus
from slurm_migbatch.slurm.client import ACTIVE, UNREAD, NodeRow
from slurm_migbatch.workload.loans import GRES

_UNTOLD = PlanStatus()
_HOLDING = (ACTIVE | {UNREAD}) - {"COMPLETING"}
"""States in which a job holds its slices."""


@dataclass(frozen=True)
class _KnownNode:
    """A node for the planner, and its sources.

    Attributes:
        node: None if nothing can be planned for it.
        notes: sentences about it that need attention.
        jobs: those that have slices of it.
        passing: whether the result depends on the current time, because a job with a lease has ended in Slurm.
        gpus: by UUID.
    """

    facts: NodeFacts
    row: NodeRow
    status: PlanStatus
    node: Node | None
    notes: tuple[str, ...] = ()
    jobs: frozenset[int] = frozenset()
    passing: bool = False
    gpus: Mapping[str, KnownGpu] = field(default_factory=dict)


class KnownNodes:
    """The nodes of successive snapshots."""

    def __init__(self) -> None:
        self._version = -1
        self._sharing = False
        self._known: dict[str, _KnownNode] = {}

    def of(
        self, snapshot: ClusterSnapshot, queue: JobQueue, pairs: Mapping[int, int], notes: list[str]
    ) -> tuple[dict[str, Node], dict[str, sharers.NodeGuests]]:
        """Return the nodes that may be planned for, in Slurm's order, and how slices are shared on them.

        Args:
            pairs: second job -> first job of a slice that they are to share.
            notes: receives sentences about nodes that need attention.
        """
        started = queue.guests
        shares = bool(pairs or started)
        # Sharing depends on much more than a node, so then every node is processed.
        follows = queue.version == self._version + 1
        incremental = (follows or queue.version == self._version) and not shares and not self._sharing
        self._version, self._sharing = queue.version, shares
        touched = _touched(queue) if incremental and follows else frozenset[str]()
        changed, plans = queue.changed if follows else frozenset[int](), snapshot.plans
        before, self._known = self._known, {}
        sharing: dict[str, sharers.NodeGuests] = {}
        plannable: dict[str, Node] = {}
        for row in snapshot.nodes:
            name = row.name
            facts = snapshot.inventory.get(name)
            if facts is None:
                continue
            status = plans.get(name, _UNTOLD)
            known = before.get(name)
            if not (
                incremental
                and known is not None
                and known.facts is facts
                and known.row is row
                and (known.status is status or known.status == status)
                and not known.passing
                and name not in touched
                and changed.isdisjoint(known.jobs)
            ):
                shared = sharers.ALONE
                if shares and any(row.gres.values()):
                    used = row.used.get(sharers.GUEST, 0)
                    places = {} if status.plan is None else status.plan.guests
                    shared = sharers.sharing(name, facts, pairs, queue.rows, started, used, places)
                    if shared != sharers.ALONE:
                        sharing[name] = shared
                known = _examined(name, facts, row, status, queue, shared, snapshot.now, known)
            self._known[name] = known
            if known.notes:
                notes.extend(known.notes)
            if known.node is not None:
                plannable[name] = known.node
        if sharing:
            sharing = sharers.without_strays(sharing, queue.jobs)
        return plannable, sharing


def _touched(queue: JobQueue) -> frozenset[str]:
    """Return the nodes of jobs that entered the queue, left it or changed."""
    rows = chain(queue.removed, queue.fresh)
    return frozenset([name for row in rows if row.nodes and GRES in row.gres for name in row.nodes])


def _examined(
    name: str,
    facts: NodeFacts,
    row: NodeRow,
    status: PlanStatus,
    queue: JobQueue,
    shared: sharers.NodeGuests,
    now: float,
    before: _KnownNode | None,
) -> _KnownNode:
    """Build a node for the planner."""
    if not sum(row.gres.values()):
        note = f"{name} has MIG GPUs but no gres mig in slurm.conf, so nothing can be offered"
        return _KnownNode(facts, row, status, None, (note,) if facts.gpus else ())
    notes = []
    if row.invalid:
        notes.append(
            f"Slurm considers {name} invalid ({row.reason or 'no reason'}): the sum of its mig counts in "
            f"slurm.conf and gres.conf must be the same; then scontrol update NodeName={name} State=RESUME"
        )
    runs = [run for gpu in facts.gpus for _, run in gpu.leases]
    holders = queue.holders(name)
    missing = unlocated(holders, set(runs))
    runs += [run for gpu in facts.gpus if gpu.guests for _, run in gpu.guests]
    ends: dict[int, float | None] = {}
    passing = False
    rows = queue.rows
    for job, _ in runs:
        job_row = rows.get(job)
        if job_row is not None and job_row.state in _HOLDING:
            # Slurm moves the end of a suspended job when it is resumed; until then that may be in the past
            ends[job] = None if job_row.state == "SUSPENDED" else job_row.end
        else:
            passing = True  # it should have ended by now, so its end is the current time
    known_gpus = _gpus(facts, status, ends, queue.guests, now, before.gpus if before is not None else {})
    problems = [
        f"{name}: its report of GPU {uuid} is inconsistent ({known.contradiction}); the node is left unchanged"
        for uuid, known in known_gpus.items()
        if known.gpu is None
    ]
    mode = _mode(row, facts, status)
    if shared.unlocated:
        missing += Counter(shared.unlocated)
    used = profiles(row.used)
    node = Node(
        name=name,
        gpus=tuple([known.gpu for known in known_gpus.values() if known.gpu is not None]),
        used=used,
        unlocated=missing,
        total=status.total,
        mode=Mode.FROZEN if problems and mode is Mode.OPEN else mode,
        asleep=row.asleep,
        uncounted={p: n - used.get(p, 0) for p, n in held(holders).items() if n > used.get(p, 0)},
    )
    if before is not None and before.node == node:
        node = before.node  # results cached for this object remain valid
    jobs = frozenset([job for job, _ in runs]) if passing else frozenset(ends)
    return _KnownNode(facts, row, status, node, (*notes, *problems), jobs, passing, known_gpus)


def _gpus(
    facts: NodeFacts,
    status: PlanStatus,
    ends: Mapping[int, float | None],
    guests: Collection[int],
    now: float,
    before: Mapping[str, KnownGpu],
) -> dict[str, KnownGpu]:
    """Return the GPUs of a node by UUID."""
    gpus: dict[str, KnownGpu] = {}
    for gpu in facts.gpus:
        known = before.get(gpu.uuid)
        rows = () if status.plan is None else tuple(status.plan.gpus.get(gpu.uuid, ()))
        until, as_guest = sharers.ends(gpu, ends, now), sharers.whose(gpu, guests)
        if (
            known is None
            or known.facts is not gpu
            or (known.until, known.guests, known.rows) != (until, as_guest, rows)
        ):
            known = KnownGpu.of(gpu, rows, until, as_guest)
        gpus[gpu.uuid] = known
    return gpus


def _mode(row: NodeRow, facts: NodeFacts, status: PlanStatus) -> Mode:
    if not row.open:
        return Mode.CLOSED
    if not facts.healthy or not facts.gpus:
        return Mode.WITHDRAWN
    if not status.reachable or (status.plan is not None and not status.acknowledged):
        return Mode.FROZEN
    return Mode.OPEN

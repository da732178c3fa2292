"""The supply loop: look at Slurm and the nodes, plan, advertise.

One `round()` is one look; migbatchd calls it every second and whenever a node reports a start or a stop. Nothing is
concluded from a failed look: the round then changes nothing and says why.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError
from slurm_migbatch.supply import guests as sharers
from slurm_migbatch.supply.advertiser import Advertised, Advertiser, Plans, PublishedPlan
from slurm_migbatch.supply.audit import Excess, audit
from slurm_migbatch.supply.demand import GRES, LOAN, could_run, demands, profiles, slices
from slurm_migbatch.supply.known import KnownGpu
from slurm_migbatch.supply.model import Demand, Mode, Node, Plan, Reservation
from slurm_migbatch.supply.planner import Planner
from slurm_migbatch.supply.view import NodeFacts, NodesView


class Clock(Protocol):
    """Both clocks, so that tests can turn them."""

    def time(self) -> float:
        """Unix seconds."""

    def monotonic(self) -> float:
        """Seconds that never jump."""


class NodeBoard(Plans, Protocol):
    """The plan board, which also knows when a node was last heard."""

    def silence(self, node: str) -> float:
        """Seconds since `node` was last heard; infinite if never."""


class Record(Protocol):
    """Where supply changes are written down (the store's `record_supply`)."""

    def __call__(self, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> object:
        """Keep what `node` offers from now on."""


@dataclass(frozen=True)
class Settings:
    """How the loop behaves. Times in seconds."""

    #: how long one round waits for nodes to acknowledge new plans
    ack_wait_s: float = 0.5
    #: a node that was not heard for so long gets no new plan; what it offers stays
    silence_s: float = 90.0
    #: an offer that stands for so long and is not taken is sought elsewhere
    stuck_s: float = 90.0
    #: for how long such a node is not considered again for that job
    avoid_s: float = 600.0
    #: what to offer in empty space; empty: one slice of each size
    preference: tuple[Profile, ...] = ()


@dataclass(frozen=True)
class NodeChange:
    """A node's new offer and the reason for it."""

    node: str
    version: int
    counts: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Report:
    """What one round saw and did."""

    at: float
    changes: tuple[NodeChange, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    excess: tuple[Excess, ...] = ()
    #: sentences for the log: nodes that need somebody's attention
    notes: tuple[str, ...] = ()
    #: why the round was given up, if it was
    error: str = ""
    pending: int = 0
    waiting: int = 0
    offers: Mapping[str, int] = field(default_factory=dict)
    unacknowledged: tuple[str, ...] = ()
    slurm_calls: int = 0
    #: seconds: observe, plan, advertise
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def unsettled(self) -> bool:
        """Whether another round should follow soon."""
        return bool(self.unacknowledged or self.error)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of reference cycles; it runs after the round instead.

    A round on a large site makes some hundred thousand objects that live until it is over and form no cycles to speak
    of; looking at all of them again and again would take as long as the plan itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class SupplyLoop:
    """Keeps what nodes offer matched to the queue.

    Args:
        client: Slurm.
        nodes: what the nodes have told of their GPUs.
        board: where nodes get their plans and acknowledge them.
        clock: the time.
        record: called for every change of a node's offer.
        settings: see Settings.
        planner: another planner than the usual one.
        loan: whether a pending job may have a slice only where nothing else needs the room.
    """

    def __init__(
        self,
        client: SlurmClient,
        nodes: NodesView,
        board: NodeBoard,
        clock: Clock,
        record: Record,
        settings: Settings = Settings(),
        planner: Planner | None = None,
        loan: Callable[[JobRow], bool] = lambda row: False,
    ) -> None:
        self._loan = loan
        self._client, self._view, self._board, self._clock, self._record = client, nodes, board, clock, record
        self.settings = settings
        self._planner = planner or Planner()
        self._advertiser = Advertiser(client, board, settings.ack_wait_s)
        self._reservations: tuple[Reservation, ...] = ()
        self._standing: dict[int, tuple[tuple[str, ...], int, float]] = {}
        self._avoid: dict[int, dict[str, float]] = {}
        self._hasten: set[int] = set()
        self._gpus: dict[str, KnownGpu] = {}
        self._plan: Plan | None = None
        self._wanted: Sequence[Demand] = ()
        self._told: Mapping[str, Node] = {}
        self._preferred: tuple[Profile, ...] = ()
        self._anew = False
        self._jobs: dict[int, JobRow] = {}
        self._pairs: Mapping[int, int] = {}
        self._sharing: dict[str, sharers.Sharing] = {}

    def guests(self, pairs: Mapping[int, int]) -> None:
        """Let these pending jobs share slices: second job -> first job, of the same user, which runs.

        Where a pair can be offered, the next round does so: the node's plan names it and Slurm is told of a `guest`
        there. It is withdrawn when it is no longer named here, when its first job has left, and when it has come true.
        """
        self._pairs = dict(pairs)

    @property
    def offered_guests(self) -> Mapping[int, str]:
        """The pairs that the last round has put into a plan: second job -> node, whether acknowledged yet or not."""
        return {guest: node for node, found in self._sharing.items() for guest in found.places}

    def recall(self, told: Mapping[str, Mapping[str, int]]) -> None:
        """Learn what each node was last told before the service was restarted (GRES type -> count, as recorded).

        Without it the constant sum of a node is taken from what Slurm shows at first, which on 22.05 is too much if
        its slurmd was restarted since the last update.
        """
        self._advertiser.recall(told)

    def hasten(self, job: int) -> None:
        """Let a job that a node sent back to the queue start as soon as Slurm lists it as pending again."""
        self._hasten.add(job)

    @_uncollected()
    def round(self, jobs: Sequence[JobRow] | None = None, rows: Sequence[NodeRow] | None = None) -> Report:
        """One look at everything, and what follows from it.

        Args:
            jobs, rows: Slurm's queue and nodes where the caller has just asked for them; else Slurm is asked.
        """
        now, begun = self._clock.time(), self._clock.monotonic()
        calls = 0
        try:
            if rows is None:
                rows, calls = self._client.nodes(), calls + 1
            if jobs is None:  # after the nodes, so that every job that their counts hold is listed
                jobs, calls = self._client.jobs(), calls + 1
        except SlurmError as error:
            return Report(
                at=now, error=f"Slurm cannot be observed, nothing was changed: {error}", slurm_calls=calls + 1
            )
        observed = self._clock.monotonic()
        by_name = {row.name: row for row in rows}
        notes: list[str] = []
        calls += self._hasten_jobs(jobs, notes)
        nodes = self._nodes(by_name, jobs, now, notes)
        wanted = demands(jobs, rows, nodes.keys(), now, self._avoided(now), self._loan)
        anew, self._anew = self._anew, False
        told = list(nodes.values())
        plan = self._planner.plan(told, wanted, now, self._reservations, self.preference, anew=anew)
        self._plan, self._wanted, self._jobs = plan, wanted, {row.job_id: row for row in jobs}
        self._told = nodes
        self._reservations = plan.reservations
        self._watch(plan, jobs, now)
        planned = self._clock.monotonic()
        trouble = ""
        done = Advertised()
        try:
            due = sharers.due(plan, wanted) if self._sharing else {}
            sharing = {node: replace(found, due=due.get(node, {})) for node, found in self._sharing.items()}
            done = self._advertiser.advertise(plan.nodes.values(), nodes, by_name, jobs, self._clock.monotonic, sharing)
        except SlurmError as failure:
            trouble = f"the new offers could not be read back; the next round tries again: {failure}"
        notes.extend(f"Slurm refused an update; the next round tries again: {text}" for text in done.errors)
        notes.extend(
            f"{name}: Slurm's constant sum of mig counts leaves no room for some free slots; raise the count of "
            "mig:none in slurm.conf and gres.conf"
            for name in done.cut
        )
        reasons = _Reasons(plan)
        changes = tuple(NodeChange(c.node, c.version, c.counts, reasons.of(c.node, c.reset)) for c in done.changes)
        for change in changes:
            self._record(change.node, now, change.version, change.counts, change.why)
        notes.extend(self._unexplained(plan))
        return Report(
            at=now,
            changes=changes,
            reservations=plan.reservations,
            excess=tuple(audit(nodes.values(), jobs)),
            notes=tuple(notes),
            error=trouble,
            pending=sum(d.copies for d in wanted if d.parts),
            waiting=len(plan.waiting),
            offers={p.name: n for p, n in sorted(plan.offers().items())},
            unacknowledged=tuple(done.unacknowledged),
            slurm_calls=calls + done.calls,
            seconds={
                "observe": observed - begun,
                "plan": planned - observed,
                "advertise": self._clock.monotonic() - planned,
            },
        )

    @property
    def latest(self) -> tuple[Plan, Sequence[Demand]] | None:
        """The plan of the last round and the demands that it was made for; None before the first."""
        return None if self._plan is None else (self._plan, self._wanted)

    @property
    def preference(self) -> tuple[Profile, ...]:
        """What empty space is offered as: the settings' word, else what `prefer` was told last."""
        return self.settings.preference or self._preferred

    def prefer(self, order: Sequence[Profile]) -> None:
        """Offer empty space in this order from the next round on, unless the settings say otherwise.

        What is offered already and wanted by nobody is offered anew on GPUs that stand idle then.
        """
        before, self._preferred = self.preference, tuple(order)
        self._anew = self._anew or self.preference != before

    @property
    def told(self) -> Mapping[str, Node]:
        """The nodes as the planner of the last round was told of them."""
        return self._told

    # -- for `migbatch why` ------------------------------------------------------------------------------------

    def why(self, job: int) -> str:
        """Why a job has not started, as far as supply goes, by the last round; one sentence."""
        if self._plan is None:
            return "supply has not been planned yet"
        row = self._jobs.get(job)
        if row is None:
            return f"Slurm does not list job {job}"
        if row.unread:
            return f"Slurm's row of job {job} cannot be read ({row.reason}), so nothing is done about it"
        if not row.pending:
            return f"job {job} is {row.state.lower()}"
        if not could_run(row, self._clock.time()):
            return f"Slurm does not let it start for another reason ({row.reason}); nothing is kept free for it"
        if _waits_to_be_lent(row):
            return "it waits to be lent an idle slice; `migbatch loans` shows what is lent and why it waits"
        placed = self._plan.placed.get(job)
        if placed is not None:
            where = ", ".join(placed.nodes[:4])
            if placed.standing:
                return f"what it needs is offered on {where}; Slurm should start it in its next cycle"
            return f"{where} is being rearranged to offer what it needs"
        if job in self._plan.cramped:
            return (
                f"it is part of the heterogeneous job {row.het_job}, which Slurm starts only where each component can "
                "have nodes of its own, and there are too few nodes on which these may run"
            )
        mine = [r for r in self._plan.reservations if r.job == job]
        if mine:
            places = "; ".join(f"{slot} of GPU {gpu} on {node}" for node, gpu, slot in mine[0].places)
            if mine[0].at is None:
                return f"reserved: {places}; in use by a job without a time limit, so nobody can say until when"
            left = max(0, int(mine[0].at - self._clock.time()))
            return f"reserved: {places}; free in {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} at the latest"
        if any(demand.job == job and demand.loan for demand in self._wanted):
            return "it may have a slice only where nothing else needs the room, and there is no such room now"
        if job in self._plan.waiting:
            return "no GPU has room for it now, and jobs with higher priority have the reservations"
        return "no node with MIG GPUs that it may use has such a slice"

    # -- what the planner is told ------------------------------------------------------------------------------

    def _nodes(
        self, rows: Mapping[str, NodeRow], jobs: Sequence[JobRow], now: float, notes: list[str]
    ) -> dict[str, Node]:
        ends = {row.job_id: _until(row, now) for row in jobs if row.active or row.unread}
        running = _by_node(jobs)
        listed, started = {row.job_id: row for row in jobs}, sharers.guests(jobs)
        self._sharing = {}
        found = {}
        seen = self._view.facts()
        present = {gpu.uuid for facts in seen.values() for gpu in facts.gpus}
        self._gpus = {uuid: known for uuid, known in self._gpus.items() if uuid in present}
        for name, facts in seen.items():
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
            if self._pairs or started:
                plan = self._board.current(name)
                places = {} if plan is None else plan.guests
                used = row.used.get(sharers.GUEST, 0)
                shared = sharers.sharing(name, facts, self._pairs, listed, started, used, places)
                if shared != sharers.ALONE:
                    self._sharing[name] = shared
            found[name] = self._node(row, facts, running.get(name, []), ends, started, now, notes)
        if self._sharing:
            self._sharing = sharers.without_strays(self._sharing, jobs)
        return found

    def _node(
        self,
        row: NodeRow,
        facts: NodeFacts,
        running: Sequence[JobRow],
        ends: Mapping[int, float | None],
        guests: Collection[int],
        now: float,
        notes: list[str],
    ) -> Node:
        plan = self._board.current(row.name)
        mode = self._mode(row, facts, plan)
        gpus = []
        for gpu in facts.gpus:
            known = self._gpus.get(gpu.uuid)
            rows = () if plan is None else tuple(plan.gpus.get(gpu.uuid, ()))
            until, alone = sharers.ends(gpu, ends, now), sharers.whose(gpu, guests)
            if (
                known is None
                or known.facts is not gpu
                or (known.until, known.guests, known.rows) != (until, alone, rows)
            ):
                known = self._gpus[gpu.uuid] = KnownGpu.of(gpu, rows, until, alone)
            if known.gpu is not None:
                gpus.append(known.gpu)
            else:
                notes.append(
                    f"{row.name}: what it says of GPU {gpu.uuid} cannot be ({known.odd}); the node is left as it is"
                )
                mode = Mode.FROZEN if mode is Mode.OPEN else mode
        return Node(
            name=row.name,
            gpus=tuple(gpus),
            used=profiles(row.used),
            unlocated=_unlocated(running, facts) + Counter(self._sharing.get(row.name, sharers.ALONE).unlocated),
            total=self._advertiser.total(row),
            mode=mode,
        )

    def _mode(self, row: NodeRow, facts: NodeFacts, plan: PublishedPlan | None) -> Mode:
        if not row.open:
            return Mode.CLOSED
        if not facts.healthy or not facts.gpus:
            return Mode.WITHDRAWN
        if self._board.silence(row.name) > self.settings.silence_s:
            return Mode.FROZEN
        if plan is not None and not self._advertiser.settled(row.name):
            return Mode.FROZEN
        return Mode.OPEN

    # -- offers that are not taken -----------------------------------------------------------------------------

    def _avoided(self, now: float) -> dict[int, frozenset[str]]:
        for job, names in list(self._avoid.items()):
            kept = {name: until for name, until in names.items() if until > now}
            if kept:
                self._avoid[job] = kept
            else:
                del self._avoid[job]
        return {job: frozenset(names) for job, names in self._avoid.items()}

    def _watch(self, plan: Plan, jobs: Sequence[JobRow], now: float) -> None:
        """Notice offers that stand for a job and are not taken: Slurm knows a reason why not, and we do not."""
        before, self._standing = self._standing, {}
        tasks = {row.job_id: row.tasks for row in jobs if row.pending}
        for job, placed in plan.placed.items():
            if not placed.standing or job not in tasks:
                continue
            old = before.get(job)
            if old is None or old[:2] != (placed.nodes, tasks[job]):
                self._standing[job] = (placed.nodes, tasks[job], now)
            elif now - old[2] < self.settings.stuck_s:
                self._standing[job] = old
            else:
                self._avoid.setdefault(job, {}).update(dict.fromkeys(placed.nodes, now + self.settings.avoid_s))
        for job in [job for job in self._avoid if job not in tasks]:
            del self._avoid[job]

    # -- small things ------------------------------------------------------------------------------------------

    def _hasten_jobs(self, jobs: Sequence[JobRow], notes: list[str]) -> int:
        calls = 0
        listed = {row.job_id: row for row in jobs}
        for job in sorted(self._hasten):
            row = listed.get(job)
            if row is None:
                self._hasten.discard(job)
            elif row.pending:
                self._hasten.discard(job)
                if row.reason == "BeginTime":
                    calls += 1
                    try:
                        self._client.hasten(job)
                    except SlurmError as error:
                        notes.append(f"job {job} keeps the delay of its requeue: {error}")
        return calls

    @staticmethod
    def _unexplained(plan: Plan) -> list[str]:
        return [
            f"Slurm counts {', '.join(f'{n} x {p}' for p, n in counts.items())} on {name} that neither the node nor "
            "its plan accounts for; the node's offer is left alone until it reports"
            for name, counts in plan.unexplained.items()
        ]


class _Reasons:
    """Why nodes are rearranged, by a plan."""

    def __init__(self, plan: Plan) -> None:
        self._jobs: dict[str, list[int]] = {}
        self._reserved: dict[str, dict[int, None]] = {}
        for job, placed in plan.placed.items():
            if not placed.standing:
                for node in placed.nodes:
                    self._jobs.setdefault(node, []).append(job)
        for reservation in plan.reservations:
            for node, _, _ in reservation.places:
                self._reserved.setdefault(node, {})[reservation.job] = None

    def of(self, node: str, reset: bool) -> str:
        """The reason for one node's new offer."""
        if reset:
            return "Slurm had other counts (a restart or scontrol reconfigure); the plan is as before"
        jobs, reserved = self._jobs.get(node, []), list(self._reserved.get(node, ()))
        parts = []
        if jobs:
            parts.append("for job " + ", ".join(str(j) for j in jobs[:5]) + (" and others" if len(jobs) > 5 else ""))
        if reserved:
            parts.append("kept free for job " + ", ".join(str(j) for j in reserved[:5]))
        return "; ".join(parts) or "free space"


def _by_node(jobs: Sequence[JobRow]) -> dict[str, list[JobRow]]:
    """Jobs with MIG slices that have them now; one that is completing may have given them back."""
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


def _waits_to_be_lent(row: JobRow) -> bool:
    return gres_list.readable_counts(row.gres, GRES).get(LOAN, 0) > 0


def _until(row: JobRow, now: float) -> float | None:
    if row.state == "COMPLETING":
        return now
    return row.end


def explain(report: Report) -> str:
    """A round in one line, for the log."""
    if report.error:
        return report.error
    changed = f"{len(report.changes)} nodes changed" if report.changes else "no change"
    return (
        f"{report.pending} jobs want supply, {report.waiting} wait, {len(report.reservations)} reservations, "
        f"{changed}, {report.slurm_calls} Slurm calls in {sum(report.seconds.values()):.3f} s"
    )

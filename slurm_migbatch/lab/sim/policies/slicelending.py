"""Training lent the idle MIG slices of inference: migbatchd's own decision, driven by the simulation.

`decide.lending.round.decide` is what decides, with the rules that `daemon.settings.rules_of` makes of a `LendingConfig`
and the reserve of `decide.lending.expectation.Expectation`; here is what Slurm, supply and the nodes do. Inference
starts on its GPUs as soon as there is room. Where there is none, migbatchd's next round ends loans. Training jobs have
one slice each.

What is simpler than the real thing: a requeued job may be released again as soon as its checkpoint is written; what is
free is considered every `round_s` seconds, and in the next round only where the last one left something over; supply
gives a released job the place that costs the least free space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from slurm_migbatch.config.schema import ClusterConfig, LendingConfig, between, key
from slurm_migbatch.daemon.settings import rules_of
from slurm_migbatch.decide.capacity.spare import loss
from slurm_migbatch.decide.lending.allocation import RestartCosts
from slurm_migbatch.decide.lending.expectation import Expectation
from slurm_migbatch.decide.lending.ledger import Cause, JobView, Loan, State
from slurm_migbatch.decide.lending.model import Kind, LendingView, LoanOrder, WaitingInference
from slurm_migbatch.decide.lending.round import decide
from slurm_migbatch.decide.lending.values import ElasticJob, GpuCapacity, LentSlot, SlotReference
from slurm_migbatch.lab.sim.cluster import Part, Place, PlaceError, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.placing import slices
from slurm_migbatch.lab.sim.policy import Policy, Quiet
from slurm_migbatch.lab.sim.registry import PolicyKind
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import capacity, choose
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import LoanHints

DECIDES: Final = f"{decide.__module__}.{decide.__qualname__}"
"""The function that decides, as results name it."""
_EARLY, _ROUND = "look", "round"


@dataclass(frozen=True)
class SliceWay:
    """What is lent of inference's GPUs.

    Attributes:
        lend: whether anything is.
        forecast: whether what inference is expected to need is kept; without, whatever is free is lent.
        servers: only whole nodes without inference are lent, and called back as a whole (Lyra's loans; a
            reconstruction). Inference starts on other nodes first.
        restarts_cost: whether training pays for checkpoints and restarts.
        round_s: seconds between rounds. `poll_s`: inference that found no room is seen after at most so
            long.
    """

    lend: bool = True
    forecast: bool = True
    servers: bool = False
    restarts_cost: bool = True
    round_s: float = 10.0
    poll_s: float = ClusterConfig().poll_s


@lru_cache(maxsize=1 << 12)
def _job_view(job: int, restarts: int, profile: Profile | None) -> JobView:
    """How Slurm shows an elastic training job that waits, or runs on a slice."""
    state, kind = ("PENDING", "loan") if profile is None else ("RUNNING", str(profile))
    return JobView(JobRow(job, state=state, gres=f"mig:{kind}:1", restarts=restarts), LoanHints(slice=profile))


@lru_cache(maxsize=1 << 12)
def _loan(job: int, restarts: int, since: float, profile: str) -> Loan:
    return Loan(job, restarts, since, profile, State.RUNNING, started=since)


class SliceLending(Quiet):
    """Use it for one simulation."""

    def __init__(
        self,
        own: Iterable[int],
        lent: Iterable[int],
        config: LendingConfig,
        way: SliceWay = SliceWay(),
        expected: Expectation | None = None,
        clock: float = 0.0,
    ) -> None:
        """`own` and `lent` are indexes of training's GPUs and of inference's.

        `expected` knows what inference needed before; `clock` is its time at 0 s.
        """
        self.own, self.lent, self.config, self.way, self.clock = tuple(own), tuple(lent), config, way, clock
        if not self.lent or not (self.own or way.lend):
            raise ValueError("inference needs GPUs, and training its own ones or loans")
        self.rules = rules_of(config)
        self.expected = Expectation(config.forecast_days, config.day_s) if expected is None else expected
        self.inference: list[SimulatedRun] = []
        self.training: dict[int, SimulatedRun] = {}
        self.since: dict[int, float] = {}
        self.hits: Counter[int] = Counter()
        self.running: dict[Profile, set[tuple[int, int]]] = {}
        self.served: dict[int, tuple[Profile, set[int]]] = {}
        self.idle_since = dict.fromkeys(self.lent, 0.0)
        self.reclaimed: dict[int, float] = {}
        self.reclaims = 0
        self._speeds: dict[tuple[str, int, int, Profile | None, Profile | None], dict[Profile, float]] = {}
        self._room: dict[Profile, int] = {}
        self._full: set[tuple[Profile, int]] = set()
        self._due: set[str] = set()
        self._woken: set[str] = set()
        self._changed = 0.0
        self._reserve: dict[Profile, int] = {}

    # -- events ----------------------------------------------------------------------------------------------------

    def begin(self, sim: Simulation) -> None:
        """Learn which GPUs are inference's, and on which nodes they are."""
        self.part = Part(sum(1 << gpu for gpu in self.lent), 0, len(self.lent))
        self.node_of = {gpu: f"n{number}" for number, node in enumerate(sim.cluster.nodes) for gpu in node}
        self.pool = frozenset(self.node_of[gpu] for gpu in self.lent)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Inference waits for room, training for a release; what can never fit waits for ever."""
        if run.job.kind == "train":
            if not self._of(sim, run.job):
                return
            self.training[run.job.id] = run
            self._changed = sim.now
        elif run.job.gpus <= self._most(sim, self._profile(sim, run)):
            self.inference.append(run)
        self._wake(sim, _ROUND)

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Its slices are free."""
        self._news(sim)
        if run.job.kind == "train":
            del self.training[run.job.id]
            return
        profile, gpus = self.served.pop(run.job.id)
        self.running[profile] -= {(run.job.id, copy) for copy in range(run.job.gpus)}
        for gpu in gpus:
            self.idle_since[gpu] = sim.now
        self._tell(sim)

    def timer(self, _sim: Simulation, key: Any) -> None:
        """Note that a round is due."""
        self._due.add(key)

    def decide(self, sim: Simulation) -> None:
        """Inference first, which needs nobody's decision where there is room."""
        if self.inference:
            self._serve(sim)
            if self.inference:
                self._wake(sim, _EARLY)
        if not self._due:
            return
        due, self._due = self._due, set()
        self._woken -= due
        if self.training and (self.inference or self._may_differ(sim)):
            self._run_round(sim)
            if self.inference:
                self._serve(sim)
        if self.training or self.inference:
            self._wake(sim, _ROUND)

    def _news(self, sim: Simulation) -> None:
        """Note that room may have become free, so that jobs are tried again."""
        self._changed = sim.now
        self._full.clear()

    def _wake(self, sim: Simulation, timer: str) -> None:
        if timer not in self._woken:
            self._woken.add(timer)
            period = self.way.poll_s if timer == _EARLY else self.way.round_s
            sim.wake((sim.now // period + 1) * period, timer)

    def _may_differ(self, sim: Simulation) -> bool:
        """Return whether a round can decide anything: something was freed lately, or another reserve is kept."""
        calm = self.rules.calm
        if sim.now - self._changed <= max(calm.idle_s, calm.rest_s) + 2 * self.way.round_s:
            return True
        return self._expect(sim) != self._reserve

    # -- inference -------------------------------------------------------------------------------------------------

    def _serve(self, sim: Simulation) -> None:
        left: list[SimulatedRun] = []
        part = self._part()
        for run in self.inference:
            profile = self._profile(sim, run)
            ask = profile, run.job.gpus
            places = None if ask in self._full else slices(sim.cluster, *ask, part)
            if places is None:
                self._full.add(ask)
                left.append(run)
                continue
            self.served[run.job.id] = profile, {place.gpu for place in places}
            self.running.setdefault(profile, set()).update((run.job.id, copy) for copy in range(run.job.gpus))
            sim.start(run, places)
        self.inference = left
        self._tell(sim)

    def _part(self) -> Part:
        """GPUs on which inference starts: not those of a node that is lent whole."""
        if not self.way.servers:
            return self.part
        away = {gpu for node in self._lent_nodes() for gpu in self.lent if self.node_of[gpu] == node}
        return Part(sum(1 << gpu for gpu in self.lent if gpu not in away), 0, len(self.lent))

    def _lent_nodes(self) -> set[str]:
        return {
            self.node_of[place.gpu]
            for run in self.training.values()
            for place in run.places
            if place.gpu in self.idle_since
        }

    def _tell(self, sim: Simulation) -> None:
        if not (self.way.lend and self.way.forecast):  # nobody asks
            return
        waiting: Counter[Profile] = Counter()
        for run in self.inference:
            waiting[self._profile(sim, run)] += run.job.gpus
        running = {profile: frozenset(runs) for profile, runs in self.running.items()}
        self.expected.update(running, waiting, self.clock + sim.now)

    def _profile(self, sim: Simulation, run: SimulatedRun) -> Profile:
        """What it asks for; the whole of a GPU where it names no profile."""
        return run.job.profile or sim.cluster.gpus[self.lent[0]].geometry.full.profile

    def _most(self, sim: Simulation, profile: Profile) -> int:
        """How many such slices inference's GPUs have if nobody else is there."""
        if profile not in self._room:
            gpus = (sim.cluster.gpus[index].geometry for index in self.lent)
            self._room[profile] = sum(capacity(geometry, EMPTY, profile) for geometry in gpus if profile in geometry)
        return self._room[profile]

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _expect(self, sim: Simulation) -> dict[Profile, int]:
        if not (self.way.lend and self.way.forecast):
            return {}
        return self.expected.reserve(self.clock + sim.now, self.config.horizon_s, self.config.sure)

    def _run_round(self, sim: Simulation) -> None:
        """Run one round of migbatchd, and apply its orders."""
        if self.way.servers and self.inference:
            self._call_server(sim)
            return
        self._reserve = self._expect(sim)
        round_ = decide(self._view(sim), self.rules)
        granted = []
        for order in round_.orders:
            if order.kind is Kind.REQUEUE:
                self._requeue(sim, order)
            elif order.kind is Kind.RELEASE:
                granted.append(order)
        for order in granted:
            self._release(sim, order)
        if round_.orders:
            self._changed = sim.now
        if len(granted) < len(round_.orders) or len(granted) >= self.rules.most_releases:
            self._wake(sim, _EARLY)  # a job left, or more would have been released: the next round goes on
        self._full.clear()

    def _requeue(self, sim: Simulation, order: LoanOrder) -> None:
        run = self.training[order.job]
        (place,) = run.places
        if order.cause is not Cause.GROW:
            self.hits[order.job] += 1
            self.reclaimed[place.gpu] = sim.now
            self.reclaims += 1
        sim.preempt(run)

    def _release(self, sim: Simulation, order: LoanOrder) -> None:
        run = self.training[order.job]
        assert order.profile is not None
        place = self._place(sim, order.profile)
        if place is not None and sim.now >= run.ready:
            sim.start(run, [place])
            self.since[order.job] = sim.now

    def _place(self, sim: Simulation, profile: Profile) -> Place | None:
        """Where a released job starts: on training's own GPUs first, where the least free space is lost."""
        found: tuple[bool, tuple[int, int], int] | None = None
        for index in self._lendable():
            gpu = sim.cluster.gpus[index]
            lost = loss(gpu.geometry, gpu.used, (), profile) if profile in gpu.geometry else None
            if lost is not None and (found is None or (index in self.idle_since, lost, index) < found):
                found = index in self.idle_since, lost, index
        if found is None:
            return None
        gpu = sim.cluster.gpus[found[2]]
        slot = choose(gpu.geometry, gpu.used, profile)
        return None if slot is None else Place(found[2], slot)

    def _lendable(self) -> list[int]:
        if not self.way.lend:
            return list(self.own)
        if not self.way.servers:
            return [*self.own, *self.lent]
        busy = {self.node_of[gpu] for _, gpus in self.served.values() for gpu in gpus}
        return [*self.own, *(gpu for gpu in self.lent if self.node_of[gpu] not in busy)]

    def _call_server(self, sim: Simulation) -> None:
        """The lent node with the fewest loans goes back to inference."""
        loans: dict[str, list[int]] = {}
        for job, run in self.training.items():
            for place in run.places:
                if place.gpu in self.idle_since:
                    loans.setdefault(self.node_of[place.gpu], []).append(job)
        if not loans:
            return
        node = min(loans, key=lambda name: (len(loans[name]), name))
        for job in loans[node]:
            self._requeue(sim, LoanOrder(Kind.REQUEUE, job, 0, "", Cause.RECLAIM))
        self._news(sim)

    def _view(self, sim: Simulation) -> LendingView:
        elastic_jobs = self._elastic_jobs(sim)
        loans, views = {}, {}
        for elastic, run in elastic_jobs:
            job = run.job.id
            views[job] = _job_view(job, elastic.restarts, None if elastic.place is None else elastic.place.slot.profile)
            if elastic.place is not None:
                loans[job] = _loan(job, elastic.restarts, elastic.since, str(elastic.place.slot.profile))
        starts = (
            [
                WaitingInference(run.job.id, (self._profile(sim, run),), self.pool, copies=run.job.gpus)
                for run in self.inference
            ]
            if self.way.lend
            else []
        )
        spaces = self._spaces(sim, self._lendable())
        return LendingView(
            now=sim.now,
            spaces=tuple(spaces),
            starts=tuple(starts),
            elastic_jobs=tuple(elastic for elastic, _ in elastic_jobs),
            loans=loans,
            job_views=views,
            reserve=self._reserve,
        )

    def _spaces(self, sim: Simulation, gpus: Iterable[int]) -> list[GpuCapacity]:
        spaces = []
        for index in gpus:
            gpu = sim.cluster.gpus[index]
            taken, lent = [], []
            for slot, cell in sorted(gpu.cells.items()):
                run = cell.runs[0]
                if run.job.kind == "train":
                    lent.append(LentSlot(slot, run.job.id))
                else:
                    taken.append(slot)
            training_only = index not in self.idle_since
            idle, last = self.idle_since.get(index, 0.0), self.reclaimed.get(index)
            node = self.node_of[index]
            spaces.append(
                GpuCapacity(node, index, gpu.geometry, tuple(taken), tuple(lent), idle, last, own=training_only)
            )
        return spaces

    def _elastic_jobs(self, sim: Simulation) -> list[tuple[ElasticJob, SimulatedRun]]:
        """In the order of their arrival; without those that still write their checkpoint."""
        found = []
        for run in self.training.values():
            job = run.job
            if not run.places and sim.now < run.ready:
                continue
            place = None
            if run.places:
                (held,) = run.places
                place = SlotReference(self.node_of[held.gpu], held.gpu, held.slot)
            full = job.costs.checkpoint_s + job.costs.restart_s  # migbatchd has measured it by then
            elastic = ElasticJob(
                job.id,
                self._of(sim, job),
                job.user,
                None,
                place,
                self.since.get(job.id, 0.0),
                run.preempted + run.moves,
                self.hits[job.id],
                RestartCosts(full, full),
                run.remaining(sim.now),
            )
            found.append((elastic, run))
        return found

    def _of(self, sim: Simulation, job: SimulatedJob) -> dict[Profile, float]:
        """Speed of a job on each profile between its least and its largest."""
        like = job.app, job.batch, job.gpus, job.profile, job.largest
        known = self._speeds.get(like)
        if known is None:
            speeds: dict[Profile, float] = {}
            for gpu in sim.cluster.gpus:
                for info in gpu.geometry.profiles:
                    p = info.profile
                    if not p.suffix and p not in speeds and _between(p, job.profile, job.largest):
                        speeds[p] = sim.speeds.speed(job, [Place(gpu.index, info.slots[0])])
            known = self._speeds[like] = {p: speed for p, speed in speeds.items() if speed > 0}
        return known


def _between(profile: Profile, least: Profile | None, most: Profile | None) -> bool:
    return (least is None or (profile.compute >= least.compute and profile.memory_gb >= least.memory_gb)) and (
        most is None or (profile.compute <= most.compute and profile.memory_gb <= most.memory_gb)
    )


# -- by name -----------------------------------------------------------------------------------------------------------

_SHIPPED: Final = LendingConfig()


@dataclass(frozen=True)
class SliceParams:
    """Lending of slices; what is not given is as `[lending]` has it by default."""

    share: float = key(0.5, "Share of the nodes that are training's own; the others are inference's.", between(0, 0.99))
    lend: bool = key(True, "Whether inference's nodes are lent.")
    forecast: bool = key(True, "Whether what inference is expected to need is kept free.")
    round_s: float = key(SliceWay.round_s, "Seconds between looks at what is free.", between(0.1, 86_400))
    horizon_s: float = key(_SHIPPED.horizon_s, "See [lending] horizon_s.", between(1, 86_400))
    sure: float = key(_SHIPPED.sure, "See [lending] sure.", between(0.01, 0.9999))
    payback_s: float = key(_SHIPPED.payback_s, "See [lending] payback_s.", between(1, 86_400))
    min_idle_s: float = key(_SHIPPED.min_idle_s, "See [lending] min_idle_s.", between(0, 86_400))
    rest_s: float = key(_SHIPPED.rest_s, "See [lending] rest_s.", between(0, 86_400))
    most_releases: int = key(_SHIPPED.most_releases, "See [lending] most_releases.", between(1, 1000))
    max_restarts: int = key(_SHIPPED.max_restarts, "See [lending] max_restarts.", between(0, 1000))


def _make(params: SliceParams, cluster: SimulatedCluster) -> Policy:
    nodes = len(cluster.nodes)
    split = round(nodes * params.share)
    if split >= nodes or (not split and (params.share > 0 or not params.lend)):
        raise PlaceError(f"{nodes} nodes cannot be divided into {params.share:g} and the rest: give it more nodes")
    first = cluster.nodes[split].start
    config = LendingConfig(
        horizon_s=params.horizon_s,
        sure=params.sure,
        payback_s=params.payback_s,
        min_idle_s=params.min_idle_s,
        rest_s=params.rest_s,
        most_releases=params.most_releases,
        max_restarts=params.max_restarts,
    )
    way = SliceWay(params.lend, params.forecast, round_s=params.round_s)
    return SliceLending(range(first), range(first, len(cluster.gpus)), config, way)


SLICE_LENDING = PolicyKind("training on one MIG slice each, its own and idle ones of inference", SliceParams, _make)

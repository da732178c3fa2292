"""Lend inference's idle GPUs to training, by several variants of which only the compared part differs.

Inference arrives as jobs, one for each request, and is served at once: by a loaded replica, an idle GPU, the GPU of a
sleeping replica, or a GPU reclaimed from training. Training is placed again once a minute. The rules are those of
`decide.lending.allocation`; the rules for replicas, the knapsack and the costs of restarts are the same for every
`LendingOptions`.

Only whole GPUs are lent. A job pays for its restarts; if it is changed during one, it also pays for the rest of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from slurm_migbatch.decide.lending.allocation import Hysteresis, paid_worth
from slurm_migbatch.lab.papers.deepboot import (
    ReclaimCandidate,
    Replica,
    RestartCosts,
    SliceCount,
    Surge,
    allocate,
    ats_worth,
    displaced,
    reclaim,
    serve,
)
from slurm_migbatch.lab.papers.forecast import Levels
from slurm_migbatch.lab.papers.goodput import Goodput
from slurm_migbatch.lab.sim.cluster import Place
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.run import SimulatedRun

PERIOD_S: Final = 60.0
SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of GPUs that a job may get; changes between adjacent ones are not worth a restart."""
_ROUND: Final = "round"
HYSTERESIS: Final = Hysteresis(idle_s=0.0, rest_s=300.0)
"""With a forecast a GPU need not have been idle for a while."""


class GoodputSpeeds:
    """A `sim.speeds.Speeds` from goodput models: training on one GPU has speed 1, and so has inference."""

    def __init__(self, models: Mapping[str, Goodput], per_node: int) -> None:
        self.models, self.per_node = models, per_node
        self._known: dict[tuple[str, int, int], float] = {}

    def speed(self, job: SimulatedJob, places: Sequence[Place]) -> float:
        """Return the goodput on these GPUs relative to that on one; 1 for inference."""
        if job.kind == "infer":
            return 1.0
        nodes = len({place.gpu // self.per_node for place in places})
        return self.of(job.app, len(places), nodes)

    def slowdown(self, _run: SimulatedRun, others: Sequence[SimulatedRun]) -> float:
        """Return the number of runs as the slowdown; this policy never shares GPUs."""
        return 1.0 + len(others)

    def of(self, app: str, count: int, nodes: int | None = None) -> float:
        """Return the speed on `count` GPUs, by default on as few nodes as possible."""
        if count < 1:
            return 0.0
        key = app, count, -(-count // self.per_node) if nodes is None else nodes
        if key not in self._known:
            self._known[key] = self.models[app].speedup(count, key[2])
        return self._known[key]


@dataclass(frozen=True)
class LendingOptions:
    """How GPUs of inference are lent.

    Attributes:
        lend: whether they are lent. `servers`: only whole nodes are (like Lyra). `forecast`: only GPUs that the
            forecast expects to stay idle are.
        hysteresis: when the GPUs of a job may change; None: DeepBoot's own rule, a value that falls with restarts.
        sure: required probability that the GPUs stay idle. `horizon_s`: the time for which they must, and for which
            recent needs are expected again.
        protect: how long idle replicas are protected, as a multiple of DeepBoot's times.
        surge: growth of the reclaims within a burst; 1: only the missing GPUs are reclaimed.
        depth: number of pending jobs considered in a round, in order of arrival; the cost of a round grows with jobs
            times GPUs, and later jobs would hardly get any.
    """

    lend: bool = True
    servers: bool = False
    forecast: bool = True
    hysteresis: Hysteresis | None = HYSTERESIS
    sure: float = 0.8
    horizon_s: float = 60.0
    protect: float = 0.0
    surge: float = 2.0
    depth: int = 16


@dataclass
class _Train:
    """State of a training job."""

    changed: float
    hits: int = 0


class WholeGpuLending(Policy):
    """Training on its own GPUs and, by `LendingOptions`, on idle GPUs of inference. Use it for one simulation."""

    def __init__(
        self,
        own: range,
        lent: range,
        learning: GoodputSpeeds,
        elastic: Mapping[str, RestartCosts],
        way: LendingOptions,
        levels: Levels,
        clock: float,
    ) -> None:
        """Use `own` and `lent`, the GPU indexes of training and of inference; `clock` is the levels' time at 0 s."""
        self.own, self.lent, self.learning, self.elastic = own, lent, learning, elastic
        self.way, self.levels, self.clock = way, levels, clock
        self.training: dict[SimulatedRun, _Train] = {}
        self.waiting: list[SimulatedRun] = []
        self.replicas: dict[int, Replica[int]] = {}
        self.serving: dict[SimulatedRun, int] = {}
        self.holder: dict[int, SimulatedRun] = {}
        self.idle_since = dict.fromkeys(lent, -math.inf)
        self.reclaimed: dict[int, float] = {}
        self.reclaims = 0
        self.surge = Surge(way.surge)
        self._due = False
        self._woken = False

    # -- events ----------------------------------------------------------------------------------------------------

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Queue a request for `decide`, a training job for the next round."""
        if run.job.kind == "infer":
            self.waiting.append(run)
            return
        self.training[run] = _Train(sim.now)
        if not self._woken:
            self._woken = True
            sim.wake((sim.now // PERIOD_S + 1) * PERIOD_S, _ROUND)

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Make a request's replica idle; free a training job's GPUs."""
        if run.job.kind == "infer":
            gpu = self.serving.pop(run)
            replica = self.replicas[gpu]
            replica.busy, replica.idle_since = False, sim.now
            self.idle_since[gpu] = sim.now
            self._report_demand(sim)
            return
        del self.training[run]
        for gpu in [gpu for gpu, holder in self.holder.items() if holder is run]:
            self._release(sim, gpu)

    def timer(self, _sim: Simulation, _key: Any) -> None:
        """Mark a round as due."""
        self._due = True

    def decide(self, sim: Simulation) -> None:
        """Serve inference, then run the round of training if it is due."""
        if self.waiting:
            self._serve(sim)
        if self._due:
            self._due = self._woken = False
            self._round(sim)
            if self.training:
                self._woken = True
                sim.wake(sim.now + PERIOD_S, _ROUND)

    # -- inference -------------------------------------------------------------------------------------------------

    def _serve(self, sim: Simulation) -> None:
        unserved: list[SimulatedRun] = []
        started = 0
        for position, run in enumerate(self.waiting):
            gpu, warm = self._place(sim, run.job.app)
            if gpu is None and self._reclaim(sim, len(self.waiting) - position):
                gpu, warm = self._place(sim, run.job.app)
            if gpu is None:
                unserved = self.waiting[position:]  # every GPU serves a request
                break
            replica = self.replicas.get(gpu)
            if replica is None or not warm:
                replica = self.replicas[gpu] = Replica(gpu, run.job.app)
            replica.hits += 1
            replica.busy = True
            self.serving[run] = gpu
            sim.start(run, [sim.cluster.gpus[gpu].whole], pause=0.0 if warm else run.job.costs.cold_start_s)
            started += 1
        self.waiting = unserved
        self._report_demand(sim, started)

    def _place(self, sim: Simulation, app: str) -> tuple[int | None, bool]:
        """Return a GPU for a request, and whether its model is loaded there; GPUs lent to training are not taken."""
        replicas = list(self.replicas.values())
        ready = serve(app, replicas)
        if ready is not None:
            return ready.slot, True
        for gpu in self.lent:
            if gpu not in self.holder and gpu not in self.replicas:
                return gpu, False
        asleep = displaced(replicas, sim.now, self.way.protect)
        if asleep is not None:
            return asleep.slot, False
        if not any(gpu in self.holder for gpu in self.lent):
            idle = [replica for replica in replicas if not replica.busy]
            if idle:
                return min(idle, key=lambda replica: (replica.hits, replica.idle_since)).slot, False
        return None, False

    def _report_demand(self, sim: Simulation, started: int = 0) -> None:
        self.levels.demand(self.clock + sim.now, len(self.serving) + len(self.waiting), started)

    def _reclaim(self, sim: Simulation, starts: int) -> bool:
        lent: dict[SimulatedRun, set[int]] = {}
        for gpu in self.lent:
            if gpu in self.holder:
                lent.setdefault(self.holder[gpu], set()).add(gpu)
        if not lent:
            return False
        loans = [self._loan(sim, run, gpus) for run, gpus in lent.items()]
        starts = self.surge.call(sim.now, starts, len(self.lent))
        if self.way.servers:
            lent_sets = [frozenset(gpu for gpu in node if gpu in self.holder) for node in self._nodes()]
            starts = -(-starts // self.learning.per_node)
        else:
            lent_sets = [frozenset([gpu]) for gpu in self.lent if gpu in self.holder]
        decided = reclaim(loans, lent_sets, starts, sim.now)
        stopped = set(decided.stopped)
        for loan in loans:
            reclaimed = loan.slots.intersection(decided.slots)
            if not reclaimed:
                continue
            (run,) = (run for run in lent if run.job.id == loan.job)
            self.reclaims += len(reclaimed)
            self.training[run].hits += 1
            for gpu in reclaimed:
                self.reclaimed[gpu] = sim.now
            if loan.job in stopped:
                self._stop(sim, run)
            else:
                self._resize(sim, run, [place.gpu for place in run.places if place.gpu not in reclaimed])
        return True

    def _nodes(self) -> list[range]:
        size = self.learning.per_node
        return [range(first, first + size) for first in range(self.lent.start, self.lent.stop, size)]

    def _loan(self, sim: Simulation, run: SimulatedRun, gpus: set[int]) -> ReclaimCandidate[int]:
        count = len(run.places)
        memory = self.training[run]
        speeds = [self.learning.of(run.job.app, n) for n in range(count + 1)]
        return ReclaimCandidate(
            run.job.id,
            frozenset(gpus),
            count,
            run.job.least,
            speeds,
            self.elastic[run.job.app],
            memory.changed,
            memory.hits,
            min(600.0, run.remaining(sim.now) / max(run.rate, 1e-9)),
        )

    # -- training --------------------------------------------------------------------------------------------------

    def _round(self, sim: Simulation) -> None:
        waiting = islice((run for run in self.training if not run.places), self.way.depth)
        considered = set(waiting)
        runs = [run for run in self.training if run.places or run in considered]
        if not runs:
            return
        loanable = self._loanable(sim)
        free = [gpu for gpu in self.own if gpu not in self.holder] + loanable
        capacity = len(free) + len(self.holder)
        fair = max(1, capacity // len(self.training))
        any_pending = any(not run.places for run in runs)
        offers = [self._offers(sim, run, fair, capacity, any_pending) for run in runs]
        chosen = allocate(offers, {"gpu": capacity})
        target = {run: 0 if choice is None else choice.count for run, choice in zip(runs, chosen, strict=True)}
        for run, count in target.items():
            if run.places and count < len(run.places):
                before = set(self.holder)
                if count:
                    self._resize(sim, run, self._kept(run, count))
                else:
                    self._stop(sim, run)
                returned = before - set(self.holder)
                free += sorted(returned)
        for run in sorted(runs, key=lambda run: target[run]):
            count = target[run] - len(run.places)
            if count > 0 and len(free) >= count:
                gpus = self._choose(run, count, free)
                self._give(sim, run, gpus)
                free = [gpu for gpu in free if gpu not in gpus]

    def _loanable(self, sim: Simulation) -> list[int]:
        """Return further GPUs of inference that may be lent now, first those that inference would use last."""
        way = self.way
        if not way.lend or self.waiting:
            return []
        now = sim.now
        idle = []
        for gpu in reversed(self.lent):
            replica = self.replicas.get(gpu)
            if gpu in self.holder or (replica is not None and replica.protected(now, way.protect)):
                continue
            if way.hysteresis is None or way.hysteresis.may_lend(now, self.idle_since[gpu], self.reclaimed.get(gpu)):
                idle.append(gpu)
        if way.servers:
            idle_gpus = set(idle)
            return [gpu for node in reversed(self._nodes()) if idle_gpus.issuperset(node) for gpu in node]
        if way.forecast:
            needed = self.levels.needed(self.clock + now, way.horizon_s, way.sure, way.horizon_s)
            shielded = sum(replica.protected(now, way.protect) for replica in self.replicas.values())
            lent = sum(gpu in self.holder for gpu in self.lent)
            return idle[: max(0, len(self.lent) - max(needed, shielded) - lent)]
        return idle

    def _offers(
        self, sim: Simulation, run: SimulatedRun, fair: int, capacity: int, anybody: bool
    ) -> dict[SliceCount[str], float]:
        job, hysteresis, now = run.job, self.way.hysteresis, sim.now
        have = len(run.places)
        of, elastic, memory = self.learning.of, self.elastic[job.app], self.training[run]
        share = of(job.app, min(fair, job.most))
        restarts = run.moves + run.preempted
        sizes = {size for size in SIZES if job.least <= size <= min(job.most, capacity)} | ({have} if have else set())
        offers: dict[SliceCount[str], float] = {}
        for size in sorted(sizes):
            speed = of(job.app, size)
            if speed <= 0:
                continue
            if size == have:
                worth = speed / share
            elif hysteresis is None:
                age = now - job.arrival
                worth = ats_worth(speed, share, changed=bool(have), age_s=age, restarts=restarts)
            else:
                stay = hysteresis.loan_s
                if have:
                    if size < have and not anybody:
                        continue
                    if size > have and not (
                        hysteresis.may_change(now, memory.changed, restarts)
                        and speed >= hysteresis.gain * of(job.app, have)
                    ):
                        continue
                    stay = min(stay, run.remaining(now) / speed)
                    worth = paid_worth(speed, share, restart_s=elastic.seconds(have, size), stay_s=stay)
                else:
                    worth = speed / share
            offers[SliceCount("gpu", size)] = worth
        return offers

    def _kept(self, run: SimulatedRun, count: int) -> list[int]:
        """Return which GPUs a shrinking job keeps: first those of training's nodes, of these where it has most."""
        per_node = self.learning.per_node
        gpus = [place.gpu for place in run.places]
        weight = {gpu: sum(other // per_node == gpu // per_node for other in gpus) for gpu in gpus}
        return sorted(gpus, key=lambda gpu: (gpu in self.lent, -weight[gpu], gpu))[:count]

    def _choose(self, run: SimulatedRun, count: int, free: Sequence[int]) -> list[int]:
        """Choose GPUs for a job: on its nodes, then on the fullest node with enough free GPUs, else on the emptiest."""
        per_node = self.learning.per_node
        own_nodes = {place.gpu // per_node for place in run.places}
        by_node: dict[int, list[int]] = {}
        for gpu in free:
            by_node.setdefault(gpu // per_node, []).append(gpu)
        chosen: list[int] = []
        while len(chosen) < count:
            need = count - len(chosen)

            def rank(node: int, need: int = need) -> tuple[bool, bool, int, bool, int]:
                size = len(by_node[node])
                enough = size >= need
                return node not in own_nodes, not enough, size if enough else -size, by_node[node][0] in self.lent, node

            node = min(by_node, key=rank)
            chosen += by_node.pop(node)[:need]
        return chosen

    # -- actions ---------------------------------------------------------------------------------------------------

    def _give(self, sim: Simulation, run: SimulatedRun, gpus: Sequence[int]) -> None:
        """Start a job on these GPUs, or give them to a running job in addition to its own."""
        for gpu in gpus:
            self.replicas.pop(gpu, None)
            self.holder[gpu] = run
        if run.places:
            self._move(sim, run, [place.gpu for place in run.places] + list(gpus))
        else:
            sim.start(run, [sim.cluster.gpus[gpu].whole for gpu in gpus], pause=self.elastic[run.job.app].full)
            self.training[run].changed = sim.now

    def _resize(self, sim: Simulation, run: SimulatedRun, gpus: Sequence[int]) -> None:
        """Shrink a job to these GPUs."""
        for gpu in [place.gpu for place in run.places if place.gpu not in gpus]:
            self._release(sim, gpu)
        self._move(sim, run, gpus)

    def _move(self, sim: Simulation, run: SimulatedRun, gpus: Sequence[int]) -> None:
        cost = self.elastic[run.job.app].seconds(len(run.places), len(gpus))
        pause_left = max(0.0, run.resumes - sim.now)
        save = cost if len(gpus) < len(run.places) else 0.0
        sim.move(run, [sim.cluster.gpus[gpu].whole for gpu in gpus], save=save, pause=pause_left + cost - save)
        self.training[run].changed = sim.now

    def _stop(self, sim: Simulation, run: SimulatedRun) -> None:
        for place in run.places:
            self._release(sim, place.gpu)
        sim.preempt(run)
        self.training[run].changed = sim.now

    def _release(self, sim: Simulation, gpu: int) -> None:
        del self.holder[gpu]
        if gpu in self.idle_since:
            self.idle_since[gpu] = sim.now

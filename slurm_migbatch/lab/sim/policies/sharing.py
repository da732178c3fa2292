"""Run jobs by SJF-BSBF and its variant that simulates the queue: `decide.lending.lookahead` on whole GPUs, with gangs.

The policy updates a `GangQueue` at every start and end; a job's remaining work follows from its estimate and
its speed so far. Slowdowns of pairs are those of the engine's `Speeds`. Memory is assumed to be sufficient for two jobs
on a GPU, as in the baselines, and the cost of starting is not predicted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_migbatch.config.keys import between, key
from slurm_migbatch.decide.lending.lookahead import PAIR, RULES, TrainingStart, plan
from slurm_migbatch.decide.lending.pairs import SharingRules
from slurm_migbatch.decide.lending.sharing_queue import APART, QueuedTraining, Rank, SharingQueue, Slowdown, Started
from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.registry import NoParams, simulated
from slurm_migbatch.lab.sim.run import SimulatedRun


class _Alike(list[QueuedTraining]):
    """Pending jobs of one application and need, the shortest first: if the first starts next to no job, no other does.

    `possible`: positions in `GangQueue._singles` of the jobs next to which the first might start; `tested`: how many
    of that list have been tested.
    """

    def __init__(self) -> None:
        super().__init__()
        self.possible: list[int] = []
        self.tested = 0


class GangQueue(SharingQueue):
    """Jobs that need one GPU or several, the shortest first; those that do not fit are skipped.

    What a rule refuses it refuses later too (see `Rank`), and for longer jobs. Therefore only the first of jobs that
    are alike is tested, and with another job again only if that one has had a partner since.
    """

    def __init__(self, free: int, slowdown: Slowdown) -> None:
        super().__init__(free, slowdown)
        #: the jobs of `single`, and those that were; one that got an unshared GPU again stands there again
        self._singles: list[QueuedTraining] = []
        self._number: dict[QueuedTraining, int] = {}
        self._groups: list[_Alike] = []
        #: whether a job has got an unshared GPU since the last `start`, and the number of empty GPUs after that
        self._more_alone = True
        self._free_before = 0

    def retest(self) -> None:
        """Let the next `start` test all pairs, because the rule or the queue is another one."""
        super().retest()
        self._singles = list(self.single)
        self._number = {task: number for number, task in enumerate(self._singles)}
        groups: dict[tuple[str, int], _Alike] = {}
        for task in self.queue:
            groups.setdefault((task.app, task.need), _Alike()).append(task)
        self._groups = sorted(groups.values(), key=_first)
        self._more_alone = True

    def start(self, rule: Rank | None) -> list[Started]:
        """Start the jobs that the rule starts; return the number of empty GPUs and the partners of each."""
        started: list[Started] = []
        if not self._more_alone and self.free <= self._free_before:
            return started
        groups, position = self._groups, 0
        while position < len(groups) and (self.free or (self.lone and rule is not None)):
            group = groups[position]
            place = self._place(group, rule)
            if place is None:
                position += 1
                continue
            task = group.pop(0)
            if not group:
                del groups[position]
            groups.sort(key=_first)
            self.queue.remove(task)
            self.run(task, *place)
            started.append((task, *place))
            position = 0
        self._more_alone, self._free_before = False, self.free
        return started

    def _place(self, group: _Alike, rule: Rank | None) -> tuple[int, list[tuple[QueuedTraining, int]]] | None:
        """Return the number of empty GPUs of the first job of a group, and its partners; None if it does not start."""
        task = group[0]
        missing = task.need - self.free
        if missing <= 0:
            return task.need, []
        if rule is None or self.lone < missing:
            return None
        candidates: list[tuple[float, int]] = []
        available = 0
        single, singles, number_of = self.single, self._singles, self._number
        pair_slowdowns, now = self._pairs, self.now
        app, own_left = task.app, task.left
        numbers = (*group.possible, *range(group.tested, len(singles)))
        for number in numbers:
            other = singles[number]
            if other not in single or number_of[other] != number:
                continue
            slowdowns = pair_slowdowns.get((app, other.app)) or self._both(app, other.app)
            if slowdowns is APART:
                continue
            other_left = other.left - other.rate * (now - other.since)  # `remaining`, without a call
            ranked = rule(own_left, other_left if other_left > 0.0 else 0.0, slowdowns[0], slowdowns[1])
            if ranked is not None:
                candidates.append((ranked, number))
                available += other.alone
        group.possible = [number for _, number in candidates]
        group.tested = len(singles)
        self.budget.left -= len(numbers)
        if available < missing:
            return None
        candidates.sort()
        chosen: list[tuple[QueuedTraining, int]] = []
        for _, number in candidates:
            count = min(missing, singles[number].alone)
            chosen.append((singles[number], count))
            missing -= count
            if not missing:
                break
        return self.free, chosen

    def _add_single(self, task: QueuedTraining) -> None:
        super()._add_single(task)
        self._number[task] = len(self._singles)
        self._singles.append(task)

    def _alone(self, task: QueuedTraining, change: int) -> None:
        super()._alone(task, change)
        self._more_alone = self._more_alone or change > 0


def _first(group: _Alike) -> tuple[float, int]:
    return group[0].left, group[0].key


class BsbfSharing(Policy):
    """Shortest job first, alone or next to one other job, by the rule of `rules` that `lookahead.plan` finds best."""

    def __init__(
        self, rules: Sequence[Rank | None] = (PAIR,), depth: int = 64, steps: int = SharingRules().steps
    ) -> None:
        self.rules, self.depth, self.steps = tuple(rules), depth, steps
        self.runs: dict[int, SimulatedRun] = {}
        self.sharing = GangQueue(0, lambda own, other: 1.0)
        self._xi: dict[tuple[str, str], float] = {}
        self._samples: dict[str, SimulatedRun] = {}
        self._sim: Simulation | None = None

    def begin(self, sim: Simulation) -> None:
        """Begin with all GPUs empty."""
        self._sim = sim
        self.sharing = GangQueue(len(sim.cluster.gpus), self._slowdown)

    def arrive(self, sim: Simulation, run: SimulatedRun) -> None:
        """Add the job to the queue; a job that can never fit waits forever."""
        self._samples.setdefault(run.job.app, run)
        if run.job.gpus <= len(sim.cluster.gpus):
            self.runs[run.job.id] = run
            task = QueuedTraining(run.job.id, run.job.app, run.job.gpus, run.job.claimed)
            insort(self.sharing.queue, task, key=lambda queued: (queued.left, queued.key))

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Free the job's GPUs, or leave them to the other job alone."""
        self.sharing.now = sim.now
        self.sharing.end(self.sharing.tasks[run.job.id])
        del self.runs[run.job.id]

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that `plan` chooses."""
        self.sharing.now = sim.now
        if not self.sharing.queue:
            return
        self.sharing.budget.left = self.steps
        for start in plan(self.sharing, self.rules, self.depth):
            run = self.runs[start.key]
            sim.start(run, self._places(sim, start))

    def _places(self, sim: Simulation, start: TrainingStart) -> list[Place]:
        gpus, places = sim.cluster.gpus, []
        empty = sim.cluster.empty
        for _ in range(start.empty):
            low = empty & -empty
            places.append(gpus[low.bit_length() - 1].whole)
            empty ^= low
        for partner, count in start.partners:
            single = [place for place in self.runs[partner].places if len(sim.cluster.runs(place)) == 1]
            places += single[:count]
        return places

    def _slowdown(self, own: str, other: str) -> float:
        factor = self._xi.get((own, other))
        if factor is None:
            assert self._sim is not None
            factor = self._sim.speeds.slowdown(self._samples[own], [self._samples[other]])
            self._xi[own, other] = factor
        return factor


@dataclass(frozen=True)
class SharingParams:
    """Share or wait, by simulating the whole queue."""

    depth: int = key(64, "Number of pending jobs simulated to their end, at most.", between(1, 10**6))
    steps: int = key(SharingRules().steps, "Simulation steps of one decision, as in a round.", between(1, 10**9))


BSBF = simulated("shortest first, sharing if the pair gains", NoParams, lambda p, cluster: BsbfSharing((PAIR,)))


def _sharing(params: SharingParams, _cluster: SimulatedCluster) -> BsbfSharing:
    return BsbfSharing(RULES, params.depth, params.steps)


SHARING = simulated("shortest first, sharing if the whole queue gains", SharingParams, _sharing)

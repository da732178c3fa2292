"""Training lent the idle MIG slices of inference: `policy.loans`, driven by the simulation as by the live loop.

Inference starts on the GPUs that are for it as soon as there is room; where there is none, loans of least loss end.
Training jobs have one slice each. They run on GPUs of their own and, if slices are lent, on what inference leaves; who
gets which slice is decided in rounds. What `forecast.Levels` expects inference to need, profile by profile, is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slurm_migbatch.config.schema import between, key
from slurm_migbatch.lab.sim.cluster import Cluster, Part, Place, PlaceError
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.job import Job
from slurm_migbatch.lab.sim.placing import slices
from slurm_migbatch.lab.sim.policy import Policy, Quiet
from slurm_migbatch.lab.sim.registry import PolicyKind
from slurm_migbatch.lab.sim.run import Run
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import capacity
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.policy.forecast import Levels
from slurm_migbatch.policy.lending import Calm, Elastic
from slurm_migbatch.policy.loans import Grow, Lent, Limits, Seat, Space, Trainee, call_back, lend

_ROUND: Final = "slices"
CALM: Final = Calm(first_s=300.0, growth=2.0, most_s=3600.0, loan_s=600.0, idle_s=0.0, rest_s=60.0, gain=1.35)
"""Of slices: a GPU with seven of them is never at rest as a whole, so the forecast says what may be lent."""


@dataclass(frozen=True)
class SliceWay:
    """How slices are lent.

    Attributes:
        lend: whether inference's GPUs are lent at all.
        forecast: whether what inference is expected to need is kept; without, whatever is free is lent.
        sure: how probable it must be that what is kept suffices, over the next `horizon_s`; what was needed in the last
            `horizon_s` is kept in any case. Each profile has what is kept for itself, which suffices for all of them
            together much more often.
        round_s: seconds between decisions about training. `prompt`: whether inference calls back at once, and not at
            the next such moment only.
        protect_s: for so long after its start a loan is ended last.
        spared: loans that were stopped so often are ended last, and grow no more.
    """

    lend: bool = True
    forecast: bool = True
    sure: float = 0.3
    horizon_s: float = 60.0
    calm: Calm = CALM
    round_s: float = 60.0
    prompt: bool = True
    protect_s: float = 60.0
    spared: int = 3
    limits: Limits = field(default_factory=Limits)


class SliceLending(Quiet):
    """Use it for one simulation."""

    def __init__(
        self,
        own: Iterable[int],
        lent: Iterable[int],
        way: SliceWay,
        levels: Mapping[Profile, Levels] | None = None,
        clock: float = 0.0,
        day_s: float = 86_400.0,
    ) -> None:
        """`own` and `lent` are indexes of training's GPUs and of inference's; `levels` what inference needed before.

        `clock` is the time of `levels` at 0 s.
        """
        self.own, self.lent, self.way, self.clock, self.day_s = tuple(own), tuple(lent), way, clock, day_s
        if not self.lent or not (self.own or way.lend):
            raise ValueError("inference needs GPUs, and training its own ones or loans")
        self.levels = dict(levels or {})
        self.inference: list[Run] = []
        self.training: dict[int, Run] = {}
        self.since: dict[int, float] = {}
        self.hits: Counter[int] = Counter()
        self.running: Counter[Profile] = Counter()
        self.served: dict[int, tuple[Profile, set[int]]] = {}
        self.idle_since = dict.fromkeys(self.lent, 0.0)
        self.reclaimed: dict[int, float] = {}
        self.reclaims = 0
        self._speeds: dict[tuple[str, int, int, Profile | None, Profile | None], dict[Profile, float]] = {}
        self._room: dict[Profile, int] = {}
        self._due = self._woken = False
        self._full: set[tuple[Profile, int]] = set()
        self._stuck: dict[Profile, int] | None = None
        self._changed = 0.0

    # -- events ----------------------------------------------------------------------------------------------------

    def begin(self, _sim: Simulation) -> None:
        """Learn which GPUs are inference's."""
        self.part = Part(sum(1 << gpu for gpu in self.lent), 0, len(self.lent))

    def arrive(self, sim: Simulation, run: Run) -> None:
        """Inference waits for `decide`, training for the next round; what can never fit waits for ever."""
        self._stuck, self._changed = None, sim.now
        if run.job.kind == "train":
            if not self._of(sim, run.job):
                return
            self.training[run.job.id] = run
        elif run.job.gpus <= self._most(sim, self._profile(sim, run)):
            self.inference.append(run)
        self._wake(sim)

    def complete(self, sim: Simulation, run: Run) -> None:
        """Its slices are free."""
        self._news(sim)
        if run.job.kind == "train":
            del self.training[run.job.id]
            return
        profile, gpus = self.served.pop(run.job.id)
        self.running[profile] -= run.job.gpus
        for gpu in gpus:
            self.idle_since[gpu] = sim.now
        self._tell(sim, profile)

    def timer(self, _sim: Simulation, _key: Any) -> None:
        """A round is due."""
        self._due = True

    def decide(self, sim: Simulation) -> None:
        """Inference first; training when its round is due."""
        if self.inference:
            self._serve(sim, self.way.prompt or self._due)
        if self._due:
            self._due = self._woken = False
            if self.training:
                self._round(sim)
            if self.training or self.inference:
                self._wake(sim)

    def _news(self, sim: Simulation) -> None:
        """Room may have come, so that it is worth while to look for some again."""
        self._stuck, self._changed = None, sim.now
        self._full.clear()

    def _wake(self, sim: Simulation) -> None:
        if not self._woken:
            self._woken = True
            period = self.way.round_s
            sim.wake((sim.now // period + 1) * period, _ROUND)

    # -- inference -------------------------------------------------------------------------------------------------

    def _serve(self, sim: Simulation, may_call: bool) -> None:
        if may_call and not self.way.prompt:
            self._full.clear()  # what had no room may call loans back now
        left: list[Run] = []
        touched: Counter[Profile] = Counter()
        for run in self.inference:
            profile = self._profile(sim, run)
            ask = profile, run.job.gpus
            places = None if ask in self._full else slices(sim.cluster, *ask, self.part)
            if places is None and ask not in self._full and may_call and self._call(sim, ask):
                places = slices(sim.cluster, *ask, self.part)
            if places is None:
                self._full.add(ask)
                left.append(run)
                touched[profile] += 0
                continue
            self.served[run.job.id] = profile, {place.gpu for place in places}
            self.running[profile] += len(places)
            touched[profile] += len(places)
            sim.start(run, places)
            self._stuck, self._changed = None, sim.now
        self.inference = left
        for profile, started in touched.items():
            self._tell(sim, profile, started)

    def _tell(self, sim: Simulation, profile: Profile, started: int = 0) -> None:
        if profile not in self.levels:
            self.levels[profile] = Levels(day_s=self.day_s)
        waiting = sum(run.job.gpus for run in self.inference if self._profile(sim, run) == profile)
        self.levels[profile].demand(self.clock + sim.now, self.running[profile] + waiting, started)

    def _profile(self, sim: Simulation, run: Run) -> Profile:
        """What it asks for; the whole of a GPU where it names no profile."""
        return run.job.profile or sim.cluster.gpus[self.lent[0]].geometry.full.profile

    def _most(self, sim: Simulation, profile: Profile) -> int:
        """How many such slices inference's GPUs have if nobody else is there."""
        if profile not in self._room:
            gpus = (sim.cluster.gpus[index].geometry for index in self.lent)
            self._room[profile] = sum(capacity(geometry, EMPTY, profile) for geometry in gpus if profile in geometry)
        return self._room[profile]

    def _call(self, sim: Simulation, ask: tuple[Profile, int]) -> bool:
        """End the loans of least loss so that there is room; whether there is."""
        found = call_back(
            [ask[0]] * ask[1],
            self._spaces(sim, self.lent),
            self._trainees(sim, waiting=False),
            sim.now,
            protect_s=self.way.protect_s,
        )
        if found.unserved or not found.jobs:
            return False
        for job, seat in zip(found.jobs, found.seats, strict=True):
            run = self.training[int(str(job))]
            self.hits[run.job.id] += 1
            self.reclaimed[seat.gpu] = sim.now
            self.reclaims += 1
            sim.preempt(run)
            self._news(sim)
        return True

    # -- training --------------------------------------------------------------------------------------------------

    def _round(self, sim: Simulation) -> None:
        calm = self.way.calm
        reserve = self._reserve(sim) if self.way.lend else {}
        if self._stuck == reserve and sim.now - self._changed > max(calm.idle_s, calm.rest_s) + self.way.round_s:
            return  # somebody waits for room, and nothing is as could give him some
        gpus = [*self.own, *self.lent] if self.way.lend and not self.inference else self.own
        found = lend(self._spaces(sim, gpus), self._trainees(sim), reserve, sim.now, calm, self.way.limits)
        self._stuck = reserve if found.lacking and not found.grants else None
        for grow in found.grows:
            self._grow(sim, grow)
        for grant in found.grants:
            run = self.training[int(str(grant.job))]
            place = Place(grant.seat.gpu, grant.seat.slot)
            if sim.now >= run.ready and self._fits(sim.cluster, place):
                sim.start(run, [place])
                self.since[run.job.id] = sim.now
                self._full.clear()

    def _grow(self, sim: Simulation, grow: Grow) -> None:
        run = self.training[int(str(grow.job))]
        place = Place(grow.seat.gpu, grow.seat.slot)
        (old,) = run.places
        gpu = sim.cluster.gpus[place.gpu]
        used = gpu.used.remove(old.slot) if old.gpu == place.gpu else gpu.used
        if gpu.geometry.fits(used, place.slot):
            sim.move(run, [place])
            self.since[run.job.id] = sim.now
            self._full.clear()

    @staticmethod
    def _fits(cluster: Cluster, place: Place) -> bool:
        """Whether the place is free: one that was thought of may wait for somebody who was to move, and did not."""
        gpu = cluster.gpus[place.gpu]
        return gpu.geometry.fits(gpu.used, place.slot)

    def _reserve(self, sim: Simulation) -> dict[Profile, int]:
        if not self.way.forecast:
            return {}
        now, way = self.clock + sim.now, self.way
        return {
            profile: more
            for profile, levels in self.levels.items()
            if (more := levels.needed(now, way.horizon_s, way.sure, way.horizon_s) - self.running[profile]) > 0
        }

    def _spaces(self, sim: Simulation, gpus: Iterable[int]) -> list[Space]:
        spaces = []
        for index in gpus:
            gpu = sim.cluster.gpus[index]
            taken, lent = [], []
            for slot, cell in sorted(gpu.cells.items()):
                run = cell.runs[0]
                if run.job.kind == "train":
                    lent.append(Lent(slot, run.job.id))
                else:
                    taken.append(slot)
            mine = index not in self.idle_since
            idle, last = self.idle_since.get(index, 0.0), self.reclaimed.get(index)
            spaces.append(Space("", index, gpu.geometry, tuple(taken), tuple(lent), idle, last, own=mine))
        return spaces

    def _trainees(self, sim: Simulation, waiting: bool = True) -> list[Trainee]:
        """In the order of their arrival; loans that are spared look as if they had just begun."""
        found = []
        for run in self.training.values():
            job = run.job
            if not (waiting or run.places):
                continue
            seat = Seat("", run.places[0].gpu, run.places[0].slot) if run.places else None
            restarts = run.preempted + run.moves
            since = sim.now if restarts >= self.way.spared else self.since.get(job.id, 0.0)
            full = job.costs.checkpoint_s + job.costs.restart_s
            found.append(
                Trainee(
                    job.id,
                    self._of(sim, job),
                    job.user,
                    None,
                    seat,
                    since,
                    restarts,
                    self.hits[job.id],
                    Elastic(full, full),
                    run.remaining(sim.now),
                )
            )
        return found

    def _of(self, sim: Simulation, job: Job) -> dict[Profile, float]:
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


@dataclass(frozen=True)
class SliceParams:
    """Lending of slices."""

    share: float = key(0.5, "Share of the nodes that are training's own; the others are inference's.", between(0, 0.99))
    lend: bool = key(True, "Whether inference's nodes are lent.")
    forecast: bool = key(True, "Whether what inference is expected to need is kept free.")
    sure: float = key(0.3, "How probable it must be that what is kept suffices.", between(0, 1))
    round_s: float = key(60.0, "Seconds between decisions about training.", between(0.1, 86_400))
    horizon_s: float = key(60.0, "For how long ahead inference's needs are looked at.", between(1, 86_400))
    loan_s: float = key(600.0, "In so many seconds a larger slice has to earn a restart back.", between(1, 86_400))
    idle_s: float = key(0.0, "A GPU is lent that long after inference has last ended on it.", between(0, 86_400))
    rest_s: float = key(60.0, "A GPU is lent that long after a loan was called back from it.", between(0, 86_400))
    gain: float = key(1.35, "A larger slice must make a running job that many times faster.", between(1, 100))
    spared: int = key(3, "Loans that were stopped so often are ended last, and grow no more.", between(0, 1000))


def _make(params: SliceParams, cluster: Cluster) -> Policy:
    nodes = len(cluster.nodes)
    split = round(nodes * params.share)
    if split >= nodes or (not split and (params.share > 0 or not params.lend)):
        raise PlaceError(f"{nodes} nodes cannot be divided into {params.share:g} and the rest: give it more nodes")
    first = cluster.nodes[split].start
    calm = replace(CALM, loan_s=params.loan_s, idle_s=params.idle_s, rest_s=params.rest_s, gain=params.gain)
    way = SliceWay(
        params.lend, params.forecast, params.sure, params.horizon_s, calm, params.round_s, spared=params.spared
    )
    return SliceLending(range(first), range(first, len(cluster.gpus)), way)


SLICE_LENDING = PolicyKind("training on one MIG slice each, its own and idle ones of inference", SliceParams, _make)

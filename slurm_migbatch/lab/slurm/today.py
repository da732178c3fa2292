"""A controller of today's parts: the supply loop, and lending as the service's co-scheduler does it.

It is the seam at which a pure `decide` takes their place: `Today(...)` is a `run.Controller`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.cosched.carry import Done, carry
from slurm_migbatch.cosched.company import Company
from slurm_migbatch.cosched.forecast import Expectation
from slurm_migbatch.cosched.ledger import Ledger, Sight
from slurm_migbatch.cosched.lend import decide
from slurm_migbatch.cosched.look import Idleness, Knowledge, Run, Scene, picture_of, places_of, sights_of
from slurm_migbatch.cosched.picture import Kind, Order
from slurm_migbatch.cosched.share import Rules as ShareRules
from slurm_migbatch.cosched.trainees import Trainees, report_of
from slurm_migbatch.daemon.lending import Refusals, rules_of
from slurm_migbatch.lab.slurm.run import Look, Simulation
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.supply.loop import Settings, SupplyLoop
from slurm_migbatch.workload.loans import is_marked


class Today:
    """One round: supply, then lending.

    Args:
        simulation: what it controls.
        lending: the section of migbatch.toml; None: nothing is lent.
        supply: settings of the supply loop.
    """

    def __init__(
        self, simulation: Simulation, lending: LendingConfig | None = None, supply: Settings | None = None
    ) -> None:
        self.loop = SupplyLoop(
            simulation.slurm,
            simulation.nodes,
            simulation.nodes,
            simulation.clock,
            lambda *change: None,
            supply or Settings(),
            loan=self._is_loan,
        )
        self._config = lending
        self.lending = None if lending is None else Lending(lending, self.loop)

    def __call__(self, look: Look) -> bool:
        """Look, decide and act once."""
        for _, event in look.events:
            if event["kind"] == "misfit":
                self.loop.hasten(int(event["job"]))
        report = self.loop.round(look.jobs, look.nodes)
        acted = self.lending is not None and self.lending.round(look)
        return report.unsettled or acted

    def _is_loan(self, row: JobRow) -> bool:
        lends = self._config.partitions if self._config is not None else ()
        return is_marked(row.comment) and all(name in lends for name in row.partition.split(","))


class Lending:
    """The co-scheduler's round without a database: `daemon.cosched.CoschedRoom` in its order of things."""

    def __init__(self, config: LendingConfig, loop: SupplyLoop) -> None:
        self._config, self._loop = config, loop
        self.rules = rules_of(config)
        self.ledger = Ledger()
        self.trainees = Trainees(lambda hints, partition: {}, config.restart_s, config.checkpoint_s)
        self._expected = Expectation(config.forecast_days, config.day_s)
        self._idle = Idleness()
        self._refusals = Refusals()
        self._company = Company(ShareRules(), enabled=config.share)

    def round(self, look: Look) -> bool:
        """Whether anything was done."""
        for _, event in look.events:
            told = report_of(event, look.now) if event["kind"] == "progress" else None
            if told is not None:
                self.trainees.report(*told)
        latest = self._loop.latest
        if latest is None:
            return False
        now = look.now
        scene = Scene(now, look.jobs, look.nodes, look.facts, *latest)
        sights = sights_of(scene.rows, self._config.partitions)
        places = places_of(scene.facts)
        self.trainees.gpus(gpu.geometry for node in scene.facts.values() for gpu in node.gpus)
        self._company.look(scene.facts, sights)
        alone = {run: place[2].profile for run, place in places.items() if run not in self._company.shared}
        self.trainees.look(sights, alone)
        self.ledger.follow(sights, places, self.trainees.checkpoints(), now, set())
        self._refusals.forget(sights)
        self._expected.look(*_inference(scene, sights, places, self.ledger.runs), now)
        reserve = self._expected.reserve(now, self.rules.calm.loan_s, self._config.sure)
        knowledge = Knowledge(
            self.trainees.speeds,
            lambda sight: self.trainees.costs(sight, now),
            lambda sight: self.trainees.left_s(sight, now),
        )
        barred = self._refusals.barred(Kind.RELEASE, now)
        picture = picture_of(scene, sights, self.ledger, self._idle, knowledge, reserve, barred=barred)
        decided = self._company.add(picture, decide(picture, self.rules), self.rules, self._loop.offered_guests)
        self._loop.guests(self._company.wanted)
        orders = [order for order in decided.orders if order.job not in self._refusals.barred(order.kind, now)]
        for order in orders:
            self._intend(order, sights[order.job], now)
        self.ledger.unsaved()
        for done in carry(orders, sights, look.slurm, look.clock.time):
            self._became(done)
        return bool(orders)

    def _intend(self, order: Order, sight: Sight, now: float) -> None:
        if order.kind in (Kind.RELEASE, Kind.SHARE) and order.profile is not None:
            self.ledger.release(sight.row, order.profile, order.why, now)
        elif order.kind is Kind.WITHDRAW:
            self.ledger.withdraw(order.job, order.cause, order.why)
        elif order.kind is Kind.SIGNAL:
            self.ledger.signal(order.job, order.cause, order.why)
        elif order.kind is Kind.REQUEUE:
            self.ledger.requeue(order.job, order.cause, order.why)

    def _became(self, done: Done) -> None:
        order = done.order
        if done.error:
            self._refusals.note(order, done.at)
            self.ledger.refused(order.job, done.error, done.at)
            return
        self._refusals.clear(order)
        if order.kind in (Kind.RELEASE, Kind.SHARE, Kind.SIGNAL, Kind.REQUEUE):
            self.ledger.took(order.job, done.at)


def _inference(
    scene: Scene, sights: Mapping[int, Sight], places: Mapping[Run, Any], loans: set[Run]
) -> tuple[dict[Profile, frozenset[Run]], dict[Profile, int]]:
    """What jobs that are no loans have (their runs), and wait for, by profile."""
    running: dict[Profile, set[Run]] = {}
    for run, (_, _, slot) in places.items():
        if run not in loans:
            running.setdefault(slot.profile, set()).add(run)
    waiting: dict[Profile, int] = {}
    for demand in scene.wanted:
        if demand.job not in sights:
            for profile, count in demand.parts:
                waiting[profile] = waiting.get(profile, 0) + count * demand.nodes * demand.copies
    return {profile: frozenset(runs) for profile, runs in running.items()}, waiting

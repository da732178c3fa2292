"""The co-scheduler inside the service: it follows every look at Slurm, after supply, and keeps its record.

What is about to be done stands in the record before Slurm is called. Where the database does not answer in time nothing
is lent, but what inference needs is still called back: that must not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.config.hours import Hours
from slurm_migbatch.cosched.carry import Done, Hands, carry
from slurm_migbatch.cosched.company import Company
from slurm_migbatch.cosched.forecast import Expectation
from slurm_migbatch.cosched.ledger import Ledger, Loan, Place, Sight
from slurm_migbatch.cosched.lend import decide
from slurm_migbatch.cosched.look import Idleness, Knowledge, Run, Scene, picture_of, places_of, sights_of
from slurm_migbatch.cosched.picture import Kind, Order, Round
from slurm_migbatch.cosched.share import Rules as ShareRules
from slurm_migbatch.cosched.trainees import Predict, Report, Trainees, report_of
from slurm_migbatch.daemon.lending import Refusals, past_of, rules_of
from slurm_migbatch.daemon.log import Trouble
from slurm_migbatch.daemon.metrics import Labels, Metrics
from slurm_migbatch.daemon.poll import Snapshot
from slurm_migbatch.daemon.supply import SupplyRoom
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.store.progress import RunProgress
from slurm_migbatch.workload.csvlines import TraceError
from slurm_migbatch.workload.pairs import read

log = logging.getLogger(__name__)

_SAVE_S: Final = 5.0
"""How long a round waits for the database to take its intentions."""
_AGAIN_S: Final = 3600.0
"""After so long a dry run says once more what it would still do."""


class CoschedRoom:
    """Keeps the ledger of loans, decides after every look, and has it carried out."""

    def __init__(
        self,
        config: LendingConfig,
        client: Hands,
        supply: SupplyRoom,
        writer: StoreWriter,
        metrics: Metrics,
        predict: Predict = lambda hints, partition: {},
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._client, self._supply, self._writer, self._clock = config, client, supply, writer, clock
        self.rules = rules_of(config)
        self._blackout = tuple(Hours.parse(text) for text in config.blackout)
        self.ledger = Ledger()
        self.trainees = Trainees(predict, config.restart_s, config.checkpoint_s)
        self._expected = Expectation(config.forecast_days, config.day_s)
        self._idle = Idleness()
        self._refusals = Refusals()
        self.company = Company(ShareRules(measured=_measured(config.pairs)), enabled=config.share)
        self._loaded = asyncio.Event()
        self._asked: set[int] = set()
        self._said: dict[tuple[int, Kind], tuple[str, float]] = {}
        self._round = Round()
        self._sights: Mapping[int, Sight] = {}
        self._trouble = Trouble("lending", "nothing that runs is touched; the next round tries again", log)
        self._record_trouble = Trouble("the record of loans", "nothing is lent until it can be written", log)
        self._seconds = metrics.histogram("migbatch_lending_round_seconds", "Duration of a decision on loans.")
        self._reclaims = metrics.counter("migbatch_loans_ended_total", "Loans that ended, by what ended them.")
        self._actions = metrics.counter("migbatch_lending_actions_total", "What was done to training jobs, by kind.")
        metrics.gauge("migbatch_loans", "Loans that go on, by state.", self._states)
        metrics.gauge("migbatch_loans_waiting", "Elastic training jobs that wait for a slice.", self._waiting)

    # -- the record ------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Learn from the record which loans go on, what was called back, and what inference has needed."""
        trouble = Trouble("cannot read the loans", "nothing is lent or called back until then", log)
        now, history_s = self._clock(), self._config.forecast_days * self._config.day_s
        while self._config.enabled and not self._loaded.is_set():
            try:
                past = await asyncio.wrap_future(
                    self._writer.call(lambda store: past_of(store, now, history_s), "loans")
                )
            except Exception as error:
                await asyncio.sleep(trouble.failed(error))
                continue
            trouble.succeeded()
            self.ledger.load(loan for row in past.loans if (loan := Loan.from_row(row)) is not None)
            await asyncio.to_thread(self._expected.learn, past.uses, now)  # weeks of it take a while
            self._idle.since.update(past.freed)
            self._recall(past.runs)
            for row in past.actions:
                if row["dry_run"] and row["kind"] in {kind.value for kind in Kind}:  # dispatch keeps its own there too
                    self._said[row["job_id"], Kind(row["kind"])] = row["after"] or "", row["ts"]
            self._loaded.set()
        await asyncio.Event().wait()

    def ingested(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in what jobs told of themselves, after it was stored."""
        now = self._clock()
        for event in events:
            if event.get("kind") == "progress":
                self._heard(event, now)

    def _heard(self, event: Mapping[str, Any], now: float) -> None:
        told = report_of(event, now)
        if told is not None:
            self.trainees.report(*told)

    async def _save(self, loans: Sequence[Loan]) -> bool:
        """Whether the record has these loans."""
        rows = [loan.row() for loan in loans]
        if not rows:
            return True
        if self._writer.trouble.open:  # known to be away: nobody waits for it
            self.ledger.unsave(loans)
            return False
        try:
            future = asyncio.wrap_future(self._writer.call(lambda store: store.save_loans(rows, ()), "loans"))
            await asyncio.wait_for(asyncio.shield(future), _SAVE_S)
        except Exception as error:
            self._record_trouble.failed(error)
            self.ledger.unsave(loans)
            return False
        self._record_trouble.succeeded()
        return True

    # -- rounds ----------------------------------------------------------------------------------------------------

    async def follow(self, snapshot: Snapshot) -> bool:
        """One round on what Slurm just said and supply just planned; whether another should follow soon."""
        if not self._config.enabled or not self._loaded.is_set():
            return False
        look = self._supply.loop.latest
        if look is None:
            return False
        now = self._clock()
        scene = Scene(now, snapshot.jobs, snapshot.nodes, self._supply.view.facts(), *look)
        sights = sights_of(scene.rows, self._config.partitions)
        await self._learn(sights)
        try:
            self._round = await asyncio.to_thread(self._decide, scene, sights)
        except Exception as error:
            if not self._trouble.open:
                log.exception("a decision on loans failed")
            self._trouble.failed(error)
            return False
        self._trouble.succeeded()
        self._sights = sights
        orders = [order for order in self._round.orders if order.job not in self._refusals.barred(order.kind, now)]
        self._supply.loop.guests({} if self._config.dry_run else self.company.wanted)
        if self._config.dry_run:
            self._post(())
            self._would(orders, sights, now)
            return False
        return await self._act(orders, sights)

    def _decide(self, scene: Scene, sights: Mapping[int, Sight]) -> Round:
        begun = time.monotonic()
        now = scene.now
        places = places_of(scene.facts)
        self.trainees.gpus(gpu.geometry for node in scene.facts.values() for gpu in node.gpus)
        self.company.look(scene.facts, sights)
        alone = {run: place[2].profile for run, place in places.items() if run not in self.company.shared}
        self.trainees.look(sights, alone)
        unread = {row.job_id for row in scene.rows if row.unread}
        for loan in self.ledger.follow(sights, places, self.trainees.checkpoints(), now, unread):
            self._reclaims.add(cause=loan.cause.value)
            log.info("loan over", extra={"job": loan.job_id, "profile": loan.profile, "why": loan.why_ended})
        self._refusals.forget(sights)
        running, waiting = _inference(scene, sights, places, self.ledger.runs)
        self._expected.look(running, waiting, now)
        reserve = self._expected.reserve(now, self._config.horizon_s, self._config.sure)
        knowledge = Knowledge(
            self.trainees.speeds,
            lambda sight: self.trainees.costs(sight, now),
            lambda sight: self.trainees.left_s(sight, now),
        )
        dark = any(hours.covers(datetime.fromtimestamp(now)) for hours in self._blackout)
        barred = self._refusals.barred(Kind.RELEASE, now)
        picture = picture_of(scene, sights, self.ledger, self._idle, knowledge, reserve, blackout=dark, barred=barred)
        decided = self.company.add(picture, decide(picture, self.rules), self.rules, self._supply.loop.offered_guests)
        self._seconds.observe(time.monotonic() - begun)
        return decided

    async def _learn(self, sights: Mapping[int, Sight]) -> None:
        """Ask the record what jobs that have run before achieved, once each."""
        self._asked &= sights.keys()
        unknown = {job for job, sight in sights.items() if sight.row.restarts} - self._asked
        if not unknown or self._writer.trouble.open:
            return
        self._asked |= unknown
        try:
            future = asyncio.wrap_future(self._writer.call(lambda store: store.job_progress(unknown), "progress"))
            found = await asyncio.wait_for(future, _SAVE_S)
        except Exception as error:  # what is usual has to do
            log.debug("what jobs achieved is not known yet: %s", error)
            self._asked -= unknown
            return
        self._recall(found)

    def _recall(self, runs: Iterable[RunProgress]) -> None:
        for run in runs:
            report = Report(run.checkpoint, run.ckpt_s, run.items, run.items_per_s)
            try:
                self.trainees.recall((run.job, run.restart), Profile.parse(run.profile or ""), report)
            except ProfileError:  # it had several slices, or none
                continue

    async def _act(self, orders: Sequence[Order], sights: Mapping[int, Sight]) -> bool:
        now = self._clock()
        if self._writer.trouble.open:
            orders = [order for order in orders if order.kind not in (Kind.RELEASE, Kind.SHARE)]
        for order in orders:
            self._intend(order, sights[order.job], now)
        if not orders:
            self._post(())
            return False
        if not await self._save(self.ledger.unsaved()):
            for order in orders:
                if order.kind in (Kind.RELEASE, Kind.SHARE):
                    self.ledger.refused(order.job, "it could not be recorded", now)
            orders = [order for order in orders if order.kind not in (Kind.RELEASE, Kind.SHARE)]
        if not orders:
            return False
        done = await asyncio.to_thread(carry, orders, sights, self._client, self._clock)
        for one in done:
            self._became(one)
        self._post([_action(one) for one in done])
        return True

    def _post(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Let the record have what changed, when it can."""
        changed = [loan.row() for loan in self.ledger.unsaved()]
        if changed or actions:
            self._writer.post(lambda store: store.save_loans(changed, actions), "loans", len(changed) + len(actions))

    def _intend(self, order: Order, sight: Sight, now: float) -> None:
        ledger = self.ledger
        if order.kind in (Kind.RELEASE, Kind.SHARE) and order.profile is not None:
            ledger.release(sight.row, order.profile, order.why, now)
        elif order.kind is Kind.WITHDRAW:
            ledger.withdraw(order.job, order.cause, order.why)
        elif order.kind is Kind.SIGNAL:
            ledger.signal(order.job, order.cause, order.why)
        elif order.kind is Kind.REQUEUE:
            ledger.requeue(order.job, order.cause, order.why)

    def _became(self, one: Done) -> None:
        order = one.order
        self._actions.add(kind=order.kind.value, outcome="refused" if one.error else "done")
        words = {"job": order.job, "before": one.before, "after": one.after, "why": order.why}
        if one.error:
            log.warning("Slurm refused to %s a training job", order.kind.value, extra={**words, "error": one.error})
            self._refusals.note(order, one.at)
            self.ledger.refused(order.job, one.error, one.at)
            return
        log.info("%s", order.kind.value, extra=words)
        self._refusals.clear(order)
        if order.kind in (Kind.RELEASE, Kind.SHARE, Kind.SIGNAL, Kind.REQUEUE):
            self.ledger.took(order.job, one.at)

    # -- dry run ---------------------------------------------------------------------------------------------------

    def _would(self, orders: Sequence[Order], sights: Mapping[int, Sight], now: float) -> None:
        """Record what would be done, each once for as long as it stays the same."""
        fresh = []
        for done in carry(orders, sights, _NoHands(), self._clock):
            key, order = (done.order.job, done.order.kind), done.order
            before = self._said.get(key)
            if before is None or before[0] != done.after or now - before[1] >= _AGAIN_S:
                self._said[key] = done.after, now
                fresh.append(_action(done, dry_run=True))
                log.info("dry run: would %s", order.kind.value, extra={"job": order.job, "why": order.why})
        for key in [key for key in self._said if key[0] not in sights]:
            del self._said[key]
        self._post(fresh)

    # -- for users -------------------------------------------------------------------------------------------------

    def why(self, job: int) -> str | None:
        """Why an elastic training job waits; None where it is none or does not."""
        sight = self._sights.get(job)
        if sight is None or not sight.row.pending:
            return None
        loan = self.ledger.open.get(job)
        if loan is not None:
            return f"it may start on {loan.profile} since {max(0, int(self._clock() - loan.decided))} s ({loan.why})"
        if not sight.hints.waiting:
            return "it is being put back to waiting for a slice"
        return self._round.lacking.get(job, "Slurm does not let it start yet, see its reason in squeue")

    def waiting(self) -> dict[int, str]:
        """Every elastic training job that waits, and why."""
        return {job: text for job in self._sights if (text := self.why(job)) is not None}

    @property
    def error(self) -> str:
        """What is wrong with lending, if anything."""
        return self._trouble.error

    def _states(self) -> Mapping[Labels, float]:
        return {(("state", state),): float(n) for state, n in self.ledger.states().items()}

    def _waiting(self) -> Mapping[Labels, float]:
        return {(): float(sum(1 for sight in self._sights.values() if sight.row.pending))}


class _NoHands:
    """Hands that do nothing: a dry run goes the same way as a real one up to them."""

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Nothing."""

    def signal_all(self, job_ids: Iterable[int | str], name: str) -> None:
        """Nothing."""

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """Nothing."""


def _measured(path: str) -> Mapping[tuple[str, str], float]:
    """Slowdowns of pairs; none, with a warning, where the file cannot be read."""
    if not path:
        return {}
    try:
        return read(Path(path))
    except (OSError, TraceError) as error:
        log.warning("[lending] pairs cannot be used, the usual slowdown is assumed of every pair: %s", error)
        return {}


def _inference(
    scene: Scene, sights: Mapping[int, Sight], places: Mapping[Run, Place], loans: Collection[Run]
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


def _action(one: Done, dry_run: bool = False) -> dict[str, Any]:
    order = one.order
    return {
        "ts": one.at,
        "job_id": order.job,
        "restart": order.restart,
        "kind": order.kind.value,
        "before": one.before,
        "after": one.after,
        "why": order.why,
        "dry_run": dry_run,
        "outcome": one.error,
    }

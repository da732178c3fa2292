"""Dispatch inside the service: what a look at the queue leads to for jobs that wait and for elastic arrays.

After each look and supply's round on it, at most every `[dispatch] every_s`: jobs without a place may get another
profile (`cosched.dispatch`), arrays another throttle (`cosched.arrays`). All changes of a round are one process of
Slurm's. What Slurm refuses is seen at the next look, noted, and not tried again. Nothing that is lost with this process
is needed: decisions are in the record, and so is every throttle before Slurm is told of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from slurm_migbatch.config import DispatchConfig
from slurm_migbatch.cosched import arrays as elastic
from slurm_migbatch.cosched.arrays import Bounds, Elastic, Task, Throttle, elastic_arrays, throttles
from slurm_migbatch.cosched.dispatch import (
    UNNAMED,
    Candidate,
    Pending,
    Promise,
    Retype,
    Turns,
    mended,
    name_of,
    promise_from_record,
    promise_of,
    retypes,
    undone,
    without_place,
)
from slurm_migbatch.cosched.space import Space, of_counts, of_plan
from slurm_migbatch.daemon.facts import SiteFacts
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.poll import Snapshot
from slurm_migbatch.daemon.supply import SupplyRoom
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.mig.grant import strip
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused
from slurm_migbatch.supply.demand import demands
from slurm_migbatch.supply.model import Demand
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

log = logging.getLogger(__name__)

_WAIT_S: Final = 0.5
"""How long a look waits for the record; what it does not say by then counts at the next look."""
_ABSENT_S: Final = (1.0, 60.0)
"""A decision that the record does not hold may be on its way: it is asked for again so soon, then ever later."""
_LOOKED_AFTER_S: Final = 60.0
"""For so long tasks of an array that was re-typed may turn out to have started in that moment."""
_REMEMBERED: Final = 100_000
"""Decisions kept in memory."""
_AT_ONCE: Final = 256
"""Decisions asked for at a time."""
_ALL: Final = 1_000_000


class Hands(Protocol):
    """What dispatch asks of Slurm."""

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """`scontrol update` of many jobs in one process; raises SlurmError."""


@dataclass
class _Look:
    """What one look shows, made ready for decisions."""

    now: float
    jobs: dict[int, JobRow]
    wanted: Sequence[Demand]
    placed: Mapping[int, int]
    space: Space
    #: nodes, and the names of those whose slices count
    nodes: Sequence[NodeRow]
    supply: Collection[str]
    #: pools in which jobs have no place, and which jobs
    crowded: dict[frozenset[str], set[int]] = field(default_factory=dict)
    #: job ids of the tasks of each array, and a pending one of them
    members: dict[int, set[int]] = field(default_factory=dict)
    waiting: dict[int, JobRow] = field(default_factory=dict)


class DispatchRoom:
    """Lets pending jobs and elastic arrays follow every look at Slurm."""

    def __init__(
        self,
        config: DispatchConfig,
        client: Hands,
        supply: SupplyRoom,
        facts: SiteFacts,
        writer: StoreWriter,
        metrics: Metrics,
        *,
        managed: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`managed`: whether supply is ([supply] enabled); else Slurm's counts are what there is."""
        self._config, self._client, self._supply, self._facts = config, client, supply, facts
        self._writer, self._managed, self._clock = writer, managed, clock
        self._turns = Turns(config.hold_s)
        self._bounds = Bounds()
        self._next = 0.0
        self._promises: OrderedDict[str, Promise | None] = OrderedDict()
        #: decisions that the record did not hold: when to ask again, and how long that was put off
        self._absent: dict[str, tuple[float, float]] = {}
        self._missing: dict[str, None] = {}
        #: answers of the record that were not there in time, by what was asked
        self._late: dict[str, Future[Any]] = {}
        self._runs: Mapping[int, Sequence[Task]] = {}
        self._replayed: set[int] = set()
        #: elastic arrays of which the record has not told yet what was set before
        self._unknown: set[int] = set()
        #: arrays that were re-typed, and until when their tasks are looked after
        self._touched: dict[int, float] = {}
        self._unsure: list[tuple[Retype | Throttle, str]] = []
        self._refused: dict[int, float] = {}
        self._said: dict[str, str] = {}
        self._fault = FaultReporter("dispatch", "jobs wait as they are; the next look tries again", log)
        self._seconds = metrics.histogram("migbatch_dispatch_round_seconds", "Duration of a decision on what waits.")
        self._actions = metrics.counter(
            "migbatch_dispatch_actions_total", "Changes of pending jobs, by kind.", "kind", "outcome"
        )

    @property
    def error(self) -> str:
        """What is wrong with dispatch, if anything."""
        return self._fault.error

    async def follow(self, snapshot: Snapshot) -> bool:
        """One round on what Slurm just said and supply just planned; whether jobs were changed."""
        if not self._config.enabled or snapshot.at < self._next:
            return False
        if self._managed and (self._supply.report is None or self._supply.report.error):
            return False
        self._next = snapshot.at + self._config.every_s
        try:
            return await self._round(snapshot)
        except Exception as error:
            if not self._fault.open:
                log.exception("a decision on what waits failed")
            self._fault.failed(error)
            return False

    async def _round(self, snapshot: Snapshot) -> bool:
        begun = time.monotonic()
        look = await asyncio.to_thread(self._look, snapshot)
        seconds = time.monotonic() - begun
        self._verify(look)
        self._turns.forget_but(snapshot.jobs)
        found = await self._elastic(snapshot.jobs) if self._config.arrays else []
        begun = time.monotonic()
        changes, limits = await asyncio.to_thread(self._decide, look, found)
        seconds += time.monotonic() - begun
        if self._missing and await self._learn():
            begun = time.monotonic()
            look = await asyncio.to_thread(self._look, snapshot)  # deciding takes of the room
            changes, limits = await asyncio.to_thread(self._decide, look, found)
            seconds += time.monotonic() - begun
        self._seconds.observe(seconds)
        self._fault.succeeded()
        if self._config.dry_run:
            self._would(changes, limits, look.now)
            return False
        return await self._act(changes, limits, look.jobs.values(), look.now)

    # -- what there is ---------------------------------------------------------------------------------------------

    def _look(self, snapshot: Snapshot) -> _Look:
        now = self._clock()
        jobs = {row.job_id: row for row in snapshot.jobs}
        planned = self._supply.loop.latest if self._managed else None
        if planned is not None:
            plan, wanted = planned
            placed: Mapping[int, int] = {job: each.copies for job, each in plan.placed.items()}
            told = self._supply.loop.told
            look = _Look(now, jobs, wanted, placed, of_plan(told, plan, jobs), snapshot.nodes, told.keys())
        else:
            names = {row.name for row in snapshot.nodes if row.open and row.gres}
            wanted = demands(snapshot.jobs, snapshot.nodes, names, now)
            space, placed = of_counts(snapshot.nodes, wanted)
            look = _Look(now, jobs, wanted, placed, space, snapshot.nodes, names)
        for demand in wanted:
            if demand.parts and placed.get(demand.job, 0) < demand.copies:
                look.crowded.setdefault(demand.pool, set()).add(demand.job)
        for row in snapshot.jobs:
            if row.array_job is not None:
                look.members.setdefault(row.array_job, set()).add(row.job_id)
                if row.pending and (row.array_job not in look.waiting or row.tasks > 1):
                    look.waiting[row.array_job] = row
        return look

    def _decide(self, look: _Look, found: Sequence[Elastic]) -> tuple[list[Retype], list[Throttle]]:
        """Throttles come first: their arrays' tasks need room as much as anybody."""
        self._missing.clear()
        limits = throttles(look.now, self._placeable(look, found), self._bounds, look.space, self._crowd(look))
        limits = [each for each in limits if self._refused.get(each.array.array, 0.0) <= look.now]
        # how many tasks of these arrays are to run is being settled: what has no place now may have none to need
        unsettled = {each.array.array for each in limits} | self._unknown
        waiting = (
            each for each in without_place(look.wanted, look.jobs, look.placed) if each.row.array_job not in unsettled
        )
        changes = undone(look.jobs.values(), self._turns)
        changes += retypes(look.now, waiting, self._promise, look.space, self._turns)
        return changes, limits

    def _crowd(self, look: _Look) -> Callable[[Elastic], bool]:
        def scarce(array: Elastic) -> bool:
            own = look.members[array.array]
            return any(jobs - own for pool, jobs in look.crowded.items() if not pool.isdisjoint(array.pool))

        return scarce

    # -- promises --------------------------------------------------------------------------------------------------

    def _promise(self, pending: Pending) -> Promise | None:
        name = pending.grant.decision
        key = f"{strip(pending.row.comment)}@{pending.row.partition}" if name == UNNAMED else name
        if key in self._promises:
            return self._promises[key]
        if name != UNNAMED:
            if name not in self._absent or self._absent[name][0] <= time.monotonic():
                self._missing[name] = None
            return None
        return self._keep(key, self._chosen_again(pending.row))

    def _keep(self, key: str, promise: Promise | None) -> Promise | None:
        while len(self._promises) >= _REMEMBERED:
            self._promises.popitem(last=False)
        self._promises[key] = promise
        return promise

    def _chosen_again(self, row: JobRow) -> Promise | None:
        """What the compiled table's choice left open: the table gives the answers that the service would."""
        hints = _hints(row.comment)
        choice = None if hints is None else self._facts.choice(hints, row.partition)
        if hints is None or choice is None:
            return None
        listed = [
            Candidate(c.profile, c.offer.memory_mib, None if c.figures is None else c.figures.rate / 1000, c.ok)
            for c in choice.candidates
        ]
        return promise_of(choice.offer.profile, listed, hints.items, hints.deadline_s)

    async def _learn(self) -> bool:
        """Ask the record for decisions that are not known yet; whether it told any."""
        names = list(self._missing)[:_AT_ONCE]  # the first in Slurm's order
        rows = await self._ask(lambda store: {name: store.decision(name) for name in names}, "decisions asked for")
        told = False
        for name, row in (rows or {}).items():
            if row is None:
                wait = min(2 * self._absent[name][1], _ABSENT_S[1]) if name in self._absent else _ABSENT_S[0]
                self._absent[name] = time.monotonic() + wait, wait
            else:
                self._absent.pop(name, None)
                told = self._keep(name, promise_from_record(row)) is not None or told
        if len(self._absent) > _REMEMBERED:
            self._absent.clear()
        return told

    async def _ask(self, work: Callable[[Any], Any], label: str) -> Any:
        """What the record answers; None where it does not in time. A late answer is had at the next look."""
        future = self._late.pop(label, None)
        if future is None:
            if self._writer.fault.open:  # known to be away: nobody waits for it
                return None
            try:
                future = self._writer.call(work, label)
            except Overloaded as error:
                log.debug("%s: %s", label, error)
                return None
        wrapped = asyncio.wrap_future(future)
        wrapped.add_done_callback(lambda it: it.cancelled() or it.exception())  # it is looked at here and nowhere else
        await asyncio.wait({wrapped}, timeout=_WAIT_S)
        if not future.done():
            self._late[label] = future
            return None
        try:
            return future.result()
        except Exception as error:
            log.debug("the record does not answer (%s): %s", label, error)
            return None

    # -- arrays ----------------------------------------------------------------------------------------------------

    async def _elastic(self, rows: Iterable[JobRow]) -> list[Elastic]:
        """The elastic arrays, with what the record knows of them; none of which it has not told what was set before."""
        found = elastic_arrays(rows)
        present = {array.array for array in found}
        self._bounds.forget_but(present)
        self._replayed &= present
        self._runs = {array: runs for array, runs in self._runs.items() if array in present}
        if not present:
            self._unknown = set()
            return []
        fresh = sorted(present - self._replayed)

        def ask(store: Any) -> tuple[Any, Any]:
            return store.array_runs(sorted(present)), store.actions(fresh, _ALL) if fresh else ()

        told = await self._ask(ask, "tasks of arrays")
        if told is not None:  # perhaps to a question of an earlier look
            runs, actions = told
            self._runs = {
                array: tuple(Task(run.started, run.ended, run.state == "COMPLETED") for run in listed)
                for array, listed in runs.items()
            }
            self._bounds.replay(action for action in actions if action["job_id"] not in self._replayed)
            self._replayed |= present & runs.keys()
        self._unknown = present - self._replayed
        return [array for array in found if array.array in self._replayed]

    def _placeable(self, look: _Look, found: Sequence[Elastic]) -> list[Elastic]:
        """With the pool in which tasks could run whatever keeps them from starting now, and the prediction."""
        rows = [replace(look.waiting[array.array], reason="", throttle=None) for array in found]
        pools = {demand.job: demand.pool for demand in demands(rows, look.nodes, look.supply, look.now)}
        known = []
        for array, row in zip(found, rows, strict=True):
            hints = _hints(array.comment)
            rate = None if hints is None else self._facts.rates(hints, row.partition).get(array.profile)
            predicted = array.items / (rate * array.each) if rate else None
            pool = pools.get(row.job_id, frozenset())
            known.append(elastic.known(array, self._runs.get(array.array, ()), predicted, pool))
        return known

    # -- what is done ----------------------------------------------------------------------------------------------

    async def _act(
        self, changes: Sequence[Retype], limits: Sequence[Throttle], rows: Iterable[JobRow], now: float
    ) -> bool:
        updates: dict[str, Mapping[str, str]] = {}
        done: list[Retype | Throttle] = []
        for change in changes:
            fields = change.fields()
            if fields is None:
                self._turns.bar(change)
            else:
                updates.update(dict.fromkeys(change.targets, fields))
                done.append(change)
        if limits and await self._recorded(limits, now):
            for limit in limits:
                updates[str(limit.array.array)] = {"ArrayTaskThrottle": str(limit.after)}
                self._bounds.set(limit.array.array, limit.after)
                done.append(limit)
        self._touched = {array: until for array, until in self._touched.items() if until > now}
        repairs = mended(rows, self._touched)
        updates.update({name: fields for name, fields in repairs.items() if name not in updates})
        if not updates:
            return False
        for each in done:
            if isinstance(each, Retype):
                self._turns.note(each, now)
                if (array := each.pending.row.array_job) is not None:
                    self._touched[array] = now + _LOOKED_AFTER_S
        refused: Mapping[str, str] = {}
        try:
            await asyncio.to_thread(self._client.update_jobs, updates)
        except SlurmRefused as error:
            refused = error.refused
            # Slurm complains of tasks that have ended, and takes the new throttle of the array nevertheless
            doubtful = [each for each in done if isinstance(each, Throttle) and str(each.array.array) in refused]
            self._unsure = [(each, refused[str(each.array.array)]) for each in doubtful]
            done = [each for each in done if each not in doubtful]
        except SlurmError as error:
            # nobody knows how far it came: the next look shows
            self._unsure = [(each, str(error)) for each in done]
            self._next = 0.0
            return True
        self._settle([(each, next((refused[n] for n in _targets(each) if n in refused), "")) for each in done], now)
        return True

    def _settle(self, outcomes: Iterable[tuple[Retype | Throttle, str]], now: float) -> None:
        """Draw the consequences of what Slurm did or refused, and record them; what it did to throttles is recorded."""
        rows = []
        for each, error in outcomes:
            if error and isinstance(each, Retype):
                self._turns.bar(each)
            elif error and isinstance(each, Throttle):
                self._refused[each.array.array] = now + self._config.hold_s
            if error or isinstance(each, Retype):
                rows.append(_action(each, now, error))
            self._tell(each, error)
        self._record(rows)

    async def _recorded(self, limits: Sequence[Throttle], now: float) -> bool:
        """Whether the record knows of the new throttles, without which a restart would take them for the users' own."""
        rows = [_action(limit, now) for limit in limits]
        told = await self._ask(lambda store: store.save_loans((), rows) or True, "throttles")
        self._late.pop("throttles", None)  # another answer than to what will be asked next
        return told is True

    def _verify(self, look: _Look) -> None:
        """See what became of changes that Slurm did not confirm."""
        unsure, self._unsure = self._unsure, []
        present = {name_of(row): row for row in look.jobs.values()} if unsure else {}
        outcomes = []
        for each, error in unsure:
            if isinstance(each, Retype):
                row = next((present[name] for name in each.names if name in present), None)
                changed = row is not None and row.comment != each.pending.row.comment
            else:
                row = look.waiting.get(each.array.array)
                changed = row is None or row.tasks == 1 or row.throttle == each.after
            outcomes.append((each, "" if changed else error))
        self._settle(outcomes, look.now)
        self._refused = {array: until for array, until in self._refused.items() if until > look.now}

    def _record(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._writer.post(lambda store: store.save_loans((), rows), "actions", len(rows))

    def _tell(self, each: Retype | Throttle, error: str = "") -> None:
        row = _action(each, 0.0)
        words = {"job": row["job_id"], "before": row["before"], "after": row["after"], "why": row["why"]}
        if isinstance(each, Retype):
            words["job"] = each.targets[0]
        self._actions.labels(row["kind"], "refused" if error else "done").inc()
        if error:
            log.warning("Slurm refused to %s a job; it stays as it is", row["kind"], extra={**words, "error": error})
        else:
            log.info("%s", row["kind"], extra=words)

    def _would(self, changes: Sequence[Retype], limits: Sequence[Throttle], now: float) -> None:
        """Record what would be done, each once for as long as it stays the same."""
        rows = []
        named: list[tuple[str, Retype | Throttle]] = []
        named += [(f"{each.pending.row.job_id} {each.tasks} profile", each) for each in changes]
        named += [(f"{each.array.array} throttle", each) for each in limits]
        said = {name: str(_action(each, now)["after"]) for name, each in named}
        for name, each in named:
            if self._said.get(name) != said[name]:
                rows.append(_action(each, now, dry_run=True))
                log.info("dry run: would %s", rows[-1]["kind"], extra={"job": rows[-1]["job_id"], "why": each.why})
        self._said = said
        self._record(rows)


def _targets(each: Retype | Throttle) -> tuple[str, ...]:
    return each.targets if isinstance(each, Retype) else (str(each.array.array),)


def _hints(comment: str) -> Hints | None:
    try:
        return hinting.parse(strip(comment))
    except Refusal:
        return None


def _action(each: Retype | Throttle, now: float, outcome: str = "", *, dry_run: bool = False) -> dict[str, Any]:
    """A row of the record's actions."""
    row: dict[str, Any] = {"ts": now, "restart": 0, "why": each.why, "dry_run": dry_run, "outcome": outcome or None}
    if isinstance(each, Throttle):
        before, after = elastic.shown_throttle(each.array.throttle), elastic.shown_throttle(each.after)
        return {**row, "job_id": each.array.array, "kind": "throttle", "before": before, "after": after}
    pending = each.pending
    before, after = each.words(pending.profile), each.words(each.after)
    job, restart = pending.row.job_id, pending.row.restarts
    return {**row, "job_id": job, "restart": restart, "kind": "retype", "before": before, "after": after}

"""A small cluster that lends: the simulated Slurm and nodes step by step, training jobs, and the real controller.

`Training` is the behaviour of a training job: its steps, and whether it writes a checkpoint on a signal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller, RoundReport
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.record import WriterRecord, lending_past
from slurm_migbatch.daemon.settings import blackout_of, lending_settings
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.lending.model import LendingRules
from slurm_migbatch.decide.lending.stage import LendingMemory, why_not_lent
from slurm_migbatch.lab.slurm.records import SlurmSettings
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.store.db import Store, open_store
from tests.support.stores import prepared
from tests.support.supply_world import SteppedSlurm, World

PATIENCE_S = 60.0
DELAY_S = 120.0
LEAVES_S = 2.0
RULES = {
    "enabled": True,
    "partitions": ("train",),
    "min_idle_s": 5.0,
    "horizon_s": 20.0,
    "day_s": 864.0,
    "grace_s": 10.0,
    "start_s": 15.0,
    "restart_s": 5.0,
    "checkpoint_s": 2.0,
}


@dataclass
class Training:
    """One training job: `needs` seconds of work, a checkpoint `after` seconds after the signal (None: never).

    It reports its first step `starts` seconds after each start.
    """

    needs: float
    after: float | None = 1.0
    done: float = 0.0
    saved: float = 0.0
    signalled_at: float | None = None
    starts: float = 2.0
    stepped: int = -1  # restart count of the last run that has reported a step


class LendingSlurm(SteppedSlurm):
    """A simulated Slurm that asserts that a controller's changes of jobs are valid."""

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        for name, fields in updates.items():
            for row in self._named(name, split=False) if row_pending(self, name) else ():
                assert set(fields) <= {"Gres", "Comment", "StartTime", "ReqNodeList"}, fields
                assert gres.counts(fields["Gres"], "mig"), fields
                assert own_text(row.comment) == own_text(fields["Comment"]), "the user's own text"
                late = row.submit <= self.clock.time() - 3
                assert fields.get("StartTime") != "now" or late, "a credential just revoked"
        super().update_jobs(updates)

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        assert name in ("USR1", "USR2")
        super().signal_all(job_ids, name, script=script)


def row_pending(slurm: LendingSlurm, name: str) -> bool:
    return any(row.pending for row in slurm._named(name, split=False))


def own_text(comment: str) -> str:
    return comment.partition(" [mig:")[0]


class LoanWorld(World):
    """A cluster that lends: `step` simulates a second; `control` can be killed and restarted on the same record."""

    slurm: LendingSlurm

    def __init__(self, url: str, nodes: int = 1, gpus: int = 1, **rules: Any) -> None:
        super().__init__(nodes=nodes, gpus=gpus)
        self.url, self.config = url, {**RULES, **rules}
        self.training: dict[int, Training] = {}
        self.seq = 0
        #: seconds by which the nodes' reports of job ends are delayed
        self.late = 0
        #: items reported by jobs, in tests that set their rates
        self.items: dict[int, float] = {}
        self._muted = 0
        self.start_service()

    def make_slurm(self, width: int) -> LendingSlurm:
        return LendingSlurm(self.clock, SlurmSettings(requeue_delay_s=DELAY_S), width)

    def terminated(self, row: JobRow) -> None:
        self.ends.pop(row.job_id, None)
        self.clock.after(LEAVES_S, lambda: self.leave(row.job_id))

    # -- the service -----------------------------------------------------------------------------------------------

    def start_service(self) -> None:
        """Start migbatchd (again)."""
        self.writer = StoreWriter(lambda: open_store(prepared(self.url)), 1000)
        self.writer.start()
        config = LendingConfig(**self.config)
        self.advertiser = Advertiser(self.slurm, self.nodes)
        observer = Observer(self.nodes.view, self.nodes, self.advertiser.total, blackout=blackout_of(config))
        settings = Settings(self.settings, None, lending_settings(config) if config.enabled else None)
        record = WriterRecord(self.writer)
        self.control = Controller(settings, self.slurm, observer, self.advertiser, record, self.clock)
        now, history_s = self.clock.time(), config.forecast_days * config.day_s
        past = self.writer.call(lambda store: lending_past(store, now, history_s), "loans").result(PATIENCE_S)
        self.control.dry_run.recall(past.actions)
        observer.remember(past)

    def new_loop(self, last_counts: dict[str, dict[str, int]] | None = None) -> None:
        """Do nothing: the controller of `start_service` decides on supply, too."""

    @property
    def lending(self) -> LendingMemory:
        """The memory of lending."""
        return self.control.memory.lending

    @property
    def rules(self) -> LendingRules:
        """The lending rules of the service."""
        assert self.control.settings.lending is not None
        return self.control.settings.lending.rules

    @property
    def shared(self) -> Mapping[int, str]:
        """The pairs that the last round has put into a plan."""
        supply = self.control.decision.supply if self.control.decision is not None else None
        return {} if supply is None else supply.shared

    def why(self, job: int) -> str:
        """Return why an elastic job waits; empty if it does not."""
        return why_not_lent(job, self.lending, self.clock.time()) or ""

    def kill(self) -> None:
        """migbatchd is gone; what it had queued for the record is written or not, as it was."""
        self.writer.stop(PATIENCE_S)

    def restart(self, **rules: Any) -> None:
        """Kill migbatchd and start it again."""
        self.kill()
        self.config.update(rules)
        self.start_service()

    def close(self) -> None:
        self.kill()

    def round(self) -> RoundReport:
        sums = {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}
        before = Counter(self.slurm.calls)
        rows = self.slurm.nodes()
        report = self.control.round(self.slurm.jobs(), rows)
        calls = self.slurm.calls - before
        assert calls["update_jobs"] <= 2, "however many jobs; two where Slurm does not forget former types"
        assert calls["signal_all"] <= 2, "one for each signal"
        assert calls["requeue_all"] <= 1
        assert sums == {n: sum(m.gres.values()) for n, m in self.slurm.machines.items()}, "the constant sum broke"
        return report

    def store(self) -> Store:
        """Open the record, with all queued writes in it."""
        self.writer.call(lambda store: None, "flush").result(PATIENCE_S)
        return open_store(self.url, readonly=True)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def train(
        self,
        needs: float = 1000.0,
        hints: str = "signal=usr1",
        after: float | None = 1.0,
        starts: float = 2.0,
        **kw: Any,
    ) -> int:
        """Submit an elastic training job."""
        comment = f"migbatch: role=train {hints}".strip() + " [mig:loan:1#loan0001]"
        values = {"partition": "train", "priority": 100, "account": "ml", "user": "alice", "uid": 1001, **kw}
        job = self.slurm.submit("gres/mig:loan:1", runs=10**9, limit=None, comment=comment, **values)
        self.training[job] = Training(needs, after, starts=starts)
        return job

    def infer(self, profile: str, runs: float = 30.0, **kw: Any) -> int:
        """Submit an inference job."""
        return self.slurm.submit(f"gres/mig:{profile}:1", runs=runs, user="bob", uid=1002, account="web", **kw)

    def row(self, job: int) -> JobRow:
        return self.slurm.queue[job]

    def vanish(self, job: int) -> None:
        """Cancel a job and remove it at once, whatever it does."""
        self.ends.pop(job, None)
        self.nodes.epilog(job)
        self.slurm.completed(job, "CANCELLED")
        self.slurm.cancelled(job)
        self.slurm.released(job)

    def running(self) -> set[int]:
        return {job for job, row in self.slurm.queue.items() if row.state == "RUNNING"}

    def loaned(self) -> dict[int, str]:
        """Return the profiles of training jobs that run on their own slice."""
        running_profiles = {job: slices(self.row(job).gres) for job in self.training if job in self.running()}
        return {job: next(iter(profiles)).name for job, profiles in running_profiles.items() if profiles}

    def step(self) -> RoundReport:
        before = len(self.slurm.queue) + sum(row.restarts for row in self.slurm.queue.values())
        self.clock.sleep(1.0)
        self._work(1.0)
        self.finish()
        if len(self.slurm.queue) + sum(row.restarts for row in self.slurm.queue.values()) != before:
            self._muted = self.late
        self._report()
        self.nodes.poll()
        report = self.round()
        self.start()
        self.prologs()
        self._report()
        return report

    def _report(self) -> None:
        if self._muted > 0:
            self._muted -= 1
        else:
            self.nodes.report()

    def _work(self, seconds: float) -> None:
        now = self.clock.time()
        for job, row in list(self.slurm.queue.items()):
            if row.array_job in self.training and job not in self.training:
                pattern = self.training[row.array_job]
                self.training[job] = Training(pattern.needs, pattern.after, starts=pattern.starts)
        for job, state in self.training.items():
            row = self.slurm.queue.get(job)
            if row is None or row.state != "RUNNING":
                continue
            if self.ends.get(job, 0) - now > 10**8 and row.start is not None and row.start >= now - seconds:
                state.done = state.saved  # it continues from its checkpoint
                state.signalled_at = None
            state.done += seconds
            if state.stepped < row.restarts and row.start is not None and now - row.start >= state.starts:
                state.stepped = row.restarts
                self.tell(job, row.restarts, items=1)
            if state.signalled_at is None and (job, "USR1") in self.slurm.signals[-20:] and self._fresh(job):
                state.signalled_at = now
            if state.signalled_at is not None and state.after is not None and now - state.signalled_at >= state.after:
                state.saved, state.signalled_at = state.done, None
                self.tell(job, row.restarts, checkpoint=now)
            if state.done >= state.needs:
                self.ends[job] = now

    def _fresh(self, job: int) -> bool:
        loan = self.lending.ledger.open.get(job)
        return loan is not None and loan.state.value == "signalled" and loan.checkpoint is None

    def tell(self, job: int, restart: int, **fields: Any) -> None:
        """A progress event: into the record, then to the service; the node keeps it while the record is away."""
        if self.writer.fault.open:
            return
        self.seq += 1
        event = {"seq": self.seq, "ts": self.clock.time(), "kind": "progress", "job": job, "restart": restart, **fields}
        self.writer.call(lambda store: store.ingest("n1", "aa", "boot", [event]), "events").result(PATIENCE_S)
        (node,) = self.slurm.queue[job].nodes or ("n1",)
        self.control.observer.ingested(node, [event], self.clock.time())

    def until(self, done: Any, most: int = 400) -> int:
        """Step until `done()` is true; return the number of steps."""
        for number in range(most):
            if done():
                return number
            self.step()
        raise AssertionError(
            f"not within {most} s; {[(j, r.state, r.reason, r.gres) for j, r in self.slurm.queue.items()]}"
        )


MakeWorld = Callable[..., LoanWorld]
"""The fixture `world`: takes the options of `LoanWorld`, and closes what it made."""

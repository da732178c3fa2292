"""State of the cluster at one moment, as plain values: the input of every decision."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.capacity.sharing import Place
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.preemption import NO_PREEMPTION, PreemptionRules
from slurm_migbatch.slurm.settings import BACKFILL_WINDOW_S
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import LoanHints

Run = tuple[int, int]
"""A job and its restart count."""

_CLOCKS_S: Final = 60.0
"""Largest difference between clocks of hosts, for `passed_s`."""


def passed_s(since: float, now: float) -> float:
    """Return the seconds that have passed since a time of this service; infinite if the clock was set back since."""
    return now - since if since <= now + _CLOCKS_S else math.inf


@dataclass(frozen=True)
class PublishedPlan:
    """A node's plan as it was published.

    Attributes:
        version: increases with every change.
        gpus: every slot, used and free, by GPU UUID: profile, start and size in memory slices.
        guests: guests that may share a used slot: the second job, and where and with whom.
    """

    version: int
    gpus: Mapping[str, tuple[tuple[str, int, int], ...]]
    guests: Mapping[int, Place] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanStatus:
    """The published plan of a node.

    Attributes:
        plan: its newest published plan; None before the first.
        acknowledged: whether the node has confirmed that plan (or has none yet).
        reachable: whether the node has reported recently.
        total: the constant sum of its mig counts in Slurm.
    """

    plan: PublishedPlan | None = None
    acknowledged: bool = True
    reachable: bool = True
    total: int = 1 << 30


@dataclass(frozen=True)
class WeighedProfile:
    """One candidate profile of a decision (`predict.candidate.Candidate`, or its record)."""

    profile: Profile
    memory_mib: int
    rate: float | None
    ok: bool


@dataclass(frozen=True)
class Report:
    """The last report of a run.

    Attributes:
        checkpoint: its newest complete checkpoint (unix s); `ckpt_s`: seconds spent writing it.
        items, rate: items done, and items a second.
        latency_ms: of one batch.
        at: time of the report by the node's clock, unix seconds.
        activity: mean share of its slices' SMs in use so far (0 to 1), if it has them alone.
    """

    checkpoint: float | None = None
    ckpt_s: float | None = None
    items: float | None = None
    rate: float | None = None
    latency_ms: float | None = None
    at: float | None = None
    activity: float | None = None


# -- data from the record -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunProgress:
    """A run of a training job by its latest report; None: not reported.

    Attributes:
        profile: in NVML's spelling.
        checkpoint: when its newest checkpoint was complete, unix seconds; `ckpt_s`: seconds spent writing it.
        items: items done.
        shared: it has shared its slice, so `items_per_s` is not that of a slice of its own.
    """

    job: int
    restart: int
    profile: str | None = None
    checkpoint: float | None = None
    ckpt_s: float | None = None
    items: float | None = None
    items_per_s: float | None = None
    shared: bool = False


@dataclass(frozen=True)
class TaskRun:
    """One run of an array task that has started: unix seconds, and its state in Slurm."""

    started: float
    ended: float | None
    state: str


@dataclass(frozen=True)
class LendingPast:
    """Data of the record when a service starts.

    Attributes:
        loans: rows of loans, those of the last day and current ones.
        uses: profile, start and end of each use of a slice by inference, as far back as the forecast needs.
        freed: when a slice of a GPU (by UUID) was last released.
        runs: progress of current loans.
        actions: actions on jobs, and those of a dry run, oldest first.
    """

    loans: Sequence[Mapping[str, Any]] = ()
    uses: Sequence[tuple[str, float, float | None]] = ()
    freed: Mapping[str, float] = field(default_factory=dict)
    runs: Sequence[RunProgress] = ()
    actions: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Questions:
    """Queries to the record for the next decision.

    Attributes:
        progress: jobs whose runs' progress is needed.
        arrays: elastic arrays whose task runs are needed.
        throttled: those of them whose former throttles are needed.
        decisions: ids of the submit filter's decisions.
    """

    progress: frozenset[int] = frozenset()
    arrays: frozenset[int] = frozenset()
    throttled: frozenset[int] = frozenset()
    decisions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.progress or self.arrays or self.decisions)


@dataclass(frozen=True)
class Answers:
    """Answers of the record; None: no answer, or not in time.

    Attributes:
        asked: the questions that are answered here.
        progress: runs of the requested jobs.
        arrays: runs of the tasks of arrays, by array.
        throttles: actions on the arrays `asked.throttled`, oldest first, all of them.
        decisions: the requested decisions; None for one that the record does not have.
    """

    asked: Questions = Questions()
    progress: Sequence[RunProgress] | None = None
    arrays: Mapping[int, Sequence[TaskRun]] | None = None
    throttles: Sequence[Mapping[str, Any]] = ()
    decisions: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)


class Predictions(Protocol):
    """Predictions. The same query has the same answer as long as `version` does not change."""

    @property
    def version(self) -> str:
        """Identifies the model and the site's data behind the answers."""

    def training_speeds(self, hints: LoanHints, partition: str, /) -> Mapping[Profile, float]:
        """Return speeds of a training job on the slices that hold it, relative to the whole GPU; empty: unknown."""

    def rates(self, hints: Hints, partition: str, /) -> Mapping[Profile, float]:
        """Return the items a second of a request on each profile; empty if unknown."""

    def candidates(self, hints: Hints, partition: str, /) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """Return the profile that the table of choices grants, and all candidates; None: it has no answer."""


class NoPredictions:
    """Predictions of a site without data: every answer is unknown."""

    version = ""

    def training_speeds(self, _hints: LoanHints, _partition: str, /) -> Mapping[Profile, float]:
        """Return nothing."""
        return {}

    def rates(self, _hints: Hints, _partition: str, /) -> Mapping[Profile, float]:
        """Return nothing."""
        return {}

    def candidates(self, _hints: Hints, _partition: str, /) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """Return nothing."""
        return None


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster at one moment.

    Attributes:
        now: unix seconds.
        jobs: Slurm's queue in its order of consideration.
        inventory: GPUs, leases and idle instances by node, as reported.
        plans: the published plan of each node; a missing node has none.
        sent_back: runs requeued by a node since the last snapshot, because of a misfit.
        preference: how to offer empty space, from the history of requests; empty: unknown.
        reports: reports of runs since the last snapshot, in order.
        past: data of the record when the service started; only in the first snapshot that has it.
        answers: to the queries of the previous decision.
        recording: whether the record can be written now.
        blackout: whether the administrator allows no lending at this time of day.
        preemption: which jobs the site lets Slurm preempt, if migbatchd may preempt jobs by these rules.
        backfill_window_s: how far ahead Slurm plans the starts of pending jobs; 0: it does not backfill.
    """

    now: float
    jobs: tuple[JobRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    inventory: Mapping[str, NodeFacts] = field(default_factory=dict)
    plans: Mapping[str, PlanStatus] = field(default_factory=dict)
    sent_back: Collection[Run] = ()
    preference: tuple[Profile, ...] = ()
    reports: Sequence[tuple[Run, Report]] = ()
    past: LendingPast | None = None
    answers: Answers = Answers()
    recording: bool = True
    blackout: bool = False
    preemption: PreemptionRules = NO_PREEMPTION
    backfill_window_s: float = BACKFILL_WINDOW_S
    predictions: Predictions = field(default_factory=NoPredictions)

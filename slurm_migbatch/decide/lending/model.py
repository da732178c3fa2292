"""Define the input and output of a lending round: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Final

from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.loan import Cause, JobView, Loan
from slurm_migbatch.decide.lending.values import NOTHING, ElasticJob, GpuCapacity, Resources
from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.mig.profile import Profile


@dataclass(frozen=True)
class LendingRules:
    """Settings of the administrator; times in seconds. See `config.schema.LendingConfig`."""

    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    grace_s: float = 60.0
    start_s: float = 60.0
    #: a job that was to be requeued and still runs after this time is requeued again
    again_s: float = 15.0
    #: interval between starts of jobs that restart early (`LendingView.early`), and how long one that was released but
    #: has not started delays the next
    apart_s: float = 3.0
    turn_s: float = 15.0
    #: a loan that began more recently is reclaimed only if no other is sufficient
    protect_s: float = 60.0
    #: one that began more recently and has reported nothing ends without a checkpoint: writing it may take longer than
    #: the work that it would save
    starting_s: float = 60.0
    reclaim: bool = True
    most_releases: int = 8
    max_restarts: int = 3
    #: compute slices by account
    quota: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitingInference:
    """Inference that waits for room: `copies` of a job, each with `slices` on each of `nodes` nodes."""

    job: int
    slices: tuple[Profile, ...]
    pool: frozenset[str]
    nodes: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Shortage:
    """A pending inference job whose slices are offered, but nodes lack CPUs or memory for it.

    Attributes:
        lacks: what each of these nodes lacks.
        every: whether the job needs all of them, or one.
    """

    job: int
    lacks: Mapping[str, Resources]
    every: bool = False


@dataclass(frozen=True)
class PendingLoan:
    """A loan without a known slot: it was released, has just started, or is to be released again.

    Attributes:
        nodes: where it may be; `gpu`: the only GPU there; None: any.
        requested: what it takes of its node that Slurm does not count as used yet.
    """

    job: int
    profile: Profile
    nodes: frozenset[str] | None
    gpu: int | None = None
    requested: Resources = NOTHING


@dataclass(frozen=True)
class LendingView:
    """Input of a lending round.

    Attributes:
        capacities: GPUs of nodes that may lend. `taken` has running inference and supply's plan for pending
            inference; `lent` the loans.
        about_to_be_free: by node and GPU, bit mask of the memory slices that are taken or lent, but whose jobs are
            completing.
        starts: inference for which supply found no room, in Slurm's order.
        shortages: inference that lacks only CPUs, in Slurm's order.
        elastic_jobs: elastic training jobs in Slurm's order: pending ones that could be released, and running loans.
        pending_loans: loans without a slot yet.
        loans, job_views: the ledger's active loans, and elastic training jobs as Slurm shows them.
        ends_for: the inference job that a loan ends for, by the loan's job.
        lent: compute slices that each account has as loans, or is to have when stopped jobs come back.
        reserve: slices that inference is expected to need beyond current and pending ones.
        blackout: whether the administrator allows no lending now.
        away: nodes where released jobs must not start.
        early: jobs that may restart early, one after the other, where slurmd may confuse them with their last run.
    """

    now: float
    capacities: tuple[GpuCapacity, ...] = ()
    about_to_be_free: Mapping[tuple[str, int], int] = field(default_factory=dict)
    starts: tuple[WaitingInference, ...] = ()
    shortages: tuple[Shortage, ...] = ()
    elastic_jobs: tuple[ElasticJob, ...] = ()
    pending_loans: tuple[PendingLoan, ...] = ()
    loans: Mapping[int, Loan] = field(default_factory=dict)
    job_views: Mapping[int, JobView] = field(default_factory=dict)
    ends_for: Mapping[int, int] = field(default_factory=dict)
    lent: Mapping[str, int] = field(default_factory=dict)
    reserve: Mapping[Profile, int] = field(default_factory=dict)
    blackout: bool = False
    away: Mapping[int, frozenset[str]] = field(default_factory=dict)
    early: frozenset[int] = frozenset()

    @cached_property
    def unreported(self) -> Mapping[int, float]:
        """Start of each running loan that has reported nothing yet, by job."""
        return {
            elastic_job.job: elastic_job.since
            for elastic_job in self.elastic_jobs
            if elastic_job.place is not None and not elastic_job.reported
        }

    def starting(self, job: int, within_s: float) -> bool:
        """Return whether a loan began less than `within_s` ago and has reported nothing yet."""
        began = self.unreported.get(job)
        return began is not None and passed_s(began, self.now) < within_s

    def quota_left(self, rules: LendingRules) -> dict[str, int]:
        """Return the compute slices that each account with a quota may still have as loans."""
        return {account: quota - self.lent.get(account, 0) for account, quota in rules.quota.items()}


class OrderKind(str, Enum):
    """What is done to a job."""

    RELEASE = "release"
    WITHDRAW = "withdraw"
    SIGNAL = "signal"
    REQUEUE = "requeue"
    RETYPE = "retype"
    SHARE = "share"


#: orders that give a job a slice, or a share of one
GIVING: Final = frozenset({OrderKind.RELEASE, OrderKind.SHARE})


@dataclass(frozen=True)
class LoanOrder:
    """One order about a job's loan.

    `profile`: of a release, or of the host; `signal`: USR1 or USR2; `node`: the host's; `away`: nodes where a
    released job must not start; `again`: whether the job is stopped only to be released again; `inference`: the job
    that the loan ends for, 0 if there is none.
    """

    kind: OrderKind
    job: int
    restart: int
    why: str
    cause: Cause = Cause.NONE
    profile: Profile | None = None
    signal: str = ""
    node: str = ""
    away: tuple[str, ...] = ()
    again: bool = False
    inference: int = 0

    @property
    def recorded(self) -> bool:
        """Whether it is carried out only if it can be recorded: without the record nothing can be released."""
        return self.again or self.kind in GIVING


@dataclass(frozen=True)
class Round:
    """Decision of a lending round.

    Attributes:
        lacking: why each pending job is not released (a sentence).
        targets: the profile that a job is to get when it can be released, and the node and the GPU that have room then.
    """

    orders: tuple[LoanOrder, ...] = ()
    lacking: Mapping[int, str] = field(default_factory=dict)
    targets: Mapping[int, tuple[Profile, str, int]] = field(default_factory=dict)


def coming(view: LendingView) -> dict[tuple[str, int], GpuCapacity]:
    """Return the GPUs, by node and number, as they will be when leaving jobs have left."""
    leaving = {job for job, loan in view.loans.items() if loan.leaving}
    capacities = {}
    for capacity in view.capacities:
        leaving_mask = view.about_to_be_free.get((capacity.node, capacity.gpu), 0)
        taken = tuple(slot for slot in capacity.taken if not slot.placement.mask & leaving_mask)
        lent = tuple(
            loan for loan in capacity.lent if loan.job not in leaving and not loan.slot.placement.mask & leaving_mask
        )
        same = len(taken) == len(capacity.taken) and len(lent) == len(capacity.lent)
        capacities[capacity.node, capacity.gpu] = capacity if same else replace(capacity, taken=taken, lent=lent)
    return capacities

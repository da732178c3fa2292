"""What the co-scheduler in the service starts from, and what it keeps beside its ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slurm_migbatch.config import LendingConfig
from slurm_migbatch.cosched.picture import Kind, Order, Rules
from slurm_migbatch.daemon.ports import Store
from slurm_migbatch.policy.lending import Calm
from slurm_migbatch.store.progress import RunProgress

_DAY_S: Final = 86_400.0
_FIRST_S, _LONGEST_S = 2.0, 120.0
"""How long what Slurm has refused is left alone: twice as long each time."""


@dataclass
class Refusals:
    """Orders that Slurm refused lately, and until when they are not tried again (unix s)."""

    until: dict[tuple[Kind, int], tuple[float, float]] = field(default_factory=dict)

    def note(self, order: Order, now: float) -> None:
        """Slurm has refused it once more."""
        wait = min(_LONGEST_S, 2 * self.until.get((order.kind, order.job), (0.0, _FIRST_S / 2))[1])
        self.until[order.kind, order.job] = now + wait, wait

    def clear(self, order: Order) -> None:
        """Slurm has taken it."""
        self.until.pop((order.kind, order.job), None)

    def barred(self, kind: Kind, now: float) -> set[int]:
        """Jobs with which this is not tried now."""
        return {job for (which, job), (until, _) in self.until.items() if which is kind and until > now}

    def forget(self, listed: Collection[int]) -> None:
        """Only these jobs are there still."""
        self.until = {key: value for key, value in self.until.items() if key[1] in listed}


def rules_of(config: LendingConfig) -> Rules:
    """The rules that an admin set."""
    calm = Calm(loan_s=config.payback_s, idle_s=config.min_idle_s, rest_s=config.rest_s)
    return Rules(
        calm=calm,
        grace_s=config.grace_s,
        start_s=config.start_s,
        protect_s=min(60.0, config.payback_s / 10),
        reclaim=config.reclaim,
        most_releases=config.most_releases,
        max_restarts=config.max_restarts,
        quota=dict(config.quota),
    )


@dataclass(frozen=True)
class PastLending:
    """What the record knows: loans, what inference used, when GPUs were freed, runs of loans, and what was done."""

    loans: Sequence[Mapping[str, Any]]
    uses: Sequence[tuple[str, float, float | None]]
    freed: Mapping[str, float]
    runs: Sequence[RunProgress]
    actions: Sequence[Mapping[str, Any]]


def past_of(store: Store, now: float, history_s: float) -> PastLending:
    """The past that a service starts from; a forecast looks `history_s` seconds back."""
    loans = store.loans(since=now - max(history_s, _DAY_S))
    going = [row["job_id"] for row in loans if row["ended"] is None]
    return PastLending(
        loans, store.uses(now - history_s), store.freed(now - _DAY_S), store.job_progress(going), store.actions()
    )

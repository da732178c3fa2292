"""A loan, its states and causes, and the job that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final

from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import LoanHints


class State(str, Enum):
    """State of a loan."""

    RELEASED = "released"
    RUNNING = "running"
    SIGNALLED = "signalled"
    REQUEUED = "requeued"
    WITHDRAWN = "withdrawn"
    ENDED = "ended"


class Cause(str, Enum):
    """Cause of a loan's end: pending inference, a larger slice, a start that did not happen, Slurm itself (preemption,
    a failed node, another requeue), that the job left Slurm's list, that Slurm refused it, that the two on a slice did
    less than one alone (`PARTED`), or a time limit that was reached only because the job shared (`LIMIT`). `FORECAST`,
    expected inference, occurs only in records of earlier releases.
    """

    NONE = ""
    RECLAIM = "reclaim"
    FORECAST = "forecast"
    GROW = "grow"
    DIVIDE = "divide"
    LATE = "late"
    SLURM = "slurm"
    LEFT = "left"
    REFUSED = "refused"
    PARTED = "parted"
    LIMIT = "limit"


#: causes with which a job is stopped for the benefit of training, and continues at once
OTHER_SLICE: Final = frozenset({Cause.GROW, Cause.DIVIDE, Cause.PARTED, Cause.LIMIT})


@dataclass(frozen=True)
class Loan:
    """One release of one job; times in unix seconds. The fields are those of the record.

    Attributes:
        restart: Slurm's restart count of the run that the loan is for.
        profile: in NVML spelling.
        node, gpu: where it runs; the UUID of the GPU.
        decided: when it was decided; part of its identity.
        released, signalled, requeued: when Slurm accepted that. `checkpoint`: time of a checkpoint after the signal.
        why, why_ended: reasons of the release and of the end, as sentences.
    """

    job_id: int
    restart: int
    decided: float
    profile: str
    state: State
    why: str = ""
    uid: int = 0
    user: str = ""
    account: str = ""
    partition: str = ""
    node: str = ""
    gpu: str = ""
    released: float | None = None
    started: float | None = None
    signalled: float | None = None
    checkpoint: float | None = None
    requeued: float | None = None
    ended: float | None = None
    cause: Cause = Cause.NONE
    why_ended: str = ""

    def row(self) -> dict[str, Any]:
        """Return the loan as a row of the record."""
        return {**asdict(self), "state": self.state.value, "cause": self.cause.value}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Loan | None:
        """Read a loan from a row of the record; None if it is invalid."""
        names = {field.name for field in fields(cls)}
        text_fields = {"why", "user", "account", "partition", "node", "gpu", "why_ended", "cause"}
        values: dict[str, Any] = {
            name: (value or "") if name in text_fields else value for name, value in row.items() if name in names
        }
        try:
            values["state"], values["cause"] = State(row["state"]), Cause(values.get("cause", ""))
            Profile.parse(row["profile"])
        except (KeyError, ValueError, ProfileError):
            return None
        return cls(**{**values, "uid": values.get("uid") or 0})

    @property
    def slice(self) -> Profile:
        """The parsed profile."""
        return Profile.parse(self.profile)

    @property
    def leaving(self) -> bool:
        """Whether its slice is already being returned."""
        return self.state in (State.SIGNALLED, State.REQUEUED)


@dataclass(frozen=True)
class JobView:
    """An elastic training job as Slurm shows it now."""

    row: JobRow
    hints: LoanHints


@dataclass(frozen=True)
class LoanHistory:
    """History of a job by its earlier loans.

    Attributes:
        hits: how often its slice was taken, by migbatchd or by Slurm's preemption.
        restart, ended: restart count and end of the last loan.
        node: where it ran; empty if unknown.
        cause: cause of the last loan's end.
        late: how many of its releases since its last run Slurm did not start in time.
    """

    hits: int = 0
    restart: int = -1
    ended: float = 0.0
    node: str = ""
    cause: Cause = Cause.NONE
    late: int = 0


Place = tuple[str, str, Slot]
"""Node, UUID of the GPU, and slot of a run."""

"""One page of `migbatch top` as values, and as JSON from the query service to the client.

Rows are lists in JSON, in the order of their fields. The standard library only: login nodes import this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

VERSION: Final = 4

#: kinds of slots: held by a job, held on loan, offered to Slurm, disabled
USED: Final = "used"
LOAN: Final = "loan"
OFFERED: Final = "offered"
FAULTY: Final = "faulty"


class PageError(ValueError):
    """A text that is not a page."""


class SlotRow(NamedTuple):
    """A part of a GPU, in memory slices. `job`: 0 for none, and for a hidden one; `guest` shares it."""

    kind: str
    start: int
    size: int
    profile: str
    job: int
    guest: int
    user: str
    since: float


class GpuRow(NamedTuple):
    """One GPU.

    Attributes:
        number: its index on the node; -1: unknown.
        slices: memory slices; 0: MIG is off.
        state: Slurm's state of the node; `closed`: no job starts there, or on this GPU.
        trouble: problem reported by its node or Slurm.
    """

    node: str
    number: int
    slices: int
    state: str
    closed: bool
    trouble: str
    slots: tuple[SlotRow, ...]


class ProfileRow(NamedTuple):
    """Slices of one profile: held by jobs, and offered free ones."""

    profile: str
    used: int
    offered: int


class Totals(NamedTuple):
    """Totals of the whole cluster, regardless of selection: nodes, closed ones, GPUs, memory slices in all and held."""

    nodes: int = 0
    closed: int = 0
    gpus: int = 0
    slices: int = 0
    used: int = 0


class QueueRow(NamedTuple):
    """Pending jobs with the same request; array tasks count each. Times in unix seconds.

    Attributes:
        since: submission of the first of them.
        reason: Slurm's, of most of them; `why`: migbatchd's, of the first.
        start: of the first: "at" `expected` at the latest, "now", "open" if it waits for jobs without time limit, or
            "" if unknown.
    """

    wants: str
    jobs: int
    since: float
    reason: str
    why: str
    start: str
    expected: float


class LoanRow(NamedTuple):
    """A slice on loan, or a training job that waits for one, with its id as Slurm prints it (12_3).

    `goal`: items that it has to do; -1: unknown.
    """

    job: str
    user: str
    profile: str
    node: str
    gpu: str
    since: float
    state: str
    restarts: int
    steps: int
    items: float
    goal: float
    why: str


class EventRow(NamedTuple):
    """An event: a start, an end, a fault of a node, or an action of migbatchd on a job."""

    at: float
    kind: str
    node: str
    job: int
    user: str
    text: str


class NameRow(NamedTuple):
    """A job, by the number that rows have, as Slurm prints it: 12_3, 12+1."""

    job: int
    name: str


@dataclass(frozen=True)
class Page:
    """The cluster at one moment, as one user may see it.

    Attributes:
        left_out: GPUs that do not fit in an answer.
        names: of jobs in slots and events that Slurm does not print as their number.
    """

    at: float
    cluster: str = ""
    totals: Totals = field(default_factory=Totals)
    profiles: tuple[ProfileRow, ...] = ()
    waiting: int = 0
    gpus: tuple[GpuRow, ...] = ()
    queue: tuple[QueueRow, ...] = ()
    loans: tuple[LoanRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    left_out: int = 0
    names: tuple[NameRow, ...] = ()

    def write(self) -> str:
        """Return the page as JSON."""
        return json.dumps({"version": VERSION, **vars(self)}, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Page:
        """Parse the output of `write`. Raises PageError."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise PageError("command and service must be of the same release")
            gpus = tuple(_row(GpuRow, [*row[:-1], _rows(SlotRow, row[-1])]) for row in fields["gpus"])
            return cls(
                float(fields["at"]),
                _checked(str, fields["cluster"]),
                _row(Totals, fields["totals"]),
                _rows(ProfileRow, fields["profiles"]),
                _checked(int, fields["waiting"]),
                gpus,
                _rows(QueueRow, fields["queue"]),
                _rows(LoanRow, fields["loans"]),
                _rows(EventRow, fields["events"]),
                _checked(int, fields["left_out"]),
                _rows(NameRow, fields["names"]),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            raise PageError("the answer is not a page; command and service must be of the same release") from None


_R = TypeVar("_R", bound=tuple[Any, ...])
_T = TypeVar("_T")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "tuple[SlotRow, ...]": tuple,
}


def _checked(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise PageError(f"{value!r} is no {kind.__name__}")
    return value


def _row(kind: type[_R], values: Any) -> _R:
    types = _types(kind)
    if len(values) != len(types) or not all(map(isinstance, values, types)):
        raise PageError(f"a row that is no {kind.__name__}")
    return kind(*values)


@cache
def _types(kind: type[_R]) -> tuple[type | tuple[type, ...], ...]:
    return tuple(_TYPES[str(getattr(name, "__forward_arg__", name))] for name in kind.__annotations__.values())


def _rows(kind: type[_R], rows: Any) -> tuple[_R, ...]:
    return tuple(_row(kind, row) for row in rows)

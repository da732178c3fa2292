"""Define the requests and answers of the submit filter.

Texts are Slurm's bytes decoded with latin-1, one character for each byte: Slurm's limits count bytes, comments need
not be UTF-8, and the Lua shim, which must give the same answers, sees bytes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from slurm_migbatch.submit.decision import SubmitDecision

TRES_FIELDS: Final = ("tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task")
TEXT_FIELDS: Final = ("comment", "extra")
OPTIONS: Final = MappingProxyType(
    {
        "tres_per_node": "--gres",
        "tres_per_job": "--gpus",
        "tres_per_socket": "--gpus-per-socket",
        "tres_per_task": "--gpus-per-task",
    }
)
"""The option that fills each field, for messages."""
TEXTS: Final = MappingProxyType(
    {
        **OPTIONS,
        "partition": "--partition",
        "comment": "--comment",
        "extra": "--extra",
        "cpus_per_tres": "--cpus-per-gpu",
        "mem_per_tres": "--mem-per-gpu",
        "tres_freq": "--gpu-freq",
        "tres_bind": "--tres-bind",
    }
)
"""All text fields to read, with their options, in the order of processing."""


class RequestError(ValueError):
    """An invalid message to the service."""


@dataclass(frozen=True)
class Present:
    """The current job, for an update. None: the job does not have the field."""

    pending: bool = True
    partition: str | None = None
    tres_per_node: str | None = None
    tres_per_job: str | None = None
    tres_per_socket: str | None = None
    tres_per_task: str | None = None
    comment: str | None = None
    extra: str | None = None
    features: str | None = None


@dataclass(frozen=True)
class JobRequest:
    """A submission (`now` is None) or an update of a job. None: not given.

    `uid` is the requesting user. `partition` may be a list separated by commas; the shim fills in the default
    partition. Numbers are Slurm's, None if unset; `shared` is 0 for `--exclusive`. In an update only the fields to be
    changed are given, except the node and task counts, which the shim fills in from the job. `batch` is 1 for the
    submission of a batch job that is not part of a heterogeneous one, `memory_given` if a new job requests memory in
    any way. `req_nodes`, `exc_nodes` and `features` are those of --nodelist, --exclude and --constraint; `uncatalogued`
    is 1 if the job names a reservation without catalog nodes.
    `name`, `account`, `digest` and `engine` (see `submit.script`) are given for batch jobs, to recognise recurring
    ones.
    """

    uid: int
    user: str = ""
    job_id: int | None = None
    partition: str | None = None
    tres_per_node: str | None = None
    tres_per_job: str | None = None
    tres_per_socket: str | None = None
    tres_per_task: str | None = None
    comment: str | None = None
    extra: str | None = None
    cpus_per_tres: str | None = None
    mem_per_tres: str | None = None
    tres_freq: str | None = None
    tres_bind: str | None = None
    req_nodes: str | None = None
    exc_nodes: str | None = None
    features: str | None = None
    uncatalogued: int | None = None
    ntasks_per_tres: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    num_tasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    memory_given: int | None = None
    sockets_per_node: int | None = None
    shared: int | None = None
    batch: int | None = None
    name: str | None = None
    account: str | None = None
    digest: str | None = None
    engine: str | None = None
    now: Present | None = None

    def to_fields(self) -> dict[str, str]:
        """Return the request as the protocol's keys and values."""
        given = {name: str(value) for name, value in vars(self).items() if value is not None and name != "now"}
        if self.now is None:
            return {"kind": "submit", **given}
        now = {f"now_{name}": value for name, value in vars(self.now).items() if value is not None}
        return {"kind": "modify", **given, **now, "now_pending": str(int(self.now.pending))}

    @classmethod
    def from_fields(cls, flat: Mapping[str, str]) -> JobRequest:
        """Read the protocol's keys and values; raises RequestError for unknown keys and bad numbers."""
        remaining = dict(flat)
        kind = remaining.pop("kind", "submit")
        if kind not in ("submit", "modify"):
            raise RequestError(f"kind must be submit or modify, not {ascii(kind)[:40]}")
        now: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for key, text in remaining.items():
            if key in _TEXTS:
                values[key] = text
            elif key in _NUMBERS:
                values[key] = _number(key, text)
            elif key == "now_pending":
                now["pending"] = text == "1"
            elif key.startswith("now_") and key[4:] in _PRESENT:
                now[key[4:]] = text
            else:
                raise RequestError(f"unknown key {ascii(key)[:40]}")
        if "uid" not in values:
            raise RequestError("uid is missing")
        return cls(**values, now=Present(**now) if kind == "modify" else None)


_NUMBERS = frozenset(item.name for item in fields(JobRequest) if str(item.type).startswith("int"))
_TEXTS = frozenset(item.name for item in fields(JobRequest)) - _NUMBERS - {"now"}
_PRESENT = frozenset(item.name for item in fields(Present)) - {"pending"}


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise RequestError(f"{key} must be a number, not {ascii(text)[:40]}")
    return int(text)


@dataclass(frozen=True)
class Pass:
    """The job has no slices, or nothing has to change. `message` may be a note for the user."""

    message: str = ""


@dataclass(frozen=True)
class Accept:
    """The fields to set ("" clears one), the line for the user, the record of the decision, and the advice for the job,
    variables of its environment by name, which only the service gives. `waits`: it is an elastic training job.
    """

    changes: Mapping[str, str]
    message: str
    decision: SubmitDecision | None = field(default=None, compare=False)
    advice: Mapping[str, int] = field(default_factory=dict, compare=False)
    waits: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Refuse:
    """The job is refused with this sentence; `code` names its kind."""

    sentence: str
    code: str


Answer = Pass | Accept | Refuse

"""Validate messages of nodes: JSON from the network becomes values with known types and sizes, or is refused.

Code that uses these values need not check their types. An error that concerns a whole message is a `MessageError`. An
error in one event must not block later ones: it is replaced by an event of kind `refused`, which has the reason and no
effect, so that its number is acknowledged and the node continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.daemon.jsonfields import (
    MAX_NUMBER,
    MAX_REAL,
    MAX_TEXT,
    Field,
    MessageError,
    check_bounds,
    check_fields,
    list_of,
    matched,
    optional,
    parse,
    real,
    rows,
    shown,
    string,
    string_to,
    truth,
    whole,
    whole_to,
)
from slurm_migbatch.mig.geometry import MOST_SLICES, Geometry, GeometryError
from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.planning import is_searchable
from slurm_migbatch.mig.profile import ProfileError
from slurm_migbatch.mig.text import printable
from slurm_migbatch.node import findings
from slurm_migbatch.node.findings import Finding
from slurm_migbatch.workload.gpufacts import LEAST_SHARE, facts_of

MAX_EVENTS = 500
#: shares of the memory in a profile's name that it may have; drivers have 0.88 to 1.0, integrated GPUs name none
LEAST_OF_NAME, MOST_OF_NAME = 0.75, 1.1
#: bytes of a request for a plan, which has three short fields and is parsed in the event loop
MAX_PLAN_BYTES = 4096
MAX_JOB = 2**32 - 1
MAX_GPUS = 64
#: slices of one node, and also runs that hold them; slices of one run on a node
MAX_SLICES, MAX_RUN_SLICES = 1024, 256
#: runs and slices in one message; a node sends up to 512 KiB at once, which holds fewer
MAX_HELD = 5000
#: descriptions of GPUs in one message, and different ones, each of which is costly to check; a node has few models
MAX_DESCRIBED, MAX_GEOMETRIES = 1000, 16
MAX_PROFILES = 128
REFUSED = "refused"
#: kinds of events that report what is in use on the node; if one is refused the node has to send its whole state
HOLDING = frozenset({"boot", "inventory", "state", "start", "stop", "create", "destroy", "zombie", "cleared"})

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F-]{1,64}")
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Event:
    """One event of a node's journal. `fields` are those besides number, time and kind."""

    seq: int
    ts: float
    kind: str
    fields: Mapping[str, Any]

    @property
    def wire(self) -> dict[str, Any]:
        """The event as one JSON object, the stored form."""
        return {**self.fields, "seq": self.seq, "ts": self.ts, "kind": self.kind}


@dataclass(frozen=True)
class EventsMessage:
    """Events of one journal, possibly none, and which database has stored its events up to `acked`."""

    journal: str
    boot_id: str
    events: tuple[Event, ...]
    database: str = ""
    acked: int = 0

    @property
    def refused(self) -> tuple[str, ...]:
        """Errors of events in this message."""
        return tuple(str(event.fields["what"]) for event in self.events if event.kind == REFUSED)


@dataclass(frozen=True)
class PlanMessage:
    """A node that has the plan `have` and waits `wait` seconds for another."""

    have: int
    wait: float


@dataclass(frozen=True)
class FindingsMessage:
    """Problems of a node, and the time of the report by its own clock (unix s)."""

    sent: float
    findings: tuple[Finding, ...]


def is_node(name: str) -> bool:
    """Return whether this is a valid node name."""
    return bool(_NODE.fullmatch(name))


def read_events(node: str, body: bytes) -> EventsMessage:
    """Parse a message of `node` to /node/v1/events. Raises MessageError."""
    message = _message(node, body)
    events = message.get("events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MessageError("events must be a list of objects")
    if len(events) > MAX_EVENTS:
        raise MessageError(f"{len(events)} events in one message, at most {MAX_EVENTS} are accepted")
    described = _Described()
    return EventsMessage(
        journal=matched(message, "journal", _HEX),
        boot_id=matched(message, "boot_id", _HEX),
        events=tuple(_within_limit(_event(event, described) for event in events)),
        database=matched(message, "database", _HEX) if message.get("database") else "",
        acked=whole(message, "acked", 0, MAX_NUMBER) if "acked" in message else 0,
    )


def read_plan(node: str, body: bytes) -> PlanMessage:
    """Parse a message of `node` to /node/v1/plan. Raises MessageError."""
    if len(body) > MAX_PLAN_BYTES:
        raise MessageError(f"the body has {len(body)} bytes, at most {MAX_PLAN_BYTES} are accepted")
    message = _message(node, body)
    have = whole(message, "have", 0, MAX_NUMBER) if "have" in message else 0
    return PlanMessage(have, real(message, "wait", 0, 3600) if "wait" in message else 0.0)


def read_findings(node: str, body: bytes) -> FindingsMessage:
    """Parse a message of `node` to /node/v1/findings; its texts are printable. Raises MessageError."""
    message = _message(node, body)
    parsed = []
    for row in rows(message, "findings", findings.MOST):
        if row.get("level") not in (findings.FAIL, findings.WARN, findings.UNKNOWN):
            raise MessageError(f"level of a finding is {shown(row.get('level'))}")
        texts = (printable(string(row, key, findings.LONGEST)) for key in ("subject", "text", "advice"))
        parsed.append(Finding(str(row["level"]), *texts))
    return FindingsMessage(real(message, "sent", 0, MAX_REAL), tuple(parsed))


def _message(node: str, body: bytes) -> Mapping[str, Any]:
    message = parse(body)
    if not isinstance(message, dict):
        raise MessageError("the body must be an object")
    subject = matched(message, "node", _NODE)
    if subject != node:
        raise MessageError(f"node {node} reports about node {subject}; a node may only report about itself")
    return message


def _pair(row: Mapping[str, Any], key: str) -> None:
    value = row.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise MessageError(f"{key} must be a job and its restart count")
    check_fields({"job": value[0], "restart": value[1]}, _RUN)


def _place(row: Mapping[str, Any]) -> None:
    check_fields(row, _PLACE)
    try:
        Slot.of(row["profile"], row["start"], row["size"])
    except (LayoutError, ProfileError) as error:
        raise MessageError(str(error)) from None


def _gpu(row: Mapping[str, Any]) -> None:
    check_fields(row, _GPU)
    geometry = row.get("geometry")
    if geometry is None:
        if row.get("mig"):
            raise MessageError("a GPU in MIG mode needs a geometry")
        return
    if not isinstance(geometry, dict):
        raise MessageError("geometry must be an object")
    for info in rows(geometry, "profiles", MAX_PROFILES):
        placements = info.get("placements")
        if not isinstance(placements, list) or len(placements) > MOST_SLICES:
            raise MessageError(f"placements must be a list of at most {MOST_SLICES}")
        for pair in placements:
            if not isinstance(pair, list) or len(pair) != 2:
                raise MessageError("a placement is a start and a size")
            check_fields({"start": pair[0], "size": pair[1]}, {"start": _PLACE["start"], "size": _PLACE["size"]})
    _geometry(geometry)


def _geometry(geometry: Mapping[str, Any]) -> None:
    try:
        parsed = Geometry.from_dict(geometry)
        searchable = is_searchable(parsed)
    except (GeometryError, ValueError) as error:
        raise MessageError(str(error)) from None
    if not searchable:
        raise MessageError("the geometry has more layouts than any GPU")
    if all(info.profile.suffix for info in parsed.profiles):
        raise MessageError("the geometry has no profile without a suffix")
    if reason := _implausible(parsed):
        raise MessageError(reason)


def _implausible(geometry: Geometry) -> str:
    """Return why no driver gives such a GPU these sizes, empty if one may: what one node reports decides what profiles
    mean to all jobs of its partitions.
    """
    for info in geometry.profiles:
        stated_mib = 1024 * info.profile.memory_gb
        if stated_mib and not LEAST_OF_NAME * stated_mib <= info.memory_mib <= MOST_OF_NAME * stated_mib:
            return f"{info.profile} of {geometry.name} has {info.memory_mib} MiB"
    facts = facts_of(geometry.name)
    if facts is not None and geometry.full.memory_mib < LEAST_SHARE * facts.mib:
        return f"{geometry.full.profile} is the largest profile of {geometry.name}, which has {facts.mib} MiB"
    return ""


_RUN: Mapping[str, Field] = {"job": whole_to(MAX_JOB, 1), "restart": whole_to(2**31 - 1)}
_PLACE: Mapping[str, Field] = {
    "gpu": string_to(128),
    "profile": string_to(32),
    "start": whole_to(MOST_SLICES - 1),
    "size": whole_to(MOST_SLICES, 1),
    "gi": optional(whole_to(2**31 - 1)),
    "ci": optional(whole_to(2**31 - 1)),
    "mig_uuid": optional(string_to(128)),
    "reason": optional(string_to(MAX_TEXT)),
}
_GPU: Mapping[str, Field] = {
    "uuid": string_to(128),
    "minor": optional(whole_to(2**31 - 1)),
    "index": optional(whole_to(2**31 - 1)),
    "name": optional(string_to(128)),
    "mig": optional(truth),
}
_WHO: Mapping[str, Field] = {
    **_RUN,
    "uid": optional(whole_to(2**32 - 1)),
    "user": optional(string_to(256)),
    "account": optional(string_to(256)),
    "partition": optional(string_to(256)),
    "decision": optional(string_to(64)),
    "slices": list_of(_place, MAX_RUN_SLICES),
    "beside": optional(_pair),
}


def _held_run(row: Mapping[str, Any]) -> None:
    check_fields(row, {**_WHO, "since": lambda row, key: real(row, key, 0, 253402300799)})


#: checks of the fields that are used, by kind of event; all others only have to respect the bounds of `check_bounds`
_KINDS: Mapping[str, Mapping[str, Field]] = {
    "boot": {"boot_id": lambda row, key: matched(row, key, _HEX)},
    "inventory": {"gpus": list_of(_gpu, MAX_GPUS)},
    "state": {
        "gpus": list_of(_gpu, MAX_GPUS),
        "runs": list_of(_held_run, MAX_SLICES),
        "zombies": list_of(_place, MAX_SLICES),
        "idle": list_of(_place, MAX_SLICES),
    },
    "start": {
        **_WHO,
        "warm": optional(truth),
        "elapsed_ms": optional(lambda row, key: real(row, key, 0, 1e9)),
    },
    "stop": {
        **_RUN,
        "slices": list_of(_place, MAX_RUN_SLICES),
        "exit_code": optional(whole_to(255)),
        "memory_mib": optional(lambda row, key: real(row, key, 0, 1 << 24)),
        "shared": optional(truth),
    },
    "misfit": {**_RUN, "reason": optional(string_to(MAX_TEXT)), "grant": optional(string_to(MAX_TEXT))},
    "progress": _RUN,
    "fault": {
        "drain": optional(truth),
        "what": optional(string_to(MAX_TEXT)),
        "action": optional(string_to(MAX_TEXT)),
        "gpu": optional(string_to(128)),
    },
    **{kind: {"": lambda row, key: _place(row)} for kind in ("create", "destroy", "zombie", "cleared")},
}


#: kinds that are known by name
KINDS = frozenset({*_KINDS, REFUSED})


class _Described:
    """Counts the descriptions of GPUs in a message."""

    def __init__(self) -> None:
        self._gpus = 0
        self._geometries: set[str] = set()

    def add(self, gpus: object) -> None:
        """Add the descriptions of one event. Raises MessageError if there are too many."""
        for row in gpus if isinstance(gpus, list) else ():
            self._gpus += 1
            if self._gpus > MAX_DESCRIBED:
                raise MessageError(f"more than {MAX_DESCRIBED} descriptions of GPUs in one message")
            geometry = row.get("geometry") if isinstance(row, dict) else None
            check_bounds(geometry)
            text = json.dumps(geometry, sort_keys=True)
            if text not in self._geometries and len(self._geometries) >= MAX_GEOMETRIES:
                raise MessageError(f"more than {MAX_GEOMETRIES} different geometries in one message")
            self._geometries.add(text)


def _event(row: Mapping[str, Any], described: _Described) -> Event:
    """Parse one event; raises MessageError only if it has neither a number nor a kind."""
    seq, kind = row.get("seq"), row.get("kind")
    if type(seq) is not int or not 0 < seq <= MAX_NUMBER or not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise MessageError("each event needs seq (from 1) and kind")
    fields = {key: value for key, value in row.items() if key not in ("seq", "ts", "kind")}
    ts = 0.0
    try:
        ts = real(row, "ts", 1e-3, 253402300799)
        if kind in ("inventory", "state"):
            described.add(fields.get("gpus"))
        check_fields(fields, _KINDS.get(kind, {}))
        check_bounds(fields)
    except MessageError as error:
        return _refusal(seq, ts, kind, str(error))
    return Event(seq, ts, kind, fields)


def _refusal(seq: int, ts: float, kind: str, why: str) -> Event:
    """Return the event that takes the place of one that is refused."""
    return Event(seq, ts, REFUSED, {"was": kind, "what": f"event {seq} ({kind}): {why}"[:500]})


def _within_limit(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events; an event by which their runs and slices exceed `MAX_HELD` in total is refused."""
    remaining = MAX_HELD
    for event in events:
        runs = (
            event.fields["runs"] if event.kind == "state" else [event.fields] if event.kind in ("start", "stop") else []
        )
        remaining -= sum(1 + len(run["slices"]) for run in runs)
        if runs and remaining < 0:
            why = f"more than {MAX_HELD} runs and slices in one message"
            yield _refusal(event.seq, event.ts, event.kind, why)
        else:
            yield event


def holding(events: Iterable[Event]) -> bool:
    """Return whether an event was refused that may have reported what is in use on the node."""
    return any(event.kind == REFUSED and event.fields.get("was") in HOLDING for event in events)

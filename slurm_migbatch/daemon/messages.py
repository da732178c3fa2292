"""Validate messages of nodes: JSON from the network becomes values with known types and sizes, or is refused.

Code that uses these values need not check their types. An error that concerns a whole message is a `MessageError`. An
error in one event must not block later ones: it is replaced by an event of kind `refused`, which has the reason and no
effect, so that its number is acknowledged and the node continues.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

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
#: integers that all JSON readers represent exactly
MAX_NUMBER = 2**53 - 1
#: maximum of numbers with a fraction; jobs may report up to 1e21 items a second
MAX_REAL = 1e30
MAX_JOB = 2**32 - 1
MAX_DEPTH = 12
MAX_ITEMS = 200_000
MAX_TEXT = 4096
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


class MessageError(ValueError):
    """An invalid message or event; the text says why."""


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
        journal=_matched(message, "journal", _HEX),
        boot_id=_matched(message, "boot_id", _HEX),
        events=tuple(_within(_event(event, described) for event in events)),
        database=_matched(message, "database", _HEX) if message.get("database") else "",
        acked=_whole(message, "acked", 0, MAX_NUMBER) if "acked" in message else 0,
    )


def read_plan(node: str, body: bytes) -> PlanMessage:
    """Parse a message of `node` to /node/v1/plan. Raises MessageError."""
    if len(body) > MAX_PLAN_BYTES:
        raise MessageError(f"the body has {len(body)} bytes, at most {MAX_PLAN_BYTES} are accepted")
    message = _message(node, body)
    have = _whole(message, "have", 0, MAX_NUMBER) if "have" in message else 0
    return PlanMessage(have, _real(message, "wait", 0, 3600) if "wait" in message else 0.0)


def read_findings(node: str, body: bytes) -> FindingsMessage:
    """Parse a message of `node` to /node/v1/findings; its texts are printable. Raises MessageError."""
    message = _message(node, body)
    parsed = []
    for row in _rows(message, "findings", findings.MOST):
        if row.get("level") not in (findings.FAIL, findings.WARN, findings.UNKNOWN):
            raise MessageError(f"level of a finding is {_shown(row.get('level'))}")
        texts = (printable(_text(row, key, findings.LONGEST)) for key in ("subject", "text", "advice"))
        parsed.append(Finding(str(row["level"]), *texts))
    return FindingsMessage(_real(message, "sent", 0, MAX_REAL), tuple(parsed))


# -- JSON --------------------------------------------------------------------------------------------------------


def parse(body: bytes) -> Any:
    """Parse `body` as JSON in UTF-8, strictly: no NaN, no duplicate key, bounded numbers. Raises MessageError."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
            object_pairs_hook=_object,
        )
    except MessageError:
        raise
    except (ValueError, RecursionError):
        raise MessageError("the body is not JSON") from None
    return value


def _no_constant(text: str) -> NoReturn:
    raise MessageError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > 20:
        raise MessageError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MessageError(f"{text[:40]} is too large a number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "a key"
        raise MessageError(f"{twice[:40]!r} appears twice in one object")
    return fields


def _message(node: str, body: bytes) -> Mapping[str, Any]:
    message = parse(body)
    if not isinstance(message, dict):
        raise MessageError("the body must be an object")
    subject = _matched(message, "node", _NODE)
    if subject != node:
        raise MessageError(f"node {node} reports about node {subject}; a node may only report about itself")
    return message


# -- fields ------------------------------------------------------------------------------------------------------


def _matched(message: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise MessageError(f"{key} is missing or malformed")
    return value


def _whole(row: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = row.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{key} must be a whole number from {low} to {high}, not {_shown(value)}")
    return value


def _real(row: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise MessageError(f"{key} must be a number from {low:g} to {high:g}, not {_shown(value)}")
    return float(value)


def _text(row: Mapping[str, Any], key: str, length: int) -> str:
    value = row.get(key)
    if not isinstance(value, str) or len(value) > length:
        raise MessageError(f"{key} must be a string of at most {length} characters, not {_shown(value)}")
    return value


def _truth(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key)
    if type(value) is not bool:
        raise MessageError(f"{key} must be true or false, not {_shown(value)}")
    return value


def _rows(row: Mapping[str, Any], key: str, most: int) -> Sequence[Mapping[str, Any]]:
    value = row.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MessageError(f"{key} must be a list of objects, not {_shown(value)}")
    if len(value) > most:
        raise MessageError(f"{key} has {len(value)} entries, at most {most} are accepted")
    return value


def _shown(value: object) -> str:
    return ascii(value)[:60] if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"


#: error of `key` of a row, if any; raised as MessageError
_Field = Callable[[Mapping[str, Any], str], object]


def _optional(check: _Field) -> _Field:
    return lambda row, key: None if row.get(key) is None else check(row, key)


def _whole_to(high: int, low: int = 0) -> _Field:
    return lambda row, key: _whole(row, key, low, high)


def _text_to(length: int) -> _Field:
    return lambda row, key: _text(row, key, length)


def _list_of(check: Callable[[Mapping[str, Any]], object], most: int) -> _Field:
    def checked(row: Mapping[str, Any], key: str) -> None:
        for number, item in enumerate(_rows(row, key, most)):
            try:
                check(item)
            except MessageError as error:
                raise MessageError(f"{key}[{number}]: {error}") from None

    return checked


def _checked(row: Mapping[str, Any], fields: Mapping[str, _Field]) -> None:
    for key, check in fields.items():
        check(row, key)


def _pair(row: Mapping[str, Any], key: str) -> None:
    value = row.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise MessageError(f"{key} must be a job and its restart count")
    _checked({"job": value[0], "restart": value[1]}, _RUN)


def _place(row: Mapping[str, Any]) -> None:
    _checked(row, _PLACE)
    try:
        Slot.of(row["profile"], row["start"], row["size"])
    except (LayoutError, ProfileError) as error:
        raise MessageError(str(error)) from None


def _gpu(row: Mapping[str, Any]) -> None:
    _checked(row, _GPU)
    geometry = row.get("geometry")
    if geometry is None:
        if row.get("mig"):
            raise MessageError("a GPU in MIG mode needs a geometry")
        return
    if not isinstance(geometry, dict):
        raise MessageError("geometry must be an object")
    for info in _rows(geometry, "profiles", MAX_PROFILES):
        placements = info.get("placements")
        if not isinstance(placements, list) or len(placements) > MOST_SLICES:
            raise MessageError(f"placements must be a list of at most {MOST_SLICES}")
        for pair in placements:
            if not isinstance(pair, list) or len(pair) != 2:
                raise MessageError("a placement is a start and a size")
            _checked({"start": pair[0], "size": pair[1]}, {"start": _PLACE["start"], "size": _PLACE["size"]})
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


_RUN: Mapping[str, _Field] = {"job": _whole_to(MAX_JOB, 1), "restart": _whole_to(2**31 - 1)}
_PLACE: Mapping[str, _Field] = {
    "gpu": _text_to(128),
    "profile": _text_to(32),
    "start": _whole_to(MOST_SLICES - 1),
    "size": _whole_to(MOST_SLICES, 1),
    "gi": _optional(_whole_to(2**31 - 1)),
    "ci": _optional(_whole_to(2**31 - 1)),
    "mig_uuid": _optional(_text_to(128)),
    "reason": _optional(_text_to(MAX_TEXT)),
}
_GPU: Mapping[str, _Field] = {
    "uuid": _text_to(128),
    "minor": _optional(_whole_to(2**31 - 1)),
    "index": _optional(_whole_to(2**31 - 1)),
    "name": _optional(_text_to(128)),
    "mig": _optional(_truth),
}
_WHO: Mapping[str, _Field] = {
    **_RUN,
    "uid": _optional(_whole_to(2**32 - 1)),
    "user": _optional(_text_to(256)),
    "account": _optional(_text_to(256)),
    "partition": _optional(_text_to(256)),
    "decision": _optional(_text_to(64)),
    "slices": _list_of(_place, MAX_RUN_SLICES),
    "beside": _optional(_pair),
}


def _held_run(row: Mapping[str, Any]) -> None:
    _checked(row, {**_WHO, "since": lambda row, key: _real(row, key, 0, 253402300799)})


#: checks of the fields that are used, by kind of event; all others only have to respect the bounds of `_bounded`
_KINDS: Mapping[str, Mapping[str, _Field]] = {
    "boot": {"boot_id": lambda row, key: _matched(row, key, _HEX)},
    "inventory": {"gpus": _list_of(_gpu, MAX_GPUS)},
    "state": {
        "gpus": _list_of(_gpu, MAX_GPUS),
        "runs": _list_of(_held_run, MAX_SLICES),
        "zombies": _list_of(_place, MAX_SLICES),
        "idle": _list_of(_place, MAX_SLICES),
    },
    "start": {
        **_WHO,
        "warm": _optional(_truth),
        "elapsed_ms": _optional(lambda row, key: _real(row, key, 0, 1e9)),
    },
    "stop": {
        **_RUN,
        "slices": _list_of(_place, MAX_RUN_SLICES),
        "exit_code": _optional(_whole_to(255)),
        "memory_mib": _optional(lambda row, key: _real(row, key, 0, 1 << 24)),
        "shared": _optional(_truth),
    },
    "misfit": {**_RUN, "reason": _optional(_text_to(MAX_TEXT)), "grant": _optional(_text_to(MAX_TEXT))},
    "progress": _RUN,
    "fault": {
        "drain": _optional(_truth),
        "what": _optional(_text_to(MAX_TEXT)),
        "action": _optional(_text_to(MAX_TEXT)),
        "gpu": _optional(_text_to(128)),
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
            _bounded(geometry)
            text = json.dumps(geometry, sort_keys=True)
            if text not in self._geometries and len(self._geometries) >= MAX_GEOMETRIES:
                raise MessageError(f"more than {MAX_GEOMETRIES} different geometries in one message")
            self._geometries.add(text)


def _event(row: Mapping[str, Any], described: _Described) -> Event:
    """Parse one event; raises MessageError only if it has neither a number nor a kind."""
    if type(row.get("seq")) is not int or not 0 < row["seq"] <= MAX_NUMBER:
        raise MessageError("each event needs seq (from 1) and kind")
    kind = row.get("kind")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise MessageError("each event needs seq (from 1) and kind")
    fields = {key: value for key, value in row.items() if key not in ("seq", "ts", "kind")}
    try:
        ts = _real(row, "ts", 1e-3, 253402300799)
    except MessageError as error:
        return Event(row["seq"], 0.0, REFUSED, {"was": kind, "what": f"event {row['seq']} ({kind}): {error}"[:500]})
    try:
        if kind in ("inventory", "state"):
            described.add(fields.get("gpus"))
        _checked(fields, _KINDS.get(kind, {}))
        _bounded(fields)
    except MessageError as error:
        return Event(row["seq"], ts, REFUSED, {"was": kind, "what": f"event {row['seq']} ({kind}): {error}"[:500]})
    return Event(row["seq"], ts, kind, fields)


def _within(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events; an event by which their runs and slices exceed `MAX_HELD` in total is refused."""
    remaining = MAX_HELD
    for event in events:
        runs = (
            event.fields["runs"] if event.kind == "state" else [event.fields] if event.kind in ("start", "stop") else []
        )
        remaining -= sum(1 + len(run["slices"]) for run in runs)
        if runs and remaining < 0:
            refusal = f"event {event.seq} ({event.kind}): more than {MAX_HELD} runs and slices in one message"
            yield Event(event.seq, event.ts, REFUSED, {"was": event.kind, "what": refusal})
        else:
            yield event


def _bounded(value: Any) -> None:
    """Check the bounds of any event: depth, number of items, sizes of texts and numbers."""
    remaining, level = MAX_ITEMS, [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                if len(item) > MAX_TEXT:
                    raise MessageError(f"a text of {len(item)} characters, at most {MAX_TEXT} are accepted")
            elif (type(item) is int and abs(item) > MAX_NUMBER) or (type(item) is float and abs(item) > MAX_REAL):
                raise MessageError(f"{_shown(item)} is too large a number")
        remaining -= len(below)
        if remaining < 0:
            raise MessageError(f"more than {MAX_ITEMS} values")
        level = below
        if not level:
            return
    raise MessageError(f"nested deeper than {MAX_DEPTH}")


def holding(events: Iterable[Event]) -> bool:
    """Return whether an event was refused that may have reported what is in use on the node."""
    return any(event.kind == REFUSED and event.fields.get("was") in HOLDING for event in events)

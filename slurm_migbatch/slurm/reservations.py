"""Parse Slurm's reservations: which nodes they hold, for whom, and which jobs are in them; which nodes they will hold.

They are read by one more command each for nodes and for jobs while a node is reserved, else once in `EVERY_S`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.times import TimeFormError, parse_duration, parse_time

RESERVED: Final = "RESERVED"
"""Node flag (scontrol's spelling) of a node that an active reservation holds."""
COMMAND: Final = ("scontrol", "--oneliner", "show", "reservation")
EVERY_S: Final = 60.0
"""Seconds between two queries of coming reservations."""
_STEPS: Final = 64
"""A time until a reservation is rounded up to steps of at most this part of it."""
#: flag of a reservation that accepts jobs which do not request it
_MAGNETIC: Final = "MAGNETIC"
_CPUS: Final = re.compile(r"(?:^|,)cpu=(\d{1,9})(?:,|$)")


@dataclass(frozen=True)
class NodeReservation:
    """An active or coming reservation of nodes. `cpus` is how many it holds; None if Slurm does not say.

    `start`: when a coming one begins (unix seconds); 0 for an active one.
    """

    name: str
    nodes: frozenset[str]
    flags: frozenset[str] = frozenset()
    cpus: int | None = None
    start: float = 0.0


def parse(output: str, unread: Callable[[str, str], object], now: float = math.inf) -> list[NodeReservation]:
    """Return the active reservations from the output of `COMMAND`, and those that begin after `now` (unix seconds).

    Those whose nodes cannot be read are left out; `unread` is called for each.
    """
    parsed = []
    for line in output.splitlines():
        values = fields_of(line)
        name, active = values.get("ReservationName"), values.get("State") == "ACTIVE"
        start = 0.0 if active else _start(values.get("StartTime", ""))
        if not name or not (active or start > now):
            continue
        try:
            nodes = frozenset(expand(values.get("Nodes", "").replace("(null)", "")))
        except NodeListError as error:
            unread(name, str(error))
            continue
        if nodes:
            cpus = _CPUS.search(values.get("TRES", ""))
            flags = frozenset(values.get("Flags", "").split(","))
            parsed.append(NodeReservation(name, nodes, flags, int(cpus[1]) if cpus else None, start))
    return parsed


def _start(text: str) -> float:
    """Return a time in unix seconds, in which form `CliClient` asks for it; 0 for an unreadable one."""
    if text.isascii() and text.isdigit() and len(text) <= 11:
        return float(text)
    try:
        return parse_time(text)
    except TimeFormError:
        return 0.0


def of_nodes(rows: Sequence[NodeRow], reservations: Iterable[NodeReservation], now: float) -> list[NodeRow]:
    """Return the rows with the reservations that hold each node, whether it is closed to all other jobs, and when it
    will be. `now`: unix seconds.
    """
    cpus = {row.name: row.cpus for row in rows}
    names: dict[str, set[str]] = {}
    closed: set[str] = set()
    free_for: dict[str, float] = {}
    for reservation in reservations:
        all_cpus = reservation.cpus is None or reservation.cpus >= sum(cpus.get(name, 0) for name in reservation.nodes)
        exclusive = all_cpus and _MAGNETIC not in reservation.flags
        if reservation.start > now:
            ahead = reservation.start - now
            free_for |= {name: min(ahead, free_for.get(name, ahead)) for name in reservation.nodes if exclusive}
            continue
        if exclusive:
            closed |= reservation.nodes
        for name in reservation.nodes:
            names.setdefault(name, set()).add(reservation.name)
    return [
        replace(
            row,
            reservations=frozenset(names.get(row.name, ())),
            set_aside=row.name in closed,
            free_for_s=_rounded_up(free_for[row.name]) if row.name in free_for else 0,
        )
        if row.name in names or row.name in free_for
        else row
        for row in rows
    ]


def _rounded_up(seconds: float) -> int:
    """Round up to whole steps of a minute, or of more for long times, so that rows stay equal from poll to poll."""
    step = 60
    while step * 2 * _STEPS <= seconds:
        step *= 2
    return math.ceil(seconds / step) * step


def of_jobs(rows: Sequence[JobRow], named: Mapping[int, str]) -> list[JobRow]:
    """Return the rows with each job's requested reservation, by job id."""
    return [replace(row, reservation=named[row.job_id]) if named.get(row.job_id) else row for row in rows]


def with_least_times(rows: Sequence[JobRow], shown: Mapping[int, str]) -> list[JobRow]:
    """Return the rows with each pending job's --time-min, by job id as squeue shows it; it may print zero for none."""
    return [
        replace(row, time_min_s=seconds) if row.pending and (seconds := _duration(shown.get(row.job_id))) else row
        for row in rows
    ]


def _duration(text: str | None) -> int:
    try:
        return int(parse_duration(text or "0") or 0)
    except TimeFormError:
        return 0

"""Parse Slurm's active reservations: which nodes they hold, for whom, and which jobs are in them.

They are read only while a node is reserved, by one more command each for nodes and for jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.nodelist import NodeListError, expand

RESERVED: Final = "RESERVED"
"""Node flag (scontrol's spelling) of a node that an active reservation holds."""
COMMAND: Final = ("scontrol", "--oneliner", "show", "reservation")
#: flag of a reservation that accepts jobs which do not request it
_MAGNETIC: Final = "MAGNETIC"
_CPUS: Final = re.compile(r"(?:^|,)cpu=(\d{1,9})(?:,|$)")


@dataclass(frozen=True)
class NodeReservation:
    """An active reservation of nodes. `cpus` is how many it holds; None if Slurm does not say."""

    name: str
    nodes: frozenset[str]
    flags: frozenset[str] = frozenset()
    cpus: int | None = None


def parse(output: str, unread: Callable[[str, str], object]) -> list[NodeReservation]:
    """Return the active reservations from the output of `COMMAND`.

    Those whose nodes cannot be read are left out; `unread` is called for each.
    """
    parsed = []
    for line in output.splitlines():
        values = fields_of(line)
        name = values.get("ReservationName")
        if not name or values.get("State") != "ACTIVE":
            continue
        try:
            nodes = frozenset(expand(values.get("Nodes", "").replace("(null)", "")))
        except NodeListError as error:
            unread(name, str(error))
            continue
        if nodes:
            cpus = _CPUS.search(values.get("TRES", ""))
            flags = frozenset(values.get("Flags", "").split(","))
            parsed.append(NodeReservation(name, nodes, flags, int(cpus[1]) if cpus else None))
    return parsed


def of_nodes(rows: Sequence[NodeRow], reservations: Iterable[NodeReservation]) -> list[NodeRow]:
    """Return the rows with the reservations that hold each node, and whether it is closed to all other jobs."""
    cpus = {row.name: row.cpus for row in rows}
    names: dict[str, set[str]] = {}
    closed: set[str] = set()
    for reservation in reservations:
        all_cpus = reservation.cpus is None or reservation.cpus >= sum(cpus.get(name, 0) for name in reservation.nodes)
        if all_cpus and _MAGNETIC not in reservation.flags:
            closed |= reservation.nodes
        for name in reservation.nodes:
            names.setdefault(name, set()).add(reservation.name)
    return [
        replace(row, reservations=frozenset(names.get(row.name, ())), set_aside=row.name in closed)
        if row.name in names
        else row
        for row in rows
    ]


def of_jobs(rows: Sequence[JobRow], named: Mapping[int, str]) -> list[JobRow]:
    """Return the rows with each job's requested reservation, by job id."""
    return [replace(row, reservation=named[row.job_id]) if named.get(row.job_id) else row for row in rows]

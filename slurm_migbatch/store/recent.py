"""The newest events of nodes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from heapq import nlargest
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from slurm_migbatch.store.lifecycle import CLOCKS_DIFFER_S
from slurm_migbatch.store.models import NodeEvent

#: only the newest creates and destroys matter: they only express a preference for idle instances
_NEWEST = 20_000


class RecentEvent(NamedTuple):
    """One event as its node sent it; `ts` in unix seconds by the node's clock."""

    ts: float
    id: int
    node: str
    kind: str
    payload: Mapping[str, Any]


def recent_events(connection: Connection, kinds: Collection[str], limit: int) -> list[RecentEvent]:
    """Return the newest events of these kinds, oldest first.

    Each kind is queried separately: the index on kind and time answers that whatever else nodes send. Those of a time
    to come are left out: a node whose clock is ahead would have the newest events for as long.
    """
    latest = time.time() + CLOCKS_DIFFER_S
    found: list[RecentEvent] = []
    for kind in kinds:
        statement = (
            select(NodeEvent.ts, NodeEvent.id, NodeEvent.node, NodeEvent.kind, NodeEvent.payload)
            .where(NodeEvent.kind == kind, NodeEvent.ts <= latest)
            .order_by(NodeEvent.ts.desc())
            .limit(limit)
        )
        for ts, id, node, of, payload in connection.execute(statement):
            found.append(RecentEvent(ts, id, node, of, payload if isinstance(payload, dict) else {}))
    return nlargest(limit, found, key=lambda event: event[:2])[::-1]


def instance_events(connection: Connection, *, changes: bool) -> dict[str, list[dict[str, Any]]]:
    """Return events about instances by node, in order, since the node last booted or sent its whole state.

    Of a `state` only instances; `Store.leases` has their holders. Without `changes` only zombies and faults.
    """
    booted = (
        select(NodeEvent.node, func.max(NodeEvent.id).label("id"))
        .where(NodeEvent.kind.in_(("boot", "state")))
        .group_by(NodeEvent.node)
        .subquery()
    )
    since = (
        select(NodeEvent.id, NodeEvent.node, NodeEvent.kind, NodeEvent.payload)
        .outerjoin(booted, booted.c.node == NodeEvent.node)
        .where(NodeEvent.id >= func.coalesce(booted.c.id, 0))
        .order_by(NodeEvent.id.desc())
    )
    troubles = since.where(NodeEvent.kind.in_(("state", "zombie", "cleared", "fault")))
    made = since.where(NodeEvent.kind.in_(("create", "destroy"))).limit(_NEWEST)
    rows = [*connection.execute(troubles), *(connection.execute(made) if changes else ())]
    found: dict[str, list[dict[str, Any]]] = {}
    for _, node, kind, payload in sorted(rows, key=lambda row: row.id):
        if isinstance(payload, dict):
            facts = {key: value for key, value in payload.items() if key not in ("gpus", "runs")}
            found.setdefault(node, []).append({**facts, "kind": kind})
    return found

"""The newest events of nodes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from heapq import nlargest
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from slurm_migbatch.store.lifecycle import CLOCKS_DIFFER_S
from slurm_migbatch.store.models import NodeEvent

#: number of newest `create` and `destroy` events that are read: they only express a preference for idle instances
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

    Each kind is queried separately, so that the index on kind and time serves the query whatever else nodes send.
    Events with a time in the future are left out: those of a node whose clock is ahead would be the newest until then.
    """
    latest = time.time() + CLOCKS_DIFFER_S
    events: list[RecentEvent] = []
    for kind in kinds:
        statement = (
            select(NodeEvent.ts, NodeEvent.id, NodeEvent.node, NodeEvent.kind, NodeEvent.payload)
            .where(NodeEvent.kind == kind, NodeEvent.ts <= latest)
            .order_by(NodeEvent.ts.desc())
            .limit(limit)
        )
        for ts, id, node, event_kind, payload in connection.execute(statement):
            events.append(RecentEvent(ts, id, node, event_kind, payload if isinstance(payload, dict) else {}))
    return nlargest(limit, events, key=lambda event: event[:2])[::-1]


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
    instance_changes = since.where(NodeEvent.kind.in_(("create", "destroy"))).limit(_NEWEST)
    rows = [*connection.execute(troubles), *(connection.execute(instance_changes) if changes else ())]
    by_node: dict[str, list[dict[str, Any]]] = {}
    for _, node, kind, payload in sorted(rows, key=lambda row: row.id):
        if isinstance(payload, dict):
            facts = {key: value for key, value in payload.items() if key not in ("gpus", "runs")}
            by_node.setdefault(node, []).append({**facts, "kind": kind})
    return by_node

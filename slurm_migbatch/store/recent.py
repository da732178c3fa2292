"""The newest events of nodes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from heapq import nlargest
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from slurm_migbatch.store.lifecycle import CLOCKS_DIFFER_S
from slurm_migbatch.store.models import NodeEvent


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

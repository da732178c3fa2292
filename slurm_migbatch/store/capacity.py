"""Number of MIG GPUs in a time window, from the nodes' own descriptions of their GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, func, or_, select

from slurm_migbatch.store.models import NodeEvent, NodeJournal, StoredGpu, StoredNode
from slurm_migbatch.store.queries import among

#: events that describe all GPUs of a node
_DESCRIBING = ("inventory", "state")


def gpu_seconds(
    connection: Connection, start: float, end: float, nodes: Collection[str] = ()
) -> dict[str, float] | None:
    """Return by node the total seconds of its MIG GPUs between two times.

    A node counts from its first description to its last message. Downtime in between is not subtracted, because the
    GPUs were present.

    Args:
        start, end: unix seconds, not later than now.
        nodes: only these; () for all.

    Returns:
        None if the descriptions of a node that were valid at `start` were removed because of their age.
    """
    counts_by_node = _descriptions(connection, start, end, nodes)
    pruned = set(connection.scalars(select(NodeJournal.node).where(NodeJournal.forgotten.is_not(None))))
    seconds: dict[str, float] = {}
    for node, seen in connection.execute(select(StoredNode.node, StoredNode.seen)):
        if nodes and node not in nodes:
            continue
        counts = sorted(counts_by_node.get(node, {}).items())
        if not counts:
            continue
        if counts[0][0] > start and node in pruned:
            return None
        last = min(end, max(seen, counts[-1][0]))
        seconds[node] = _counted(counts, start, last)
    return seconds


def _descriptions(
    connection: Connection, start: float, end: float, nodes: Collection[str]
) -> dict[str, dict[float, int]]:
    """Return by node the number of its MIG GPUs at each time (unix seconds) at which it described them: between two
    times, and the last time before.
    """
    by_node: dict[str, dict[float, int]] = {}
    present = select(StoredGpu.node, StoredGpu.seen).where(StoredGpu.present, StoredGpu.mig, StoredGpu.seen <= end)
    for node, moment in connection.execute(present):
        by_time = by_node.setdefault(node, {})
        by_time[moment] = by_time.get(moment, 0) + 1
    # descriptions are long, and there may be thousands before the window
    describing = NodeEvent.kind.in_(_DESCRIBING)
    before = select(NodeEvent.node, func.max(NodeEvent.ts).label("ts")).where(describing, NodeEvent.ts <= start)
    last = before.group_by(NodeEvent.node).subquery()
    events = (
        select(NodeEvent.node, NodeEvent.ts, NodeEvent.payload)
        .outerjoin(last, last.c.node == NodeEvent.node)
        .where(describing, NodeEvent.ts <= end, or_(NodeEvent.ts > start, NodeEvent.ts == last.c.ts))
    )
    if nodes:
        events = events.where(among(NodeEvent.node, nodes))
    for node, moment, payload in connection.execute(events):
        count = _mig_gpus(payload)
        if count is not None:
            by_node.setdefault(node, {})[moment] = count
    return by_node


def _mig_gpus(payload: Any) -> int | None:
    gpus = payload.get("gpus") if isinstance(payload, Mapping) else None
    if not isinstance(gpus, list):
        return None
    return sum(isinstance(gpu, Mapping) and gpu.get("mig") is True for gpu in gpus)


def _counted(counts: list[tuple[float, int]], start: float, end: float) -> float:
    seconds = 0.0
    for number, (since, count) in enumerate(counts):
        until = counts[number + 1][0] if number + 1 < len(counts) else end
        seconds += count * max(0.0, min(until, end) - max(since, start))
    return seconds

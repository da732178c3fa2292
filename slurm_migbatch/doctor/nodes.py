"""Check slurmctld's view of nodes and the catalog against the nodes' reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.audit import orphans
from slurm_migbatch.daemon.nodesview import geometry_of
from slurm_migbatch.doctor.drained import check_drained
from slurm_migbatch.doctor.reports import AGAIN
from slurm_migbatch.install.catalogline import gres_entries
from slurm_migbatch.install.reported import base_counts, most_counts
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.grant import MARKER_OPEN
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.query.nodes import OccupiedSlot
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.gres import SEPARATE_PARTITIONS, confused_types, readable, type_number
from slurm_migbatch.slurm.nodelist import expand, expand_valid, fold
from slurm_migbatch.store.queries import LeaseRow
from slurm_migbatch.workload.catalog import NODE_FEATURE
from slurm_migbatch.workload.loans import LOAN

#: minimum age of a run's slices before it is compared with Slurm's queue, in seconds
PATIENCE_S = 60.0
#: seconds without a message from a node's agent, which sends one every 20 s
SILENCE_S = 60.0
INSTALL = "migbatch install --role controller --apply --edit"
ANOTHER_NAME = (
    "if a node is called otherwise there (NodeHostname=) and `scontrol show aliases` on it does not show its name, "
    "append `--node NAME` to both commands of its migbatch-node.service (systemctl edit)"
)


def mig_nodes(rows: Sequence[NodeRow], config: Config) -> frozenset[str]:
    """Return the names of the nodes with slices, except the catalog's."""
    catalog = expand(config.cluster.catalog_nodes)
    return frozenset(row.name for row in rows if any(kind != "none" for kind in row.gres) and row.name not in catalog)


def check_nodes(
    rows: Sequence[NodeRow],
    inventory: Mapping[str, object] | None,
    seen: Mapping[str, float],
    now: float,
    config: Config,
    causes: Mapping[str, str] = MappingProxyType({}),
    received_s: float = math.inf,
) -> Iterator[Finding]:
    """Check that the nodes, as Slurm shows them, are registered, valid and report to migbatchd.

    Args:
        inventory: GPUs by node; None if unknown.
        seen: time of each node's last report (unix s).
        causes: by node, the message of its last failed hook.
        received_s: for how many seconds migbatchd has received reports.
    """
    catalog = expand(config.cluster.catalog_nodes)
    names = mig_nodes(rows, config)
    mig = [row for row in rows if row.name in names]
    if not mig:
        yield Finding(FAIL, "MIG nodes", "no node has mig in its Gres", INSTALL)
    for row in mig:
        if row.invalid:
            text = f"slurmctld refuses its registration: {row.reason or 'gres counts differ'}"
            advice = (
                "gres.conf, slurm.conf and live counts must have the same sum; restart slurmd after correcting them"
            )
            yield Finding(FAIL, row.name, text, advice)
        elif not row.open:
            state = "+".join(sorted(row.states))
            for finding in check_drained(row.name, state, row.reason, causes.get(row.name, "")):
                yield finding._replace(subject=row.name)
        if inventory is not None:
            yield _report(row, inventory, now - seen.get(row.name, 0.0), received_s)
    yield from _foreign({row.name for row in rows}, seen, now)
    for name in catalog:
        yield from _catalog(rows, mig, name)
    yield from _names(rows, mig, catalog)
    yield from _check_similar_types(mig)


def _report(row: NodeRow, inventory: Mapping[str, object], silent_s: float, received_s: float) -> Finding:
    """Return whether the node's agent reports; `silent_s`: seconds since its last message."""
    if row.silenced:
        return Finding(OK, row.name, "is down in Slurm, so its agent need not report")
    if received_s <= SILENCE_S and (row.name not in inventory or silent_s > SILENCE_S):
        return Finding(UNKNOWN, row.name, "its agent has not reported yet", AGAIN)
    if row.name not in inventory:
        advice = "start `migbatch node agent` there (systemctl status migbatch-node) and check its log"
        return Finding(FAIL, row.name, "has reported no GPUs", advice)
    if silent_s > SILENCE_S:
        text = f"no message from its agent for {silent_s:.0f} s"
        return Finding(FAIL, row.name, text, f"on {row.name}: systemctl status migbatch-node, and migbatch doctor")
    return Finding(OK, row.name, f"{sum(row.gres.values())} counts, {len(row.used)} types in use")


def check_counts(
    rows: Sequence[NodeRow], conf: Conf, inventory: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Check that slurm.conf (`conf`) counts slices for the GPUs that nodes report: no others are ever offered."""
    counted = {
        name: {entry.type: entry.count for _, entry in gres_entries(values) if entry.name == "mig"}
        for _, values in conf.records("nodename")
        for name in expand_valid(values["nodename"])
    }
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        geometries = [geometry for gpu in inventory.get(row.name, ()) if (geometry := geometry_of(gpu)) is not None]
        counts = counted.get(row.name)
        if row.name in inventory and (geometries or counts) and (problem := _miscounted(row, counts, geometries)):
            found.setdefault(problem, []).append(row.name)
    for (text, advice), names in found.items():
        yield Finding(FAIL, "slices in slurm.conf", text.format(fold(names)), advice)
    if not found:
        yield Finding(OK, "slices in slurm.conf", "as many as the reported GPUs have room for")


def _miscounted(
    row: NodeRow, counts: Mapping[str | None, int] | None, geometries: Sequence[Geometry]
) -> tuple[str, str] | None:
    """Return what is wrong with a node's counts in slurm.conf, with a place for its name, and the advice.

    `counts`: None if slurm.conf has no line for the node.
    """
    restart = "restart slurmctld, and slurmd there"
    room = sum(base_counts(geometries).values())
    if counts is None and row.dynamic:
        total = _slices(row.gres)
        text = f"dynamic node {{}} reports GPUs for {room} slices, but registered with {total or 'none'}"
        return (text, f"{INSTALL} prints the options that slurmd needs there") if total != room else None
    if counts is None:
        return "slurm.conf has no line for {}, which slurmctld has and which reports GPUs in MIG mode", (
            "add it, or restart slurmctld if the node was removed"
        )
    if not counts:
        return "{} reports GPUs in MIG mode, but has no mig in slurm.conf: no job gets slices there", (
            f"{INSTALL}, then {restart}"
        )
    if not row.gres:
        return "slurmctld counts no slices of {}, whose line in slurm.conf has mig", restart
    if {kind for kind in counts if kind not in ("none", LOAN)} != most_counts(geometries).keys() and geometries:
        return "{} reports GPUs with other profiles than its line in slurm.conf has", f"{INSTALL}, then {restart}"
    total = _slices(counts)
    if total == room:
        return None
    text = f"{{}} reports GPUs for {room} slices, but its line in slurm.conf counts {total}"
    if total < room:
        return f"{text}: the rest is never offered", f"{INSTALL}, then {restart}"
    advice = "nvidia-smi -L and migbatch doctor there show whether a GPU is missing or has MIG switched off"
    return f"{text}: a GPU is missing", f"{advice}; if it was removed for good: {INSTALL}, then {restart}"


def _slices(counts: Mapping[Any, int]) -> int:
    """Return the sum of a node's counts, which stays the same when migbatchd changes their types."""
    return sum(count for kind, count in counts.items() if kind != LOAN)


def check_orphans(held: Sequence[LeaseRow], jobs: Sequence[JobRow], now: float) -> Iterator[Finding]:
    """Check for runs that hold slices though Slurm has ended them."""
    old = [row for row in held if row.since is not None and now - row.since > PATIENCE_S]
    orphan_runs = sorted(orphans(((row.node, row.job, row.restart) for row in old), jobs))
    for orphan in orphan_runs:
        text = f"job {orphan.job} run {orphan.restart} holds slices, though Slurm no longer has it there"
        advice = f"if this persists for a minute, run `migbatch node reconcile` on {orphan.node}; is its agent running?"
        yield Finding(WARN, orphan.node, text, advice)
    if not orphan_runs:
        yield Finding(OK, "leases", f"{len(held)} slices are held, all by jobs in Slurm")


def check_zombies(zombies: Mapping[str, Sequence[tuple[str, OccupiedSlot]]], mig: Collection[str]) -> Iterator[Finding]:
    """Check for slices that nodes could not destroy: their space is offered to no job."""
    for node in sorted(name for name in zombies if name in mig):
        if listed := [f"{slot.profile} at {slot.start}:{slot.size} of {uuid[:12]}" for uuid, slot in zombies[node]]:
            text = f"cannot destroy {', '.join(sorted(listed))}: no job gets its space"
            advice = f"if this persists, end the process that uses it: migbatch nodes -R names the cause on {node}"
            yield Finding(WARN, node, text, advice)


def check_queue(jobs: Sequence[JobRow]) -> Iterator[Finding]:
    """Check that the jobs, as Slurm shows them, can be read: those of a later release may not."""
    advice = "look for a later migbatch; until then no slices are offered for these jobs"
    if unread := [row for row in jobs if row.unread]:
        text = f"{len(unread)} of {len(jobs)} jobs cannot be read: job {unread[0].job_id}: {unread[0].reason}"
        yield Finding(FAIL, "Slurm's queue", text, advice)
    marked = [row for row in jobs if MARKER_OPEN in row.comment]
    if marked and not any(entry.name == "mig" for row in marked for entry in readable(row.gres)):
        text = f"no request for slices can be read: that of job {marked[0].job_id} is {marked[0].gres[:80]!r}"
        yield Finding(FAIL, "Slurm's queue", text, advice)


def _foreign(known: Collection[str], seen: Mapping[str, float], now: float) -> Iterator[Finding]:
    """Check that all nodes that report belong to this cluster: job ids of two clusters would be mixed up."""
    foreign = sorted(name for name, reported in seen.items() if name not in known and now - reported <= SILENCE_S)
    if foreign:
        text = f"{fold(foreign)} reported within the last {SILENCE_S:.0f} s, but this cluster has no such node"
        advice = "if another cluster's migbatchd uses this database, give each its own ([store] url); "
        advice += f"if the node was removed from slurm.conf, stop its agent; {ANOTHER_NAME}"
        yield Finding(FAIL, "record", text, advice)


def _catalog(rows: Sequence[NodeRow], mig: Sequence[NodeRow], name: str) -> Iterator[Finding]:
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        text = f"no node {name} that lists every profile"
        advice = f"without it, jobs are refused unless a node offers their profile: {INSTALL}"
        yield Finding(FAIL, "catalog node", text, advice)
        return
    if row.open:
        yield Finding(
            FAIL, "catalog node", f"{name} is not down", f"scontrol update NodeName={name} State=DOWN Reason=catalog"
        )
    listed = {type_number(kind) for kind in (*row.gres, "none")}  # of types with the same number Slurm shows one
    lacking = sorted({kind for other in mig for kind in other.gres if type_number(kind) not in listed})
    outside = sorted({p for other in mig for p in other.partitions} - set(row.partitions))
    if lacking:
        yield Finding(FAIL, "catalog node", f"{name} does not list {', '.join(lacking)}", INSTALL)
    if outside:
        yield Finding(
            FAIL, "catalog node", f"{name} is not in partition {', '.join(outside)}", "add it to Nodes= of these"
        )
    if not (row.open or lacking or outside):
        yield Finding(OK, "catalog node", f"{name} lists {len(row.gres)} types")


def _names(rows: Sequence[NodeRow], mig: Sequence[NodeRow], catalog: Collection[str]) -> Iterator[Finding]:
    """Check the features that let a job with a node list pend for its nodes."""
    catalog_features = [row.features for row in rows if row.name in catalog]
    lacking = sorted(
        row.name
        for row in mig
        if not all(NODE_FEATURE + row.name in features for features in (row.features, *catalog_features))
    )
    if lacking:
        text = f"{fold(lacking)} or the catalog node lacks the feature {NODE_FEATURE}<name>"
        advice = f"jobs that name these nodes are refused unless they offer the profile: {INSTALL}"
        yield Finding(WARN, "node features", text, f"{advice}, then restart slurmctld")
    elif mig:
        yield Finding(OK, "node features", "jobs can name nodes and pend for them")


def _check_similar_types(mig: Sequence[NodeRow]) -> Iterator[Finding]:
    """Check that no partition has two profiles that Slurm takes for the same GRES type."""
    kinds: dict[str, list[str]] = {}
    for row in mig:
        for partition in row.partitions:
            kinds.setdefault(partition, []).extend(row.gres)
    for partition, listed in sorted(kinds.items()):
        for text in confused_types(partition, listed):
            yield Finding(FAIL, "profiles", text, SEPARATE_PARTITIONS)

"""`migbatch nodes`: nodes, GPUs, layouts and offers, in the style of sinfo."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.query.questions import NodesQuestion
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.columns import job_id
from slurm_migbatch.report.lines import table_lines
from slurm_migbatch.slurm.client import NodeRow, SlurmError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.queries import LeaseRow, RunFilter, holders, last_seen, select_runs
from slurm_migbatch.store.recent import instance_events
from slurm_migbatch.workload.loans import GUEST, LOAN

#: GRES types that are not profiles: the filler, and those of training jobs that wait or share a slice
_NO_SLICES: Final = frozenset({"none", LOAN, GUEST})
#: characters of a layout bar for one memory slice
CELL = 6
#: seconds of silence after which a node that Slurm does not list counts as removed
_REMOVED_S: Final = 86400.0
#: characters of the problem of a GPU that are shown
_PROBLEM: Final = 500
#: number of faults of a node that are shown
_FAULTS: Final = 3
#: stands for a job that may not be named; Slurm numbers jobs from 1
HIDDEN = 0


@dataclass(frozen=True)
class OccupiedSlot:
    """A slot that is not free.

    `job` is None for a zombie, an instance that could not be destroyed yet, and `HIDDEN` for a job that the user may
    not see. `jobid` is the job as Slurm prints it, 12_3; empty for these.
    """

    profile: str
    start: int
    size: int
    job: int | None = None
    jobid: str = ""


@dataclass(frozen=True)
class GpuView:
    """One GPU: its slots, in memory slices. `slices` is 0 if MIG is off, or the node never described the GPU; `closed`:
    the node does not use it because of `problem`, and jobs only keep what they hold.
    """

    index: int | None
    uuid: str
    name: str
    slices: int
    held: tuple[OccupiedSlot, ...]
    problem: str = ""
    closed: bool = False

    @property
    def state(self) -> str:
        """Return the state of the GPU: fault, nomig, idle, mixed, full."""
        if self.closed:
            return "fault"
        used = sum({s.start: s.size for s in self.held}.values())  # a slice shared by two jobs is one
        return "nomig" if not self.slices else "idle" if not used else "full" if used >= self.slices else "mixed"


@dataclass(frozen=True)
class NodeView:
    """One node. `offered` and `used` are Slurm's counts by GRES type; `state` is Slurm's, None if silent.

    Nothing is offered while Slurm starts no jobs on the node.
    """

    name: str
    gpus: tuple[GpuView, ...]
    state: str | None
    offered: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    seen: float | None = None
    reasons: tuple[str, ...] = ()


def answer(question: NodesQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the selected nodes."""
    try:
        wanted = set(expand(question.names)) if question.names else None
    except NodeListError as error:
        raise Unanswerable(f"--nodes: {error}", 2) from None
    remarks: tuple[str, ...] = ()
    if not rights.nodes:
        raise Unanswerable("nodes are private (PrivateData=nodes)")
    try:
        rows: Sequence[NodeRow] | None = site.slurm().nodes()
    except SlurmError as error:
        rows, remarks = None, (f"migbatch: no answer from Slurm, states and offers are missing{site.detail(error)}",)
    with site.record() as store:
        leases = store.leases()
        shown = _shown(store, rights, {lease.job for lease in leases})
        names = job_names(store.read(holders))

        def jobid(job: int) -> str:
            return names.get(job, str(job))

        views = [
            replace(v, reasons=tuple(rights.sentence(reason, shown, jobid) for reason in v.reasons))
            for v in view(store, rows, leases, shown, names)
            if wanted is None or v.name in wanted
        ]
    if wanted is not None and (unknown := wanted - {v.name for v in views}):
        raise Unanswerable(
            f"no MIG node named {', '.join(sorted(unknown))} has reported yet; `migbatch nodes` lists those that have"
        )
    if question.as_json:
        return Reply([json.dumps({"version": 1, "nodes": [asdict(v) for v in views]})], remarks)
    if question.reasons:
        header: tuple[str, ...] = ("NODE", "LAST SEEN", "REASON")
        return Reply(list(table_lines(header, _reason_rows(views), show_header=question.header)), remarks)
    header = ("NODE", "STATE", "GPU", "MODEL", "LAYOUT", "GPUSTATE", "OFFERED")
    return Reply(list(table_lines(header, _rows(views), show_header=question.header)), remarks)


def _shown(store: Store, rights: Rights, jobs: Collection[int]) -> Collection[int]:
    """Return those of these jobs that the user may see."""
    if rights.runs:
        return jobs
    holding, own = ("RUNNING", "SUSPENDED"), (rights.uid, tuple(sorted(rights.coordinates)))
    wanted = RunFilter(only=own, states=holding, start=time.time())
    with store.reading() as connection:
        visible = {run.job_id for run, _ in select_runs(connection, wanted, ("job_id",))}
    return visible & set(jobs)


def view(
    store: Store,
    rows: Sequence[NodeRow] | None,
    leases: Sequence[LeaseRow],
    shown: Collection[int],
    names: Mapping[int, str] = MappingProxyType({}),
) -> list[NodeView]:
    """Return every node that has reported, combining Slurm's view (None if it does not answer) and the record's; but no
    node that was removed from Slurm. `leases`: slices that are held; `shown`: the jobs that may be named, `names`: as
    Slurm prints them, where that is not their number.
    """
    inventory = store.inventory()
    zombies, faults = troubles(store.read(instance_events, changes=False))
    seen = store.read(last_seen)
    slurm = {row.name: row for row in rows or ()}
    occupied = _occupied(leases, shown, names)
    for name, parked in zombies.items():
        for uuid, slot in parked:
            occupied.setdefault((name, uuid), []).append(slot)
    views = []
    for name, gpus in sorted(inventory.items()):
        row = slurm.get(name)
        if rows is not None and row is None and time.time() - seen.get(name, 0.0) > _REMOVED_S:
            continue
        gpu_views = tuple(_gpu(gpu, occupied.get((name, str(gpu.get("uuid"))), ())) for gpu in gpus)
        problems = [*(gpu.problem for gpu in gpu_views if gpu.problem), *faults.get(name, ())]
        if row is not None and row.reason:
            problems.append(f"Slurm: {row.reason}")
        views.append(
            NodeView(
                name,
                gpu_views,
                None if rows is None else "unknown" if row is None else "+".join(sorted(row.states)).lower(),
                free_counts(row) if row is not None and row.open else {},
                {} if row is None else {k: n for k, n in row.used.items() if n},
                seen.get(name),
                tuple(problems),
            )
        )
    return views


def free_counts(row: NodeRow) -> dict[str, int]:
    """Return the slices that Slurm can still allocate on a node, by profile as in GRES types."""
    free = {kind: count - row.used.get(kind, 0) for kind, count in row.gres.items() if kind not in _NO_SLICES}
    return {kind: count for kind, count in sorted(free.items()) if count > 0}


def troubles(
    history: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, list[tuple[str, OccupiedSlot]]], dict[str, list[str]]]:
    """Return the faults that nodes reported since they booted: zombies by node (with GPU), sentences by node."""
    zombies: dict[str, list[tuple[str, OccupiedSlot]]] = {}
    messages: dict[str, list[str]] = {}
    for node, events in history.items():
        parked: dict[tuple[str, int], tuple[OccupiedSlot, str]] = {}
        faults: dict[str, bool] = {}  # by sentence, the newest last: whether it drained the node
        for event in events:
            if event["kind"] == "zombie":
                parked[_place(event)] = _parked(event)
            elif event["kind"] == "state":
                parked |= {_place(row): _parked(row) for row in event.get("zombies") or ()}
            elif event["kind"] == "cleared":
                parked.pop(_place(event), None)
            elif event["kind"] == "fault":
                sentence = fault_sentence(event)
                faults.pop(sentence, None)
                faults[sentence] = bool(event.get("drain"))
        zombies[node] = [(gpu, slot) for (gpu, _), (slot, _) in parked.items()]
        messages[node] = _newest(faults) + [
            f"GPU {gpu}: {slot.profile} at {slot.start}:{slot.size} is a zombie: {why}"
            for (gpu, _), (slot, why) in parked.items()
        ]
    return zombies, messages


def _newest(faults: Mapping[str, bool]) -> list[str]:
    """Return the newest faults, and the newest that drained the node: there may be many lesser ones after these."""
    draining = [sentence for sentence, drain in faults.items() if drain]
    kept = {*list(faults)[-_FAULTS:], *draining[-_FAULTS:]}
    return [sentence for sentence in faults if sentence in kept]


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    return str(row.get("gpu")), int(row.get("start") or 0)


def _parked(row: Mapping[str, Any]) -> tuple[OccupiedSlot, str]:
    slot = OccupiedSlot(str(row.get("profile")), int(row.get("start") or 0), int(row.get("size") or 1))
    return slot, str(row.get("reason") or "no reason given")


def fault_sentence(event: Mapping[str, Any]) -> str:
    """Describe a fault that a node reported."""
    gpu = f"GPU {event['gpu']}: " if event.get("gpu") else ""
    action = f"; {event['action']}" if event.get("action") else ""
    return f"{gpu}{event.get('what')}{action}{' (drained)' if event.get('drain') else ''}"


def bar(gpu: GpuView) -> str:
    """Return the layout as text, `CELL` characters per memory slice."""
    if not gpu.slices or (gpu.closed and not gpu.held):  # a problem ends in its cause and what to do
        return gpu.problem.rpartition(": ")[2].partition(";")[0] or "MIG is off"
    cells = [("x" if gpu.closed else ".") * (CELL - 1) + "|"] * gpu.slices
    jobs: dict[int, str] = {}
    for held in gpu.held:
        if not 0 <= held.start < held.start + held.size <= gpu.slices:
            continue
        width = held.size * CELL - 1
        if held.job is not None:
            first = jobs.get(held.start)
            jobs[held.start] = (f"{first}+" if first else "") + (held.jobid or f"{held.job or '-'}")
        label = _label(held, jobs.get(held.start, ""), width)
        cells[held.start : held.start + held.size] = [f"{label:<{width}}|", *[""] * (held.size - 1)]
    return "|" + "".join(cells)


def _label(held: OccupiedSlot, jobs: str, width: int) -> str:
    """Return the longest text about a slot that fits; a cut one ends with `+`."""
    short = held.profile.partition(".")[0]
    if held.job is None:
        texts = [f"!{held.profile}", f"!{short}"]
    else:
        texts = [f"{held.profile} {jobs}", f"{short} {jobs}", jobs]
    cut = texts[1][: width - 1] + "+"
    return next((text for text in texts if len(text) <= width), cut)


def _gpu(gpu: Mapping[str, Any], held: Iterable[OccupiedSlot]) -> GpuView:
    problem = str(gpu.get("problem") or "")[:_PROBLEM]
    slices = 0
    if (gpu.get("mig") or problem) and isinstance(gpu.get("geometry"), Mapping):
        slices = _memory_slices(json.dumps(gpu["geometry"]))
    closed = slices > 0 and not gpu.get("mig")
    ordered = tuple(sorted(held, key=lambda s: s.start))
    name = str(gpu.get("name") or "?")
    return GpuView(gpu.get("index"), str(gpu.get("uuid")), name, slices, ordered, problem, closed)


@lru_cache(maxsize=256)
def _memory_slices(geometry: str) -> int:
    """Return the memory slices of a geometry, as JSON: a site has thousands of GPUs but few types."""
    try:
        return Geometry.from_dict(json.loads(geometry)).memory_slices
    except GeometryError:
        return 0


def job_names(runs: Iterable[Any]) -> dict[int, str]:
    """Return these runs of the record, which have the fields of NAMED_BY, as Slurm prints their jobs."""
    return {run.job_id: job_id(run) for run in runs}


def _occupied(
    leases: Iterable[LeaseRow], shown: Collection[int], names: Mapping[int, str]
) -> dict[tuple[str, str], list[OccupiedSlot]]:
    """Return the slots that jobs hold, by node and GPU."""
    slots: dict[tuple[str, str], list[OccupiedSlot]] = {}
    for lease in leases:
        job = lease.job if lease.job in shown else HIDDEN
        jobid = names.get(job, str(job)) if job else ""
        slot = OccupiedSlot(lease.profile, lease.start, lease.size, job, jobid)
        slots.setdefault((lease.node, lease.gpu), []).append(slot)
    return slots


def _rows(views: Iterable[NodeView]) -> Iterator[tuple[str, ...]]:
    for node in views:
        offered = ",".join(f"{kind}:{count}" for kind, count in node.offered.items())
        if not offered:
            offered = "?" if node.state is None else "-"
        for number, gpu in enumerate(node.gpus):
            first = number == 0
            yield (
                node.name if first else "",
                (node.state or "?") if first else "",
                "?" if gpu.index is None else str(gpu.index),
                gpu.name.removeprefix("NVIDIA "),
                bar(gpu),
                gpu.state,
                offered if first else "",
            )


def _reason_rows(views: Iterable[NodeView]) -> Iterator[tuple[str, ...]]:
    for node in views:
        ago = "never" if node.seen is None else f"{max(0, time.time() - node.seen):.0f} s ago"
        for number, reason in enumerate(node.reasons):
            yield (node.name if not number else "", ago if not number else "", reason)

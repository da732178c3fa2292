"""`migbatch nodes`: nodes, GPUs, layouts and what is offered, in sinfo's manner."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from sqlalchemy import select

from slurm_migbatch.cli.common import Failure, config_option, open_record, print_table, slurm_client
from slurm_migbatch.config import Config
from slurm_migbatch.daemon.history import HistoryStore
from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.slurm.client import NodeRow, SlurmError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.store.models import Node as NodeRecord
from slurm_migbatch.store.queries import LeaseRow

#: characters of a layout bar for one memory slice
CELL = 6


@dataclass(frozen=True)
class OccupiedSlot:
    """A slot that is not free. `job` is None for a zombie, an instance that could not be destroyed yet."""

    profile: str
    start: int
    size: int
    job: int | None = None


@dataclass(frozen=True)
class GpuView:
    """One GPU: what lies on it, in memory slices. `slices` is 0 where MIG is off."""

    index: int | None
    uuid: str
    name: str
    slices: int
    held: tuple[OccupiedSlot, ...]

    @property
    def state(self) -> str:
        """A word for the GPU: nomig, idle, mixed, full."""
        used = sum(s.size for s in self.held)
        return "nomig" if not self.slices else "idle" if not used else "full" if used >= self.slices else "mixed"


@dataclass(frozen=True)
class NodeView:
    """One node. `offered` and `used` are Slurm's counts by GRES type; `state` is its word, None where it is silent."""

    name: str
    gpus: tuple[GpuView, ...]
    state: str | None
    offered: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    seen: float | None = None
    reasons: tuple[str, ...] = ()


@click.command()
@config_option
@click.option("-n", "--nodes", "names", metavar="LIST", help="These nodes only, such as gpu[1-4].")
@click.option("-R", "--reasons", is_flag=True, help="Only what is wrong: faults, zombies and Slurm's reasons.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("--noheader", is_flag=True, help="No header line.")
def nodes(config: Config, names: str | None, reasons: bool, as_json: bool, noheader: bool) -> None:
    """Show nodes, GPUs, layouts and slices.

    A bar shows a GPU's memory: profile and job of each slice that is held, zombies as !profile, dots where it is free.
    OFFERED is what Slurm may still give away on the node.
    """
    try:
        wanted = set(expand(names)) if names else None
    except NodeListError as error:
        raise click.BadParameter(str(error), param_hint="--nodes") from None
    try:
        rows: Sequence[NodeRow] | None = slurm_client(config).nodes()
    except SlurmError as error:
        rows = None
        click.echo(f"migbatch: Slurm does not answer, states and offers are left out: {error}", err=True)
    with open_record(config) as store:
        views = [v for v in view(store, rows) if wanted is None or v.name in wanted]
    if wanted is not None and (unknown := wanted - {v.name for v in views}):
        raise Failure(f"no MIG node called {', '.join(sorted(unknown))} has reported yet")
    if as_json:
        click.echo(json.dumps({"version": 1, "nodes": [asdict(v) for v in views]}))
    elif reasons:
        print_table(("NODE", "LAST SEEN", "REASON"), _reason_rows(views), show_header=not noheader)
    else:
        header = ("NODE", "STATE", "GPU", "MODEL", "LAYOUT", "GPUSTATE", "OFFERED")
        print_table(header, _rows(views), show_header=not noheader)


def view(store: HistoryStore, rows: Sequence[NodeRow] | None) -> list[NodeView]:
    """Return every node that has reported, with Slurm's view of it beside the record's."""
    inventory, leases = store.inventory(), store.leases()
    zombies, faults = troubles(store.instance_events())
    with store.reading() as connection:
        seen = {row.node: row.seen for row in connection.execute(select(NodeRecord.node, NodeRecord.seen))}
    slurm = {row.name: row for row in rows or ()}
    views = []
    for name, gpus in sorted(inventory.items()):
        row = slurm.get(name)
        held = [*_held(lease for lease in leases if lease.node == name), *zombies.get(name, ())]
        found = list(faults.get(name, ()))
        if row is not None and row.reason:
            found.append(f"Slurm: {row.reason}")
        views.append(
            NodeView(
                name,
                tuple(_gpu(gpu, [s for uuid, s in held if uuid == gpu.get("uuid")]) for gpu in gpus),
                None if rows is None else "unknown" if row is None else "+".join(sorted(row.states)).lower(),
                {} if row is None else free_counts(row),
                {} if row is None else {k: n for k, n in row.used.items() if n},
                seen.get(name),
                tuple(found),
            )
        )
    return views


def free_counts(row: NodeRow) -> dict[str, int]:
    """Return the slices that Slurm may still give away on a node, by GRES type, without the filler."""
    free = {kind: count - row.used.get(kind, 0) for kind, count in row.gres.items() if kind != "none"}
    return {kind: count for kind, count in sorted(free.items()) if count > 0}


def troubles(
    history: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, list[tuple[str, OccupiedSlot]]], dict[str, list[str]]]:
    """Return the faults that nodes reported since they booted: zombies by node (with GPU), sentences by node."""
    zombies: dict[str, list[tuple[str, OccupiedSlot]]] = {}
    messages: dict[str, list[str]] = {}
    for node, events in history.items():
        parked: dict[tuple[str, int], tuple[OccupiedSlot, str]] = {}
        faults = []
        for event in events:
            place = (str(event.get("gpu")), int(event.get("start") or 0))
            if event["kind"] == "zombie":
                parked[place] = _parked(event)
            elif event["kind"] == "state":
                parked |= {(row["gpu"], row["start"]): _parked(row) for row in event.get("zombies") or ()}
            elif event["kind"] == "cleared":
                parked.pop(place, None)
            elif event["kind"] == "fault":
                faults.append(_fault(event))
        zombies[node] = [(gpu, slot) for (gpu, _), (slot, _) in parked.items()]
        messages[node] = faults[-3:] + [
            f"GPU {gpu}: {slot.profile} at {slot.start}:{slot.size} is a zombie: {why}"
            for (gpu, _), (slot, why) in parked.items()
        ]
    return zombies, messages


def _parked(row: Mapping[str, Any]) -> tuple[OccupiedSlot, str]:
    slot = OccupiedSlot(str(row.get("profile")), int(row.get("start") or 0), int(row.get("size") or 1))
    return slot, str(row.get("reason") or "no reason given")


def _fault(event: Mapping[str, Any]) -> str:
    where = f"GPU {event['gpu']}: " if event.get("gpu") else ""
    then = f"; {event['action']}" if event.get("action") else ""
    return f"{where}{event.get('what')}{then}{' (drained)' if event.get('drain') else ''}"


def bar(gpu: GpuView) -> str:
    """Return the layout as text, `CELL` characters for a memory slice."""
    if not gpu.slices:
        return "MIG is off"
    cells = ["." * (CELL - 1) + "|"] * gpu.slices
    for held in gpu.held:
        if not 0 <= held.start < held.start + held.size <= gpu.slices:
            continue
        width = held.size * CELL - 1
        label = f"!{held.profile}" if held.job is None else f"{held.profile} {held.job}"
        if len(label) > width:
            label = label.replace(held.profile, held.profile.partition(".")[0], 1)
        cells[held.start : held.start + held.size] = [f"{label[:width]:<{width}}|", *[""] * (held.size - 1)]
    return "|" + "".join(cells)


def _gpu(gpu: Mapping[str, Any], held: Iterable[OccupiedSlot]) -> GpuView:
    slices = 0
    if gpu.get("mig") and isinstance(gpu.get("geometry"), Mapping):
        try:
            slices = Geometry.from_dict(gpu["geometry"]).memory_slices
        except GeometryError:
            slices = 0
    ordered = tuple(sorted(held, key=lambda s: s.start))
    return GpuView(gpu.get("index"), str(gpu.get("uuid")), str(gpu.get("name") or "?"), slices, ordered)


def _held(leases: Iterable[LeaseRow]) -> Iterator[tuple[str, OccupiedSlot]]:
    for lease in leases:
        yield lease.gpu, OccupiedSlot(lease.profile, lease.start, lease.size, lease.job)


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

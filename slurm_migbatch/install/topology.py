"""Add the catalog node to the site's topology.conf.

Tested on 22.05 to 26.05: with topology/tree Slurm refuses at submission requests that only nodes in no switch could
run, so the catalog needs a switch. With topology/block this applies to jobs over several nodes; up to 24.11 slurmctld
does not start if a block has fewer nodes than the smallest of BlockSizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from slurm_migbatch.install.slurmconf import Conf, Line, LineEdit, added, edit
from slurm_migbatch.slurm.nodelist import NodeListError, expand

SWITCH: Final = "migbatch-catalog"
"""Name of the catalog's switch or block."""
SHORT_BLOCKS: Final = (25, 11)
"""The oldest release known to accept a block with fewer nodes than BlockSizes."""


@dataclass
class TopologyPlan:
    """Needs of topology.conf: changes of its lines, and sentences; see `slurmedit.SlurmPlan`."""

    edits: list[LineEdit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Unit:
    """One line of topology.conf: a switch or a block, its nodes, and the switches below it."""

    line: Line
    name: str
    nodes: frozenset[str]
    below: frozenset[str]


def plan(plugin: str, topology: Conf, catalog: str, version: tuple[int, int]) -> TopologyPlan:
    """Return what topology.conf needs for requests to wait for what is not on offer. `plugin`: "tree", "block", or one
    that needs nothing; `catalog`: its host list; `version`: Slurm's.
    """
    result = TopologyPlan()
    if plugin not in ("tree", "block"):
        return result
    try:
        units = list(_units(topology, "switchname" if plugin == "tree" else "blockname"))
        names = expand(catalog)
    except NodeListError as error:
        result.problems.append(f"{topology.main}: {error}")
        return result
    if not units or set(names) <= {node for unit in units for node in unit.nodes}:
        return result
    own = next((unit for unit in units if unit.name == SWITCH), None)
    if own is not None:
        result.edits.append(edit(topology, own.line, {"nodes": catalog}))
    elif plugin == "tree":
        _switch(topology, units, catalog, result)
    else:
        _block(topology, catalog, len(names), version, result)
    return result


def yaml_note(text: str, catalog: str) -> str:
    """Return what to do about a topology.yaml as a sentence; empty if it seems to include the catalog."""
    if catalog in text or all(name in text for name in expand(catalog)):
        return ""
    return (
        f"topology.yaml is not changed: add `- switch: {SWITCH}` with `nodes: {catalog}` to the switches of each tree, "
        f"and {SWITCH} to the children of its top switch; `- block: {SWITCH}` with the same nodes to the blocks of "
        f"each block topology, `- ring: {SWITCH}` to the rings of each ring topology; `- name: {SWITCH}` with these, "
        "`dims` and `placements` to each torus3d; otherwise jobs are refused unless a node offers their profile"
    )


def _units(topology: Conf, kind: str) -> Iterator[_Unit]:
    for line, values in topology.records(kind):
        nodes, below = (frozenset(expand(values.get(key, ""))) for key in ("nodes", "switches"))
        yield _Unit(line, values[kind], nodes, below)


def _switch(topology: Conf, units: list[_Unit], catalog: str, done: TopologyPlan) -> None:
    """Put the catalog into a switch of its own below the top one, or into the top one if that has no others."""
    inner = {name for unit in units for name in unit.below}
    tops = [unit for unit in units if unit.name not in inner]
    line = f"SwitchName={SWITCH} Nodes={catalog}"
    if len(tops) > 1:
        done.edits.append(added(topology, line))
        done.notes.append(
            f"{topology.main} has {len(tops)} unconnected top switches: multi-node jobs pend only if there are as "
            "many catalog nodes ([cluster] catalog_nodes) as they have nodes"
        )
        return
    (top,) = tops
    key = "switches" if top.below else "nodes"
    token = top.line.get(key)
    if token is None:
        done.problems.append(f"{topology.main}:{top.line.number}: the switch {top.name} is empty")
        return
    if top.below:
        done.edits += [edit(topology, top.line, {key: f"{token.value},{SWITCH}"}), added(topology, line)]
    else:
        done.edits.append(edit(topology, top.line, {key: f"{token.value},{catalog}"}))


def _block(topology: Conf, catalog: str, count: int, version: tuple[int, int], done: TopologyPlan) -> None:
    sizes = [int(part) for part in topology.value("BlockSizes").split(",") if part.isdigit()]
    if version >= SHORT_BLOCKS or (sizes and count >= min(sizes)):
        done.edits.append(added(topology, f"BlockName={SWITCH} Nodes={catalog}"))
        return
    needed = f"{min(sizes)} nodes, as BlockSizes says" if sizes else "as many nodes as a block"
    done.notes.append(
        f"{topology.main}: multi-node jobs are refused unless nodes offer their profile or the catalog ([cluster] "
        f"catalog_nodes) has {needed}: this Slurm release accepts no smaller block"
    )

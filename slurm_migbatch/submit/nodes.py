"""Determine a job's nodes by --nodelist, --exclude and --constraint, and whether they can ever hold its request.

Slurm refuses a job that names nodes which do not offer its profile at the moment, because it checks these alone. So
a node list becomes a constraint: each MIG node has a feature of its own (`workload.catalog.NODE_FEATURE`), the catalog
nodes have all of them, and the job is pending. `gres_templates/migbatch_core.lua.j2` holds the same steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from slurm_migbatch.slurm.constraint import satisfier
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.workload.catalog import MigNode, SiteCatalog
from slurm_migbatch.workload.refusal import Refusal, show

READ: Final = 512
"""Largest node list or constraint to check, in bytes; a longer one is left to Slurm unchanged."""
MOST_NAMED: Final = 32
"""Most nodes of a list that becomes a constraint."""

_NUMBERS = r"\[[0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*\]"
_ITEM = rf"(?:[A-Za-z0-9_.-]|{_NUMBERS})+"
_LIST = re.compile(rf"{_ITEM}(?:,{_ITEM})*")


@dataclass(frozen=True)
class NodeChoice:
    """The nodes that a job may have, and the changes that make it pending for them.

    Attributes:
        nodes: None if unknown, or if the job may have any node of its partitions.
        changes: fields of the job.
        note: a sentence for the user, empty for none.
    """

    nodes: tuple[MigNode, ...] | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def listed(text: str) -> tuple[str, ...] | None:
    """Return the names of a short node list, each once; None if it is longer or has another form."""
    if _LIST.fullmatch(text) is None:
        return None
    try:
        return expand(text, MOST_NAMED)
    except NodeListError:
        return None


def choose(request: JobRequest, catalog: SiteCatalog, partitions: Collection[str], note: str) -> NodeChoice:
    """Return the nodes that a request allows; raises Refusal if there are none.

    `note` is the text for a job whose node list is left to Slurm.
    """
    allowed = _allowed(request, catalog, partitions)
    if allowed is None:
        return NodeChoice()
    nodes, simple = allowed
    requested = _short(request.req_nodes)
    names = listed(requested)
    if names is None:
        if not nodes:
            raise Refusal("nodes_none", ",".join(partitions))
        return NodeChoice(nodes, {}, note if requested else "")
    by_name = {node.name: node for node in nodes}
    if strange := next((name for name in names if name not in by_name), None):
        raise Refusal("node_other", show(strange), ",".join(partitions))
    chosen = tuple(by_name[name] for name in names)
    tasks = request.num_tasks or 1
    least = max(request.min_nodes or 1, -(-tasks // (request.ntasks_per_node or tasks)))
    if least > len(names):
        raise Refusal("nodes_more", str(least), str(len(names)))
    if not simple or not all(node.named for node in chosen):
        return NodeChoice(chosen, {}, note)
    changes = {"req_nodes": "", "features": "|".join(node.feature for node in chosen)}
    # of more nodes than it has tasks, or than -N allows, Slurm gives a job so many as it can use
    wanted = min(len(names), request.max_nodes or len(names), request.num_tasks or len(names))
    if wanted > 1 and (request.min_nodes or 0) < wanted:
        changes["min_nodes"] = str(wanted)
    return NodeChoice(chosen, changes)


def excludes_mig(request: JobRequest, catalog: SiteCatalog, partitions: Collection[str]) -> bool:
    """Return whether a request names nodes, or requires of them what no node with MIG GPUs meets."""
    allowed = _allowed(request, catalog, partitions)
    if allowed is None:
        return False
    nodes, _ = allowed
    names = listed(_short(request.req_nodes))
    return not nodes if names is None else {node.name for node in nodes}.isdisjoint(names)


def _allowed(
    request: JobRequest, catalog: SiteCatalog, partitions: Collection[str]
) -> tuple[tuple[MigNode, ...], bool] | None:
    """Return the nodes that meet --constraint and --exclude, and whether the constraint is simple.

    None if nodes are unknown, or the job chooses none.
    """
    requested, excluded, constraint = (
        _short(text) for text in (request.req_nodes, request.exc_nodes, request.features)
    )
    if not catalog.nodes or not (requested or excluded or constraint):
        return None
    without = frozenset(listed(excluded) or ())
    satisfies = None if "," in constraint else satisfier(constraint)  # commas neither in the Lua shim
    nodes = tuple(
        node
        for node in catalog.nodes.values()
        if not node.partitions.isdisjoint(partitions)
        and node.name not in without
        and (satisfies is None or satisfies(node.features))
    )
    return nodes, not constraint or satisfies is not None


def _short(text: str | None) -> str:
    return text if text is not None and len(text) <= READ else ""


def able_to_hold(
    slices: Mapping[str, int], choice: NodeChoice, catalog: SiteCatalog, names: Collection[str]
) -> int | None:
    """Return how many of the nodes can ever hold these slices at once, None if no nodes are known.

    If the job chooses no nodes, all nodes of the partitions `names` count.
    """
    if not catalog.nodes:
        return None
    need = tuple(slices.items())
    return catalog.able(names, need) if choice.nodes is None else catalog.able_of(choice.nodes, names, need)


def check_capacity(
    slices: Mapping[str, int], choice: NodeChoice, catalog: SiteCatalog, names: Collection[str], wanted: int
) -> None:
    """Raise Refusal if fewer than `wanted` of the nodes can ever hold these slices at once."""
    able = able_to_hold(slices, choice, catalog, names)
    if able is None or able >= wanted:
        return
    gres = ",".join(f"mig:{kind}:{count}" for kind, count in slices.items())
    if not able:
        raise Refusal("room_none", gres)
    raise Refusal("room_few", str(able), gres, str(wanted))

"""Describe dynamic nodes (slurmd -Z), which slurm.conf has no lines for, by what slurmctld knows of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from slurm_migbatch.install.slurmconf import Conf, Line, Token
from slurm_migbatch.site import mig_gres
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.slurm.nodelist import expand_valid, fold
from slurm_migbatch.workload.catalog import NODE_FEATURE

_FEATURE: Final = re.compile(r"[\w.:@/+-]+")
"""Features are written to slurm.conf, and those of a dynamic node are its own choice: no other setting may follow."""


def with_dynamic(conf: Conf, nodes: Iterable[NodeRow]) -> Conf:
    """Return the configuration with a line for each dynamic node, of no file.

    These lines come before all others, because they inherit nothing from DEFAULT lines.
    """
    named = {name for _, values in conf.records("nodename") for name in expand_valid(values["nodename"])}
    rows = [row for row in nodes if row.dynamic and row.name not in named]
    return replace(conf, lines=(*map(_line, rows), *conf.lines)) if rows else conf


def _line(row: NodeRow) -> Line:
    values = {
        "nodename": row.name,
        "cpus": str(row.cpus),
        "realmemory": str(row.memory),
        "features": ",".join(sorted(filter(_FEATURE.fullmatch, row.features))),
        "gres": ",".join(filter(None, (row.other_gres, mig_gres(row.gres)))),
    }
    tokens = tuple([Token(key, value, 0, 0) for key, value in values.items() if value])
    return Line(f"dynamic node {row.name}", 0, 0, 0, tokens)


def is_dynamic(conf: Conf, line: Line) -> bool:
    """Return whether a line is that of a dynamic node."""
    return line.path not in conf.texts


def options(needed: Mapping[tuple[str, str], Iterable[str]]) -> Iterator[str]:
    """Yield a sentence for nodes whose slurmd must be started with other options.

    Args:
        needed: nodes by the GRES and the features that they need, without the feature of the node itself.
    """
    for (gres, features), names in needed.items():
        hosts = fold(names)
        shown = ",".join(filter(None, (features, f"{NODE_FEATURE}NAME")))
        yield (
            f"dynamic nodes {hosts} need Gres={gres} and Feature={shown} (NAME is that of the node) in --conf of their "
            f"slurmd: after slurmctld's restart `scontrol delete NodeName={hosts}`, and start slurmd there with these"
        )

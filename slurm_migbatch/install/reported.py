"""Build the site from its nodes' reports: the input for the templates of Slurm's files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from slurm_migbatch.decide.capacity.demand import FILLER
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.site import WAITING, NodeLine, Site, spare
from slurm_migbatch.slurm.nodelist import fold


def describe(
    gpus: Mapping[str, Sequence[Geometry]], version: tuple[int, int], catalog: str, lending: Collection[str] = ()
) -> Site:
    """Return the site for the templates, with the Lua scripts and without hooks. Equal nodes share one line.

    Args:
        gpus: GPUs of each node in MIG mode; every node has at least one.
        version: release of Slurm.
        catalog: host list of the catalog nodes.
        lending: partitions whose training jobs are lent idle slices.
    """
    largest: dict[str, int] = {}
    most = {name: most_counts(geometries) for name, geometries in gpus.items()}
    for counts in most.values():
        for profile, number in counts.items():
            largest[profile] = max(largest.get(profile, 0), number)
    names_by_counts: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, geometries in gpus.items():
        base = base_counts(geometries)
        own = {kind: base.get(kind, 0) for kind in largest if kind in most[name]}
        row = {**own, FILLER: 0, **(spare(version) if lending else {})}
        names_by_counts.setdefault(tuple(row.items()), []).append(name)
    return Site(
        version=version,
        nodes=[NodeLine(fold(names), dict(counts_of_line)) for counts_of_line, names in names_by_counts.items()],
        catalog=NodeLine(catalog, {**largest, FILLER: 0, **WAITING}),
        lends=bool(lending),
        job_submit=True,
        cli_filter=True,
    )


def base_counts(geometries: Iterable[Geometry]) -> dict[str, int]:
    """Return slurm.conf's counts: each GPU full of the profile that fits most often, which can always be placed."""
    counts: dict[str, int] = {}
    for geometry in geometries:
        info = max(geometry.profiles, key=lambda i: (i.max_instances, not i.profile.suffix, -i.memory_slices))
        counts[info.profile.gres_type] = counts.get(info.profile.gres_type, 0) + info.max_instances
    return counts


def most_counts(geometries: Iterable[Geometry]) -> Mapping[str, int]:
    """Return the maximum number of slices of each profile that a node with these GPUs can offer."""
    counts: dict[str, int] = {}
    for geometry in geometries:
        for info in geometry.profiles:
            counts[info.profile.gres_type] = counts.get(info.profile.gres_type, 0) + info.max_instances
    return counts

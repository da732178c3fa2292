"""Build the site's catalog from the nodes' GPUs and Slurm's partitions."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from slurm_migbatch.config import Config, GpuConfig
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.slurm.gpu_defaults import NO_DEFAULTS, GpuDefaults
from slurm_migbatch.slurm.nodelist import expand
from slurm_migbatch.workload.catalog import NODE_FEATURE, GpuKind, MigNode, Partition, SiteCatalog
from slurm_migbatch.workload.gpufacts import FORM, facts_of, guess, model_of, short_name

log = logging.getLogger(__name__)


def build(
    geometries: Mapping[str, Iterable[Geometry]],
    nodes: Iterable[NodeRow],
    config: Config,
    gpu_defaults: Mapping[str, GpuDefaults] | None = None,
    hidden: Collection[str] = (),
) -> SiteCatalog:
    """Build the catalog of the partitions that have MIG GPUs (of those in the configuration, if any are listed).

    Args:
        geometries: of the GPUs in MIG mode, by node.
        nodes: Slurm's rows.
        config: of the site.
        gpu_defaults: what partitions give jobs for each GPU.
        hidden: the partitions that are not suggested to users.
    """
    names: dict[Geometry, str] = {}
    kinds: dict[str, GpuKind] = {}
    members: dict[str, Counter[str]] = {}
    others: dict[str, set[str]] = {}
    gpus: dict[str, list[str]] = {}
    rows = {row.name: row for row in nodes}
    for row in sorted(rows.values(), key=lambda row: row.name):
        # a node with slices may not have reported its GPUs yet
        if row.name not in geometries and not row.gres:
            for partition in row.partitions:
                others.setdefault(partition, set()).update(_types(row))
        for geometry in geometries.get(row.name, ()):
            name = names.get(geometry)
            if name is None:
                name = names[geometry] = _free(short_name(geometry.name, geometry.full.profile.memory_gb), kinds)
                kinds[name] = _kind(name, geometry, config.gpus.get(name, GpuConfig()))
            gpus.setdefault(row.name, []).append(name)
            for partition in row.partitions:
                if not config.cluster.partitions or partition in config.cluster.partitions:
                    members.setdefault(partition, Counter())[name] += 1
    catalog = expand(config.cluster.catalog_nodes)
    every = [rows[name].features for name in catalog if name in rows]
    listed = frozenset.intersection(*every) if every else frozenset()
    default = Profile.parse(config.submit.default_profile) if config.submit.default_profile else None
    lending = config.lending.partitions if config.lending.enabled else ()
    return SiteCatalog(
        {
            partition: Partition(
                partition,
                _most_first(counts, kinds),
                default,
                partition in lending,
                (gpu_defaults or {}).get(partition, NO_DEFAULTS),
                frozenset(others.get(partition, ())),
                partition in hidden,
            )
            for partition, counts in sorted(members.items())
        },
        {name: node for name in gpus if (node := _node(rows[name], gpus[name], members, listed)).partitions},
        catalog[0].rstrip("0123456789") if catalog else "",
        len(catalog),
    )


def _most_first(counts: Mapping[str, int], kinds: Mapping[str, GpuKind]) -> tuple[GpuKind, ...]:
    """Return a partition's kinds: `gpu:N` means the first, and what one node reports is not to change that."""
    return tuple(kinds[name] for name in sorted(counts, key=lambda name: (-counts[name], name)))


def _types(row: NodeRow) -> Iterator[str]:
    """Yield the types of the GPUs that Slurm counts on a node, "" for none."""
    for entry in gres.readable(row.other_gres):
        if entry.name == "gpu" and entry.count:
            yield entry.type or ""


def _node(row: NodeRow, gpus: Iterable[str], partitions: Collection[str], listed: Collection[str]) -> MigNode:
    """Return one node; `listed`: features that every catalog node has."""
    own = NODE_FEATURE + row.name
    return MigNode(
        row.name,
        tuple(sorted(gpus)),
        frozenset(row.partitions).intersection(partitions),
        row.features,
        named=own in row.features and own in listed,
    )


def _kind(name: str, geometry: Geometry, site: GpuConfig) -> GpuKind:
    facts = facts_of(geometry.name)
    if facts is None:
        facts = guess(geometry.full.sm_count, geometry.full.profile.memory_gb)
        if not (site.tflops and site.bandwidth_gbs):
            log.warning(
                "speed of %s is estimated; set tflops and bandwidth_gbs in [gpus.%s] of migbatch.toml",
                geometry.name,
                name,
            )
    # users write gpu:h100 or, if Slurm detects GPUs itself, gpu:nvidia_h100_80gb_hbm3
    model = model_of(geometry.name)
    types = {model, FORM.sub("", model), re.sub(r"[^a-z0-9]+", "_", geometry.name.lower()).strip("_")}
    types.update(site.types)
    return GpuKind(
        name,
        geometry,
        site.tflops or facts.tflops,
        site.bandwidth_gbs or facts.bandwidth_gbs,
        site.sm_count or facts.sm_count,
        tuple(sorted(types - {name})),
    )


def _free(name: str, taken: Mapping[str, object]) -> str:
    """Return `name`, numbered if GPUs of one name differ in geometry (different driver versions)."""
    number, candidate = 2, name
    while candidate in taken:
        candidate, number = f"{name}-v{number}", number + 1
    return candidate

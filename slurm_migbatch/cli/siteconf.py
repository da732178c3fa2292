"""The site as `migbatch config render` sees it: what nodes reported and what Slurm says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from slurm_migbatch.cli.common import Failure, open_record, slurm_client
from slurm_migbatch.config import Config
from slurm_migbatch.daemon.catalog import geometry_of
from slurm_migbatch.daemon.inventory import Inventory
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.site import WAITING, NodeLine, PartitionLine, Site, preemption, spare
from slurm_migbatch.slurm.client import NodeRow, SlurmError
from slurm_migbatch.slurm.nodelist import fold
from slurm_migbatch.store.errors import StoreError

FILLER = "none"


class NothingReported(Failure):
    """No node has reported GPUs that are cut by MIG."""


def read(config: Config) -> Site:
    """Return the site from the record and from Slurm, without the hooks.

    Raises:
        NothingReported: no node has reported GPUs yet.
        Failure: Slurm cannot be asked.
    """
    try:
        with open_record(config) as store:
            inventory = store.inventory()
    except StoreError as error:
        raise NothingReported(f"no node can have reported yet: {error}") from None
    client = slurm_client(config)
    try:
        version, rows = client.version(), client.nodes()
    except SlurmError as error:
        raise Failure(f"the nodes' partitions are needed from Slurm: {error}") from None
    lending = config.lending.partitions if config.lending.enabled else ()
    return build(inventory, rows, version, config.cluster.catalog_nodes, lending)


def build(
    inventory: Inventory,
    rows: Iterable[NodeRow],
    version: tuple[int, int],
    catalog: str,
    lending: Collection[str] = (),
) -> Site:
    """Return the site that fills the templates. Equal nodes share one line. `lending`: partitions that lend."""
    slurm = {row.name: row for row in rows}
    counts: dict[str, dict[str, int]] = {}
    most: dict[str, Mapping[str, int]] = {}
    every: dict[str, int] = {}
    for name, gpus in inventory.items():
        geometries = [g for gpu in gpus if (g := geometry_of(gpu)) is not None]
        if not geometries or name not in slurm:
            continue
        counts[name] = base_counts(geometries)
        most[name] = most_counts(geometries)
        for profile, number in most[name].items():
            every[profile] = max(every.get(profile, 0), number)
    if not counts:
        raise NothingReported(
            "no node that Slurm knows has reported MIG GPUs yet; run `migbatch install --role node` on the nodes "
            "first, and start migbatch-node there"
        )
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, found in counts.items():
        own = {kind: found.get(kind, 0) for kind in every if kind in most[name]}
        row = {**own, FILLER: 0, **(spare(version) if lending else {})}
        alike.setdefault(tuple(row.items()), []).append(name)
    partitions: dict[str, list[str]] = {}
    for name in counts:
        for partition in slurm[name].partitions:
            partitions.setdefault(partition, []).append(name)
    return Site(
        version=version,
        nodes=[NodeLine(fold(names), dict(found)) for found, names in alike.items()],
        catalog=NodeLine(catalog, {**every, FILLER: 0, **WAITING}),
        partitions=[
            PartitionLine(name, fold(nodes), preemption(lending, name)) for name, nodes in sorted(partitions.items())
        ],
        lends=bool(lending),
        job_submit=True,
        cli_filter=True,
    )


def base_counts(geometries: Iterable[Geometry]) -> dict[str, int]:
    """Return slurm.conf's counts: each GPU full of the profile that fits most often, which always can be placed."""
    found: dict[str, int] = {}
    for geometry in geometries:
        info = max(geometry.profiles, key=lambda i: (i.max_instances, not i.profile.suffix, -i.memory_slices))
        found[info.profile.gres_type] = found.get(info.profile.gres_type, 0) + info.max_instances
    return found


def most_counts(geometries: Iterable[Geometry]) -> Mapping[str, int]:
    """Return the most of each profile that a node with these GPUs could ever offer."""
    found: dict[str, int] = {}
    for geometry in geometries:
        for info in geometry.profiles:
            found[info.profile.gres_type] = found.get(info.profile.gres_type, 0) + info.max_instances
    return found

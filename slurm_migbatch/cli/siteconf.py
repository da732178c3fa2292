"""The site according to the record and Slurm, for `migbatch install`."""

from __future__ import annotations

from collections.abc import Collection

from slurm_migbatch.cli.common import open_record, slurm_client
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import Config
from slurm_migbatch.daemon.catalog import geometry_of
from slurm_migbatch.daemon.inventory import Inventory
from slurm_migbatch.install.reported import describe
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.site import Site
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.store.errors import StoreError


class NothingReported(Failure):
    """No node has reported GPUs in MIG mode."""


def read(config: Config) -> Site:
    """Return the site from the record and from Slurm, without the hooks.

    Raises:
        NothingReported: no node has reported GPUs yet.
        Failure: Slurm cannot be queried.
    """
    try:
        with open_record(config) as store:
            inventory = store.inventory()
    except StoreError as error:
        raise NothingReported(f"no node has reported yet: {error}") from None
    client = slurm_client(config)
    try:
        version, known = client.version(), {row.name for row in client.nodes()}
    except SlurmError as error:
        raise Failure(f"cannot read Slurm's nodes and release: {error}") from None
    gpus = cut_by_mig(inventory, known)
    if not gpus:
        raise NothingReported(
            "no node in Slurm has reported MIG GPUs yet; run `migbatch install --role node` on the nodes "
            "first, and start migbatch-node there"
        )
    lending = config.lending.partitions if config.lending.enabled else ()
    return describe(gpus, version, config.cluster.catalog_nodes, lending)


def cut_by_mig(inventory: Inventory, known: Collection[str]) -> dict[str, list[Geometry]]:
    """Return the geometries of GPUs in MIG mode, by node, for nodes in Slurm."""
    found: dict[str, list[Geometry]] = {}
    for name, gpus in inventory.items():
        geometries = [geometry for gpu in gpus if (geometry := geometry_of(gpu)) is not None]
        if geometries and name in known:
            found[name] = geometries
    return found

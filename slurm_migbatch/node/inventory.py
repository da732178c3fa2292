"""Describe the node's GPUs for the controller, once at start and whenever something changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_migbatch.mig.driver import DriverError, NotMig
from slurm_migbatch.node.gpus import Gpus

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu


def inventory(gpus: Gpus) -> list[dict[str, object]]:
    """Describe each managed GPU; those without MIG support or withdrawn have no geometry. Raises DriverError.

    `mig` is missing where the driver does not tell, so that the controller keeps the geometry that it knows.
    """
    withdrawn = gpus.withdrawn()
    return [_entry(gpu, gpus, withdrawn.get(gpu.uuid)) for gpu in gpus.listed()]


def _entry(gpu: NvmlGpu, gpus: Gpus, withdrawn: DriverError | None) -> dict[str, object]:
    entry: dict[str, object] = {"uuid": gpu.uuid, "minor": gpu.minor, "index": gpu.index, "name": gpu.name}
    try:
        if withdrawn is not None:
            raise withdrawn
        entry["mig"] = gpu.mig_mode()[0]
        entry["geometry"] = gpus.geometry(gpu).to_dict()
        entry |= {key: value for key, value in gpu.facts().items() if key not in entry}
    except DriverError as error:
        if isinstance(error, NotMig):
            entry["mig"] = False
        elif "geometry" not in entry:
            entry.pop("mig", None)  # the controller cannot use a GPU without a geometry
        entry["problem"] = str(error)
    return entry

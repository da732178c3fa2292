"""Geometries of the GPUs in the record."""

from __future__ import annotations

from sqlalchemy import Connection, select

from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.store.models import Gpu


def geometries(connection: Connection) -> dict[str, Geometry]:
    """Return the geometry of each GPU by its UUID, including removed GPUs; invalid ones are skipped."""
    found: dict[str, Geometry] = {}
    for uuid, described in connection.execute(select(Gpu.uuid, Gpu.geometry).where(Gpu.mig)):
        try:
            found[uuid] = Geometry.from_dict(described)
        except GeometryError:
            continue
    return found


def whole_gpus(connection: Connection) -> dict[tuple[str, int], tuple[int, int]]:
    """Return compute and memory slices of whole GPUs, by a profile that they have and its memory slices."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for geometry in set(geometries(connection).values()):
        for info in geometry.profiles:
            whole = (geometry.compute_slices, geometry.memory_slices)
            found.setdefault((info.profile.name, info.memory_slices), whole)
    return found

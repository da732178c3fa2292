"""Define the GPUs that can be simulated: MIG geometry, and the time to create and destroy an instance.

The figures equal those of the simulated driver in `testbed/driver` (a test compares them), which are from
NVIDIA's MIG user guide and from measured listings. They are repeated here so that simulating a cluster does not
require a C compiler. A live system never reads them: there every geometry comes from NVML.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload import gpufacts

_Row: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Profile, (id, compute, memory, MiB, SMs, copy engines, decoders, encoders, JPEG, OFA, max instances), starts."""

CREATE_S: Final = {1: 0.16, 2: 0.17, 3: 0.20, 4: 0.21, 7: 0.24}
"""Seconds to create an instance with its compute instance, by compute slices (measured on A100, public figures)."""
DESTROY_S: Final = {1: 0.20, 2: 0.20, 3: 0.21, 4: 0.21, 7: 0.22}
"""Seconds to destroy one."""

_TABLE: Final[Mapping[str, tuple[str, tuple[_Row, ...]]]] = {
    "a30": ("NVIDIA A30", (
        ("4g.24gb", (0, 4, 4, 24064, 56, 4, 4, 0, 1, 1, 1), (0,)),
        ("2g.12gb", (5, 2, 2, 11968, 28, 2, 2, 0, 0, 0, 2), (0, 2)),
        ("2g.12gb+me", (6, 2, 2, 11968, 28, 2, 2, 0, 1, 1, 1), (0, 2)),
        ("1g.6gb", (14, 1, 1, 5952, 14, 1, 0, 0, 0, 0, 4), (0, 1, 2, 3)),
        ("1g.6gb+me", (21, 1, 1, 5952, 14, 1, 1, 0, 1, 1, 1), (0, 1, 2, 3)),
    )),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", (
        ("7g.40gb", (0, 7, 8, 40192, 98, 7, 5, 0, 1, 1, 1), (0,)),
        ("4g.20gb", (5, 4, 4, 19968, 56, 4, 2, 0, 0, 0, 1), (0,)),
        ("3g.20gb", (9, 3, 4, 19968, 42, 3, 2, 0, 0, 0, 2), (0, 4)),
        ("2g.10gb", (14, 2, 2, 9856, 28, 2, 1, 0, 0, 0, 3), (0, 2, 4)),
        ("1g.10gb", (15, 1, 2, 9856, 14, 1, 1, 0, 0, 0, 4), (0, 2, 4, 6)),
        ("1g.5gb", (19, 1, 1, 4864, 14, 1, 0, 0, 0, 0, 7), (0, 1, 2, 3, 4, 5, 6)),
        ("1g.5gb+me", (20, 1, 1, 4864, 14, 1, 1, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)),
    )),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", (
        ("7g.80gb", (0, 7, 8, 80896, 98, 7, 5, 0, 1, 1, 1), (0,)),
        ("4g.40gb", (5, 4, 4, 40192, 56, 4, 2, 0, 0, 0, 1), (0,)),
        ("3g.40gb", (9, 3, 4, 40192, 42, 3, 2, 0, 0, 0, 2), (0, 4)),
        ("2g.20gb", (14, 2, 2, 19968, 28, 2, 1, 0, 0, 0, 3), (0, 2, 4)),
        ("1g.20gb", (15, 1, 2, 19968, 14, 1, 1, 0, 0, 0, 4), (0, 2, 4, 6)),
        ("1g.10gb", (19, 1, 1, 9728, 14, 1, 0, 0, 0, 0, 7), (0, 1, 2, 3, 4, 5, 6)),
        ("1g.10gb+me", (20, 1, 1, 9728, 14, 1, 1, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)),
    )),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", (
        ("7g.80gb", (0, 7, 8, 81152, 132, 8, 7, 0, 7, 1, 1), (0,)),
        ("4g.40gb", (5, 4, 4, 40448, 64, 4, 4, 0, 4, 0, 1), (0,)),
        ("3g.40gb", (9, 3, 4, 40448, 60, 3, 3, 0, 3, 0, 2), (0, 4)),
        ("2g.20gb", (14, 2, 2, 20096, 32, 2, 2, 0, 2, 0, 3), (0, 2, 4)),
        ("1g.20gb", (15, 1, 2, 20096, 26, 1, 1, 0, 1, 0, 4), (0, 2, 4, 6)),
        ("1g.10gb", (19, 1, 1, 9984, 16, 1, 1, 0, 1, 0, 7), (0, 1, 2, 3, 4, 5, 6)),
        ("1g.10gb+me", (20, 1, 1, 9984, 16, 1, 1, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)),
    )),
    "h200": ("NVIDIA H200", (
        ("7g.141gb", (0, 7, 8, 143360, 132, 8, 7, 0, 7, 1, 1), (0,)),
        ("4g.71gb", (5, 4, 4, 71424, 64, 4, 4, 0, 4, 0, 1), (0,)),
        ("3g.71gb", (9, 3, 4, 71424, 60, 3, 3, 0, 3, 0, 2), (0, 4)),
        ("2g.35gb", (14, 2, 2, 33280, 32, 2, 2, 0, 2, 0, 3), (0, 2, 4)),
        ("1g.35gb", (15, 1, 2, 33280, 26, 1, 1, 0, 1, 0, 4), (0, 2, 4, 6)),
        ("1g.18gb", (19, 1, 1, 16384, 16, 1, 1, 0, 1, 0, 7), (0, 1, 2, 3, 4, 5, 6)),
        ("1g.18gb+me", (20, 1, 1, 16384, 16, 1, 1, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)),
    )),
    "b200": ("NVIDIA B200", (
        ("7g.180gb", (0, 7, 8, 182784, 148, 16, 7, 0, 7, 1, 1), (0,)),
        ("4g.90gb", (5, 4, 4, 91136, 72, 8, 4, 0, 4, 0, 1), (0,)),
        ("3g.90gb", (9, 3, 4, 91136, 68, 6, 3, 0, 3, 0, 2), (0, 4)),
        ("2g.45gb", (14, 2, 2, 45312, 36, 4, 2, 0, 2, 0, 3), (0, 2, 4)),
        ("1g.45gb", (15, 1, 2, 45312, 30, 2, 1, 0, 1, 0, 4), (0, 2, 4, 6)),
        ("1g.23gb", (19, 1, 1, 20992, 18, 2, 1, 0, 1, 0, 7), (0, 1, 2, 3, 4, 5, 6)),
        ("1g.23gb+me", (20, 1, 1, 20992, 18, 2, 1, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6)),
    )),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (
        ("4g.96gb", (0, 4, 12, 97408, 188, 4, 4, 4, 4, 1, 1), (0,)),
        ("4g.96gb+gfx", (32, 4, 12, 97408, 188, 4, 4, 4, 4, 1, 1), (0,)),
        ("2g.48gb", (5, 2, 6, 48512, 94, 2, 2, 2, 2, 0, 2), (0, 6)),
        ("2g.48gb+gfx", (35, 2, 6, 48512, 94, 2, 2, 2, 2, 0, 2), (0, 6)),
        ("2g.48gb+me.all", (64, 2, 6, 48512, 94, 2, 4, 4, 4, 1, 1), (0, 6)),
        ("2g.48gb-me", (66, 2, 6, 48512, 94, 2, 0, 0, 0, 0, 2), (0, 6)),
        ("1g.24gb", (14, 1, 3, 24192, 46, 1, 1, 1, 1, 0, 4), (0, 3, 6, 9)),
        ("1g.24gb+gfx", (47, 1, 3, 24192, 46, 1, 1, 1, 1, 0, 4), (0, 3, 6, 9)),
        ("1g.24gb+me", (21, 1, 3, 24192, 46, 1, 1, 1, 1, 1, 1), (0, 3, 6, 9)),
        ("1g.24gb+me.all", (65, 1, 3, 24192, 46, 1, 4, 4, 4, 1, 1), (0, 3, 6, 9)),
        ("1g.24gb-me", (67, 1, 3, 24192, 46, 1, 0, 0, 0, 0, 4), (0, 3, 6, 9)),
    )),
}  # fmt: skip
"""NVML name and profiles of each model; a placement's size is the profile's memory slices."""


class UnknownGpu(ValueError):
    """A GPU that cannot be simulated; the message lists the known ones."""


@lru_cache(maxsize=64)
def geometry(gpu: str) -> Geometry:
    """Return the geometry of a model by its short name, `a100-80gb`; raises UnknownGpu."""
    if gpu not in _TABLE:
        raise UnknownGpu(f"{gpu!r} cannot be simulated; known GPUs: {', '.join(_TABLE)}")
    name, rows = _TABLE[gpu]
    return Geometry(name, [_info(*row) for row in rows])


@lru_cache(maxsize=64)
def whole(gpu: str) -> Geometry:
    """Return the geometry of the same GPU without MIG, with one profile, the whole GPU; raises UnknownGpu."""
    return without_mig(geometry(gpu))


def without_mig(model: Geometry) -> Geometry:
    """Return the geometry with one profile, the whole GPU; the model itself if it has no other."""
    return model if len(model.profiles) == 1 else Geometry(f"{model.name} without MIG", [model.full])


def models() -> tuple[str, ...]:
    """Return the short names of the models."""
    return tuple(_TABLE)


@lru_cache(maxsize=64)
def named(short_name: str) -> Geometry | None:
    """Return the geometry for a GPU's name in measurements, `h200-141gb`; None if it cannot be simulated."""
    shapes = map(geometry, _TABLE)
    return next((g for g in shapes if gpufacts.short_name(g.name, g.full.profile.memory_gb) == short_name), None)


def _info(profile: str, counts: tuple[int, ...], starts: tuple[int, ...]) -> ProfileInfo:
    number, compute, memory, mib, sms, copies, decoders, encoders, jpegs, ofas, most = counts
    places = tuple(Placement(start, memory) for start in starts)
    return ProfileInfo(
        Profile.parse(profile), number, compute, memory, mib, sms, copies, decoders, encoders, jpegs, ofas, most, places
    )

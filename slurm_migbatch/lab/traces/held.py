"""Read from a list of TRES which GPUs or slices a job held, in the names that sites give them."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Final, NamedTuple

from slurm_migbatch.lab.traces.mignames import profile_on
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres

_COMPUTE: Final = re.compile(r"(?<![0-9a-z])([1-7])g(?![0-9a-z])", re.IGNORECASE)
"""Compute slices in a type that does not say the memory: `1g`, `a100_3g`."""
_SHARES: Final = frozenset({"shard", "mps"})


class HeldGpus(NamedTuple):
    """What a job is replayed on: `gpus` slices of `profile`, or whole GPUs (None).

    `remark`: what a notice should say of such jobs, empty if nothing; why they are skipped if `gpus` is 0.
    """

    profile: Profile | None
    gpus: int
    remark: str = ""


class _Counts(NamedTuple):
    """Slices by profile, slices by compute slices where that is all that is known, slices of which nothing is known,
    whole GPUs, and whether the job had shares of a GPU.
    """

    sized: Counter[Profile]
    bare: Counter[int]
    unknown: int
    whole: int
    shares: bool


def held_in(tres_list: str, geometry: Geometry | None) -> HeldGpus:
    """Return the largest profile and the number of slices, or the number of GPUs if the job had any.

    The profile is that of the geometry, if it has one under another name. Raises GresError and ProfileError.
    """
    return _of_gres(",".join(entry for entry in re.split("[,;]", tres_list) if entry.startswith("gres/")), geometry)


@lru_cache(maxsize=1 << 12)
def _of_gres(entries: str, geometry: Geometry | None) -> HeldGpus:
    counts = _counted(entries)
    sized, unknown, remark = Counter(counts.sized), counts.unknown, ""
    for compute, count in counts.bare.items():
        profile = None if geometry is None else _least_memory(geometry, compute)
        if profile is None:
            unknown += count
        else:
            sized[profile] += count
            remark = f"on slices {compute}g, whose memory is not named, are replayed on {profile}"
    if unknown and geometry is not None:
        return HeldGpus(None, 0, "on slices of unknown size")
    total = sized.total() + unknown + counts.whole
    if unknown:
        return HeldGpus(None, total, "on slices of unknown size are replayed on whole GPUs")
    if sized and counts.whole:
        return HeldGpus(None, total, "on slices and whole GPUs at once are replayed on whole GPUs")
    if sized:
        largest = max(sized)
        return HeldGpus(largest if geometry is None else profile_on(geometry, largest), total, remark)
    shares = "with shares of a GPU (gres/shard, gres/mps)" if counts.shares else ""
    if total:
        return HeldGpus(None, total, f"{shares} are replayed on whole GPUs" if shares else "")
    return HeldGpus(None, 0, shares or "without a GPU")


def _counted(entries: str) -> _Counts:
    sized: Counter[Profile] = Counter()
    bare: Counter[int] = Counter()
    gpus: Counter[bool] = Counter()
    slices: Counter[str] = Counter()
    found = [tres for tres in gres.parse(entries) if tres.count]
    for tres in found:
        kind = f"{tres.name}:{tres.type or ''}"
        profile, compute = gres.profile_in(kind), _COMPUTE.search(kind)
        if profile is not None:
            sized[Profile.parse(profile)] += tres.count
        elif compute is not None:
            bare[int(compute[1])] += tres.count
        elif tres.name == "gpu":
            gpus[tres.type is not None] += tres.count
        if profile is not None or compute is not None:
            slices[tres.name] += tres.count
    # an entry without a type counts those with a type too
    untyped = sum(tres.count for tres in found if tres.name == "mig" and tres.type is None)
    return _Counts(
        sized,
        bare,
        max(untyped - slices["mig"], 0),
        max(gpus[True], gpus[False] - slices["gpu"]),
        any(tres.name in _SHARES for tres in found),
    )


def _least_memory(geometry: Geometry, compute: int) -> Profile | None:
    """Return the profile that a name of compute slices alone means: that with the least memory."""
    alike = [info.profile for info in geometry.profiles if info.profile.compute == compute and not info.profile.suffix]
    return min(alike, default=None)

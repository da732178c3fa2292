"""What the simulated GPU models offer, in GRES spelling, for the catalog and the counts of slurm.conf."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import TestbedError

FILLER = "none"


@dataclass(frozen=True)
class GpuType:
    """One model: its profiles, smallest first, and how many slices of the smallest fit (the constant K per GPU)."""

    name: str
    profiles: tuple[str, ...]
    slots: int

    @property
    def smallest(self) -> str:
        """The profile of which `slots` fit."""
        return self.profiles[0]


_TYPES = {
    kind.name: kind
    for kind in (
        GpuType("a30", ("1g.6gb", "1g.6gb.me", "2g.12gb", "2g.12gb.me", "4g.24gb"), 4),
        GpuType("a100-40gb", ("1g.5gb", "1g.5gb.me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"), 7),
        GpuType("a100-80gb", ("1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"), 7),
        GpuType("h100-80gb", ("1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"), 7),
        GpuType("h200", ("1g.18gb", "1g.18gb.me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"), 7),
        GpuType("b200", ("1g.23gb", "1g.23gb.me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"), 7),
        GpuType("rtx-pro-6000", ("1g.24gb", "1g.24gb.me", "2g.48gb", "2g.48gb.me", "4g.96gb"), 4),
    )
}


def gpu_type(name: str) -> GpuType:
    """The model `name`."""
    try:
        return _TYPES[name]
    except KeyError:
        raise TestbedError(f"GPU type {name!r} is not known; choose one of {', '.join(_TYPES)}") from None


def base_counts(kind: GpuType, gpus: int) -> dict[str, int]:
    """Counts of slurm.conf for a node: the smallest slices everywhere, which can always be placed on empty GPUs."""
    counts = dict.fromkeys(kind.profiles, 0)
    counts[kind.smallest] = kind.slots * gpus
    counts[FILLER] = 0
    return counts

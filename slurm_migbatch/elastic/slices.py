"""Read this process's slice from TaskProlog's environment, and compute the largest micro-batch that fits.

`MIGBATCH_BATCH` is not used: it is advice for the profile at submission, but an elastic job may run on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slurm_migbatch.elastic.errors import ElasticError

MIB = 1 << 20


class Slice(NamedTuple):
    """The slice to train on. `profile` is empty and `memory_mib` None outside a job with a slice.

    `profile` is in GRES spelling (`1g.10gb.me`); `memory_mib` is the memory of the slice, or of the smallest one.
    """

    profile: str = ""
    memory_mib: int | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Slice:
        """Read it from the environment of a task."""
        memory = environ.get("MIGBATCH_MEMORY_MIB", "")
        profile = environ.get("MIGBATCH_PROFILE", "").partition(",")[0].replace("+", ".")
        return cls(profile, int(memory) if memory.isascii() and memory.isdigit() else None)

    def __str__(self) -> str:
        size = "" if self.memory_mib is None else f" ({self.memory_mib} MiB)"
        return f"slice {self.profile}{size}" if self.profile else "no slice"


@dataclass(frozen=True)
class Memory:
    """The largest micro-batch by a model of memory: fixed_bytes + n * bytes_per_item <= (1 - headroom) * slice.

    Attributes:
        bytes_per_item: activations and inputs of one item.
        fixed_bytes: weights, gradients, optimizer, the CUDA context (some 400 MiB).
        headroom: share of the slice that is left free, for fragmentation.
    """

    bytes_per_item: float
    fixed_bytes: float = 0.0
    headroom: float = 0.08

    def __post_init__(self) -> None:
        if not (self.bytes_per_item > 0 and self.fixed_bytes >= 0 and 0 <= self.headroom < 1):
            raise ElasticError(
                f"memory of {self.bytes_per_item} bytes an item and {self.fixed_bytes} besides, with headroom "
                f"{self.headroom} is invalid: items need more than 0 bytes, and headroom is from 0 to less than 1"
            )

    def __call__(self, mig_slice: Slice) -> int | None:
        """Return how many items fit; None if the memory is unknown."""
        if mig_slice.memory_mib is None:
            return None
        return int((mig_slice.memory_mib * MIB * (1.0 - self.headroom) - self.fixed_bytes) // self.bytes_per_item)


Fits = int | Mapping[str, int] | Memory | Callable[[Slice], int | None] | None
"""Limit of a micro-batch: a number, a table by profile, a memory model, or a function of the slice."""


def largest(fits: Fits, mig_slice: Slice, batch: int) -> int:
    """Return the largest micro-batch for this slice, at most the whole `batch`.

    Outside a job with a slice (a test on a workstation), and with `fits` None, that is the whole batch; a table may
    have an entry "" for it.

    Raises:
        ElasticError: not even one item fits, or the table lacks the profile.
    """
    if fits is None:
        return batch
    if isinstance(fits, int):
        most: int | None = fits
    elif isinstance(fits, Mapping):
        most = fits.get(mig_slice.profile)
        if most is None and mig_slice.profile:
            raise ElasticError(
                f"fits= has no entry for {mig_slice.profile}, only for {', '.join(sorted(filter(None, fits)))}: "
                "add it, or bound the job with min= and max= in its comment"
            )
    else:
        most = fits(mig_slice)
    if most is None:
        return batch
    if most < 1:
        raise ElasticError(f"not even one item fits on {mig_slice}: request more with min= in the job's comment")
    return min(int(most), batch)

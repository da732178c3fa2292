"""Define the importer of one laboratory: which files it reads, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.profiling.csvfile import Problems
from slurm_migbatch.profiling.measurement import Measurement


class Reading(NamedTuple):
    """Points as read, copies of one point included, and notices for the user."""

    rows: list[Measurement]
    notices: list[str]


@dataclass(frozen=True)
class Laboratory:
    """One importer.

    Attributes:
        name: as shown and written in the column `source`.
        headers: sets of columns in lower case; a file that has all of one set belongs to the laboratory.
        read: the points in such files below one folder; bad lines are added to the Problems.
    """

    name: str
    headers: tuple[frozenset[str], ...]
    read: Callable[[Path, Sequence[Path], Problems], Reading]

    def owns(self, header: Sequence[str]) -> bool:
        """Return whether a file with this header is the laboratory's."""
        return any(columns <= set(header) for columns in self.headers)


class LaboratorySlice(NamedTuple):
    """One MIG profile: GPU slices, memory slices, streaming multiprocessors, memory in MiB."""

    compute: int
    memory: int
    sms: int
    mib: int


A100_40: dict[str, LaboratorySlice] = {
    "1g.5gb": LaboratorySlice(1, 1, 14, 4864),
    "2g.10gb": LaboratorySlice(2, 2, 28, 9856),
    "3g.20gb": LaboratorySlice(3, 4, 42, 19968),
    "4g.20gb": LaboratorySlice(4, 4, 56, 19968),
    "7g.40gb": LaboratorySlice(7, 8, 98, 40192),
}
"""As `nvidia-smi mig -lgip` lists the profiles of an A100 40GB."""
A100_80: dict[str, LaboratorySlice] = {
    "1g.10gb": LaboratorySlice(1, 1, 14, 9728),
    "2g.20gb": LaboratorySlice(2, 2, 28, 19968),
    "3g.40gb": LaboratorySlice(3, 4, 42, 40192),
    "4g.40gb": LaboratorySlice(4, 4, 56, 40192),
    "7g.80gb": LaboratorySlice(7, 8, 98, 80896),
}
"""The same for an A100 80GB."""


def known(name: str) -> ModelFacts | None:
    """Return the specifications of the model that a laboratory calls `name`."""
    return next((facts for facts in BUILT_IN if name == facts.name or name in facts.aliases), None)

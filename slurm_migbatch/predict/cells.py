"""Represent points of the request grid as arrays: batch, slice, input and processes, all relative to the whole GPU.

Shares of a slice come from its SM count and memory slices, never from the g in its name: a 3g.40gb of an H100 has 60 of
132 SMs, a 1g.20gb has 26.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from slurm_migbatch.mig.geometry import ProfileInfo
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.known import Known
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.catalog import GpuKind
from slurm_migbatch.workload.gpufacts import (
    LEAST_SHARE,
    LESS,
    GpuModelFacts,
    facts_of,
    guess,
    memory_gb_of,
    short_name,
)
from slurm_migbatch.workload.modelfile import tagged_side

Array = npt.NDArray[np.float64]

_SHORT = re.compile(r"[a-z0-9-]+-([0-9]{1,4})gb(?:-v[0-9]+)?")
_VARIANT = re.compile(r"-v[0-9]+$")
USABLE_SHARE = 98 / 108
"""SMs of the largest MIG profile over those of the whole A100, if a table does not say and SMS does not; the same on
other GPUs of seven slices.
"""
SMS: Final[Mapping[int, Mapping[int, int]]] = {
    56: {1: 14, 2: 28, 4: 56},
    114: {1: 14, 2: 30, 3: 46, 4: 62, 7: 114},
    132: {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
    148: {1: 18, 2: 36, 3: 68, 4: 72, 7: 148},
    188: {1: 46, 2: 94, 4: 188},
}
"""SMs of a slice by the SMs of the whole GPU (A30, H100 PCIe, H100 and H200, B200, RTX PRO 6000) and its compute
slices, if a table does not say: from Hopper on they are not in proportion. From published listings of `nvidia-smi mig
-lgip`, but those of a B200's 3g, 4g and 7g are estimates. The simulated GPUs have the same (a test compares them).
"""
SMS_OF_DOUBLE: Final[Mapping[int, int]] = {132: 26, 148: 30}
"""Those of a slice with one compute slice and twice the memory, where they are more than without."""


@dataclass(frozen=True)
class GpuSpec:
    """A kind of GPU as predictions see it: a short name, the speed of the whole GPU, memory (0: unknown)."""

    name: str
    facts: GpuModelFacts
    memory_gb: int = 0

    @classmethod
    def of_kind(cls, kind: GpuKind) -> GpuSpec:
        """Return the GPU of a site's catalog."""
        sms = kind.sm_count or kind.full.sm_count
        facts = GpuModelFacts(kind.tflops, kind.bandwidth_gbs, sms, kind.geometry.memory_slices)
        # GPUs that differ only in the slices their drivers allow are equally fast
        return cls(_VARIANT.sub("", kind.name), facts, kind.full.profile.memory_gb)

    @classmethod
    def of_rows(cls, rows: Sequence[Measurement]) -> GpuSpec:
        """Return the GPU that rows of one GPU name describe."""
        name = rows[0].gpu
        named = _SHORT.fullmatch(name)
        # our short names include the memory of the whole GPU, which need not have been measured
        measured = [Profile.parse(row.profile) for row in rows if row.profile]
        full = next((profile.memory_gb for profile in measured if profile.compute == 7), 0)
        facts = facts_of(name)
        if facts is None:  # computed from slices: the whole GPU need not have been measured
            stated = memory_gb_of(name)
            memory = int(named[1]) if named else full or stated or max((_whole_gb(row) for row in rows), default=0)
            compute, memory_slices = _whole_slices(rows, memory)
            facts = guess(max((_whole_sms(row, compute) for row in rows), default=0) or 100, memory or 40)
            facts = facts._replace(memory_slices=memory_slices)
        else:
            memory = int(named[1]) if named else full or max(memory_gb_of(name), *(p.memory_gb for p in measured), 0)
            # a name without the memory may be that of a smaller variant: only an A100 40GB has a 3g.20gb
            sliced = min(filter(None, map(_whole_gb, rows)), default=memory)
            if not (named or full) and LEAST_SHARE * memory <= sliced <= LESS * memory:
                memory = sliced
            facts = facts_of(f"{name} {memory}GB") or facts
        return cls(short_name(name, memory), facts, memory)


_MEMORY_SLICES: Final = {1: 1, 2: 2, 3: 4, 4: 4}
"""Memory slices of 8 by compute slices of 7, where a row does not say; all for more."""


def _whole_slices(rows: Sequence[Measurement], memory_gb: int) -> tuple[int, int]:
    """Return the compute and memory slices of the whole unlisted GPU, computed from the largest slice in rows; 7 and 8
    if they do not follow from it.
    """
    sliced = [(Profile.parse(row.profile), row.memory_slices) for row in rows if row.profile and row.memory_slices]
    profile, held = max(sliced, key=lambda part: part[0].memory_gb, default=(None, 8))
    if profile is None or not profile.memory_gb or profile.memory_gb > memory_gb / LESS:
        return 7, 8
    memory_slices = round(held * memory_gb / profile.memory_gb)
    is_whole = profile.memory_gb >= LESS * memory_gb
    compute = profile.compute if is_whole else GpuModelFacts(0, 0, memory_slices=memory_slices).compute_slices
    return compute, memory_slices


def _whole_sms(row: Measurement, whole: int) -> int:
    """Return the SMs of a GPU of `whole` compute slices, computed from a row's slice."""
    sms, compute = row.sm_count or 0, row.compute_slices or (Profile.parse(row.profile).compute if row.profile else 0)
    return sms if not compute or compute >= whole else round(sms * whole / compute)


def _whole_gb(row: Measurement) -> int:
    """Return the GB of the whole GPU, computed from a row's profile; 0: no profile."""
    if not row.profile:
        return 0
    profile = Profile.parse(row.profile)
    memory_slices = row.memory_slices or _MEMORY_SLICES.get(profile.compute, 8)
    return profile.memory_gb if memory_slices >= 8 else round(profile.memory_gb * 8 / memory_slices)


@dataclass(frozen=True)
class Cells:
    """Points as columns of equal length.

    `batch` and `procs` are counts; `sm` and `memory` the slice's shares of the whole GPU's SMs and memory slices;
    `work` and `volume` the operations and bytes of an item relative to the model's reference size.
    """

    batch: Array
    sm: Array
    memory: Array
    procs: Array
    work: Array
    volume: Array

    def __len__(self) -> int:
        return len(self.batch)

    @cached_property
    def logs(self) -> Cells:
        """Logarithms of the columns, cached because a parameter search reads them repeatedly."""
        return Cells(*(np.log(getattr(self, field.name)) for field in fields(self)))

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | Sequence[int]) -> Cells:
        """Return the points at `index`."""
        chosen = np.asarray(index) if len(index) else np.zeros(0, dtype=np.intp)
        return Cells(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def join(self, other: Cells) -> Cells:
        """Return the points of both."""
        return Cells(
            *(np.concatenate([getattr(self, field.name), getattr(other, field.name)]) for field in fields(self))
        )

    @classmethod
    def of_rows(cls, rows: Sequence[Measurement], gpu: GpuSpec, known: Known) -> Cells:
        """Return the measured rows of one model on one GPU."""
        points = [
            (row.batch, *shares_of(row, gpu), row.procs, known.work(size), known.volume(size))
            for row in rows
            for size in [row.input_size or _usual_size(row, known)]
        ]
        return cls(*np.array(points, dtype=np.float64).reshape(-1, len(fields(cls))).T.copy())

    @classmethod
    def grid(cls, batch: int, size: int, infos: Sequence[ProfileInfo], gpu: GpuSpec, known: Known) -> Cells:
        """Return one request on several profiles of one GPU."""
        ones = np.ones(len(infos))
        facts = gpu.facts
        return cls(
            batch * ones,
            np.array([max(info.sm_count, 1) / max(facts.sm_count, info.sm_count, 1) for info in infos]),
            np.array([info.memory_slices / facts.memory_slices for info in infos]),
            ones,
            known.work(size) * ones,
            known.volume(size) * ones,
        )


def _usual_size(row: Measurement, known: Known) -> int:
    """Return the input size of a row that states none."""
    return max(known.reference, tagged_side(row.model)) if known.unit == "px" else known.reference


def shares_of(row: Measurement, gpu: GpuSpec) -> tuple[float, float]:
    """Return a row's share of the SMs and of the memory of its GPU, each in (0, 1]."""
    if not row.profile and row.compute_slices is None:
        return 1.0, 1.0
    facts = gpu.facts
    total = facts.compute_slices
    compute = row.compute_slices or Profile.parse(row.profile).compute
    # 3g and 4g hold half of the memory of a 7-slice GPU, a 1g with double memory a quarter
    memory_gb = Profile.parse(row.profile).memory_gb if row.profile else 0
    double = total == 7 and compute == 1 and gpu.memory_gb > 0 and memory_gb > 1.5 * gpu.memory_gb / 8
    wide = row.memory_slices == 2 if row.memory_slices else double
    sms = row.sm_count or (SMS_OF_DOUBLE.get(facts.sm_count) if wide and compute == 1 else None)
    sms = sms or SMS.get(facts.sm_count, {}).get(compute)
    usable = USABLE_SHARE if total == 7 else 1.0
    sm = sms / facts.sm_count if sms and facts.sm_count else usable * compute / total
    if total < 7:
        return min(sm, 1.0), min(compute / total, 1.0)
    if row.memory_slices:
        return min(sm, 1.0), min(row.memory_slices / facts.memory_slices, 1.0)
    return min(sm, 1.0), (2 if double else _MEMORY_SLICES.get(compute, 8)) / 8

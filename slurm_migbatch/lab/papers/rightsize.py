"""Choose how large a slice and a batch a model can use.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541) sizes every model at its knee, the GPU share beyond which it gains
little, and chooses the batch of the highest efficacy under the latency objective. Only the abstracts were available:
this is a reconstruction. Shares are MIG compute slices here and MPS percentages in the paper; the threshold of the
knee (5 % of latency for one more slice) is our choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from slurm_migbatch.lab.papers.settings import InstanceSetting
from slurm_migbatch.mig.profile import Profile

GAIN: Final = 0.05
"""Relative fall of latency for which one more compute slice is still worth it."""
GUARD: Final = 0.5
"""Part of the objective that a batch may take: a request may just have missed the previous batch."""


def knee(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of compute slices from which no larger one gains enough (reconstruction).

    A step from n to m slices is worth it if latency falls by more than `GAIN` for each of the m - n slices; the
    best of all larger sizes counts, so that one flat step does not end the search.

    Args:
        seconds: duration of one batch by number of compute slices; sizes on which it does not fit are left out.
    """
    sizes = sorted(seconds)
    for n in sizes:
        if all(1 - seconds[m] / seconds[n] <= GAIN * (m - n) for m in sizes if m > n):
            return n
    raise ValueError("no size is given: a model needs at least one slice on which it fits")


def efficacy(batch: int, seconds: float, share: float) -> float:
    """Return eta = throughput / (latency * share) = batch / (seconds^2 * share) (reconstruction)."""
    return batch / (seconds * seconds * share)


def rightsize(settings: Iterable[InstanceSetting], slo_s: float, whole: int) -> InstanceSetting | None:
    """Return the setting of the highest efficacy that keeps the objective, on at most the slices of its batch's knee.

    A batch keeps it if it takes at most half of it: all items are ready, so that no time to assemble a batch counts.

    Args:
        settings: measured settings; those with more than one process are ignored.
        whole: compute slices of the GPU.

    Returns:
        None if no setting keeps the objective.
    """
    single = [setting for setting in settings if setting.procs == 1]
    knees = {batch: knee(curve) for batch, curve in _by_batch(single).items()}
    usable = [s for s in single if s.seconds <= GUARD * slo_s and s.profile.compute <= knees[s.batch]]
    return max(
        usable,
        key=lambda s: (efficacy(s.batch, s.seconds, s.profile.compute / whole), -s.profile.compute),
        default=None,
    )


def useful(setting: InstanceSetting, settings: Iterable[InstanceSetting]) -> int:
    """Return the compute slices that a run at this setting uses: its own, but no more than its batch's knee."""
    return min(setting.profile.compute, knee(_by_batch(settings)[setting.batch]))


def leanest(settings: Mapping[Profile, InstanceSetting]) -> InstanceSetting:
    """Return the setting with the most items per second per compute slice, of equal ones the smaller slice."""
    return max(settings.values(), key=lambda s: (s.rate / s.profile.compute, -s.profile.compute))


def _by_batch(settings: Iterable[InstanceSetting]) -> dict[int, dict[int, float]]:
    curves: dict[int, dict[int, float]] = {}
    for s in settings:
        if s.procs == 1:
            curve = curves.setdefault(s.batch, {})
            curve[s.profile.compute] = min(s.seconds, curve.get(s.profile.compute, s.seconds))
    return curves

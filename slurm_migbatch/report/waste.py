"""What a run held but did not use, and what it should request next time. Pure: figures in, findings out.

The sufficient slice is determined as for recurring jobs (`predict.recurring`): from the memory that runs held, with its
margin, and, if sampled, from their use of SMs and memory bandwidth. Here a single run is enough of a history; then one
and a half times its peak must fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Final, NamedTuple

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict.recurring import (
    CUT,
    DONE,
    OUT_OF_MEMORY,
    UNNAMED,
    PastRun,
    RunsPolicy,
    ShownNeed,
    choose,
    need_of,
)
from slurm_migbatch.report.equivalents import gpu_equivalent
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.values.quantiles import quantile
from slurm_migbatch.workload.catalog import GpuKind, Partition, ProfileOffer

IDLE: Final = 0.1
"""SM share below which a run has held its slices idle."""
LEAST_WAITS: Final = 5
"""Minimum number of runs to estimate a wait."""


class SliceUse(NamedTuple):
    """What one run held and used.

    Attributes:
        parts: GRES types of its slices and their counts on all its nodes.
        nodes: number of these nodes.
        hours: from its start to its end.
        own: its figures as a run of a recurring job.
        shared: it shared its slice with another run for a while.
        live: it is running; figures come at its end.
        given_back: slice-hours before that end on nodes that it gave back (`scontrol update JobId= NumNodes=`).
    """

    parts: tuple[tuple[str, int], ...]
    nodes: int
    hours: float
    own: PastRun
    shared: bool = False
    live: bool = False
    given_back: float = 0.0

    @property
    def profile(self) -> str:
        """The GRES type of its slices; empty if they differ."""
        return self.parts[0][0] if len(self.parts) == 1 else ""

    @property
    def slices(self) -> int:
        """Its number of slices."""
        return sum(count for _, count in self.parts)

    @property
    def slice_hours(self) -> float:
        """The hours for which it held slices, summed over them."""
        return max(0.0, self.hours * self.slices - self.given_back)


class WasteFinding(NamedTuple):
    """One way in which a run held more than it used.

    Attributes:
        kind: "idle": held but idle; "whole": a whole GPU where a slice is enough; "memory", "sms": a smaller slice has
            enough of it.
        sentence: for its user.
        wasted_gpu_hours: hours that others could have used; those of several findings must not be added up.
        figures: the underlying figures, JSON-able, units in the names.
    """

    kind: str
    sentence: str
    wasted_gpu_hours: float
    figures: Mapping[str, Any]


class WasteVerdict(NamedTuple):
    """The result for a run.

    Attributes:
        gpu_hours: that it held.
        findings: "idle" or "whole" first, then "memory", then "sms".
        profile: GRES type of the smaller slice that would have been enough, or of the larger one to request after it
            ran out of memory; empty if none, or unknown.
        sbatch: option to submit with next time; empty likewise.
        note: why there is no finding, or what is unknown; empty if there is nothing to add.
        judged: its use was sampled.
    """

    gpu_hours: float
    findings: tuple[WasteFinding, ...] = ()
    profile: str = ""
    sbatch: str = ""
    note: str = ""
    judged: bool = True

    @property
    def wasted_gpu_hours(self) -> float:
        """The maximum of its findings."""
        return max([finding.wasted_gpu_hours for finding in self.findings]) if self.findings else 0.0


@dataclass(frozen=True)
class WaitFigures:
    """Wait times, in seconds: the median, the 90th percentile, and the number of runs."""

    median_s: float
    p90_s: float
    runs: int


def waited(seconds: Sequence[float]) -> WaitFigures | None:
    """Return the figures of these waits; None if there are fewer than LEAST_WAITS."""
    if len(seconds) < LEAST_WAITS:
        return None
    return WaitFigures(median(seconds), quantile(seconds, 0.9), len(seconds))


def judge(use: SliceUse, past: Sequence[PastRun], geometry: Geometry | None, policy: RunsPolicy) -> WasteVerdict:
    """Evaluate what a run held but did not use, by the runs of its recurring job (newest last, itself included) and the
    geometry of its GPUs. If that is no longer known, no smaller slice is considered.
    """
    kind = _kind_of(geometry) if geometry is not None else None
    share = kind.share if kind is not None else gpu_equivalent
    gpu_hours = use.slice_hours / max(use.slices, 1) * sum([count * share(name) for name, count in use.parts])
    if use.own.ended == OUT_OF_MEMORY and not use.live:
        return _ran_out(use, kind, gpu_hours)
    if unknown := _unknown(use):
        return WasteVerdict(gpu_hours, note=unknown, judged=False)
    findings = []
    if use.own.sm is not None and use.own.sm < IDLE:
        findings.append(_idle(use, gpu_hours))
    profile = use.profile
    if kind is None or profile not in kind.offers:
        return WasteVerdict(
            gpu_hours, tuple(findings), note="its GPU is no longer known, so other slices cannot be compared"
        )
    need, note = _need(use, past, kind)
    smaller = _smaller(need, kind, profile, policy) if need is not None else None
    if need is None or smaller is None:
        return WasteVerdict(gpu_hours, tuple(findings), note=note or "no smaller slice would have been enough")
    saved = gpu_hours - use.slice_hours * kind.share(smaller.profile.gres_type)
    findings += _oversized(use, kind, smaller, need, saved)
    enough = smaller.profile.gres_type
    return WasteVerdict(gpu_hours, tuple(findings), enough, _sbatch(enough, use))


class _Kind:
    """One GPU type: its slices, and their shares of it."""

    def __init__(self, geometry: Geometry) -> None:
        whole = (geometry.compute_slices, geometry.memory_slices)
        self.full = geometry.full.profile.gres_type
        self.offers: Mapping[str, ProfileOffer] = Partition("", (GpuKind("", geometry, 0.0, 0.0),)).offers
        self.plain = tuple(offer for offer in self.offers.values() if not offer.profile.suffix)
        self._shares = {name: gpu_equivalent(name, offer.memory_slices, whole) for name, offer in self.offers.items()}

    def share(self, name: str) -> float:
        """Return the share of the GPU that a slice is."""
        share = self._shares.get(name)
        return gpu_equivalent(name) if share is None else share


_kind_of = lru_cache(maxsize=32)(_Kind)
"""The GPU type of a geometry; a month's runs are on a few types."""


def slice_mib(geometry: Geometry, profile: str) -> int | None:
    """Return the memory of a slice; None if the GPU has no such profile."""
    offer = _kind_of(geometry).offers.get(profile)
    return None if offer is None else offer.memory_mib


def _ran_out(use: SliceUse, kind: _Kind | None, gpu_hours: float) -> WasteVerdict:
    """Return what to request after a run that ran out of memory: the smallest slice with more memory."""
    reason = "it reported out of memory"
    judged = use.own.peak_mib is not None or use.own.sm is not None
    held = kind.offers.get(use.profile) if kind is not None else None
    if kind is None or held is None:
        return WasteVerdict(gpu_hours, note=f"{reason}: request a slice with more memory next time", judged=judged)
    larger = [offer for offer in kind.plain if offer.memory_mib > held.memory_mib]
    if not larger:
        return WasteVerdict(
            gpu_hours, note=f"{reason}, on the largest slice: reduce the job, or request several GPUs", judged=judged
        )
    profile = min(larger, key=lambda offer: (offer.memory_mib, kind.share(offer.profile.gres_type))).profile.gres_type
    return WasteVerdict(gpu_hours, (), profile, _sbatch(profile, use), f"{reason}: request {profile} next time", judged)


def _unknown(use: SliceUse) -> str:
    if use.live:
        return "it is running; memory and SMs are reported at its end"
    if not use.profile:
        return "its slices differ, so its figures cannot be attributed to one of them"
    if use.shared:
        return "it shared its slice with another run, so the samples are not its own"
    if use.own.peak_mib is None and use.own.sm is None:
        return "neither its memory nor its SMs were sampled, so its use is unknown"
    return ""


def _need(use: SliceUse, past: Sequence[PastRun], kind: _Kind) -> tuple[ShownNeed | None, str]:
    """Return the need that the runs showed, and if unknown the reason."""
    if use.own.peak_mib is None:
        return None, "its memory was not sampled, so a smaller slice cannot be evaluated"
    need = _need_of(tuple(past), kind)
    if need is None:
        return None, "it did not complete, so its need is unknown"
    if need.engine:
        name = "its program" if need.engine == UNNAMED else need.engine
        return None, f"{name} allocates a fixed share of any slice, so its need is unknown"
    if need.full_mib or need.unknown:
        return None, "a run of it filled its slice, so no smaller one is recommended"
    return need, ""


@lru_cache(maxsize=32)
def _need_of(past: tuple[PastRun, ...], kind: _Kind) -> ShownNeed | None:
    """Return the need by these runs: the runs of a recurring job are judged one after the other, all by the same."""
    return need_of(_as_done(past), kind.offers, 1)


def _as_done(past: Sequence[PastRun]) -> list[PastRun]:
    """Return the runs as `need_of` expects them: a job ended by its user has mostly done what was wanted."""
    return [run._replace(ended=DONE) if run.ended == CUT else run for run in past]


@lru_cache(maxsize=1024)
def _smaller(need: ShownNeed, kind: _Kind, held: str, policy: RunsPolicy) -> ProfileOffer | None:
    """Return the slice that the submit filter would give, if it is a smaller share of the GPU."""
    offer, reason, _ = choose(need, kind.plain, policy)
    smaller = reason == "runs" and kind.share(offer.profile.gres_type) < kind.share(held)
    return offer if smaller else None


def _idle(use: SliceUse, gpu_hours: float) -> WasteFinding:
    sm = use.own.sm or 0.0
    held = use.profile if use.slices == 1 else f"{use.slices} slices of {use.profile}"
    sentence = f"held but idle: SMs were in use {sm:.1%} of the {digits(use.hours)} h for which it held {held}"
    return WasteFinding("idle", sentence, gpu_hours * (1 - sm), {"sm_active": sm, "hours": use.hours})


def _oversized(use: SliceUse, kind: _Kind, smaller: ProfileOffer, need: ShownNeed, saved: float) -> list[WasteFinding]:
    """Return the findings about a slice that is larger than the need that the runs showed."""
    held, name, sm = kind.offers[use.profile], smaller.profile.gres_type, use.own.sm
    memory = (
        f"at most {gib(use.own.peak_mib or 0)} of {gib(held.memory_mib)} GiB were used, with a margin "
        f"{gib(need.need_mib)}, and {name} has {gib(smaller.memory_mib)}"
    )
    unsampled = "" if sm is not None else "; its SMs were not sampled, so its speed there is unknown"
    busy = None if sm is None else sm * held.compute_slices
    compute = (
        ""
        if busy is None
        else (f"{busy:.2g} of {held.compute_slices} compute slices were busy, and {name} has {smaller.compute_slices}")
    )
    memory_figures = {
        "peak_mib": use.own.peak_mib, "held_mib": held.memory_mib, "need_mib": need.need_mib,
        "enough_mib": smaller.memory_mib,
    }  # fmt: skip
    sm_figures = {"busy_slices": busy, "held_slices": held.compute_slices, "enough_slices": smaller.compute_slices}
    if use.profile == kind.full:
        sentence = f"a whole GPU where {name} is enough: {memory}{f'; {compute}' if compute else unsampled}"
        return [WasteFinding("whole", sentence, saved, {**memory_figures, **sm_figures})]
    findings = []
    if smaller.memory_mib < held.memory_mib:
        findings.append(
            WasteFinding("memory", f"more memory than it needs: {memory}{unsampled}", saved, memory_figures)
        )
    if busy is not None and smaller.compute_slices < held.compute_slices:
        findings.append(WasteFinding("sms", f"more SMs than it needs: {compute}", saved, sm_figures))
    return findings


def _sbatch(profile: str, use: SliceUse) -> str:
    per_node = use.slices // max(use.nodes, 1)
    return f"sbatch --gres=mig:{profile}" + (f":{per_node}" if per_node > 1 else "")

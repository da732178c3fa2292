"""Compare slices with what a job may have and needs: its min, max and memory, and the prediction for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.predict.candidate import Candidate, Figures
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal, show


@dataclass(frozen=True)
class JobLimits:
    """Limits of a job."""

    low: ProfileOffer | None
    high: ProfileOffer | None
    mem_mib: int | None

    def within(self, offer: ProfileOffer) -> bool:
        """Return whether the profile lies between min and max, in compute slices and in memory."""
        low, high = self.low, self.high
        if low and (offer.compute_slices < low.compute_slices or offer.memory_mib < low.memory_mib):
            return False
        return not (high and (offer.compute_slices > high.compute_slices or offer.memory_mib > high.memory_mib))


NO_LIMITS: Final = JobLimits(None, None, None)


def limits_of(hints: Hints, partition: Partition) -> JobLimits:
    """Return the hints' limits; raises Refusal if they name unknown profiles or contradict each other."""
    bounds: list[ProfileOffer | None] = []
    for name in (hints.min, hints.max):
        if name is not None and name not in partition.offers:
            raise Refusal("unknown_profile", partition.name, show(name), partition.profile_list)
        bounds.append(None if name is None else partition.offers[name])
    low, high = bounds
    if low and high and (low.compute_slices > high.compute_slices or low.memory_mib > high.memory_mib):
        raise Refusal("min_over_max", low.profile.gres_type, high.profile.gres_type)
    return JobLimits(low, high, hints.mem_mib)


def ranked(rows: Iterable[tuple[ProfileOffer, Figures | TokenFigures | None, str]]) -> tuple[Candidate, ...]:
    """Return the candidates, sufficient ones first. Rows: slice, figures, why it is insufficient (empty: it is not)."""
    judged = [Candidate(offer, figures, not why, why) for offer, figures, why in rows]
    return tuple(sorted(judged, key=lambda candidate: not candidate.ok))


def ranked_by_memory(partition: Partition, limits: JobLimits) -> tuple[Candidate, ...]:
    """Return the plain profiles of a partition as candidates without figures."""
    return ranked((offer, None, too_small(offer, limits, 0)) for offer in partition.plain)


def too_small(offer: ProfileOffer, limits: JobLimits, need_mib: int) -> str:
    """Return why a slice is outside the limits or too small, else ""; `need_mib` is predicted, used without mem=."""
    if not limits.within(offer):
        return "outside min and max"
    need = limits.mem_mib or need_mib
    return f"needs {gib(need)} GiB, has {gib(offer.memory_mib)}" if offer.memory_mib < need else ""


def missed(offer: ProfileOffer, figures: Figures | None, bucket: Bucket, limits: JobLimits) -> str:
    """Return why a slice is insufficient for a bucket, "" if it is sufficient."""
    if figures is None:
        return "no figures" if limits.within(offer) else "outside min and max"
    if reason := too_small(offer, limits, figures.need_mib):
        return reason
    if bucket.slo_us is not None and figures.latency_us > bucket.slo_us:
        return f"a batch may take {digits(figures.latency_us / 1000)} ms, over {digits(bucket.slo_us / 1000)} ms"
    if bucket.rate is not None and figures.rate < bucket.rate:
        return f"may reach only {digits(figures.rate / 1000)} items/s, needs {digits(bucket.rate / 1000)}"
    return ""

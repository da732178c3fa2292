"""Predict the load of one instance of a service: requests or items per second on a slice, within the latency limit.

The batch is the user's own, or the one chosen with the slice (`rightsize`), or the one advised
for a slice that the user named (`recommend.advise`). A language model engine runs as many sequences at once as its
hints say.
"""

from __future__ import annotations

from dataclasses import replace

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.llm.choice import Targets
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.hints import Hints


def rates_at_limit(chooser: Chooser, hints: Hints, partition: Partition) -> dict[Profile, float]:
    """Return the conservative rate per second of one slice of each profile that is predicted to keep the limits.

    Empty if the model is unknown. Raises Refusal for hints that contradict the model's specifications.
    """
    workload = chooser.workload(hints)
    if workload is not None:
        tokens, targets = chooser.token_figures(workload, None, partition), Targets.of(hints)
        by_profile = {offer.profile: tokens.get(offer.profile.gres_type) for offer in partition.plain}
        return {
            profile: figures.rate / 1000
            for profile, figures in by_profile.items()
            if figures is not None and figures.has_speeds and figures.rate > 0 and not targets.missed(figures)
        }
    bucket = chooser.bucket(hints)
    if bucket is None:
        return {}
    rates = {offer.profile: _rate(chooser, hints, bucket, partition, offer) for offer in partition.plain}
    if hints.batch is None and hints.slo_us is not None:
        choice = chooser.choose(hints, partition, passes_batch=True)
        if choice.batch is not None and (known := choice.figures) is not None:
            rates[choice.offer.profile] = known.rate / 1000
    return {profile: rate for profile, rate in rates.items() if rate > 0}


def _rate(chooser: Chooser, hints: Hints, bucket: Bucket, partition: Partition, offer: ProfileOffer) -> float:
    """Return items per second of one slice; 0 if it is not predicted to keep the limit, or there is no prediction."""
    if hints.batch is None and (advice := chooser.advice(bucket, partition, offer)) is not None:
        bucket = chooser.bucket(replace(hints, batch=advice.batch)) or bucket
    figures = chooser.figures(bucket, partition).get(offer.profile.gres_type)
    if figures is None or (bucket.slo_us is not None and figures.latency_us > bucket.slo_us):
        return 0.0
    return figures.rate / 1000

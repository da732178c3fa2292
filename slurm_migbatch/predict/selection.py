"""Choose a slice: the fewest compute slices that keep memory, latency limit and rate within min and max.

For an inference job with a latency limit that names no batch, and to which a batch can be passed, slice and batch are
chosen together (`rightsize`); the slice is at most the one chosen for the usual batch.

All comparisons of limits are between integers (MiB, microseconds, thousandths of items per second), and the order of
the steps is that of the Lua shim on the compiled table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from slurm_migbatch.predict import recurring
from slurm_migbatch.predict.candidate import FAR_TOO_LARGE, Candidate, Figures
from slurm_migbatch.predict.limits import NO_LIMITS, JobLimits, limits_of, missed, ranked, ranked_by_memory, too_small
from slurm_migbatch.predict.llm import choice as llm_choice
from slurm_migbatch.predict.llm import workload as llm_workload
from slurm_migbatch.predict.llm.choice import Targets
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.predict.llm.workload import Workload
from slurm_migbatch.predict.recurring import NO_RUNS, RecurringJob, RunsPolicy
from slurm_migbatch.predict.requests import RequestPredictions
from slurm_migbatch.predict.rightsize import Terms, rightsize
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.hints import SERVE, Hints
from slurm_migbatch.workload.refusal import Refusal, show

if TYPE_CHECKING:
    from slurm_migbatch.predict.learned import LearnedPredictor

#: largest number of cached choices
_MOST_CHOICES: Final = 4096

REASONS: Final = {
    "fits": "the smallest slice that meets the request",
    "batch_chosen": "the smallest slice on which some batch size meets the request, with its smallest batch size of "
    "nearly the highest throughput: run batches of %s (MIGBATCH_BATCH)%s",
    "memory_short": "no slice is predicted to have enough memory; using the largest",
    "time_short": "no slice is predicted to be fast enough; using the fastest",
    "by_memory": "the smallest slice with %s GiB (of %s GiB); no speed prediction for %s",
    "unknown_model": "the site's default, as nothing is known about %s; add mem= to the hints",
    "no_hints": "the site's default, as the job names no model and no memory; add --comment='migbatch: model=... "
    "batch=...' or mem=...",
}
"""Why a slice was chosen, for the user; rendered into the Lua shims too."""
PREDICTED: Final = ". Predicted for %s: at most %s ms per batch, at least %s items/s, %s of %s GiB"
"""Appended to such a reason if figures are known; in the Lua shims too."""
USUAL: Final = {
    "elsewhere": "; batches of %s would need %s",
    "nowhere": "; no slice is predicted to meet it with batches of %s",
}
"""Note on the batch that is assumed if none is named, when another was chosen; in the Lua shims too."""


@dataclass(frozen=True)
class SliceChoice:
    """The slice chosen for `auto`, why it was chosen, and all candidates for the record.

    `reason` is a key of REASONS or `recurring.SENTENCES`. `label` names the workload: the bucket, or a language
    model's workload. `batch`: the batch chosen together with the slice, which is also the bucket's; None if none
    was chosen.
    """

    offer: ProfileOffer
    reason: str
    text: str
    bucket: Bucket | None
    candidates: tuple[Candidate, ...]
    label: str = ""
    batch: int | None = None

    @property
    def figures(self) -> Figures | None:
        """Prediction for the slice; None if there is none."""
        return next(candidate.figures for candidate in self.candidates if candidate.offer == self.offer)


class Chooser(RequestPredictions):
    """Rank and choose slices. Choices are cached by bucket, so a repeated request is cheap."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        super().__init__(predictor)
        #: each with its partition: another one may have the same name later
        self._choices: dict[tuple[str, Bucket, JobLimits, bool, int | None], tuple[Partition, SliceChoice]] = {}

    def rank(self, workload: Bucket, partition: Partition, limits: JobLimits = NO_LIMITS) -> tuple[Candidate, ...]:
        """Rank every plain profile of the partition: sufficient ones first, each group from the cheapest to the
        dearest.
        """
        figures = self.figures(workload, partition)
        rows = [(offer, figures.get(offer.profile.gres_type)) for offer in partition.plain]
        return ranked((offer, known, missed(offer, known, workload, limits)) for offer, known in rows)

    def choose(
        self,
        hints: Hints,
        partition: Partition,
        job: RecurringJob | None = None,
        policy: RunsPolicy = NO_RUNS,
        *,
        passes_batch: bool = False,
    ) -> SliceChoice:
        """Choose the slice for `auto`; raises Refusal if there is none.

        Args:
            job: the recurring job with its runs, used if the hints name neither model nor memory; with a model only the
                runs that ran out of memory.
            policy: the site's settings for that.
            passes_batch: the batch can be passed to the job, so one is chosen if the hints leave it open.
        """
        limits = limits_of(hints, partition)
        bucket = self.bucket(hints)
        allowed = [offer for offer in partition.plain if limits.within(offer)]
        if not allowed:
            raise Refusal("range_empty", partition.name, partition.profile_list)
        workload = self.workload(hints)
        if workload is None and hints.model is None and hints.mem_mib is None and job is not None and policy.runs:
            return _from_runs(job, policy, partition, limits, allowed)
        choice = None
        if workload is not None:
            choice = self._choose_for_tokens(workload, hints, partition, limits, allowed)
        elif bucket is not None:
            choice = self._by_bucket(hints, bucket, partition, limits, passes_batch=passes_batch)
        choice = choice or self._without_figures(hints, partition, limits, allowed)
        if job is None or not policy.runs or hints.mem_mib is not None:
            return choice
        fills = workload is not None and llm_workload.fills(workload)
        return _above_earlier_runs(choice, job, partition, allowed, fills=fills)

    def _by_bucket(
        self, hints: Hints, bucket: Bucket, partition: Partition, limits: JobLimits, *, passes_batch: bool
    ) -> SliceChoice | None:
        """Choose by the predictions for a bucket; None if there are none for the slices that the job may have."""
        leaves_batch = passes_batch and _leaves_batch(hints)
        key = partition.name, bucket, limits, leaves_batch, _arrivals(hints)  # no other hint affects the choice
        cached = self._choices.get(key)
        if cached is not None and cached[0] is partition:
            return cached[1]
        if leaves_batch:
            self.ladder(bucket, partition)  # cached, so that `figures` reads from it
        figures = self.figures(bucket, partition)
        usable = [offer for offer in partition.plain if limits.within(offer) and offer.profile.gres_type in figures]
        if not usable:
            return None
        usual, reason = _pick(usable, figures, bucket, limits)
        choice = None
        if leaves_batch:
            offers = [offer for offer in usable if offer.order <= usual.order]
            choice = self._with_batch(bucket, partition, offers, reason, limits, _arrivals(hints))
        if choice is None:
            known = figures[usual.profile.gres_type]
            if reason == "memory_short" and known.need_mib > FAR_TOO_LARGE * usual.memory_mib:
                raise Refusal("need_far", bucket.cell, gib(known.need_mib), gib(usual.memory_mib))
            text = REASONS[reason] + _predicted(bucket, known, usual, limits)
            choice = SliceChoice(usual, reason, text, bucket, self.rank(bucket, partition, limits), bucket.name)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        self._choices[key] = partition, choice
        return choice

    def stated_bucket(self, hints: Hints, partition: Partition) -> Bucket | None:
        """Return the bucket of a batch job: with the batch that was chosen for it if the hints leave it open.

        None if no known model is named. Raises Refusal as `choose` does.
        """
        bucket = self.bucket(hints)
        if bucket is None or not _leaves_batch(hints):
            return bucket
        return self.choose(hints, partition, passes_batch=True).bucket or bucket

    def _with_batch(
        self,
        bucket: Bucket,
        partition: Partition,
        offers: Sequence[ProfileOffer],
        reason: str,
        limits: JobLimits,
        arrivals: int | None,
    ) -> SliceChoice | None:
        """Choose slice and batch together; None if no batch keeps the limits.

        Args:
            bucket: the bucket with the usual batch.
            offers: the slices up to the one chosen for the usual batch, which is the last.
            reason: why that slice was chosen.
            arrivals: of a service, thousandths of requests per second (0: unknown); None: the job is no service.
        """
        assert bucket.slo_us is not None
        usual = offers[-1]
        terms = Terms(bucket.slo_us, bucket.rate, arrivals, limits.mem_mib, bucket.batch)
        chosen = rightsize(offers, self.ladder(bucket, partition), terms)
        if chosen is None:
            return None
        offer, batch = chosen
        usual_text = ""
        if reason != "fits":
            usual_text = USUAL["nowhere"] % bucket.batch
        elif offer != usual:
            usual_text = USUAL["elsewhere"] % (bucket.batch, usual.profile.gres_type)
        bucket = replace(bucket, batch=batch)
        figures = self.figures(bucket, partition)[offer.profile.gres_type]
        text = REASONS["batch_chosen"] % (batch, usual_text) + _predicted(bucket, figures, offer, limits)
        ranked = self.rank(bucket, partition, limits)
        return SliceChoice(offer, "batch_chosen", text, bucket, ranked, bucket.name, batch)

    def holding(self, hints: Hints, partition: Partition, allowed: Sequence[ProfileOffer]) -> list[ProfileOffer]:
        """Return the allowed slices with enough memory for a job; raises Refusal if there are none."""
        if hints.mem_mib is not None:
            holding = [offer for offer in allowed if offer.memory_mib >= hints.mem_mib]
            if not holding:
                raise _mem_nowhere(hints.mem_mib, allowed)
            return holding
        workload = self.workload(hints)
        if workload is None:
            return list(allowed)
        holding = [o for o in allowed if need_of(workload, o.memory_mib).slice_mib <= o.memory_mib]
        if not holding:
            raise llm_choice.no_slice_refusal(workload, allowed, partition, self.predictor)
        return holding

    def _choose_for_tokens(
        self, workload: Workload, hints: Hints, partition: Partition, limits: JobLimits, allowed: Sequence[ProfileOffer]
    ) -> SliceChoice:
        """Choose for a language model: by memory first, exactly, then by the speed limits."""
        targets = Targets.of(hints)
        holding = self.holding(hints, partition, allowed)
        figures = self.token_figures(workload, targets.rate, partition)

        def known(offer: ProfileOffer) -> TokenFigures:
            return figures[offer.profile.gres_type]

        offer = next((offer for offer in holding if not targets.missed(known(offer))), None)
        reason = "fits"
        if offer is None:
            offer, reason = min(holding, key=lambda profile: targets.excess(known(profile))), "time_short"
        text = llm_choice.explanation(workload, known(offer), offer, reason, mem_mib=hints.mem_mib)
        rows = [(profile, known(profile)) for profile in partition.plain]
        candidates = ranked(
            (profile, predicted, too_small(profile, limits, predicted.slice_mib) or targets.missed(predicted))
            for profile, predicted in rows
        )
        return SliceChoice(offer, reason, text, None, candidates, workload.label)

    def _without_figures(
        self, hints: Hints, partition: Partition, limits: JobLimits, allowed: Sequence[ProfileOffer]
    ) -> SliceChoice:
        model = "this job" if hints.model is None else show(hints.model)
        if hints.mem_mib is not None:
            offer, reason = self.holding(hints, partition, allowed)[0], "by_memory"
            text = REASONS[reason] % (gib(hints.mem_mib), gib(offer.memory_mib), model)
        else:
            offer = _default(partition, allowed)
            reason = "no_hints" if hints.model is None else "unknown_model"
            text = REASONS[reason]
            if hints.model is not None:
                meant = self.similar_model(hints.model)
                text %= f"{model} (did you mean model={meant}?)" if meant else model
        return SliceChoice(offer, reason, text, None, ranked_by_memory(partition, limits))


def _pick(
    usable: Sequence[ProfileOffer], figures: Mapping[str, Figures], bucket: Bucket, limits: JobLimits
) -> tuple[ProfileOffer, str]:
    def known(offer: ProfileOffer) -> Figures:
        return figures[offer.profile.gres_type]

    holding = [offer for offer in usable if offer.memory_mib >= (limits.mem_mib or known(offer).need_mib)]
    if not holding:
        if limits.mem_mib is not None:
            raise _mem_nowhere(limits.mem_mib, usable)
        return max(usable, key=lambda offer: offer.memory_mib), "memory_short"
    for offer in holding:
        if _in_time(known(offer), bucket):
            return offer, "fits"
    if bucket.slo_us is not None:
        return min(holding, key=lambda offer: known(offer).latency_us), "time_short"
    return max(holding, key=lambda offer: known(offer).rate), "time_short"


def _default(partition: Partition, allowed: Sequence[ProfileOffer]) -> ProfileOffer:
    return partition.default if partition.default in allowed else allowed[0]


def _from_runs(
    job: RecurringJob, policy: RunsPolicy, partition: Partition, limits: JobLimits, allowed: Sequence[ProfileOffer]
) -> SliceChoice:
    """Choose by the use of the job's earlier runs; the site's default while they are too few."""
    need = recurring.need_of(job.past, partition.offers, policy.runs)
    if need is None:
        offer, reason = _default(partition, allowed), "runs_few"
        text = recurring.SENTENCES[reason] % (policy.runs, job.name, recurring.counted(job.past))
    else:
        offer, reason, text = recurring.pick(job, need, allowed, policy)
        limits = replace(limits, mem_mib=need.need_mib)
    return SliceChoice(offer, reason, text, None, ranked_by_memory(partition, limits))


def _above_earlier_runs(
    choice: SliceChoice, job: RecurringJob, partition: Partition, allowed: Sequence[ProfileOffer], *, fills: bool
) -> SliceChoice:
    """Return the choice of a larger slice if a run of the job ran out of memory on one of that size; else the same."""
    exceeded_mib = recurring.exceeded_mib(job.past, partition.offers, choice.label, fills=fills)
    if choice.offer.memory_mib > exceeded_mib:
        return choice
    sufficient = {candidate.offer for candidate in choice.candidates if candidate.ok}
    larger = [offer for offer in allowed if offer.memory_mib > exceeded_mib]
    able = [offer for offer in larger if offer in sufficient]
    offer = next(iter(able or larger), choice.offer)
    reason = "runs_larger" if larger else "runs_largest"
    text = recurring.SENTENCES[reason] % (gib(offer.memory_mib), job.name, gib(exceeded_mib))
    candidates = ranked(
        (candidate.offer, candidate.figures, candidate.why or _short(candidate.offer, exceeded_mib))
        for candidate in choice.candidates
    )
    return replace(choice, offer=offer, reason=reason, text=text, candidates=candidates)


def _short(offer: ProfileOffer, exceeded_mib: int) -> str:
    return "a run ran out of memory" if offer.memory_mib <= exceeded_mib else ""


def _predicted(bucket: Bucket, figures: Figures, offer: ProfileOffer, limits: JobLimits) -> str:
    return PREDICTED % (
        bucket.cell,
        digits(figures.latency_us / 1000),
        digits(figures.rate / 1000),
        gib(limits.mem_mib or figures.need_mib),
        gib(offer.memory_mib),
    )


def _mem_nowhere(mem_mib: int, offers: Iterable[ProfileOffer]) -> Refusal:
    return Refusal("mem_nowhere", str(mem_mib), str(max(offer.memory_mib for offer in offers)))


def _leaves_batch(hints: Hints) -> bool:
    """Return whether the hints describe inference with a latency limit but without a batch."""
    return hints.batch is None and hints.slo_us is not None and hints.kind == "infer"


def _arrivals(hints: Hints) -> int | None:
    """Return the requests that a service gets in all, in thousandths per second (0: unknown); None for other jobs."""
    return (hints.llm.rate or 0) if hints.role == SERVE else None


def _in_time(figures: Figures, bucket: Bucket) -> bool:
    if bucket.slo_us is not None and figures.latency_us > bucket.slo_us:
        return False
    return bucket.rate is None or figures.rate >= bucket.rate

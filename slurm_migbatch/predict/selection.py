"""Choose a slice: the fewest compute slices that keep memory, latency limit and rate within min and max.

For an inference job with a latency limit that names no batch, and to which a batch can be passed, slice and batch are
chosen together (`rightsize`); the slice is at most the one chosen for the usual batch.

All comparisons of limits are between integers (MiB, microseconds, thousandths of items per second), and the order of
the steps is that of the Lua shim on the compiled table.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict import recurring
from slurm_migbatch.predict.candidate import Candidate, Figures
from slurm_migbatch.predict.limits import NO_LIMITS, JobLimits, limits_of, missed, ranked, ranked_by_memory, too_small
from slurm_migbatch.predict.llm import choice as llm_choice
from slurm_migbatch.predict.llm import names as llm_names
from slurm_migbatch.predict.llm import workload as llm_workload
from slurm_migbatch.predict.llm.choice import Targets
from slurm_migbatch.predict.llm.memory import need_of, weights_mib
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.predict.llm.workload import Workload
from slurm_migbatch.predict.recommend import Advice
from slurm_migbatch.predict.recurring import NO_RUNS, RecurringJob, RunsPolicy
from slurm_migbatch.predict.rightsize import Terms, rightsize
from slurm_migbatch.predict.sheet import Block, Ladder, ladder_of
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.values.remembering import remembered
from slurm_migbatch.workload.buckets import Bucket, Grid, bucket_of
from slurm_migbatch.workload.catalog import GpuKind, Partition, ProfileOffer
from slurm_migbatch.workload.hints import SERVE, Hints
from slurm_migbatch.workload.modelfile import spellings, without_ending
from slurm_migbatch.workload.refusal import Refusal, show

if TYPE_CHECKING:
    from slurm_migbatch.predict.learned import LearnedPredictor

#: largest numbers of cached figures, ladders and advices, and of cached choices
_MOST_FIGURES: Final = 100_000
_MOST_CHOICES: Final = 4096
#: largest number of language model workloads with cached figures: users can name any number of them
_MOST_WORKLOADS: Final = 4096
#: largest difference in length between an unknown name and the known one that is suggested for it
_LETTERS_OFF: Final = 3

FAR_TOO_LARGE: Final = 4
"""Memory need in largest slices from which a job is refused: no prediction is that wrong."""

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


def canonical(name: str, grids: Mapping[str, Grid], aliases: Mapping[str, str]) -> str:
    """Return a model's canonical name: what follows the last slash, `_` as `-`, aliases resolved. If it is unknown so,
    without the ending of a file or timm's tag (`resnet50.a1_in1k`).

    Unknown names are returned in that form.
    """
    whole = name.rsplit("/", 1)[-1].replace("_", "-")
    for short in spellings(whole):
        if short in grids or short in aliases:
            return short if short in grids else aliases[short]
    return without_ending(whole)


class Chooser:
    """Rank and choose slices. Figures are cached by cell and choices by bucket, so a repeated request is cheap."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        self.predictor = predictor
        #: the keys have the GPU kinds themselves: their names may mean other kinds later, as after a driver update
        self._figures: dict[tuple[Bucket, tuple[GpuKind, ...]], Mapping[str, Figures]] = {}
        self._ladders: dict[tuple[Bucket, tuple[GpuKind, ...]], Ladder] = {}
        #: each with its partition: another one may have the same name later
        self._choices: dict[tuple[str, Bucket, JobLimits, bool, int | None], tuple[Partition, SliceChoice]] = {}
        self._advice: dict[tuple[Bucket, tuple[GpuKind, ...], Profile], Advice | None] = {}
        self._tokens: dict[tuple[Workload, int | None, tuple[GpuKind, ...]], Mapping[str, TokenFigures]] = {}
        #: the known models with their bucket edges
        self.grids = {name: grid for name, grid in predictor.grids().items() if not llm_names.generates(name)}
        #: other names of known models
        self.aliases = predictor.aliases()

    def bucket(self, hints: Hints) -> Bucket | None:
        """Return the request's bucket, or None if no known model is named.

        Raises Refusal for an input in a wrong unit.
        """
        if hints.model is None:
            return None
        model = canonical(hints.model, self.grids, self.aliases)
        grid = self.grids.get(model)
        if grid is None:
            return None
        if hints.input_unit and hints.input_unit != grid.unit:
            raise Refusal("input_unit", model, grid.unit, f"input={grid.default_input}{grid.unit}")
        return bucket_of(hints, model, grid)

    def figures(self, workload: Bucket, partition: Partition) -> Mapping[str, Figures]:
        """Return the figures of each plain profile by GRES type, the worst if several kinds of GPUs have it."""
        cell = Bucket(workload.model, workload.role, workload.batch, workload.input, workload.unit)
        key = (cell, partition.kinds)
        return remembered(self._figures, _MOST_FIGURES, key, lambda: self._merged(cell, partition))

    def _merged(self, cell: Bucket, partition: Partition) -> Mapping[str, Figures]:
        ladder = self._ladders.get(_of_all_batches(cell, partition))
        if ladder is not None and cell.batch in ladder.batches:
            return ladder.figures(cell.batch)
        by_kind = [(kind, self.predictor.figures(cell, kind)) for kind in partition.kinds]
        merged: dict[str, Figures] = {}
        for offer in partition.plain:
            predictions = [figures.get(offer.profile) for kind, figures in by_kind if offer.profile in kind.geometry]
            worst: Figures | None = predictions[0]
            for other in predictions[1:]:
                worst = None if worst is None or other is None else worst.worst(other)
            if worst is not None:
                merged[offer.profile.gres_type] = worst
        return merged

    def advice(
        self, workload: Bucket, partition: Partition, offer: ProfileOffer, batch: int | None = None
    ) -> Advice | None:
        """Return batch and copies for a slice that suit every GPU kind that the job may get; None: unknown.

        `batch`: the user's batch.
        """
        chosen = workload.batch if batch else 0
        cell = Bucket(workload.model, workload.role, chosen, workload.input, workload.unit, workload.slo_us)
        key = (cell, partition.kinds, offer.profile)
        return remembered(self._advice, _MOST_FIGURES, key, lambda: self._common_advice(*key))

    def _common_advice(self, cell: Bucket, kinds: Iterable[GpuKind], profile: Profile) -> Advice | None:
        advices = [self.predictor.advice(cell, kind, profile) for kind in kinds if profile in kind.geometry]
        known = [advice for advice in advices if advice is not None]
        if not known or len(known) < len(advices):
            return None
        return Advice(min(advice.batch for advice in known), min(advice.copies for advice in known))

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
            self._ladder(bucket, partition)  # cached, so that `figures` reads from it
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
        chosen = rightsize(offers, self._ladder(bucket, partition), terms)
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

    def _ladder(self, workload: Bucket, partition: Partition) -> Ladder:
        """Return the prediction for each plain profile at each candidate batch, the worst over kinds."""
        batches = self.grids[workload.model].ladder
        block = Block(workload.model, workload.role, batches, (workload.input,))
        key = _of_all_batches(workload, partition)
        return remembered(self._ladders, _MOST_FIGURES, key, lambda: ladder_of(self.predictor, block, partition))

    def workload(self, hints: Hints) -> Workload | None:
        """Return the language model workload of the hints; None if they describe anything else.

        Raises:
            Refusal: the hints name a model of unknown size, or an unknown value, or give token hints for another model.
        """
        given = hints.llm.params or hints.llm.arch
        if hints.model is not None and not given and self.has_curve(hints.model) and not llm_names.resolve(hints.model):
            tokens = llm_workload.of_tokens(hints)
            if tokens and hints.mem_mib is None:
                raise Refusal("hint_tokens", show(hints.model), tokens)
            return None
        if hints.model is None or llm_workload.asks(hints) or not self.has_curve(hints.model):
            workload = llm_workload.workload_of(hints)
            return None if workload is None else self.predictor.sized(workload)
        return None

    def token_figures(self, workload: Workload, rate: int | None, partition: Partition) -> Mapping[str, TokenFigures]:
        """Return the figures of a language model on each plain profile by GRES type; `rate` in thousandths of requests
        a second."""
        return remembered(
            self._tokens,
            _MOST_WORKLOADS,
            (workload, rate, partition.kinds),
            lambda: llm_choice.figures_by_profile(workload, partition, rate, self.predictor),
        )

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

    def need(self, hints: Hints, offer: ProfileOffer) -> tuple[str, int] | None:
        """Return a language model's workload in words and the MiB that a slice must have for it; None if the hints
        name none.
        """
        workload = self._stated_workload(hints)
        return None if workload is None else (workload.label, need_of(workload, offer.memory_mib).slice_mib)

    def weights(self, hints: Hints) -> tuple[str, int] | None:
        """Return a language model's name with its precision and the MiB of its weights; None if the hints name none."""
        workload = self._stated_workload(hints)
        if workload is None:
            return None
        name = f"{workload.model.name}/{workload.precision.name}"
        return name, math.ceil(weights_mib(workload.architecture, workload.precision))

    def _stated_workload(self, hints: Hints) -> Workload | None:
        """Return the workload of hints whose slice or memory the user has stated, so that they may be incomplete."""
        try:
            return self.workload(hints)
        except Refusal:
            return None

    def has_curve(self, model: str) -> bool:
        """Return whether a model has buckets, other than a language model."""
        return canonical(model, self.grids, self.aliases) in self.grids

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
                meant = self._similar_model(hints.model)
                text %= f"{model} (did you mean model={meant}?)" if meant else model
        return SliceChoice(offer, reason, text, None, ranked_by_memory(partition, limits))

    def _similar_model(self, name: str) -> str | None:
        """Return the known model that some words of an unknown name are, or else the one with the most similar name;
        None if there is none or it is known.
        """
        if len(name) > llm_names.LONGEST or self.has_curve(name):
            return None
        known = {*self.grids, *self.aliases}
        words = name.replace("_", "-").split("-")
        runs = ("-".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1))
        named = max((run for run in runs if run in known), key=len, default=None)
        if named is not None:
            return named
        same_initial = (model for model in sorted(known) if model[:1] == name[:1])
        near = [model for model in same_initial if abs(len(model) - len(name)) <= _LETTERS_OFF]
        return next(iter(difflib.get_close_matches(name, near, 1, llm_names.ALIKE)), None)


def _of_all_batches(workload: Bucket, partition: Partition) -> tuple[Bucket, tuple[GpuKind, ...]]:
    cell = Bucket(workload.model, workload.role, 0, workload.input, workload.unit)
    return cell, partition.kinds


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

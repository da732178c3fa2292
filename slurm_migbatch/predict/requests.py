"""Recognise the workload that a request's hints describe, and predict its figures on the slices of a partition."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures
from slurm_migbatch.predict.llm import choice as llm_choice
from slurm_migbatch.predict.llm import names as llm_names
from slurm_migbatch.predict.llm import workload as llm_workload
from slurm_migbatch.predict.llm.memory import need_of, weights_mib
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.predict.llm.workload import Workload
from slurm_migbatch.predict.recommend import Advice
from slurm_migbatch.predict.sheet import Block, Ladder, ladder_of
from slurm_migbatch.values.remembering import remembered
from slurm_migbatch.workload.buckets import Bucket, Grid, bucket_of
from slurm_migbatch.workload.catalog import GpuKind, Partition, ProfileOffer
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.modelfile import spellings, without_ending
from slurm_migbatch.workload.refusal import Refusal, show

if TYPE_CHECKING:
    from slurm_migbatch.predict.learned import LearnedPredictor

#: largest numbers of cached figures, ladders and advices
_MOST_FIGURES: Final = 100_000
#: largest number of language model workloads with cached figures: users can name any number of them
_MOST_WORKLOADS: Final = 4096
#: largest difference in length between an unknown name and the known one that is suggested for it
_LETTERS_OFF: Final = 3


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


class RequestPredictions:
    """Workloads of requests and predictions for them; figures are cached by cell, so a repeated request is cheap."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        self.predictor = predictor
        #: the keys have the GPU kinds themselves: their names may mean other kinds later, as after a driver update
        self._figures: dict[tuple[Bucket, tuple[GpuKind, ...]], Mapping[str, Figures]] = {}
        self._ladders: dict[tuple[Bucket, tuple[GpuKind, ...]], Ladder] = {}
        self._advice: dict[tuple[Bucket, tuple[GpuKind, ...], Profile], Advice | None] = {}
        self._tokens: dict[tuple[Workload, int | None, tuple[GpuKind, ...]], Mapping[str, TokenFigures]] = {}
        #: the known models with their bucket edges
        self.grids = {name: grid for name, grid in predictor.grids().items() if not llm_names.generates(name)}
        #: other names of known models
        self.aliases = predictor.aliases()

    def bucket(self, hints: Hints) -> Bucket | None:
        """Return the request's bucket, or None if no known model is named.

        Raises Refusal for an input in a wrong unit. In another one than a guessed one the input is ignored.
        """
        if hints.model is None:
            return None
        model = canonical(hints.model, self.grids, self.aliases)
        grid = self.grids.get(model)
        if grid is None:
            return None
        if hints.input_unit and hints.input_unit != grid.unit and not grid.guessed:
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

    def ladder(self, workload: Bucket, partition: Partition) -> Ladder:
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

    def similar_model(self, name: str) -> str | None:
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

"""Describe a model before any measurement: its work, the data it moves, its launches.

Uses built-in or site specifications; else what a measured table says (operations per item, parameters); else the
architecture of a public language model, or the memory of another public model. The rest is filled by the mean of the
built-in models of the same family, or of all, marked by `doubt`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from slurm_migbatch.predict.facts import BUILT_IN, TYPICAL, USUAL_KEPT, ModelFacts, text_facts
from slurm_migbatch.predict.llm import names
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.workload import TRAINING_ITEMS, USUAL_SEQ, training_of
from slurm_migbatch.profiling.measurement import LEAST_COUNT, Measurement
from slurm_migbatch.values.grouping import grouped
from slurm_migbatch.workload.modelfile import spellings, without_ending

TEXT_FAMILIES: Final = ("encoder", "decoder")
"""Families whose input is measured in tokens."""
TRANSFORMERS: Final = (*TEXT_FAMILIES, "vit")
REFERENCE: Final = {"tok": 128, "px": 224}
"""Input size if neither specifications nor the table name one."""
PLAUSIBLE_FLOPS: Final = (1e5, 1e16)


class Doubts(NamedTuple):
    """Degrees of doubt about a model's work, weights and activations, as `Known.doubt`."""

    work: int
    weights: int
    activations: int


LISTED: Final = Doubts(0, 0, 0)
"""Those of a model with public specifications."""
NOTHING: Final = Doubts(2, 2, 2)
"""Those of a model without any."""


@dataclass(frozen=True)
class Known:
    """Specifications of one model, for an item of size `reference` (in `unit`).

    `kernels`: launches of one forward pass. `flops`: operations for one item. `traffic_mib`: MiB of activations that
    pass through memory for one item. `params`: parameters. `weight_mib`: weights in memory. `alive_mib`: activations
    alive at once for one item in inference. `kept_mib`: those that a backward pass keeps for one item. `quadratic`:
    share of the operations that grows with the square of the input (attention). `doubt`: 0 if everything is known, 1
    if only operations or parameters are, 2 if nothing is. `sized`: the parameters are stated. `guessed_unit`: nothing
    states what the input is.
    """

    family: str
    unit: str
    reference: int
    kernels: float
    flops: float
    traffic_mib: float
    params: float
    weight_mib: float
    alive_mib: float
    kept_mib: float
    quadratic: float = 0.0
    doubt: int = 0
    sized: bool = False
    guessed_unit: bool = False

    def doubts(self, kind: str) -> Doubts:
        """Return the doubt about each part in a kind of work: in training, stated parameters give all that depends on
        them, and what texts keep.
        """
        weights = 0 if self.sized and kind == "train" else self.doubt
        return Doubts(self.doubt, weights, weights if self.unit == "tok" else self.doubt)

    @property
    def is_close(self) -> bool:
        """Whether what training keeps is close to the truth: of images with public specifications, of texts with
        stated parameters.
        """
        return self.doubt == 0 if self.unit == "px" else self.sized

    def work(self, size: float) -> float:
        """Return the operations of an item of `size` relative to one of `reference`."""
        scale = size / self.reference
        if self.unit == "px":
            return scale * scale
        return (1.0 - self.quadratic) * scale + self.quadratic * scale * scale

    def volume(self, size: float) -> float:
        """Return the bytes of an item of `size` relative to one of `reference`."""
        scale = size / self.reference
        return scale * scale if self.unit == "px" else scale


def from_facts(facts: ModelFacts) -> Known:
    """Return the public specifications of a model."""
    size = facts.reference
    flops = facts.operations(size)
    attention = 4.0 * facts.layers * facts.width * float(size) * size if facts.unit == "tok" else 0.0
    # `activation_mib` counts every layer's output for images, but one layer's for text
    passes = facts.layers if facts.unit == "tok" else 1
    return Known(
        family=facts.family,
        unit=facts.unit,
        reference=size,
        kernels=float(facts.kernels),
        flops=flops,
        traffic_mib=facts.activations_mib(size) * max(passes, 1),
        params=facts.params_m * 1e6,
        weight_mib=facts.params_m * 1e6 * facts.weight_bytes / 2**20,
        alive_mib=facts.activations_mib(size) * facts.alive,
        kept_mib=facts.kept_mib or USUAL_KEPT[facts.unit] * facts.activations_mib(size) * facts.alive,
        quadratic=attention / flops,
    )


def guessed(family: str, params: float | None, flops: float | None, input_size: int | None) -> Known:
    """Estimate the specifications of an undescribed model from its parameters and operations per item."""
    guessed_unit = family not in _families()
    family = _family_of(input_size) if guessed_unit else family
    like = _families()[family]
    if params and params < LEAST_COUNT:
        params = None
    doubt = 1 if flops or params else 2
    if flops and not PLAUSIBLE_FLOPS[0] <= flops <= PLAUSIBLE_FLOPS[1]:
        flops = None
    # one that takes larger images or longer texts works on, and keeps, as much more of each as they are larger
    work, volume = (like.work(input_size), like.volume(input_size)) if input_size else (1.0, 1.0)
    if flops is None:
        flops = work * (like.flops if params is None else like.flops * (params / like.params))
    # the depth of a network grows more slowly than its work, and so does the data it moves
    scale = flops / (work * like.flops)
    size = params if params is not None else like.params * math.sqrt(scale)
    reference = input_size or REFERENCE[like.unit]
    kept = like.kept_mib * volume * scale**0.5
    if params is not None and like.unit == "tok":
        kept = _kept_of_text(family, params, reference)
    return replace(
        like,
        reference=reference,
        kernels=like.kernels * scale**0.25,
        flops=flops,
        traffic_mib=like.traffic_mib * volume * scale**0.5,
        params=size,
        weight_mib=size * like.weight_mib / like.params,
        alive_mib=like.alive_mib * volume * scale**0.5,
        kept_mib=kept,
        doubt=doubt,
        sized=params is not None,
        guessed_unit=guessed_unit,
    )


def _kept_of_text(family: str, params: float, tokens: int) -> float:
    """Return the MiB that a backward pass keeps for a text, if the parameters are all that is known of its model."""
    return need_of(training_of(names.of_stated_size(family, round(params)), 1, tokens), 0).activations


def usual_tokens(name: str) -> int | None:
    """Return the tokens of a text of a public encoder where neither a table nor a request states them: as many as it
    takes, up to USUAL_SEQ; None if it is no such model.
    """
    found = names.public(name)
    encodes = found is not None and found.architecture.kind == "encoder"
    return min(found.architecture.context, USUAL_SEQ) if found is not None and encodes else None


def _of_language_model(name: str, size: int | None) -> Known | None:
    """Return the specifications of a public language model by its architecture, of an encoder for texts of `size`
    tokens; None if it is no such model.

    Those of a generative one are uncertain: an item of a table may be a pass over the input, or generated tokens too.
    """
    found = names.public(name)
    if found is None or found.architecture.kind == "plain":
        return None
    architecture = found.architecture
    family = "encoder" if architecture.kind == "encoder" else "decoder"
    facts = text_facts(
        found.name,
        family,
        architecture.parameters / 1e6,
        architecture.layers + architecture.encoder_layers,
        architecture.width,
        embed_m=(architecture.parameters - architecture.active) / 1e6,
        weight_bytes=4 if family == "encoder" else 2,
    )
    if family == "encoder" and size:
        scale = size / facts.reference
        facts = replace(facts, reference=size, gflops=scale * facts.gflops, activation_mib=scale * facts.activation_mib)
    return replace(from_facts(facts), doubt=0 if family == "encoder" else 1)


def _of_plain(found: names.Found, family: str, params: float | None, size: int | None) -> Known:
    """Return the specifications of a model of which parameters and memory are all that is known (a generator of
    images). The rest is estimated; `params` and `size` are those that a measured table states.
    """
    architecture = found.architecture
    if architecture.item_px:
        family, size = family or "cnn", size or architecture.item_px
    estimate = guessed(family, params, None, size)
    parameters = params or float(architecture.parameters)
    scale = (estimate.reference / architecture.item_px) ** 2 if architecture.item_px and estimate.unit == "px" else 1.0
    return replace(
        estimate,
        params=parameters,
        weight_mib=parameters * found.precision.bits / 8 / 2**20,
        alive_mib=architecture.item_mib * scale,
        kept_mib=(architecture.kept_mib or TRAINING_ITEMS * architecture.item_mib) * scale,
        doubt=1,
    )


class ModelKnowledge:
    """Look up the specifications of a model under any of its names."""

    def __init__(self, facts: Iterable[ModelFacts] = BUILT_IN) -> None:
        """Later specifications replace earlier ones of a name. Without any, architectures are not used either."""
        self.facts: Mapping[str, ModelFacts] = {model.name: model for model in facts}
        self.aliases: Mapping[str, str] = {
            alias: model.name for model in self.facts.values() for alias in model.aliases
        }
        self._squeezed = _unambiguous([*self.aliases, *self.facts], self.aliases)

    def canonical(self, name: str) -> str:
        """Return the name under which a model's figures are kept: `org/ResNet_50` is `resnet50`."""
        whole = name.rsplit("/", 1)[-1].lower().replace("_", "-")
        for short in spellings(whole):
            listed = short in self.facts or short in self.aliases
            known_name = short if listed else self._squeezed.get(_squeeze(short), "")
            if known_name:
                return self.aliases.get(known_name, known_name)
        return without_ending(whole)

    def of(self, name: str, rows: Iterable[Measurement] = ()) -> Known:
        """Return the specifications of a model; `rows` are measurements of it, used only for what describes the
        model, not for its speed.
        """
        facts = self.facts.get(self.canonical(name))
        rows = tuple(rows)
        if facts is not None:
            return from_facts(facts)
        family = next((row.family for row in rows if row.family), "")
        params = next((row.params for row in rows if row.params), None)
        described = [row for row in rows if row.flops_per_item]
        of_text = family in TEXT_FAMILIES or family not in _families()
        sizes = sorted({row.input_size for row in rows if row.input_size})
        middle = sizes[len(sizes) // 2] if sizes else usual_tokens(name) if self.facts and of_text else None
        public = _of_language_model(name, middle) if self.facts and of_text else None
        if public is not None:
            if not described and params is None:
                return public
            family, params = family or public.family, params or public.params
        if described:
            row = next((row for row in described if row.input_size == middle), described[0])
            estimate = guessed(family, params, row.flops_per_item, row.input_size or middle)
            return replace(estimate, quadratic=_quadratic(described, estimate))
        found = names.resolve(name) if self.facts else None
        if found is not None and found.architecture.kind == "plain" and found.architecture.item_mib:
            return _of_plain(found, family, params, middle)
        return guessed(family, params, None, middle)


def _quadratic(rows: Sequence[Measurement], known: Known) -> float:
    """Return the share of a text's operations that grows with the square of its length, from rows of several lengths;
    the known share if all rows have one length.
    """
    flops_by_size = {float(row.input_size): row.flops_per_item for row in rows if row.input_size and row.flops_per_item}
    if known.unit != "tok" or len(flops_by_size) < 2:
        return known.quadratic
    short, long = min(flops_by_size), max(flops_by_size)
    # operations a token = constant + slope * length
    slope = (flops_by_size[long] / long - flops_by_size[short] / short) / (long - short)
    constant = flops_by_size[short] / short - slope * short
    total = constant + slope * known.reference
    return min(max(slope * known.reference / total, 0.0), 1.0) if total > 0 else known.quadratic


def _unambiguous(names: Iterable[str], aliases: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names by their form without hyphens, except those forms that two models share: `regnet-y-1-6gf` and
    `regnet-y-16gf` do.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        found.setdefault(_squeeze(name), {})[aliases.get(name, name)] = name
    return {short: next(iter(models.values())) for short, models in found.items() if len(models) == 1}


def _squeeze(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _family_of(input_size: int | None) -> str:
    return "cnn" if input_size in (None, 224, 299, 384, 32, 160, 192, 256) else "encoder"


@lru_cache(maxsize=1)
def _families() -> Mapping[str, Known]:
    """Return the geometric mean of the typical models of each family."""
    groups = grouped(map(from_facts, TYPICAL), lambda known: known.family)
    return {family: _mean(models) for family, models in groups.items()}


def _mean(models: list[Known]) -> Known:
    def middle(name: str) -> float:
        return math.exp(sum(math.log(getattr(model, name)) for model in models) / len(models))

    figures = ("kernels", "flops", "traffic_mib", "params", "weight_mib", "alive_mib", "kept_mib")
    means: dict[str, Any] = {name: middle(name) for name in figures}
    return replace(models[0], quadratic=sum(model.quadratic for model in models) / len(models), **means)

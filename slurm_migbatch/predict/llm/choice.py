"""Choose slices that hold a language model and serve it within its limits; word the refusal if there are none.

A model that does not fit is refused: its engine would fail at startup. The refusal names what would fit: another
precision, fewer or shorter sequences, another tuning method; else whole GPUs, because no framework shards a model over
slices (NCCL does not run on MIG instances, and a process sees only one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from slurm_migbatch.predict.candidate import Interval
from slurm_migbatch.predict.llm import precision
from slurm_migbatch.predict.llm.memory import Need, need_of, resized
from slurm_migbatch.predict.llm.speed import TokenFigures, figures_of, machine_of
from slurm_migbatch.predict.llm.workload import Training, Workload
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.workload.buckets import rate_of
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.hints import SERVE, Hints
from slurm_migbatch.workload.refusal import Refusal, show

if TYPE_CHECKING:
    from slurm_migbatch.predict.learned import LearnedPredictor

NARROWER: Final = ("fp8", "awq")
"""Suggested quantizations, the widest first."""
LEAST_SIDE: Final = 512
"""Smallest suggested side of images and clips, in pixels."""
OVERHEAD: Final = 1.05
"""Memory that tensor parallelism needs on each GPU besides its share of the model."""
FITS: Final = "the smallest slice that serves %s"
HOLDS: Final = "the smallest slice that holds %s"
SLOW: Final = "no slice is predicted to be fast enough for %s; using the fastest"
HOW: Final = {"near": "taken for %s; ", "size": "only the size of %s is known; ", "public": ""}
CACHE: Final = ". Its KV cache is several times as large if its heads share no keys and values: then add arch="
"""Warning about a model of which only the size is known (`names.of_size`)."""


@dataclass(frozen=True)
class Targets:
    """Speed limits of a request, None if not given: microseconds to the first token, of each further one, of a
    whole request; thousandths of requests per second.
    """

    ttft_us: int | None = None
    tpot_us: int | None = None
    slo_us: int | None = None
    rate: int | None = None

    @classmethod
    def of(cls, hints: Hints) -> Targets:
        """Return the speed limits that hints give."""
        rate = None if hints.role == SERVE else hints.llm.rate  # of all instances together
        if hints.items is not None and hints.deadline_s is not None:
            rate = max(rate or 0, rate_of(hints.items, hints.deadline_s))
        return cls(hints.llm.ttft_us, hints.llm.tpot_us, hints.slo_us, rate)

    def _times(self, figures: TokenFigures) -> Iterator[tuple[str, int, float]]:
        """Yield each limited time in words, with its limit in microseconds and the conservative figure in seconds."""
        times = {"first token": figures.ttft_s, "token": figures.tpot_s, "request": figures.latency_s}
        limits = (self.ttft_us, self.tpot_us, self.slo_us)
        for (name, interval), limit in zip(times.items(), limits, strict=True):
            if limit is not None:
                yield name, limit, interval.high

    def missed(self, figures: TokenFigures) -> str:
        """Return which limit a slice may miss; "" if it keeps all."""
        if not figures.has_speeds:
            return ""
        for name, limit, time_s in self._times(figures):
            if time_s * 1e6 > limit:
                return f"a {name} may take {digits(time_s * 1e3)} ms, over {digits(limit / 1e3)} ms"
        if self.rate is not None and figures.throughput_per_s.low * 1e3 < self.rate:
            return f"may serve only {digits(figures.throughput_per_s.low)} requests/s, needs {digits(self.rate / 1e3)}"
        return ""

    def excess(self, figures: TokenFigures) -> float:
        """Return the factor by which the worst figure misses its limit; at most 1 if all are kept."""
        worst = max((time_s * 1e6 / limit for _, limit, time_s in self._times(figures)), default=0.0)
        if self.rate is not None:
            worst = max(worst, self.rate / max(figures.throughput_per_s.low * 1e3, 1e-9))
        return worst


def figures_by_profile(
    workload: Workload, partition: Partition, rate: int | None, predictor: LearnedPredictor
) -> Mapping[str, TokenFigures]:
    """Return the figures of every plain profile by GRES type, the worst if several kinds of GPUs have it."""
    by_type: dict[str, TokenFigures] = {}
    for kind in partition.kinds:
        for info in kind.geometry.profiles:
            if info.profile.suffix:
                continue
            machine = machine_of(kind, info)
            need = need_of(workload, info.memory_mib)
            figures = figures_of(
                workload, need, machine, (rate or 0) / 1000, predictor.correction(workload, kind, info)
            ).widened(predictor.widening)
            known = by_type.get(info.profile.gres_type)
            by_type[info.profile.gres_type] = figures if known is None else known.worst(figures)
    return by_type


def no_slice_refusal(
    workload: Workload, allowed: Sequence[ProfileOffer], partition: Partition, predictor: LearnedPredictor
) -> Refusal:
    """Return the refusal of a workload that no allowed slice holds."""
    largest = max(allowed, key=lambda offer: offer.memory_mib)
    need = need_of(workload, largest.memory_mib)
    alternatives = list(_ways(workload, allowed, partition, predictor))
    gpus = whole_gpus(need, max(kind.full.memory_mib for kind in partition.kinds))
    alternatives.append(f"{gpus} whole GPU{'s' if gpus > 1 else ''} outside MIG (no framework shards over slices)")
    label = workload.label if workload.model.how != "near" else f"{workload.label} (near name)"
    return Refusal(
        "model_nowhere",
        show_long(label),
        gib(need.slice_mib),
        need.parts,
        gib(largest.memory_mib),
        ", or ".join(alternatives),
    )


def whole_gpus(need: Need, gpu_mib: int) -> int:
    """Return how many GPUs of this size hold a model with tensor parallelism: a power of two, because heads are
    divided.
    """
    gpus = need.used * OVERHEAD / (gpu_mib * need.share)
    return 1 << max(math.ceil(math.log2(max(gpus, 1.0))), 0)


def _ways(
    workload: Workload, allowed: Sequence[ProfileOffer], partition: Partition, predictor: LearnedPredictor
) -> Iterator[str]:
    """Yield changes of the request that would let it fit, each with the slice that it would get."""
    beyond = [offer for offer in partition.plain if offer not in allowed]
    if (larger := _smallest(workload, beyond)) is not None:
        yield f"a larger max= ({larger.profile.gres_type})"
    variants = _of_training(workload) if workload.training is not None else _of_serving(workload)
    yielded = 0
    for words, variant in variants:
        offer = _smallest(predictor.sized(variant), allowed)
        if offer is not None:
            yield f"{words} ({offer.profile.gres_type})"
            yielded += 1
            if yielded == 3:
                return


def _of_serving(workload: Workload) -> Iterator[tuple[str, Workload]]:
    serving = workload.served
    for concurrency in _halves(serving.concurrency):
        yield f"max_num_seqs={concurrency}", replace(workload, serving=replace(serving, concurrency=concurrency))
    for length in _halves(max(serving.length, serving.reserve), 512):
        shorter = replace(serving, length=length, input=min(serving.input, length), reserve=0)
        yield f"max_model_len={length}", replace(workload, serving=shorter)
    for side in _halves(workload.px, LEAST_SIDE):
        yield f"input={side}px", replace(workload, px=side)
    for name in NARROWER:
        quantized = precision.known(name)
        if quantized.bits < workload.precision.bits:
            yield f"quantization={name}", resized(workload, quantized)
    if workload.precision.bits > 5 and workload.architecture.kind != "plain":
        short = min(serving.length, 4096)
        shortest = replace(serving, concurrency=1, length=short, input=min(serving.input, short), reserve=0)
        yield (
            "quantization=awq max_num_seqs=1 max_model_len=4096",
            resized(replace(workload, serving=shortest), precision.known("awq")),
        )


def _of_training(workload: Workload) -> Iterator[tuple[str, Workload]]:
    for words, changed in _easier(workload.tuned):
        kept = precision.known("qlora") if changed.method == "qlora" else workload.precision
        yield words, resized(replace(workload, training=changed), kept)


def _easier(training: Training) -> Iterator[tuple[str, Training]]:
    if not training.checkpointing:
        yield "checkpointing=on", replace(training, checkpointing=True)
    for micro_batch in _halves(training.micro_batch):
        words = f"micro_batch={micro_batch} checkpointing=on"
        yield words, replace(training, micro_batch=micro_batch, checkpointing=True)
    for method in ("lora", "qlora"):
        if training.method == "full" or (training.method, method) == ("lora", "qlora"):
            yield f"method={method} checkpointing=on", replace(training, method=method, checkpointing=True)


def _halves(number: int, least: int = 1) -> Iterator[int]:
    """Yield the powers of two below a number, the largest first, down to `least`."""
    half = 1 << max(number - 1, 0).bit_length() >> 1
    while half >= least and half < number:
        yield half
        half >>= 1


def _smallest(workload: Workload, offers: Sequence[ProfileOffer]) -> ProfileOffer | None:
    largest = max(offers, key=lambda offer: offer.memory_mib, default=None)
    if largest is None or need_of(workload, largest.memory_mib).slice_mib > largest.memory_mib:
        return None
    return next(o for o in offers if need_of(workload, o.memory_mib).slice_mib <= o.memory_mib)


def explanation(
    workload: Workload, figures: TokenFigures, offer: ProfileOffer, reason: str, *, mem_mib: int | None
) -> str:
    """Return the sentence that explains a choice."""
    sentences = {"fits": FITS if workload.serving is not None else HOLDS, "time_short": SLOW}
    text = HOW[workload.model.how].replace("%s", workload.model.name) + sentences[reason] % workload.label
    if mem_mib is not None:
        text += f" in {gib(mem_mib)} of {gib(offer.memory_mib)} GiB, from mem="
    else:
        need = need_of(workload, offer.memory_mib)
        text += f": {gib(need.slice_mib)} of {gib(offer.memory_mib)} GiB ({need.parts})"
        text += CACHE if workload.model.how == "size" and need.cache else ""
    measured = f" with {figures.measured} measured points" if figures.measured else ""
    text += (
        f". Predicted{measured}: {_speeds(workload, figures)}" if figures.has_speeds else ". No prediction of its speed"
    )
    return text + (f". Assumed: {' '.join(workload.assumed)}" if workload.assumed else "")


def _speeds(workload: Workload, figures: TokenFigures) -> str:
    if workload.training is not None:
        return f"{_span(figures.latency_s, 1.0)} s a step, {_span(figures.tokens_s, 1.0)} tokens/s"
    if workload.architecture.kind in ("encoder", "plain"):
        return f"{_span(figures.latency_s, 1.0)} s for {workload.served.concurrency} at once"
    return (
        f"first token {_span(figures.ttft_s, 1e3)} ms, {_span(figures.tpot_s, 1e3)} ms a token, "
        f"{_span(figures.tokens_s, 1.0)} tokens/s"
    )


def _span(found: Interval, scale: float) -> str:
    return f"{digits(found.mid * scale)} ({digits(found.low * scale)}-{digits(found.high * scale)})"


def show_long(text: str) -> str:
    """Quote a label: names in it come from the user."""
    return text if len(text) <= 100 else show(text)

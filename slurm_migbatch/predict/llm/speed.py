"""Compute how fast a slice serves a language model: time to the first token, time of each further one, tokens a second.

Reading a prompt (prefill) is limited by the SMs; generating a token (decode) by reading all weights and every
sequence's cache, so by the slice's share of memory bandwidth; each layer adds launches. Sequences that are served
together wait for each other's prefills: while one generates its tokens, each other one begins
once. Without a serving engine, and in training, PyTorch launches each operation by itself, while the GPU executes
earlier ones: the slower of both counts, and small models and batches are as fast on a small slice. GenZ
(arXiv 2406.01698) and LLM-Viewer (arXiv 2402.16363) use the same kind of roofline with few efficiencies; `migbatch eval
llm` shows how the efficiencies are fitted, and their error, `migbatch eval torch` the error without an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from slurm_migbatch.mig.geometry import ProfileInfo
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.llm.architecture import Architecture
from slurm_migbatch.predict.llm.memory import LOGIT_BYTES, MIB, Need, weights_mib, widened_mib
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.workload import Workload
from slurm_migbatch.workload.catalog import GpuKind


@dataclass(frozen=True)
class Efficiencies:
    """Efficiencies relative to a data sheet's figures.

    `compute`: share of the dense 16-bit rate in prefill; `narrow`: speedup of 8-bit weights with 8-bit
    activations; `wide`: share of the dense 16-bit rate with 32-bit weights, `tf32`: if their products are in TF32;
    `bandwidth`: share of the memory bandwidth in decode; `layer_us`: microseconds of launches and gaps in each layer;
    `first`, `each`: prefills that a first token waits for, and further ones for each other sequence; `turn`: share of
    the time between two requests' ends that the next one also waits. `spread_ttft`, `spread_tpot`: standard deviations
    of logarithms, for a model that was not measured. `eager`: launches run beside the GPU's work instead of adding to
    it.
    """

    compute: float = 0.766
    narrow: float = 1.186
    bandwidth: float = 0.897
    layer_us: float = 48.7
    first: float = 2.29
    each: float = 0.0603
    turn: float = 0.2
    spread_ttft: float = 0.567
    spread_tpot: float = 0.119
    wide: float = 0.041
    tf32: float = 0.16
    eager: bool = False


DEFAULT: Final = Efficiencies()
"""From the fit that `migbatch eval llm` makes on the 92 measurements of TensorRT-LLM, SGLang and vLLM on a whole H100
in NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0, systems/silicon_sample.csv).
"""
EAGER: Final = Efficiencies(compute=0.48, layer_us=800.0, spread_ttft=0.4, spread_tpot=0.4, eager=True)
"""PyTorch without an engine, from `measurements/` (`migbatch eval torch`): a whole H100 and one host, on whose
processor launches depend. With 32-bit weights it reached six tenths of the 32-bit rate, which is a fifteenth of the
dense 16-bit rate; PyTorch uses TF32 for matrix products only if a program sets it (`dtype=tf32`), and reached a third
of its rate, which is half of the 16-bit one.
"""


@dataclass(frozen=True)
class TrainingEfficiencies:
    """The same of a training step.

    `compute`: share of the dense 16-bit rate, `wide`: with 32-bit weights that are not computed in 16 bits, `tf32`: if
    their products are in TF32 (not measured: as much more than `wide` as in inference). `layer_us`: microseconds of
    launches in each layer and pass; `adapted`: factor of these with adapters on all matrices.
    """

    compute: float = 0.37
    wide: float = 0.04
    tf32: float = 0.15
    layer_us: float = 1400.0
    adapted: float = 2.0


TRAINING: Final = TrainingEfficiencies()
"""From the same measurements as EAGER; the model FLOPs utilisation that PaLM (arXiv 2204.02311, section 4.1) and later
reports give for large models is 0.35 to 0.55.
"""
EIGHT_BITS: Final = frozenset([
    "fp8", "fp8-dynamic", "fbgemm-fp8", "modelopt", "w8a8", "w8a8-fp8", "smoothquant", "fp8-e4m3", "fp8-e5m2",
    "fp8-block", "ptpc-fp8", "modelopt-fp8", "w8a8-int8", "blockwise-int8", "int8-sq",
])  # fmt: skip
"""Quantizations whose products are computed in 8 bits."""
SLICE_DOUBT: Final = 0.15
"""Standard deviation of logarithms of a slice's performance relative to its shares. There are no published measurements
for these models; other models' is used, whose mean error on slices is 12 % before they are measured (`migbatch eval
predictor`).
"""
STRANGER_DOUBT: Final = 0.2
"""The same for a model of which only the size is known, and for an engine or kind of work that was not measured."""
TRAINING_SPREAD: Final = 0.3
"""Standard deviation of logarithms of a training step."""
HOST_SPREAD: Final = 0.4
"""The same of launches, which depend on the host."""
SPAN: Final = 1.2816
"""Standard deviations that one in ten exceeds: both ends of an 80 % interval, 90 % bounds."""
LATE: Final = 0.95
"""Highest load for which waiting is computed; above it the rate is not sustained."""


class Machine(NamedTuple):
    """GPU resources of a workload: operations and bytes per second, MiB, and whether it is a slice."""

    flops: float
    bytes_s: float
    mib: float
    sliced: bool = True


@dataclass(frozen=True)
class Pace:
    """Median figures in seconds: the first token, each further one, and a request from end to end; tokens per second of
    all sequences, and how many of them fit at once.
    """

    ttft: float
    tpot: float
    request: float
    tokens_s: float
    at_once: int


@dataclass(frozen=True)
class Correction:
    """Correction of computed times (logarithms: to the first token, of each further one, of a training step), and the
    remaining standard deviations of logarithms; `points`: number of measurements of exactly this model.
    """

    ttft: float = 0.0
    tpot: float = 0.0
    spread_ttft: float | None = None
    spread_tpot: float | None = None
    points: int = 0
    step: float = 0.0
    spread_step: float | None = None

    def of(self, pace: Pace, workload: Workload) -> Pace:
        """Return a computed pace after the correction; a request's time is the sum of its tokens' times."""
        serving = workload.serving
        if self == ASIS or serving is None or pace.tpot <= 0:
            return pace
        ttft, tpot = pace.ttft * math.exp(self.ttft), pace.tpot * math.exp(self.tpot)
        outputs = max(serving.output, 1)
        request = ttft + (outputs - 1) * tpot
        tokens_s = serving.concurrency * outputs / request
        return replace(pace, ttft=ttft, tpot=tpot, request=request, tokens_s=tokens_s)


ASIS: Final = Correction()
"""No measurements."""


@dataclass(frozen=True)
class TokenFigures(Figures):
    """`Figures` whose batch is one request (or training step) and whose rate is requests (steps) per second, with
    the token figures. `slice_mib` is the memory a slice must have; `has_speeds`: whether the speeds are meaningful;
    `measured`: number of points of exactly this model that corrected them.
    """

    ttft_s: Interval
    tpot_s: Interval
    tokens_s: Interval
    slice_mib: int
    has_speeds: bool = True
    measured: int = 0

    @property
    def tokens(self) -> Mapping[str, Interval]:
        """Seconds to the first token and of each further one, and tokens a second."""
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "tokens_per_s": self.tokens_s} if self.has_speeds else {}

    @property
    def need_mib(self) -> int:
        """Memory that a slice must have, in whole MiB: exact, because it is not in the compiled table."""
        return self.slice_mib

    def widened(self, factor: float) -> TokenFigures:
        """Return the figures with intervals of time wider by `factor`; memory, which is computed exactly, stays."""
        times = ("latency_s", "throughput_per_s", "ttft_s", "tpot_s", "tokens_s")
        return self if factor == 1.0 else replace(self, **{name: getattr(self, name).widened(factor) for name in times})

    def worst(self, other: Figures) -> TokenFigures:
        """Return the figures that hold on both kinds of GPUs."""
        assert isinstance(other, TokenFigures)
        return TokenFigures(
            self.latency_s.hull(other.latency_s),
            self.throughput_per_s.hull(other.throughput_per_s, min),
            self.memory_mib.hull(other.memory_mib),
            self.ttft_s.hull(other.ttft_s),
            self.tpot_s.hull(other.tpot_s),
            self.tokens_s.hull(other.tokens_s, min),
            max(self.slice_mib, other.slice_mib),
            self.has_speeds,
            min(self.measured, other.measured),
        )


def machine_of(kind: GpuKind, info: ProfileInfo) -> Machine:
    """Return a profile's resources: operations by its share of the SMs, bandwidth by its memory slices."""
    sms = max(kind.sm_count, kind.full.sm_count, 1)
    compute = max(info.sm_count, 1) / sms
    memory = info.memory_slices / max(kind.full.memory_slices, 1)
    whole = info.profile == kind.full.profile
    return Machine(
        kind.tflops * 1e12 * compute, kind.bandwidth_gbs * 1e9 * memory, float(info.memory_mib), sliced=not whole
    )


def efficiencies_of(workload: Workload) -> Efficiencies:
    """Return the efficiencies of a workload's engine; models that generate nothing are assumed to run without one."""
    serving = workload.serving
    plain = serving is not None and not serving.engine and workload.architecture.kind in ("encoder", "both")
    return EAGER if plain or (serving is not None and serving.engine == "transformers") else DEFAULT


def prefill_s(
    architecture: Architecture,
    kept: Precision,
    tokens: float,
    machine: Machine,
    eff: Efficiencies,
    prompts: float = 1.0,
) -> float:
    """Return the seconds of one pass over `prompts` prompts of this many tokens each, without other sequences."""
    floor = weights_mib(architecture, kept) * MIB / (machine.bytes_s * eff.bandwidth)
    device = max(prompts * architecture.operations_of_prompt(tokens) / _rate(kept, machine, eff), floor)
    return _with_launches(device, architecture.encoder_layers or architecture.layers, eff)


def step_s(workload: Workload, sequences: float, tokens: float, machine: Machine, eff: Efficiencies) -> float:
    """Return the seconds of one decode step, in which each of `sequences` of `tokens` each gets one more token."""
    architecture, kept, serving = workload.architecture, workload.precision, workload.served
    read = weights_read_mib(architecture, kept, sequences) * MIB
    read += sequences * workload.cache_values(round(tokens)) * serving.cache_bits / 8
    compute = sequences * architecture.operations_of_token(tokens) / _rate(kept, machine, eff)
    return _with_launches(max(read / (machine.bytes_s * eff.bandwidth), compute), architecture.layers, eff)


def _rate(kept: Precision, machine: Machine, eff: Efficiencies) -> float:
    """Return the operations per second in a pass with weights of this precision."""
    if kept.bits > 16:
        return machine.flops * _wide(kept, eff)
    return machine.flops * eff.compute * (eff.narrow if kept.name in EIGHT_BITS else 1.0)


def _wide(kept: Precision, eff: Efficiencies | TrainingEfficiencies) -> float:
    """Return the share of the dense 16-bit rate with 32-bit weights."""
    return eff.tf32 if kept.name == "tf32" else eff.wide


def weights_read_mib(architecture: Architecture, kept: Precision, sequences: float) -> float:
    """Return the MiB of weights that one step reads: of routed experts, the mean over those that any sequence uses; no
    encoder, nor what is beside the decoder.
    """
    read = weights_mib(architecture, kept) - widened_mib(architecture, kept)
    read -= (architecture.encoder * kept.bits + architecture.aside * kept.embedding_bits) / 8 / MIB
    lookup = architecture.vocab * architecture.width * kept.embedding_bits / 8 / MIB
    if not architecture.tied and not architecture.headless:
        read -= lookup  # the embedding is only indexed, the output is read
    experts = architecture.experts
    if experts is None:
        return read
    unused = math.pow(1.0 - experts.active / experts.count, sequences)
    return read - architecture.routed * kept.bits / 8 / MIB * unused


def _with_launches(device_s: float, layers: int, eff: Efficiencies) -> float:
    launches_s = layers * eff.layer_us * 1e-6
    # a smooth maximum: launches run ahead of the GPU, but not from the first to the last
    return math.hypot(device_s, launches_s) if eff.eager else device_s + launches_s


def fitting(workload: Workload, need: Need, machine: Machine) -> float:
    """Return how many sequences of the usual length fit into the cache, at least one."""
    serving = workload.served
    sequence_mib = workload.cache_values(serving.input + serving.output) * serving.cache_bits / 8 / MIB
    cache_mib = machine.mib * serving.share - (need.used - need.cache)
    return max(cache_mib / sequence_mib, 1.0) if sequence_mib > 0 else float(serving.concurrency)


def pace_of(workload: Workload, need: Need, machine: Machine, eff: Efficiencies | None = None) -> Pace:
    """Return the performance of a slice with this many sequences at once, each followed by another: a closed-loop
    benchmark. `eff` defaults to those of the workload's engine.
    """
    serving = workload.served
    eff = eff or efficiencies_of(workload)
    inputs, outputs = float(serving.input), float(max(serving.output, 1))
    at_once = min(float(serving.concurrency), fitting(workload, need, machine))
    if workload.architecture.kind in ("encoder", "plain"):
        batch = prefill_s(workload.architecture, workload.precision, inputs, machine, eff, at_once)
        return Pace(batch, 0.0, batch, at_once * inputs / batch, round(at_once))
    prefill = prefill_s(workload.architecture, workload.precision, inputs, machine, eff)
    step = step_s(workload, at_once, inputs + outputs / 2, machine, eff)
    others = at_once - 1.0
    tpot = step + others * prefill / outputs
    prefills = 1.0 + others / at_once * (eff.first - 1.0) + eff.each * others
    first = prefill * prefills + step
    first += eff.turn * others / at_once * (first + (outputs - 1) * tpot) / at_once
    served = first + (outputs - 1) * tpot
    waits = (serving.concurrency / at_once - 1.0) * served  # sequences that do not fit wait for those that do
    request = served + waits
    return Pace(first + waits, tpot, request, at_once * outputs / served, max(int(at_once), 1))


def figures_of(
    workload: Workload, need: Need, machine: Machine, rate: float, correction: Correction = ASIS
) -> TokenFigures:
    """Return all figures of a workload on a slice; `rate`: arriving requests per second, 0 for a closed loop;
    `correction`: by measurements.
    """
    memory = Interval(need.used - need.doubt, need.used, need.used + need.doubt)
    if workload.training is not None:
        return _training_figures(workload, need, machine, memory, correction)
    pace = pace_at(workload, need, machine, rate, correction)
    computed = arithmetic_spread(workload, machine)
    ttft, tpot = correction.spread_ttft or computed[0], correction.spread_tpot or computed[1]
    request = _interval(pace.request, tpot)
    return TokenFigures(
        request,
        _interval(pace.tokens_s / max(workload.serving.output if workload.serving else 1, 1), tpot),
        memory,
        _interval(pace.ttft, ttft),
        _interval(pace.tpot, tpot),
        _interval(pace.tokens_s, tpot),
        need.slice_mib,
        has_speeds=workload.architecture.kind != "plain",
        measured=correction.points,
    )


def arithmetic_spread(workload: Workload, machine: Machine, eff: Efficiencies | None = None) -> tuple[float, float]:
    """Return the standard deviations of logarithms of computed times: to the first token, of each further one. `eff`
    defaults to those of the workload's engine.
    """
    eff, doubt = eff or efficiencies_of(workload), _doubt(workload, machine)
    return math.hypot(eff.spread_ttft, doubt), math.hypot(eff.spread_tpot, doubt)


def pace_at(workload: Workload, need: Need, machine: Machine, rate: float, correction: Correction) -> Pace:
    """Return the performance of a slice with random arrivals at a rate: the concurrency follows from the rate
    (Little's law), and a first token waits as in a queue of one server that reads prompts (M/D/1).
    """
    full = correction.of(pace_of(workload, need, machine), workload)
    serving = workload.serving
    if rate <= 0 or serving is None or workload.architecture.kind in ("encoder", "plain"):
        return full
    most = full.at_once / full.request
    low, high = 1.0, float(full.at_once)
    pace = full
    for _ in range(
        min(full.at_once.bit_length(), 5)
    ):  # near the concurrency at which the served rate equals the arrival rate
        middle = (low + high) / 2
        fewer = replace(workload, serving=replace(serving, concurrency=max(round(middle), 1)))
        pace = correction.of(pace_of(fewer, need, machine), fewer)
        if pace.at_once / pace.request < rate:
            low = middle
        else:
            high = middle
    pace = replace(pace, tokens_s=full.tokens_s)  # the stated rate is the slice's capacity
    load = min(rate / max(most, 1e-12), LATE)
    eff = efficiencies_of(workload)
    prefill = prefill_s(workload.architecture, workload.precision, float(serving.input), machine, eff)
    waits = load / (2.0 * (1.0 - load)) * prefill
    return replace(pace, ttft=pace.ttft + waits, request=pace.request + waits)


def _training_figures(
    workload: Workload, need: Need, machine: Machine, memory: Interval, correction: Correction
) -> TokenFigures:
    training, (seconds, spread) = workload.tuned, corrected_step(workload, need, machine, correction)
    speeds = workload.architecture.kind != "plain"
    tokens = training.micro_batch * (training.seq if speeds else 1)
    step, rate = _interval(seconds, spread), _interval(training.micro_batch / seconds, spread)
    speed = _interval(tokens / seconds, spread)
    return TokenFigures(
        step, rate, memory, step, step, speed, need.slice_mib, has_speeds=speeds, measured=correction.points
    )


def corrected_step(workload: Workload, need: Need, machine: Machine, correction: Correction) -> tuple[float, float]:
    """Return the seconds of a training step after a correction, and the standard deviation of their logarithm."""
    seconds, spread = training_step(workload, need, machine)
    return seconds * math.exp(correction.step), correction.spread_step or spread


def step_interval(workload: Workload, need: Need, machine: Machine, correction: Correction) -> Interval:
    """Return the seconds of a training step as `figures_of` does, without its other figures."""
    return _interval(*corrected_step(workload, need, machine, correction))


def training_step(
    workload: Workload, need: Need, machine: Machine, eff: TrainingEfficiencies = TRAINING
) -> tuple[float, float]:
    """Return the computed seconds of a training step, and the standard deviation of their logarithm."""
    architecture, training = workload.architecture, workload.tuned
    tokens = float(training.seq * training.micro_batch)
    # backward passes cost twice a forward one; frozen weights need no gradient of their own
    passes = (3.0 if training.method == "full" else 2.0) + (1.0 if training.checkpointing else 0.0)
    operations = architecture.operations(float(training.seq)) * training.micro_batch
    if architecture.kind == "plain":
        operations, tokens = 2.0 * architecture.extra * training.micro_batch, float(training.micro_batch)
    rate = machine.flops * (_wide(workload.precision, eff) if workload.precision.bits > 16 else eff.compute)
    compute = passes * operations / rate
    states = (need.weights + 2.0 * need.states) * MIB / machine.bytes_s
    device = compute + states + architecture.logits * tokens * LOGIT_BYTES / machine.bytes_s
    layers = architecture.layers + architecture.encoder_layers
    host = passes * layers * eff.layer_us * 1e-6 * (1.0 if training.method == "full" else eff.adapted)
    by_host = host**2 / (device**2 + host**2)
    return math.hypot(device, host), math.hypot(TRAINING_SPREAD, HOST_SPREAD * by_host, _doubt(workload, machine))


def _doubt(workload: Workload, machine: Machine) -> float:
    serving = workload.serving
    measured = serving is not None and serving.engine in ("", "trtllm", "vllm", "sglang")
    unmeasured = workload.model.how == "size" or not measured or workload.architecture.kind != "decoder"
    return math.hypot(SLICE_DOUBT if machine.sliced else 0.0, STRANGER_DOUBT if unmeasured else 0.0)


def _interval(middle: float, spread: float) -> Interval:
    factor = math.exp(SPAN * spread)
    return Interval(middle / factor, middle, middle * factor)

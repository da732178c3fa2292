"""The physical prior: what a model should do on a slice, from first principles and public facts, without a measurement.

Time of a batch is the largest of three floors:

- the host launches the kernels one after the other, whatever the slice;
- the compute roofline, by the slice's share of the GPU's SMs (from the geometry: a 3g.40gb of an H100 has 60 of 132
  SMs);
- the memory roofline, by the slice's share of the memory slices.

Memory is the framework's context, the weights with their training state, and the activations of the batch.

It is a prior and says so by its intervals: they are wide. Two constants, the launch time and the share of the peak,
were set once by hand against public measurements of eager PyTorch on an A100 80GB (eleven models in inference,
ParvaGPU's, MIT licence), where the mean error is then about 25 % and four of five figures are within a factor of
1.65; on another software stack it can be far off. A measurement of the model always beats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from slurm_migbatch.mig.geometry import ProfileInfo
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind

LAUNCH_S: Final = 30e-6
"""Host time for one kernel of an eager framework."""
PEAK_SHARE: Final = 0.13
"""Share of the dense 16-bit matrix rate that a saturated eager model in 32-bit storage reaches."""
BANDWIDTH_SHARE: Final = 0.7
CONTEXT_MIB: Final = 700.0
"""CUDA context and framework libraries of one process on a slice."""
TRAINING_WORK: Final = 3.0
"""Forward and backward pass against the forward pass alone."""
TRAINING_STATE: Final = 4.0
"""Weights, gradients and two moments against the weights alone."""
TRAINING_ACTIVATIONS: Final = 3.0
"""Activations kept for the backward pass against those alive at once in inference."""
TIME_SPREAD: Final = 1.7
"""The truth is within this factor of the guess in about four of five cases."""
MEMORY_SPREAD: Final = 1.3


class PhysicalPrior:
    """The predictor that needs no measurement."""

    def __init__(self, models: Iterable[ModelFacts] = BUILT_IN) -> None:
        """Later models replace earlier ones of the same name, so a site's own facts go last."""
        self._models = {facts.name: facts for facts in models}
        self._aliases = {alias: facts.name for facts in self._models.values() for alias in facts.aliases}

    @property
    def version(self) -> str:
        """Which predictor."""
        return "prior-1"

    def grids(self) -> Mapping[str, Grid]:
        """The known models with their bucket edges."""
        return {name: facts.grid for name, facts in self._models.items()}

    def aliases(self) -> Mapping[str, str]:
        """Other names of known models."""
        return self._aliases

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        """Figures of every plain profile; none for a model that is not known."""
        facts = self._models.get(cell.model)
        if facts is None:
            return {}
        plain = [info for info in kind.geometry.profiles if not info.profile.suffix]
        return {info.profile: _figures(facts, cell, kind, info) for info in plain}


def batch_seconds(facts: ModelFacts, cell: Bucket, kind: GpuKind, info: ProfileInfo) -> float:
    """The best guess for one batch, in seconds."""
    training = cell.role == "train"
    work = facts.operations(cell.input) * cell.batch * (TRAINING_WORK if training else 1.0)
    sms = max(info.sm_count, 1)
    per_sm = kind.tflops * 1e12 / max(kind.sm_count, kind.full.sm_count, 1)
    compute = work / (per_sm * sms * PEAK_SHARE)
    moved_mib = _weights_mib(facts) * (TRAINING_STATE if training else 1.0)
    moved_mib += 2 * facts.activations_mib(cell.input) * cell.batch * (TRAINING_ACTIVATIONS if training else 1.0)
    share = info.memory_slices / kind.geometry.memory_slices
    memory = moved_mib * 2**20 / (kind.bandwidth_gbs * 1e9 * share * BANDWIDTH_SHARE)
    launches = facts.kernels * (TRAINING_WORK if training else 1.0) * LAUNCH_S
    return max(launches, compute, memory)


def memory_mib(facts: ModelFacts, cell: Bucket) -> float:
    """The best guess for the memory in use, in MiB."""
    training = cell.role == "train"
    weights = _weights_mib(facts) * (TRAINING_STATE if training else 1.0)
    activations = facts.activations_mib(cell.input) * cell.batch * (TRAINING_ACTIVATIONS if training else 1.0)
    return CONTEXT_MIB + weights + activations


def _weights_mib(facts: ModelFacts) -> float:
    return facts.params_m * 1e6 * facts.weight_bytes / 2**20


def _figures(facts: ModelFacts, cell: Bucket, kind: GpuKind, info: ProfileInfo) -> Figures:
    seconds = batch_seconds(facts, cell, kind, info)
    memory = memory_mib(facts, cell)
    latency = Interval(seconds / TIME_SPREAD, seconds, seconds * TIME_SPREAD)
    throughput = Interval(cell.batch / latency.high, cell.batch / latency.mid, cell.batch / latency.low)
    return Figures(latency, throughput, Interval(memory / MEMORY_SPREAD, memory, memory * MEMORY_SPREAD))

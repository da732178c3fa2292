"""The form of the curves: time of a batch, and memory in use, over batch, slice, input size and processes.

A surface turns parameters into the logarithm of a figure at each point, with its derivatives. The parameters of a model
are learned (`fewshot`), what models have in common is their distribution (`population`). The forms are ours; the knee
that they have in common with D-STACK's and PARIS's curves is where the device's time overtakes the host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.known import Known
from slurm_migbatch.workload.gpufacts import GpuFacts

SHARPNESS: Final = 7.0
"""How sharply the larger of host and device time wins: the exponent of a smooth maximum."""


class Surface(Protocol):
    """A figure's form. Parameters are a vector; `names` says which."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in order."""
        ...

    def value(self, theta: Array, cells: Cells) -> tuple[Array, Array]:
        """Log of the figure at each point, and its derivatives (points x parameters)."""
        ...

    def expected(self, known: Known, gpu: GpuFacts, kind: str) -> Array:
        """The parameters that physics and data sheets let expect for a model on a GPU; `kind` is infer or train."""
        ...

    def spread(self, doubt: int) -> Array:
        """Standard deviations around `expected` before anything was measured, at a degree of doubt (`Known.doubt`)."""
        ...


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


class TimeSurface:
    """Seconds for one batch of one process.

    The host launches kernels in `exp(host)` seconds whatever the slice. The device needs `exp(item)` seconds an item on
    the whole GPU, for `batch + exp(start) * sm**start_sm` items (small batches do not fill it), divided by the slice's
    share: `sm**(scale*mix) * memory**(scale*(1-mix))`, a roofline between SMs and memory bandwidth. The device is
    shared by the processes, `procs**share`. The larger of the two counts, and to that `exp(serial)` seconds an item are
    added that nothing overlaps (data to the device and back).
    """

    names = ("host", "item", "start", "scale", "mix", "start_sm", "serial", "share", "input")

    def value(self, theta: Array, cells: Cells) -> tuple[Array, Array]:
        """See `Surface`."""
        host, item, start, scale, mix, start_sm, serial, share, inputs = theta
        sm, memory = np.log(cells.sm), np.log(cells.memory)
        procs, work, volume = np.log(cells.procs), np.log(cells.work), np.log(cells.volume)
        idle = np.exp(np.clip(start + start_sm * sm, -30.0, 30.0))
        filled = cells.batch + idle
        roof = mix * sm + (1.0 - mix) * memory
        device = item + np.log(filled) - scale * roof + share * procs + inputs * work
        both = np.logaddexp(SHARPNESS * host, SHARPNESS * device) / SHARPNESS
        by_device = _sigmoid(SHARPNESS * (device - host))
        added = serial + np.log(cells.batch) + volume
        value = np.logaddexp(both, added)
        overlapped = _sigmoid(both - added)
        to_device = overlapped * by_device
        slopes = np.column_stack(
            [
                overlapped * (1.0 - by_device),
                to_device,
                to_device * idle / filled,
                -to_device * roof,
                -to_device * scale * (sm - memory),
                to_device * idle / filled * sm,
                1.0 - overlapped,
                to_device * procs,
                to_device * work,
            ]
        )
        return value, slopes

    def expected(self, known: Known, gpu: GpuFacts, kind: str) -> Array:
        """See `Surface`. Round figures for an eager framework: 30 us a launch, 30 % of the peak, and every activation
        through memory four times; a training step is three passes."""
        passes = 3.0 if kind == "train" else 1.0
        compute = known.flops / (0.3 * gpu.tflops * 1e12)
        memory = 4.0 * known.traffic_mib * 2**20 / (gpu.bandwidth_gbs * 1e9)
        # an item's input crosses to the device at about 6 GB/s: 600 kB of an image, next to nothing of a text
        serial = 1e-4 if known.unit == "px" else 2e-5
        return np.array(
            [
                np.log(30e-6 * known.kernels * passes),
                np.log((compute + memory) * passes),
                0.5,
                0.95,
                0.55,
                0.4,
                np.log(serial),
                1.0,
                1.0,
            ]
        )

    def spread(self, doubt: int) -> Array:
        """See `Surface`."""
        unsure = (0.0, 0.5, 1.0)[doubt]
        return np.array([0.4 + unsure, 0.6 + 1.5 * unsure, 0.7, 0.08, 0.15, 0.4, 1.0, 0.04, 0.1])


class MemorySurface:
    """MiB in use on a slice: what one process holds whatever the batch, and what each item adds; per process."""

    names = ("base", "item", "slice")

    def value(self, theta: Array, cells: Cells) -> tuple[Array, Array]:
        """See `Surface`."""
        base, item, context = theta
        shared = base + context * np.log(cells.sm)
        grown = item + np.log(cells.batch) + np.log(cells.volume)
        procs = np.log(cells.procs)
        total = np.logaddexp(shared, grown)
        fixed = _sigmoid(shared - grown)
        return total + procs, np.column_stack([fixed, 1.0 - fixed, fixed * np.log(cells.sm)])

    def expected(self, known: Known, gpu: GpuFacts, kind: str) -> Array:
        """See `Surface`. A context of 700 MiB, weights (four times in training: gradients and two moments), activations
        (three times in training: they are kept for the backward pass)."""
        training = kind == "train"
        base = 700.0 + known.weight_mib * (4.0 if training else 1.0)
        return np.array([np.log(base), np.log(known.alive_mib * (3.0 if training else 1.0)), 0.0])

    def spread(self, doubt: int) -> Array:
        """See `Surface`."""
        unsure = (0.0, 0.4, 0.8)[doubt]
        return np.array([0.25 + unsure, 0.6 + unsure, 0.05])


TIME: Final = TimeSurface()
MEMORY: Final = MemorySurface()


@dataclass(frozen=True)
class Belief:
    """A Gaussian over the parameters of one model: `mean` and covariance."""

    mean: Array
    covariance: Array

    def __post_init__(self) -> None:
        assert self.covariance.shape == (len(self.mean), len(self.mean))

    def predict(self, surface: Surface, cells: Cells) -> tuple[Array, Array]:
        """Log of the figure at each point, and its standard deviation from the parameters' (to first order)."""
        value, slopes = surface.value(self.mean, cells)
        variance = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        return value, np.sqrt(np.maximum(variance, 0.0))


def paced_by_device(surface: Surface, belief: Belief, cells: Cells) -> Array:
    """1 where what grows with the items sets the pace (the device; for memory: what the batch adds), else 0."""
    _, slopes = surface.value(belief.mean, cells)
    paced: Array = (slopes[:, surface.names.index("item")] > 0.5).astype(np.float64)
    return paced

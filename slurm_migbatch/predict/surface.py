"""Define the form of the curves: time of a batch, and memory in use, over batch, slice, input size and processes.

A surface turns parameters into the logarithm of a figure at each point, with its derivatives. The parameters of a model
are learned (`fewshot`), their distribution over models is in `population`. The forms are ours; the knee, shared with
D-STACK's and PARIS's curves, is where the device's time exceeds the host's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.known import Doubts, Known
from slurm_migbatch.workload.gpufacts import GpuModelFacts

SHARPNESS: Final = 7.0
"""Sharpness of the maximum of host and device time: the exponent of a smooth maximum."""


MISFIT: Final = 0.045
"""Standard deviation (of logarithms) of a model around its surface."""
NUGGET: Final = 0.02
"""Standard deviation of a careful measurement."""
_REACH: Final = np.array([1.5, 1.0, 1.0, 1.0, 1.0])
"""Correlation length of the misfit, in the logarithms of batch, shares, processes and work."""


TRAINED_BYTES: Final = 16.0
"""Bytes that a training takes for each parameter."""
MEMORY_COMMON: Final = 8.0
"""Factor by which the common part of what physics misses is larger in memory than in time: activations are rough
estimates. Chosen by leaving models out over MIGPerf's memory figures, the only ones.
"""


PEAK: Final = 0.3
"""Share of the dense 16-bit rate at which a network computes."""
PASS_OF_VISION_TRANSFORMERS: Final = 0.12
"""The same of vision transformers in inference, halfway (in logarithms) to the share without tensor cores: PyTorch
computes convolutions in TF32, but the products of 32-bit weights in 32 bits unless a program sets something else, as
MIGPerf's and our own programs did not. Training usually has 16 bits.
"""


class _Terms(NamedTuple):
    """Parts of the time at each point: `idle` items that the device has room for, `filled` with the batch, the slice's
    share of the device (`roof`), the logarithms of the device's time, of the longer of it and the host's, and of all.
    """

    idle: Array
    filled: Array
    roof: Array
    device: Array
    longer: Array
    value: Array


class TimeSurface:
    """Seconds for one batch of one process.

    The host launches kernels in `exp(host)` seconds whatever the slice. The device needs `exp(item)` seconds an item on
    the whole GPU, for `batch + exp(start) * sm**start_sm / volume` items (small batches do not fill it, and of small
    items more are needed), divided by the slice's share: `sm**(scale*mix) * memory**(scale*(1-mix))`, a roofline
    between SMs and memory bandwidth. The device is shared by the processes, `procs**share`. The larger of the two
    counts, plus `exp(serial)` seconds an item that nothing overlaps (data to the device and back).

    Attributes:
        names: the parameters in order.
        by_precision: those that the arithmetic precision changes by more than models differ.
        by_context: those that depend on the software more than on the model.
        by_stack: those that are larger by the same factor where everything is slower.
        common: factor by which the common part of what physics misses is larger than usual, because the specifications
            are rough.
    """

    names = ("host", "item", "start", "scale", "mix", "start_sm", "serial", "share", "input")
    by_precision = ("item",)
    by_context = ()
    by_stack = ("host", "item", "serial")
    common = 1.0

    def curve(self, theta: Array, cells: Cells) -> Array:
        """Return the log of the figure at each point.

        For several draws at once `theta` has the shape (parameters, draws, 1); the result has draws in front.
        """
        return self._terms(theta, cells).value

    def value(self, theta: Array, cells: Cells) -> tuple[Array, Array]:
        """Return what `curve` does, and its derivatives (points x parameters)."""
        scale = theta[3]
        logs = cells.logs
        idle, filled, roof, device, longer, value = self._terms(theta, cells)
        by_device = np.exp(SHARPNESS * (device - longer))
        overlapped = np.exp(longer - value)
        to_device = overlapped * by_device
        unfilled = to_device * idle / filled
        slopes = np.empty((*value.shape, len(self.names)))
        slopes[..., 0] = overlapped * (1.0 - by_device)
        slopes[..., 1] = to_device
        slopes[..., 2] = unfilled
        slopes[..., 3] = -to_device * roof
        slopes[..., 4] = -to_device * scale * (logs.sm - logs.memory)
        slopes[..., 5] = unfilled * logs.sm
        slopes[..., 6] = 1.0 - overlapped
        slopes[..., 7] = to_device * logs.procs
        slopes[..., 8] = to_device * logs.work
        return value, slopes

    def _terms(self, theta: Array, cells: Cells) -> _Terms:
        host, item, start, scale, mix, start_sm, serial, share, inputs = theta
        logs = cells.logs
        idle = np.exp(np.minimum(np.maximum(start + start_sm * logs.sm - logs.volume, -30.0), 30.0))
        filled = cells.batch + idle
        roof = mix * logs.sm + (1.0 - mix) * logs.memory
        device = item + np.log(filled) - scale * roof + share * logs.procs + inputs * logs.work
        longer = np.logaddexp(SHARPNESS * host, SHARPNESS * device) / SHARPNESS
        value = np.logaddexp(longer, serial + logs.batch + logs.volume)
        return _Terms(idle, filled, roof, device, longer, value)

    def expected(self, known: Known, gpu: GpuModelFacts, kind: str) -> Array:
        """Return a model's expected parameters on a GPU, from physics and data sheets; `kind` is infer or train.

        Round figures for an eager framework: 30 us a launch, PEAK of the peak, and every activation through memory four
        times; a training step is three passes.
        """
        passes = 3.0 if kind == "train" else 1.0
        share = PASS_OF_VISION_TRANSFORMERS if known.family == "vit" and kind == "infer" else PEAK
        compute = known.flops / (share * gpu.tflops * 1e12)
        memory = 4.0 * known.traffic_mib * 2**20 / (gpu.bandwidth_gbs * 1e9)
        # an item's input is copied to the device at about 6 GB/s: 600 kB of an image, negligible for text
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

    def spread(self, doubts: Doubts) -> Array:
        """Return the prior standard deviations around `expected`, at these degrees of doubt."""
        unsure = (0.0, 0.5, 1.0)[doubts.work]
        return np.array([0.4 + unsure, 0.6 + 1.5 * unsure, 0.7, 0.08, 0.15, 0.4, 1.0, 0.04, 0.1])


class MemorySurface:
    """MiB in use on a slice: a constant part of one process, and a part for each item; per process.

    Its attributes and methods are described in `TimeSurface`.
    """

    names = ("base", "item", "slice")
    by_precision = ()
    by_context = ("base",)
    by_stack = ()
    common = MEMORY_COMMON

    def curve(self, theta: Array, cells: Cells) -> Array:
        """See `TimeSurface`."""
        return self.value(theta, cells)[0]

    def value(self, theta: Array, cells: Cells) -> tuple[Array, Array]:
        """See `TimeSurface`."""
        base, item, context = theta
        logs = cells.logs
        shared = base + context * logs.sm
        grown = item + logs.batch + logs.volume
        one = np.logaddexp(shared, grown)
        value = one + logs.procs
        fixed = np.exp(shared - one)
        slopes = np.empty((*value.shape, len(self.names)))
        slopes[..., 0] = fixed
        slopes[..., 1] = 1.0 - fixed
        slopes[..., 2] = fixed * logs.sm
        return value, slopes

    def expected(self, known: Known, _gpu: GpuModelFacts, kind: str) -> Array:
        """See `TimeSurface`. A context with its libraries of 900 MiB (half with lazy loading, twice without), weights
        (in training 16 bytes of each parameter, with gradients and two moments in 32 bits, or in 16 bits with a copy in
        32), activations (all that are kept, in training).
        """
        training = kind == "train"
        base = 900.0 + (TRAINED_BYTES * known.params / 2**20 if training else known.weight_mib)
        return np.array([np.log(base), np.log(known.kept_mib if training else known.alive_mib), 0.0])

    def spread(self, doubts: Doubts) -> Array:
        """See `TimeSurface`."""
        unsure = (0.0, 0.4, 0.8)
        return np.array([0.35 + unsure[doubts.weights], 0.6 + unsure[doubts.activations], 0.05])


Surface: TypeAlias = TimeSurface | MemorySurface
"""Form of a figure. Parameters are a vector; `names` lists them."""

TIME: Final = TimeSurface()
MEMORY: Final = MemorySurface()


HOST, DEVICE, SHARED = 0, 1, 2
"""What limits the speed at a point: the host (for memory: the constant part), the device (the items), or several
processes that share the slice.
"""


@dataclass(frozen=True)
class Belief:
    """The belief about one model: a Gaussian over the parameters, and the misfit of measured points.

    `mean` and `covariance` are those of the parameters. `places` (points x 5, logarithms of batch, shares, processes
    and work), `offsets` (logarithms) and `noise` (standard deviations of single measurements) are the measured points:
    what no parameters explain applies to nearby points (a Gaussian process of standard deviation MISFIT).
    """

    mean: Array
    covariance: Array
    places: Array = field(default_factory=lambda: np.zeros((0, 5)))
    offsets: Array = field(default_factory=lambda: np.zeros(0))
    noise: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        assert self.covariance.shape == (len(self.mean), len(self.mean))
        assert len(self.places) == len(self.offsets) == len(self.noise)

    def predict(self, surface: Surface, cells: Cells) -> tuple[Array, Array]:
        """Return the log of the figure at each point, and the standard deviation of a measurement there (to first
        order).
        """
        value, deviation, _ = self.predict_paced(surface, cells)
        return value, deviation

    def predict_paced(self, surface: Surface, cells: Cells) -> tuple[Array, Array, npt.NDArray[np.intp]]:
        """Return what `predict` does, and which of HOST, DEVICE and SHARED limits the speed at each point."""
        value, slopes = surface.value(self.mean, cells)
        variance = np.maximum(np.einsum("ij,ij->i", slopes @ self.covariance, slopes), 0.0)
        misfit = np.full(len(cells), MISFIT**2)
        if len(self.offsets):
            near = _misfit_covariance(places_of(cells), self.places)
            value = value + near @ (self._inverse @ self.offsets)
            misfit = np.maximum(misfit - np.einsum("ij,ij->i", near @ self._inverse, near), 0.0)
        by_items = slopes[:, surface.names.index("item")] > 0.5
        pace = np.where(cells.procs > 1, SHARED, np.where(by_items, DEVICE, HOST)).astype(np.intp)
        return value, np.sqrt(variance + misfit + NUGGET**2), pace

    @property
    def surprise(self) -> float:
        """The squared distance of the measured points from the curve, in standard deviations."""
        return float(self.offsets @ self._inverse @ self.offsets)

    def evidence(self, *, misfit: float, noise: float) -> float:
        """Return the logarithm of the likelihood of the measured points, except for a constant, if the misfit and the
        noise are so many times the assumed ones.
        """
        covariance = misfit**2 * _misfit_covariance(self.places, self.places) + np.diag((noise * self.noise) ** 2)
        squares = self.offsets @ np.linalg.solve(covariance, self.offsets)
        return -0.5 * float(squares + np.linalg.slogdet(covariance)[1])

    @cached_property
    def _inverse(self) -> Array:
        covariance = _misfit_covariance(self.places, self.places) + np.diag(self.noise**2)
        return np.asarray(np.linalg.inv(covariance), dtype=np.float64)


def places_of(cells: Cells) -> Array:
    """Return the coordinates of points, for the misfit between them."""
    return np.log(np.column_stack([cells.batch, cells.sm, cells.memory, cells.procs, cells.work]))


def single_noise(noise: Array) -> Array:
    """Return the standard deviations of single measurements in those of points around the curve, which have MISFIT
    too.
    """
    return np.asarray(np.sqrt(np.maximum(noise**2 - MISFIT**2, NUGGET**2)))


def _misfit_covariance(first: Array, second: Array) -> Array:
    """Return the covariance of the misfit between points."""
    squares = np.zeros((len(first), len(second)))
    # one coordinate at a time: far less memory
    for first_axis, second_axis in zip((first / _REACH).T, (second / _REACH).T, strict=True):
        squares += np.subtract.outer(first_axis, second_axis) ** 2
    return np.asarray(MISFIT**2 * np.exp(-0.5 * squares))

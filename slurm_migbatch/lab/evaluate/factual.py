"""Define rules with the predictor's specifications and no measurement of the model: its baselines at k=0.

- `roofline with facts`: t = max(launches / a, work / (b * peak of the slice) + traffic * c / bandwidth of the slice);
  the three parameters are fitted to the other models (relative errors, soft L1), of the same GPU if there are any.
- `gbm with facts`: boosted trees on slice, batch, launches, operations, traffic, parameters and whether it is text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.known import TEXT_FAMILIES

_START = (30e-6, 0.3, 4.0)
"""Seconds of a launch, share of the peak, passes of the activations through memory: the predictor's physical prior."""


def roofline(curves: MeasuredCurves, teachers: Sequence[MeasuredCurves]) -> Array:
    """Return the logarithms of the seconds by the fitted roofline; without teachers by the physical prior's figures."""
    from scipy.optimize import least_squares

    start = np.log(_START)
    if not teachers:
        return _logs(curves, start)
    # models count equally, however many points of them were measured
    weights = [1.0 / np.sqrt(len(teacher)) for teacher in teachers]

    def missed(parameters: Array) -> Array:
        return np.concatenate(
            [w * (_logs(teacher, parameters) - teacher.logs) for teacher, w in zip(teachers, weights, strict=True)]
        )

    return _logs(curves, np.asarray(least_squares(missed, start, loss="soft_l1", f_scale=0.1).x))


def _logs(curves: MeasuredCurves, parameters: Array) -> Array:
    launch, peak, passes = np.exp(parameters)
    sample = curves.sample
    known, gpu = sample.known, sample.gpu.facts
    cells = sample.cells.take(curves.index)
    times = 3.0 if sample.kind == "train" else 1.0
    compute = cells.batch * cells.work * known.flops / (peak * gpu.tflops * 1e12 * cells.sm)
    moved = cells.batch * cells.volume * known.traffic_mib * 2**20
    memory = passes * moved / (gpu.bandwidth_gbs * 1e9 * cells.memory)
    return np.asarray(np.log(times * np.maximum(launch * known.kernels, compute + memory)), dtype=np.float64)


def features(curves: MeasuredCurves) -> Array:
    """Return the specifications of a model as columns for trees."""
    known, gpu = curves.sample.known, curves.sample.gpu.facts
    cells = curves.sample.cells.take(curves.index)
    ones = np.ones(len(curves))
    return np.column_stack(
        [
            np.log(known.flops * cells.work / (gpu.tflops * 1e12)),
            np.log(known.traffic_mib * cells.volume / gpu.bandwidth_gbs),
            np.log(known.kernels) * ones,
            np.log(known.params) * ones,
            np.log(cells.memory),
            (1.0 if known.family in TEXT_FAMILIES else 0.0) * ones,
        ]
    )

"""Measure the activity of a slice by NVML's GPU performance monitoring (GPM): Hopper and later.

A metric is computed between two samples of one GPU instance. The last sample of each instance is kept, so each call
costs one sample and one computation, and covers the time since the previous call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

import pynvml

from slurm_migbatch.mig.driver import Activity, DriverError, Instance

Call = Callable[..., Any]
"""`NvmlGpu._call`: the operation in words, a function of NVML and its arguments."""

_SM, _TENSOR, _DRAM = 2, 5, 10
"""NVML_GPM_METRIC_SM_UTIL, _ANY_TENSOR_UTIL and _DRAM_BW_UTIL, percent."""
LEAST_S: Final = 0.1
"""Minimum time between samples: in less NVML has no figure for the traffic of the memory."""


class GpmSamples:
    """The last sample of each instance of one GPU, by the UUID of its MIG device, with its holder and time."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._last: dict[str, tuple[Any, float, tuple[int, int]]] = {}

    def measure(self, device: Any, instance: Instance, holder: tuple[int, int]) -> Activity | None:
        """Return the activity of the instance since the last call for this holder; None at the first.

        Raises DriverError.
        """
        uuid = instance.mig_uuid or ""
        previous = self._last.get(uuid)
        if previous is not None and previous[2] != holder:
            self.forget(uuid)
            previous = None
        now = time.monotonic()
        if previous is not None and now - previous[1] < LEAST_S:
            return None
        operation = f"the activity of {instance}"
        sample = self._call(operation, pynvml.nvmlGpmSampleAlloc)
        try:
            self._call(operation, pynvml.nvmlGpmMigSampleGet, device, instance.gi_id, sample)
            activity = None if previous is None else self._between(operation, previous[0], sample, now - previous[1])
        except DriverError:
            self._free(sample)
            self.forget(uuid)
            raise
        self.forget(uuid)
        self._last[uuid] = sample, now, holder
        return activity

    def keep(self, uuids: Collection[str]) -> None:
        """Free the samples of all other instances."""
        for uuid in [uuid for uuid in self._last if uuid not in uuids]:
            self.forget(uuid)

    def forget(self, uuid: str) -> None:
        """Free the sample of an instance, if there is one."""
        if (known := self._last.pop(uuid, None)) is not None:
            self._free(known[0])

    @staticmethod
    def _free(sample: Any) -> None:
        with suppress(pynvml.NVMLError):  # the library was closed in the meantime
            pynvml.nvmlGpmSampleFree(sample)

    def _between(self, operation: str, first: Any, second: Any, seconds: float) -> Activity | None:
        metric_ids = (_SM, _TENSOR, _DRAM)
        request = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(metric_ids))
        request.sample1, request.sample2 = first, second
        for i, metric in enumerate(metric_ids):
            request.metrics[i].metricId = metric
        answer = self._call(operation, pynvml.nvmlGpmMetricsGet, request)
        metrics = answer.metrics[: len(metric_ids)]
        if any(metric.nvmlReturn != pynvml.NVML_SUCCESS for metric in metrics):
            return None
        shares = [metric.value / 100.0 for metric in metrics]
        if not all(0.0 <= share <= 1.05 for share in shares):  # NaN is refused too
            return None
        return Activity(seconds, *(min(share, 1.0) for share in shares))

"""Measure a server under increasing loads: for each pair of lengths more requests at once, until a load is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_migbatch.profiling.device import Device
from slurm_migbatch.profiling.load import LoadPoint, LoadRefused, LoadResult
from slurm_migbatch.profiling.measurement import SERVE, Measurement, rounded


@dataclass(frozen=True)
class ServedModel:
    """Common columns of the rows of a run: the device, the model's name in jobs, engine, precision of weights, number
    of parameters (None: as the name says).
    """

    device: Device
    model: str
    engine: str
    precision: str = ""
    family: str = "decoder"
    source: str = ""
    params: float | None = None

    def owns(self, row: Measurement) -> bool:
        """Return whether an earlier row is of this model by this engine on such a device."""
        return row.kind == SERVE and (row.gpu, row.profile, row.model, row.engine, row.precision) == (
            self.device.gpu, self.device.profile, self.model, self.engine, self.precision
        )  # fmt: skip

    def row(self, found: LoadResult, memory_mib: float | None = None) -> Measurement:
        """Return the row of a result."""
        tpot = found.tpot
        return Measurement(
            **self.device.columns,
            model=self.model,
            family=self.family,
            kind=SERVE,
            batch=found.point.concurrency,
            input_size=found.inputs,
            throughput_per_s=rounded(found.requests_s),
            latency_s=rounded(found.request.mean),
            latency_p99_s=rounded(found.request.p99),
            memory_mib=rounded(memory_mib),
            params=self.params,
            source=self.device.source(self.source),
            engine=self.engine,
            precision=self.precision,
            output=found.outputs,
            ttft_s=rounded(found.ttft.p50),
            ttft_p99_s=rounded(found.ttft.p99),
            tpot_s=rounded(tpot.p50) if tpot else None,
            tpot_p99_s=rounded(tpot.p99) if tpot else None,
        )


@dataclass
class LadderFindings:
    """Result of a run. `rows`: all of this model on this device; `results` and `refused` of this run; `left`: loads
    not tried, because a smaller load was refused or the time was over.
    """

    rows: list[Measurement] = field(default_factory=list)
    results: list[LoadResult] = field(default_factory=list)
    refused: list[tuple[LoadPoint, LoadRefused]] = field(default_factory=list)
    left: list[LoadPoint] = field(default_factory=list)


def climb(
    subject: ServedModel,
    points: Sequence[LoadPoint],
    measure: Callable[[LoadPoint], tuple[LoadResult, float | None]],
    earlier: Sequence[Measurement],
    save: Callable[[Sequence[Measurement]], None],
    watch: Callable[[LoadPoint, LoadResult | LoadRefused], None],
    end: float,
) -> LadderFindings:
    """Measure the points that `earlier` lacks. After each, `save` gets `earlier` and all new rows, `watch` the point
    and its result. No point begins after `end` of the monotonic clock. Exceptions of `measure` except LoadRefused
    propagate.
    """
    rows = list(earlier)
    findings = LadderFindings([row for row in earlier if subject.owns(row)])
    seen = {(row.batch, row.input_size, row.output) for row in findings.rows}
    for point in sorted(points, key=lambda point: (point.inputs, point.outputs, point.concurrency)):
        if tuple(point) in seen:
            continue
        refused = any(point.tokens >= other.tokens and point[0] >= other.concurrency for other, _ in findings.refused)
        if refused or time.monotonic() >= end:
            findings.left.append(point)
            continue
        try:
            result, memory_mib = measure(point)
        except LoadRefused as error:
            findings.refused.append((point, error))
            watch(point, error)
            continue
        row = subject.row(result, memory_mib)
        findings.rows.append(row)
        findings.results.append(result)
        save([*rows, row])
        rows.append(row)
        watch(point, result)
    return findings

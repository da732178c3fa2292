"""Measure the points of a model on one device, except those that cannot fit, and save the table after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_migbatch.profiling.cells import MeasurementCell, open_cells
from slurm_migbatch.profiling.device import Device
from slurm_migbatch.profiling.measure import DidNotFit, Ran
from slurm_migbatch.profiling.measurement import Measurement, rounded

Rule = Callable[[Sequence[Measurement], Sequence[MeasurementCell]], "MeasurementCell | None"]
"""Choose the cell to measure next; None: stop.

It gets the table's rows of this model on this kind of GPU, on this device and on other slices; and the cells that this
device still lacks and that may fit.
"""


def first(_done: Sequence[Measurement], remaining: Sequence[MeasurementCell]) -> MeasurementCell:
    """Choose the first of the remaining cells, so that all are measured in ascending order."""
    return remaining[0]


@dataclass(frozen=True)
class ProfiledModel:
    """Common columns of the rows of a run. `params` and `flops_per_item` are None if the program reports them."""

    device: Device
    model: str
    family: str = ""
    kind: str = "infer"
    params: float | None = None
    flops_per_item: float | None = None
    source: str = ""
    tuning: str = ""
    precision: str = ""

    def owns(self, row: Measurement) -> bool:
        """Return whether an earlier row is of this model on such a device."""
        return self.is_about(row) and row.profile == self.device.profile

    def is_about(self, row: Measurement) -> bool:
        """Return whether an earlier row is of this model on such a GPU or any slice of one."""
        own = (self.device.gpu, self.model, self.kind, self.tuning, self.precision)
        return (row.gpu, row.model, row.kind, row.tuning, row.precision) == own

    def row(self, cell: MeasurementCell, outcome: Ran | DidNotFit, software: str = "") -> Measurement:
        """Return the row of an outcome; one without speed if the cell did not fit."""
        ran = outcome if isinstance(outcome, Ran) else None
        device = self.device
        columns = device.columns
        if ran and ran.sm_count:  # a framework's count is right for whole GPUs too, for which NVML has none
            columns["sm_count"] = ran.sm_count
        return Measurement(
            **columns,
            model=self.model,
            family=self.family,
            kind=self.kind,
            tuning=self.tuning,
            precision=self.precision,
            batch=cell.batch,
            input_size=cell.input_size,
            procs=cell.procs,
            throughput_per_s=rounded(ran.throughput) if ran else None,
            latency_s=rounded(ran.summary.mean) if ran else None,
            latency_p99_s=rounded(ran.summary.p99) if ran else None,
            memory_mib=rounded(ran.memory_mib) if ran else None,
            params=self.params or (ran.params if ran else None),
            flops_per_item=self.flops_per_item or (ran.flops_per_item if ran else None),
            source=device.source(self.source, software),
        )


@dataclass
class Findings:
    """Result of a run. `outcomes` are those of this run only, `rows` all of this model on this device.

    `unfit`: cells not tried because a smaller one did not fit.
    """

    rows: list[Measurement] = field(default_factory=list)
    outcomes: dict[MeasurementCell, Ran | DidNotFit] = field(default_factory=dict)
    unfit: tuple[MeasurementCell, ...] = ()


def run(
    subject: ProfiledModel,
    cells: Sequence[MeasurementCell],
    rule: Rule,
    measure: Callable[[MeasurementCell], Ran | DidNotFit],
    earlier: Sequence[Measurement],
    save: Callable[[Sequence[Measurement]], None],
    watch: Callable[[Measurement, Ran | DidNotFit, int], None],
    most: int | None = None,
) -> Findings:
    """Measure cells as the rule chooses them, at most `most`. After each, `save` gets `earlier` and all new rows, and
    `watch` the row, the outcome, and the number of cells left.

    Exceptions of `measure` propagate; what was measured until then is saved.
    """
    rows, software = list(earlier), ""
    findings = Findings([row for row in earlier if subject.owns(row)])
    while remaining := open_cells(cells, findings.rows):
        if len(findings.outcomes) == most:
            break
        cell = rule([row for row in rows if subject.is_about(row)], remaining)
        if cell is None:
            break
        outcome = measure(cell)
        software = outcome.software or software
        row = subject.row(cell, outcome, software)
        findings.rows.append(row)
        findings.outcomes[cell] = outcome
        save([*rows, row])
        rows.append(row)
        watch(row, outcome, len(open_cells(cells, findings.rows)))
    tried = {MeasurementCell.of(row) for row in findings.rows}
    findings.unfit = tuple(cell for cell in cells if cell not in tried and cell not in set(remaining))
    return findings

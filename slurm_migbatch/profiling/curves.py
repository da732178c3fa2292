"""Group rows into curves over the batch, one for each input size and number of processes, and find their knees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_migbatch.profiling.measurement import Measurement

KNEE_SHARE = 0.8
"""Share of the best throughput above which a larger batch mostly adds latency (PARIS's knee)."""


@dataclass(frozen=True)
class MeasuredCurve:
    """The points of one input size and number of processes, by ascending batch; `unfit` batches ran out of memory."""

    input_size: int | None
    procs: int
    points: tuple[Measurement, ...]
    unfit: tuple[int, ...]

    @property
    def knee(self) -> Measurement | None:
        """The smallest batch with at least KNEE_SHARE of the best throughput; None if nothing ran."""
        best = max((point.rate or 0.0 for point in self.points), default=0.0)
        return next((point for point in self.points if (point.rate or 0.0) >= KNEE_SHARE * best), None)

    @property
    def name(self) -> str:
        """`input 128, 2 processes`, without default values."""
        parts = [f"input {self.input_size}"] if self.input_size is not None else []
        return ", ".join([*parts, *([f"{self.procs} processes"] if self.procs > 1 else [])])


def curves(rows: Iterable[Measurement]) -> list[MeasuredCurve]:
    """Return all curves in rows of one model on one device; of a point measured twice the later one is used."""
    groups: dict[tuple[int, int], dict[int, Measurement]] = {}
    for row in rows:
        groups.setdefault((row.procs, row.input_size or 0), {})[row.batch] = row
    return [_curve(size or None, procs, sorted(by_batch.items())) for (procs, size), by_batch in sorted(groups.items())]


def _curve(input_size: int | None, procs: int, found: Sequence[tuple[int, Measurement]]) -> MeasuredCurve:
    ran = tuple(row for _, row in found if row.ran)
    return MeasuredCurve(input_size, procs, ran, tuple(batch for batch, row in found if not row.ran))

"""Define the options of `migbatch profile run` as click reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """The options as click reads them."""

    target: str | None
    command: str | None
    server: str | None
    model: str
    family: str
    kind: str
    batches: Sequence[int]
    inputs: Sequence[int] | None
    procs: Sequence[int]
    points: int | None
    slo: float | None
    grid: bool
    output: Path | None
    resume: bool
    plot: Path | None
    device: str | None
    python: str | None
    warmup: int
    repeats: int
    min_seconds: float
    max_seconds: float
    timeout: float
    params: float | None
    flops: float | None
    outputs: Sequence[int] | None
    engine: str | None
    precision: str | None
    tuning: str
    served_name: str | None
    total_seconds: float
    source: str | None
    quiet: bool
    as_json: bool

    @property
    def table(self) -> Path:
        """The output table."""
        return self.output or Path(f"{self.model.replace('/', '_').lower()}.csv")

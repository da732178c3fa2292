"""Read the times of requests to language models from public traces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurm_migbatch.lab.traces.csvlines import lines


def azure(path: Path) -> list[float]:
    """Return the times of Azure's LLM inference traces of 2023 and 2024, seconds after the first. Raises TraceError.

    Those of 2023 span one hour, so they show bursts but no daily pattern; those of 2024 span a week, and their times
    name the zone.
    """
    return _from_first(line.moment("TIMESTAMP") for line in lines(path, ("TIMESTAMP",)))


def mooncake(path: Path) -> list[float]:
    """Return the times of Mooncake's conversation trace as CSV, one hour, seconds after the first. Raises TraceError.

    They are in milliseconds but only in steps of whole seconds, so many requests have the same one.
    """
    return _from_first(line.number_of("timestamp_ms", 0) / 1000 for line in lines(path, ("timestamp_ms",)))


def _from_first(moments: Iterable[float]) -> list[float]:
    ordered = sorted(moments)
    return [moment - ordered[0] for moment in ordered]

"""Read when the requests of an inference trace arrived: Azure's LLM traces, Mooncake's as CSV, BurstGPT.

Note: Azure's trace of 2023 and Mooncake's span one hour, so they show bursts but no daily pattern. The timestamps of
Mooncake are in steps of whole seconds, so many requests have the same one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.files import below

DATES: Final = "TIMESTAMP"
SECONDS: Final = "Timestamp"
MILLISECONDS: Final = "timestamp_ms"
SOURCES: Final = (
    ("Azure", "AzureLLMInferenceTrace_conv*.csv*"),
    ("Azure", "AzureLLMInferenceTrace_*.csv*"),
    ("Mooncake", "mooncake_*.csv*"),
    ("BurstGPT", "BurstGPT*.csv*"),
)
"""Names of the sources, and their files."""


def read(path: Path) -> list[float]:
    """Return the arrival of each request, in seconds after the first one, sorted. Raises TraceError."""
    moments = []
    for line in lines(path, (f"{DATES}|{SECONDS}|{MILLISECONDS}",)):
        if line.has(DATES):
            moments.append(line.moment(DATES))
        elif line.has(SECONDS):
            moments.append(line.number_of(SECONDS, 0))
        else:
            moments.append(line.number_of(MILLISECONDS, 0) / 1000)
    moments.sort()
    return [moment - moments[0] for moment in moments]


def first_below(data: Path) -> tuple[str, list[float]] | None:
    """Return the source and the arrivals of the first trace below `data` that lasts; None without any.

    Raises TraceError.
    """
    for name, pattern in SOURCES:
        for path in below(data, pattern):
            arrivals = read(path)
            if len(arrivals) > 2 and arrivals[-1] > 0:
                return name, arrivals
    return None

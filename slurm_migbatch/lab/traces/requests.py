"""Read when the requests of an inference trace arrived: Azure's LLM and LMM traces, Mooncake's (also as CSV), BurstGPT.

Note: Azure's trace of 2023 and Mooncake's span one hour, so they show bursts but no daily pattern. The timestamps of
Mooncake are in steps of whole seconds, so many requests have the same one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurm_migbatch.lab.traces.csvlines import TraceError, lines, opened
from slurm_migbatch.lab.traces.files import below

DATES: Final = "TIMESTAMP"
SECONDS: Final = "Timestamp"
MILLISECONDS: Final = "timestamp_ms"
SOURCES: Final = (
    ("Azure", "AzureLLMInferenceTrace_conv*.csv*"),
    ("Azure", "AzureLLMInferenceTrace_*.csv*"),
    ("Mooncake", "mooncake_*.csv*"),
    ("BurstGPT", "BurstGPT*.csv*"),
    ("Azure", "AzureLMMInferenceTrace_*.csv*"),
    ("Mooncake", "mooncake_*.jsonl*"),
    ("Mooncake", "conversation_trace.jsonl*"),
    ("Mooncake", "toolagent_trace.jsonl*"),
)
"""Names of the sources, and their files."""


def read(path: Path) -> list[float]:
    """Return the arrival of each request, in seconds after the first one, sorted. Raises TraceError."""
    moments = list(_of_json(path) if ".jsonl" in path.suffixes else _of_table(path))
    moments.sort()
    return [moment - moments[0] for moment in moments]


def _of_table(path: Path) -> Iterator[float]:
    for line in lines(path, (f"{DATES}|{SECONDS}|{MILLISECONDS}",)):
        if line.has(DATES):
            yield line.moment(DATES)
        elif line.has(SECONDS):
            yield line.number_of(SECONDS, 0)
        else:
            yield line.number_of(MILLISECONDS, 0) / 1000


def _of_json(path: Path) -> Iterator[float]:
    """Yield the moments of Mooncake's own form: one JSON object on each line, whose `timestamp` is in milliseconds."""
    with opened(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                moment = float(json.loads(text)["timestamp"])
            except (ValueError, TypeError, KeyError, RecursionError):
                moment = -1.0
            if not 0 <= moment < math.inf:
                raise TraceError(path, number, 'must be a JSON object with a "timestamp" in milliseconds')
            yield moment / 1000


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

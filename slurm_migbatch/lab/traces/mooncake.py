"""Read Mooncake's conversation trace as CSV: one hour of LLM requests.

Note: timestamps are in milliseconds but only in steps of whole seconds, so many requests have the same one.
"""

from __future__ import annotations

from pathlib import Path

from slurm_migbatch.lab.sim.job import InferenceRequest
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.trace import Trace


def read(path: Path, app: str = "llm") -> Trace:
    """Read all requests: `items` is the input, `output` the output in tokens. Raises TraceError."""
    rows = sorted(
        (line.number_of("timestamp_ms", 0) / 1000, line.count_of("input_tokens"), line.count_of("output_tokens"))
        for line in lines(path, ("timestamp_ms", "input_tokens", "output_tokens"))
    )
    begin = rows[0][0] if rows else 0.0
    return Trace(
        "mooncake", requests=tuple(InferenceRequest(at - begin, app, tokens, output) for at, tokens, output in rows)
    )

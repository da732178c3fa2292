"""Read Azure's LLM inference traces of 2023 and 2024: one line for each request, with its tokens.

Note: those of 2023 span one hour, so they show bursts but no daily pattern; those of 2024 span a week, and their times
name the zone.
"""

from __future__ import annotations

from pathlib import Path

from slurm_migbatch.lab.sim.job import InferenceRequest
from slurm_migbatch.lab.traces.csvlines import lines
from slurm_migbatch.lab.traces.trace import Trace


def read(path: Path, app: str = "llm") -> Trace:
    """Read all requests: `items` is the context, `output` the generated tokens. Raises TraceError."""
    rows = sorted(
        (line.moment("TIMESTAMP"), line.count_of("ContextTokens"), line.count_of("GeneratedTokens"))
        for line in lines(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    )
    begin = rows[0][0] if rows else 0.0
    return Trace(
        "azure", requests=tuple(InferenceRequest(at - begin, app, context, output) for at, context, output in rows)
    )

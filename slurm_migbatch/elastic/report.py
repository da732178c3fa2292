"""Write lines to the file that MIGBATCH_PROGRESS names; `node/progressreport.py` has the format.

A failed report is no reason to fail: the job trains without reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

VARIABLE = "MIGBATCH_PROGRESS"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's ids of the batch, extern and interactive steps start here, or are below zero."""


def line(environ: Mapping[str, str], values: Mapping[str, str | float | int | None]) -> str:
    """Format a report: the values that are not None, the reporting task, and the time."""
    fields = {**values, "at": f"{time.time():.3f}"}
    if fields.get("task") is None:
        fields["task"] = own_task(environ)
    return " ".join(f"{key}={_text(value)}" for key, value in fields.items() if value is not None)


def _text(value: str | float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def own_task(environ: Mapping[str, str]) -> str | None:
    """Return the task of this process; None in batch scripts and shells, which report for the whole job."""
    step, rank = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_PROCID", "")
    in_step = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
    return rank if in_step and rank.isdigit() else None


def append(path: str, text: str) -> None:
    """Append a line in one write, so that lines do not mix. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(handle, f"{text}\n".encode())
    finally:
        os.close(handle)

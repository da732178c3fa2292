"""Convert decisions of the submit filter to rows of the record: flat, in the units of the reports."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.gres_request import option_of
from slurm_migbatch.submit.request import OPTIONS, TRES_FIELDS


def record_of(decision: SubmitDecision) -> dict[str, Any]:
    """Create a row for `Store.record_decisions`: `asked` as the user's options, figures as best estimates.

    Latencies are milliseconds for one batch, throughput items per second, memory MiB.
    """
    row = decision.to_dict()
    row["asked"] = asked_text(row["asked"])
    row["chosen"] = row.pop("granted")
    row["candidates"] = [_candidate(candidate) for candidate in row["candidates"]]
    return row


def asked_text(asked: Mapping[str, str]) -> str:
    """Return the fields of a request as sbatch options."""
    return " ".join(_option(field, text) for field, text in asked.items() if text)


def _option(field: str, text: str) -> str:
    option = option_of(field, text) if field in TRES_FIELDS else f"--{field}"
    return f"{option}={shlex.quote(_bare(field, text) if option in OPTIONS.values() else text)}"


def _bare(field: str, text: str) -> str:
    """Return the user's original text: sbatch puts `gres:` (or `gres/`) before every part, and `gpu` before a bare
    count; and cli_filter.lua writes the `mig:auto` of srun as a count alone, which means the same.
    """
    bare = re.sub(r"(^|,)gres[:/]", r"\1", text)
    bare = re.sub(r"(^|,)mig(?:[:=]([0-9]+))?(?=,|\Z)", _auto, bare)
    return bare if field == "tres_per_node" else re.sub(r"(^|,)gpu[:=]", r"\1", bare)


def _auto(entry: re.Match[str]) -> str:
    count = int(entry[2] or 1)
    return f"{entry[1]}mig:auto" + (f":{count}" if count != 1 else "")


def _candidate(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: row[key] for key in ("profile", "compute_slices", "capacity_mib", "ok", "why")}
    for name, source, scale in (
        ("latency_ms", "latency_s", 1e3),
        ("throughput_per_s", "throughput_per_s", 1.0),
        ("memory_mib", "memory_mib", 1.0),
    ):
        interval = row[source]
        flat[name] = None if interval is None else interval[1] * scale
        flat[f"{name}_range"] = None if interval is None else [interval[0] * scale, interval[2] * scale]
    return flat

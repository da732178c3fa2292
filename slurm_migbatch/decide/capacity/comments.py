"""Parse the hints in a job's comment, once for each text."""

from __future__ import annotations

from functools import lru_cache

from slurm_migbatch.workload.excluded import user_text
from slurm_migbatch.workload.hints import Hints, parse
from slurm_migbatch.workload.refusal import Refusal


@lru_cache(maxsize=1 << 14)
def hints_of(comment: str) -> Hints | None:
    """Return the hints of a job's comment; None if they are invalid."""
    try:
        return parse(user_text(comment))
    except Refusal:
        return None

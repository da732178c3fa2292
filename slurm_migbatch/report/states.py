"""Job states as Slurm abbreviates them."""

from __future__ import annotations

from slurm_migbatch.report.errors import ReportError

CODES = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "TO": "TIMEOUT",
    "UN": "UNKNOWN",
}


def parse_states(text: str) -> tuple[str, ...]:
    """Parse `CD,failed` into COMPLETED, FAILED; short or long names in any case.

    Raises:
        ReportError: one of them is not a state.
    """
    long_names = set(CODES.values())
    states = []
    for word in filter(None, (part.strip().upper() for part in text.split(","))):
        name = CODES.get(word, word)
        if name not in long_names:
            choices = ", ".join(f"{code}/{name}" for code, name in CODES.items())
            raise ReportError(f"unrecognized job state value '{word}'; states are {choices}")
        states.append(name)
    return tuple(dict.fromkeys(states))

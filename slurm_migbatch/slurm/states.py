"""Job states in Slurm's own names."""

from __future__ import annotations

ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""States of jobs that hold nothing any more; `node.liveness` has its own list, as hooks do not import this module."""

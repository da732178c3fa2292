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
PRESENT = (
    "PENDING",
    "RUNNING",
    "SUSPENDED",
    "COMPLETING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
)
"""States in which a job is pending, holds resources or releases them, as squeue shows them."""
WAITING = frozenset({"PENDING", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States of jobs that hold nothing yet; for Slurm the last three are flags of a pending job that is held."""
_KNOWN = frozenset({*ENDED, *PRESENT, *WAITING})


def checked_reason(reason: str, account: str) -> str:
    """Return a job's pending reason; "None" in place of InvalidAccount if the job has no account.

    Without accounting slurmctld 23.11 shows InvalidAccount for such a job in every second round of its scheduler,
    although nothing is wrong with it.
    """
    return "None" if reason == "InvalidAccount" and not account else reason


def checked_state(state: str) -> str:
    """Return a job's state as squeue shows it, PENDING for EXPEDITING (a pending job of `--requeue=expedite`, 25.11).

    Raises ValueError for an unknown state, in which the job may or may not hold an allocation.
    """
    if state == "EXPEDITING":
        return "PENDING"
    if state not in _KNOWN:
        raise ValueError(f"its state {state!r} is unknown")
    return state

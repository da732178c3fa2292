"""Decide whether and how a job may share the slice that its plan names: pure, over the journal's rows.

The controller decides which jobs should share; the node checks, whatever the controller sends: the slice's
holder is the expected run, belongs to the guest's user according to Slurm, is the only holder so far, and
has not begun to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.plan import SharedSlot

FREE = ("idle", "evict", "lost")
"""States in which a row blocks nothing."""


class GuestAction(Enum):
    """Decision about a guest."""

    JOIN = "join"  # share with `host`
    ALONE = "alone"  # the host has left: take the slot
    WAIT = "wait"  # the host is starting or ending
    NO = "no"


class HostChoice(NamedTuple):
    """`host` is the row to share, if any; `why` a sentence without names of other users."""

    action: GuestAction
    why: str = ""
    host: JournalSlice | None = None


def verdict(
    place: SharedSlot, uid: int, rows: Sequence[JournalSlice], runs: Mapping[tuple[int, int], JournalRun], planned: bool
) -> HostChoice:
    """Decide what a job of `uid` may do with `place`; `planned`: the plan still has that slot."""
    occupied = [row for row in rows if row.gpu == place.gpu and row.state not in FREE]
    overlapping = [row for row in occupied if row.slot.placement.overlaps(place.slot.placement)]
    job, restart = place.host
    if not overlapping:
        return (
            HostChoice(GuestAction.ALONE)
            if planned
            else HostChoice(GuestAction.NO, f"job {job} has ended, and its slot is no longer in the plan")
        )
    host = next((row for row in overlapping if row.slot == place.slot and (row.job, row.restart) == place.host), None)
    if host is None or host.beside is not None:
        return HostChoice(
            GuestAction.NO, f"the slot is not held by job {job} run {restart}, with which it should be shared"
        )
    if host.state == "held" and host.uid != uid:
        return HostChoice(
            GuestAction.NO, f"job {job} belongs to another user, and only jobs of one user can share a slice"
        )
    run = runs.get(place.host)
    if host.state != "held" or run is None or run.state != "running":
        return HostChoice(GuestAction.WAIT, f"job {job} is starting or ending")
    if any(row.beside == host.id for row in overlapping):
        return HostChoice(GuestAction.NO, f"two jobs already share the slice of job {job}")
    return HostChoice(GuestAction.JOIN, host=host)

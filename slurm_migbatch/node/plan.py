"""Store the controller's plan as this node last received it: the slots of each GPU. `StateDir/plan.json`.

    {"version": 12, "gpus": {"GPU-...": [["2g.20gb", 0, 2], ...]},
     "guests": {"18": ["GPU-...", "2g.20gb", 0, 2, 17, 0]}}

`guests` may be missing. It says with which run a job may share a slice, and on which slot: here job 18 with run 0
of job 17. A plan is advice about placements and does not decide what a job gets: without one, or with an invalid one,
the node chooses for itself; but only slots in `guests` are ever shared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.profile import ProfileError
from slurm_migbatch.node.paths import read, replace

NAME = "plan.json"
MAX_BYTES = 4 << 20


class PlanError(ValueError):
    """An invalid plan."""


class SharedSlot(NamedTuple):
    """The slot that a guest shares, and with which run (job and restart count)."""

    gpu: str
    slot: Slot
    host: tuple[int, int]


class CachedPlan(NamedTuple):
    """A parsed plan; version 0 means no plan."""

    version: int = 0
    slots: Mapping[str, tuple[Slot, ...]] = {}
    guests: Mapping[int, SharedSlot] = {}


def parse(data: object) -> CachedPlan:
    """Check a plan's wire form. Raises PlanError."""
    if not isinstance(data, dict) or type(data.get("version")) is not int or not 0 <= data["version"] < 1 << 62:
        raise PlanError("a plan has a version number")
    gpus, guests = data.get("gpus", {}), data.get("guests", {})
    if not isinstance(gpus, dict) or not isinstance(guests, dict):
        raise PlanError("a plan's gpus and guests are objects")
    try:
        slots = {str(gpu): tuple([Slot.of(str(p), s, n) for p, s, n in rows]) for gpu, rows in gpus.items()}
        shared = {
            int(guest): SharedSlot(str(gpu), Slot.of(str(p), s, n), (int(job), int(restart)))
            for guest, (gpu, p, s, n, job, restart) in guests.items()
        }
    except (TypeError, ValueError, LayoutError, ProfileError) as error:
        raise PlanError(f"a plan with an invalid slot: {error}") from None
    return CachedPlan(data["version"], slots, shared)


def load(state_dir: str) -> CachedPlan:
    """Read the stored plan; an empty one if none can be read."""
    try:
        return parse(json.loads(read(f"{state_dir}/{NAME}", MAX_BYTES)))
    except (OSError, ValueError):
        return CachedPlan()


def store(state_dir: str, raw: bytes) -> CachedPlan:
    """Store the plan that the controller sent, atomically. Raises PlanError."""
    try:
        plan = parse(json.loads(raw))
    except ValueError as error:
        raise PlanError(str(error)) from None
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace(directory, NAME, raw, "plan")
    finally:
        os.close(directory)
    return plan

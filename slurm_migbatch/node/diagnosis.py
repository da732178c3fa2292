"""Explain why a node has no slot for a job: the plan's offers, and the slices in use. For administrators.

A misfit means that the controller, the node, or a manual change of Slurm's counts or the GPUs broke an assumption.
Three facts show which: the slots that the plan has for the grant, what overlaps them, and everything that is taken on
the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.plan import CachedPlan

LONGEST = 1500
"""Maximum length of a diagnosis in characters; sufficient for eight GPUs full of small slices."""


class GpuLabel(NamedTuple):
    """A GPU as a diagnosis names it."""

    number: int
    uuid: str

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.uuid[:12]})"


def explain_misfit(
    grant: Grant,
    plan: CachedPlan,
    labels: Sequence[GpuLabel],
    rows: Iterable[JournalSlice],
    runs: Iterable[JournalRun],
    note: str = "",
) -> str:
    """Describe plan and use in one paragraph that can follow a colon. `rows` and `runs` are the journal's.

    Idle instances block nothing and are not named.
    """
    users: dict[tuple[int | None, int | None], str] = {(run.job, run.restart): run.user for run in runs}
    slices = list(rows)
    taken = {
        label: sorted(
            (r for r in slices if r.gpu == label.uuid and r.state not in ("idle", "lost")), key=_placement_key
        )
        for label in labels
    }
    parts = [_describe_plan(grant, plan, taken)]
    descriptions = [
        f"{label}: " + ", ".join(_describe_row(row, users, plan.slots.get(label.uuid, ())) for row in gpu_rows)
        for label, gpu_rows in taken.items()
        if gpu_rows
    ]
    parts.append("Taken: " + "; ".join(descriptions) if descriptions else "Nothing is taken")
    if note:
        parts.append(note)
    text = ". ".join(parts)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _describe_plan(grant: Grant, plan: CachedPlan, taken: Mapping[GpuLabel, Sequence[JournalSlice]]) -> str:
    if not plan.version:
        return "this node has no plan from the controller"
    if grant.guest:
        places = [f"job {job} beside job {s.host[0]} on {s.slot} of {s.gpu[:12]}" for job, s in plan.guests.items()]
        return f"plan {plan.version} has these guests: {', '.join(places) if places else 'none'}"
    offers = []
    for profile in dict.fromkeys(grant.profiles):
        slots = []
        for label, rows in taken.items():
            for slot in plan.slots.get(label.uuid, ()):
                if slot.profile == profile:
                    overlapping = [r for r in rows if r.slot.placement.overlaps(slot.placement)]
                    state = (
                        "taken" if any(r.slot == slot for r in overlapping) else "blocked" if overlapping else "free"
                    )
                    slots.append(f"{slot.placement} of GPU {label.number} ({state})")
        offers.append(f"{profile} at {', '.join(slots)}" if slots else f"no {profile}")
    text = f"plan {plan.version} has {' and '.join(offers)}"
    if any(part.startswith("no ") for part in offers):
        text += ", so Slurm had other counts than the controller: after a restart, a reconfigure, or a manual update"
    return text


def _describe_row(
    row: JournalSlice, users: Mapping[tuple[int | None, int | None], str], planned: Sequence[Slot]
) -> str:
    job = f"job {row.job}"
    user = users.get((row.job, row.restart))
    if user:
        job += f" of {user}"
    if row.state == "intent":
        text = f"{row.slot} being created for {job}"
    elif row.state == "held":
        text = f"{row.slot} by {job}" + (" as a guest" if row.beside is not None else "")
    elif row.state == "evict":
        return f"{row.slot} being destroyed"
    else:
        return f"{row.slot} {row.reason}" if row.state == "foreign" else f"{row.slot} disabled ({row.reason})"
    return text if not planned or row.slot in planned else text + " outside the plan"


def _placement_key(row: JournalSlice) -> tuple[int, int]:
    return row.slot.placement.start, row.slot.placement.size

"""Find differences between a GPU's journal rows and the driver's instances, and the repair of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from slurm_migbatch.mig.driver import Instance
from slurm_migbatch.node.journal_rows import IN_FLIGHT, JournalSlice

_ORDER = {"held": 0, "intent": 1, "evict": 2, "idle": 3, "zombie": 4, "foreign": 5, "lost": 6}
"""Of two rows for one instance the first counts."""


class Repair(NamedTuple):
    """One repair on a GPU, with its row and instance."""

    action: str  # see `Repairer._action`
    row: JournalSlice | None
    instance: Instance | None
    why: str

    def __str__(self) -> str:
        subject = self.row.slot if self.row is not None else self.instance
        return f"{self.action} {subject}: {self.why}"


def diagnose(
    rows: Sequence[JournalSlice],
    instances: Sequence[Instance],
    processes: Mapping[int, Sequence[int]],
    alive: Callable[[str], bool],
    exposed: Collection[int] = (),
) -> list[Repair]:
    """List the repairs that one GPU needs.

    `processes` maps instance ids to the processes on them, `exposed` holds the ids whose capability devices have
    the wrong owner. In-flight rows of a living owner are left alone, and so are the instances that they overlap: an
    instance that a dead owner was to destroy may block a living one, which then destroys it. Repairs of a first
    holder's row include the row of the second holder.
    """

    def working(row: JournalSlice) -> bool:
        return row.state in IN_FLIGHT and alive(row.owner)

    joining = [row for row in rows if row.beside is not None and row.state in IN_FLIGHT and not alive(row.owner)]
    repairs = [Repair("leave", row, None, "the run to share it has ended") for row in joining]
    rows = sorted((row for row in rows if row.beside is None), key=lambda row: (_ORDER[row.state], row.id or 0))
    lost_uuids = {row.mig_uuid for row in rows if row.state == "lost" and row.mig_uuid is not None}
    by_slot = {instance.slot: instance for instance in instances}
    accounted: set[int] = set()
    busy_places = [row.slot.placement for row in rows if working(row)]
    intended_places = [row.slot.placement for row in rows if row.state == "intent" and alive(row.owner)]
    for row in rows:
        busy = working(row)
        instance = by_slot.get(row.slot)
        if instance is not None and not busy and not _is_of(row, instance, accounted, lost_uuids):
            instance = None
        if instance is not None:
            accounted.add(instance.gi_id)
        if busy:
            continue
        if instance is None:
            repair = _missing(row)
        elif row.state == "evict" and any(place.overlaps(row.slot.placement) for place in intended_places):
            continue
        elif row.state == "lost" and any(place.overlaps(row.slot.placement) for place in busy_places):
            continue  # the owner that works there finds the place taken, and chooses another
        else:
            repair = _present(row, instance, processes.get(instance.gi_id, ()), instance.gi_id in exposed)
        if repair is not None:
            repairs.append(repair)
    unclaimed = [
        instance
        for instance in instances
        if instance.gi_id not in accounted and not any(place.overlaps(instance.placement) for place in busy_places)
    ]
    return repairs + [_unclaimed(instance, processes.get(instance.gi_id, ())) for instance in unclaimed]


def _is_of(
    row: JournalSlice, instance: Instance, accounted: Collection[int], lost_uuids: Collection[str | None]
) -> bool:
    """Return whether the instance in a row's slot belongs to the row.

    `accounted`: ids of other rows' instances; `lost_uuids`: instances that jobs held when they disappeared.
    """
    if row.state == "held":
        return row.mig_uuid is None or instance.mig_uuid == row.mig_uuid
    if row.state == "intent" and row.mig_uuid is None and instance.mig_uuid in lost_uuids:
        return False
    if row.state == "lost" and instance.mig_uuid != row.mig_uuid:
        return False
    return instance.gi_id not in accounted


def _missing(row: JournalSlice) -> Repair | None:
    """Return the repair for a row whose instance does not exist in the driver."""
    if row.state == "lost":
        return None
    if row.state == "held":
        return Repair("lose", row, None, "the driver no longer has the instance that the job holds")
    return Repair("forget", row, None, "the driver has no such instance")


def _present(row: JournalSlice, instance: Instance, pids: Sequence[int], exposed: bool) -> Repair | None:
    """Return the repair for a row without a living owner whose instance exists."""
    if row.state == "lost":
        return Repair("regain", row, instance, "the instance that its job holds exists again")
    if row.state == "held":
        why = "its capability devices were accessible to others than the job's user"
        return Repair("guard", row, instance, why) if exposed else None
    if row.state in IN_FLIGHT:
        return Repair("undo", row, instance, "its owner process has ended")
    if row.state == "idle":
        return _idle(row, instance, pids, exposed)
    if pids:
        return None
    return Repair("clear" if row.state == "zombie" else "release", row, instance, "no process uses it any more")


def _idle(row: JournalSlice, instance: Instance, pids: Sequence[int], exposed: bool) -> Repair | None:
    if instance.ci_id is None:
        return Repair("complete", row, instance, "it has no compute instance")
    if pids:
        return Repair("park", row, instance, _living(pids))
    if (row.gi, row.ci, row.mig_uuid) != (instance.gi_id, instance.ci_id, instance.mig_uuid):
        return Repair("undo", row, instance, "it was recreated by another program")
    if exposed:
        return Repair("guard", row, instance, "its capability devices were accessible to others than root")
    return None


def _unclaimed(instance: Instance, pids: Sequence[int]) -> Repair:
    """Return the repair for an instance that no row names."""
    if pids:
        return Repair("respect", None, instance, f"created by hand; {_living(pids)}")
    if instance.ci_id is None:
        return Repair("complete", None, instance, "it has no owner and no compute instance")
    return Repair("adopt", None, instance, "it has no owner and no process")


def _living(pids: Sequence[int]) -> str:
    return "in use by process " + ", ".join(map(str, list(pids)[:4]))

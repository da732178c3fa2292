"""Handle slices that two jobs of one user share: their effect on a node's plan and on Slurm's counts.

Slurm counts the first job under the slice's profile and the second one under a type of its own, `guest`. A guest is
offered only if the plan names the job and the slice for it, so Slurm can start no other job there except another guest;
the second job should be pinned to the first one's node.

The first job may end before the second. Slurm then assumes that a slice of the profile is free, but it is not. So for
every shared slice one less of its profile is configured; that is below the count in use as long as nothing of the
profile is free on that node. This hides free slices of the profile there, one for each pair, until the plan gives one
of them to a pending job: then the count is raised for it, and only in these seconds can a job start that finds no slot
(it is requeued and started again elsewhere).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.mig import grant
from slurm_migbatch.mig.layout import LayoutError, Slot
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow

#: GPU, profile, start, size, the first holder's job and its restart count, in the form that nodes read
Place = tuple[str, str, int, int, int, int]

GUEST = grant.GUEST


@dataclass(frozen=True)
class NodeGuests:
    """One node: `places` by guest, for its plan; how many guests Slurm may start, and how many it counts as in use.

    `held_back` is the reduction of a profile's count, `due` how many free slices of it are nevertheless meant for
    pending jobs.
    """

    places: Mapping[int, Place] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    held_back: Mapping[Profile, int] = field(default_factory=dict)
    due: Mapping[Profile, int] = field(default_factory=dict)
    unlocated: Mapping[Profile, int] = field(default_factory=dict)

    def shown(self, profile: Profile, used: int, free: int) -> int:
        """Return the count to configure of a profile with so many in use and so many on offer."""
        shown_free = max(free - self.held_back.get(profile, 0), min(free, self.due.get(profile, 0)) or -used)
        return max(0, used + shown_free)


ALONE = NodeGuests()
"""A node on which nothing is shared."""


@lru_cache(maxsize=4096)
def is_guest(text: str) -> bool:
    """Return whether a job's GRES is a place next to another job."""
    return GUEST in text and bool(gres.readable_counts(text, "mig").get(GUEST))


def guests(jobs: Iterable[JobRow]) -> frozenset[int]:
    """Return jobs that Slurm has started as guests."""
    return frozenset(row.job_id for row in jobs if GUEST in row.gres and row.active and is_guest(row.gres))


def sharing(
    node: str,
    facts: NodeFacts,
    pairs: Mapping[int, int],
    jobs: Mapping[int, JobRow],
    started: Collection[int],
    used: int,
    present: Mapping[int, Place],
) -> NodeGuests:
    """Return how slices are shared on one node: the places of guests, and the reductions for them.

    Args:
        pairs: second job -> first job, as decided.
        started: `guests(jobs)`.
        used: how many guests Slurm counts as in use there.
        present: the places in the node's current plan.
    """
    first_holders = {run[0]: (gpu.uuid, slot, run) for gpu in facts.gpus for slot, run in gpu.leases}
    slice_counts = Counter(run[0] for gpu in facts.gpus for _, run in gpu.leases)
    guest_of = {(gpu.uuid, slot): run[0] for gpu in facts.gpus for slot, run in gpu.guests}
    located = {*first_holders, *guest_of.values()}
    holder_of = {(uuid, slot): job for job, (uuid, slot, _) in first_holders.items()}
    held_back = Counter(at[1].profile for at in guest_of if at in holder_of and holder_of[at] not in started)
    # Guests that have started without a lease yet: their Prologs may be looking up their places in the plan.
    starting = {
        guest: place
        for guest, place in present.items()
        if guest in started and guest not in located and node in jobs[guest].nodes and jobs[guest].state != "COMPLETING"
    }
    places = dict(starting)
    unlocated: Counter[Profile] = Counter()
    taken = set(guest_of)
    for at in filter(None, map(_slot, starting.values())):
        taken.add(at)
        holder = holder_of.get(at)
        if holder is None:
            unlocated[at[1].profile] += 1
        elif holder not in started:
            held_back[at[1].profile] += 1
    waiting = 0
    for guest, host in sorted(pairs.items()):
        row, host_lease = jobs.get(guest), first_holders.get(host)
        if row is None or guest in located or not row.pending or host_lease is None or slice_counts[host] > 1:
            continue
        uuid, slot, run = host_lease
        if (uuid, slot) in taken or not _alike(row, jobs.get(host)):
            continue
        taken.add((uuid, slot))
        places[guest] = (uuid, slot.profile.name, slot.placement.start, slot.placement.size, *run)
        waiting += 1
        if host not in started:
            held_back[slot.profile] += 1
    return NodeGuests(places, waiting, used, dict(held_back), {}, dict(unlocated))


def without_strays(found: dict[str, NodeGuests], jobs: Iterable[JobRow]) -> dict[str, NodeGuests]:
    """Offer no guest anywhere while one is pending that no plan names: Slurm might start that one instead.

    Such a job is re-typed by lending: its host has left, or the pair was given up.
    """
    named = {guest for shared in found.values() for guest in shared.places}
    if all(row.job_id in named for row in jobs if GUEST in row.gres and row.pending and is_guest(row.gres)):
        return found
    return {node: replace(shared, waiting=0) for node, shared in found.items()}


def ends(gpu: GpuFacts, until: Mapping[int, float | None], unlisted_end: float) -> tuple[float | None, ...]:
    """Return when each leased slot should be free, at the end of its last holder; None: unknown.

    Args:
        unlisted_end: end of jobs that Slurm no longer lists.
    """
    if not gpu.guests:
        return tuple([until.get(run[0], unlisted_end) for _, run in gpu.leases])
    guest_of = dict(gpu.guests)
    slot_ends: list[float | None] = []
    for slot, run in gpu.leases:
        holder_ends = [
            until.get(job, unlisted_end) for job, _ in (run, *([guest_of[slot]] if slot in guest_of else []))
        ]
        known_ends = [moment for moment in holder_ends if moment is not None]
        slot_ends.append(max(known_ends) if len(known_ends) == len(holder_ends) else None)
    return tuple(slot_ends)


def whose(gpu: GpuFacts, started: Collection[int]) -> tuple[bool, ...]:
    """Return which leased slots of a GPU Slurm counts as guests, not under their profile."""
    return tuple([run[0] in started for _, run in gpu.leases]) if started else ()


def _alike(guest: JobRow, host: JobRow | None) -> bool:
    return host is not None and host.active and (guest.uid, guest.user) == (host.uid, host.user)


def _slot(place: Place) -> tuple[str, Slot] | None:
    """Return the GPU and the slot of a place; None if they cannot be read."""
    uuid, profile, start, size, *_ = place
    try:
        return uuid, Slot.of(str(profile), int(str(start)), int(str(size)))
    except (LayoutError, ProfileError, ValueError):
        return None

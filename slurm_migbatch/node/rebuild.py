"""Rebuild a damaged, lost or outdated journal: instances from the driver, holders from the hand-offs.

Hand-offs are root's files in RunDir, so they can be trusted. An instance that no hand-off names is idle if no process
is on it and only root may open it; otherwise it is parked, because its owner is unknown. Of two hand-offs of
one user that name the same instance the second counts as the guest's; the original order no longer matters.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from slurm_migbatch.mig.driver import GpuLost, Instance
from slurm_migbatch.node import gpu_faults, handoff
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.run_repair import TOMBSTONE_S

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

LOCK_S = 2.0


def outdated(journal: Journal, paths: Paths) -> bool:
    """Return whether the journal was restored from an older copy: a hand-off grants slices to a run that it lacks."""
    listed = set(handoff.listed(paths.job))  # first: a run is in the journal as long as its hand-off grants something
    if not listed:
        return False
    recent = "state IN ('starting','running','ending','misfit') OR (state='ended' AND since>=?)"
    listed -= {(run.job, run.restart) for run in journal.runs(recent, (time.time() - TOMBSTONE_S,))}
    return any(given is not None and given.slices for given in (handoff.load(paths.job, *key) for key in listed))


def rebuild(journal: Journal, paths: Paths, gpus: Gpus, caps: Caps, aside: str) -> None:
    """Fill an empty journal; `aside` names the damaged one. Raises DriverError, JournalError.

    A node's first journal stays empty: without hand-offs no holder can have been lost, and the first
    repair adopts existing instances.
    """
    loaded = (handoff.load(paths.job, job, restart) for job, restart in sorted(set(handoff.listed(paths.job))))
    handoffs = [entry for entry in loaded if entry is not None]
    if not aside and not any(entry.slices for entry in handoffs):
        with journal.write():
            journal.set_meta("built", "1")
        return
    owners = _owners(handoffs)
    held = [
        _rows(gpu, instance, caps, owners.get(instance.mig_uuid or "", []))
        for gpu in _answering(gpus, paths, {mig_slice.gpu for entry in handoffs for mig_slice in entry.slices})
        for instance in gpu.instances()
    ]
    with journal.write():
        ids = {}
        for row, _ in held:
            ids[row.gpu, row.slot] = journal.put(row).id
            if row.state == "zombie":
                journal.event("zombie", {**row.place, "reason": row.reason})
        for _, guests in held:
            for guest in guests:
                journal.put(guest._replace(beside=ids[guest.gpu, guest.slot]))
        for entry in handoffs:
            state = "running" if entry.slices else "misfit"
            journal.put_run(JournalRun(entry.job, entry.restart, entry.uid, "", "", "", "", state))
        journal.set_meta("built", "1")
        text = (
            f"the journal was damaged, or an older copy; it is kept as {aside}" if aside else "the journal was missing"
        )
        journal.event("fault", {"gpu": None, "what": text, "action": "rebuilt", "drain": False})


def _answering(gpus: Gpus, paths: Paths, needed: Collection[str]) -> tuple[NvmlGpu, ...]:
    """Return the GPUs that can be used. Raises DriverError if one that jobs need does not answer.

    Without it their slices would be nobody's. A lost one no longer has them.
    """
    gpu_faults.clear(paths, needed, Deadline(LOCK_S))  # one that was withdrawn is asked nevertheless
    survey = gpus.survey()
    for uuid, error in survey.failing.items():
        if uuid in needed and not isinstance(error, GpuLost):
            raise error
    return survey.managed


def _owners(given: Sequence[handoff.Handoff]) -> dict[str, list[tuple[handoff.Handoff, int]]]:
    """Return the hand-offs that name an instance, by its MIG UUID, each with the slice's number in it."""
    owners: dict[str, list[tuple[handoff.Handoff, int]]] = {}
    for entry in given:
        for ordinal, mig_slice in enumerate(entry.slices):
            owners.setdefault(mig_slice.mig_uuid, []).append((entry, ordinal))
    return owners


def _rows(
    gpu: NvmlGpu, instance: Instance, caps: Caps, known: Sequence[tuple[handoff.Handoff, int]]
) -> tuple[JournalSlice, list[JournalSlice]]:
    """Return an instance's row by the `known` hand-offs, and a second holder's row, whose `beside` is not set yet."""
    minors, uid = _devices(caps, gpu.minor, instance)
    row = JournalSlice(gpu.uuid, instance.slot, "idle", since=time.time()).on(instance, minors)
    if known and len(known) <= 2 and len({entry.uid for entry, _ in known}) == 1:
        shared = len(known) > 1
        holders = [
            row._replace(state="held", job=entry.job, restart=entry.restart, uid=entry.uid, ordinal=i, shared=shared)
            for entry, i in known
        ]
        return holders[0], holders[1:]
    if known or gpu.processes(instance) or uid != 0:
        row = row._replace(state="zombie", uid=uid, reason="its owner is unknown because the journal was lost")
    return row, []


def _devices(caps: Caps, gpu_minor: int, instance: Instance) -> tuple[tuple[int | None, int | None], int]:
    """Return an instance's capability minors, and its devices' owner (0 if root or nobody owns them)."""
    if instance.ci_id is None:
        return (None, None), 0
    try:
        minors = caps.minors(gpu_minor, instance.gi_id, instance.ci_id)
        owners = [caps.owner(minor) for minor in minors]
    except CapsError:
        return (None, None), 0
    return minors, max((owner[0] for owner in owners if owner is not None), default=0)

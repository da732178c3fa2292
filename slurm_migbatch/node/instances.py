"""Make the instances of a run's claims: reuse idle ones, destroy those in their way, create missing ones.

Everything here needs the locks of the GPUs; see `allocate.py` for the order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slurm_migbatch.mig.driver import Busy, Instance, InsufficientResources
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node import effects, placement
from slurm_migbatch.node.caps import Caps, CapsOpen
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import JournalSlice
from slurm_migbatch.node.repair import Repairer

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

GRACE_S = 2.0


class Retry(Exception):
    """A slot proved unusable; choose again without it."""

    def __init__(self, place: placement.GpuSlot | None, why: str) -> None:
        super().__init__(why)
        self.place = place


class InstanceMaker:
    """Makes instances on one node."""

    def __init__(self, config: NodeConfig, journal: Journal, caps: Caps, repairer: Repairer, maps: JobMaps) -> None:
        self._config = config
        self._journal = journal
        self._caps = caps
        self._repairer = repairer
        self._maps = maps

    def existing(self, gpu: NvmlGpu) -> dict[Slot, Instance]:
        """Return the GPU's instances by slot; unknown and missing ones are repaired first.

        A missing one's ids, and with them its devices, may be given to the instances to be created.
        """
        instances = gpu.instances()
        rows = self._journal.slices("gpu=? AND state<>'lost'", (gpu.uuid,))
        known, uuids = {row.slot for row in rows}, {instance.mig_uuid for instance in instances}
        missing = any(row.state == "held" and row.mig_uuid is not None and row.mig_uuid not in uuids for row in rows)
        if missing or any(instance.slot not in known for instance in instances):
            self._repairer.repair_gpu(gpu, Deadline(GRACE_S), have_lock=True)
            instances = gpu.instances()
        return {instance.slot: instance for instance in instances}

    def evict(
        self, gpu: NvmlGpu, mig_slice: JournalSlice, owner_id: str, existing: dict[Slot, Instance], deadline: Deadline
    ) -> None:
        """Destroy an idle instance, unless another hook that needs its space too has done so."""
        row = self._mark_for_eviction(mig_slice, owner_id)
        if row is None:
            return
        instance = existing.pop(mig_slice.slot, None)
        elapsed = 0
        if instance is not None:
            try:
                elapsed = self._repairer.destroy(gpu, instance, min(self._config.busy_retry, deadline.remaining))
            except Busy as error:
                self._repairer.park(row, str(error))
                raise Retry(None, f"{mig_slice} is still in use: {error}") from None
        with self._journal.write():
            self._journal.drop(row)
            self._journal.event("destroy", {**row.place, "elapsed_ms": elapsed})

    def _mark_for_eviction(self, mig_slice: JournalSlice, owner_id: str) -> JournalSlice | None:
        """Mark an idle instance for destruction; None if it no longer exists. Needs the GPU's lock."""
        row = self._current_row(mig_slice)
        if row is not None and row.state == "idle":  # the hook that had marked it gave up
            with self._journal.write():
                row = self._current_row(mig_slice)
                if row is not None and row.state == "idle":
                    row = self._journal.put(row._replace(state="evict", owner=owner_id))
        if row is not None and row.state != "evict":
            raise Retry(None, f"{mig_slice} was to be destroyed but is now {row.state}")
        return row

    def _current_row(self, mig_slice: JournalSlice) -> JournalSlice | None:
        """Read a row again; its id alone is not sufficient, because SQLite reuses the ids of deleted rows."""
        rows = self._journal.slices(
            "id=? AND gpu=? AND mig_uuid IS ?", (mig_slice.id, mig_slice.gpu, mig_slice.mig_uuid)
        )
        return rows[0] if rows and rows[0].slot == mig_slice.slot else None

    def warm(self, gpu: NvmlGpu, row: JournalSlice, existing: dict[Slot, Instance]) -> Instance:
        """Return the idle instance of a claim, if no process uses it."""
        instance = existing.get(row.slot)
        if instance is None or instance.mig_uuid is None or instance.mig_uuid != row.mig_uuid:
            raise Retry(None, f"{row} does not match the journal")
        pids = gpu.processes(instance)
        if pids:
            self._repairer.park(row, f"in use by process {', '.join(map(str, pids[:4]))}")
            raise Retry(None, f"processes still use {row}")
        return instance

    def join(self, gpu: NvmlGpu, row: JournalSlice, existing: dict[Slot, Instance]) -> JournalSlice:
        """Check that the slice to share exists; the user already owns its devices."""
        instance = existing.get(row.slot)
        if instance is None or instance.mig_uuid != row.mig_uuid:
            self._repairer.repair_gpu(gpu, Deadline(GRACE_S), have_lock=True)
            raise Retry(None, f"{row} does not match the journal")
        return row

    def make(self, gpu: NvmlGpu, row: JournalSlice) -> Instance:
        """Create the instance of a claim."""
        start = time.monotonic()
        effects.point("driver create")
        try:
            instance = gpu.create(row.slot)
        except InsufficientResources as error:
            raise Retry((row.gpu, row.slot), f"{row}: {error}") from None
        elapsed = round((time.monotonic() - start) * 1000)
        self._caps.grant(gpu.minor, instance.gi_id, instance.ci_id or 0, 0)  # closed until all are created
        with self._journal.write():
            self._journal.event("create", {**row._replace(gi=instance.gi_id).place, "elapsed_ms": elapsed})
        return instance

    def open_devices(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, env: HookEnv) -> JournalSlice:
        """Make the user the owner of the capability devices; clear the job map first, which may name another job."""
        self._maps.clear(gpu.index, instance.gi_id, instance.mig_uuid)
        try:
            minors = self._caps.grant(gpu.minor, instance.gi_id, instance.ci_id or 0, env.uid, known=row.warm)
        except CapsOpen:
            raise Retry(None, f"{row} was recreated by another program") from None
        return row.on(instance, minors)

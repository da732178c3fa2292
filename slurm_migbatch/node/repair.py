"""Repair differences between the journal and the driver, whatever caused them.

`differences.diagnose` derives the repairs of a GPU; `Repairer` makes them, under the GPU's lock, in steps that can
each be interrupted and repeated. The driver is authoritative for which instances exist, the journal for who holds them.
`run_repair.py` repairs runs.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from slurm_migbatch.mig.driver import Busy, DriverError, Instance
from slurm_migbatch.node import cudaform, effects, handoff, owner, progress
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import IN_FLIGHT, JournalRun, JournalSlice
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.run_repair import RunRepairer, run_lock

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu
    from slurm_migbatch.node.differences import Repair

EVICT_TRIES_S = 0.02


def gpu_lock(gpu: str) -> str:
    """Return the name of a GPU's lock file."""
    return f"gpu-{gpu}"


class Repairer:
    """Find and make the repairs of one node."""

    def __init__(
        self, journal: Journal, paths: Paths, gpus: Gpus, caps: Caps, maps: JobMaps, run_repairer: RunRepairer
    ) -> None:
        self._journal = journal
        self._paths = paths
        self._gpus = gpus
        self._caps = caps
        self._maps = maps
        self._run_repairer = run_repairer

    def repair_all(
        self, deadline: Deadline, *, dry: bool = False, retry: bool = True, locked_job: int | None = None
    ) -> list[str]:
        """Repair every managed GPU and every run. Returns what was (or would be) done, as sentences.

        With `retry`, zombies without processes are destroyed. `locked_job`: the job whose runs the
        calling hook has locked.
        Raises JournalError; DriverError or TooLate of a GPU, after everything else was repaired.
        """
        done: list[str] = []
        failures: list[DriverError | TooLate] = []
        survey = self._gpus.survey()
        for gpu in survey.managed:
            try:
                done += [f"{gpu.uuid}: {repair}" for repair in self.repair_gpu(gpu, deadline, dry=dry, retry=retry)]
            except (DriverError, TooLate) as error:
                failures.append(error)
        excluded = self._gpus.excluded({row.gpu for row in self._journal.slices()})
        for gpu in excluded.managed:
            try:
                done += self._vacate(gpu, deadline, dry=dry, retry=retry)
            except (DriverError, TooLate) as error:
                failures.append(error)
        usable = {gpu.uuid: gpu for gpu in (*survey.managed, *excluded.managed)}
        if not survey.unidentified:  # else a missing GPU may be one of them and have its instances
            done += self.repair_absent({*usable, *survey.failing, *excluded.failing}, dry=dry)
        done += self._run_repairer.repair_all(dry=dry, locked_job=locked_job)
        done += self._restore_handoffs(usable, dry=dry, locked_job=locked_job)
        done += self.update_job_maps(dry=dry)
        if failures:
            raise failures[0]
        return done

    def _restore_handoffs(self, gpus: Mapping[str, NvmlGpu], *, dry: bool, locked_job: int | None) -> list[str]:
        """Write the hand-offs of running runs that RunDir has lost: it was emptied, and their later steps need them."""
        done = []
        for found in self._journal.runs("state='running'"):
            key = found.job, found.restart
            if found.job == locked_job or handoff.load(self._paths.job, *key) is not None:
                continue
            with suppress(TooLate), locked(self._paths.lock, [run_lock(found.job)], Deadline(0.0)):
                if handoff.load(self._paths.job, *key) is not None:
                    continue  # its Prolog has just written it
                for run in self._journal.runs("job=? AND restart=? AND state='running'", key):
                    rows = sorted(self._journal.slices_of(run), key=lambda row: row.ordinal or 0)
                    if rows and all(row.state == "held" and row.gpu in gpus for row in rows):
                        done.append(f"{run}: its hand-off was missing and is written again")
                        if not dry:
                            self._restore_handoff(run, rows, gpus)
        return done

    def _restore_handoff(self, run: JournalRun, rows: Sequence[JournalSlice], gpus: Mapping[str, NvmlGpu]) -> None:
        # progress files are append-only: what emptied RunDir has left them
        reports = (run.job, run.restart) in progress.listed(self._paths.progress)
        path = f"{self._paths.progress_dir}/{run.job}.{run.restart}" if reports else ""
        self.write_handoff(run, rows, gpus, path)

    def write_handoff(
        self, run: JournalRun, rows: Sequence[JournalSlice], gpus: Mapping[str, NvmlGpu], path: str
    ) -> None:
        """Write the hand-off of a run that holds these slices; `path`: of its progress file. Raises DriverError."""
        sizes = [self._gpus.geometry(gpus[row.gpu]).info(row.slot.profile).memory_mib for row in rows]
        given = [
            handoff.HandoffSlice(row.mig_uuid or "", str(row.slot.profile), size, row.gpu)
            for row, size in zip(rows, sizes, strict=True)
        ]
        new_handoff = handoff.Handoff(run.job, run.restart, run.uid, tuple(given), progress=path)
        if cudaform.wanted(run.marker.encode()) == cudaform.INDEX:
            minors = {minor for row in rows for minor in (row.cap_gi, row.cap_ci) if minor is not None}
            new_handoff = new_handoff._replace(caps=tuple(sorted(minors)), whole=self._gpus.whole())
        handoff.write(self._paths.job, new_handoff)

    def update_job_maps(self, *, dry: bool = False) -> list[str]:
        """Update the job maps; return what was (or would be) done, as sentences. Raises DriverError."""
        if not self._maps.wanted:
            return []
        return self._maps.sync(self._journal, {gpu.uuid: gpu.index for gpu in self._gpus.all()}, dry=dry)

    def clear(self, deadline: Deadline, owner_id: str, *, dry: bool = False) -> list[str]:
        """Destroy every idle instance, for example before maintenance; `owner_id` is the owner that does it.

        Slices of jobs remain. Returns what was (or would be) done, as sentences. Raises DriverError, JournalError,
        TooLate.
        """
        done: list[str] = []
        for gpu in self._gpus.managed():
            done += self._clear(gpu, deadline, owner_id, "cleared by the administrator", dry=dry)
        return done

    def _clear(self, gpu: NvmlGpu, deadline: Deadline, owner_id: str, why: str, *, dry: bool) -> list[str]:
        with locked(self._paths.lock, [gpu_lock(gpu.uuid)], deadline):
            existing = {instance.slot: instance for instance in gpu.instances()}
            rows = [row for row in self._journal.slices("gpu=? AND state='idle'", (gpu.uuid,)) if row.slot in existing]
            if not dry:
                with self._journal.write():  # a Prolog may have taken one of them meanwhile
                    idle = {row.id for row in self._journal.slices("gpu=? AND state='idle'", (gpu.uuid,))}
                    rows = [self._journal.put(r._replace(state="evict", owner=owner_id)) for r in rows if r.id in idle]
                for row in rows:
                    self._discard(gpu, row, existing[row.slot], why)
        return [f"{gpu.uuid}: destroy {row.slot}" for row in rows]

    def _vacate(self, gpu: NvmlGpu, deadline: Deadline, *, dry: bool, retry: bool) -> list[str]:
        """Destroy the slices of a GPU that Gpus= leaves out once no job has them; others may have made instances there.

        Returns what was (or would be) done, as sentences. Raises DriverError, JournalError, TooLate.
        """
        why = "Gpus= leaves out its GPU"
        for row in self._journal.slices("gpu=? AND state='foreign'", (gpu.uuid,)) if not dry else ():
            self._forget(gpu, row, None, why)
        done = [f"{gpu.uuid}: {repair}" for repair in self.repair_gpu(gpu, deadline, dry=dry, retry=retry)]
        with owner.working() as owner_id:
            return done + self._clear(gpu, deadline, owner_id, why, dry=dry)

    def repair_gpu(
        self,
        gpu: NvmlGpu,
        deadline: Deadline,
        *,
        dry: bool = False,
        retry: bool = False,
        dead: Collection[str] = (),
        have_lock: bool = False,
    ) -> list[Repair]:
        """Repair one GPU.

        Owners in `dead` count as dead although their process lives: an owner that gives up passes its own id.
        """
        if have_lock:
            return self._repair(gpu, dry, retry, dead)
        with locked(self._paths.lock, [gpu_lock(gpu.uuid)], deadline):
            return self._repair(gpu, dry, retry, dead)

    def _repair(self, gpu: NvmlGpu, dry: bool, retry: bool, dead: Collection[str]) -> list[Repair]:
        from slurm_migbatch.node.differences import diagnose  # most hooks do not need it

        def alive(name: str) -> bool:
            return name not in dead and owner.alive(name)

        instances = gpu.instances()
        rows = self._journal.slices("gpu=?", (gpu.uuid,))
        processes = {instance.gi_id: gpu.processes(instance) for instance in instances}
        repairs = diagnose(rows, instances, processes, alive, self._exposed(gpu, rows, instances))
        if not retry:
            repairs = [repair for repair in repairs if repair.action != "clear"]
        if not self._gpus.manages(gpu):
            repairs = [repair for repair in repairs if repair.row is not None]
        if not dry:
            for repair in repairs:
                self._action(repair.action)(gpu, repair.row, repair.instance, repair.why)
        return repairs

    def _exposed(self, gpu: NvmlGpu, rows: Sequence[JournalSlice], instances: Sequence[Instance]) -> set[int]:
        """Return the ids of managed instances whose capability devices have the wrong owner or cannot be read."""
        exposed = set()
        by_slot = {i.slot: i for i in instances if i.ci_id is not None}
        for row in rows:
            instance = by_slot.get(row.slot)
            if row.state not in ("held", "idle", "zombie") or row.beside is not None or instance is None:
                continue
            uid = (row.uid or 0) if row.state == "held" else 0
            try:
                if self._caps.wrong(gpu.minor, instance.gi_id, instance.ci_id or 0, uid):
                    exposed.add(instance.gi_id)
            except CapsError:
                exposed.add(instance.gi_id)
        return exposed

    def repair_absent(self, present: Collection[str], *, dry: bool = False) -> list[str]:
        """Handle rows of GPUs that are missing or have MIG off: held ones are lost, the rest are dropped.

        A GPU that does not answer counts as present: its instances may still exist.
        """
        done = []
        for row in self._journal.slices():
            if row.gpu in present or row.state == "lost" or (row.state in IN_FLIGHT and owner.alive(row.owner)):
                continue
            if row.beside is not None and row.state == "held":
                continue  # marked lost with the first holder's row
            done.append(f"{row}: its GPU is missing or has MIG off")
            if not dry:
                (self._lose if row.state == "held" else self._forget)(None, row, None, "its GPU no longer exists")
        return done

    # -- actions, one method for each -------------------------------------------------------------------------------

    def _action(self, name: str) -> Callable[..., None]:
        """Return what makes the repairs of this action, called with the GPU, the row, the instance, and why."""
        actions: Mapping[str, Callable[..., None]] = {
            "undo": self._undo,
            "leave": self._leave,
            "forget": self._forget,
            "lose": self._lose,
            "regain": self._regain,
            "adopt": self._adopt,
            "respect": self._respect,
            "complete": self._complete,
            "park": self._park,
            "clear": self._discard,
            "release": self._release,
            "guard": self._guard,
        }
        return actions[name]

    def _undo(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, _why: str) -> None:
        """Undo unfinished work: an existing instance becomes idle, complete and closed to users."""
        self._settle(gpu, row, instance)

    def _leave(self, _gpu: NvmlGpu, row: JournalSlice, _instance: None, _why: str) -> None:
        """Drop the claim of a second holder that never started, unless its host's end has changed the row."""
        with self._journal.write():
            for current in self._journal.slices("id=? AND beside=? AND owner=?", (row.id, row.beside, row.owner)):
                self._journal.leave(current)

    def _adopt(self, gpu: NvmlGpu, _row: None, instance: Instance, _why: str) -> None:
        self._settle(gpu, JournalSlice(gpu.uuid, instance.slot, "idle"), instance, event="create")

    def _release(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, _why: str) -> None:
        self._settle(gpu, row, instance, event="create")

    def _complete(self, gpu: NvmlGpu, row: JournalSlice | None, instance: Instance, _why: str) -> None:
        self._settle(gpu, row or JournalSlice(gpu.uuid, instance.slot, "idle"), instance)

    def _settle(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, event: str = "") -> None:
        """Complete and close the instance, then mark it idle in the journal; destroy it if it cannot be completed.

        If it is another instance than the row's (both may have the same UUID), who may have used it is unknown.
        """
        if row.mig_uuid not in (None, instance.mig_uuid):
            row = row._replace(uid=None)
        try:
            if instance.ci_id is None:
                effects.point("driver complete")
                instance = gpu.complete(instance)
            elif self._caps.never_closed(gpu.minor, instance.gi_id, instance.ci_id):
                row = row._replace(uid=None)
            minors = self._caps.grant(gpu.minor, instance.gi_id, instance.ci_id or 0, 0)
        except (DriverError, CapsError) as error:
            self._discard(gpu, row, instance, str(error))
            return
        idle = row.on(instance, minors).freed("idle")
        with self._journal.write():
            for other in self._journal.slices("gpu=? AND id IS NOT ?", (gpu.uuid, row.id)):
                if other.state == "evict" and other.slot.placement.overlaps(row.slot.placement):
                    self._journal.drop(other)  # left by a dead owner, for the same instance
            idle = self._journal.put(idle)
            if event:
                self._journal.event(event, {**idle.place, "elapsed_ms": 0, "adopted": True})
            if row.state == "foreign":
                self._journal.event("cleared", {**idle.place, "reason": "no process uses it any more"})

    def _discard(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, why: str) -> None:
        """Destroy the instance and its row; park it if that fails."""
        try:
            self.destroy(gpu, instance)
        except DriverError as error:
            self.park(row._replace(gi=instance.gi_id, ci=instance.ci_id), f"{why}; {error}")
            return
        with self._journal.write():
            if row.id is not None:
                self._journal.drop(row)
            if row.state in ("zombie", "foreign"):
                self._journal.event("cleared", {**row._replace(gi=instance.gi_id).place, "reason": why})
            self._journal.event("destroy", {**row._replace(gi=instance.gi_id).place, "elapsed_ms": 0})

    def _forget(self, gpu: NvmlGpu | None, row: JournalSlice, _instance: None, why: str) -> None:
        with self._journal.write():
            self._journal.drop(row)
            if row.state == "intent" and row.uid:
                self._close_unrecorded(row.uid, None if gpu is None else gpu.minor)
            if row.state in ("idle", "foreign", "evict") and row.gi is not None:
                self._journal.event("destroy", {**row.place, "elapsed_ms": 0})
            if row.state in ("zombie", "foreign"):
                self._journal.event("cleared", {**row.place, "reason": why})

    def _lose(self, _gpu: NvmlGpu | None, row: JournalSlice, _instance: None, why: str) -> None:
        self._close_devices(row)
        with self._journal.write():
            if not self._unchanged(row):
                return
            guest = self._journal.guest_of(row)
            if guest is not None and guest.state in IN_FLIGHT:
                self._journal.leave(guest)  # its Prolog notices it and checks again
            self._journal.put(row._replace(state="lost", reason=why))
            text = f"job {row.job} run {row.restart}: {row} no longer exists"
            if guest is not None and guest.state == "held":
                self._journal.put(guest._replace(state="lost", reason=why))
                text += f", and with it what job {guest.job} shared"
            self._journal.event("fault", {"gpu": row.gpu, "what": text, "action": "noted", "drain": False})

    def _close_devices(self, row: JournalSlice) -> None:
        """Close the devices of an instance that no longer exists, unless another job's later instance has them."""
        others = self._journal.slices("gpu=? AND state='held' AND beside IS NULL AND id<>?", (row.gpu, row.id))
        taken = {minor for other in others for minor in (other.cap_gi, other.cap_ci)}
        with suppress(CapsError):
            self._caps.assign([m for m in (row.cap_gi, row.cap_ci) if m is not None and m not in taken], 0)

    def _close_unrecorded(self, uid: int, gpu_minor: int | None) -> None:
        """Close a user's devices that no row names: an interrupted start opened them, and its instance is gone.

        In the open transaction, so that no start of the user begins; one that works has devices that no row names yet.
        """
        rows = self._journal.slices("uid=?", (uid,))
        if any(row.state == "intent" and owner.alive(row.owner) for row in rows):
            return
        named = {minor for row in rows for minor in (row.cap_gi, row.cap_ci)}
        with suppress(CapsError):
            self._caps.assign([minor for minor in self._caps.owned_by(uid, gpu_minor) if minor not in named], 0)

    def _regain(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, why: str) -> None:
        with self._journal.write():
            if not self._unchanged(row):
                return
            row = self._journal.put(row.on(instance, (row.cap_gi, row.cap_ci))._replace(state="held", reason=""))
            guest = self._journal.guest_of(row)
            if guest is not None:
                self._journal.put(guest._replace(state="held", reason=""))
        self._guard(gpu, row, instance, why)

    def _unchanged(self, row: JournalSlice) -> bool:
        """Return whether a job still has the row, in the open transaction: Epilogs take no lock of a GPU."""
        same = "id=? AND gpu=? AND state=? AND job IS ? AND restart IS ?"
        return bool(self._journal.slices(same, (row.id, row.gpu, row.state, row.job, row.restart)))

    def _respect(self, gpu: NvmlGpu, _row: None, instance: Instance, why: str) -> None:
        with self._journal.write():
            foreign = self._journal.put(JournalSlice(gpu.uuid, instance.slot, "foreign", reason=why).on(instance))
            # Reported to the controller as a zombie (out of use for now), so that its place is not offered.
            self._journal.event("zombie", {**foreign.place, "reason": why})

    def _park(self, _gpu: NvmlGpu, row: JournalSlice, _instance: Instance, why: str) -> None:
        self.park(row, why)

    def _guard(self, gpu: NvmlGpu, row: JournalSlice, instance: Instance, _why: str) -> None:
        """Give the devices of an instance to the user whose job holds it, or to root."""
        held = row.state == "held"
        if held and not self._runs_on(row):
            return  # its release has begun, which closes the devices itself
        try:
            minors = self._caps.grant(gpu.minor, instance.gi_id, instance.ci_id or 0, (row.uid or 0) if held else 0)
            if held and not self._runs_on(row):
                # An Epilog, which does not take the GPU's lock, closed them in between. No other user can have them
                # yet: giving them to one requires the lock.
                self._caps.assign(minors, 0)
            if not held:
                with self._journal.write():
                    if self._unchanged(row):
                        self._journal.put(row._replace(uid=None))  # who may have used it is unknown
        except CapsError as error:
            with self._journal.write():
                self._journal.event(
                    "fault", {"gpu": gpu.uuid, "what": str(error), "action": "will be tried again", "drain": False}
                )

    def _runs_on(self, row: JournalSlice) -> bool:
        """Return whether the slice still belongs to its user: held without interruption, by a run that is not ending.

        If two runs share it, one such run is sufficient.
        """
        values = row.id, row.id, row.mig_uuid, row.uid
        held = self._journal.slices("(id=? OR beside=?) AND state='held' AND mig_uuid IS ? AND uid IS ?", values)
        return any(self._journal.runs("job=? AND restart=? AND state='running'", (r.job, r.restart)) for r in held)

    # -- steps that the hooks use too ------------------------------------------------------------------------------

    def park(self, row: JournalSlice, why: str) -> None:
        """Take a slot out of use, as a zombie, until no process is on it and it can be destroyed.

        Claims on its space are dropped; their owners notice this once they have the GPU's lock.
        """
        new = row.state != "zombie"
        with self._journal.write():
            for claim in self._journal.slices("gpu=? AND state='intent'", (row.gpu,)):
                if claim.id != row.id and claim.slot.placement.overlaps(row.slot.placement):
                    self._journal.drop(claim)
            zombie = self._journal.put(row.freed("zombie", why))
            if new:
                self._journal.event("zombie", {**zombie.place, "reason": why})

    def destroy(self, gpu: NvmlGpu, instance: Instance, patience: float = 0.0) -> int:
        """Destroy an instance, retrying for `patience` seconds while it is busy; return milliseconds taken.

        Raises Busy, DriverError.
        """
        start = time.monotonic()
        self._maps.clear(gpu.index, instance.gi_id, instance.mig_uuid)
        with suppress(CapsError):  # a later instance may get the same devices
            self._caps.assign(self._caps.minors(gpu.minor, instance.gi_id, instance.ci_id or 0), 0)
        while True:
            effects.point("driver destroy")
            try:
                gpu.destroy(instance)
            except Busy:
                if time.monotonic() - start >= patience:
                    raise
                time.sleep(EVICT_TRIES_S)
                continue
            return round((time.monotonic() - start) * 1000)


def boot_id(path: str) -> str:
    """Read the kernel's boot id; empty where it cannot be read."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read(64).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def begin_boot(journal: Journal, paths: Paths, boot: str, maps: JobMaps) -> bool:
    """Drop all slices if the machine has booted since the journal was last used (no instance survives a boot).

    Active runs end without an exit code. Returns whether it did so; the first use of a journal counts.
    """
    if not boot or journal.meta("boot_id") == boot:
        return False
    with journal.write():
        if journal.meta("boot_id") == boot:
            return False
        if journal.meta("boot_id"):
            maps.empty()
            void_all(journal, paths)
            forget_all(journal, journal.slices())
        journal.set_meta("boot_id", boot)
        journal.set_meta("reconciled", "")
        journal.event("boot", {"boot_id": boot})
    return True


def void_all(journal: Journal, paths: Paths) -> None:
    """Write hand-offs without slices for the active runs, and remove all other hand-offs and all progress files.

    `run_repair.TOMBSTONE_S` says why; slurmd's state of jobs survives the boot in its spool directory.
    """
    runs = {(run.job, run.restart): run for run in journal.runs("state<>'ended'")}
    for job, restart in set(handoff.listed(paths.job)) - set(runs):
        handoff.remove(paths.job, job, restart)
    for job, restart in list(progress.listed(paths.progress)):
        progress.remove(paths.progress, job, restart)
    for run in runs.values():
        why = "its node was rebooted"
        handoff.write(paths.job, handoff.Handoff(run.job, run.restart, run.uid, (), why))


def forget_all(journal: Journal, rows: Iterable[JournalSlice]) -> None:
    """End every run and drop every slice, in the open transaction."""
    held: dict[tuple[int | None, int | None], list[dict[str, object]]] = {}
    for row in sorted(rows, key=lambda row: row.beside is None):  # second holders first
        if row.state in ("held", "lost"):
            held.setdefault((row.job, row.restart), []).append(row.event_fields)
        journal.drop(row)
    for run in journal.runs("state<>'ended'"):
        slices = held.get((run.job, run.restart), [])
        if slices:
            fields = {"job": run.job, "restart": run.restart, "exit_code": None, "slices": slices}
            journal.event("stop", fields)
        journal.put_run(run._replace(state="ended", owner="", since=time.time()))


def lock_names(gpus: Iterable[NvmlGpu]) -> list[str]:
    """Return the names of these GPUs' lock files, in the only order in which they may be taken."""
    return [gpu_lock(gpu.uuid) for gpu in sorted(gpus, key=lambda gpu: gpu.index)]

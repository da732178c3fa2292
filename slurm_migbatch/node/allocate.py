"""Allocate slices to a job: the Prolog's work once the grant is known.

The order makes it safe against SIGKILL at any instant:

1. One transaction claims the places (and marks the idle instances to destroy): from here no other run takes them.
2. Under the GPUs' locks, the driver is queried for existing instances, idle ones are destroyed, missing ones created.
3. The job's user becomes the owner of the capability devices. Instances that another user had are not reused: they are
   among those that were destroyed (unless WarmReuse allows it).
4. The hand-off for TaskProlog is written.
5. One transaction records that the job holds its slices, and spools the event. The job maps (`jobmaps.py`) follow.

Unfinished work belongs to an owner that is dead by then, and `repair.py` undoes it.

A guest (`guest.py`) follows the same steps with a claim next to its host's: nothing is created and no device changes
its owner. If the host leaves meanwhile, it has become a claim of the whole slice (`Journal.leave`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from slurm_migbatch.mig.driver import DriverError, GpuLost, Instance
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node import cudaform, ending, guest, owner, placement, plan, progress
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.diagnosis import GpuLabel, explain_misfit
from slurm_migbatch.node.gpu_faults import Withdrawn
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.instances import GRACE_S, InstanceMaker, Retry
from slurm_migbatch.node.journal import Journal, JournalError, Overlap
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.liveness import LivenessError
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.repair import Repairer, lock_names
from slurm_migbatch.node.run_repair import RunRepairer

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

ATTEMPTS = 12
SLURM_QUERY_S = 10.0
"""How long a Prolog without a free slot may ask Slurm whether other runs are over."""
HOST_WAIT_S = 3.0
"""How long a guest waits for a host that is starting or ending."""
HOST_POLL_S = 0.05


class Misfit(Exception):
    """This node has no slot for the job now; the message says why, and `diagnosis` lists what is in use."""

    def __init__(self, why: str, diagnosis: str) -> None:
        super().__init__(why)
        self.diagnosis = diagnosis


class _NoFreeSlot(Exception):
    """The journal has no free slot; the message is the diagnosis."""


class Unsafe(Exception):
    """A GPU is unreliable; the node should be drained."""


class AllocatedSlices(NamedTuple):
    """Slices that a run holds now."""

    slices: tuple[JournalSlice, ...]
    elapsed_ms: int

    @property
    def warm(self) -> bool:
        """Whether every slice was idle before, so that none had to be created."""
        return all(mig_slice.warm for mig_slice in self.slices)


class _Start(NamedTuple):
    """The start of a run: its Prolog, its grant, and the owner that does the work until the deadline."""

    env: HookEnv
    grant: Grant
    owner_id: str
    deadline: Deadline


class Allocator:
    """Allocate slices to runs on one node."""

    def __init__(
        self,
        config: NodeConfig,
        journal: Journal,
        paths: Paths,
        gpus: Gpus,
        maker: InstanceMaker,
        repairer: Repairer,
        run_repairer: RunRepairer,
    ) -> None:
        self._config = config
        self._journal = journal
        self._paths = paths
        self._gpus = gpus
        self._maker = maker
        self._repairer = repairer
        self._run_repairer = run_repairer

    def allocate(self, env: HookEnv, grant: Grant, owner_id: str, deadline: Deadline) -> AllocatedSlices:
        """Allocate the run's slices. Raises Misfit, Unsafe, DriverError, CapsError, JournalError, TooLate."""
        start = _Start(env, grant, owner_id, deadline)
        excluded: set[placement.GpuSlot] = set()
        survey = self._gpus.survey()
        lost = {uuid: f"{uuid}: {error}" for uuid, error in survey.failing.items()}
        lost |= {f"GPU {index}": error for index, error in survey.unidentified.items()}
        passing = [error for error in survey.failing.values() if not isinstance(error, GpuLost)]
        repaired = self._journal.meta("reconciled") != self._journal.meta("boot_id")
        if repaired:
            self._repair_all(env.job, deadline)
        why = ""
        for _ in range(ATTEMPTS):
            deadline.check(f"allocating slices to {env.run}")
            try:
                claims = (self._claim_guest if grant.guest else self._claim)(start, excluded, lost)
            except _NoFreeSlot as full:
                if not repaired:
                    self._repair_all(env.job, deadline)
                    repaired = True
                    continue
                raise self._why_refused(grant, lost, passing, f"{why}. {full}" if why else str(full)) from None
            try:
                return self._apply(start, claims)
            except Retry as again:
                why = str(again)
                if again.place is not None:
                    excluded.add(again.place)
            except (GpuLost, Withdrawn) as error:
                self._gpus.reset()
                for gpu in [error.gpu] if error.gpu else {claim.gpu for claim in claims}:
                    lost[gpu] = f"{gpu}: {error}"
        diagnosis = f"{ATTEMPTS} attempts, the last: {why}. {self.explain_misfit(grant)}"
        raise Misfit(f"no free placement for {grant.gres}", diagnosis)

    def _why_refused(
        self, grant: Grant, lost: Mapping[str, str], passing: Sequence[DriverError], diagnosis: str
    ) -> Exception:
        """Return the error of a run without a free slot; `diagnosis` may name processes of other users.

        `lost` are the GPUs that are not used, `passing` the errors of those that may work again without an
        administrator. While other GPUs work, the node is not drained: its next inventory, which the fault hastens,
        takes back the offer of a lost one.
        """
        if len(lost) > len(passing):
            what = "; ".join(lost.values())
            if self._config.on_error == "drain" or not any(gpu.uuid not in lost for gpu in self._gpus.managed()):
                return Unsafe(what)
            with self._journal.write():
                self._journal.event("fault", {"gpu": None, "what": what[:500], "action": "not used", "drain": False})
            diagnosis = f"{what}. {diagnosis}"
        for error in passing:
            if not isinstance(error, Withdrawn):
                return error
        return Misfit(f"no free placement for {grant.gres}", diagnosis)

    def explain_misfit(self, grant: Grant) -> str:
        """Describe the plan's slots for the grant and the slices in use. Raises DriverError, JournalError."""
        return self._explain_misfit(grant, plan.load(self._paths.state_dir), self._gpus.listed())

    def _explain_misfit(self, grant: Grant, node_plan: plan.CachedPlan, gpus: Iterable[NvmlGpu], note: str = "") -> str:
        labels = [GpuLabel(gpu.index, gpu.uuid) for gpu in gpus]
        runs = self._journal.runs("state IN ('starting','running','ending')")
        return explain_misfit(grant, node_plan, labels, self._journal.slices(), runs, note)

    def _repair_all(self, job: int, deadline: Deadline) -> None:
        self._repairer.repair_all(deadline, retry=True, locked_job=job)
        with suppress(LivenessError):
            self._run_repairer.orphans(Deadline(min(deadline.remaining / 2, SLURM_QUERY_S)))
        with self._journal.write():
            self._journal.set_meta("reconciled", self._journal.meta("boot_id"))

    # -- claiming ------------------------------------------------------------------------------------------------

    def _claim(
        self, start: _Start, excluded: set[placement.GpuSlot], lost: dict[str, str]
    ) -> tuple[placement.SlotClaim, ...]:
        """Choose and claim places in one transaction. Raises _NoFreeSlot if there are none."""
        self._repair_abandoned(start)
        gpus = [gpu for gpu in self._gpus.managed() if gpu.uuid not in lost]
        geometries = {gpu.uuid: self._gpus.geometry(gpu) for gpu in gpus}
        node_plan = plan.load(self._paths.state_dir)
        try:
            with self._journal.write():
                rows = self._journal.slices("state<>'lost'")
                views = [_occupancy(gpu, geometries[gpu.uuid], rows, node_plan.slots.get(gpu.uuid, ())) for gpu in gpus]
                claims = placement.choose_slots(
                    views, start.grant.profiles, start.env.uid, self._config.warm_reuse, excluded
                )
                if claims is None:
                    tried = ", ".join(f"{slot} on {gpu[:12]}" for gpu, slot in sorted(excluded))
                    note = f"Tried: {tried}" if tried else ""
                    raise _NoFreeSlot(self._explain_misfit(start.grant, node_plan, gpus, note))
                self._write_claims(start, claims)
                return claims
        except Overlap as error:
            raise JournalError(f"invalid choice of placements: {error}") from error

    def _claim_guest(
        self, start: _Start, excluded: set[placement.GpuSlot], lost: dict[str, str]
    ) -> tuple[placement.SlotClaim, ...]:
        """Claim the place that the plan names for this guest, in one transaction. Raises _NoFreeSlot, Misfit."""
        until = time.monotonic() + min(HOST_WAIT_S, start.deadline.remaining / 2)
        while True:
            self._repair_abandoned(start)
            gpus = [gpu for gpu in self._gpus.managed() if gpu.uuid not in lost]
            node_plan = plan.load(self._paths.state_dir)
            place = node_plan.guests.get(start.env.job)
            gpu = next((gpu for gpu in gpus if place is not None and gpu.uuid == place.gpu), None)
            if place is None or gpu is None:
                raise Misfit(
                    "this node's plan has no slice for it to share", self._explain_misfit(start.grant, node_plan, gpus)
                )
            planned = place.slot in node_plan.slots.get(place.gpu, ())
            geometry = self._gpus.geometry(gpu)
            with self._journal.write():
                rows = self._journal.slices("gpu=? AND state<>'lost'", (gpu.uuid,))
                runs = {(run.job, run.restart): run for run in self._journal.runs("state='running'")}
                verdict = guest.verdict(place, start.env.uid, rows, runs, planned)
                claims: tuple[placement.SlotClaim, ...] | None = None
                if verdict.action is guest.GuestAction.JOIN:
                    claims = (placement.SlotClaim(place.gpu, place.slot, None, (), planned, verdict.host),)
                elif verdict.action is guest.GuestAction.ALONE and place.slot.profile in geometry:
                    view = _occupancy(gpu, geometry, rows, (place.slot,))
                    other_slots = {
                        (gpu.uuid, slot) for slot in geometry.info(place.slot.profile).slots if slot != place.slot
                    }
                    claims = placement.choose_slots(
                        [view], [place.slot.profile], start.env.uid, self._config.warm_reuse, excluded | other_slots
                    )
                if claims is not None:
                    self._write_claims(start, claims)
                    return claims
            if verdict.action is guest.GuestAction.ALONE:
                raise _NoFreeSlot(self._explain_misfit(start.grant, node_plan, gpus))
            if verdict.action is guest.GuestAction.NO or time.monotonic() > until:
                raise Misfit(verdict.why, self._explain_misfit(start.grant, node_plan, gpus))
            time.sleep(HOST_POLL_S)

    def _repair_abandoned(self, start: _Start) -> None:
        """Undo in-flight work of dead owners before its places count as taken."""
        in_flight = self._journal.slices("state IN ('intent','evict')")
        abandoned = {row.gpu for row in in_flight if not owner.alive(row.owner)}
        for gpu in self._gpus.managed() if abandoned else ():
            if gpu.uuid in abandoned:
                self._repairer.repair_gpu(gpu, start.deadline)
        unfinished = self._journal.runs("state IN ('starting','ending')")
        if abandoned or any(not owner.alive(r.owner) for r in unfinished) or ending.abandoned(self._paths.run):
            self._run_repairer.repair_all(locked_job=start.env.job)

    def _write_claims(self, start: _Start, claims: Sequence[placement.SlotClaim]) -> None:
        """Write the claims, their evictions and the starting run to the journal, in the open transaction."""
        env, owner_id = start.env, start.owner_id
        for claim in claims:  # all of them first: an instance may also be in the place of an earlier claim
            for mig_slice in claim.evict:
                if mig_slice.state == "idle":  # otherwise another hook has marked it, and this one may wait for it
                    self._journal.put(mig_slice._replace(state="evict", owner=owner_id))
        for ordinal, claim in enumerate(claims):
            base = claim.warm or JournalSlice(claim.gpu, claim.slot, "intent")
            if claim.host is not None:
                base = claim.host._replace(id=None, beside=claim.host.id, shared=True, reason="")
            self._journal.put(
                base._replace(
                    state="intent",
                    job=env.job,
                    restart=env.restart or 0,
                    ordinal=ordinal,
                    uid=env.uid,  # kept if the start fails: from here on the user may have had it
                    owner=owner_id,
                    since=time.time(),
                    warm=claim.warm is not None or claim.host is not None,
                )
            )
        self._journal.put_run(self._starting_run(start))

    # -- execution -----------------------------------------------------------------------------------------------

    def _apply(self, start: _Start, claims: Sequence[placement.SlotClaim]) -> AllocatedSlices:
        wanted = {claim.gpu for claim in claims}
        survey = self._gpus.survey()
        gpus = {gpu.uuid: gpu for gpu in survey.managed if gpu.uuid in wanted}
        try:
            with locked(self._paths.lock, lock_names(gpus.values()), start.deadline):
                try:
                    failing = {**survey.failing, **self._gpus.withdrawn()}  # perhaps while this waited for the locks
                    for uuid in wanted & failing.keys():
                        raise failing[uuid]
                    return self._under_locks(start, claims, gpus)
                except BaseException:
                    # Release the claims while the locks are still held here.
                    for gpu in gpus.values():
                        with suppress(DriverError):
                            self._repairer.repair_gpu(gpu, start.deadline, dead=(start.owner_id,), have_lock=True)
                    raise
        except TooLate:
            grace = Deadline(GRACE_S)
            for gpu in gpus.values():
                with suppress(DriverError, TooLate):
                    self._repairer.repair_gpu(gpu, grace, dead=(start.owner_id,))
            raise

    def _under_locks(
        self, start: _Start, claims: Sequence[placement.SlotClaim], gpus: dict[str, NvmlGpu]
    ) -> AllocatedSlices:
        env, owner_id, deadline = start.env, start.owner_id, start.deadline
        existing = {uuid: self._maker.existing(gpu) for uuid, gpu in gpus.items()}
        for claim in claims:
            for mig_slice in claim.evict:
                self._maker.evict(gpus[claim.gpu], mig_slice, owner_id, existing[claim.gpu], deadline)
        places = {(claim.gpu, claim.slot) for claim in claims}
        rows = self._journal.slices("owner=? AND state='intent'", (owner_id,))
        # earlier claims on a GPU that is lost remain until it can be repaired
        rows = [row for row in rows if (row.gpu, row.slot) in places]
        if len(rows) != len(claims):
            raise Retry(None, "the chosen idle slice no longer exists")
        prepared: list[tuple[JournalSlice, Instance | None]] = []
        for row in sorted(rows, key=lambda row: row.ordinal or 0):
            deadline.check(f"creating {row.slot}")
            gpu = gpus[row.gpu]
            if row.beside is not None:
                prepared.append((self._maker.join(gpu, row, existing[row.gpu]), None))
            elif row.warm:
                prepared.append((row, self._maker.warm(gpu, row, existing[row.gpu])))
            else:
                prepared.append((row, self._maker.make(gpu, row)))
        # after the writes to the journal: if one fails, no device is open that no hand-off names
        ready = [
            row if instance is None else self._maker.open_devices(gpus[row.gpu], row, instance, env)
            for row, instance in prepared
        ]
        self._write_handoff(start, ready, gpus)
        try:
            return self._commit(start, ready, all(claim.planned for claim in claims))
        except TooLate:
            with suppress(OSError):  # RunDir is full; the agent repeats it
                self._run_repairer.refuse_again(run_of(env, "misfit", owner_id))  # in place of the hand-off above
            raise

    def _write_handoff(self, start: _Start, rows: Sequence[JournalSlice], gpus: Mapping[str, NvmlGpu]) -> None:
        env = start.env
        job, restart, path = env.job, env.restart or 0, f"{self._paths.progress_dir}/{env.job}.{env.restart or 0}"
        try:
            progress.make(self._paths.progress, job, restart, env.uid)
        except OSError:
            path = ""  # for example if the disk is full; the job runs but cannot report progress
        if path and len(rows) > 1:
            with suppress(OSError):
                progress.make_steps(self._paths.progress, job, restart, env.uid)
        self._repairer.write_handoff(self._starting_run(start), rows, gpus, path)

    def _starting_run(self, start: _Start) -> JournalRun:
        return run_of(start.env, "starting", start.owner_id, cudaform.kept(start.env.comment) + start.grant.marker)

    def _commit(self, start: _Start, done: Sequence[JournalSlice], planned: bool) -> AllocatedSlices:
        """Mark the run as running on its slices, and add the event. Raises TooLate if another hook has the run."""
        env, restart, now = start.env, start.env.restart or 0, time.time()
        elapsed_ms = round(start.deadline.elapsed * 1000)
        with self._journal.write():
            run = self._journal.runs("job=? AND restart=?", (env.job, restart))[0]
            if run.owner != start.owner_id:
                raise TooLate(f"{run} was taken over by another hook")
            current_rows = [self._current_claim(row, start.owner_id) for row in done]
            held = tuple([self._journal.put(row._replace(state="held", owner="", since=now)) for row in current_rows])
            self._journal.put_run(run._replace(state="running", owner="", since=now))
            allocation = AllocatedSlices(held, elapsed_ms)
            self._journal.event(
                "start",
                {
                    "job": env.job,
                    "restart": restart,
                    "uid": env.uid,
                    "user": env.user,
                    "account": env.account,
                    "partition": env.partition,
                    "decision": run.decision,
                    "warm": allocation.warm,
                    "planned": planned,
                    "elapsed_ms": elapsed_ms,
                    "slices": [row.event_fields for row in held],
                    **self._sharing_fields(held),
                },
            )
        return allocation

    def _current_claim(self, row: JournalSlice, owner_id: str) -> JournalSlice:
        """Read a guest's claim again: if its host has left it may be a claim of the whole slice, or void."""
        if row.beside is None:
            return row
        rows = self._journal.slices("owner=? AND state='intent' AND ordinal IS ?", (owner_id, row.ordinal))
        if not rows:
            raise Retry(None, f"{row} was to be shared but no longer exists")
        return rows[0]

    def _sharing_fields(self, held: Sequence[JournalSlice]) -> dict[str, list[int]]:
        """Return the fields of a guest's `start` event that name its host, and mark the host's row as shared.

        A run counts as a guest only if its host still exists when it starts.
        """
        for row in held:
            for host in self._journal.slices("id=?", (row.beside,)) if row.beside is not None else ():
                self._journal.put(host._replace(shared=True))
                return {"beside": [host.job or 0, host.restart or 0]}
        return {}


def _occupancy(
    gpu: NvmlGpu, geometry: Geometry, rows: Iterable[JournalSlice], planned: tuple[Slot, ...]
) -> placement.GpuOccupancy:
    """Return the occupancy of one GPU from the journal's rows, without those in state `lost`."""
    gpu_rows = [row for row in rows if row.gpu == gpu.uuid]
    used = tuple({row.slot for row in gpu_rows if row.state not in guest.FREE})
    idle = tuple([row for row in gpu_rows if row.state in guest.FREE])
    return placement.GpuOccupancy(gpu.uuid, gpu.index, geometry, used, idle, planned)


def run_of(env: HookEnv, state: str, owner_id: str, marker: str = "") -> JournalRun:
    """Return the journal's row of a Prolog's run."""
    return JournalRun(env.job, env.restart or 0, env.uid, env.user, env.account, env.partition, marker, state, owner_id)

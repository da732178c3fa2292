"""Giving a job its slices: what the Prolog does once the grant is known.

The order of things is what makes it safe against SIGKILL at any instant:

1. One transaction claims the places (and marks the idle instances that have to go): from here nobody else takes them.
2. Under the GPUs' locks, the driver is asked what exists, idle instances are destroyed, missing ones made.
3. The capability devices go to the job's user. An instance that another user had is none that is there: it is among
   those that were destroyed (unless WarmReuse says otherwise).
4. The hand-off for TaskProlog is written.
5. One transaction says that the job holds its slices, and spools the event.

Whatever is half done belongs to an owner that is dead afterwards, and `repair.py` undoes it.

A guest (`guest.py`) goes the same way with a claim beside its host's: nothing is made and no device changes hands. If
the host leaves meanwhile, the claim has become one of the whole slice (`Journal.leave`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from slurm_migbatch.mig.driver import Busy, DriverError, Gpu, GpuLost, Instance, NoRoom
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node import effects, ending, guest, handoff, owner, placement, plan, progress
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.config import Config
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.diagnosis import Site, account
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.journal import IN_FLIGHT, Journal, JournalError, Overlap, Run, Slice
from slurm_migbatch.node.liveness import LivenessError
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.repair import Repairer, lock_names

ATTEMPTS = 12
GRACE_S = 2.0
ASKING_S = 10.0
"""How long who finds no room may ask Slurm whether somebody's run is over."""
HOST_TURNS_S = 3.0
"""How long a guest waits for a host that is starting or ending."""
HOST_LOOKS_S = 0.05


class Misfit(Exception):
    """This node has no place for the job now; the message says why, and `account` who has what."""

    def __init__(self, why: str, account: str) -> None:
        super().__init__(why)
        self.account = account


class _Full(Exception):
    """The journal knows of no place; the message is the account."""


class Unsafe(Exception):
    """A GPU cannot be trusted any more; the node should be drained."""


class _Again(Exception):
    """A place proved unusable; choose again without it."""

    def __init__(self, place: placement.Place | None, why: str) -> None:
        super().__init__(why)
        self.place = place


class Started(NamedTuple):
    """The slices a run holds now."""

    pieces: tuple[Slice, ...]
    elapsed_ms: int

    @property
    def warm(self) -> bool:
        """Whether nothing had to be made."""
        return all(piece.warm for piece in self.pieces)


class Starter:
    """Gives slices to runs on one node."""

    def __init__(
        self, config: Config, journal: Journal, paths: Paths, gpus: Gpus, caps: Caps, repairer: Repairer
    ) -> None:
        self._config = config
        self._journal = journal
        self._paths = paths
        self._gpus = gpus
        self._caps = caps
        self._repairer = repairer

    def start(self, env: HookEnv, grant: Grant, who: str, deadline: Deadline) -> Started:
        """Give the run its slices. Raises Misfit, Unsafe, DriverError, CapsError, JournalError, TooLate."""
        barred: set[placement.Place] = set()
        lost = dict(self._gpus.survey().failing)
        repaired = False
        if self._journal.meta("reconciled") != self._journal.meta("boot_id"):
            self._repair_all(deadline)
            repaired = True
        why = ""
        for _ in range(ATTEMPTS):
            deadline.check(f"giving {env.run} its slices")
            try:
                claiming = self._claim_guest if grant.guest else self._claim
                claims = claiming(env, grant, who, barred, lost, deadline)
            except _Full as full:
                if not repaired:
                    self._repair_all(deadline)
                    repaired = True
                    continue
                if lost:
                    raise Unsafe("; ".join(lost.values())) from None
                tried = f"; {why}" if why else ""
                raise Misfit(f"no place for {grant.gres} beside what is in use{tried}", str(full)) from None
            try:
                return self._carry_out(env, who, deadline, claims)
            except _Again as again:
                why = str(again)
                if again.place is not None:
                    barred.add(again.place)
            except GpuLost as error:
                self._gpus.reset()
                for claim in claims:
                    lost[claim.gpu] = f"{claim.gpu}: {error}"
        raise Misfit(f"no place for {grant.gres} after {ATTEMPTS} attempts; {why}", self.account(grant))

    def account(self, grant: Grant) -> str:
        """What this node was to offer of the grant, and who has what now. Raises DriverError, JournalError."""
        return self._account(grant, plan.load(self._paths.state_dir), self._gpus.listed())

    def _account(self, grant: Grant, told: plan.Plan, gpus: Iterable[Gpu], note: str = "") -> str:
        sites = [Site(gpu.index, gpu.uuid) for gpu in gpus]
        runs = self._journal.runs("state IN ('starting','running','ending')")
        return account(grant, told, sites, self._journal.slices(), runs, note)

    def _repair_all(self, deadline: Deadline) -> None:
        self._repairer.all(deadline, retry=True)
        with suppress(LivenessError):
            self._repairer.orphans(Deadline(min(deadline.remaining / 2, ASKING_S)))
        with self._journal.write():
            self._journal.set_meta("reconciled", self._journal.meta("boot_id"))

    # -- claiming ------------------------------------------------------------------------------------------------

    def _claim(
        self,
        env: HookEnv,
        grant: Grant,
        who: str,
        barred: set[placement.Place],
        lost: dict[str, str],
        deadline: Deadline,
    ) -> tuple[placement.Claim, ...]:
        """Choose and claim places in one transaction. Raises _Full where there are none."""
        self._mend_abandoned(deadline)
        gpus = [gpu for gpu in self._gpus.managed() if gpu.uuid not in lost]
        shapes = {gpu.uuid: self._gpus.geometry(gpu) for gpu in gpus}
        told = plan.load(self._paths.state_dir)
        try:
            with self._journal.write():
                rows = self._journal.slices("state<>'lost'")
                views = [
                    placement.View(
                        uuid=gpu.uuid,
                        order=gpu.index,
                        geometry=shapes[gpu.uuid],
                        used=tuple({r.slot for r in rows if r.gpu == gpu.uuid and r.state not in ("idle", "evict")}),
                        idle=tuple([r for r in rows if r.gpu == gpu.uuid and r.state in ("idle", "evict")]),
                        planned=told.slots.get(gpu.uuid, ()),
                    )
                    for gpu in gpus
                ]
                claims = placement.claim(views, grant.profiles, env.uid, self._config.warm_reuse, barred)
                if claims is None:
                    tried = ", ".join(f"{slot} on {gpu[:12]}" for gpu, slot in sorted(barred))
                    raise _Full(self._account(grant, told, gpus, f"Tried in vain: {tried}" if tried else ""))
                self._write_claims(env, grant, who, claims)
                return claims
        except Overlap as error:
            raise _never(error) from error

    def _claim_guest(
        self,
        env: HookEnv,
        grant: Grant,
        who: str,
        barred: set[placement.Place],
        lost: dict[str, str],
        deadline: Deadline,
    ) -> tuple[placement.Claim, ...]:
        """Claim the place that the plan names for this guest, in one transaction. Raises _Full, Misfit."""
        until = time.monotonic() + min(HOST_TURNS_S, deadline.remaining / 2)
        while True:
            self._mend_abandoned(deadline)
            gpus = [gpu for gpu in self._gpus.managed() if gpu.uuid not in lost]
            told = plan.load(self._paths.state_dir)
            place = told.guests.get(env.job)
            gpu = next((gpu for gpu in gpus if place is not None and gpu.uuid == place.gpu), None)
            if place is None or gpu is None:
                raise Misfit("this node's plan names no slice that it may share", self._account(grant, told, gpus))
            planned = place.slot in told.slots.get(place.gpu, ())
            shape = self._gpus.geometry(gpu)
            with self._journal.write():
                rows = self._journal.slices("gpu=? AND state<>'lost'", (gpu.uuid,))
                runs = {(run.job, run.restart): run for run in self._journal.runs("state<>'ended'")}
                found = guest.verdict(place, env.uid, rows, runs, planned)
                claims: tuple[placement.Claim, ...] | None = None
                if found.way is guest.Way.JOIN:
                    claims = (placement.Claim(place.gpu, place.slot, None, (), planned, found.host),)
                elif found.way is guest.Way.ALONE and place.slot.profile in shape:
                    used = tuple({row.slot for row in rows if row.state not in guest.FREE})
                    idle = tuple([row for row in rows if row.state in guest.FREE])
                    view = placement.View(gpu.uuid, gpu.index, shape, used, idle, (place.slot,))
                    others = {(gpu.uuid, slot) for slot in shape.info(place.slot.profile).slots if slot != place.slot}
                    claims = placement.claim(
                        [view], [place.slot.profile], env.uid, self._config.warm_reuse, barred | others
                    )
                if claims is not None:
                    self._write_claims(env, grant, who, claims)
                    return claims
            if found.way is guest.Way.ALONE:
                raise _Full(self._account(grant, told, gpus))
            if found.way is guest.Way.NO or time.monotonic() > until:
                raise Misfit(found.why, self._account(grant, told, gpus))
            time.sleep(HOST_LOOKS_S)

    def _mend_abandoned(self, deadline: Deadline) -> None:
        """Undo what dead owners left in flight before its places are counted as taken."""
        abandoned = {
            row.gpu
            for row in self._journal.slices("state IN ('intent','evict')")
            if row.state in IN_FLIGHT and not owner.alive(row.owner)
        }
        for gpu in self._gpus.managed() if abandoned else ():
            if gpu.uuid in abandoned:
                self._repairer.gpu(gpu, deadline)
        unfinished = self._journal.runs("state IN ('starting','ending')")
        if abandoned or any(not owner.alive(r.owner) for r in unfinished) or ending.abandoned(self._paths.run):
            self._repairer.runs()

    def _write_claims(self, env: HookEnv, grant: Grant, who: str, claims: Sequence[placement.Claim]) -> None:
        for ordinal, claim in enumerate(claims):
            for piece in claim.evict:
                if piece.state == "idle":  # else another hook has marked it, and we may wait for that one
                    self._journal.put(piece._replace(state="evict", owner=who))
            base = claim.warm or Slice(claim.gpu, claim.slot, "intent")
            if claim.host is not None:
                base = claim.host._replace(id=None, beside=claim.host.id, shared=True, reason="")
            self._journal.put(
                base._replace(
                    state="intent",
                    job=env.job,
                    restart=env.restart or 0,
                    ordinal=ordinal,
                    uid=env.uid,  # also where it comes to nothing: from here on he may have had it
                    owner=who,
                    since=time.time(),
                    warm=claim.warm is not None or claim.host is not None,
                )
            )
        run = Run(
            env.job, env.restart or 0, env.uid, env.user, env.account, env.partition, grant.marker, "starting", who
        )
        self._journal.put_run(run)

    # -- doing ---------------------------------------------------------------------------------------------------

    def _carry_out(self, env: HookEnv, who: str, deadline: Deadline, claims: Sequence[placement.Claim]) -> Started:
        wanted = {claim.gpu for claim in claims}
        gpus = {gpu.uuid: gpu for gpu in self._gpus.managed() if gpu.uuid in wanted}
        try:
            with locked(self._paths.lock, lock_names(gpus.values()), deadline):
                try:
                    return self._under_locks(env, who, deadline, claims, gpus)
                except BaseException:
                    # Give back what was claimed while the locks are still ours.
                    for gpu in gpus.values():
                        with suppress(DriverError):
                            self._repairer.gpu(gpu, deadline, dead=(who,), have_lock=True)
                    raise
        except TooLate:
            grace = Deadline(GRACE_S)
            for gpu in gpus.values():
                with suppress(DriverError, TooLate):
                    self._repairer.gpu(gpu, grace, dead=(who,))
            raise

    def _under_locks(
        self, env: HookEnv, who: str, deadline: Deadline, claims: Sequence[placement.Claim], gpus: dict[str, Gpu]
    ) -> Started:
        there = {uuid: self._seen(gpu) for uuid, gpu in gpus.items()}
        for claim in claims:
            for piece in claim.evict:
                self._evict(gpus[claim.gpu], piece, who, there[claim.gpu], deadline)
        rows = self._journal.slices("owner=? AND state='intent'", (who,))
        if len(rows) != len(claims):
            raise _Again(None, "a slice that was idle when it was chosen proved to be gone")
        done: list[Slice] = []
        for row in sorted(rows, key=lambda row: row.ordinal or 0):
            deadline.check(f"making {row.slot}")
            gpu = gpus[row.gpu]
            if row.beside is not None:
                done.append(self._joined(gpu, row, there[row.gpu]))
                continue
            instance = self._warm(gpu, row, there[row.gpu]) if row.warm else self._make(gpu, row)
            done.append(self._open(gpu, row, instance, env))
        memory = {row.slot.profile: self._memory(gpus[row.gpu], row.slot.profile) for row in done}
        given = tuple(
            [handoff.Given(r.mig_uuid or "", str(r.slot.profile), memory[r.slot.profile], r.gpu) for r in done]
        )
        self._hand_over(env, given)
        planned = all(claim.planned for claim in claims)
        return self._commit(env, who, done, planned, round(deadline.elapsed * 1000))

    def _hand_over(self, env: HookEnv, given: tuple[handoff.Given, ...]) -> None:
        job, restart, shown = env.job, env.restart or 0, f"{self._paths.progress_dir}/{env.job}.{env.restart or 0}"
        try:
            progress.make(self._paths.progress, job, restart, env.uid)
        except OSError:
            shown = ""  # a full disk, say; the job runs, it only cannot tell how it fares
        handoff.write(self._paths.job, handoff.Handoff(job, restart, env.uid, given, progress=shown))

    def _seen(self, gpu: Gpu) -> dict[Slot, Instance]:
        """What exists on the GPU, all of it known to the journal."""
        instances = gpu.instances()
        known = {row.slot for row in self._journal.slices("gpu=? AND state<>'lost'", (gpu.uuid,))}
        if any(instance.slot not in known for instance in instances):
            self._repairer.gpu(gpu, Deadline(GRACE_S), have_lock=True)
        return {instance.slot: instance for instance in instances}

    def _evict(self, gpu: Gpu, piece: Slice, who: str, there: dict[Slot, Instance], deadline: Deadline) -> None:
        """Destroy an idle instance, unless another hook that needs its room too has done so."""
        row = self._marked(piece, who)
        if row is None:
            return
        instance = there.pop(piece.slot, None)
        elapsed = 0
        if instance is not None:
            try:
                elapsed = self._repairer.destroy(gpu, instance, min(self._config.busy_retry, deadline.remaining))
            except Busy as error:
                self._repairer.park(row, str(error))
                raise _Again(None, f"{piece} is still in use: {error}") from None
        with self._journal.write():
            self._journal.drop(row)
            self._journal.event("destroy", {**row.place, "elapsed_ms": elapsed})

    def _marked(self, piece: Slice, who: str) -> Slice | None:
        """The row of an instance that has to go, marked so; None where the instance is gone. Needs the GPU's lock."""
        row = self._now(piece)
        if row is not None and row.state == "idle":  # whoever had marked it gave up
            with self._journal.write():
                row = self._now(piece)
                if row is not None and row.state == "idle":
                    row = self._journal.put(row._replace(state="evict", owner=who))
        if row is not None and row.state != "evict":
            raise _Again(None, f"{piece} was to be destroyed and is {row.state} now")
        return row

    def _now(self, piece: Slice) -> Slice | None:
        """What became of a row; its number alone does not tell, since SQLite gives those of deleted rows again."""
        rows = self._journal.slices("id=? AND gpu=? AND mig_uuid IS ?", (piece.id, piece.gpu, piece.mig_uuid))
        return rows[0] if rows and rows[0].slot == piece.slot else None

    def _warm(self, gpu: Gpu, row: Slice, there: dict[Slot, Instance]) -> Instance:
        instance = there.get(row.slot)
        if instance is None or instance.mig_uuid is None or instance.mig_uuid != row.mig_uuid:
            raise _Again(None, f"{row} is not what the journal says")
        pids = gpu.processes(instance)
        if pids:
            self._repairer.park(row, f"in use by process {', '.join(map(str, pids[:4]))}")
            raise _Again(None, f"processes still live on {row}")
        return instance

    def _joined(self, gpu: Gpu, row: Slice, there: dict[Slot, Instance]) -> Slice:
        """The shared slice, if it is there; its devices are the user's already."""
        instance = there.get(row.slot)
        if instance is None or instance.mig_uuid != row.mig_uuid:
            self._repairer.gpu(gpu, Deadline(GRACE_S), have_lock=True)
            raise _Again(None, f"{row} is not what the journal says")
        return row

    def _make(self, gpu: Gpu, row: Slice) -> Instance:
        start = time.monotonic()
        effects.point("driver create")
        try:
            instance = gpu.create(row.slot)
        except NoRoom as error:
            raise _Again((row.gpu, row.slot), f"{row}: {error}") from None
        elapsed = round((time.monotonic() - start) * 1000)
        with self._journal.write():
            self._journal.event("create", {**row._replace(gi=instance.gi_id).place, "elapsed_ms": elapsed})
        return instance

    def _open(self, gpu: Gpu, row: Slice, instance: Instance, env: HookEnv) -> Slice:
        """Give the capability devices to the user."""
        ci = instance.ci_id if instance.ci_id is not None else 0
        minors = self._caps.grant(gpu.minor, instance.gi_id, ci, env.uid)
        return row.on(instance, minors)

    def _memory(self, gpu: Gpu, profile: Profile) -> int:
        return self._gpus.geometry(gpu).info(profile).memory_mib

    def _commit(self, env: HookEnv, who: str, done: Sequence[Slice], planned: bool, elapsed_ms: int) -> Started:
        restart = env.restart or 0
        now = time.time()
        with self._journal.write():
            run = self._journal.runs("job=? AND restart=?", (env.job, restart))[0]
            if run.owner != who:
                raise JournalError(f"{run} was taken over by another hook")
            now_rows = [self._as_it_is(row, who) for row in done]
            held = tuple([self._journal.put(row._replace(state="held", owner="", since=now)) for row in now_rows])
            self._journal.put_run(run._replace(state="running", owner="", since=now))
            started = Started(held, elapsed_ms)
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
                    "warm": started.warm,
                    "planned": planned,
                    "elapsed_ms": elapsed_ms,
                    "slices": [row.told for row in held],
                    **self._company(held),
                },
            )
        return started

    def _as_it_is(self, row: Slice, who: str) -> Slice:
        """A claim beside somebody may have become one of the whole slice since it was looked at, or void."""
        if row.beside is None:
            return row
        rows = self._journal.slices("owner=? AND state='intent' AND ordinal IS ?", (who, row.ordinal))
        if not rows:
            raise _Again(None, f"{row} was to be shared and is gone")
        return rows[0]

    def _company(self, held: Sequence[Slice]) -> dict[str, list[int]]:
        """What a `start` says of a guest: with which run it shares. That one is known to have had company from now on.

        It counts as a guest only where it has company when it starts.
        """
        for row in held:
            for host in self._journal.slices("id=?", (row.beside,)) if row.beside is not None else ():
                self._journal.put(host._replace(shared=True))
                return {"beside": [host.job or 0, host.restart or 0]}
        return {}


def _never(error: Exception) -> Exception:
    return JournalError(f"the choice of places was wrong: {error}")


__all__ = ["CapsError", "Misfit", "Started", "Starter", "Unsafe"]

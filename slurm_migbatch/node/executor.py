"""Run Prolog and Epilog in one object, which both the agent and the hooks' own processes use.

Every result is an exit code of `exits.py` and one line for slurmd's log. A job that cannot get its slice here is
requeued (or its tasks fail if it cannot be requeued); the node continues. Only failures that make the
node unsafe drain it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.node import ending, exits, gpu_faults, grants, handoff, owner, plan, repair, unwritable
from slurm_migbatch.node.allocate import Allocator, Misfit, Unsafe, run_of
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.instances import InstanceMaker
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.journal import NAME, Corrupt, Journal, JournalError, move_aside
from slurm_migbatch.node.journal_rows import JournalRun
from slurm_migbatch.node.liveness import Liveness, LivenessError
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.rebuild import outdated, rebuild
from slurm_migbatch.node.repair import Repairer
from slurm_migbatch.node.run_repair import RunRepairer, run_lock

PATIENCE = 0.5
"""Share of a hook's time that it may wait for another process to release the journal."""
Outcome = tuple[int, str]


class Executor:
    """Run hooks on one node. Use one per thread; they may share `gpus`."""

    def __init__(self, config: NodeConfig, gpus: Gpus | None = None) -> None:
        """Open directories and journal. Raises PathsError, JournalError; a damaged journal is rebuilt."""
        self.config = config
        self.gpus = gpus or Gpus(config)
        self.caps = Caps(config.proc_root, config.dev_root)
        self.paths = Paths.open(config)
        try:
            ending.ensure(self.paths.run)
            self.maps = JobMaps(config, self.paths)
            self.liveness = Liveness(config)
            self.path = f"{config.state_dir}/{NAME}"
            self.journal = self._open()
        except BaseException:
            self.paths.close()
            raise

    def _open(self) -> Journal:
        try:
            journal = Journal(self.path)
            if not journal.built or outdated(journal, self.paths):
                journal.close()
                return self._rebuild()
            self._wire(journal)
        except Corrupt:
            return self._rebuild()
        return journal

    def _wire(self, journal: Journal) -> None:
        self.journal = journal
        self.run_repairer = RunRepairer(journal, self.paths, self.caps, self.liveness, self.maps)
        self.repairer = Repairer(journal, self.paths, self.gpus, self.caps, self.maps, self.run_repairer)
        self.maker = InstanceMaker(self.config, journal, self.caps, self.repairer, self.maps)
        self._allocator = Allocator(
            self.config, journal, self.paths, self.gpus, self.maker, self.repairer, self.run_repairer
        )
        repair.begin_boot(journal, self.paths, repair.boot_id(self.config.boot_id_file), self.maps)

    def _rebuild(self) -> Journal:
        """Fill a new journal from the driver and the hand-offs; a damaged one is moved aside first."""
        with locked(self.paths.lock, ["rebuild"], Deadline(self.config.hook_deadline)):
            aside = ""
            try:
                journal = Journal(self.path)  # another hook may have done it meanwhile
                journal.check()
                if journal.built and outdated(journal, self.paths):
                    journal.close()
                    raise Corrupt(f"{self.path} is an older copy: it lacks runs that have slices")
            except Corrupt:
                aside = move_aside(self.path)
                journal = Journal(self.path)
            if not journal.built:
                rebuild(journal, self.paths, self.gpus, self.caps, aside)
            self._wire(journal)
            return journal

    def check(self) -> None:
        """Check the whole journal; a damaged one is rebuilt. Raises JournalError, DriverError, TooLate."""
        try:
            self.journal.check()
        except Corrupt:
            self.journal.close()
            self.journal = self._rebuild()

    def close(self) -> None:
        """Close everything except the driver."""
        self.journal.close()
        self.paths.close()

    def reconcile(self, deadline: Deadline, *, dry: bool = False) -> tuple[list[str], str]:
        """Make journal, driver and Slurm agree; return what was (or would be) done, and why Slurm could not be queried.

        Raises JournalError; DriverError or TooLate after everything else was done.
        """
        done: list[str] = []
        failure: DriverError | TooLate | None = None
        try:
            with self.gpus.using():
                self._follow_journal()  # in another one, the slices of running jobs would be nobody's
                done += self.repairer.repair_all(deadline, dry=dry)
        except (DriverError, TooLate) as error:
            failure = error
        # A GPU whose lock is held may have taken all the time.
        rest, unknown = Deadline(max(deadline.remaining, deadline.seconds / 2)), ""
        try:
            done += self.run_repairer.orphans(rest, dry=dry)
        except LivenessError as error:
            unknown = str(error)
        if failure is not None:
            raise failure
        return done, unknown

    # -- hooks ---------------------------------------------------------------------------------------------------

    def run(self, env: HookEnv, given_up: Callable[[], bool] = lambda: False) -> Outcome:
        """Run one hook. Expected errors are not raised; the caller turns others into INTERNAL.

        `given_up` tells, after the wait for the run's lock, whether the hook now does the work without this process.
        """
        with self.gpus.using():
            try:
                return self._run(env, given_up)
            except JournalError as error:
                without = unwritable.Unwritable(self.config, self.paths, self.gpus, self.caps, self.maps)
                return without.run(env, str(error))

    def _run(self, env: HookEnv, given_up: Callable[[], bool]) -> Outcome:
        seconds = self.config.hook_deadline if env.hook == "prolog" else self.config.epilog_deadline
        deadline = Deadline(seconds)
        self._follow_journal()
        self.journal.wait_at_most(seconds * PATIENCE)
        try:
            return self._guarded(env, deadline, given_up)
        except Corrupt:
            self.journal.close()
            self.journal = self._rebuild()
            return self._guarded(env, deadline, given_up)

    def _follow_journal(self) -> None:
        """Open the journal again if it was moved away or deleted. Raises JournalError, DriverError, TooLate."""
        if self.journal.closed or self.journal.replaced:
            self.journal.close()
            self.journal = self._open()

    def _guarded(self, env: HookEnv, deadline: Deadline, given_up: Callable[[], bool]) -> Outcome:
        """Do the work of a hook under its job's lock; an error of a Prolog requeues the job or drains the node."""
        work = self._prolog if env.hook == "prolog" else self._epilog
        left_to_hook = exits.OK, f"{env.run}: its {env.hook} did not wait for this process any longer"
        with owner.working() as owner_id:
            try:
                with locked(self.paths.lock, [run_lock(env.job)], deadline):
                    # by now its job may have ended, or have its next run
                    return left_to_hook if given_up() else work(env, owner_id, deadline)
            except JournalError:
                raise
            except TooLate as error:
                if given_up():
                    return left_to_hook
                if env.hook == "epilog":
                    return exits.OK, f"{env.run}: {error}; the agent or the next hook completes the release"
                return self._unexpected(env, str(error), deadline, owner_id)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if env.hook == "epilog":
                    return exits.OK, f"{env.run}: {why}; the agent or the next hook completes the release"
                return self._unexpected(env, why, deadline, owner_id)

    def _prolog(self, env: HookEnv, owner_id: str, deadline: Deadline) -> Outcome:
        """Create the slices that the run was granted, and end earlier runs of its job."""
        try:
            grant = grants.find(self.config, env, deadline)
        except GrantError as error:
            return self._send_back(env, str(error), deadline, owner_id)
        for note in ending.listed(self.paths.run, env.job):  # its restart count may be this run's, see `ending.py`
            self.run_repairer.noted(note)
            ending.remove(self.paths.run, note)  # also if an interrupted start is left: it would end this run
        self._release_earlier(env, owner_id, ("running", "ending"))
        earlier_handoffs = self._handoffs(env)
        if grant is None:  # an update may have removed the slices of a requeued job, whose tasks need none any more
            self._forget_earlier(env, owner_id, earlier_handoffs)
            return exits.OK, ""
        known = self._journal_run(env)
        if known is not None and known.state == "running" and self._is_complete(known, grant):
            return exits.OK, f"{env.run}: already has its slices{self._map_jobs()}"
        try:
            allocation = self._allocator.allocate(env, grant, owner_id, deadline)
        except Misfit as error:
            return self._send_back(env, str(error), deadline, owner_id, error.diagnosis)
        except Unsafe as error:
            return self._unsafe(env, str(error), deadline, owner_id)
        except (DriverError, CapsError) as error:
            self.gpus.reset()
            return self._unexpected(env, str(error), deadline, owner_id)
        self._clear_errors({row.gpu for row in allocation.slices if not row.warm}, deadline)
        self._forget_earlier(env, owner_id, earlier_handoffs)
        places = ", ".join(str(row) for row in allocation.slices)
        made = "warm" if allocation.warm else "made"
        return exits.OK, f"{env.run}: {places} {made} in {allocation.elapsed_ms} ms{self._map_jobs()}"

    def _map_jobs(self) -> str:
        """Update the job maps; return errors for the log."""
        with suppress(DriverError):
            self.repairer.update_job_maps()
        return self._unmapped()

    def _unmapped(self) -> str:
        return f"; job maps: {self.maps.problem}" if self.maps.problem else ""

    def _journal_run(self, env: HookEnv) -> JournalRun | None:
        runs = self.journal.runs("job=? AND restart=?", (env.job, env.restart or 0))
        return runs[0] if runs else None

    def _is_complete(self, run: JournalRun, grant: Grant) -> bool:
        """Return whether a run that the journal shows as running has all that its tasks need; release it otherwise.

        If slurmctld has lost its state and reuses ids, the run may be an earlier job's of the same user.
        """
        recorded = parse_comment(run.marker)  # None in a rebuilt journal
        same = recorded is None or (sorted(recorded.parts), recorded.guest) == (sorted(grant.parts), grant.guest)
        given = handoff.load(self.paths.job, run.job, run.restart)
        held = [row for row in self.journal.slices_of(run) if row.state == "held"]
        if same and given is not None and held and {g.mig_uuid for g in given.slices} == {p.mig_uuid for p in held}:
            return True
        self._begin_release([run], None, "")
        self.run_repairer.finish(run._replace(state="ending"))
        return False

    def _handoffs(self, env: HookEnv) -> list[int]:
        """Return the restart counts of the job's earlier runs that have a hand-off.

        Later hand-offs are removed if they belong to another user's job with this id.
        """
        restarts = {restart for job, restart in handoff.listed(self.paths.job) if job == env.job}
        earlier = [restart for restart in restarts if restart < (env.restart or 0)]
        for restart in restarts.difference(earlier):
            stale = handoff.load(self.paths.job, env.job, restart)
            if stale is not None and stale.uid != env.uid:
                handoff.remove(self.paths.job, env.job, restart)
        return earlier

    def _forget_earlier(self, env: HookEnv, owner_id: str, restarts: Iterable[int]) -> None:
        """Remove what stops the tasks of the job's earlier runs; `restarts`: of those that have a hand-off."""
        self._release_earlier(env, owner_id)
        for restart in restarts:
            handoff.remove(self.paths.job, env.job, restart)

    def _release_earlier(self, env: HookEnv, owner_id: str, states: Sequence[str] = ("misfit",)) -> None:
        """Release slices of earlier runs of the job: a job has one run on a node at a time.

        If slurmctld has lost its state and reuses ids, another user's job may have had this id.
        """
        runs = self.journal.runs("job=? AND (restart<? OR uid<>?)", (env.job, env.restart or 0, env.uid))
        runs = [run for run in runs if run.state in states]
        if runs:
            self._begin_release(runs, None, owner_id)
            for run in runs:
                self.run_repairer.finish(run._replace(state="ending"))

    def _begin_release(self, runs: list[JournalRun], exit_code: int | None, owner_id: str) -> list[JournalRun]:
        ending_runs = [
            run._replace(state="ending", owner=owner_id, exit_code=exit_code, since=time.time()) for run in runs
        ]
        with self.journal.write():
            for run in ending_runs:
                self.journal.put_run(run)
            self.journal.prune(time.time())
        return ending_runs

    def _epilog(self, env: HookEnv, owner_id: str, deadline: Deadline) -> Outcome:
        """Release the slices of the runs that this Epilog ends."""
        last_restart = 0xFFFF if env.restart is None else env.restart
        notes = [note for note in ending.listed(self.paths.run, env.job) if note.restart <= last_restart]
        runs = self.journal.runs("job=? AND restart<=? AND state<>'ended'", (env.job, last_restart))
        if not notes:
            # The next run's Prolog may have done this Epilog's work while it waited for the lock: see `ending.py`.
            now = time.time()
            runs = [run for run in runs if not deadline.set_at < run.since <= now]
        interrupted = [run for run in runs if run.state == "starting"]
        if interrupted:
            # Its Prolog was killed (this hook has the run's lock, so it is not running any more): undo its work.
            try:
                self.repairer.repair_all(deadline, retry=False, locked_job=env.job)
            except DriverError as error:
                return exits.OK, f"{env.run}: interrupted start not yet undone: {error}"
        # Leftovers of a refused run stay (see TOMBSTONE_S) until it is old or the next run has started, but not slices:
        # a second Prolog may have refused a run that has some.
        refused = [run for run in runs if run.state == "misfit" and not self.journal.slices_of(run)]
        runs = [run for run in runs if run.state != "starting" and run not in refused]
        for run in refused:
            self.run_repairer.refuse_again(run)
        self.run_repairer.remove_stale_files(time.time())
        problems: list[str] = []
        if runs:
            for run in self._begin_release(runs, env.exit_code, owner_id):
                problems += self.run_repairer.finish(run)
            unwritable.clear(self.paths.run)
        for note in notes:
            self.run_repairer.noted(note)
        if not runs and not interrupted:
            return exits.OK, ""
        parked = f"; set aside {'; '.join(problems)}" if problems else ""
        return exits.OK, f"{env.run}: released{parked}{self._unmapped()}"

    # -- failures ------------------------------------------------------------------------------------------------

    def _send_back(self, env: HookEnv, why: str, deadline: Deadline, owner_id: str, diagnosis: str = "") -> Outcome:
        """Requeue the job; until then a hand-off makes each task of the run fail rather than run without a slice.

        `diagnosis` lists what is in use; it is logged for administrators, not shown to the job's user.
        """
        from slurm_migbatch.node import scontrol

        full = f"{why[:500]}: {diagnosis or self._explain_misfit(env, deadline)}".removesuffix(": ")
        restart = env.restart or 0
        gres = _gres(env.comment)
        already_refused = self._is_given_up(env, deadline, owner_id)
        if not already_refused:
            with self.journal.write():
                self.journal.put_run(run_of(env, "misfit", owner_id))
                self.journal.event("misfit", {"job": env.job, "restart": restart, "grant": gres, "reason": full})
        try:
            handoff.write(self.paths.job, handoff.Handoff(env.job, restart, env.uid, (), why[:500]))
            handoff_error = ""
        except OSError as error:
            handoff_error = str(error)  # RunDir is full; the requeue alone keeps the job from running
        if already_refused:  # a second requeue could end the job's next run
            return exits.OK, f"{env.run}: another hook has sent it back meanwhile; {full}"
        try:
            scontrol.requeue(self.config, env.job, max(deadline.remaining, 2.0))
        except scontrol.ScontrolError as error:
            if handoff_error:
                return exits.INTERNAL, f"{env.run}: would run without a slice: {handoff_error}; {error}; {full}"
            return exits.OK, f"{env.run}: cannot be requeued ({error}), so its tasks will fail; {full}"
        return exits.OK, f"{env.run}: requeued; {full}"

    def _is_given_up(self, env: HookEnv, deadline: Deadline, owner_id: str) -> bool:
        """Return whether another hook has refused the run since this one began, having waited for it in vain."""
        run = self._journal_run(env)
        if run is None or run.state != "misfit" or run.owner == owner_id:
            return False
        return run.since >= deadline.set_at

    def _explain_misfit(self, env: HookEnv, deadline: Deadline) -> str:
        """Explain what is in use, for a run that failed for another reason; empty if that cannot be read in time."""
        with suppress(DriverError, JournalError, GrantError):
            grant = parse_comment(env.comment)
            if grant is not None and deadline.remaining:
                return self._allocator.explain_misfit(grant)
        return ""

    def _unsafe(self, env: HookEnv, why: str, deadline: Deadline, owner_id: str) -> Outcome:
        """Drain the node because its GPUs are lost or starts keep failing, and requeue the job."""
        from slurm_migbatch.node import scontrol

        with self.journal.write():
            self.journal.event("fault", {"gpu": None, "what": why[:500], "action": "drain", "drain": True})
        try:
            scontrol.drain(self.config, why, max(deadline.remaining, 2.0))
        except scontrol.ScontrolError as error:
            return exits.UNSAFE, f"{env.run}: {why}; {error}"
        return self._send_back(env, why, deadline, owner_id)

    def give_up(self, env: HookEnv, why: str) -> Outcome:
        """Refuse a run because the process that made its slices hangs; nothing here calls the driver."""
        with owner.working() as owner_id:
            return self._unexpected(env, why, Deadline(0.0), owner_id)

    def _unexpected(self, env: HookEnv, why: str, deadline: Deadline, owner_id: str) -> Outcome:
        """Count an unexpected failure and requeue the job; after several in a row drain the node and count anew.

        A GPU that has failed as often is withdrawn, and the node is not drained, if it has others.
        """
        count = int(self.journal.meta("errors") or 0) + 1
        fault = self._withdraw(gpu_faults.named(why), why, deadline)
        limit = self.config.errors_before_drain
        drain = fault is None and (self.config.on_error == "drain" or count >= limit > 0)
        with self.journal.write():
            self.journal.set_meta("errors", "0" if drain or fault is not None else str(count))
            event = {"gpu": None, "what": why[:500], "action": "drain" if drain else "requeue", "drain": drain}
            if fault is not None:
                event |= {"gpu": gpu_faults.named(why), "what": str(fault)}
            self.journal.event("fault", event)
        if drain:
            gpu_faults.clear_all(self.paths)
            return self._unsafe(env, f"{count} failures in a row, the last: {why}", deadline, owner_id)
        return self._send_back(env, why, deadline, owner_id)

    def _withdraw(self, gpu: str, why: str, deadline: Deadline) -> gpu_faults.GpuFault | None:
        """Count a failure of this GPU; return the fault if it is withdrawn. Nothing here calls the driver."""
        limit = self.config.errors_before_drain
        if not gpu or self.config.on_error == "drain" or not limit:
            return None
        others = {row.gpu for row in self.journal.slices("state<>'lost'")}
        others |= plan.load(self.config.state_dir).slots.keys()
        if not others - self.gpus.withdrawn().keys() - {gpu}:
            return None
        return gpu_faults.count(self.paths, gpu, why, limit, deadline)

    def _clear_errors(self, created_on: Collection[str], deadline: Deadline) -> None:
        """Count failures anew after a start; those of a GPU only if an instance was created on it."""
        gpu_faults.clear(self.paths, created_on, deadline)
        unwritable.clear(self.paths.run)
        if self.journal.meta("errors") not in ("", "0"):
            with self.journal.write():
                self.journal.set_meta("errors", "0")


def _gres(comment: bytes) -> str:
    try:
        grant = parse_comment(comment)
    except GrantError:
        return ""
    return "" if grant is None else grant.gres

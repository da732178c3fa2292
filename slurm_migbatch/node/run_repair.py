"""Repair runs: finish what dead processes began for them, end those that Slurm no longer has, remove leftover files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from slurm_migbatch.node import ending, handoff, owner, progress
from slurm_migbatch.node.caps import Caps
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import IN_FLIGHT, JournalRun
from slurm_migbatch.node.liveness import Liveness
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.release import Releaser

RUN_LOCKS = 64
TOMBSTONE_S = 600.0
"""How long a run's hand-off stays, without slices, after the run was refused or has ended.

slurmd does not run the Prolog again for a job that is requeued and returns within a second or two (seen on 22.05:
`slurm_cred_jobid_cached` in slurmd's `_rpc_prolog`). Such a job would run without a slice. The previous run's hand-off
lets TaskProlog requeue it once more instead.
"""
MOST_AT_ONCE = 1000
"""Unknown hand-offs that one hook, or one round of the agent, reads: there is one for each run that was refused while
the journal could not be written, and a hook must end in time.
"""


def run_lock(job: int) -> str:
    """Return the name of the lock file of a job's runs."""
    return f"run-{job % RUN_LOCKS}"


class RunRepairer:
    """Find and make the repairs of one node's runs."""

    def __init__(self, journal: Journal, paths: Paths, caps: Caps, liveness: Liveness, maps: JobMaps) -> None:
        self._journal = journal
        self._paths = paths
        self._liveness = liveness
        self._releaser = Releaser(journal, paths, caps, maps)

    def repair_all(self, *, dry: bool = False, locked_job: int | None = None) -> list[str]:
        """Finish what dead owners began for runs: undo an incomplete start, complete a release or a refusal.

        Runs that another process has locked are left to it. `locked_job`: the job whose runs the caller has locked.
        """
        done = self._interrupted(locked_job, dry=dry)
        for run in self._journal.runs("state='misfit'"):
            if not owner.alive(run.owner) and not self._is_void(run):
                done.append(f"{run}: the hand-off that stops its tasks is rewritten")
                if not dry:
                    self.refuse_again(run)
        for note in ending.abandoned(self._paths.run):
            with suppress(TooLate), locked(self._paths.lock, [run_lock(note.job)], Deadline(0.0)):
                done += self.noted(note, dry=dry)
        return done + self.remove_stale_files(time.time(), dry=dry)

    def _interrupted(self, locked_job: int | None, *, dry: bool) -> list[str]:
        done: list[str] = []
        same_run = "job=? AND restart=? AND owner=?"
        held_lock = None if locked_job is None else run_lock(locked_job)
        for interrupted in self._journal.runs("state IN ('starting','ending')"):
            if owner.alive(interrupted.owner):
                continue
            # If two processes completed one release, the later could close the devices of the slices' next user.
            name = run_lock(interrupted.job)
            with suppress(TooLate), locked(self._paths.lock, [name] if name != held_lock else [], Deadline(0.0)):
                for run in self._journal.runs(same_run, (interrupted.job, interrupted.restart, interrupted.owner)):
                    done += self._complete_run(run, dry=dry)
        return done

    def _complete_run(self, run: JournalRun, *, dry: bool) -> list[str]:
        if run.state == "ending":
            if not dry:
                self.finish(run)
            return [f"{run}: its interrupted release is completed"]
        slices = self._journal.slices_of(run)
        if run.state != "starting" or any(row.state in IN_FLIGHT for row in slices):
            return []  # its GPU could not be repaired yet, or it has changed meanwhile
        if not dry:
            self._forget_start(run)
        return [f"{run}: removed, its start was interrupted"]

    def _forget_start(self, run: JournalRun) -> None:
        if not self._is_void(run):  # else another hook has sent it back, without the journal
            handoff.remove(self._paths.job, run.job, run.restart)
        progress.remove(self._paths.progress, run.job, run.restart)
        with self._journal.write():
            self._journal.drop_run(run)

    def noted(self, note: ending.Note, *, dry: bool = False) -> list[str]:
        """End the runs that an Epilog has noted as over; the run's lock must be held, so no other process ends them.

        The note is deleted once none of them is unfinished.
        """
        unfinished = "job=? AND restart<=? AND state IN ('starting','running','ending')"
        runs = [run for run in self._journal.runs(unfinished, note) if run.state != "starting"]
        done = [f"{run}: its interrupted Epilog is completed" for run in runs]
        if dry:
            return done
        try:
            for run in [run for run in runs if run.state == "ending"]:
                self.finish(run)
            self._end([run for run in runs if run.state == "running"], lambda: ending.exit_code(self._paths.run, note))
        except FileNotFoundError:
            return []  # another process has done it
        if not self._journal.runs(unfinished, note):
            ending.remove(self._paths.run, note)
        return done

    def orphans(self, deadline: Deadline, *, dry: bool = False) -> list[str]:
        """End the runs that Slurm no longer has on this node although no Epilog has ended them.

        Returns what was (or would be) done, as sentences. Raises LivenessError if Slurm cannot say, JournalError.
        """
        done = []
        for run in self._liveness.over(self._journal.runs("state='running'"), deadline):
            with suppress(TooLate), locked(self._paths.lock, [run_lock(run.job)], Deadline(0.0)):
                done.append(f"{run}: released, it is no longer in Slurm on this node")
                if not dry:
                    self._end([run], lambda: None)
        return done

    def _end(self, runs: Iterable[JournalRun], exit_code: Callable[[], int | None]) -> None:
        """End those of the runs that have not changed since they were read.

        `exit_code` is called in the transaction that marks them as ending.
        """
        with owner.working() as owner_id:
            with self._journal.write():
                code, now = exit_code(), time.time()
                unchanged = "job=? AND restart=? AND state='running' AND since=?"
                to_end = [r for r in runs if self._journal.runs(unchanged, (r.job, r.restart, r.since))]
                to_end = [r._replace(state="ending", owner=owner_id, exit_code=code, since=now) for r in to_end]
                for run in to_end:
                    self._journal.put_run(run)
            for run in to_end:
                self.finish(run)

    def _is_void(self, run: JournalRun) -> bool:
        """Return whether a run has a hand-off that stops its tasks."""
        given = handoff.load(self._paths.job, run.job, run.restart)
        return given is not None and not given.slices

    def refuse_again(self, run: JournalRun) -> None:
        """Write a refused run's hand-off: the hook that refused it was interrupted before, or one that was delayed has
        written another one since.
        """
        if not self._is_void(run):
            why = "it was requeued"
            handoff.write(self._paths.job, handoff.Handoff(run.job, run.restart, run.uid, (), why))

    def remove_stale_files(self, now: float, *, dry: bool = False) -> list[str]:
        """Remove hand-offs of old or unknown runs, at most MOST_AT_ONCE, and progress files."""
        # read before the runs are: a run is in the journal before its files exist
        handoffs, progress_files = set(handoff.listed(self._paths.job)), set(progress.listed(self._paths.progress))
        recent = "state IN ('starting','running','ending') OR (state IN ('ended','misfit') AND since>=?)"
        known = {(run.job, run.restart): run.state for run in self._journal.runs(recent, (now - TOMBSTONE_S,))}
        old = self._journal.runs("state='misfit' AND since<?", (now - TOMBSTONE_S,))
        unknown = sorted(handoffs - set(known))[:MOST_AT_ONCE]
        refused = [refusal for key in unknown if (refusal := self._unrecorded(key)) is not None]
        old_handoffs = [key for key in unknown if key not in {(refusal.job, refusal.restart) for refusal in refused}]
        stale_progress = sorted(
            progress_files - {run for run, state in known.items() if state not in ("ended", "misfit")}
        )
        if not dry:
            self._record(refused)
            for job, restart in old_handoffs:
                handoff.remove(self._paths.job, job, restart)
            for job, restart in stale_progress:
                progress.remove(self._paths.progress, job, restart)
            for run in old:
                self.finish(run)
            kept = set(progress.listed(self._paths.progress))  # files on which their user holds a lease
            stale_progress = [key for key in stale_progress if key not in kept]
        return (
            [f"job {refusal.job} run {refusal.restart}: its misfit is recorded" for refusal in refused]
            + [f"job {job} run {restart}: old hand-off removed" for job, restart in old_handoffs]
            + [f"job {job} run {restart}: old progress file removed" for job, restart in stale_progress]
        )

    def _unrecorded(self, key: tuple[int, int]) -> handoff.Handoff | None:
        """Return the hand-off without slices of a run that the journal does not know; see `unwritable.py`."""
        refusal = handoff.load(self._paths.job, *key)
        if refusal is None or refusal.slices or self._journal.runs("job=? AND restart=?", key):
            return None
        return refusal

    def _record(self, refused: Sequence[handoff.Handoff]) -> None:
        if not refused:
            return
        reason = "the node's journal could not be written"
        with self._journal.write():
            for job, restart, uid, *_ in refused:
                self._journal.put_run(JournalRun(job, restart, uid, "", "", "", "", "misfit"))
                fields = {"job": job, "restart": restart, "grant": "", "reason": reason}
                self._journal.event("misfit", fields)

    def finish(self, run: JournalRun) -> list[str]:
        """Finish a release; see `Releaser.finish`."""
        return self._releaser.finish(run)

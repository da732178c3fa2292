"""Run Prolog and Epilog while the journal cannot be written: a full or read-only disk, a lock held for long.

Nothing here needs the journal. The hand-offs in RunDir (on another file system, in memory) list the slices of a run,
the driver knows their devices.

A Prolog closes what it had opened so far, leaves a hand-off without slices, so that no task runs, and requeues the
job. An Epilog closes the devices of its job's slices; its note (`ending.py`) stays, and the agent or a
later hook ends the run in the journal once that can be written. Runs that were refused meanwhile are recorded then, too
(`RunRepairer.remove_stale_files`).

Both exit with 0: a temporary fault is no reason to drain a node. A permanent one is: after ErrorsBeforeDrain
hooks in a row over at least LASTS_S the node is drained, with the fault as the reason, and counting begins again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.mig.grant import GrantError
from slurm_migbatch.node import ending, exits, grants, handoff
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.paths import Paths, read, replace

LASTS_S = 120.0
ASKING_S = 10.0
NAME = "journal-faults"
ENDED = "its job has ended"
REFUSED = "the node's journal cannot be written"


class Faults(NamedTuple):
    """Number of consecutive hooks that could not write the journal, and the time (unix s) of the first."""

    hooks: int = 0
    since: float = 0.0


def load(run: int) -> Faults:
    """Read the counted faults from RunDir (an open descriptor)."""
    try:
        count, _, since = read(NAME, 64, run).partition(b" ")
        return Faults(int(count), float(since))
    except (OSError, ValueError):
        return Faults()


def clear(run: int) -> None:
    """Reset the counted faults, because the journal was written."""
    with suppress(OSError):
        os.unlink(NAME, dir_fd=run)


def lasting(faults: Faults, config: NodeConfig, now: float) -> bool:
    """Return whether the node has to be drained."""
    if config.on_error == "drain":
        return True
    return faults.hooks >= config.errors_before_drain > 0 and now - faults.since >= LASTS_S


class Unwritable:
    """Run one hook without the journal."""

    def __init__(self, config: NodeConfig, paths: Paths, gpus: Gpus, caps: Caps, maps: JobMaps) -> None:
        self._config = config
        self._paths = paths
        self._gpus = gpus
        self._caps = caps
        self._maps = maps

    def run(self, env: HookEnv, why: str) -> tuple[int, str]:
        """Return exit code and line. `why` is the journal's fault."""
        deadline = Deadline(ASKING_S)
        if env.hook == "epilog":
            return self._epilog(env, why, deadline)
        with suppress(GrantError):  # a job whose grant cannot be read is requeued as well
            if grants.find(self._config, env, deadline) is None:
                return exits.OK, ""
        return self._prolog(env, why, deadline)

    def _prolog(self, env: HookEnv, why: str, deadline: Deadline) -> tuple[int, str]:
        from slurm_migbatch.node import scontrol

        restart = env.restart or 0
        problem = self._close(env.job, restart, REFUSED)
        handoff_written = True
        try:
            handoff.write(self._paths.job, handoff.Handoff(env.job, restart, env.uid, (), REFUSED))
        except OSError as error:
            handoff_written, problem = False, f"{problem}; no hand-off for its tasks: {error.strerror}"
        drained = self._count(why, deadline)
        try:
            scontrol.requeue(self._config, env.job, max(deadline.remaining, 2.0))
        except scontrol.ScontrolError as error:
            code = exits.OK if handoff_written and drained else exits.JOURNAL
            return code, f"{env.run}: cannot be requeued ({error}), so its tasks will fail; {why}{problem}"
        return (exits.OK if drained else exits.JOURNAL), f"{env.run}: requeued; {why}{problem}"

    def _epilog(self, env: HookEnv, why: str, deadline: Deadline) -> tuple[int, str]:
        last_restart = ending.ALL if env.restart is None else env.restart
        with suppress(OSError):
            ending.make(self._paths.run, env.job, env.restart)
        problem = self._close(env.job, last_restart, ENDED)
        self._count(why, deadline)
        then = "the agent or a later hook completes the release"
        return exits.OK, f"{env.run}: its devices are revoked, {then}; {why}{problem}"

    def _close(self, job: int, upto: int, reason: str) -> str:
        """Close the devices of the job's slices, except those that another job has too; return errors."""
        handoffs = {key: handoff.load(self._paths.job, *key) for key in set(handoff.listed(self._paths.job))}
        ready = {key: entry for key, entry in handoffs.items() if entry is not None and entry.slices}
        own_handoffs = [entry for key, entry in ready.items() if key[0] == job and key[1] <= upto]
        other_uuids = {g.mig_uuid for entry in ready.values() if entry not in own_handoffs for g in entry.slices}
        own = {g.mig_uuid: g.gpu for entry in own_handoffs for g in entry.slices if g.mig_uuid not in other_uuids}
        problem = ""
        try:  # also one that is withdrawn
            gpus = [gpu for gpu in self._gpus.all() if gpu.uuid in own.values()] if own else []
        except DriverError as error:
            gpus, problem = [], f"; not all devices are revoked: {error}"
        for gpu in gpus:
            try:
                for instance in gpu.instances():
                    if instance.mig_uuid in own:
                        self._maps.clear(gpu.index, instance.gi_id, instance.mig_uuid)
                        self._caps.assign(self._caps.minors(gpu.minor, instance.gi_id, instance.ci_id or 0), 0)
            except (DriverError, CapsError) as error:  # the job may have slices on other GPUs
                problem = f"; not all devices are revoked: {error}"
        for entry in own_handoffs:
            with suppress(OSError):
                handoff.write(self._paths.job, entry._replace(slices=(), reason=reason, progress=""))
        return problem

    def _count(self, why: str, deadline: Deadline) -> bool:
        """Count this fault, and drain the node if it persists. False if that was due and failed."""
        now = time.time()
        try:
            with locked(self._paths.lock, [NAME], deadline):
                previous = load(self._paths.run)
                faults = Faults(previous.hooks + 1, min(previous.since or now, now))  # the clock may have been set back
                drain = lasting(faults, self._config, now)
                if drain:
                    clear(self._paths.run)
                else:
                    counted = f"{faults.hooks} {faults.since!r}\n".encode()
                    replace(self._paths.run, NAME, counted, NAME, durable=False)
        except (TooLate, OSError):
            return True  # this fault is not counted; the next one will be
        if not drain:
            return True
        from slurm_migbatch.node import scontrol

        minutes = f"for {(now - faults.since) / 60:.0f} minutes, {faults.hooks} hooks in a row"
        try:
            scontrol.drain(self._config, f"journal not writable {minutes}: {why}", max(deadline.remaining, 2.0))
        except scontrol.ScontrolError:
            return False
        return True

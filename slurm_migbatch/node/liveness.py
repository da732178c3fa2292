"""Find runs that Slurm no longer has on this node because their Epilog died early or never ran.

A run counts as over only if all of this holds, twice, PAUSE_S apart:

- It has had its slices for SETTLED_S; so its Prolog is over and Slurm had time to start its first step.
- slurmd has no step of the job. Every slurmstepd listens on a socket `<spool directory>/<node>_<job>.<step>` as long as
  it lives, which the kernel lists (seen on 22.05, 24.11 and 26.05).
- slurmctld confirms it: it does not know the job, or the job waits or has ended, or it runs elsewhere, or in a later
  run. A job in COMPLETING is not over on the nodes where its Epilog is still to come; slurmctld lists exactly those.

If slurmctld does not answer, or answers too late or in an unknown form, nothing is concluded: the run stays.

squeue is queried for columns that no user can write, and only about runs that are settled and have no step: an ordinary
hook does not query it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slurm_migbatch.node import unix_sockets
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate
from slurm_migbatch.node.journal_rows import JournalRun

SETTLED_S = 10.0
PAUSE_S = 2.0
COLUMNS = "JobID:0 ,RestartCnt:0 ,State:0 ,NodeList:0"
"""Of squeue, none padded: it has a row for each task of an array, if the job is the one with the array's own id."""

FINAL = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""Copy of `slurm.states.ENDED`, which hooks do not import; tests/node/test_liveness_states.py compares them."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
UNKNOWN = "Invalid job id specified"


class LivenessError(RuntimeError):
    """Ended runs cannot be determined; the message says why."""


class JobRecord(NamedTuple):
    """A job as slurmctld shows it: its restart count, its state as squeue prints it, and its nodes."""

    restarts: int
    state: str
    nodes: tuple[str, ...]


class Liveness:
    """Determines from slurmd's steps and slurmctld which runs of this node are over."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config

    def over(self, runs: Iterable[JournalRun], deadline: Deadline) -> list[JournalRun]:
        """Return the `running` runs that are over by two observations. Raises LivenessError."""
        candidates = self.once(runs, deadline)
        if not candidates:
            return []
        if deadline.remaining < PAUSE_S:
            raise LivenessError("no time left to query Slurm twice")
        time.sleep(PAUSE_S)
        return self.once(candidates, deadline)

    def once(self, runs: Iterable[JournalRun], deadline: Deadline) -> list[JournalRun]:
        """Return the `running` runs that are over by one observation. Raises LivenessError."""
        now = time.time()
        # a start in the future (the clock was set back since) counts as settled
        settled = [run for run in runs if run.state == "running" and not 0 <= now - run.since < SETTLED_S]
        if not settled:
            return []
        alive = steps(self._config.node, self._config.spool_dir, deadline)
        return [run for run in settled if run.job not in alive and self._is_over(run, deadline)]

    def _is_over(self, run: JournalRun, deadline: Deadline) -> bool:
        return is_over(run, self._config.node, self._job(run.job, deadline))

    def _job(self, job: int, deadline: Deadline) -> JobRecord | None:
        """Query slurmctld about a job; None if it knows no such job."""
        from slurm_migbatch.node import scontrol

        arguments = ["--noheader", "--all", "--local", "--states=all", f"--jobs={job}", f"--Format={COLUMNS}"]
        try:
            text = scontrol.query(self._config, "squeue", arguments, deadline.remaining)
        except scontrol.ScontrolError as error:
            if error.stderr.endswith(UNKNOWN):
                return None
            raise LivenessError(f"cannot query slurmctld about job {job}: {error}") from None
        rows = [line.split() for line in text.splitlines() if line.strip()]
        if any(not 3 <= len(row) <= 4 or not row[0].isdigit() or not row[1].isdigit() for row in rows):
            raise LivenessError(f"squeue's answer about job {job} has a format that this release does not support")
        own_rows = [row for row in rows if int(row[0]) == job]  # others are tasks of its array or parts of its het job
        if len(own_rows) != 1:
            raise LivenessError(f"squeue has {len(own_rows)} rows of job {job}")
        row = own_rows[0]
        return JobRecord(int(row[1]), row[2], self._expand(row[3], deadline) if len(row) == 4 else ())

    def _expand(self, nodes: str, deadline: Deadline) -> tuple[str, ...]:
        if not re.search(r"[\[,]", nodes):
            return (nodes,)
        from slurm_migbatch.node import scontrol

        try:
            text = scontrol.query(self._config, "scontrol", ["show", "hostnames", nodes], deadline.remaining)
        except scontrol.ScontrolError as error:
            raise LivenessError(str(error)) from None
        return tuple(text.split())


def is_over(run: JournalRun, node: str, job: JobRecord | None) -> bool:
    """Return whether, by slurmctld's record, the run is over on the node with no Epilog still to come.

    An unknown state counts as running. The restart count rises before the Epilog of the previous run.
    """
    if job is None:
        return True
    if job.state != "COMPLETING" and (job.state in FINAL or job.state in WAITING or job.restarts > run.restart):
        return True
    return bool(job.nodes) and node not in job.nodes


def steps(node: str, spool: str, deadline: Deadline) -> set[int]:
    """Return the jobs that have a slurmstepd on this node (its name in Slurm). Raises LivenessError.

    Only a socket of root counts: any user can create one with the same name elsewhere. `spool` is the directory
    in which it must be, if several nodes of one name run on a machine; else empty.
    """
    directory = re.escape(os.fsencode(spool)) + b"/" if spool else b"(?:.*/)?"
    form = re.compile(directory + re.escape(os.fsencode(node)) + rb"_([0-9]{1,10})\.[0-9.]{1,24}", re.DOTALL)
    try:
        # two lists: the kernel may omit a socket of the one that it writes while a user closes others
        sockets = {*unix_sockets.listening(form, deadline), *unix_sockets.listening(form, deadline)}
        if any(found.uid is None for found in sockets):
            of_root = unix_sockets.of_root(deadline)
            sockets = {found for found in sockets if found.uid == 0 or found.inode in of_root}
    except OSError as error:
        raise LivenessError(f"cannot list unix sockets (unix_diag): {error.strerror or error}") from None
    except TooLate as error:
        raise LivenessError(str(error)) from None
    return {int(match[1]) for found in sockets if (match := form.fullmatch(found.path))}


def sentences(runs: Sequence[JournalRun]) -> list[str]:
    """Return the lines of `node status` for runs that are over."""
    return [f"{run}: it is no longer in Slurm on this node, but its Epilog has not released its slices" for run in runs]

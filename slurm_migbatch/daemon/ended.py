"""Slurm queries that only migbatchd needs: how jobs ended, which slurmctld answer, node addresses, users' rights.

How jobs ended that have left the queue (state, exit code and times) is in slurmctld's memory for MinJobAge.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, SlurmError, SlurmTimeout
from slurm_migbatch.slurm.listing import ended_command, field_command, new_mark, only_jobs, parse_ended, parse_field
from slurm_migbatch.slurm.pyslurm import PyslurmClient
from slurm_migbatch.slurm.slurmrestd import SlurmrestdClient
from slurm_migbatch.slurm.states import ENDED
from slurm_migbatch.store.runquery import Association

#: jobs named to squeue; of more it lists all
_MOST_NAMED = 1000
_PING = re.compile(r"Slurmctld\(\w+\) at (\S+) is (UP|DOWN)")
_SECONDS = re.compile(r"(\d+)")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+$\\-]{0,127}")


class Standing(NamedTuple):
    """A user's entry in slurmdbd: whether Slurm shows the user everything, and the accounts coordinated by the user."""

    operator: bool = False
    accounts: frozenset[str] = frozenset()


class StillHeld(SlurmError):
    """A job was requeued, or may be requeued later, and could not be released."""


class HistoryClient(CliClient):
    """CliClient that also shows how jobs ended, and other queries of the service."""

    def ping(self, timeout: float | None = None) -> dict[str, bool]:
        """Return which slurmctld answer, by the names of SlurmctldHost in order; one scontrol call.

        A backup that is ready to take over answers too. `timeout`: seconds; None: as for every command.

        Raises:
            SlurmError: scontrol failed, or has not ended in time.
        """
        process = self._finish("scontrol", "ping", limit_s=timeout)
        answers = {name: state == "UP" for name, state in _PING.findall(process.stdout.decode("utf-8", "replace"))}
        if not answers:
            raise SlurmError(f"`scontrol ping` lists no slurmctld: {process.stderr.decode('utf-8', 'replace')[:200]}")
        return answers

    def node_addresses(self) -> dict[str, frozenset[str]]:
        """Return the names or addresses of each node's host (NodeAddr, NodeHostname); one sinfo call.

        Nodes in the cloud state these names themselves, so a mark begins each row.

        Raises:
            SlurmError: sinfo failed.
        """
        addresses: dict[str, frozenset[str]] = {}
        mark = new_mark()
        for row in self._run("sinfo", "-h", "-a", "-N", "-o", f"{mark} %N %o %n").split(mark):
            columns = row.split()
            if len(columns) == 3:
                addresses[columns[0]] = addresses.get(columns[0], frozenset()) | set(columns[1:])
        return addresses

    def standing(self, user: str) -> Standing:
        """Return a user's entry in slurmdbd; one sacctmgr call, only if there is a slurmdbd.

        Raises:
            SlurmError: sacctmgr failed.
        """
        if not _USER.fullmatch(user):
            return Standing()
        output = self._run("sacctmgr", "-n", "-P", "show", "user", user, "withcoord", "format=user,admin,coord")
        for line in output.splitlines():
            name, _, fields = line.partition("|")
            level, _, accounts = fields.partition("|")
            if name == user:
                operator = level.lower() in ("operator", "administrator")
                return Standing(operator, frozenset(account for account in accounts.strip("|").split(",") if account))
        return Standing()

    def associations(self, cluster: str) -> dict[int, Association]:
        """Return the associations of users of one cluster by id; one sacctmgr call.

        Raises:
            SlurmError: sacctmgr failed, for example without slurmdbd.
        """
        fields = "format=id,account,user,partition"
        output = self._run("sacctmgr", "-n", "-P", "show", "associations", f"clusters={cluster}", fields)
        by_id: dict[int, tuple[str, str, str]] = {}
        for line in output.splitlines():
            id, *row = line.split("|")
            if id.isdigit() and len(row) == 3 and row[1]:
                by_id[int(id)] = (row[0], row[1], row[2])
        narrower: dict[tuple[str, str], list[str]] = {}
        for account, user, partition in by_id.values():
            if partition:
                narrower.setdefault((account, user), []).append(partition)
        return {
            id: Association(account, user, partition, () if partition else tuple(narrower.get((account, user), ())))
            for id, (account, user, partition) in by_id.items()
        }

    def ended(self, job_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows for `Store.upsert_jobs` about those of `job_ids` that slurmctld still remembers; one squeue call.

        They have all that `jobs` shows of a job: a short one may have ended before it was listed.

        Raises:
            SlurmError: squeue failed.
        """
        wanted = set(job_ids)
        if not wanted:
            return []
        only = [only_jobs(sorted(wanted))] if len(wanted) <= _MOST_NAMED else []
        mark = new_mark()
        ended = parse_ended(self._run(*ended_command(mark, *only)), mark)
        return [{**asdict(row), "exit_code": code} for row, code in ended if row.job_id in wanted and not row.unread]

    def lost(self, listed: Mapping[int, float]) -> list[int]:
        """Return those of the jobs that slurmctld has lost with its state (`slurmctld -c`); no call for no jobs.

        It keeps jobs that have ended for MinJobAge, so it has lost one that it does not know earlier.

        Args:
            listed: job ids, each with the time at which it was last listed and not ended, monotonic seconds.

        Raises:
            SlurmError: squeue or scontrol failed.
        """
        if not listed:
            return []
        only = [only_jobs(sorted(listed))] if len(listed) <= _MOST_NAMED else []
        mark = new_mark()
        known = parse_field(self._run(*field_command(mark, "State", "--states=all", *only)), mark)
        age = _SECONDS.match(self.settings().get("minjobage", ""))
        kept_s = 0.0 if age is None else float(age[1]) or math.inf  # 0: forever
        now = time.monotonic()
        return [job for job, at in listed.items() if job not in known and now - at < kept_s]

    def requeue_ended(self, job_id: int, *, update: Callable[[JobRow], Mapping[str, str]]) -> None:
        """Requeue an ended batch job or array task after its first run, with an update; it is held until then.

        Args:
            job_id: its own id; for the task of an array that started last this is the array's.
            update: returns the fields of `scontrol update` for the pending job.

        Raises:
            SlurmError: Slurm no longer knows the job, refuses, or has requeued it already, even if it has ended again.
                A job that was requeued and not updated runs unchanged.
            StillHeld: it was requeued and could not be released, or Slurm did not answer.
        """
        job = self._ended_name(job_id)
        try:
            self._change("scontrol", "requeuehold", job)
        except SlurmTimeout as error:
            raise StillHeld(f"job {job} may be requeued and held: {error}") from None
        self.release_requeued(job_id, job, update=update)

    def release_requeued(self, job_id: int, job: str, *, update: Callable[[JobRow], Mapping[str, str]]) -> None:
        """Update a job that was requeued and is held, and release it, even if the update fails.

        Args:
            job_id, job: its own id, and its name, "123" or "123_4".
            update: as for `requeue_ended`.

        Raises:
            SlurmError: it was not updated.
            StillHeld: it could not be released.
        """
        try:
            rows = [row for row in self.jobs() if row.job_id == job_id]
            if not rows:
                raise SlurmError(f"job {job} was requeued but is not in the queue")
            self.update_jobs({job: update(rows[0])})
            self.shorten_requeue_delay(job)
        finally:
            # another migbatchd, active by then, would not know yet why the job is held
            try:
                self._run("scontrol", "release", job)
            except SlurmError as error:
                raise StillHeld(f"job {job} was requeued and is still held: {error}") from None

    def _ended_name(self, job_id: int) -> str:
        """Return the name of a job that has ended, "123" or "123_4": an array's own id would mean all of its tasks.

        Raises:
            SlurmError: Slurm does not know the job, or it has not ended, or it was requeued before.
        """
        ids = f"{int(job_id)},{int(job_id)}"  # a single unknown id would be an error
        fields = ",".join(f"{name}:0|" for name in ("JobID", "ArrayJobID", "ArrayTaskID", "State", "RestartCnt"))
        output = self._run("squeue", "--noheader", "--all", "--states=all", f"--jobs={ids}", f"--Format={fields}")
        # a job in several partitions may have several rows
        rows = {tuple(words[1:5]) for line in output.splitlines() if (words := line.split("|"))[0] == str(job_id)}
        if not rows:
            raise SlurmError(f"job {job_id} is no longer known to Slurm")
        array, task, state, restarts = sorted(rows)[0]
        if state not in (*ENDED, "COMPLETING"):
            raise SlurmError(f"job {job_id} is already pending or running again")
        if restarts != "0":  # its node reported the end of its first run late
            raise SlurmError(f"job {job_id} has already run again")
        return f"{array}_{task}" if task.isdigit() else str(job_id)


class PyslurmHistoryClient(HistoryClient, PyslurmClient):
    """`HistoryClient` for pyslurm."""


class SlurmrestdHistoryClient(HistoryClient, SlurmrestdClient):
    """`HistoryClient` for slurmrestd."""

"""A stand-in for pyslurm 25.11 over a real Slurm: what it shows of jobs, and only that, as it shows it.

Values come from Slurm's commands; the ways in which pyslurm turns them into Python (its job.pyx, cstr.pyx, uint.pyx and
ctime.pyx) are imitated: zeros and empty texts are None, the task 0 too; gres lose what has a type and no count; texts
are strict UTF-8; jobs come in no order and with those that have ended; time limits are minutes, and whatever has none
ends in a year. A name that pyslurm 25.11 does not have is an AttributeError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, SlurmError

__version__ = "25.11.2"
YEAR_S = 365 * 86400

if not Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).is_file():
    print("python: fatal: Unable to process configuration file", file=sys.stderr, flush=True)
    os._exit(1)


class PyslurmError(Exception):
    pass


class RPCError(PyslurmError):
    def __init__(self, errno: int, msg: str) -> None:
        super().__init__(msg)
        self.errno, self.msg = errno, msg


class _Slurm(CliClient):
    def asked(self, program: str, *arguments: str) -> str:
        try:
            return self._run(program, *arguments)
        except SlurmError as error:
            raise RPCError(1800, str(error)) from None

    def records(self) -> list[JobRow]:
        try:
            return self.jobs()
        except SlurmError as error:
            raise RPCError(1800, str(error)) from None


_slurm = _Slurm(os.environ.get("STANDIN_BIN"))


class Job:
    """The attributes that pyslurm.Job has, as far as this code reads them."""

    def __init__(self, row: JobRow) -> None:
        self._row = row

    id = property(lambda self: self._row.job_id)
    array_id = property(lambda self: self._row.array_job)
    heterogeneous_id = property(lambda self: self._row.het_job)
    user_id = property(lambda self: self._row.uid)
    user_name = property(lambda self: self._row.user)
    account = property(lambda self: self._row.account or None)
    partition = property(lambda self: self._row.partition or None)
    name = property(lambda self: _text(self._row.name))
    state = property(lambda self: self._row.state)
    state_reason = property(lambda self: self._row.reason or None)
    priority = property(lambda self: self._row.priority)
    submit_time = property(lambda self: _time(self._row.submit))
    eligible_time = property(lambda self: _time(self._row.eligible))
    start_time = property(lambda self: _time(self._row.start))
    allocated_nodes = property(lambda self: ",".join(self._row.nodes) or None)
    num_nodes = property(lambda self: self._row.num_nodes)
    required_nodes = property(lambda self: self._row.requested_nodes or None)
    comment = property(lambda self: _text(self._row.comment))
    requeue_count = property(lambda self: self._row.restarts)
    group_id = property(lambda self: self._row.gid)
    qos = property(lambda self: self._row.qos or None)
    wckey = property(lambda self: self._row.wckey or None)
    dependencies = property(
        lambda self: {"afterok": [f"{job}(unfulfilled)" for job in self._row.after]} if self._row.after else None
    )
    constraints = property(lambda self: self._row.features.split(",") if self._row.features else [])
    cpus = property(lambda self: self._row.cpus)
    memory_per_node = property(lambda self: max(0, self._row.memory_per_node) or None)
    memory_per_cpu = property(lambda self: self._row.memory_per_cpu or None)
    resource_sharing = property(lambda self: "NO" if self._row.exclusive else "OK")
    memory_per_gpu = None

    @property
    def array_task_id(self) -> int | None:
        task = self._row.array_task or ""
        return (int(task) or None) if task.isdigit() and not self._waits() else None

    @property
    def array_tasks_waiting(self) -> str | None:
        return (self._row.array_task or "").partition("%")[0] or None if self._waits() else None

    @property
    def array_tasks_parallel(self) -> int | None:
        return self._row.throttle

    @property
    def time_limit(self) -> int | None:
        return None if self._row.time_limit_s is None else self._row.time_limit_s // 60

    @property
    def end_time(self) -> int | None:
        if self._row.end is None and self._row.start is not None and self._row.time_limit_s is None:
            return int(self._row.start) + YEAR_S
        return _time(self._row.end)

    @property
    def gres_per_node(self) -> dict[str, int]:
        shown = {}
        for entry in self._row.gres.split(",") if self._row.gres else ():
            words = entry.removeprefix("gres:").split(":")
            if len(words) == 1:
                shown[words[0]] = 1
            elif words[1].isdigit():
                shown[words[0]] = int(words[1])
            elif len(words) > 2:
                shown[f"{words[0]}:{words[1]}"] = int(words[2])
        return shown

    def _waits(self) -> bool:
        return self._row.pending and self._row.job_id == self._row.array_job


class Jobs:
    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    @staticmethod
    def load(preload_passwd_info: bool = False, frozen: bool = False) -> Jobs:
        rows = _slurm.records()
        listed = {row.job_id for row in rows}
        ended = _slurm.asked("squeue", "-h", "-a", "-t", "all", "--array", "--Format=JobID:0|,State:0")
        for line in dict.fromkeys(ended.splitlines()):
            number, _, state = line.partition("|")
            if int(number) not in listed:
                rows.append(JobRow(int(number), state=state, user="root"))
        return Jobs([Job(row) for row in sorted(rows, key=lambda row: row.job_id * 7919 % 1009)])

    def values(self) -> Iterator[Job]:
        return iter(self._jobs)


class Partitions:
    @staticmethod
    def load() -> Partitions:
        return Partitions()

    def values(self) -> Iterator[SimpleNamespace]:
        for line in _slurm.asked("scontrol", "--oneliner", "show", "partition").splitlines():
            values = dict(word.partition("=")[::2] for word in line.split())
            yield SimpleNamespace(
                name=values["PartitionName"],
                is_default=values["Default"] == "YES",
                priority_tier=int(values["PriorityTier"]) or None,
            )


def _text(value: str) -> str | None:
    return value.encode("utf-8", "surrogateescape").decode() or None


def _time(value: float | None) -> int | None:
    return int(value) if value else None

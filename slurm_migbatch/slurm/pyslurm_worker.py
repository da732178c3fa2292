"""Import pyslurm and answer the requests of `pyslurm.py`: one line of JSON for each.

This is a separate process, because pyslurm holds the interpreter while it waits for slurmctld, exits the process if it
finds no Slurm configuration, leaks memory in long-running pollers and may crash in libslurm. It runs under any Python
that has pyslurm: besides that it imports only the standard library and a list of states.

It shows values as pyslurm does, with the names of pyslurm 25.11; `pyslurm.py` converts them to rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from slurm_migbatch.slurm.states import ENDED

#: attributes of pyslurm.Job that rows are built from
JOB = (
    "id",
    "array_id",
    "array_task_id",
    "array_tasks_waiting",
    "array_tasks_parallel",
    "heterogeneous_id",
    "user_id",
    "account",
    "partition",
    "name",
    "state",
    "state_reason",
    "priority",
    "submit_time",
    "eligible_time",
    "start_time",
    "end_time",
    "time_limit",
    "allocated_nodes",
    "num_nodes",
    "required_nodes",
    "gres_per_node",
    "comment",
    "requeue_count",
    "constraints",
    "cpus",
    "group_id",
    "qos",
    "wckey",
    "dependencies",
    "memory_per_node",
    "memory_per_cpu",
    "memory_per_gpu",
    "resource_sharing",
)

#: attributes with lists by kind that a user may make long, and how many elements of each list are sent
_LISTS = ("dependencies",)
_MOST = 65


class WorkerMethods:
    """Requests by name."""

    def __init__(self, pyslurm: Any) -> None:
        self._pyslurm = pyslurm
        self._users: dict[int, str] = {}

    def hello(self) -> dict[str, Any]:
        """Return pyslurm's release and the fields that it lacks, after one request to slurmctld."""
        lacking = [name for name in JOB if not hasattr(self._pyslurm.Job, name)]
        self._pyslurm.Partitions.load()
        return {"version": self._pyslurm.__version__, "lacking": lacking}

    def jobs(self) -> dict[str, Any]:
        """Return every job that is pending or holds resources, the tiers of partitions, names of users."""
        rows = []
        for job in self._pyslurm.Jobs.load().values():
            if job.state not in ENDED:
                rows.append([_short(getattr(job, name)) if name in _LISTS else getattr(job, name) for name in JOB])
                if job.user_id not in self._users:
                    self._users[job.user_id] = job.user_name or str(job.user_id)
        tiers = {p.name: p.priority_tier or 0 for p in self._pyslurm.Partitions.load().values()}
        return {"jobs": rows, "tiers": tiers, "users": {str(uid): name for uid, name in self._users.items()}}

    def default_partition(self) -> str:
        """Return the default partition's name, or an empty string."""
        return next((str(p.name) for p in self._pyslurm.Partitions.load().values() if p.is_default), "")

    def is_slurm_error(self, error: Exception) -> bool:
        """Return whether the error came from Slurm."""
        return isinstance(error, self._pyslurm.PyslurmError)


def _short(lists: dict[str, Any] | None) -> dict[str, Any]:
    items = (lists or {}).items()
    return {kind: values[:_MOST] if isinstance(values, list) else values for kind, values in items}


def answer(answers: WorkerMethods, line: str) -> dict[str, Any]:
    """Answer one line, or return the error and whether it came from Slurm (or from pyslurm)."""
    try:
        ask: Callable[[], Any] = getattr(answers, json.loads(line)["ask"])
        return {"ok": ask()}
    except Exception as error:
        return {"error": str(error) or type(error).__name__, "slurm": answers.is_slurm_error(error)}


def main() -> None:
    """Answer until the input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # pyslurm prints warnings to stdout
    import pyslurm  # here, because the import may end the process

    answers = WorkerMethods(pyslurm)
    for line in sys.stdin:
        output.write(json.dumps(answer(answers, line)) + "\n")
        output.flush()


if __name__ == "__main__":
    main()

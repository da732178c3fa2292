"""How jobs ended that have left the queue: state, exit code and times, from slurmctld's memory (MinJobAge)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.pyslurm import PyslurmClient

_SEPARATOR = "\x1f"
_FIELDS = ("JobID", "RestartCnt", "State", "exit_code", "SubmitTime", "StartTime", "EndTime")
#: states of jobs that hold nothing any more
_ENDED = "BOOT_FAIL,CANCELLED,COMPLETED,DEADLINE,FAILED,NODE_FAIL,OUT_OF_MEMORY,PREEMPTED,REVOKED,TIMEOUT"


class HistoryClient(CliClient):
    """CliClient that also tells how jobs ended."""

    def ended(self, job_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Rows for `Store.upsert_jobs` about those of `job_ids` that slurmctld still remembers; one squeue call.

        Raises:
            SlurmError: squeue failed.
        """
        wanted = set(job_ids)
        if not wanted:
            return []
        fields = ",".join(f"{name}:0{_SEPARATOR}" for name in _FIELDS)
        output = self._run("squeue", "--noheader", "--all", f"--states={_ENDED}", f"--Format={fields}")
        return [
            row for line in output.splitlines() if (row := _row(line.split(_SEPARATOR))) and row["job_id"] in wanted
        ]


class PyslurmHistoryClient(HistoryClient, PyslurmClient):
    """The same where pyslurm looks at the queue."""


def _row(values: Sequence[str]) -> dict[str, Any] | None:
    if len(values) < len(_FIELDS) or not values[0].isdigit():
        return None
    job_id, restarts, state, code, submit, start, end = values[: len(_FIELDS)]
    return {
        "job_id": int(job_id),
        "restarts": int(restarts) if restarts.isdigit() else 0,
        "state": state,
        "exit_code": code,
        "submit": _moment(submit),
        "start": _moment(start),
        "end": _moment(end),
    }


def _moment(text: str) -> float | None:
    return float(text) if text.isdigit() and text != "0" else None

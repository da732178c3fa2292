"""What migbatchd alone asks Slurm: how jobs ended, how it is configured, where its nodes are, who may see what.

How jobs ended that have left the queue (state, exit code and times) is in slurmctld's memory for MinJobAge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.pyslurm import PyslurmClient
from slurm_migbatch.slurm.states import ENDED

_SEPARATOR = "\x1f"
_FIELDS = ("JobID", "RestartCnt", "State", "exit_code", "SubmitTime", "StartTime", "EndTime")


_SETTING = re.compile(r"\s*([A-Za-z][\w\[\]]*)\s*=\s*(.*?)\s*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Standing(NamedTuple):
    """What slurmdbd says of a user: whether Slurm lets him see everything, and the accounts that he coordinates."""

    operator: bool = False
    accounts: frozenset[str] = frozenset()


class HistoryClient(CliClient):
    """CliClient that also shows how jobs ended, and what else only the service asks."""

    def settings(self) -> dict[str, str]:
        """Return slurmctld's configuration, keys in lower case, empty where it says (null); one scontrol call.

        Raises:
            SlurmError: scontrol failed.
        """
        found = {}
        for line in self._run("scontrol", "show", "config").splitlines():
            if match := _SETTING.fullmatch(line):
                found[match[1].lower()] = "" if match[2] == "(null)" else match[2]
        return found

    def node_addresses(self) -> dict[str, frozenset[str]]:
        """Return the names or addresses of each node's host (NodeAddr, NodeHostname); one sinfo call.

        Raises:
            SlurmError: sinfo failed.
        """
        found: dict[str, frozenset[str]] = {}
        for line in self._run("sinfo", "-h", "-a", "-N", "-o", "%N %o %n").splitlines():
            words = line.split()
            if len(words) == 3:
                found[words[0]] = found.get(words[0], frozenset()) | set(words[1:])
        return found

    def standing(self, user: str) -> Standing:
        """Return what slurmdbd says of a user; one sacctmgr call, to be made only where there is a slurmdbd.

        Raises:
            SlurmError: sacctmgr failed.
        """
        if not _USER.fullmatch(user):
            return Standing()
        output = self._run("sacctmgr", "-n", "-P", "show", "user", user, "withcoord", "format=user,admin,coord")
        for line in output.splitlines():
            name, _, rest = line.partition("|")
            level, _, accounts = rest.partition("|")
            if name == user:
                operator = level.lower() in ("operator", "administrator")
                return Standing(operator, frozenset(word for word in accounts.strip("|").split(",") if word))
        return Standing()

    def ended(self, job_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows for `Store.upsert_jobs` about those of `job_ids` that slurmctld still remembers; one squeue call.

        Raises:
            SlurmError: squeue failed.
        """
        wanted = set(job_ids)
        if not wanted:
            return []
        fields = ",".join(f"{name}:0{_SEPARATOR}" for name in _FIELDS)
        output = self._run("squeue", "--noheader", "--all", f"--states={','.join(ENDED)}", f"--Format={fields}")
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

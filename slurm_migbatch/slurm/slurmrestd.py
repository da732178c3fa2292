"""Implement SlurmClient over slurmrestd, Slurm's REST API, and over Slurm's commands for what it cannot do.

Tested with slurmrestd of 24.11.5 (API versions 40 to 42) and 26.05.5 (42 to 45). Slurm's commands are used for:

- changes of single array tasks ("123_4"): `POST job/` refuses them ("Submit job update against Array Job's JobID
  instead of array task id"), and a task that shares its array's record has no id of its own;
- `requeue` before version 45, the default partition before version 45, and updates of other fields than `_FIELDS`;
- squeue's `gres_texts`, jobs' excluded nodes, the partitions' `gpu_defaults`, and the queries of
  `daemon.ended.HistoryClient`.

The API does the same as the commands for: `Gres` of nodes and of jobs, comments with any bytes, throttles of arrays,
signals to the whole job and to single tasks, reservations.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.slurm import restrows
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused, on_nodes
from slurm_migbatch.slurm.commands import check_fields, check_signal, checked_job
from slurm_migbatch.slurm.order import in_order
from slurm_migbatch.slurm.reservations import NodeReservation
from slurm_migbatch.slurm.restapi import DEFAULT_PARTITION, REQUEUE, SHARING, RestApi, RestError
from slurm_migbatch.slurm.unread import Unread
from slurm_migbatch.slurm.versions import parse_version

#: Slurm's numbers of errors
_UNKNOWN_JOB: Final = 2017
_DONE: Final = 2021
_WAITS: Final = 2024
#: error numbers of refusals by slurmctld; others mean that slurmctld did not answer
_REFUSALS: Final = range(2000, 4000)
#: job fields that the API can change, by scontrol's names
_FIELDS: Final = frozenset({"Gres", "Comment", "AdminComment", "Name", "StartTime", "ArrayTaskThrottle"})
_SOON: Final = re.compile(r"now(?:\+(\d{1,9}))?")


class SlurmrestdClient(CliClient):
    """`SlurmClient` over slurmrestd; see the module.

    Args:
        bin_dir, slurm_conf, timeout: as for `CliClient`; the time limit applies to slurmrestd too.
        address, token_file, user, owners: as for `RestApi`; the user must be root or SlurmUser, who see every job.
    """

    def __init__(
        self,
        bin_dir: str | Path | None = None,
        slurm_conf: str | Path | None = None,
        timeout: float = 20.0,
        *,
        address: str,
        token_file: str = "",
        user: str = "slurm",
        owners: Iterable[int] = (),
    ) -> None:
        super().__init__(bin_dir, slurm_conf, timeout)
        self.api = RestApi(address, token_file, user, timeout, owners)
        self._odd_partitions = Unread("partition")

    def probe(self) -> str:
        """Send a request to slurmrestd; return why it cannot be used, or an empty string."""
        try:
            self.jobs()
            self.nodes()
            self.version()
        except SlurmError as error:
            return str(error)
        return ""

    # -- observe -----------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRow]:
        """List jobs by two requests; see SlurmClient."""
        unread: dict[str, str] = {}
        tiers = restrows.tiers(self.api.ask("GET", "partitions/"), unread.__setitem__)
        self._odd_partitions.name(unread)
        answer, now = self.api.ask("GET", "jobs/", newest=SHARING, flags="ALL"), time.time()
        rows = restrows.jobs(answer, now, reserved=self._reserved, coming=self._coming)
        return in_order(self._known([row.with_ending_run_count(now) for row in rows]), tiers)

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        """List jobs as `jobs` does, because the API has no smaller request; see SlurmClient."""
        return on_nodes(self.jobs(), nodes)

    def nodes(self) -> list[NodeRow]:
        """List nodes by one request, reservations by another one, as `CliClient` does; see SlurmClient."""
        unread: dict[str, str] = {}
        rows = restrows.nodes(self.api.ask("GET", "nodes/"), unread.__setitem__)
        self._odd_nodes.name(unread)
        return self._with_reservations(rows)

    def _current_reservations(self, unread: Callable[[str, str], None], now: float) -> list[NodeReservation]:
        return restrows.reservations(self.api.ask("GET", "reservations/"), now, unread)

    def default_partition(self) -> str:
        """See SlurmClient."""
        if self.api.version < DEFAULT_PARTITION:
            return super().default_partition()
        return restrows.default_partition(self.api.ask("GET", "partitions/"))

    def version(self) -> tuple[int, int]:
        """Release of slurmrestd; one request, because it may have been upgraded since the last one."""
        answer = self.api.ask("GET", "ping/")
        try:
            return parse_version(f"slurm {answer['meta']['slurm']['release']}")
        except (KeyError, TypeError):
            raise SlurmError(f"slurmrestd does not report its release: {str(answer)[:200]}") from None

    # -- change ------------------------------------------------------------------------------------------------

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Update jobs by a request each, and by scontrol if the API cannot change all fields; see SlurmClient."""
        for job, fields in updates.items():
            checked_job(job)
            check_fields(fields)
        refused: dict[str, str] = {}
        others = {}
        for job, fields in updates.items():
            if not (job.isdigit() and _FIELDS.issuperset(fields) and _can_express(fields)):
                others[job] = fields
            elif fields and (why := self._changed(f"job/{job}", _description(fields))):
                refused[job] = why
        try:
            super().update_jobs(others)
        except SlurmRefused as error:
            refused |= error.refused
        if refused:
            raise SlurmRefused(refused, len(updates))

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """Requeue jobs by a request each; see SlurmClient."""
        jobs = [checked_job(job) for job in job_ids]
        if self.api.version < REQUEUE:
            super().requeue_all(jobs)
            return
        refused = {}
        for job in jobs:
            body = {"jobs": [job], "flags": ["Incomplete"]}
            if why := self._changed("jobs/requeue", body, harmless=(_WAITS, _DONE)):
                refused[job] = why
        if refused:
            raise SlurmRefused(refused, len(jobs))

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        """Signal jobs and array tasks by one request; see SlurmClient."""
        check_signal(name)
        names = [checked_job(job) for job in job_ids]
        if not names:
            return
        flags = {"flags": ["FULL_JOB"]} if script else {}
        self._signal({"jobs": names, "signal": name, "job_state": ["RUNNING"], **flags})

    def cancel(self, job_id: int | str, *, running: bool = False) -> None:
        """Cancel a job or one task of an array; one that has already ended is no error."""
        states = {"job_state": ["RUNNING"]} if running else {}
        self._signal({"jobs": [checked_job(job_id)], "signal": "KILL", **states})

    # -- requests ----------------------------------------------------------------------------------------------

    def _offer(self, offers: Sequence[tuple[Sequence[str], str]]) -> dict[int, str]:
        answers = [self._changed("nodes/", {"name": list(nodes), "gres": gres}) for nodes, gres in offers]
        return {number: why for number, why in enumerate(answers) if why}

    def _signal(self, body: Mapping[str, Any]) -> None:
        self.before_change()
        if refused := _not_signalled(self.api.ask("DELETE", "jobs/", body)):
            raise SlurmRefused(refused, len(body["jobs"]))

    def _changed(self, path: str, body: Mapping[str, Any], harmless: Sequence[int] = ()) -> str:
        """Return why Slurm refuses a change, empty if it does not."""
        self.before_change()
        try:
            self.api.ask("POST", path, body)
        except RestError as error:
            if error.number not in _REFUSALS:
                raise
            return "" if error.number in harmless else error.reason
        return ""


def _not_signalled(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the running or possibly running jobs that Slurm refused to signal, and its messages."""
    refused = {}
    for status in restrows.records(found, "status"):
        error = status.get("error") or {}
        number, reason = error.get("code"), str(error.get("message") or error.get("string"))
        if number and number not in (_UNKNOWN_JOB, _DONE) and "filter state" not in reason:
            refused[str(status.get("step_id"))] = reason
    return refused


def _can_express(fields: Mapping[str, str]) -> bool:
    """Return whether the API can express the values."""
    throttle = fields.get("ArrayTaskThrottle", "0")
    return throttle.isdigit() and _SOON.fullmatch(fields.get("StartTime", "now")) is not None


def _description(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return an API job description that changes these scontrol fields."""
    plain = {"Comment": "comment", "AdminComment": "admin_comment", "Name": "name"}
    body: dict[str, Any] = {plain[key]: value for key, value in fields.items() if key in plain}
    if "Gres" in fields:
        entries = [entry.removeprefix("gres:").removeprefix("gres/") for entry in fields["Gres"].split(",") if entry]
        body["tres_per_node"] = ",".join(f"gres/{entry}" for entry in entries)
    if "ArrayTaskThrottle" in fields:
        body["array"] = fields["ArrayTaskThrottle"]
    if match := _SOON.fullmatch(fields.get("StartTime", "")):
        body["begin_time"] = {"set": True, "infinite": False, "number": int(time.time()) + int(match[1] or 0)}
    return body

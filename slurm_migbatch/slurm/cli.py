"""Implement SlurmClient over squeue, scontrol, scancel and sinfo.

Every command is an argument list with a deadline and an environment of its own, so that a SQUEUE_FORMAT or
SLURM_TIME_FORMAT in the service's environment has no effect. One squeue call lists all jobs, one scontrol call all
nodes, and one scontrol process carries any number of changes.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from slurm_migbatch.slurm import gpu_defaults, preemption, reservations
from slurm_migbatch.slurm.arrays import chunks, split_arrays
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused, merge_partitions, on_nodes
from slurm_migbatch.slurm.commands import (
    LONGEST_ARGUMENT,
    SlurmCommands,
    check_fields,
    check_signal,
    checked_job,
    decoded,
    failed,
)
from slurm_migbatch.slurm.dependencies import LONGEST, LongDependencies, jobs_waited_for
from slurm_migbatch.slurm.dialog import Records, Request
from slurm_migbatch.slurm.fields import fields_of
from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from slurm_migbatch.slurm.listing import (
    NODES_COMMAND,
    JobReader,
    alone_commands,
    field_command,
    new_mark,
    only_jobs,
    parse_alone,
    parse_field,
    parse_jobs,
    parse_nodes,
    sharing_of,
    squeue_command,
)
from slurm_migbatch.slurm.order import has_capitals, in_order, parse_tiers
from slurm_migbatch.slurm.preemption import PreemptionRules
from slurm_migbatch.slurm.settings import CONFIG_COMMAND, PARTITIONS_COMMAND, backfill_window_s, parse_settings
from slurm_migbatch.slurm.unread import Unread
from slurm_migbatch.slurm.versions import parse_version

_NODE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_GRES = re.compile(r"[A-Za-z0-9_.,:+/-]{1,8192}")
_EXCLUDED = re.compile(r"(?<!\S)ExcNodeList=(\S+)")
_SCANCEL = re.compile(r"job id (\S+?): (.+)")
#: 123_4 or, on 26.05, 123_[4]
_ABOUT = re.compile(r"\A\d+_\S+: (?!.* / )")
#: scancel's messages about a job that has ended, or that slurmctld no longer knows
_ENDED = ("Invalid job id specified", "already completing or completed")
#: seconds in which scancel signals each of a few tasks once, before its first retry
_ONCE_S = 3.0
#: last release that supports SQUEUE_ARRAY_UNIQUE
_UNIQUE = (22, 5)
#: ESLURM_ALREADY_DONE as an exit status: some tasks of an array had ended
_ALREADY_DONE = 2021 & 0xFF


class CliClient(SlurmCommands):
    """`SlurmClient` over Slurm's own commands.

    Args:
        bin_dir: directory of squeue, scontrol and scancel; None: found on PATH.
        slurm_conf: value of SLURM_CONF for them; None: this process's, if it has one.
        timeout: seconds until a command counts as failed.
    """

    def __init__(
        self, bin_dir: str | Path | None = None, slurm_conf: str | Path | None = None, timeout: float = 20.0
    ) -> None:
        super().__init__(bin_dir, slurm_conf, timeout)
        self._version: tuple[int, int] | None = None
        self._reader = JobReader()
        #: whether partitions have capital letters, see `order`; None before nodes were listed
        self._capitals: bool | None = None
        self._tiers: Mapping[str, int] = {}
        self._tiers_at = 0.0  # unix seconds
        self._long_dependencies = LongDependencies(self._dependencies)
        self._odd_jobs = Unread("job")
        self._odd_nodes = Unread("node")
        self._odd_reservations = Unread("reservation")
        self._reserved = self._coming = False
        self._reservations: list[reservations.NodeReservation] = []
        self._reservations_at = 0.0  # unix seconds

    # -- observe -----------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRow]:
        """List jobs by one squeue call, and a few more if arrays are pending; see SlurmClient and `arrays.py`.

        One more reads long dependencies of pipelines.
        """
        rows = self._listed()
        if self.version() > _UNIQUE:
            rows = split_arrays(rows, self._run, self._shown, self._listed)
        return self._in_reservations(self._long_dependencies.of(rows))

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        """List jobs on nodes by one squeue call; see SlurmClient."""
        only = f"--nodelist={','.join(sorted(nodes))}"
        if len(only) >= LONGEST_ARGUMENT:
            return on_nodes(self.jobs(), nodes)
        mark, sharing = new_mark(), sharing_of(self.version())
        output = self._run(*squeue_command(mark, ordered=False, sharing=sharing), only)
        rows, now = parse_jobs(output, mark, sharing), time.time()
        return [row.with_ending_run_count(now) for row in rows]

    def _dependencies(self, jobs: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return which jobs these jobs wait for, by one squeue call."""
        texts = self._field("Dependency", only_jobs(jobs), width=LONGEST)
        return {job: jobs_waited_for(text) for job, text in texts.items()}

    def _in_reservations(self, rows: list[JobRow]) -> list[JobRow]:
        """Return the rows with each job's reservation, if a node was reserved when nodes were last listed, and with
        its --time-min, if a node will be reserved.
        """
        if self._reserved:
            rows = reservations.of_jobs(rows, self._field("Reservation", "--array"))
        if self._coming:
            rows = reservations.with_least_times(rows, self._field("MinTime", "--array"))
        return rows

    def _listed(self, jobs: Sequence[str] = ()) -> list[JobRow]:
        mark, ordered, sharing = new_mark(), not self._misplaced(), sharing_of(self.version())
        only = [only_jobs(jobs)] if jobs else []
        read = parse_jobs if jobs else self._reader.read
        output = self._run(*squeue_command(mark, ordered=ordered, sharing=sharing), *only)
        rows, now = read(output, mark, sharing), time.time()
        rows = [row.with_ending_run_count(now) for row in rows]
        return self._known(merge_partitions(rows) if ordered else in_order(rows, self._current_tiers(now)))

    def _misplaced(self) -> bool:
        """Return whether squeue misplaces jobs, see `order`; lists the nodes once for that."""
        if self._capitals is None:
            with suppress(SlurmError):  # whoever acts on jobs lists the nodes too
                if self.version() > _UNIQUE:
                    self._list_nodes()
        return bool(self._capitals) and self.version() > _UNIQUE

    def _current_tiers(self, now: float) -> Mapping[str, int]:
        """Return the tiers of partitions, queried once a minute."""
        if not 0 <= now - self._tiers_at < reservations.EVERY_S:
            self._tiers, self._tiers_at = parse_tiers(self._run(*PARTITIONS_COMMAND)), now
        return self._tiers

    def _shown(self, jobs: Sequence[str]) -> list[str]:
        """Show jobs by `scontrol show job`; one process for all."""
        if not jobs:
            return []
        records = Records([checked_job(job) for job in jobs])
        process = self._finish("scontrol", "--oneliner", stdin=records.stdin, more_s=0.02 * len(jobs))
        by_job = records.by_job(process.stdout.decode("utf-8", "surrogateescape"))
        if by_job is None:
            raise failed("scontrol", ("--oneliner", "show", "job"), process)
        return by_job

    def _known(self, rows: list[JobRow]) -> list[JobRow]:
        """Return the rows; log those that could not be parsed."""
        self._odd_jobs.name({str(row.job_id): row.reason for row in rows if row.unread})
        return rows

    def gres_texts(self) -> dict[int, str]:
        """Return the `gres` of every job that `jobs` lists, by its id; one squeue call."""
        return self._field("tres-per-node", "--array")

    def _field(self, field: str, *options: str, width: int = 0) -> dict[int, str]:
        """Return one field of jobs by their ids; one squeue call."""
        mark = new_mark()
        return parse_field(self._run(*field_command(mark, field, *options, width=width)), mark)

    def nodes(self) -> list[NodeRow]:
        """List nodes by one scontrol call, and reservations by another one, at least once a minute; see SlurmClient.

        A few more show nodes that are listed more than once.
        """
        return self._with_reservations(self._list_nodes())

    def _list_nodes(self) -> list[NodeRow]:
        unread: dict[str, str] = {}
        rows = parse_nodes(self._run(*NODES_COMMAND), unread.__setitem__, self._shown_alone)
        self._odd_nodes.name(unread)
        self._capitals = has_capitals(rows)
        return rows

    def _shown_alone(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the rows of these nodes, whatever the texts of others look like; names that are no nodes have none."""
        rows: dict[str, str] = {}
        known = set(self._run("sinfo", "-h", "-a", "-N", "-o", "%N").split())  # texts may have any number of names
        for names, mark, command in alone_commands([node for node in nodes if node in known]):
            process = self._finish(*command)
            texts = parse_alone(process.stdout.decode("utf-8", "surrogateescape"), names, mark)
            if texts is None:
                raise failed(command[0], command[1:], process)
            rows |= texts
        return rows

    def _with_reservations(self, rows: list[NodeRow]) -> list[NodeRow]:
        self._reserved = any(reservations.RESERVED in row.states for row in rows)
        now = time.time()
        if self._reserved or not 0 <= now - self._reservations_at < reservations.EVERY_S:
            unread: dict[str, str] = {}
            self._reservations = self._current_reservations(unread.__setitem__, now)
            self._odd_reservations.name(unread)
            self._reservations_at = now
        # those that were active are over
        known = [held for held in self._reservations if self._reserved or held.start > now]
        self._coming = any(held.start > now for held in known)
        return reservations.of_nodes(rows, known, now) if known else rows

    def _current_reservations(
        self, unread: Callable[[str, str], None], now: float
    ) -> list[reservations.NodeReservation]:
        """Return the active and coming reservations; `unread` is called for each that cannot be read."""
        return reservations.parse(self._run(*reservations.COMMAND), unread, now)

    def default_partition(self) -> str:
        """Return the partition that sinfo marks with a star."""
        names = self._run("sinfo", "-h", "-a", "-o", "%P").split()
        return next((name[:-1] for name in names if name.endswith("*")), "")

    def gpu_defaults(self) -> dict[str, GpuDefaults]:
        """See SlurmClient."""
        return gpu_defaults.parse(*(self._run(*command) for command in gpu_defaults.COMMANDS))

    def hidden_partitions(self) -> frozenset[str]:
        """See SlurmClient."""
        records = map(fields_of, self._run(*PARTITIONS_COMMAND).splitlines())
        return frozenset(
            [row.get("PartitionName", "") for row in records if "YES" in (row.get("Hidden"), row.get("RootOnly"))]
        )

    def preemption(self) -> PreemptionRules:
        """See SlurmClient. Without accounting there are no QOS."""
        config, partitions = (self._run(*command) for command in preemption.COMMANDS[:2])
        try:
            qos = self._run(*preemption.COMMANDS[2])
        except SlurmError:
            if preemption.by_qos(config):
                raise
            qos = ""
        return preemption.parse(config, partitions, qos)

    def backfill_window_s(self) -> float:
        """See SlurmClient."""
        return backfill_window_s(self.settings())

    def settings(self) -> dict[str, str]:
        """Return slurmctld's configuration, keys in lower case, empty for (null); one scontrol call.

        Raises:
            SlurmError: scontrol failed.
        """
        return parse_settings(self._run(*CONFIG_COMMAND))

    def version(self) -> tuple[int, int]:
        """Release of the commands; queried once, and again after a command failed, as while Slurm is upgraded."""
        if self._version is None:
            self._version = parse_version(self._run("squeue", "--version"))
        return self._version

    # -- change ------------------------------------------------------------------------------------------------

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """Set Gres of nodes by one scontrol process; nodes that get the same string share one request."""
        by_gres: dict[str, list[str]] = {}
        unsent: dict[str, str] = {}
        for node, gres in updates.items():
            if _NODE_NAME.fullmatch(node) and _GRES.fullmatch(gres):
                by_gres.setdefault(gres, []).append(node)
            else:  # too long for a request, for example because of what the node reports
                unsent[node] = f"its name or GRES cannot be passed to scontrol ({len(gres)} bytes: {gres[:80]!r})"
        shared = [chunk for names in by_gres.values() for chunk in chunks(names, 64)]
        refused = self._offer([(chunk, updates[chunk[0]]) for chunk in shared])
        if together := [node for number in refused for node in shared[number] if len(shared[number]) > 1]:
            # Slurm refuses a request because of one of its nodes, and leaves the others unchanged
            alone = self._offer([([node], updates[node]) for node in together])
            refused_nodes = {together[number]: why for number, why in alone.items()}
        else:
            refused_nodes = {}
        refused_nodes |= {shared[number][0]: why for number, why in refused.items() if len(shared[number]) == 1}
        refused_nodes |= unsent
        if refused_nodes:
            reasons = {node: why.removeprefix("slurm_update error: ") for node, why in refused_nodes.items()}
            raise SlurmRefused(reasons, len(updates))

    def _offer(self, offers: Sequence[tuple[Sequence[str], str]]) -> dict[int, str]:
        """Set the GRES of groups of nodes; return Slurm's message for each group that it refused, by position."""
        return self._ask([("update", f"NodeName={','.join(nodes)}", f"Gres={gres}") for nodes, gres in offers])

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """Update jobs by one scontrol process; a text that scontrol's input syntax cannot hold gets its own process."""
        for fields in updates.values():
            check_fields(fields)
        self._ask_of_jobs(
            {
                job: ("update", f"JobId={checked_job(job)}", *(f"{key}={value}" for key, value in fields.items()))
                for job, fields in updates.items()
                if fields
            }
        )

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """Requeue jobs by `scontrol requeue incomplete`, one process for all."""
        self._ask_of_jobs({str(job): ("requeue", "incomplete", checked_job(job)) for job in job_ids})

    def resume_all(self, job_ids: Iterable[int | str]) -> None:
        """Resume jobs by one scontrol process."""
        self._ask_of_jobs({str(job): ("resume", checked_job(job)) for job in job_ids})

    def excluded_nodes(self, job_ids: Iterable[int | str]) -> dict[str, str]:
        """See SlurmClient; by `scontrol show job`, one process for all."""
        names = [checked_job(job) for job in job_ids]
        matches = {name: _EXCLUDED.findall(text) for name, text in zip(names, self._shown(names), strict=True)}
        return {
            name: ",".join(lists) for name, texts in matches.items() if (lists := [t for t in texts if t != "(null)"])
        }

    def shorten_requeue_delay(self, job_id: int | str) -> None:
        """Run `scontrol update StartTime=now+2`.

        Not `now`: slurmd treats a credential as revoked if it was created in the second in which slurmd was told to
        kill the job. It would refuse the new run, and the job would end as FAILED ("already killed, do not launch batch
        job").
        """
        self.update_jobs({str(job_id): {"StartTime": "now+2"}})

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        """Signal jobs by one `scancel --signal --state=RUNNING`, and array tasks by some more.

        Without the state scancel retries a pending job for minutes ("Job can not be altered now"). With it, it still
        does so with running tasks of arrays: slurmctld sends the signal but reports that the job is in transition, so
        scancel sends it again after 5 s, and so on. It is killed before that; this requires naming a task as "123_4".
        """
        check_signal(name)
        self.before_change()
        names = [checked_job(job) for job in job_ids]
        jobs, tasks = [n for n in names if "_" not in n], [n for n in names if "_" in n]
        options = [*(["--full"] if script else []), "--state=RUNNING", f"--signal={name}"]
        reasons: dict[str, str] = {}
        if jobs:
            process = self._finish("scancel", *options, *jobs)
            reasons |= _SCANCEL.findall(decoded(process.stderr))
            if process.returncode not in (0, _ALREADY_DONE) and not reasons:
                raise failed("scancel", (*options, *jobs), process)
        if tasks:
            with ThreadPoolExecutor(8) as pool:
                for output in pool.map(lambda chunk: self._scancel(*options, *chunk), chunks(tasks, 8)):
                    reasons |= _SCANCEL.findall(output)
        refused = {job: why.strip() for job, why in reasons.items() if not any(phrase in why for phrase in _ENDED)}
        if refused:
            raise SlurmRefused(refused, len(names))

    def _scancel(self, *arguments: str) -> str:
        """Run scancel and return its error output; kill it before it sends a signal for the second time."""
        self.calls += 1
        command = [f"{self._bin}/scancel" if self._bin else "scancel", *arguments]
        try:
            process = subprocess.run(command, capture_output=True, timeout=_ONCE_S, env=self._env, check=False, cwd="/")
        except subprocess.TimeoutExpired as error:
            return decoded(error.stderr or b"")
        except OSError as error:
            raise SlurmError(f"scancel cannot be started ({error.strerror}: {command[0]})") from None
        return decoded(process.stderr)

    def cancel(self, job_id: int | str, *, running: bool = False) -> None:
        """Run `scancel --quiet`, which accepts a job that has ended or is unknown."""
        self._change("scancel", "--quiet", *(["--state=RUNNING"] if running else ()), checked_job(job_id))

    # -- processes ---------------------------------------------------------------------------------------------

    def _change(self, program: str, *arguments: str) -> None:
        """Run a command that changes something."""
        self.before_change()
        self._run(program, *arguments)

    def _ask_of_jobs(self, requests: Mapping[str, Request]) -> None:
        refused = self._ask(list(requests.values()))
        if refused:
            jobs = list(requests)
            reasons = {jobs[number]: _message_only(why, jobs[number]) for number, why in refused.items()}
            raise SlurmRefused(reasons, len(jobs))

    def _run(self, program: str, *arguments: str) -> str:
        try:
            process = self._finish(program, *arguments)
            if process.returncode:
                raise failed(program, arguments, process)
        except SlurmError:
            self._version = None
            raise
        return process.stdout.decode("utf-8", "surrogateescape")


def _message_only(why: str, job: str) -> str:
    """Return Slurm's message without the job that scontrol puts before or after it."""
    return _ABOUT.sub("", why.removesuffix(f" for job {job}").removeprefix("slurm_update error: "))

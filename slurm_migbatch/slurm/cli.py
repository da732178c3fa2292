"""SlurmClient over squeue, scontrol and scancel.

Every command is an argument list with a deadline and an environment of its own, so that a SQUEUE_FORMAT or
SLURM_TIME_FORMAT of whoever started the service changes nothing. One squeue call lists all jobs, one scontrol call all
nodes, and one scontrol process carries any number of GRES updates (0.6 ms each instead of 2.5 ms).

Job names and comments are free text: they may hold newlines, separators and bytes that are no UTF-8. They stand last in
a row, between separators that hold 64 random bits of this one call, so no text written before the call can imitate one.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, merge_partitions
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.times import TimeFormError, parse_duration
from slurm_migbatch.slurm.versions import parse_version

#: squeue --Format fields in the order of a row; the same names work from 22.05 to 26.05. Width 0 means uncut.
SQUEUE_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "RestartCnt",
    "UserID",
    "UserName",
    "Account",
    "Partition",
    "State",
    "Reason",
    "PriorityLong",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "NodeList",
    "NumNodes",
    "ReqNodes",
    "tres-per-node",
    "Feature",
    "NumCPUs",
)
_TEXTS = ("Name", "Comment")

#: States in which a job waits for resources, holds them or gives them back.
JOB_STATES = (
    "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING,REQUEUED,REQUEUE_HOLD,REQUEUE_FED,RESIZING,SIGNALING,"
    "SPECIAL_EXIT,STAGE_OUT,STOPPED"
)

_SEPARATOR = "\x1f"
_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "n/a"})
_NODE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_GRES = re.compile(r"[A-Za-z0-9_.,:+/-]{1,8192}")
_FIELD = re.compile(r"[A-Za-z]{1,40}")
_NODE_START = re.compile(r"^NodeName=", re.MULTILINE)
_NODE_KEY = re.compile(
    r"(?:^|(?<= ))(NodeName|Gres|GresUsed|State|Partitions|ActiveFeatures|CPUAlloc|CPUTot|Reason)="
    r"((?<=Reason=).*|\S*)",
    re.DOTALL,
)
_WHO_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*\Z")
_THROTTLE = re.compile(r"%(\d+)\Z")


class CliClient:
    """`SlurmClient` over Slurm's own commands.

    Args:
        bin_dir: directory of squeue, scontrol and scancel; None: found on PATH.
        slurm_conf: value of SLURM_CONF for them; None: this process's, if it has one.
        timeout: seconds after which a command counts as failed.
    """

    def __init__(
        self, bin_dir: str | Path | None = None, slurm_conf: str | Path | None = None, timeout: float = 20.0
    ) -> None:
        self._bin = str(bin_dir) if bin_dir else ""
        self._timeout = timeout
        conf = str(slurm_conf) if slurm_conf else os.environ.get("SLURM_CONF", "")
        self._env = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "LC_ALL": "C.UTF-8",
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # array task lists uncut
            **({"SLURM_CONF": conf} if conf else {}),
        }
        self._version: tuple[int, int] | None = None
        #: commands run so far, for reports and tests
        self.calls = 0

    # -- observe -----------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRow]:
        """One squeue call; see SlurmClient."""
        mark = f"{_SEPARATOR}{secrets.token_hex(8)}{_SEPARATOR}"
        output = self._run(*squeue_command(mark))
        return merge_partitions(parse_jobs(output, mark))

    def nodes(self) -> list[NodeRow]:
        """One scontrol call; see SlurmClient."""
        return parse_nodes(self._run(*NODES_COMMAND))

    def default_partition(self) -> str:
        """The one that sinfo marks with a star."""
        names = self._run("sinfo", "-h", "-a", "-o", "%P").split()
        return next((name[:-1] for name in names if name.endswith("*")), "")

    def version(self) -> tuple[int, int]:
        """Release of the commands; asked once."""
        if self._version is None:
            self._version = parse_version(self._run("squeue", "--version"))
        return self._version

    # -- change ------------------------------------------------------------------------------------------------

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """One scontrol process for all updates; nodes that get the same string share one request."""
        by_gres: dict[str, list[str]] = {}
        for node, gres in updates.items():
            if not _NODE_NAME.fullmatch(node) or not _GRES.fullmatch(gres):
                raise ValueError(f"node {node!r} or gres {gres!r} cannot be handed to scontrol")
            by_gres.setdefault(gres, []).append(node)
        requests = [
            ("update", "NodeName=" + ",".join(some), f"Gres={gres}")
            for gres, names in by_gres.items()
            for some in _chunks(names, 256)
        ]
        if not requests:
            return
        if len(requests) > 1:
            try:
                self._run("scontrol", "--quiet", stdin="".join(" ".join(r) + "\n" for r in requests))
                return
            except SlurmError:
                pass  # scontrol does not say which of many it refused; one by one it does, and repeating does no harm
        refused = []
        for request in requests:
            try:
                self._run("scontrol", *request)
            except SlurmError as error:
                refused.append(error)
        if refused:
            raise SlurmError(
                "; ".join(str(error) for error in refused[:5])
                + (f"; and {len(refused) - 5} more" if len(refused) > 5 else ""),
                refused[0].command,
                refused[0].exit_code,
                refused[0].stderr,
            )

    def update_job(self, job_id: int, **fields: str) -> None:
        """`scontrol update JobId=...`; each field is one argument, so its text needs no quoting."""
        for key, value in fields.items():
            if not _FIELD.fullmatch(key) or "\0" in value:
                raise ValueError(f"{key}={value!r} cannot be handed to scontrol")
        self._run("scontrol", "update", f"JobId={int(job_id)}", *(f"{k}={v}" for k, v in fields.items()))

    def requeue(self, job_id: int) -> None:
        """`scontrol requeue`."""
        self._run("scontrol", "requeue", str(int(job_id)))

    def hasten(self, job_id: int) -> None:
        """`scontrol update StartTime=now+2`.

        Not `now`: slurmd takes a credential of the same second in which it was told to kill the job for a revoked one
        and refuses the new run, which ends the job as FAILED ("already killed, do not launch batch job").
        """
        self.update_job(job_id, StartTime="now+2")

    def hold(self, job_id: int) -> None:
        """`scontrol hold`."""
        self._run("scontrol", "hold", str(int(job_id)))

    def release(self, job_id: int) -> None:
        """`scontrol release`."""
        self._run("scontrol", "release", str(int(job_id)))

    def cancel(self, job_id: int) -> None:
        """`scancel --quiet`, which is content with a job that has ended or gone."""
        self._run("scancel", "--quiet", str(int(job_id)))

    # -- processes ---------------------------------------------------------------------------------------------

    def _run(self, program: str, *arguments: str, stdin: str = "") -> str:
        command = [f"{self._bin}/{program}" if self._bin else program, *arguments]
        self.calls += 1
        try:
            done = subprocess.run(
                command,
                input=stdin.encode(),
                capture_output=True,
                timeout=self._timeout,
                env=self._env,
                check=False,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"{program} did not answer within {self._timeout:g} s; is slurmctld running and not overloaded?",
                command,
            ) from None
        except OSError as error:
            raise SlurmError(
                f"{program} cannot be started ({error.strerror}: {command[0]}); install slurm-client or set slurm_bin",
                command,
            ) from None
        stderr = done.stderr.decode("utf-8", "backslashreplace").strip()
        if done.returncode:
            raise SlurmError(
                f"`{_shown(program, arguments)}` failed with exit code {done.returncode}: "
                + (_short(stderr) or "no reason given"),
                command,
                done.returncode,
                stderr[:2000],
            )
        return done.stdout.decode("utf-8", "surrogateescape")


def squeue_command(mark: str) -> tuple[str, ...]:
    """The squeue call whose output `parse_jobs` reads; `mark` must not be guessable."""
    return (
        "squeue",
        "--noheader",
        "--all",
        "--priority",
        "--sort=-p,i",
        f"--states={JOB_STATES}",
        "--Format=" + _squeue_format(mark),
    )


NODES_COMMAND = ("scontrol", "--details", "--oneliner", "show", "node")


def _squeue_format(mark: str) -> str:
    plain = [f"{name}:0{_SEPARATOR}" for name in SQUEUE_FIELDS[:-1]] + [f"{SQUEUE_FIELDS[-1]}:0{mark}"]
    return ",".join([*plain, *(f"{name}:0{mark}" for name in _TEXTS)])


def parse_jobs(output: str, mark: str) -> list[JobRow]:
    """Rows of squeue's output as `SQUEUE_FIELDS`, then the texts, each followed by `mark`; raises SlurmError.

    squeue ends a row with a newline; texts may hold newlines too, so rows are told apart by the marks alone.
    """
    pieces = output.split(mark)
    tail = pieces.pop()
    per_row = 1 + len(_TEXTS)
    if tail.strip("\n") or len(pieces) % per_row:
        raise SlurmError(f"squeue's output breaks off or is not understood near {tail[-80:]!r}")
    rows = []
    for start in range(0, len(pieces), per_row):
        plain, name, comment = pieces[start : start + per_row]
        values = plain.removeprefix("\n").split(_SEPARATOR)
        if len(values) != len(SQUEUE_FIELDS):
            raise SlurmError(
                f"squeue printed {len(values)} fields where {len(SQUEUE_FIELDS)} were asked for: {plain[:200]!r}"
            )
        try:
            rows.append(_job(dict(zip(SQUEUE_FIELDS, values, strict=True)), name, comment))
        except (ValueError, NodeListError, TimeFormError) as error:
            raise SlurmError(f"squeue's row for job {values[0][:20]!r} is not understood: {error}") from error
    return rows


def _job(row: Mapping[str, str], name: str, comment: str) -> JobRow:
    task = _text(row["ArrayTaskID"])
    state = row["State"]
    throttle = _THROTTLE.search(task) if task else None
    limit = row["TimeLimit"]
    return JobRow(
        job_id=int(row["JobID"]),
        array_job=int(row["ArrayJobID"]) if task else None,
        array_task=task,
        het_job=_number(row["HetJobID"]) or None,
        uid=int(row["UserID"]),
        user=row["UserName"],
        account=_text(row["Account"]) or "",
        partition=_text(row["Partition"]) or "",
        name=name,
        state=state,
        reason=_text(row["Reason"]) or "",
        priority=_number(row["PriorityLong"]) or 0,
        submit=_time(row["SubmitTime"]) or 0.0,
        start=_time(row["StartTime"]),
        end=_time(row["EndTime"]),
        time_limit_s=None if limit in _NOTHING or limit in ("INVALID", "Partition_Limit") else _seconds(limit),
        nodes=expand(_text(row["NodeList"]) or ""),
        num_nodes=max(1, _number(row["NumNodes"].partition("-")[0]) or 1),
        requested_nodes=_text(row["ReqNodes"]) or "",
        gres=_text(row["tres-per-node"]) or "",
        comment="" if comment == "(null)" else comment,
        restarts=_number(row["RestartCnt"]) or 0,
        eligible=_time(row["EligibleTime"]),
        features=_text(row["Feature"]) or "",
        cpus=_number(row["NumCPUs"]) or 0,
        tasks=count_tasks(task) if task and state == "PENDING" else 1,
        throttle=int(throttle[1]) if throttle else None,
    )


def count_tasks(expression: str) -> int:
    """How many tasks an array expression names: "4-400:2%4" is 199, "1,3,5" is 3.

    squeue puts a list in brackets at times. Raises ValueError.
    """
    total = 0
    for part in expression.partition("%")[0].strip("[]").split(","):
        span, _, step = part.partition(":")
        low, dash, high = span.partition("-")
        total += (int(high) - int(low)) // int(step or 1) + 1 if dash else int(low) >= 0
    return total


def parse_nodes(output: str) -> list[NodeRow]:
    """Rows of `scontrol -d -o show node`; raises SlurmError, also where there is no node at all."""
    starts = [match.start() for match in _NODE_START.finditer(output)]
    if not starts or output[: starts[0]].strip():
        raise SlurmError(f"scontrol show node printed what is no list of nodes: {output[:200]!r}")
    return [_node(output[start:end]) for start, end in zip(starts, [*starts[1:], len(output)], strict=True)]


def _node(text: str) -> NodeRow:
    values: dict[str, str] = {}
    for match in _NODE_KEY.finditer(text):
        values.setdefault(match[1], match[2])
    name = values.get("NodeName", "")
    state = values.get("State", "")
    if not name or not state or "Gres" not in values or "GresUsed" not in values:
        raise SlurmError(f"scontrol's row for node {name!r} lacks its state or gres: {text[:200]!r}")
    flags = {flag for flag in re.split(r"[+ ]", state.rstrip("*~#!%$@^-")) if flag}
    if "*" in state:
        flags.add("NOT_RESPONDING")
    try:
        configured = gres_list.parse(_text(values["Gres"]))
        used = gres_list.counts(_text(values["GresUsed"]), "mig")
    except GresError as error:
        raise SlurmError(f"gres of node {name} is not understood: {error}") from error
    return NodeRow(
        name=name,
        states=frozenset(flags),
        gres={g.type: g.count for g in configured if g.name == "mig" and g.type is not None},
        used=used,
        other_gres=",".join(str(g) for g in configured if g.name != "mig"),
        partitions=tuple(p for p in (_text(values.get("Partitions", "")) or "").split(",") if p),
        reason=_WHO_WHEN.sub("", values.get("Reason", "")).strip(),
        features=frozenset(f for f in (_text(values.get("ActiveFeatures", "")) or "").split(",") if f),
        cpus=_number(values.get("CPUTot", "")) or 0,
        cpus_used=_number(values.get("CPUAlloc", "")) or 0,
    )


def _text(value: str) -> str | None:
    return None if value in _NOTHING else value


def _number(value: str) -> int | None:
    return int(value) if value.isdigit() else None


def _time(value: str) -> float | None:
    return float(value) if value.isdigit() and value != "0" else None


def _seconds(value: str) -> int | None:
    seconds = parse_duration(value)
    return None if seconds is None else int(seconds)


def _chunks(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _short(text: str) -> str:
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= 300 else line[:300] + "..."


def _shown(program: str, arguments: Iterable[str]) -> str:
    words = [program, *(ascii(a)[1:-1] for a in arguments)]
    line = " ".join(words)
    return line if len(line) <= 200 else line[:200] + "..."

"""What squeue and `scontrol show node` print, read into rows.

Job names and comments are free text: they may hold newlines, separators and bytes that are no UTF-8. They stand last in
a row, between separators that hold 64 random bits of this one call, so no text written before the call can imitate one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.times import TimeFormError, parse_duration

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
_NODE_START = re.compile(r"^NodeName=", re.MULTILINE)
_NODE_KEY = re.compile(
    r"(?:^|(?<= ))(NodeName|Gres|GresUsed|State|Partitions|ActiveFeatures|CPUAlloc|CPUTot|Reason)="
    r"((?<=Reason=).*|\S*)",
    re.DOTALL,
)
_WHO_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*\Z")
_THROTTLE = re.compile(r"%(\d+)\Z")


def new_mark() -> str:
    """A separator that no text written before can hold."""
    return f"{_SEPARATOR}{secrets.token_hex(8)}{_SEPARATOR}"


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


#: squeue call whose output `parse_gres` reads
GRES_COMMAND = (
    "squeue",
    "--noheader",
    "--all",
    "--array",
    f"--states={JOB_STATES}",
    "--Format=JobID:0|,tres-per-node:0",
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


def parse_gres(output: str) -> dict[int, str]:
    """GRES by job id from the output of `GRES_COMMAND`; raises SlurmError."""
    found = {}
    for row in output.splitlines():
        job, bar, text = row.partition("|")
        if not bar or not job.isdigit():
            raise SlurmError(f"squeue's row {row[:80]!r} is not understood")
        found[int(job)] = _text(text) or ""
    return found


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

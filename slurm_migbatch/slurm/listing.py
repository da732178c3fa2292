"""Parse the output of squeue and `scontrol show node` into rows.

Users control many fields of a job (name, comment, account, GRES, features): newlines, separators,
bytes that are not UTF-8. So each field of squeue's output is followed by a mark that holds 64 random bits of this one
call, which no text written before the call can imitate. scontrol has no such marks. A node's texts are written by
administrators and by root of that node (`Arch=`, `OS=`, `Version=`), and may look like rows of other nodes: nodes that
are listed more than once are shown again, each followed by the name of a node that cannot exist (`alone_commands`).

A row that can be split but not parsed must not hide all others. A job's is kept with
its id and the state UNREAD: the job exists, and nothing else is known of it. A node's is dropped, as if Slurm did
not list the node.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from sys import intern
from typing import Final, NamedTuple

from slurm_migbatch.slurm import dependencies
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import UNREAD, WHOLE, JobRow, NodeRow, SlurmError, row_of
from slurm_migbatch.slurm.fields import fields_of, reason_of
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.states import ENDED, WAITING, checked_reason, checked_state
from slurm_migbatch.slurm.taskexpr import count_tasks
from slurm_migbatch.slurm.times import TimeFormError, parse_duration, parse_time

#: squeue --Format fields in the order of a row; the same names work from 22.05 to 26.05
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
    "Name",
    "Comment",
    "GroupID",
    "QOS",
    "WCKey",
    "Dependency",
    "MinMemory",
    "tres-alloc",
    "OverSubscribe",
)


class SharingField(NamedTuple):
    """The last field of a row, which shows whether a job shares its nodes, and its value for --exclusive.

    Since 26.05 OverSubscribe is NO for most jobs.
    """

    field: str
    alone: str


_OVERSUBSCRIBE: Final = SharingField(SQUEUE_FIELDS[-1], "NO")
_EXCLUSIVE: Final = SharingField("Exclusive", "NODE")

_STATE = SQUEUE_FIELDS.index("State")
#: of the largest number that Slurm has, of 64 bits; root of a node may write others into the name of its system
_DIGITS = 20
#: widths of columns; others are not truncated
_WIDTHS = {"Dependency": dependencies.NARROW}
#: names that scontrol is asked to show in one command
_ALONE = 256
_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "n/a"})
_OWNER: Final = re.compile(r"(\S+)\([0-9]+\)")
_NODE_START = re.compile(r"^NodeName=", re.MULTILINE)
_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_THROTTLE = re.compile(r"%(\d+)\Z")
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMGTPE]?)\Z")
_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3, "E": 1024**4}


def new_mark() -> str:
    """Return the field terminator of one squeue call; no text written before can contain it."""
    return f"\x1f{secrets.token_urlsafe(8)}"


def sharing_of(version: tuple[int, int]) -> SharingField:
    """Return which field a release of Slurm has."""
    return _EXCLUSIVE if version >= (26, 5) else _OVERSUBSCRIBE


def squeue_command(mark: str, *, ordered: bool = True, sharing: SharingField = _OVERSUBSCRIBE) -> tuple[str, ...]:
    """Return the squeue command whose output `parse_jobs` reads; `mark` must not be guessable.

    Jobs come in the order in which Slurm considers them: priority, then submit time, then id
    (https://slurm.schedmd.com/priority_multifactor.html). A requeue sets a new submit time. Jobs of several partitions
    have a row for each. Neither is so if not `ordered`.

    Without --states squeue lists all jobs that are pending, hold resources or release them. With it, it leaves out
    those with a flag that is not named, such as EXPEDITING since 25.11, and refuses names that its release lacks.
    """
    order = ("--priority", "--sort=-p,V,i") if ordered else ()
    return ("squeue", "--noheader", "--all", *order, _columns((*SQUEUE_FIELDS[:-1], sharing.field), mark))


def field_command(mark: str, field: str, *options: str, width: int = 0) -> tuple[str, ...]:
    """Return the squeue command whose output `parse_field` reads: one field of jobs, not truncated if `width` is 0."""
    return ("squeue", "--noheader", "--all", *options, _columns(("JobID", field), mark, {field: width}))


def ended_command(mark: str, *options: str) -> tuple[str, ...]:
    """Return the squeue command whose output `parse_ended` reads, of jobs in all states.

    squeue refuses a list of states if its release lacks one of them.
    """
    columns = _columns((*SQUEUE_FIELDS, "exit_code"), mark)
    return ("squeue", "--noheader", "--all", "--states=all", *options, columns)


def only_jobs(jobs: Sequence[object]) -> str:
    """Return squeue's option for these jobs; one at least, and it may no longer exist: alone that would be an error."""
    return f"--jobs={','.join(map(str, jobs))},{jobs[-1]}"


NODES_COMMAND = ("scontrol", "--details", "--oneliner", "show", "node")


def _columns(fields: Sequence[str], mark: str, widths: Mapping[str, int] = _WIDTHS) -> str:
    return "--Format=" + ",".join(f"{name}:{widths.get(name, 0)}{mark}" for name in fields)


def parse_jobs(output: str, mark: str, sharing: SharingField = _OVERSUBSCRIBE) -> list[JobRow]:
    """Return the rows of the output of `squeue_command`; an invalid one is UNREAD. Raises SlurmError."""
    return [_job_or_unread(values, sharing.alone) for values in _records(output, mark, len(SQUEUE_FIELDS))]


def parse_ended(output: str, mark: str) -> list[tuple[JobRow, str]]:
    """Return the rows of jobs that have ended from the output of `ended_command`, each with its exit code.

    Raises SlurmError.
    """
    records = _records(output, mark, len(SQUEUE_FIELDS) + 1)
    return [(_job_or_unread(values[:-1], ""), values[-1]) for values in records if values[_STATE] in ENDED]


class JobReader:
    """Parse successive listings of the queue like `parse_jobs`.

    Rows that squeue prints unchanged are the same objects and are not parsed again: in a long queue few
    change from one second to the next. A digest of each printed row is kept. Its fields are joined by a secret
    text, so that rows with different fields have different digests.
    """

    def __init__(self) -> None:
        self._joint = new_mark()
        self._rows: dict[bytes, JobRow] = {}

    def read(self, output: str, mark: str, sharing: SharingField = _OVERSUBSCRIBE) -> list[JobRow]:
        """Return the rows of one listing; an invalid one is UNREAD. Raises SlurmError."""
        before, current, rows = self._rows, {}, []
        for values in _records(output, mark, len(SQUEUE_FIELDS)):
            text = self._joint.join(values).encode("utf-8", "surrogateescape")
            digest = sha256(text).digest()
            row = before.get(digest)
            if row is None:
                row = _job_or_unread(values, sharing.alone)
            current[digest] = row
            rows.append(row)
        self._rows = current
        return rows


def parse_field(output: str, mark: str) -> dict[int, str]:
    """Return the field by job id from the output of `field_command`, empty for none; raises SlurmError."""
    return {_id(job): _text(text) or "" for job, text in _records(output, mark, 2)}


def _records(output: str, mark: str, size: int) -> Iterator[tuple[str, ...]]:
    """Yield the fields of each row, of which the first is the job id; raises SlurmError if the output is truncated.

    squeue ends a row with a newline; fields may hold newlines too, so only the marks separate rows.
    """
    fields = output.split(mark)
    tail = fields.pop()
    if tail.strip("\n") or len(fields) % size:
        raise SlurmError(f"squeue's output is truncated or malformed near {tail[-80:]!r}")
    values = iter(fields)
    return zip(*[values] * size, strict=True)


def _id(text: str) -> int:
    """Return the number after the newline that ends the previous row; raises SlurmError."""
    digits = text.rpartition("\n")[2]
    if not (digits.isascii() and digits.isdigit()):
        raise SlurmError(f"squeue printed {text[:80]!r} instead of a job id")
    return int(digits)


def _job_or_unread(values: Sequence[str], alone: str) -> JobRow:
    job_id = _id(values[0])
    try:
        return _job(job_id, values, alone)
    except (ValueError, NodeListError, TimeFormError) as error:
        return JobRow(job_id, state=UNREAD, reason=str(error))


def _job(job_id: int, values: Sequence[str], alone: str) -> JobRow:
    """Return the row for the values of `SQUEUE_FIELDS`. Texts that many jobs share are interned.

    `alone`: see `SharingField`.
    """
    (
        _, array_job, task, het_job, restarts, uid, user, account, partition, state, reason, priority, submit,
        eligible, start, end, limit, nodes, num_nodes, requested, gres, features, cpus, name, comment, gid, qos,
        wckey, dependency, memory, tres, shares,
    ) = values  # fmt: skip
    state, account = intern(checked_state(state)), _shared(account)
    array_task = _text(task)
    throttle = _THROTTLE.search(array_task) if array_task else None
    least_nodes = max(1, _number(num_nodes.partition("-")[0]) or 1)
    memory_per_node, memory_per_cpu = _memory(memory, tres, least_nodes)
    return row_of(
        job_id,
        int(array_job) if array_task else None,
        array_task,
        _number(het_job) or None,
        int(uid),
        intern(user),
        account,
        _shared(partition),
        name,
        state,
        checked_reason(_shared(reason), account),
        _number(priority) or 0,
        moment(submit) or 0.0,
        moment(start),
        moment(end),
        _limit(limit),
        _nodes(nodes),
        least_nodes,
        _shared(requested),
        _shared(gres),
        "" if comment == "(null)" else comment,
        _number(restarts) or 0,
        moment(eligible),
        _shared(features),
        _number(cpus) or 0,
        count_tasks(array_task) if array_task and state in WAITING else 1,
        int(throttle[1]) if throttle else None,
        "",  # reservation; see `reservations.of_jobs`
        _number(gid),
        _shared(qos),
        _shared(wckey),
        dependencies.jobs_waited_for(dependency, dependencies.NARROW) if ":" in dependency else (),
        memory_per_node,
        memory_per_cpu,
        None,  # time_min_s; see `reservations.with_least_times`
        shares == alone,
    )


@lru_cache(maxsize=1024)
def _memory(requested: str, tres: str, num_nodes: int) -> tuple[int, int]:
    """Return the MiB that a job requests on each node (`WHOLE`: all of them) and for each CPU; one of them is 0.

    squeue does not show which of them MinMemory is: the memory in all tells. A job that has started shows none if
    memory is no consumable resource; then it does not matter.
    """
    least, total = _mib(requested), _mib(next((word[4:] for word in tres.split(",") if word.startswith("mem=")), ""))
    if least is None:
        return 0, 0
    if least == 0:
        return WHOLE, 0
    return (least, 0) if not total or least * num_nodes == total else (0, least)


def _mib(text: str) -> int | None:
    match = _MEMORY.match(text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def _shared(value: str) -> str:
    """Return the interned text; empty if squeue printed a placeholder for no value."""
    return "" if value in _NOTHING else intern(value)


def _nodes(text: str) -> tuple[str, ...]:
    if text in _NOTHING:
        return ()
    return expand(text) if "[" in text or "," in text else _node_alone(text)


_node_alone = lru_cache(maxsize=1 << 15)(expand)


@lru_cache(maxsize=1024)
def _limit(text: str) -> int | None:
    """Return a time limit in seconds; None for none."""
    return None if text in _NOTHING or text in ("INVALID", "Partition_Limit") else _seconds(text)


def alone_commands(names: Sequence[str]) -> Iterator[tuple[Sequence[str], str, tuple[str, ...]]]:
    """Yield commands that show nodes in a form that no text of a node can imitate; each with its names and its mark.

    scontrol shows the nodes of a list in its order, and reports names that are no node in between. It exits with 1.
    """
    for start in range(0, len(names), _ALONE):
        named = names[start : start + _ALONE]
        # letters only: Slurm takes digits at the end of a name for a number
        mark = "no-node-" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(16))
        yield named, mark, (*NODES_COMMAND, ",".join(f"{name},{mark}" for name in named))


def parse_alone(output: str, names: Sequence[str], mark: str) -> dict[str, str] | None:
    """Return the row of each node from the output of one of `alone_commands`, without names that are no nodes.

    None if the output is truncated.
    """
    texts = output.split(f"Node {mark} not found\n")
    if len(texts) != len(names) + 1:
        return None
    return {name: text for name, text in zip(names, texts, strict=False) if text.startswith(f"NodeName={name} ")}


def parse_nodes(
    output: str,
    unread: Callable[[str, str], object] = lambda name, why: None,
    alone: Callable[[Sequence[str]], Mapping[str, str]] = lambda names: {},
) -> list[NodeRow]:
    """Return the rows of `scontrol -d -o show node`, without those that cannot be read.

    Raises SlurmError if none can.

    Args:
        unread: called with the name of each dropped node, and why.
        alone: returns the rows of nodes by name; called for those that are listed more than once, because a text of one
            node may look like the row of another. A node without a row there is dropped.
    """
    starts = [match.start() for match in _NODE_START.finditer(output)]
    why = f"an invalid list of nodes: {output[:200]!r}"
    if not starts or output[: starts[0]].strip():
        raise SlurmError(f"scontrol show node printed {why}")
    listed: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(output)], strict=True):
        listed.setdefault(re.split(r"[=\s]", output[start:end], maxsplit=2)[1], []).append(output[start:end])
    twice = [name for name, texts in listed.items() if len(texts) > 1 and _NODE_NAME.fullmatch(name)]
    shown = alone(twice) if twice else {}
    rows: list[NodeRow] = []
    for name, texts in listed.items():
        try:
            rows.append(_node(_own_text(name, texts, shown)))
        except (SlurmError, GresError) as error:
            why = str(error)
            unread(name, why)
    if not rows:
        raise SlurmError(f"scontrol show node printed {why}")
    return rows


def _own_text(name: str, texts: Sequence[str], shown: Mapping[str, str]) -> str:
    """Return the row of a node among the texts that begin with its name. Raises SlurmError if that is unknown."""
    if not _NODE_NAME.fullmatch(name):
        raise SlurmError(f"{name[:80]!r} is not the name of a node")
    if len(texts) == 1:
        return texts[0]
    if name not in shown:
        raise SlurmError(f"scontrol shows it {len(texts)} times; check the comments and extra fields of the nodes")
    return re.split(r"\n(?=NodeName=)", shown[name], maxsplit=1)[0]


def _node(text: str) -> NodeRow:
    values = fields_of(text)
    name = values.get("NodeName", "")
    state = values.get("State", "")
    cpus, cpus_used = _number(values.get("CPUTot", "")), _number(values.get("CPUAlloc", ""))
    present = {
        "State": bool(state),
        "Gres": "Gres" in values,
        "GresUsed": "GresUsed" in values or not _text(values.get("Gres", "")),
        "CPUTot": cpus is not None,
        "CPUAlloc": cpus_used is not None,
    }
    if cpus is None or cpus_used is None or not all(present.values()):
        lacking = ", ".join(key for key, found in present.items() if not found)
        raise SlurmError(f"a row for node {name!r} without {lacking}: {text[:200]!r}")
    # without those that CoreSpecCount or CpuSpecList reserves for the system, which no job gets
    cpus = _number(values.get("CPUEfctv", "")) or cpus
    memory = (_number(values.get("RealMemory", "")) or 0) - (_number(values.get("MemSpecLimit", "")) or 0)
    flags = {flag for flag in re.split(r"[+ ]", state.rstrip("*~#!%$@^-")) if flag}
    if "*" in state:
        flags.add("NOT_RESPONDING")
    configured = gres_list.parse(_text(values["Gres"]))
    used = gres_list.counts(_text(values.get("GresUsed", "")), "mig")  # absent for a node without gres from 24.11 on
    return NodeRow(
        name=name,
        states=frozenset(flags),
        gres={g.type: g.count for g in configured if g.name == "mig" and g.type is not None},
        used=used,
        other_gres=",".join(str(g) for g in configured if g.name != "mig"),
        partitions=tuple(p for p in (_text(values.get("Partitions", "")) or "").split(",") if p),
        reason=reason_of(text),
        features=frozenset(f for f in (_text(values.get("ActiveFeatures", "")) or "").split(",") if f),
        cpus=cpus,
        cpus_used=cpus_used,
        memory=max(0, memory),
        memory_used=_number(values.get("AllocMem", "")) or 0,
        owner=owner[1] if (owner := _OWNER.fullmatch(values.get("Owner", ""))) else "",
    )


def _text(value: str) -> str | None:
    return None if value in _NOTHING else value


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None


def moment(value: str) -> float | None:
    """Return a time in unix seconds, None for a word in place of a time; raises TimeFormError.

    SLURM_TIME_FORMAT=%s asks for seconds. Releases differ in what follows it, so Slurm's own form is read as well: a
    job without times would not be served.
    """
    if value.isdigit():
        return float(value) or None
    return parse_time(value) if value[:1].isdigit() else None


def _seconds(value: str) -> int | None:
    seconds = parse_duration(value)
    return None if seconds is None else int(seconds)

"""Parse jobs, nodes, partitions and reservations of Slurm's REST API into rows.

Numbers are `{"set": true, "infinite": false, "number": 3}` if Slurm has "none" and "no limit". The job list
includes jobs that have ended, as long as slurmctld keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import UNREAD, WHOLE, JobRow, NodeRow, SlurmError
from slurm_migbatch.slurm.dependencies import jobs_waited_for
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.reservations import NodeReservation
from slurm_migbatch.slurm.states import ENDED, PRESENT, WAITING, checked_reason
from slurm_migbatch.slurm.taskexpr import count_tasks

#: flags of a job's state and, at the end, base states; squeue shows the first of these that a job has
_SHOWN: Final = (
    "COMPLETING",
    "STAGE_OUT",
    "CONFIGURING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "REVOKED",
    "RESV_DEL_HOLD",
    "SIGNALING",
    "PENDING",
    "RUNNING",
    "SUSPENDED",
)
_THROTTLE: Final = re.compile(r"%(\d+)\Z")
_ODD: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, NodeListError)


def jobs(found: Mapping[str, Any], now: float, *, reserved: bool, coming: bool = False) -> list[JobRow]:
    """Return the jobs that are pending or hold resources; one with an invalid record is UNREAD.

    Args:
        found: the answer to `jobs/`.
        now: the current time, unix seconds.
        reserved: whether to include each job's requested reservation.
        coming: whether to include the --time-min of pending jobs.

    Raises:
        SlurmError: there is no list of jobs.
    """
    rows = []
    for record in records(found, "jobs"):
        job_id = record.get("job_id")
        if not isinstance(job_id, int):
            raise SlurmError(f"slurmrestd returned a job without an id: {str(record)[:200]}")
        try:
            states = frozenset(_texts(record, "job_state"))
            if states.intersection(PRESENT) or not states.intersection(ENDED):
                row = _job(job_id, record, states, now, reserved)
                least_s = _number(record, "time_minimum", 0) * 60 if coming and row.pending else 0
                rows.append(replace(row, time_min_s=least_s) if least_s else row)
        except _ODD as error:
            rows.append(JobRow(job_id, state=UNREAD, reason=f"{type(error).__name__}: {error}"))
    return rows


def records(found: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of records of an answer; raises SlurmError if there is none."""
    listed = found.get(name)
    if not isinstance(listed, list) or not all(isinstance(record, dict) for record in listed):
        raise SlurmError(f"slurmrestd answered without a list of {name}: {str(found)[:200]}")
    return listed


def _job(job_id: int, job: Mapping[str, Any], states: frozenset[str], now: float, reserved: bool) -> JobRow:
    state = next((state for state in _SHOWN if state in states), "")
    if not state:
        raise ValueError(f"its state {'+'.join(sorted(states))!r} is unknown")
    waiting, array_job = _text(job, "array_task_string"), _number(job, "array_job_id")
    task_id = _given(job, "array_task_id")
    task = waiting or (str(task_id) if array_job and task_id is not None else None)
    if waiting and "..." in waiting:
        raise ValueError("slurmrestd truncates lists of array tasks; set SLURM_BITSTR_LEN=0 in its environment")
    throttle = _THROTTLE.search(waiting)
    limit, account = _number(job, "time_limit"), _text(job, "account")
    endless = isinstance(job["time_limit"], dict) and job["time_limit"].get("infinite")
    end = _time(job, "end_time")
    return JobRow(
        job_id=job_id,
        array_job=array_job if task is not None else None,
        array_task=task,
        het_job=_number(job, "het_job_id") or None,
        uid=_set(job, "user_id"),
        user=_text(job, "user_name"),
        account=account,
        partition=_text(job, "partition"),
        name=_text(job, "name"),
        state=state,
        reason=_text(job, "state_description") or checked_reason(_text(job, "state_reason"), account),
        priority=_number(job, "priority"),
        submit=_time(job, "submit_time") or 0.0,
        start=_time(job, "start_time"),
        end=None if endless and end and end > now else end,  # in squeue's form
        time_limit_s=limit * 60 or None,
        nodes=expand(_text(job, "nodes")),
        num_nodes=max(1, _number(job, "node_count")),
        requested_nodes=_text(job, "required_nodes"),
        gres=_text(job, "tres_per_node"),
        comment=_text(job, "comment"),
        restarts=_set(job, "restart_cnt"),
        eligible=_time(job, "eligible_time"),
        features=_text(job, "features"),
        cpus=_number(job, "cpus"),
        tasks=count_tasks(task) if task is not None and state in WAITING else 1,
        throttle=int(throttle[1]) if throttle else None,
        reservation=_text(job, "resv_name") if reserved else "",
        gid=_set(job, "group_id"),
        qos=_text(job, "qos"),
        wckey=_text(job, "wckey"),
        after=jobs_waited_for(_text(job, "dependency")),
        memory_per_node=_memory_per_node(job),
        memory_per_cpu=_number(job, "memory_per_cpu", 0),
        exclusive="shared" in job and "none" in _texts(job, "shared"),
    )


def nodes(found: Mapping[str, Any], unread: Callable[[str, str], object]) -> list[NodeRow]:
    """Return the rows of the answer to `nodes/`; `unread` is called for each that cannot be read and is left out.

    Raises:
        SlurmError: none can be read.
    """
    rows: list[NodeRow] = []
    for record in records(found, "nodes"):
        try:
            rows.append(_node(record))
        except _ODD as error:
            unread(str(record.get("name")), f"{type(error).__name__}: {error}")
    if not rows:
        raise SlurmError(f"slurmrestd returned no valid node: {str(found)[:200]}")
    return rows


def _node(node: Mapping[str, Any]) -> NodeRow:
    name, states = _text(node, "name"), _texts(node, "state")
    if not name or not states:
        raise ValueError("it has no name, or no state")
    configured = gres_list.parse(_text(node, "gres"))
    return NodeRow(
        name=name,
        states=frozenset(states),
        gres={g.type: g.count for g in configured if g.name == "mig" and g.type is not None},
        used=gres_list.counts(_text(node, "gres_used"), "mig"),
        other_gres=",".join(str(g) for g in configured if g.name != "mig"),
        partitions=tuple(_texts(node, "partitions")),
        reason=_text(node, "reason").strip(),
        features=frozenset(_texts(node, "active_features")),
        cpus=_number(node, "effective_cpus", 0) or _set(node, "cpus"),  # without those reserved for the system
        cpus_used=_set(node, "alloc_cpus"),
        memory=max(0, _number(node, "real_memory", 0) - _number(node, "specialized_memory", 0)),
        memory_used=_number(node, "alloc_memory", 0),
        owner=_text(node, "owner") if "owner" in node else "",
    )


def tiers(found: Mapping[str, Any], unread: Callable[[str, str], object]) -> dict[str, int]:
    """Return the tier of each partition from the answer to `partitions/`.

    Those that cannot be read are left out; `unread` is called for each. Raises SlurmError.
    """
    tiers = {}
    for record in records(found, "partitions"):
        try:
            tiers[_text(record, "name")] = _set(record["priority"], "tier")
        except _ODD as error:
            unread(str(record.get("name")), f"{type(error).__name__}: {error}")
    return tiers


def default_partition(found: Mapping[str, Any]) -> str:
    """Return the default partition from the answer to `partitions/`, empty if none is marked so; raises SlurmError."""
    for partition in records(found, "partitions"):
        flags = partition.get("flags")
        if isinstance(flags, list) and "DEFAULT" in flags:
            return str(partition.get("name"))
    return ""


def reservations(found: Mapping[str, Any], now: float, unread: Callable[[str, str], object]) -> list[NodeReservation]:
    """Return the active reservations from the answer to `reservations/`, and those that begin after `now`.

    Those that cannot be read are left out; `unread` is called for each. Raises SlurmError.
    """
    rows = []
    for record in records(found, "reservations"):
        try:
            nodes = frozenset(expand(_text(record, "node_list")))
            start = _number(record, "start_time")
            end = _number(record, "end_time")  # 0: none
            if nodes and (not end or now < end):
                cpus = re.search(r"(?:^|,)cpu=(\d{1,9})(?:,|$)", record["tres"])
                flags = frozenset(_texts(record, "flags"))
                rows.append(
                    NodeReservation(
                        _text(record, "name"),
                        nodes,
                        flags,
                        int(cpus[1]) if cpus else None,
                        start if start > now else 0.0,
                    )
                )
        except _ODD as error:
            unread(str(record.get("name")), f"{type(error).__name__}: {error}")
    return rows


def _text(record: Mapping[str, Any], name: str) -> str:
    text = "" if record[name] is None else record[name]
    if not isinstance(text, str):
        raise TypeError(f"its {name} is {str(text)[:80]!r} and not a text")
    return text


def _texts(record: Mapping[str, Any], name: str) -> list[str]:
    texts = record[name]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"its {name} is {str(texts)[:80]!r} and not a list of texts")
    return texts


def _given(record: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Return a number, plain or in the form of the module; None if it is unset. Raises TypeError."""
    value = record[name] if default is None else record.get(name, default)
    number = value.get("number") if isinstance(value, dict) and isinstance(value.get("set"), bool) else value
    if not isinstance(number, int) or abs(number) >= 1 << 64:
        raise TypeError(f"its {name} is {str(value)[:80]!r} and not a number")
    return int(number) if number is value or value["set"] else None  # JSON may have true for 1


def _set(record: Mapping[str, Any], name: str) -> int:
    """Return a number that must not be unset."""
    number = _given(record, name)
    if number is None:
        raise TypeError(f"its {name} is unset")
    return number


def _number(record: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a number; 0 if it is unset. `default`: if there is none; else it must be there."""
    return _given(record, name, default) or 0


def _memory_per_node(job: Mapping[str, Any]) -> int:
    """Return MiB, or `WHOLE` for the 0 of a job that is to have all memory."""
    value = job.get("memory_per_node", 0)
    return _number(job, "memory_per_node", 0) or (WHOLE if isinstance(value, dict) and value["set"] else 0)


def _time(record: Mapping[str, Any], name: str) -> float | None:
    return float(_number(record, name)) or None

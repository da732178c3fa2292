"""Provide the simulated Slurm to migbatchd's controller, with the interface `slurm.client.SlurmClient`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from slurm_migbatch.lab.slurm.jobqueue import GRES, PRIORITY
from slurm_migbatch.lab.slurm.records import Facts, positive
from slurm_migbatch.lab.slurm.slurmctld import Slurmctld
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused, on_nodes
from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.slurm.preemption import NO_PREEMPTION, PreemptionRules
from slurm_migbatch.slurm.taskexpr import expand_tasks
from slurm_migbatch.slurm.times import TimeFormError, parse_duration, parse_time

INVALID_JOB: Final = "Invalid job id specified"
INVALID_NODE: Final = "Invalid node name specified"
STARTED: Final = "Job is no longer pending execution"
_GIVEN_UP: Final = "BadConstraints"
_RESOURCES: Final = frozenset(
    {
        "Gres",
        "TresPerNode",
        "TresPerJob",
        "NumNodes",
        "ReqNodeList",
        "ExcNodeList",
        "Features",
        "Partition",
        "StartTime",
    }
)
"""Keys of an update that are allowed only for a pending job."""
_TEXTS: Final = {
    "Comment": "comment",
    "Name": "name",
    "JobName": "name",
    "Account": "account",
    "ReqNodeList": "requested_nodes",
    "Features": "features",
    "Partition": "partition",
}
"""Keys of an update that are unchanged fields of a job."""
_TASK = re.compile(r"(\d+)_(\d+)")
_TASKS = re.compile(r"(\d+)_\[([0-9,:%-]+)\]")


class SimulatedSlurm(Slurmctld):
    """A simulated Slurm that refuses what the real one refuses, with the same messages.

    Attributes:
        calls: how often each method was called.
        updates: the GRES that nodes were given, one mapping for each `set_gres`.
        signals, requeues: signals sent to running jobs, and jobs requeued through this client.
        down: whether slurmctld does not answer.
        refuse: names of the methods that fail as a whole.
        before_call, after_call: called with the name of a method that changes jobs, before and after the changes.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.calls: Counter[str] = Counter()
        self.updates: list[dict[str, str]] = []
        self.signals: list[tuple[int, str]] = []
        self.requeues: list[int] = []
        self.down = False
        self.refuse: set[str] = set()
        self.before_call: Callable[[str], object] = lambda request: None
        self.after_call: Callable[[str], object] = lambda request: None

    # -- listings --------------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRow]:
        """See SlurmClient."""
        self._call("jobs", self.settings.listing_s)
        return self.order()

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        """See SlurmClient."""
        return on_nodes(self.jobs(), nodes)

    def nodes(self) -> list[NodeRow]:
        """See SlurmClient."""
        self._call("nodes", self.settings.listing_s)
        return [self.node_row(machine) for machine in self.machines.values()]

    def default_partition(self) -> str:
        """Return the first partition that has nodes."""
        return next((name for machine in self.machines.values() for name in machine.partitions), "")

    def gpu_defaults(self) -> dict[str, GpuDefaults]:
        """Return none: simulated jobs state their CPUs."""
        return {}

    def hidden_partitions(self) -> tuple[str, ...]:
        """Return none."""
        return ()

    def preemption(self) -> PreemptionRules:
        """Return none: the simulated Slurm has no preemption but that of partitions with loans."""
        return NO_PREEMPTION

    def backfill_window_s(self) -> float:
        """See SlurmClient."""
        return self.settings.backfill_window_s

    def version(self) -> tuple[int, int]:
        """See SlurmClient."""
        return self.settings.release

    # -- nodes -----------------------------------------------------------------------------------------------------

    def set_gres(self, updates: Mapping[str, str]) -> None:
        """See SlurmClient."""
        self._call("set_gres")
        self.updates.append(dict(updates))
        refused = {}
        for name, text in updates.items():
            self._costs(self.settings.update_s)
            why = self._set_gres(name, text)
            if why:
                refused[name] = why
        if refused:
            raise SlurmRefused(refused, len(updates))

    def _set_gres(self, name: str, text: str) -> str:
        machine = self.machines.get(name)
        if machine is None:
            return INVALID_NODE
        try:
            entries = gres_list.parse(text)
        except GresError:
            return "Invalid generic resource (gres) specification"
        if any(entry.type is None or entry.count < 1 for entry in entries if entry.name == GRES):
            return "Invalid generic resource (gres) specification"
        machine.other_gres = ",".join(str(entry) for entry in entries if entry.name != GRES)
        self.set_node(name, gres=gres_list.counts(text, GRES))
        return ""

    # -- jobs ------------------------------------------------------------------------------------------------------

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """See SlurmClient."""
        self._change("update_jobs", list(updates), lambda name: self._update(name, updates[name]))

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        """See SlurmClient."""

        def requeue(name: str) -> str:
            rows = self._named(name, split=False)
            for row in rows:
                if row.state in ("RUNNING", "SUSPENDED"):
                    self.requeues.append(row.job_id)
                    self.requeued(row.job_id)
            return "" if rows else INVALID_JOB

        self._change("requeue_all", list(map(str, job_ids)), requeue)

    def suspend(self, job_id: int) -> None:
        """Do what `scontrol suspend` does: the job keeps what it has, and loses its priority."""
        self._put(replace(self.queue[job_id], state="SUSPENDED", priority=0))

    def resume_all(self, job_ids: Iterable[int | str]) -> None:
        """See SlurmClient."""

        def resume(name: str) -> str:
            rows = [row for row in self._named(name, split=False) if row.state == "SUSPENDED"]
            for row in rows:
                self._put(replace(row, state="RUNNING", priority=self._facts[row.job_id].priority))
            return "" if rows else "Requested operation not supported on this system"

        self._change("resume_all", list(map(str, job_ids)), resume)

    def excluded_nodes(self, job_ids: Iterable[int | str]) -> dict[str, str]:
        """See SlurmClient."""
        rows = {str(name): self._named(str(name), split=False) for name in job_ids}
        excluded = {name: self._facts[row[0].job_id].excluded for name, row in rows.items() if row}
        return {name: nodes for name, nodes in excluded.items() if nodes}

    def requeue_ended(self, job_id: int, *, update: Callable[[JobRow], Mapping[str, str]]) -> None:
        """See `daemon.ended.HistoryClient`."""
        self._call("requeue_ended")
        row = self.queue.get(job_id)
        if row is not None:
            raise SlurmError(f"job {job_id} is already pending or running again")
        row = self.taken_back(job_id)
        name = str(job_id) if row.array_job is None else f"{row.array_job}_{row.array_task}"
        try:
            self.update_jobs({name: update(row)})
            self.shorten_requeue_delay(name)
        finally:
            self.release(name)

    def shorten_requeue_delay(self, job_id: int | str) -> None:
        """See SlurmClient."""
        self.calls["shorten_requeue_delay"] += 1
        self.update_jobs({str(job_id): {"StartTime": "now+2"}})

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        """See SlurmClient; the simulated jobs have no steps."""

        def send(job: str) -> str:
            for row in self._named(job, split=False):
                if row.state == "RUNNING" and script:
                    self.signals.append((row.job_id, name))
                    self.nodes_run.signal(row, name)
            return ""

        self._change("signal_all", list(map(str, job_ids)), send)

    def release(self, job_id: int | str) -> None:
        """See SlurmClient."""

        def release(name: str) -> str:
            rows = [row for row in self._named(name) if row.pending]
            for row in rows:
                eligible = self.clock.time() if row.eligible is None else row.eligible
                self._put(replace(row, priority=self._facts[row.job_id].priority, reason="None", eligible=eligible))
            return "" if rows else INVALID_JOB

        self._change("release", [str(job_id)], release)

    def cancel(self, job_id: int | str, *, running: bool = False) -> None:
        """See SlurmClient."""
        self._call("cancel")
        for row in self._named(str(job_id)):
            if row.state == "RUNNING" or not running:
                self.cancelled(row.job_id)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _update(self, name: str, fields: Mapping[str, str]) -> str:
        """Change a job or some tasks of an array; return Slurm's message if it refuses."""
        rows = self._named(name)
        if not rows:
            return INVALID_JOB
        whole_array = int(name) in self.arrays if name.isdigit() else False
        if "ArrayTaskThrottle" in fields and rows[0].array_job is not None:
            self.throttled(rows[0].array_job, int(fields["ArrayTaskThrottle"]) or None)
            rows = [self.queue[row.job_id] for row in rows]
        others = {key: value for key, value in fields.items() if key != "ArrayTaskThrottle"}
        if not others:
            return ""
        waiting = [row for row in rows if row.pending or self._facts[row.job_id].after == "PENDING"]
        if whole_array and waiting:
            rows = waiting  # running tasks stay unchanged, without an error
        for row in rows:
            if why := self._update_row(row, others):
                return why
        return ""

    def _update_row(self, row: JobRow, fields: Mapping[str, str]) -> str:
        facts = self._facts[row.job_id]
        need = replace(facts, node=dict(facts.node), job=dict(facts.job))
        changed: dict[str, Any] = {}
        for key, value in fields.items():
            try:
                why = self._field(key, value, row, need, changed)
            except (GresError, ValueError, TimeFormError) as error:
                why = str(error)
            if why:
                return why
        facts.node, facts.job, facts.excluded = need.node, need.job, fields.get("ExcNodeList", facts.excluded)
        given_up, row = row.reason == _GIVEN_UP, replace(row, **changed)
        if row.pending and {"Gres", "TresPerNode", "TresPerJob", "ReqNodeList", "ExcNodeList", "NumNodes"} & set(
            fields
        ):
            if not self._placing.listed(self._shape(row, facts)):
                row = replace(row, reason=_GIVEN_UP, priority=0)
            elif row.reason in ("Resources", "ReqNodeNotAvail", "Priority", _GIVEN_UP):
                row = replace(row, reason="None", priority=row.priority or facts.priority)
        elif row.pending and given_up:  # any update makes slurmctld examine it again
            reason = "None" if row.reason == _GIVEN_UP else row.reason
            row = replace(row, reason=reason, priority=row.priority or facts.priority)
        self._put(row)
        if row.eligible is not None and row.eligible > self.clock.time():
            self._wake(row.job_id, row.eligible)
        return ""

    def _field(self, key: str, value: str, row: JobRow, need: Facts, changed: dict[str, Any]) -> str:
        """Record one `Key=value` of scontrol update in `need` and `changed`."""
        if key in _RESOURCES and not (row.pending or need.after == "PENDING"):
            return STARTED
        now = self.clock.time()
        if key in ("Gres", "TresPerNode"):
            need.node = self._asked_for(need.node, value)
            changed |= {"gres": self.spelled(value)} if key == "Gres" or not value else {}
        elif key == "TresPerJob":
            need.job = self._asked_for(need.job, value)
        elif key == "NumNodes":
            changed["num_nodes"] = int(value.partition("-")[0])
        elif key == "StartTime":
            moment = parse_time(value, now)
            changed |= {"eligible": max(moment, now) if value != "now" else now}
            changed["reason"] = "BeginTime" if changed["eligible"] > now else "None"
        elif key == "TimeLimit":
            seconds = parse_duration(value)
            changed["time_limit_s"] = None if seconds is None else int(seconds)
        elif key == "Priority":
            held = int(value) == 0
            changed |= {"priority": int(value), "reason": "JobHeldAdmin" if held else "None"}
            changed["eligible"] = None if held else row.eligible
        elif key in _TEXTS:
            changed[_TEXTS[key]] = value
        elif key not in ("ExcNodeList", "AdminComment"):
            return f"Update of this parameter is not supported: {key}={value}"
        return ""

    def _asked_for(self, before: Mapping[str, int], value: str) -> dict[str, int]:
        """Return a job's needs after its GRES were set to `value`.

        An older Slurm adds the new GRES to the old ones; only an empty value removes them, and it removes all.
        """
        counts = gres_list.counts(value, GRES)
        if self.settings.forgets:
            return positive(counts)
        if not value:
            return dict.fromkeys(before, 0)
        return {**before, **positive(counts)}

    # -- names -----------------------------------------------------------------------------------------------------

    def _named(self, name: str, *, split: bool = True) -> list[JobRow]:
        """Return the rows of the jobs that a command names by "123", "123_4" or "123_[5-7]".

        Args:
            split: whether tasks that share their array's row get rows of their own.
        """
        if match := _TASK.fullmatch(name):
            return self._task(int(match[1]), int(match[2]), split)
        if match := _TASKS.fullmatch(name):
            tasks = sorted(set(expand_tasks(match[2])))
            return [row for task in tasks for row in self._task(int(match[1]), task, split)]
        if not name.isdigit():
            return []
        job = int(name)
        if job in self.arrays:
            rows = [row for row in self.queue.values() if row.array_job == job]
            # a split-off task is detached from its array
            return [row for row in rows if not row.pending or row.job_id == job] or rows
        return [self.queue[job]] if job in self.queue else []

    def _task(self, array: int, task: int, split: bool) -> list[JobRow]:
        if array not in self.arrays:
            return []
        if task in self.arrays[array].waiting:
            return [self.split(self.queue[array], task)] if split else [self.queue[array]]
        return [row for row in self.queue.values() if row.array_job == array and row.array_task == str(task)]

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, request: str, costs: float = 0.0) -> None:
        self.calls[request] += 1
        if self.down:
            raise SlurmError("slurmctld does not answer")
        if request in self.refuse:
            raise SlurmError(f"slurmctld refuses to {request}")
        self._costs(costs)

    def _costs(self, seconds: float) -> None:
        if seconds > 0:
            self.clock.sleep(seconds)

    def _change(self, request: str, names: Collection[str], change: Callable[[str], str]) -> None:
        """Apply `change` to each job; if some are refused, the others are still changed."""
        self._call(request)
        self.before_call(request)
        refused = {}
        for name in names:
            self._costs(self.settings.update_s)
            if why := change(name):
                refused[name] = why
        self.after_call(request)
        if refused:
            raise SlurmRefused(refused, len(names))


__all__ = ["PRIORITY", "SimulatedSlurm"]

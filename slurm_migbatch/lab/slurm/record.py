"""Keep migbatchd's record in memory: decisions on submissions, reports of runs, results of array tasks, actions.

It answers the same queries as `daemon.record.WriterRecord` with its database, without delay, and keeps all data for
the whole simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurm_migbatch.daemon.records import record_of
from slurm_migbatch.decide.lending.model import OrderKind
from slurm_migbatch.decide.snapshot import Answers, Questions, TaskRun
from slurm_migbatch.lab.slurm.slurmctld import Slurmctld
from slurm_migbatch.store.progress import RunProgressRow
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.workload.loans import LOAN

Rows = Sequence[Mapping[str, Any]]
_REPORTED = {
    "checkpoint": "checkpoint",
    "ckpt_s": "ckpt_s",
    "items": "items",
    "throughput_per_s": "items_per_s",
    "batch": "batch",
    "steps": "steps",
    "restored": "restored",
}
"""Fields of a `progress` event, and those of `RunProgressRow` that hold them."""


class MemoryRecord:
    """A `daemon.controller.Record` of one simulation.

    Attributes:
        actions: number of actions on jobs that Slurm accepted, by kind: "retype" (a pending `auto` job),
            "throttle" (an array), "move" (each of its two steps), and for elastic training "release", "withdraw",
            "signal", "requeue", "share".
        ended: number of started loans that have ended, by cause (`decide.lending.loan.Cause`).
    """

    available = True

    def __init__(self, slurm: Slurmctld) -> None:
        self._slurm = slurm
        self._decisions: dict[str, Mapping[str, Any]] = {}
        self._runs: dict[int, dict[int, RunProgressRow]] = {}
        self._throttles: dict[int, list[Mapping[str, Any]]] = {}
        self.actions = Counter(dict.fromkeys(("throttle", *(kind.value for kind in OrderKind)), 0))
        self.ended: Counter[str] = Counter()

    # -- input --------------------------------------------------------------------------------------------------------

    def decided(self, decision: SubmitDecision) -> None:
        """Store the submit filter's decision."""
        row = record_of(decision)
        self._decisions[decision.id] = {**row, "facts": {"reason": row["reason"], "predictor": row["predictor"]}}

    def ingested(self, events: Rows) -> None:
        """Store the nodes' reports of runs."""
        for event in events:
            kind = event["kind"]
            if kind not in ("start", "progress", "stop"):
                continue
            runs, restart = self._runs.setdefault(event["job"], {}), event["restart"]
            run = runs.get(restart) or RunProgressRow(event["job"], restart)
            if kind == "start":
                slices = event["slices"]
                profile = slices[0]["profile"] if len(slices) == 1 else None
                run = replace(run, profile=profile, started=event["ts"])
            elif kind == "stop":
                run = replace(run, ended=event["ts"])
            else:
                fields = {field: event[name] for name, field in _REPORTED.items() if name in event}
                run = replace(run, reported=event["ts"], **fields)
            runs[restart] = run

    def supply(self, node: str, at: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """See Record; does nothing, because the simulation does not read it."""

    def save(self, loans: Rows, actions: Rows) -> bool:
        """See Record; loans are only counted, because the service is never restarted."""
        for loan in loans:
            if loan["started"] is not None and loan["ended"] is not None:
                self.ended[loan["cause"]] += 1
        for action in actions:
            if action["dry_run"] or action["outcome"]:
                continue
            waits = action["kind"] == OrderKind.RETYPE.value and LOAN in action["after"]  # unchanged, after its requeue
            self.actions[action["kind"]] += not waits
            if action["kind"] == "throttle":
                self._throttles.setdefault(action["job_id"], []).append(action)
        return True

    def post(self, loans: Rows, actions: Rows) -> None:
        """See Record."""
        self.save(loans, actions)

    # -- queries ------------------------------------------------------------------------------------------------------

    def ask(self, questions: Questions) -> Answers:
        """See Record."""
        return Answers(
            questions,
            [run for job in sorted(questions.progress) for _, run in sorted(self._runs.get(job, {}).items())],
            self._tasks(questions),
            [action for array in sorted(questions.throttled) for action in self._throttles.get(array, ())],
            {name: self._decisions.get(name) for name in questions.decisions},
        )

    def _tasks(self, questions: Questions) -> dict[int, list[TaskRun]]:
        """Return the last run of each task that has started, active ones last."""
        runs_of = {
            array: [
                TaskRun(task.row.start, task.end, task.state)
                for task in self._slurm.ended_tasks.get(array, ())
                if task.row.start is not None
            ]
            for array in sorted(questions.arrays)
        }
        for row in self._slurm.queue.values() if runs_of else ():
            if row.array_job in runs_of and row.start is not None:
                runs_of[row.array_job].append(TaskRun(row.start, None, row.state))
        return runs_of

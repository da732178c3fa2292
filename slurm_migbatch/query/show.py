"""`migbatch show`: one job in detail, as `key: value` lines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

from slurm_migbatch.decide.supply.moves import MOVE, PREEMPT
from slurm_migbatch.mig.text import escaped
from slurm_migbatch.query.questions import JOB, ShowQuestion
from slurm_migbatch.query.redact import allowed, field_for
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report import columns
from slurm_migbatch.report.columns import measured_by, percentage, prediction_error
from slurm_migbatch.report.lines import pair_lines
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.taskexpr import has_task
from slurm_migbatch.slurm.times import format_duration, time_formatter
from slurm_migbatch.store.queries import JobId, RunFilter, RunRow
from slurm_migbatch.store.runquery import MISFIT
from slurm_migbatch.values import replace
from slurm_migbatch.values.figures import digits, gib

_STOPS: Final = {MOVE: "migbatchd, moved", PREEMPT: "migbatchd, preempted"}
_ENDS: Final = frozenset({"PENDING", "CANCELLED"})
_STOPPED_STATES: Final = frozenset({"REQUEUED", "CANCELLED", "PREEMPTED"})


def answer(question: ShowQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the selected runs of a job."""
    job = job_id(question.job)
    with site.record() as store:
        wanted = allowed(rights, RunFilter(jobs=(job,), duplicates=question.duplicates))
        selected = store.runs(wanted)
        if not selected and job.task is not None:  # tasks that have not started, or never did, share one run
            waiting = replace(wanted, jobs=(JobId(job.job),), states=("PENDING",), start=time.time())
            cancelled = replace(waiting, states=("CANCELLED",), start=None)
            rows_of_array = (row for states in (waiting, cancelled) for row in store.runs(states))
            selected = [row for row in rows_of_array if _has_task(row, job.task)]
        rows = [_redacted(rights, row) for row in selected]
        if not rows:
            raise Unanswerable(
                f"job {name_of(job)} is not in the record; jobs are recorded within seconds of their submission; "
                "`migacct -X -S now-7days` lists those of the last week"
            )
        stopped = _stopped(store.actions({row.run["job_id"] for row in rows}))
        decisions = {id: store.decision(id) for id in {row.run["decision"] for row in rows} if id}
    if question.as_json:
        runs = [{**row.run, "slices": row.slices, "decided": decisions.get(row.run["decision"])} for row in rows]
        return Reply([json.dumps({"version": 1, "runs": runs}, default=str)])
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        why = stopped.get((row.run["job_id"], row.run["restart"]), "") if row.run["state"] in _STOPPED_STATES else ""
        lines += pair_lines(describe(row, decisions.get(row.run["decision"]), rights.sentence(why, ())))
    return Reply(lines)


def _stopped(actions: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
    """Return why migbatchd has ended runs, by job and restart; of loans `migbatch loans` tells it."""
    ends = [row for row in actions if row["kind"] in (MOVE, PREEMPT) and row["after"] in _ENDS and not row["outcome"]]
    return {(row["job_id"], row["restart"]): f"{_STOPS[row['kind']]}: {row['why']}" for row in ends}


def _has_task(row: RunRow, task: str) -> bool:
    listed, cut, _ = (row.run["array_task"] or "").partition(",...")
    try:
        # the record cuts a long list; later tasks without a run of their own are behind the cut
        return has_task(listed, task) or (bool(cut) and int(task) > int(re.split("[-,]", listed)[-1]))
    except ValueError:
        return False


def _redacted(rights: Rights, row: RunRow) -> RunRow:
    run = SimpleNamespace(**row.run)
    return RunRow({name: field_for(rights, run, name, value) for name, value in row.run.items()}, row.slices)


def job_id(written: str) -> JobId:
    """Read a job id as Slurm prints it; a step (12.0) means its job."""
    match = JOB.fullmatch(written)
    if match is None:
        raise Unanswerable(f"{written!r} is not a job id; write 123, 123_4 or 123+1", 2)
    return JobId(int(match[1]), match[2] or match[3], int(match[4]) if match[4] else None)


def describe(row: RunRow, decision: Mapping[str, Any] | None, stopped: str = "") -> Iterator[tuple[str, str]]:
    """Yield the lines about one run; `stopped`: why migbatchd has ended it, empty if it has not."""
    run, moment = row.run, time_formatter(None)
    yield "Job", run_name(run) + (f" (run {run['restart'] + 1})" if run["restart"] else "")
    yield "Name", shown(run["name"])
    yield "User/Account", f"{shown(run['user'] or run['uid'])}/{shown(run['account'])}"
    yield "Partition", shown(run["partition"])
    yield "State", _state(run)
    if stopped:
        yield "Ended by", stopped
    times = [f"{field} {moment(run[field])}" for field in ("submitted", "started", "ended") if run[field]]
    yield "Times", ", ".join(times) or "unknown"
    if run["started"] and run["ended"]:
        yield "Elapsed", format_duration(run["ended"] - run["started"])
    yield "Requested", shown(run["asked"])
    yield "Bucket", shown(run["bucket"] or "none: no known model")
    yield "Allocated", _allocated(run)
    yield from (("", line) for line in _slices(row.slices))
    yield "Predicted", figures(run, "predicted_")
    yield from pairs_of("Measured", measured(run))
    yield from pairs_of("Training", training(run))
    if decision:
        yield "Why", shown((decision["message"] or "explicit profile").removeprefix("migbatch: "))
        yield from pairs_of("Candidates", candidate_lines(decision))


def measured(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the run achieved, the source, the prediction error, and rejected figures."""
    facts = run["measured_facts"] if isinstance(run["measured_facts"], dict) else {}
    items = f"{run['measured_items']:.0f} items" if run["measured_items"] is not None else ""
    parts = [part for part in (figures(run, "measured_"), items) if part and (part != "nothing" or not items)]
    yield ", ".join(parts)
    words = {"job": "reported by the job", "driver": "memory from the driver"}
    sources = [words.get(who, f"by the {shown(who)}") for who in measured_by(facts)]
    if sources:
        yield "; ".join(reversed(sources))
    if facts.get("oom") is True:
        yield f"out of memory; `migbatch waste {run_name(run)}` shows what to request next time"
    error = prediction_error(SimpleNamespace(**run))
    if error is not None:
        yield f"throughput {percentage(error)} relative to the prediction"
    for doubt in facts.get("doubts") or ():
        yield f"rejected: {shown(doubt)}"


def training(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the progress of a training job and its saved steps; nothing for other jobs."""
    facts = run["measured_facts"] if isinstance(run["measured_facts"], dict) else {}
    safe, moment = facts.get("safe") or {}, time_formatter(None)
    lines = [f"{safe['steps']} steps done"] if "steps" in safe else []
    if "restored" in safe:
        lines.append(f"continued from step {safe['restored']}")
    if "checkpoint" in safe:
        cost = f" (it took {digits(safe['ckpt_s'])} s)" if "ckpt_s" in safe else ""
        lines.append(f"last checkpoint {moment(safe['checkpoint'])}{cost}")
    if lines:
        yield ", ".join(lines)


def candidate_lines(decision: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per candidate profile."""
    rows = decision.get("candidates")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping):
            verdict = "ok" if row.get("ok") else f"no: {row.get('why')}"
            yield f"{row.get('profile', '?'):<12} {figures(row, '')}; {verdict}"


def pairs_of(key: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines under one key."""
    for number, line in enumerate(lines):
        yield "" if number else key, line


def figures(row: Mapping[str, Any], prefix: str) -> str:
    """Return the latency, throughput and memory, as far as known."""
    parts = []
    if row.get(f"{prefix}latency_ms") is not None:
        parts.append(f"{digits(row[f'{prefix}latency_ms'])} ms per batch")
    if row.get(f"{prefix}throughput_per_s") is not None:
        parts.append(f"{digits(row[f'{prefix}throughput_per_s'])} items/s")
    if row.get(f"{prefix}memory_mib") is not None:
        parts.append(f"{gib(row[f'{prefix}memory_mib'])} GiB")
    return ", ".join(parts) or "nothing"


def run_name(run: Mapping[str, Any]) -> str:
    """Return the run's job id as Slurm prints it."""
    return columns.job_id(SimpleNamespace(**run))


def row_name(row: JobRow) -> str:
    """Return a job in the queue as Slurm prints it."""
    named_by = {name: getattr(row, name) for name in ("job_id", "array_job", "array_task", "het_job")}
    offset = None if row.het_job is None else row.job_id - row.het_job
    return columns.job_id(SimpleNamespace(**named_by, het_offset=offset))


def name_of(job: JobId) -> str:
    """Return a job id as Slurm prints it."""
    return (
        f"{job.job}_{job.task}" if job.task else f"{job.job}+{job.offset}" if job.offset is not None else str(job.job)
    )


def _state(run: Mapping[str, Any]) -> str:
    text = str(run["state"])
    if run["exit_code"] is not None:
        text += f" (exit code {run['exit_code']}:{run['signal'] or 0})"
    reason = run["reason"] or ""
    # a run that has started keeps the reason for which it waited before, unless its node gave another
    current = run["state"] == "PENDING" or (run["state"] == "REQUEUED" and reason.startswith(MISFIT))
    return f"{text}: {reason}" if reason and current else text


def _allocated(run: Mapping[str, Any]) -> str:
    if not run["profile"]:
        return "nothing yet" if run["ended"] is None else "nothing"
    origin = "" if run["warm"] is None else ", warm (from an earlier job)" if run["warm"] else ", created for it"
    setup = "" if run["setup_ms"] is None else f" in {run['setup_ms']:.0f} ms"
    return f"{run['profile']}{origin}{setup}"


def _slices(slices: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for s in slices:
        gpu = s["gpu_index"] if s["gpu_index"] is not None else s["gpu"]
        placement = f"{s['slot_start']}:{s['slot_size']} of GPU {gpu} on {s['node']}"
        yield f"{s['profile']} at {placement}, {shown(s['mig_uuid'])}"


def shown(value: object) -> str:
    """Return a value, or `unknown`, as text that cannot control a terminal; users choose names freely."""
    return "unknown" if value is None or value == "" else escaped(str(value))

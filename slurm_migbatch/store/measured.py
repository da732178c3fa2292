"""Results of runs: their sources, plausibility, and sums over the nodes of a run.

`Run.measured_facts` is {"by": {figure: source}, "nodes": {node: its last report}, "p99_ms", "batch", "tasks", "doubts",
"safe", "shared", "oom", "sm", "tensor", "dram", "energy_j"}. `progressreport` describes `safe`; `shared` means that it
shared a slice with another job, `oom` that it reported out of memory; `sm`, `tensor` and `dram` are the average
activity of its slices, and `energy_j` the joules of its GPUs if all were whole ones.
A source is "job" (`migbatch progress`), "driver" (sampled on the node) or another caller of the store. Users can
report false figures about their own jobs; learning may take that into account.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from slurm_migbatch.store import clean, progress
from slurm_migbatch.store.models import Run

log = logging.getLogger(__name__)

#: each figure with the largest value that any hardware could reach
FIGURES = {"latency_ms": 1e9, "throughput_per_s": 1e9, "memory_mib": 1 << 24, "items": 1e15}
#: average utilization of slices, as facts of a run
ACTIVITY = ("sm", "tensor", "dram")
JOB, DRIVER = "job", "driver"
#: maximum difference between a run's clock and the job's own
_SLACK_S, _SLACK_SHARE = 60.0, 1.1
_MAX_DOUBTS = 8
#: maximum joules of a run on one node
_MOST_J = 1e12
#: sampled on a node, not replaced by its next progress report
_SAMPLED = ("memory_mib", "activity", "energy_j")


def known_run(session: Session, job: int, restart: int) -> Run | None:
    """Return the newest run (job, restart)."""
    wanted = select(Run).where(Run.job_id == job, Run.restart == restart).order_by(Run.reuse.desc()).limit(1)
    return session.scalars(wanted).first()


def keep(run: Run, figures: Mapping[str, float | None], by: str) -> None:
    """Write figures and their source into a run; None leaves a figure unchanged."""
    facts = _facts(run)
    for name, value in figures.items():
        if (number := clean.real(value)) is not None:
            setattr(run, f"measured_{name}", number)
            facts["by"] = {**facts.get("by", {}), name: by}
    run.measured_facts = facts


def keep_report(run: Run, node: str, ts: float, event: Mapping[str, Any], *, late: bool) -> None:
    """Store the report of a job on one node; the node's last report counts, even if it is repeated or late.

    `late`: later reports may have been stored already. Only then are times compared: a clock may have been set back.
    """
    facts = _facts(run)
    nodes = dict(facts.get("nodes") or {})
    before = nodes.get(node) or {}
    if late and before.get("ts") is not None and before["ts"] > ts:
        return
    doubts: list[str] = []
    report = _believed(run, ts, event, doubts)
    if safe := progress.safe_of(event, ts, run.started, before.get("safe"), doubts):
        report["safe"] = safe
    nodes[node] = {"ts": ts, **report, **{name: before[name] for name in _SAMPLED if name in before}}
    facts["nodes"] = nodes
    if safe := progress.together(nodes.values()):
        facts["safe"] = safe
    if event.get("oom") is True:
        facts["oom"] = True
    if doubts:
        log.warning("%s: progress of job %d run %d: %s", node, run.job_id, run.restart, "; ".join(doubts))
        facts["doubts"] = list(dict.fromkeys([*facts.get("doubts", []), *doubts]))[-_MAX_DOUBTS:]
    figures = _together([known for known in nodes.values() if "items" in known or "tasks" in known])
    facts.update({name: figures.pop(name) for name in ("p99_ms", "batch", "tasks")})
    for name in ("items", "throughput_per_s", "latency_ms"):
        if figures[name] is None and facts.get("by", {}).get(name) == JOB:  # its earlier value is no longer valid
            setattr(run, f"measured_{name}", None)
            facts["by"] = {figure: who for figure, who in facts["by"].items() if figure != name}
    run.measured_facts = facts
    keep(run, figures, JOB)


def keep_memory(run: Run, node: str, mib: Any, profiles: Collection[str]) -> None:
    """Store the peak memory of the run's slices on one node; the maximum of all nodes counts."""
    number = clean.real(mib)
    if number is None:
        return
    limit_mib = max((_max_memory_mib(profile) for profile in profiles), default=math.inf)
    if not 0 < number <= limit_mib:
        log.warning("%s: job %d run %d: %g MiB in a slice are impossible", node, run.job_id, run.restart, number)
        return
    run.measured_facts, nodes = _sampled(run, node, "memory_mib", number)
    keep(run, {"memory_mib": max(node_facts.get("memory_mib", 0) for node_facts in nodes.values())}, DRIVER)


def keep_activity(run: Run, node: str, activity: Any) -> None:
    """Store the average activity of the run's slices on one node; `sm`, `tensor` and `dram` are those of all nodes."""
    if not isinstance(activity, Mapping):
        return
    values = {name: clean.real(activity.get(name)) for name in ("seconds", *ACTIVITY)}
    if any(value is None or value < 0 for value in values.values()) or any(
        (values[name] or 0) > 1 for name in ACTIVITY
    ):
        return
    facts, nodes = _sampled(run, node, "activity", values)
    activities = [row["activity"] for row in nodes.values() if "activity" in row]
    seconds = math.fsum(row["seconds"] for row in activities)
    means = (
        {name: math.fsum(row[name] * row["seconds"] for row in activities) / seconds for name in ACTIVITY}
        if seconds
        else {}
    )
    run.measured_facts = {**facts, **means}


def keep_energy(run: Run, node: str, joules: Any) -> None:
    """Store the joules of the run's whole GPUs on one node; `energy_j` is set when every node has reported."""
    number = clean.real(joules)
    if number is None or not 0 <= number <= _MOST_J:
        return
    facts, nodes = _sampled(run, node, "energy_j", number)
    energies = [row["energy_j"] for row in nodes.values() if "energy_j" in row]
    if len(energies) == len((run.nodes or node).split(",")):
        facts["energy_j"] = math.fsum(energies)
    run.measured_facts = facts


def keep_only(run: Run, nodes: Collection[str]) -> None:
    """Drop all figures of a run if a node other than `nodes` has reported any; its nodes report theirs again."""
    if not set(_facts(run).get("nodes") or ()) <= set(nodes):
        run.measured_facts = None
        for name in FIGURES:
            setattr(run, f"measured_{name}", None)


def _sampled(run: Run, node: str, name: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run's facts with a sampled value of one node, and those of its nodes."""
    facts = _facts(run)
    nodes = dict(facts.get("nodes") or {})
    nodes[node] = {**(nodes.get(node) or {}), name: value}
    facts["nodes"] = nodes
    return facts, nodes


def mark_shared(run: Run) -> None:
    """Note that the run shared a slice with another job: its figures are not those of a whole slice."""
    run.measured_facts = {**_facts(run), "shared": True}


def _facts(run: Run) -> dict[str, Any]:
    return dict(run.measured_facts) if isinstance(run.measured_facts, dict) else {}


def _believed(run: Run, ts: float, event: Mapping[str, Any], doubts: list[str]) -> dict[str, Any]:
    """Return the plausible fields of a `progress` event; the others are listed in `doubts`."""
    plausible: dict[str, Any] = {
        "tasks": clean.whole(event.get("tasks"), 0, 1 << 20) or 0,
        "whole": event.get("whole") is True,
        "done": event.get("done") is True,
    }
    limits = {
        "items": FIGURES["items"], "throughput_per_s": FIGURES["throughput_per_s"], "batch": 1e7,
        "latency_ms": FIGURES["latency_ms"], "latency_p99_ms": FIGURES["latency_ms"],
    }  # fmt: skip
    for name, maximum in limits.items():
        value = event.get(name)
        number = clean.real(value)
        if number is not None and 0 < number <= maximum:
            plausible[name] = number
        elif value is not None and number != 0:
            doubts.append(f"{name}={str(value)[:40]} is impossible")
    refused = clean.whole(event.get("refused"), 1, 1 << 30)
    if refused:
        doubts.append(f"{refused} invalid lines in its progress file")
    rate, items = plausible.get("throughput_per_s"), plausible.get("items")
    if rate and items and run.started is not None and ts > run.started:
        run_time_s = ts - run.started
        if items / rate > run_time_s * _SLACK_SHARE + _SLACK_S:
            doubts.append(f"{items:g} items at {rate:g}/s take longer than its run time of {run_time_s:.0f} s")
            del plausible["throughput_per_s"]
    return plausible


def _together(reports: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run's figures from its nodes' reports; reports for the whole job replace those of tasks."""
    chosen = [report for report in reports if report.get("whole")] or list(reports)
    counting = [report for report in chosen if report.get("items")]
    rates = [report.get("throughput_per_s") for report in counting]
    batches = {report["batch"] for report in chosen if report.get("batch")}
    return {
        "items": math.fsum(report["items"] for report in counting) if counting else None,
        "throughput_per_s": math.fsum(filter(None, rates)) if rates and None not in rates else None,
        "latency_ms": _mean(report.get("latency_ms") for report in chosen),
        "p99_ms": max((report["latency_p99_ms"] for report in chosen if report.get("latency_p99_ms")), default=None),
        "batch": batches.pop() if len(batches) == 1 else None,
        "tasks": sum(report.get("tasks", 0) for report in chosen),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    reported = [value for value in values if value]
    return math.fsum(reported) / len(reported) if reported else None


def _max_memory_mib(profile: str) -> float:
    """Return an upper bound of the memory of a slice of this profile, from its name; infinite if the name has none."""
    match = re.search(r"\.(\d{1,5})gb", profile)
    return int(match[1]) * 1024 * 1.1 if match else math.inf

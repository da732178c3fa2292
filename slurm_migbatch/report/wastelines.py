"""Output of `migbatch waste`: one run in detail in the style of seff, or a table of the worst."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from slurm_migbatch.mig.text import printable
from slurm_migbatch.report.columns import exit_code, job_id
from slurm_migbatch.report.lines import csv_line, separated_lines, table_lines
from slurm_migbatch.report.waste import LEAST_WAITS, SliceUse, WaitFigures, WasteVerdict
from slurm_migbatch.slurm.times import format_duration
from slurm_migbatch.values.figures import digits, gib

SCHEMA_VERSION: Final = 1
NOT_SAMPLED: Final = "not sampled"
UNKNOWN: Final = "unknown"
_TITLES = ("JOBID", "USER", "ACCOUNT", "HELD", "ELAPSED", "%MEM", "%SM", "GPU-HOURS", "WASTED", "FINDINGS")
_LAST = ("NEXT TIME", "WAITED", "WOULD WAIT")
_CSV = (
    "job", "restarts", "user", "account", "partition", "state", "held", "elapsed_s", "memory_mib", "held_memory_mib",
    "sm_active", "dram_active", "gpu_hours", "wasted_gpu_hours", "findings", "note", "next_time", "waited_s",
    "would_wait_median_s", "would_wait_p90_s", "would_wait_runs",
)  # fmt: skip


class JudgedRun(NamedTuple):
    """A run with its result.

    Attributes:
        shown: a row with the displayed fields.
        use, verdict: what it held, and the result.
        held_mib: memory of one of its slices; None if unknown.
        waited_s: from its submission to its start; None if the former is unknown.
        would: how long runs with the sufficient slice waited; None if there were too few.
    """

    shown: Any
    use: SliceUse
    verdict: WasteVerdict
    held_mib: int | None
    waited_s: float | None
    would: WaitFigures | None = None


@dataclass
class WasteSum:
    """All runs of a table: their number, GPU-hours held, sampled and wasted."""

    runs: int = 0
    gpu_hours: float = 0.0
    judged_gpu_hours: float = 0.0
    wasted_gpu_hours: float = 0.0

    def add(self, verdict: WasteVerdict) -> None:
        """Add the result of a run."""
        self.runs += 1
        self.gpu_hours += verdict.gpu_hours
        self.judged_gpu_hours += verdict.gpu_hours if verdict.judged else 0.0
        self.wasted_gpu_hours += verdict.wasted_gpu_hours


def pairs(run: JudgedRun) -> Iterator[tuple[str, str]]:
    """Yield keys and values about one run."""
    shown, use, verdict = run.shown, run.use, run.verdict
    yield "Job", job_id(shown) + (f" (run {shown.restart + 1})" if shown.restart else "")
    yield "User/Account", f"{_user(shown)}/{printable(shown.account or UNKNOWN)}"
    yield "Partition", printable(shown.partition or UNKNOWN)
    yield "State", f"{shown.state} (exit code {exit_code(shown)})"
    yield "Held", f"{_held(use)} for {format_duration(use.hours * 3600)} ({digits(verdict.gpu_hours)} GPU-hours)"
    yield "Memory", _memory(run)
    yield "SMs", _sms(use)
    yield "Wasted", f"{digits(verdict.wasted_gpu_hours)} GPU-hours" if verdict.judged else UNKNOWN
    for number, finding in enumerate(verdict.findings):
        yield "" if number else "Findings", finding.sentence
    if verdict.note:
        yield "Note", verdict.note
    if verdict.sbatch:
        yield "Next time", verdict.sbatch
    if run.waited_s is not None:
        yield "Waited", format_duration(run.waited_s)
    if verdict.sbatch:
        yield "Would wait", _wait_text(run)


def _memory(run: JudgedRun) -> str:
    peak = run.use.own.peak_mib
    if peak is None:
        return NOT_SAMPLED
    of_held = "" if run.held_mib is None else f" of {gib(run.held_mib)} GiB ({peak / run.held_mib:.0%})"
    return f"{gib(peak)} GiB{of_held}"


def _sms(use: SliceUse) -> str:
    if use.own.sm is None:
        return NOT_SAMPLED
    bandwidth = "" if use.own.dram is None else f", memory bandwidth {use.own.dram:.0%}"
    return f"{use.own.sm:.0%} in use{bandwidth}"


def _wait_text(run: JudgedRun) -> str:
    if run.would is None:
        return f"unknown: fewer than {LEAST_WAITS} runs with {run.verdict.profile} were submitted around that time"
    return (
        f"{format_duration(run.would.median_s)} median, {format_duration(run.would.p90_s)} for nine of ten "
        f"({run.would.runs} runs with {run.verdict.profile} submitted around that time)"
    )


def table(runs: Sequence[JudgedRun], total: WasteSum, *, header: bool) -> Iterator[str]:
    """Yield the worst runs as a table, and a sentence about all."""
    rows = [_cells(run) for run in runs]
    if rows:
        yield from table_lines((*_TITLES, *_LAST), rows, show_header=header)
    yield _sentence(total, len(runs))


def _sentence(total: WasteSum, shown: int) -> str:
    if not total.runs:
        return "no runs with slices ended in this window"
    wasted, judged = total.wasted_gpu_hours, total.judged_gpu_hours
    share = f" ({wasted / judged:.0%})" if judged else ""
    return (
        f"{total.runs} runs held {digits(total.gpu_hours)} GPU-hours; {digits(judged)} were sampled, "
        f"{digits(wasted)}{share} of these were wasted; shown: the worst {shown}"
    )


def separated(runs: Iterable[JudgedRun], delimiter: str, *, header: bool) -> Iterator[str]:
    """Yield the worst runs with a delimiter between the columns."""
    return separated_lines((*_TITLES, *_LAST), map(_cells, runs), delimiter, show_header=header)


def _cells(run: JudgedRun) -> list[str]:
    use, verdict = run.use, run.verdict
    peak = use.own.peak_mib
    return [
        job_id(run.shown),
        _user(run.shown),
        printable(run.shown.account or ""),
        _held(use),
        format_duration(use.hours * 3600),
        "" if peak is None or run.held_mib is None else f"{100 * peak / run.held_mib:.0f}",
        NOT_SAMPLED if use.own.sm is None else f"{100 * use.own.sm:.0f}",
        f"{verdict.gpu_hours:.2f}",
        f"{verdict.wasted_gpu_hours:.2f}",
        ",".join(finding.kind for finding in verdict.findings),
        verdict.sbatch,
        "" if run.waited_s is None else format_duration(run.waited_s),
        _brief_wait(run),
    ]


def _brief_wait(run: JudgedRun) -> str:
    if not run.verdict.sbatch:
        return ""
    return UNKNOWN if run.would is None else f"{format_duration(run.would.median_s)}/{format_duration(run.would.p90_s)}"


def as_csv(runs: Iterable[JudgedRun], *, header: bool) -> Iterator[str]:
    """Yield the worst runs as CSV with plain numbers; unknown values are empty."""
    if header:
        yield csv_line(_CSV)
    for run in runs:
        row = _object(run)
        row["findings"] = ",".join(finding["kind"] for finding in row["findings"])
        row |= {f"would_wait_{name}": value for name, value in (row["would_wait"] or {}).items()}
        yield csv_line("" if (value := row.get(name)) is None else value for name in _CSV)


def document(runs: Sequence[JudgedRun], total: WasteSum, window: Sequence[float | None], now: float) -> str:
    """Return runs and sum as JSON, with plain numbers and units in the names."""
    start, end = window
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "generated_unix_s": now,
            "window": {"start_unix_s": start, "end_unix_s": end},
            "runs": [_object(run) for run in runs],
            "total": asdict(total),
        }
    )


def _object(run: JudgedRun) -> dict[str, Any]:
    shown, use, verdict = run.shown, run.use, run.verdict
    return {
        "job": job_id(shown),
        "restarts": shown.restart,
        "user": _user(shown),
        "account": printable(shown.account or ""),
        "partition": printable(shown.partition or ""),
        "state": shown.state,
        "held": _held(use),
        "elapsed_s": use.hours * 3600,
        "memory_mib": use.own.peak_mib,
        "held_memory_mib": run.held_mib,
        "sm_active": use.own.sm,
        "dram_active": use.own.dram,
        "gpu_hours": verdict.gpu_hours,
        "wasted_gpu_hours": verdict.wasted_gpu_hours if verdict.judged else None,
        "findings": [finding._asdict() for finding in verdict.findings],
        "note": verdict.note,
        "next_time": verdict.sbatch,
        "waited_s": run.waited_s,
        "would_wait": None if run.would is None else asdict(run.would),
    }


def _held(use: SliceUse) -> str:
    return ",".join(name if count == 1 else f"{name}:{count}" for name, count in use.parts)


def _user(shown: Any) -> str:
    return printable(shown.user or ("" if shown.uid is None else str(shown.uid)))

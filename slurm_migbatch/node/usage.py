"""Collect the usage of a run when it is released: its last report (`progressreport.py`) and its memory (`peaks.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from slurm_migbatch.mig.driver import Activity
from slurm_migbatch.node import peaks, progress, progressreport
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.paths import Paths


class RunUsage(NamedTuple):
    """What a run used.

    `memory_mib`: the peak of the fullest slice; None if too little was sampled. `activity`: mean activity of
    its slices; None if the driver does not report it. `energy_j`: joules of GPUs that were entirely its
    own; None if one was not, or too little was sampled.
    """

    report: progressreport.ProgressReport | None = None
    memory_mib: int | None = None
    activity: Activity | None = None
    energy_j: float | None = None

    @property
    def stop_fields(self) -> dict[str, object]:
        """Fields of a `stop` event."""
        busy = {} if self.activity is None else {k: round(v, 4) for k, v in self.activity._asdict().items()}
        energy = {} if self.energy_j is None else {"energy_j": round(self.energy_j)}
        return {"memory_mib": self.memory_mib, **({"activity": busy} if busy else {}), **energy}

    def spool(self, journal: Journal, run: JournalRun) -> None:
        """Spool the run's last `progress` event, if it reported anything; part of the open transaction."""
        if self.report is not None:
            journal.event("progress", progress_event(run, self.report, final=True))


def gather(paths: Paths, run: JournalRun, slices: Sequence[JournalSlice]) -> RunUsage:
    """Collect the usage of a run whose processes have ended. Never raises: statistics must not block a slice."""
    slices = [row for row in slices if row.state in ("held", "lost")]
    if not slices:
        return RunUsage()
    started = min(row.since for row in slices)
    report = None
    try:
        content = progress.read(paths.progress, run.job, run.restart, run.uid)
        if content is not None:
            report = progressreport.understand(content, started, ended=True)
    except (progress.ProgressError, OSError):
        pass
    if any(row.shared for row in slices):
        return RunUsage(report)  # the driver reports the slice, not each of its two jobs
    peak = peaks.load(paths.run).get((run.job, run.restart))
    if peak is None:
        return RunUsage(report)
    now = time.time()
    memory = peak.maximum_mib(now - started)
    energy_j = peak.energy_j(sum(now - row.since for row in slices))
    return RunUsage(report, memory, None if memory is None else peak.average(), energy_j)


def progress_event(
    run: JournalRun, report: progressreport.ProgressReport, *, final: bool, sm: float | None = None
) -> dict[str, object]:
    """Return the fields of a `progress` event; unknown ones are omitted. `sm`: mean SM activity of its own slices."""
    fields = {name: value for name, value in report._asdict().items() if value is not None}
    if sm is not None:
        fields["sm"] = round(sm, 4)
    return {"job": run.job, "restart": run.restart, **fields, "final": final}

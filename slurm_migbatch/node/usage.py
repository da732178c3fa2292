"""What a run achieved, gathered when it is released: its last words (`progress.py`) and its memory (`peaks.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from slurm_migbatch.node import peaks, progress
from slurm_migbatch.node.journal import Journal, Run, Slice
from slurm_migbatch.node.paths import Paths


class Figures(NamedTuple):
    """`memory_mib`: the most that one of its slices had in use; None where too little was seen of it."""

    report: progress.Report | None = None
    memory_mib: int | None = None

    def tell(self, journal: Journal, run: Run) -> None:
        """Spool the run's last `progress` event, if it said anything; part of the transaction that is open."""
        if self.report is not None:
            journal.event("progress", progress_event(run, self.report, final=True))


def gather(paths: Paths, run: Run, pieces: Sequence[Slice]) -> Figures:
    """What is known of a run whose processes are gone. Never raises: figures are no reason to keep a slice."""
    pieces = [piece for piece in pieces if piece.state in ("held", "lost")]
    if not pieces:
        return Figures()
    started = min(piece.since for piece in pieces)
    report = None
    try:
        content = progress.read(paths.progress, run.job, run.restart, run.uid)
        if content is not None:
            report = progress.understand(content, started, ended=True)
    except (progress.ProgressError, OSError):
        pass
    if any(piece.shared for piece in pieces):
        return Figures(report)  # the driver tells of a slice, not of the two jobs on it
    peak = peaks.load(paths.run).get((run.job, run.restart))
    memory = None if peak is None else peak.believable(time.time() - started)
    return Figures(report, memory)


def progress_event(run: Run, report: progress.Report, *, final: bool) -> dict[str, object]:
    """The fields of a `progress` event; unknown ones are left out."""
    told = {name: value for name, value in report._asdict().items() if value is not None}
    return {"job": run.job, "restart": run.restart, **told, "final": final}

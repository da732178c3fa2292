"""What nodes tell of runs, and whose word counts: that of a node on which Slurm has the job.

Root of a node may tell what he likes. What he tells of a job elsewhere would have the job's training stopped before its
checkpoint, or a job started before the time that its user named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slurm_migbatch.decide.snapshot import Report, Run
from slurm_migbatch.slurm.client import JobRow

PATIENCE_S = 60.0
"""Seconds for which is kept what Slurm's list, which may be older, does not bear out yet."""


class Told(NamedTuple):
    """What a node told of a run at a moment (unix s): its report, or None where the node sent it back to the queue."""

    node: str
    run: Run
    report: Report | None
    at: float


class Heard(NamedTuple):
    """What counts of it: reports and jobs that were sent back; `later`: what has to wait for another list."""

    reports: list[tuple[Run, Report]]
    sent_back: list[int]
    later: list[Told]


def hear(told: Iterable[Told], listed: Mapping[int, JobRow], now: float) -> Heard:
    """Return what counts by Slurm's list of jobs."""
    heard = Heard([], [], [])
    for word in told:
        job, restart = word.run
        row = listed.get(job)
        if row is None or (row.nodes and word.node not in row.nodes):
            continue
        requeued = row.pending and row.restarts == restart + 1
        if row.nodes or (requeued and word.report is None):
            if word.report is None:
                heard.sent_back.append(job)
            else:
                heard.reports.append((word.run, word.report))
        elif row.restarts <= restart and now - word.at < PATIENCE_S:
            heard.later.append(word)
    return heard

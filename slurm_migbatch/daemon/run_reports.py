"""Filter the nodes' reports of runs: a report counts only if Slurm has the job on the node that sent it.

Root of a node may report anything. Because of a false report about a job on another node, the job's training could be
stopped before its checkpoint, or a job could be started before the time that its user requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slurm_migbatch.decide.snapshot import Report, Run
from slurm_migbatch.slurm.client import JobRow

PATIENCE_S = 60.0
"""Seconds for which reports are kept that Slurm's list, which may be older, does not confirm yet."""


class RunReport(NamedTuple):
    """A node's report of a run at a time (unix s): its progress, or None if the node requeued it."""

    node: str
    run: Run
    report: Report | None
    at: float


class ConfirmedReports(NamedTuple):
    """Accepted reports and requeued runs; `later`: those to be checked against a later list of jobs."""

    reports: list[tuple[Run, Report]]
    sent_back: list[Run]
    later: list[RunReport]


def confirm(messages: Iterable[RunReport], listed: Mapping[int, JobRow], now: float) -> ConfirmedReports:
    """Return the reports that Slurm's list of jobs confirms."""
    confirmed = ConfirmedReports([], [], [])
    for message in messages:
        job, restart = message.run
        row = listed.get(job)
        if row is None or (row.nodes and message.node not in row.nodes):
            continue
        requeued = row.pending and row.restarts == restart + 1
        if row.nodes or (requeued and message.report is None):
            if message.report is None:
                confirmed.sent_back.append(message.run)
            else:
                confirmed.reports.append((message.run, message.report))
        elif row.restarts <= restart and now - message.at < PATIENCE_S:
            confirmed.later.append(message)
    return confirmed

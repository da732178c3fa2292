"""Keep the findings of nodes' agents: the latest report of each node, in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.node.findings import FAIL, Finding

#: maximum number of nodes with reports; Slurm itself has fewer
MOST_NODES = 65536


@dataclass(frozen=True)
class NodeReport:
    """One node's report: when it was received (unix s), how far the node's clock is ahead (s), its findings."""

    came: float
    ahead: float
    findings: tuple[Finding, ...]


class NodeReports:
    """The latest report of each node. Used by one event loop; read by any thread."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall, self._since = wall, wall()
        self._lock = threading.Lock()
        self._reports: dict[str, NodeReport] = {}

    def keep(self, node: str, sent: float, findings: tuple[Finding, ...]) -> float:
        """Store a node's report with its own timestamp; return this host's time."""
        now = self._wall()
        with self._lock:
            if node in self._reports or len(self._reports) < MOST_NODES:
                self._reports[node] = NodeReport(now, sent - now, findings)
        return now

    def age(self) -> float:
        """Return for how many seconds nodes have been able to report."""
        return max(self._wall() - self._since, 0.0)

    def problems(self) -> Mapping[str, int]:
        """Return how many problems each node has reported."""
        with self._lock:
            reports = dict(self._reports)
        return {
            node: sum(finding.level == FAIL for finding in report.findings) for node, report in sorted(reports.items())
        }

    def to_dict(self) -> Mapping[str, Any]:
        """Return all reports in a JSON-able form, by node, each with its age in seconds."""
        now = self._wall()
        with self._lock:
            reports = dict(self._reports)
        return {
            node: {
                "age": max(now - report.came, 0.0),
                "ahead": report.ahead,
                "findings": [finding._asdict() for finding in report.findings],
            }
            for node, report in sorted(reports.items())
        }

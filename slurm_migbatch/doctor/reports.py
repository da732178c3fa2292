"""Show the findings of nodes' own checks, as their agents reported them to migbatchd."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.doctor.drained import SUBJECT
from slurm_migbatch.doctor.link import CLOCK_S, check_clock
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, Finding

SILENCE_S: Final = 120.0
"""Seconds after which a report is old: nodes send one a minute, unless CheckEvery= says otherwise."""
AGAIN: Final = "migbatchd was started a moment ago: run migbatch doctor again in two minutes"


@dataclass(frozen=True)
class ReceivedReport:
    """One node's report: its age, how far the node's clock is ahead, in seconds, and its problems."""

    age: float
    ahead: float
    findings: tuple[Finding, ...]


class ReceivedReports(dict[str, ReceivedReport]):
    """The latest report of each node. `age`: for how many seconds migbatchd has been able to receive them."""

    age: float = math.inf


def read_reports(body: bytes) -> ReceivedReports:
    """Read migbatchd's answer at /v1/findings. Raises ValueError."""
    try:
        answer = json.loads(body)
        reports = ReceivedReports(
            (node, ReceivedReport(row["age"], row["ahead"], tuple(Finding(**finding) for finding in row["findings"])))
            for node, row in answer["nodes"].items()
        )
        reports.age = float(answer.get("age", math.inf))
        return reports
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot parse migbatchd's answer: {error!r}") from None


def causes(reports: Mapping[str, ReceivedReport]) -> dict[str, str]:
    """Return the nodes' messages about being drained by a hook."""
    return {
        node: finding.text.partition("; error of the hook: ")[2]
        for node, report in reports.items()
        for finding in report.findings
        if finding.subject == SUBJECT
    }


def summary(reports: ReceivedReports, nodes: Collection[str]) -> Iterator[Finding]:
    """Yield the number of problems of each of these nodes."""
    for node in sorted(nodes):
        report = reports.get(node)
        if report is None or report.age > SILENCE_S:
            continue
        problems = [finding for finding in report.findings if finding.level == FAIL]
        others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        if problems:
            text = f"its own checks {report.age:.0f} s ago found {problems[0].subject}: {problems[0].text}{others}"
            yield Finding(FAIL, node, text, "run migbatch doctor --nodes")
        if abs(report.ahead) > CLOCK_S:
            yield from (finding._replace(subject=node) for finding in check_clock("its clock", report.ahead))


def check_reports(reports: ReceivedReports, nodes: Collection[str]) -> Iterator[Finding]:
    """Yield all findings of nodes by their latest reports, and those of the MIG nodes in Slurm that have none."""
    starting = reports.age <= SILENCE_S
    for node in sorted({*nodes, *reports}):
        report = reports.get(node)
        if report is None and starting:
            yield Finding(UNKNOWN, node, "its agent has not reported its checks yet", AGAIN)
            continue
        if report is None or report.age > SILENCE_S:
            period = f"for {report.age:.0f} s" if report else "since migbatchd was started"
            advice = f"on {node}: systemctl status migbatch-node, and migbatch doctor"
            yield Finding(FAIL, node, f"its agent has not reported its checks {period}", advice)
            continue
        for finding in report.findings:
            text = f"{finding.text} ({report.age:.0f} s ago)"
            yield finding._replace(subject=f"{node}: {finding.subject}", text=text)
        yield from (finding._replace(subject=f"{node}: clock") for finding in check_clock("its clock", report.ahead))
        if not any(finding.level == FAIL for finding in report.findings):
            yield Finding(OK, node, f"no problems found {report.age:.0f} s ago")

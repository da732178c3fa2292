"""Exchange findings of checks between node and controller; `migbatch doctor` prints them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from slurm_migbatch.node.controller_client import ControllerClient, ControllerError

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "FAIL"
UNKNOWN: Final = "unknown"
"""Level of a check that could not run."""
PATH: Final = "/node/v1/findings"
MOST: Final = 64
"""Most findings in one node's report."""
LONGEST: Final = 500
"""Most characters of each text of a finding."""


class Finding(NamedTuple):
    """One result: `level` is ok, warn, FAIL or unknown; `advice` says what to do unless it is ok."""

    level: str
    subject: str
    text: str
    advice: str = ""


def rows_to_report(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Return a node's report to its controller: its problems, the worst first, within limits."""
    order = {FAIL: 0, UNKNOWN: 1, WARN: 2}
    problems = sorted((found for found in findings if found.level in order), key=lambda found: order[found.level])
    return [{key: text[:LONGEST] for key, text in found._asdict().items()} for found in problems[:MOST]]


def tell(client: ControllerClient, node: str, findings: Iterable[Finding]) -> float:
    """Send findings to the controller; return how many seconds this host's clock is ahead of the controller's.

    Raises:
        ControllerError: it cannot be reached, refuses, or its answer is invalid.
    """
    sent = time.time()
    body = client.post(PATH, {"node": node, "sent": sent, "findings": rows_to_report(findings)})
    received = time.time()
    try:
        controller_time = float(json.loads(body)["now"])
    except (ValueError, KeyError, TypeError):
        raise ControllerError("the controller's answer to findings has no time") from None
    return (sent + received) / 2 - controller_time

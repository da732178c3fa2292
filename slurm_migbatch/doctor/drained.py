"""Check whether Slurm starts jobs on a node; if it was drained because of a hook, show the hook's message."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding

SUBJECT: Final = "drained"
_BY_HOOK: Final = re.compile(r"migbatch:|.*\b(?:pro|epi)log\b", re.IGNORECASE)


def by_hook(reason: str) -> bool:
    """Return whether a node's Reason= was set by a hook, or by slurmd about one."""
    return _BY_HOOK.match(reason) is not None


def check_drained(node: str, state: str, reason: str, failure: str) -> Iterator[Finding]:
    """Check that Slurm starts jobs on a node, by its state there (`IDLE+DRAIN`). `failure`: message of the last hook
    that failed there, or empty.
    """
    states = set(re.findall(r"[A-Z_]+", state.upper()))
    if not states & {"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL"}:
        yield _responding(node, state, states)
        return
    resume = f"scontrol update NodeName={node} State=RESUME after correcting the cause"
    if not by_hook(reason):
        yield Finding(WARN, SUBJECT, f"{node} is {state.lower()}: {reason or 'no reason given'}", resume)
        return
    cause = f"; error of the hook: {failure}" if failure else ""
    release = "; scontrol release jobs that squeue then shows as `launch failed requeued held`"
    yield Finding(FAIL, SUBJECT, f"{node} is {state.lower()}: {reason}{cause}", resume + release)


def _responding(node: str, state: str, states: Collection[str]) -> Finding:
    """Check that slurmd answers, unless the node is being booted or saves power."""
    if "NOT_RESPONDING" not in states or any(each.startswith(("POWER", "REBOOT")) for each in states):
        return Finding(OK, SUBJECT, f"{node} is {state.lower()}")
    text = f"{node} is {state.lower()}: slurmctld gets no answer from its slurmd, and starts no jobs there"
    return Finding(WARN, SUBJECT, text, f"on {node}: systemctl status slurmd, and its log")

"""Compares what a node made for a job with what Slurm allocated to it; more than that is taken away.

Slurm alone decides how large a job's slices are. A node reads the grant from the job's comment, which the submit
filter guards; should anything get past it, the job ends here and the record says why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_migbatch.daemon.poll import Snapshot
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.gres import GresError, counts

log = logging.getLogger(__name__)
#: looks at the queue that must agree before a job is cancelled
CERTAIN = 2


@dataclass(frozen=True)
class Finding:
    """A job that holds more on `node` than Slurm gave it: surplus by GRES type."""

    job_id: int
    node: str
    surplus: Mapping[str, int]

    def __str__(self) -> str:
        what = ", ".join(f"{count} x {kind}" for kind, count in self.surplus.items())
        return f"job {self.job_id} holds {what} on {self.node} beyond its allocation"


class Auditor:
    """Remembers what nodes report as started and checks it against the queue."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int, str], Sequence[Mapping[str, Any]]] = {}
        self._suspect: Counter[tuple[int, int, str]] = Counter()

    def ingested(self, node: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in a node's events; those that start or stop runs matter."""
        for event in events:
            try:
                key = (int(event["job"]), int(event["restart"]), node)
            except (KeyError, TypeError, ValueError):
                continue
            if event.get("kind") == "start":
                slices = event.get("slices")
                self._open[key] = [s for s in slices if isinstance(s, dict)] if isinstance(slices, list) else []
            elif event.get("kind") == "stop":
                self._open.pop(key, None)

    def check(self, snapshot: Snapshot) -> list[Finding]:
        """What `CERTAIN` snapshots in a row showed to hold too much; each run is found once."""
        jobs = {job.job_id: job for job in snapshot.jobs}
        found = []
        for key, slices in list(self._open.items()):
            job_id, restart, node = key
            job = jobs.get(job_id)
            if job is None:
                continue  # gone, or too new for this snapshot; its stop event ends the matter
            if job.restarts > restart:
                self._forget(key)
                continue
            if not job.active or job.restarts != restart or node not in job.nodes:
                continue
            surplus = excess(slices, allocation(job))
            if not surplus:
                self._forget(key)
                continue
            self._suspect[key] += 1
            if self._suspect[key] >= CERTAIN:
                self._forget(key)
                found.append(Finding(job_id, node, surplus))
        return found

    def _forget(self, key: tuple[int, int, str]) -> None:
        self._open.pop(key, None)
        self._suspect.pop(key, None)


def allocation(job: JobRow) -> dict[str, int]:
    """Slices per node that Slurm allocated to a job, by GRES type."""
    try:
        return counts(job.gres, "mig")
    except GresError:
        return {}


def excess(slices: Iterable[Mapping[str, Any]], allocated: Mapping[str, int]) -> Counter[str]:
    """What a job holds on one node beyond its allocation there.

    Args:
        slices: slices of a `start` event, each with a `profile`.
        allocated: slices per node by GRES type, as Slurm shows them ("1g.10gb.me": 2).

    Returns:
        Surplus by GRES type; empty if all is well.
    """
    held = Counter(_gres_type(str(s.get("profile", ""))) for s in slices)
    return held - Counter(allocated)


def _gres_type(profile: str) -> str:
    try:
        return Profile.parse(profile).gres_type
    except ProfileError:
        return profile

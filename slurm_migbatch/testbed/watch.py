"""Watch the simulated GPUs and the hand-offs of running jobs continuously, and report violated invariants."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from slurm_migbatch.node import handoff

from .running_cluster import RunningCluster


@dataclass(frozen=True)
class HeldSlice:
    """A slice as the driver shows it while a run holds it."""

    node: str
    gpu: str
    gi: int
    profile: str
    start: int
    size: int


_W = TypeVar("_W", bound="Watch")


class Watch:
    """A thread that calls `observe` every few seconds, while `with` lasts."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    def __enter__(self: _W) -> _W:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.observe()

    def observe(self) -> None:
        """Observe once."""
        raise NotImplementedError


class HandoffWatch(Watch):
    """A thread that compares hand-offs with the driver: `with HandoffWatch(cluster) as watch`, then read `problems`.

    It does not use migbatch's own journal: for every run with a hand-off, each of its slices must exist, keep its
    placement and belong to no other run.
    """

    def __init__(self, cluster: RunningCluster, every: float = 0.3) -> None:
        super().__init__(every)
        self._cluster = cluster
        self.problems: list[str] = []
        self.rounds = 0
        self.held: dict[tuple[int, int, str], HeldSlice] = {}

    def observe(self) -> None:
        """Compare all nodes."""
        for node in self._cluster.spec.node_names:
            self.compare(node)
        self.rounds += 1

    def compare(self, node: str) -> None:
        """Compare one node's hand-offs with its driver."""
        before = handoffs(self._cluster, node)
        devices = self._devices(node)
        after = handoffs(self._cluster, node)
        owners: dict[str, tuple[int, int]] = {}
        for run in before.keys() & after.keys():
            for mig_uuid in before[run]:
                key = (*run, mig_uuid)
                if mig_uuid in owners and owners[mig_uuid] != run:
                    self._report_problem(f"{node}: {mig_uuid} belongs to the jobs {owners[mig_uuid][0]} and {run[0]}")
                owners[mig_uuid] = run
                current = devices.get(mig_uuid)
                known = self.held.get(key)
                if current is None:
                    self._report_problem(f"{node}: {mig_uuid} of job {run[0]} does not exist")
                elif known is not None and known != current:
                    self._report_problem(f"{node}: {mig_uuid} of job {run[0]} changed from {known} to {current}")
                else:
                    self.held[key] = current

    def _devices(self, node: str) -> dict[str, HeldSlice]:
        return {
            ci["uuid"]: HeldSlice(node, gpu["uuid"], gi["gi_id"], gi["profile"], gi["start"], gi["size"])
            for gpu in self._cluster.machine(node).dump()["gpus"]
            for gi in gpu["instances"]
            for ci in gi["compute_instances"]
        }

    def _report_problem(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def handoffs(cluster: RunningCluster, node: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the slices in the hand-off of each run of a node; none if it was refused or is over."""
    try:
        directory = os.open(cluster.node_directory(node) / "run/job", os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return {}
    try:
        slices = {}
        for run in handoff.listed(directory):
            content = handoff.load(directory, *run)
            if content is not None:
                slices[run] = tuple(entry.mig_uuid for entry in content.slices)
        return slices
    finally:
        os.close(directory)

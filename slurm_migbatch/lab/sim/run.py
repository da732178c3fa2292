"""Track one job through the simulation: its places, speed, and remaining work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_migbatch.lab.sim.job import SimulatedJob

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.cluster import Place


class SimulatedRun:
    """The engine's state of a job: policies may read it, and change it only through the engine's actions.

    Progress is piecewise linear: `left` is the work left at the time `since`; it falls by `rate` a second from
    `resumes` on. A change of rate updates `left` and makes the predicted completion stale (`version`).

    Attributes:
        places: the slices that it holds; empty while it waits.
        alone: speed on its places without other runs there.
        started: when it first held slices, None before. `began`: when it first made progress.
        starts: how often it was started while it held no slices. `moves`: how often it changed slices while running.
        preempted: how often it was requeued.
        lost: work that has to be repeated. `paused`: seconds on slices without progress.
        service: compute-slice seconds that it has held (of whole GPUs all slices), for policies that share fairly.
        ready: earliest time of its next start (its checkpoint is being written).
        sensitivity: its slowdown by neighbours that fill the rest of a GPU.
        note: a policy's own data.
    """

    __slots__ = (
        "alone",
        "began",
        "ended",
        "job",
        "left",
        "lost",
        "moves",
        "note",
        "paused",
        "places",
        "preempted",
        "progress_clock",
        "rate",
        "ready",
        "resumes",
        "sensitivity",
        "service",
        "since",
        "slices",
        "started",
        "starts",
        "version",
    )

    def __init__(self, job: SimulatedJob, sensitivity: float = 0.0) -> None:
        self.job = job
        self.left = job.work
        self.places: tuple[Place, ...] = ()
        self.slices = 0
        self.rate = 0.0
        self.alone = 0.0
        self.since = job.arrival
        self.resumes = job.arrival
        self.progress_clock = 0.0
        self.version = 0
        self.started: float | None = None
        self.began: float | None = None
        self.ended: float | None = None
        self.starts = 0
        self.moves = 0
        self.preempted = 0
        self.lost = 0.0
        self.paused = 0.0
        self.service = 0.0
        self.ready = job.arrival
        self.sensitivity = sensitivity
        self.note: object = None

    @property
    def running(self) -> bool:
        """Whether it holds slices."""
        return bool(self.places)

    def remaining(self, now: float) -> float:
        """Return the remaining work at `now`, in seconds at speed 1."""
        return self.left - self.rate * max(0.0, now - max(self.since, self.resumes)) if self.places else self.left

    def attained(self, now: float) -> float:
        """Return the compute-slice seconds that it has held until `now`."""
        return self.service + self.slices * (now - self.since) if self.places else self.service

    def settle(self, now: float) -> None:
        """Add up progress, service and pauses until `now`."""
        if self.places:
            working = max(0.0, now - max(self.since, self.resumes))
            held = now - self.since
            if working > 0 and self.began is None:
                self.began = max(self.since, self.resumes)
            self.left -= self.rate * working
            self.progress_clock += working
            self.paused += held - working
            self.service += self.slices * held
        self.since = now

    def __repr__(self) -> str:
        return f"SimulatedRun({self.job.name!r}, left={self.left:.6g}, places={[str(place) for place in self.places]})"

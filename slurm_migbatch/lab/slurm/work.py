"""Model the work of jobs: run for a while, or train at the speed of their slice and write checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from slurm_migbatch.elastic.trainer import Care
from slurm_migbatch.mig.profile import Profile

PAUSE_S: Final = Care().idle_s
"""How long a training job pauses after it was asked for a checkpoint, if nothing follows."""


class Work(Protocol):
    """The script of one job, over all its runs. Times are unix seconds unless they are durations."""

    def begin(self, now: float, slices: Sequence[Profile], restart: int) -> None:
        """Begin a run on these slices."""

    def end_at(self) -> float:
        """Return when the run ends by itself at the current speed; infinite: never."""

    def pace(self, now: float, share: float) -> None:
        """Continue at this share of the slice's speed: 1 when the job has the slice alone, less when it shares it."""

    def usr(self, now: float) -> float | None:
        """Handle a signal to write a checkpoint; return when it is complete, None if none is written."""

    def term(self, now: float, within: float) -> float:
        """Handle SIGTERM, with SIGKILL after `within` seconds; return when the run ends."""


@dataclass
class Fixed:
    """A job that takes the same time on any slice, and restarts from zero after a requeue."""

    seconds: float
    _ends: float = field(default=math.inf, init=False)

    def begin(self, now: float, _slices: Sequence[Profile], _restart: int) -> None:
        """See Work."""
        self._ends = now + self.seconds

    def end_at(self) -> float:
        """See Work."""
        return self._ends

    def pace(self, now: float, share: float) -> None:
        """Do nothing: it takes the same time when sharing."""

    def usr(self, _now: float) -> float | None:
        """Return None: it does not write checkpoints."""
        return None

    def term(self, now: float, _within: float) -> float:
        """Return `now`: it ends at once."""
        return now


@dataclass
class SimulatedTraining:
    """Training at the speed of the slice, whose steps survive restarts by checkpoints, as in `slurm_migbatch.elastic`.

    On the signal of its hints it writes a checkpoint and pauses until SIGTERM comes, or for `pause_s`. Before its
    first step that signal is lost (`sbatch_examples/elastic_training.sh` ignores it until the library is loaded), and
    SIGTERM ends the run at once.

    Attributes:
        work_s: seconds on the whole GPU.
        speed: returns the speed on a profile; that of the whole GPU is 1.
        start_s, restart_s: from the run's start to its first step, on the first run and on later ones.
        every_s: between checkpoints that it writes by itself; None: it writes none.
        checkpoint_s: duration of a checkpoint, during which no steps are done.
        hears_usr, hears_term: whether it writes a checkpoint on the signal of its hints, and on SIGTERM.
        done, saved: seconds of work that are done, and those that are in a checkpoint.
    """

    work_s: float
    speed: Callable[[Profile], float]
    start_s: float = 5.0
    restart_s: float = 5.0
    every_s: float | None = None
    checkpoint_s: float = 2.0
    hears_usr: bool = True
    hears_term: bool = True
    pause_s: float = PAUSE_S
    done: float = field(default=0.0, init=False)
    saved: float = field(default=0.0, init=False)
    _rate: float = field(default=0.0, init=False)
    _share: float = field(default=1.0, init=False)
    _ready: float = field(default=math.inf, init=False)  # time of this run's first step
    _written: float = field(default=-math.inf, init=False)  # when the last requested checkpoint is complete
    _saved_before: float = field(default=0.0, init=False)  # saved work if that checkpoint is never completed
    _from: float = field(default=math.inf, init=False)  # time from which on steps are done

    def begin(self, now: float, slices: Sequence[Profile], restart: int) -> None:
        """See Work."""
        self.done = self.saved
        self._share = 1.0
        self._rate = self.rate_on(slices)
        self._ready = self._from = now + (self.restart_s if restart else self.start_s)
        self._written = -math.inf

    def rate_on(self, slices: Sequence[Profile]) -> float:
        """Return the seconds of work done per second on these slices, without other jobs on them."""
        return max((self.speed(profile) for profile in slices), default=0.0)

    def end_at(self) -> float:
        """See Work."""
        rate = self._effective
        return self._from + (self.work_s - self.done) / rate if rate > 0 else math.inf

    def pace(self, now: float, share: float) -> None:
        """See Work."""
        self._settle(now)
        self._share = share

    def usr(self, now: float) -> float | None:
        """See Work."""
        if not self.hears_usr or now < self._ready or now >= self.end_at():
            return None
        written = self._write(now)
        self._from = written + self.pause_s
        return written

    def term(self, now: float, within: float) -> float:
        """See Work."""
        if not self.hears_term or now < self._ready:
            self._settle(now)
            return now
        end = self._write(now)
        if end - now > within:
            self.saved, end = self._saved_before, now + within
        return end

    @property
    def _effective(self) -> float:
        cost = 1.0 if self.every_s is None else self.every_s / (self.every_s + self.checkpoint_s)
        return self._rate * self._share * cost

    def _write(self, now: float) -> float:
        """Save all work; return when it is saved. A checkpoint in progress is completed."""
        self._settle(now)
        if self.done > self.saved:
            self._saved_before, self.saved = self.saved, self.done
            self._written = now + self.checkpoint_s
            self._from = max(self._from, self._written)
        return max(now, self._written)

    def _settle(self, now: float) -> None:
        """Add up the work done, and the checkpoints written by itself, until now."""
        if now <= self._from:
            return
        before, progress = self.done, (now - self._from) * self._effective
        self.done = min(self.work_s, before + progress)
        if self.every_s is not None:
            period = self.every_s * self._rate * self._share
            checkpointed = before + math.floor((self.done - before) / period) * period if period > 0 else before
            self.saved = max(self.saved, checkpointed)
        self._from = now

"""Run a training that may be interrupted at any step, and resumed on a slice of another size."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slurm_migbatch.elastic import micro_batches, report
from slurm_migbatch.elastic.checkpoints import Checkpoints
from slurm_migbatch.elastic.disk import Disk
from slurm_migbatch.elastic.errors import ElasticError, Leave
from slurm_migbatch.elastic.lock import Lock
from slurm_migbatch.elastic.micro_batches import Step
from slurm_migbatch.elastic.sampler import Sampler
from slurm_migbatch.elastic.signals import PAUSE, SignalFlags
from slurm_migbatch.elastic.slices import Fits, Slice, largest

LEFT = 128 + 15
"""Exit code of a run that ended on SIGTERM, as a shell reports it."""

CHECKPOINT_SHARE = 20.0
"""After a checkpoint of t seconds at least this many times t of training follow, unless one is requested."""

AGAIN_S = 5.0
"""Seconds of training until a failed checkpoint is retried."""

log = logging.getLogger("migbatch.elastic")


@dataclass(frozen=True)
class Care:
    """Intervals and limits, in seconds.

    Attributes:
        every_s: training between two unrequested checkpoints.
        keep: number of checkpoints to keep.
        idle_s: pause after USR1, after which the run continues if TERM has not come.
        leave_s: time between TERM and KILL (Slurm's KillWait is 30 s); a checkpoint that would take longer than
            what is left of it is not started.
        lock_s: how long to wait for a previous run that is still ending.
        report_s: between two progress reports.
        pausing: names of the signals that request a checkpoint.
    """

    every_s: float = 600.0
    keep: int = 2
    idle_s: float = 120.0
    leave_s: float = 25.0
    lock_s: float = 120.0
    report_s: float = 10.0
    pausing: tuple[str, ...] = PAUSE


class Trainer:
    """One run of a training, as described in the package.

    Use it as a context, in the main thread; call `restore`, then loop over `steps`.

    Attributes:
        slice: the slice of this process.
        micro: the largest micro-batch.
        done: optimizer steps done, over the job's whole life.
    """

    def __init__(  # noqa: PLR0913 - the public interface, keywords only
        self,
        directory: str | os.PathLike[str],
        *,
        effective_batch: int,
        items: int | None = None,
        fits: Fits = None,
        micro: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        care: Care = Care(),
        environ: Mapping[str, str] | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Set up a training in `directory`, which is created if missing and must hold no other training.

        Args:
            effective_batch: items of one optimizer step.
            items: size of the data set; None for endless data.
            fits: largest micro-batch for this slice: a number, a table by profile, `Memory`, or a function of
                the `Slice`. None: the whole batch.
            micro: always split into micro-batches of this size, if it fits. Then sums have the same order on
                every slice, and so does everything that depends on the micro-batch, such as batch normalisation.
            seed, shuffle, drop_last: of the order of the data, see `Sampler`.
            environ: used instead of os.environ.

        Raises:
            ElasticError: no step is possible, or it does not fit on this slice.
        """
        self._environ = os.environ if environ is None else environ
        self.slice = Slice.of(self._environ)
        self.sampler = Sampler(items, effective_batch, seed=seed, shuffle=shuffle, drop_last=drop_last)
        most = largest(fits, self.slice, effective_batch)
        if micro is not None and not 1 <= micro <= most:
            raise ElasticError(f"micro-batches of {micro} items do not fit on {self.slice}, which fits {most}")
        self.micro, self._fixed = most if micro is None else micro, micro is not None
        self.done = 0
        self._care = care
        self._directory = Path(directory)
        self._lock = Lock(self._directory, self._environ)
        self._signals = SignalFlags(care.pausing)
        self._files = Checkpoints(
            self._directory, keep=care.keep, mark=self._lock.mark, disk=disk, ready=self._lock.check
        )
        self._restored = False
        self._saved: int | None = None
        self._saved_at = self._tried_at = 0.0
        self._cost_s: float | None = None
        self._failing = ""
        self._ended = False
        #: gives the state, while the loop is in a step
        self._save: Callable[[], Any] | None = None
        self._open: Step | None = None
        #: whether the program takes a step's micro-batches
        self._takes = False
        self._items, self._busy_s, self._reported_at = 0, 0.0, -1e9
        self._deaf = False

    def __enter__(self) -> Trainer:
        """Install signal handlers and lock the directory. Raises ElasticError, Leave, OSError."""
        self._signals.open()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock.take(self._care.lock_s, self._wait)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the directory; if the loop was left by `break`, write the last checkpoint first.

        Raises:
            ElasticError: all steps are done, or the loop was left, and the last step could not be saved.
        """
        save, left = self._save, False
        try:
            if kind is None and save is not None:
                left = self._count_left()
                if left:
                    self._checkpoint(save, last=True)
        finally:
            self._close(trained=kind is None and (self._ended or left))
        if kind is None and (self._ended or left) and self._saved != self.done:
            end = "was left by break" if left else "is complete"
            raise ElasticError(
                f"the training {end}, but no checkpoint of step {self.done} could be written to {self._directory}: "
                f"{self._failing}; {self._what_is_saved}. Correct that and run it again"
            )

    def _count_left(self) -> bool:
        """Count the step in which a loop was left, if it is done; return whether the state is one between two steps.

        It is not if the step has micro-batches left, as after an error that the program has caught: they are in no
        gradient. A step of which none was taken is not done, unless the program takes none of any step.
        """
        self._save = None
        if self._open is not None and self._open.left:
            log.warning(
                "the loop was left within step %d, which does not count; %s", self.done + 1, self._what_is_saved
            )
            self._ended = False
            return False
        if self._open is None or self._open.begun or not self._takes:
            self.done += 1
        return True

    def _close(self, *, trained: bool = False) -> None:
        self._signals.close(trained=trained)
        self._lock.give()

    def restore(self) -> Any:
        """Read the state of the newest complete checkpoint; None if there is none yet.

        Raises:
            ElasticError: no checkpoint is usable, or it belongs to a training with another batch or data.
            OSError: the directory cannot be read.
        """
        if not self._lock.held:
            raise ElasticError("use the Trainer as a context (`with elastic.Trainer(...) as run:`), and restore in it")
        self._files.tidy()
        newest = self._files.newest()
        for sentence in self._files.passed_over:
            log.warning("%s", sentence)
        self._restored = True
        self._saved_at = self._tried_at = time.monotonic()
        if newest is None:
            return None
        own = self._facts()
        differing = [key for key in own if newest.facts.get(key) != own[key]]
        if differing:
            differences = ", ".join(f"{key}={newest.facts.get(key)} (now {own[key]})" for key in differing)
            raise ElasticError(
                f"{newest.path} was written by a training run with {differences}. Restore these values, or use another "
                "directory"
            )
        self.done = self._saved = newest.steps
        log.info("%s: continuing after step %d, on %s, micro-batch %d", newest.path, self.done, self.slice, self.micro)
        self._report(steps=self.done, restored=self.done)
        return newest.state

    def steps(self, total: int, save: Callable[[], Any]) -> Iterator[Step]:
        """Iterate over the remaining optimizer steps, up to `total` in the training's whole life.

        A step counts as done when the loop requests the next one. In between, and only there, `save()` is called
        for the state that a checkpoint holds: model, optimizer, learning-rate schedule, and anything else that changes.

        If the last checkpoint cannot be written, the loop ends as usual, and the end of the context raises. If the loop
        is left by `break`, the step counts as done at the end of the context, which writes the last checkpoint, or when
        another loop begins; not if it is left before the loop over the step's micro-batches, or within that loop, for
        example by an error. An error after it must leave the context: if it is caught within, it cannot be told from
        `break`.

        Raises:
            Leave: told to end (in the loop, as SystemExit).
            Superseded: another run has taken over the directory.
            ElasticError: `restore` was not called.
        """
        if not self._restored:
            raise ElasticError(
                "call restore() before steps(): an interrupted training must not start from the beginning"
            )
        if self._save is not None:  # the last loop was left in a step, which must not be done twice
            self._count_left()
        while self.done < total:
            self._boundary(save)
            step = self._step()
            begun = time.monotonic()
            self._save, self._open = save, step
            yield step
            self._save = None
            self._takes = self._takes or step.begun
            self._busy_s += time.monotonic() - begun
            self.done += 1
            self._items += step.size
            if time.monotonic() - self._reported_at >= self._care.report_s:
                self._report(**self._report_fields())
        self._ended = True
        saved = self._checkpoint(save, last=True)
        self._report(**self._report_fields(), done=1 if saved else None)

    def _step(self) -> Step:
        epoch, position, size = self.sampler.position_of(self.done)
        sizes = micro_batches.fixed(size, self.micro) if self._fixed else micro_batches.even(size, self.micro)
        return Step(self.done, epoch, position, self.sampler.draw(self.done), self.sampler.indices(self.done), sizes)

    # -- between two steps ---------------------------------------------------------------------------------------

    def _boundary(self, save: Callable[[], Any]) -> None:
        self._signals.let_in()
        if self._signals.leave_since is not None:
            self._leave(save)
        held_back = bool(self._failing) and time.monotonic() - self._tried_at < AGAIN_S
        if self._signals.pause and not held_back:
            self._pause(save)
        elif self._due() and not held_back:
            self._checkpoint(save)
        if self._signals.leave_since is not None:
            self._leave(save)

    def _due(self) -> bool:
        """Return whether a checkpoint is due.

        The first step is saved immediately, to verify that saving works and to measure its cost.
        """
        if self._saved is None:
            return self.done > 0
        return time.monotonic() - self._saved_at >= max(self._care.every_s, CHECKPOINT_SHARE * (self._cost_s or 0.0))

    def _checkpoint(self, save: Callable[[], Any], *, last: bool = False) -> bool:
        """Write a checkpoint; return whether all steps are saved.

        Disk errors are logged, and the training goes on; the caller tells of one in the `last` checkpoint of a run.
        """
        if self._saved != self.done:
            try:
                self._cost_s = self._files.write(self.done, self._facts(), save())
            except OSError as error:
                self._fail(error.strerror or str(error), last)
                return False
            finally:
                self._tried_at = time.monotonic()
            if self._failing:
                log.warning("checkpoints can be written again; step %d is saved", self.done)
            self._failing = ""
            self._saved, self._saved_at = self.done, time.monotonic()
        self._report(**self._report_fields(), checkpoint=f"{time.time():.6f}", ckpt_s=self._cost_s)
        return True

    def _fail(self, reason: str, last: bool) -> None:
        if reason != self._failing and not last:
            log.error(
                "no checkpoint of step %d could be written to %s: %s; %s, training continues",
                self.done, self._directory, reason, self._what_is_saved,
            )  # fmt: skip
        self._failing = reason

    @property
    def _what_is_saved(self) -> str:
        return "no checkpoint is saved yet" if self._saved is None else f"step {self._saved} is still saved"

    def _pause(self, save: Callable[[], Any]) -> None:
        """Save, then wait until TERM comes, or for idle_s; another USR1 is handled like the first."""
        while self._signals.pause:
            self._signals.pause = False
            if not self._checkpoint(save):
                self._signals.pause = True  # it remains requested
                return
            log.info("step %d is saved; waiting for the next signal", self.done)
            end = time.monotonic() + self._care.idle_s
            while not self._signals.pause and (left := end - time.monotonic()) > 0:
                self._wait(left)
        log.info("no signal in %.0f s; training continues", self._care.idle_s)

    def _wait(self, seconds: float) -> None:
        """Sleep; raise Leave if TERM has come and nothing is to be saved."""
        if self._signals.leave_since is None:
            self._signals.wait(seconds)
        if self._signals.leave_since is not None:
            raise Leave(LEFT)

    def _leave(self, save: Callable[[], Any]) -> None:
        assert self._signals.leave_since is not None
        left = self._signals.leave_since + self._care.leave_s - time.monotonic()
        problem = "too little time is left"
        if self._saved != self.done and (self._cost_s or 0.0) <= left and not self._checkpoint(save, last=True):
            problem = self._failing
        if self._saved == self.done:
            log.info("terminating after step %d; step %d is saved", self.done, self.done)
        else:
            log.warning(
                "terminating after step %d, which is not saved: %s; %s", self.done, problem, self._what_is_saved
            )
        raise Leave(LEFT)

    # -- reports ------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "effective_batch": sampler.batch, "items": sampler.items, "seed": sampler.seed, "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last, "micro": self.micro if self._fixed else None,
        }  # fmt: skip

    def _report_fields(self) -> dict[str, str | float | int | None]:
        """Return the report's fields: items and seconds of this run, steps of the training's whole life."""
        if not self._items or self._busy_s <= 0:
            return {"steps": self.done}
        return {"items": self._items, "seconds": self._busy_s, "batch": self.micro, "steps": self.done}

    def _report(self, **values: str | float | int | None) -> None:
        path = self._environ.get(report.VARIABLE)
        self._reported_at = time.monotonic()
        if not path:
            return
        try:
            report.append(path, report.line(self._environ, values))
        except OSError as error:
            if not self._deaf:
                log.warning("cannot report progress: %s: %s", path, error.strerror)
            self._deaf = True

"""Record signals, which take effect at the end of a step: pause (USR1, USR2) and leave (TERM).

Slurm sends USR1 by `scancel --signal=USR1`, `--signal=USR1@60`, or when migbatch reclaims a slice; TERM before
KILL when a job is requeued, cancelled or out of time. A handler only sets a flag, so a step is never interrupted.

All processes of the job get them. Programs that the training starts (a spawned data loader's workers, a compiler's) do
not inherit a handler, and USR1 would end them; they do inherit that a signal is blocked. So USR1 and USR2 are blocked
during a step, and let in at its end.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from slurm_migbatch.elastic.errors import ElasticError

PAUSE = ("SIGUSR1", "SIGUSR2")
_LONGEST_S = 1.0


class SignalFlags:
    """The signal handlers of this process, from `open` to `close`, and what they recorded.

    Attributes:
        pause: told to save and pause.
        leave_since: when it was told to leave (time.monotonic), else None.
    """

    def __init__(self, pausing: Sequence[str] = PAUSE) -> None:
        """Prepare the handlers; `pausing` are the names of signals that mean a pause."""
        self.pause = False
        self.leave_since: float | None = None
        self._pausing = [signal.Signals[name] for name in pausing]
        self._previous_handlers: dict[int, Any] = {}
        self._blocked_before: set[signal.Signals] = set()
        self._process = os.getpid()
        self._wakeup_read, self._wakeup_write, self._previous_wakeup_fd = -1, -1, -1

    def open(self) -> None:
        """Install the handlers. Raises ElasticError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ElasticError("signals reach the main thread only: create the Trainer there")
        self._process = os.getpid()
        self._wakeup_read, self._wakeup_write = os.pipe()  # not pipe2: scripts are tried on a Mac too
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        # Python runs handlers between its instructions: a signal right before `select` wakes it through this descriptor
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for number in (*self._pausing, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._handle)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._pausing)
        self._blocked_before = {number for number in self._pausing if number in before}

    def let_in(self) -> None:
        """Handle the signals that arrived since they were blocked."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._pausing)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._pausing)

    def close(self, *, trained: bool = False) -> None:
        """Restore the handlers and the signal mask that were in effect before.

        After a training a pause would end the program, which may still export its model. Slurm or migbatchd may have
        sent it just before, so it does nothing then, unless the program has its own handler. One that does nothing,
        unlike SIG_IGN, is not inherited by programs started later.
        """
        if self._previous_handlers:  # first the mask: a signal that waits must not meet the previous handler
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(self._pausing) - self._blocked_before)
        for number, handler in self._previous_handlers.items():
            default = handler is None or handler == signal.SIG_DFL
            spared = trained and default and number in self._pausing
            signal.signal(number, _nothing if spared else signal.SIG_DFL if default else handler)
        self._previous_handlers.clear()
        if self._wakeup_read >= 0:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
        for handle in (self._wakeup_read, self._wakeup_write):
            if handle >= 0:
                os.close(handle)
        self._wakeup_read = self._wakeup_write = -1

    def wait(self, seconds: float) -> None:
        """Sleep, at most until the next signal, and at most a second: others may use the wakeup descriptor too."""
        poll = select.poll()
        poll.register(self._wakeup_read, select.POLLIN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._pausing)
        try:
            if poll.poll(max(0.0, min(seconds, _LONGEST_S)) * 1000):
                os.read(self._wakeup_read, 4096)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._pausing)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader's worker, for example, which inherited this
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGTERM:
            self.leave_since = time.monotonic() if self.leave_since is None else self.leave_since
        else:
            self.pause = True


def _nothing(number: int, _: FrameType | None) -> None:
    pass

"""Provide virtual time: events run when the clock passes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

START: Final = 1_000_000.0
"""Unix time at which a simulation begins by default."""


class TimedEvent:
    """An action that runs at a time unless it is cancelled before."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Cancel the event; no effect if it has run."""
        self.action = None


class VirtualClock:
    """A virtual `daemon.controller.Clock`; `sleep` runs the events that are due meanwhile, in order of time and entry.

    An event may itself sleep, for example in a call of Slurm that takes time: the events due meanwhile then run within
    this event.
    """

    def __init__(self, now: float = START) -> None:
        self.now = now
        self._events: list[tuple[float, int, TimedEvent]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Return Unix seconds."""
        return self.now

    def monotonic(self) -> float:
        """Return the same as `time`, which never jumps in a simulation."""
        return self.now

    def at(self, when: float, action: Callable[[], object]) -> TimedEvent:
        """Have `action` run at time `when`, or when time next passes if `when` has passed."""
        event = TimedEvent(action)
        heappush(self._events, (when, next(self._numbers), event))
        return event

    def after(self, seconds: float, action: Callable[[], object]) -> TimedEvent:
        """Have `action` run after this many seconds."""
        return self.at(self.now + seconds, action)

    def sleep(self, seconds: float) -> None:
        """Let this many seconds pass."""
        self.until(self.now + seconds)

    def until(self, when: float) -> None:
        """Let time pass until `when`; do nothing if that has passed."""
        while (following := self.following) is not None and following <= when:
            self.step()
        self.now = max(self.now, when)

    def step(self) -> bool:
        """Advance to the next event and run it; return False if there is none."""
        if self.following is None:
            return False
        when, _, event = heappop(self._events)
        self.now = max(self.now, when)
        if event.action is not None:
            action, event.action = event.action, None
            action()
        return True

    @property
    def following(self) -> float | None:
        """When the next event is due; None if there is none."""
        while self._events and self._events[0][2].action is None:
            heappop(self._events)
        return self._events[0][0] if self._events else None

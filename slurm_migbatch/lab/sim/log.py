"""Log events: one tuple for each event, written as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO, TypeAlias

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.cluster import Place

What: TypeAlias = Literal["arrive", "start", "move", "preempt", "complete"]


class LoggedEvent(NamedTuple):
    """One event.

    Attributes:
        time: seconds on the simulation's clock.
        places: for `start` and `move` the places held afterwards, for `preempt` and `complete` the released ones.
        seconds: for `start` and `move` the pause until the next progress, for `preempt` the lost work, for `complete`
            the time since the arrival.
        destroyed, created: numbers of instances.
    """

    time: float
    what: What
    job: int
    places: Sequence[Place]
    seconds: float
    name: str
    destroyed: int = 0
    created: int = 0

    def line(self) -> str:
        """Return the event as one JSON object."""
        row = self._asdict()
        row["places"] = [[place.gpu, str(place.slot)] for place in self.places]
        row["time"], row["seconds"] = round(self.time, 6), round(self.seconds, 6)
        return json.dumps(row)


def write(events: Iterable[LoggedEvent], file: TextIO) -> None:
    """Write all events as JSON lines."""
    for event in events:
        file.write(event.line() + "\n")

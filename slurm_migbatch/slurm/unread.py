"""Log Slurm's rows that could not be read, each once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

log = logging.getLogger(__name__)
#: names to remember; with more of them the oldest may be logged again
_REMEMBERED = 100_000
_SHOWN = 3


class Unread:
    """Jobs, or nodes, whose rows could not be read so far.

    Args:
        noun: what they are, "job" or "node".
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._named: dict[str, None] = {}
        self._lock = threading.Lock()

    def name(self, unread: Mapping[str, str]) -> None:
        """Log one line for the unread rows of a listing (name -> why) that were not logged before."""
        with self._lock:
            new = [name for name in unread if name not in self._named]
            self._named.update(dict.fromkeys(new))
            for name in list(self._named)[: max(0, len(self._named) - _REMEMBERED)]:
                del self._named[name]
        if new:
            shown = "; ".join(f"{self._noun} {name}: {unread[name][:200]}" for name in new[:_SHOWN])
            omitted = f"; and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
            log.warning("cannot parse these rows of Slurm, they are left alone: %s%s", shown, omitted)

"""Log which nodes stop and resume sending messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from slurm_migbatch.slurm.nodelist import fold

log = logging.getLogger(__name__)


class SilenceWatch:
    """Nodes without a message for `silence_s` seconds: one line when that begins, and one when it ends."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._up: dict[str, float] = {}
        self._silent: dict[str, float] = {}

    def check(self, silences: Mapping[str, float], now: float) -> None:
        """Log what has changed.

        Args:
            silences: seconds since the last message of each node that is not down in Slurm. A node that was down is
                silent only after another `silence_s`: its agent may start after its slurmd.
            now: monotonic seconds.
        """
        self._up = {node: self._up.get(node, now) for node in silences}
        fallen = [
            node
            for node, seconds in silences.items()
            if node not in self._silent and min(seconds, now - self._up[node]) > self._silence_s
        ]
        if fallen:  # after a failure of the network many at once
            longest = max(silences[node] for node in fallen)
            log.warning(
                "no message from %s since %s: offers there stay as they are; check the network, and on the node: "
                "systemctl status migbatch-node, and migbatch doctor",
                fold(fallen),
                time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - longest)),
            )
            self._silent.update((node, now - silences[node]) for node in fallen)
        for node in [node for node in self._silent if silences.get(node, self._silence_s) < self._silence_s]:
            log.info("%s sends messages again after %.0f s", node, now - silences[node] - self._silent.pop(node))

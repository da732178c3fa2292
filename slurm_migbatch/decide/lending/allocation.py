"""Rules for loans to training jobs: what a change is worth, and when one may be made.

DeepBoot (Chen et al., IEEE TPDS 2023) restarts jobs often (11 times in the authors' simulator). Added against it:
`paid_worth` (a change must recover the cost of its restart within the forecast time) and `Hysteresis` (the interval
between voluntary changes grows with their number; loans have a minimum length and slices rest after a reclaim).

What is DeepBoot's own is in `lab.papers.deepboot`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_migbatch.decide.snapshot import passed_s


def paid_worth(speedup: float, fair: float, *, restart_s: float, stay_s: float) -> float:
    """Return a speedup relative to `fair`, less the part of `stay_s` that the restart takes; at least 0."""
    return speedup / fair * max(0.0, 1.0 - restart_s / stay_s) if stay_s > 0 else 0.0


@dataclass(frozen=True)
class Hysteresis:
    """When a job may be changed voluntarily, and when a slice may be lent.

    Attributes:
        first_s: minimum time between a job's start or last change and the next, `growth` times longer for each restart,
            but never longer than `most_s`.
        loan_s: minimum expected length of a gap to lend into it.
        idle_s: minimum idle time of a slice.
        rest_s: after a reclaim a slice is not lent again for so long.
        gain: minimum speedup of a change.
    """

    first_s: float = 300.0
    growth: float = 2.0
    most_s: float = 3600.0
    loan_s: float = 600.0
    idle_s: float = 120.0
    rest_s: float = 900.0
    gain: float = 1.25

    def may_change(self, now: float, changed: float, restarts: int) -> bool:
        """Return whether a job that was started or changed at `changed` may be changed again."""
        return passed_s(changed, now) >= min(self.most_s, self.first_s * self.growth ** min(restarts, 60))

    def may_lend(self, now: float, idle_since: float, reclaimed: float | None) -> bool:
        """Return whether a slice may be lent; `reclaimed`: when it last was, None: never, infinity: it will be."""
        rested = reclaimed is None or (reclaimed < math.inf and passed_s(reclaimed, now) >= self.rest_s)
        return passed_s(idle_since, now) >= self.idle_s and rested

"""Who gets how many tasks at once where the elastic arrays of several users need more than there is.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541) places earliest deadlines first and gives gaps to who was served least
over the last sessions. Its text is not public beyond the abstracts; this is a reconstruction for job arrays:

1. Every array has one task (Slurm knows no throttle of none).
2. Earliest deadline first, each array gets the fewest tasks at once with which it ends in time. Instances of services
   come before all of them: what they are for is due now.
3. What is left goes task by task to the user who was served least.

Step 2 protects an array only where its deadline can be kept, where its user was not served too much, and where all who
are protected can be kept together: by each deadline the work that is due by then has to fit into what there is until
then. Arrays are taken into that set in the order of what their users were served, least first. So deadlines that cannot
all be kept are lost by who was served most, and a user who tells shorter deadlines than he has is ahead until he was
served more than the others by his part of one session: for an array of `deadline` seconds, what there is, times the
deadline, divided by the users. A shorter deadline makes that lead smaller, and no new
array brings it back, only time, as what was served fades. Until others have caught up, step 3 is all that he gets
beside one task.

Served means compute slices times seconds, by elastic arrays. What was served fades (`ServedTime`), as in Slurm's own
fairshare, in about ten sessions (D-STACK's number); a session is the longest deadline here, a day at most, so that
nobody makes others' past count for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_GRAIN: Final = 1e-9
"""Relative rounding of sums."""
_NOTHING: Final = 1e-3
"""Compute-slice seconds that are forgotten."""
LATE: Final = "its deadline cannot be met"
AHEAD: Final = "its user recently got more than a fair share"
CROWDED: Final = "not all deadlines can be met, and users who got less come first"
LATER: Final = "earlier deadlines come first, and its own can still be met"


@dataclass(frozen=True)
class Claim:
    """What an array needs of slices that are scarce.

    Attributes:
        array: its job id; `user` its owner.
        units: compute slices of a task.
        need: tasks at once.
        task_s: seconds for which another task will have its slices.
        session_s: how long its user gave it: the deadline as he told it.
        due: its deadline, unix seconds; None: it is due now and at any time (a service).
        work: compute-slice seconds that have to be done by then.
        kept: whether `need` keeps the deadline.
    """

    array: int
    user: str
    units: int
    need: int
    task_s: float
    session_s: float
    due: float | None = None
    work: float = 0.0
    kept: bool = True


class Share(NamedTuple):
    """Tasks at once, and why they are not more (empty where they are what is needed)."""

    tasks: int
    why: str = ""


def shares(now: float, claims: Sequence[Claim], total: int, served: Mapping[str, float]) -> dict[int, Share]:
    """Divide `total` compute slices among the claims; see the module.

    One task more than there is room for is let through, so that arrays keep their place in Slurm's own order for what
    falls free; but not where it could take a slice from an array that is protected.

    Args:
        now: unix seconds.
        claims: of the arrays that compete.
        total: compute slices that they have or could have.
        served: compute-slice seconds that each user had lately.
    """
    protected, lost = _protected(now, claims, total, served)
    counts = {claim.array: 1 for claim in claims}
    used = sum(claim.units for claim in claims)
    spent = {claim.user: served.get(claim.user, 0.0) for claim in claims}
    for claim in protected:
        more = min(claim.need - 1, max(total - used, 0) // claim.units)
        counts[claim.array] += more
        used += more * claim.units
        spent[claim.user] += more * claim.task_s * claim.units
    short = next((claim for claim in protected if counts[claim.array] < claim.need), None)
    if short is not None:
        counts[short.array] += short is protected[0]
    else:
        others = [claim for claim in claims if claim.array in lost]
        _to_least_served(others, counts, spent, total - used, strict=bool(protected))
    share_of = {}
    for claim in claims:
        tasks = counts[claim.array]
        share_of[claim.array] = Share(tasks, lost.get(claim.array, LATER) if tasks < claim.need else "")
    return share_of


def _to_least_served(
    claims: Sequence[Claim], counts: dict[int, int], spent: dict[str, float], units_left: int, *, strict: bool
) -> None:
    """Give what is left, task by task; `strict`: nothing beyond it."""
    while units_left >= 0:
        open_claims = [c for c in claims if counts[c.array] < c.need and (not strict or c.units <= units_left)]
        if not open_claims:
            return
        claim = min(open_claims, key=lambda c: (spent[c.user], c.array))
        counts[claim.array] += 1
        units_left -= claim.units
        spent[claim.user] += claim.task_s * claim.units


def _protected(
    now: float, claims: Sequence[Claim], total: int, served: Mapping[str, float]
) -> tuple[list[Claim], dict[int, str]]:
    """Return the claims that come before others, earliest deadline first, and why others do not."""
    users = {claim.user for claim in claims}
    mean = sum(served.get(user, 0.0) for user in users) / len(users)
    protected: list[Claim] = []
    others = sum(claim.units for claim in claims)  # slices of one task of each claim that is not protected
    lost: dict[int, str] = {}
    for claim in sorted(claims, key=lambda c: (served.get(c.user, 0.0), _due(c))):
        if not claim.kept:
            lost[claim.array] = LATE
        elif served.get(claim.user, 0.0) > mean + total * claim.session_s / len(users):
            lost[claim.array] = AHEAD
        elif _fits(now, [*protected, claim], total - others + claim.units):
            protected.append(claim)
            others -= claim.units
        else:
            lost[claim.array] = CROWDED
    return sorted(protected, key=_due), lost


def _due(claim: Claim) -> tuple[float, int]:
    return (-math.inf if claim.due is None else claim.due), claim.array


def _fits(now: float, chosen: Sequence[Claim], room: int) -> bool:
    """Return whether these can all be kept, with one task for each other claim.

    By every deadline, the work that is due has room.

    Work is taken to be divisible, so this is necessary; tasks that are long for their deadlines may still be late.
    `room`: compute slices beside those of the others.
    """
    room -= sum(claim.need * claim.units for claim in chosen if claim.due is None)
    if room < 0:
        return False
    due_work = 0.0
    for claim in sorted(chosen, key=_due):
        if claim.due is not None:
            due_work += claim.work
            if due_work > room * (claim.due - now) * (1 + _GRAIN):
                return False
    return True


class ServedTime:
    """Compute-slice seconds that elastic arrays of each user had, fading with time.

    Attributes:
        spent: by user.
        at: when that was, unix seconds; None: nothing was counted yet.
        fade_s: seconds in which it falls to 1/e.
        seen: arrays whose past is in it.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.at: float | None = None
        self.fade_s = 0.0
        self.seen: set[int] = set()

    def count(self, now: float, running: Mapping[int, tuple[str, int]], fade_s: float) -> None:
        """Count what arrays had since the last time.

        Args:
            now: unix seconds.
            running: of each elastic array in the queue its user, and the compute slices of its running tasks.
            fade_s: see the class; 0: as before.
        """
        self.fade_s = fade_s or self.fade_s
        passed = 0.0 if self.at is None else max(now - self.at, 0.0)
        self.at = now
        self.seen &= running.keys()
        factor = math.exp(-passed / self.fade_s) if self.fade_s > 0 else 1.0
        self.spent = {user: faded for user, spent in self.spent.items() if (faded := spent * factor) > _NOTHING}
        for array, (user, units) in running.items():
            if array in self.seen:
                self.spent[user] = self.spent.get(user, 0.0) + passed * units

    def learn(self, array: int, user: str, spent: float) -> None:
        """Count what an array had before it was first seen here, once."""
        if array not in self.seen:
            self.seen.add(array)
            self.spent[user] = self.spent.get(user, 0.0) + spent

"""Divide concurrent tasks among the elastic arrays of several users that need more slices than there are.

D-STACK (IEEE TCC 12(4), 2024; arXiv 2304.13541) places earliest deadlines first and gives gaps to the user who was
served least over the last sessions. Only its abstracts are public; this is a reconstruction for job arrays:

1. Every array has one task (Slurm has no throttle of zero).
2. Earliest deadline first, each array gets the fewest concurrent tasks with which it meets its deadline. Instances of
   services come before all of them: their work is due now.
3. The rest goes task by task to the user who was served least.

Step 2 protects an array only if its deadline can be met, if its user was not served too much, and if all protected
arrays can be met together: by each deadline the work due by then has to fit into the capacity until then. Arrays are
added to that set in the order of their users' past service, least first. So if not all deadlines can be met, the users
who were served most lose, and a user who gives false short deadlines is ahead until he was served more than the others
by his part of one session: for an array of `deadline` seconds, the capacity, times the deadline, divided by the users.
A shorter deadline reduces that lead, and no new array restores it, only time, as past service decays. Until others have
caught up, step 3 is all that he gets besides one task.

Service means compute slices times seconds, by elastic arrays. Past service decays (`ServedTime`), as in Slurm's own
fairshare, over about ten sessions (D-STACK's number); a session is the longest deadline here, but a day at most, so
that no user can make the past service of others count forever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_GRAIN: Final = 1e-9
"""Relative rounding of sums."""
_NOTHING: Final = 1e-3
"""Compute-slice seconds that are ignored."""
LATE: Final = "its deadline cannot be met"
AHEAD: Final = "its user recently got more than a fair share"
CROWDED: Final = "not all deadlines can be met, and users who got less come first"
LATER: Final = "earlier deadlines come first, and its own can still be met"


@dataclass(frozen=True)
class Claim:
    """Need of an array for scarce slices.

    Attributes:
        array: its job id; `user` its owner.
        units: compute slices of a task.
        need: concurrent tasks.
        task_s: seconds for which another task will hold its slices.
        session_s: the deadline given by its user.
        due: its deadline, unix seconds; None: due now and at any time (a service).
        work: compute-slice seconds that have to be done by then.
        kept: whether `need` meets the deadline.
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
    """Concurrent tasks, and why they are not more (empty if they are what is needed)."""

    tasks: int
    why: str = ""


def shares(now: float, claims: Sequence[Claim], total: int, served: Mapping[str, float]) -> dict[int, Share]:
    """Divide `total` compute slices among the claims; see the module.

    One more task than fits is allowed, so that arrays keep their position in Slurm's own order for freed slices; but
    not if it could take a slice from a protected array.

    Args:
        now: unix seconds.
        total: compute slices that they have or could have.
        served: recent compute-slice seconds of each user.
    """
    protected, lost = _protected(now, claims, total, served)
    counts = {claim.array: 1 for claim in claims}
    used = sum(claim.units for claim in claims)
    spent = {claim.user: served.get(claim.user, 0.0) for claim in claims}
    for claim in protected:
        extra = min(claim.need - 1, max(total - used, 0) // claim.units)
        counts[claim.array] += extra
        used += extra * claim.units
        spent[claim.user] += extra * claim.task_s * claim.units
    first_short = next((claim for claim in protected if counts[claim.array] < claim.need), None)
    if first_short is not None:
        counts[first_short.array] += first_short is protected[0]
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
    """Give the remaining slices task by task to the user served least; `strict`: no more than these."""
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
    """Return the protected claims, earliest deadline first, and why others are not."""
    users = {claim.user for claim in claims}
    mean = sum(served.get(user, 0.0) for user in users) / len(users)
    protected: list[Claim] = []
    others = sum(claim.units for claim in claims)  # slices of one task of each unprotected claim
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


def _fits(now: float, chosen: Sequence[Claim], free_slices: int) -> bool:
    """Return whether these claims can all be met, with one task for each other claim.

    They can if by every deadline there is capacity for the work that is due by then.

    Work is assumed to be divisible, so this is necessary; tasks that are long for their deadlines may still be late.
    `free_slices`: compute slices besides those of the others.
    """
    free_slices -= sum(claim.need * claim.units for claim in chosen if claim.due is None)
    if free_slices < 0:
        return False
    due_work = 0.0
    for claim in sorted(chosen, key=_due):
        if claim.due is not None:
            due_work += claim.work
            if due_work > free_slices * (claim.due - now) * (1 + _GRAIN):
                return False
    return True


@dataclass
class ServedTime:
    """Compute-slice seconds of elastic arrays of each user, decaying with time.

    Attributes:
        spent: by user.
        at: time of these values, unix seconds; None: nothing counted yet.
        fade_s: seconds in which it decays to 1/e.
        seen: arrays whose past is included.
    """

    spent: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    fade_s: float = 0.0
    seen: set[int] = field(default_factory=set)

    def count(self, now: float, running: Mapping[int, tuple[str, int]], fade_s: float) -> None:
        """Add the service that arrays got since the last time.

        Args:
            now: unix seconds.
            running: of each elastic array in the queue its user, and the compute slices of its running tasks.
            fade_s: see the class; 0: unchanged.
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
        """Add the service that an array got before it was first seen here, once."""
        if array not in self.seen:
            self.seen.add(array)
            self.spent[user] = self.spent.get(user, 0.0) + spent

"""Which waiting training job shares the slice of which running one: SJF-BSBF's test of a pair, on MIG slices. Pure.

By Lai et al., "Scheduling Deep Learning Jobs in Multi-Tenant GPU Clusters via Wise Resource Sharing" (IWQoS 2024, arXiv
2407.13088), as the authors' code has it (`pays`): at most two jobs on one slice, and only where
the pair's mean finish is earlier than one after the other; of several hosts the one with the earliest mean finish.

Ours, because a slice is not a whole GPU and its jobs are their users':

- both are jobs of one user, and the memory of both together fits the slice with some to spare. A job of which nobody
  knows how much it needs shares with nobody;
- neither may come to its time limit for it. How long a job takes is known from what it reports; where it is not, it is
  taken to need a part of its limit (`Rules.of_limit`), and without a limit a long time;
- slowdowns are measured ones of the two applications where there are any, else an assumption (`Rules.slowdown`).

Times are seconds, memory MiB; a slowdown says how many times longer a job takes beside the other one, at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slurm_migbatch.decide.lending.pair_finish import apart, finishes, pays, together
from slurm_migbatch.mig.profile import Profile

UNKNOWN_S: Final = 7 * 86_400.0
"""What is left of a job of which neither its length nor a limit is known."""


@dataclass(frozen=True)
class Sharer:
    """A training job.

    Attributes:
        uid: whose it is, by Slurm.
        app: the name that slowdowns go by; empty where it names no model.
        left_s: what it still needs on the whole GPU; None: nobody knows.
        limit_s: what its time limit leaves it; None: no limit.
        memory_mib: what it needs; None: nobody knows.
    """

    job: int
    uid: int
    app: str = ""
    left_s: float | None = None
    limit_s: float | None = None
    memory_mib: float | None = None


@dataclass(frozen=True)
class Host:
    """A running one, alone on a slice with so much memory."""

    sharer: Sharer
    profile: Profile
    memory_mib: float


@dataclass(frozen=True)
class Rules:
    """What is assumed and allowed.

    Attributes:
        slowdown: of two jobs of which nothing was measured. 1.5 is where equal jobs are as well off one after the
            other, so that only short ones beside long ones share.
        measured: (application, the one beside it) -> slowdown.
        spare: part of the slice's memory that stays free.
        of_limit: the part of its time limit that a job of unknown length is taken to need.
        gain: by how much the mean finish must be earlier, as a part of it; a margin over what is not known exactly.
        most: pairs in one round.
    """

    slowdown: float = 1.5
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    spare: float = 0.1
    of_limit: float = 0.5
    gain: float = 0.05
    most: int = 4

    def slow(self, one: Sharer, other: Sharer) -> float:
        """How many times longer `one` takes beside `other`."""
        return max(1.0, self.measured.get((one.app, other.app), self.slowdown))


@dataclass(frozen=True)
class Pair:
    """`guest` is to share the slice of `host`."""

    host: int
    guest: int
    why: str


def pairs(
    running: Sequence[Host],
    waiting: Sequence[Sharer],
    speeds: Mapping[int, Mapping[Profile, float]],
    rules: Rules = Rules(),
) -> list[Pair]:
    """Who shares with whom, in the order of those that wait; a host has one guest.

    Args:
        running: jobs that have a slice to themselves.
        waiting: jobs that wait, in Slurm's order.
        speeds: by job, its speed on each profile that it may have, relative to the whole GPU.
        rules: see Rules.
    """
    free = list(running)
    found: list[Pair] = []
    for guest in waiting:
        if len(found) >= rules.most:
            break
        options = [(mean, host.sharer.job, host) for host in free if (mean := _mean(host, guest, speeds, rules))]
        if options:
            mean, _, host = min(options, key=lambda option: option[:2])
            free.remove(host)
            found.append(Pair(host.sharer.job, guest.job, _words(host, guest, mean, speeds, rules)))
    return found


def _mean(host: Host, guest: Sharer, speeds: Mapping[int, Mapping[Profile, float]], rules: Rules) -> float | None:
    """The mean finish of both if they share; None where they should not."""
    first = host.sharer
    if first.uid != guest.uid or first.job == guest.job or not _fit(host, guest, rules):
        return None
    own, other = _alone(guest, host.profile, speeds, rules), _alone(first, host.profile, speeds, rules)
    if own is None or other is None:
        return None
    slow = rules.slow(guest, first), rules.slow(first, guest)
    mean = together(own, other, *slow)
    if not pays(own, other, *slow) or mean > (1 - rules.gain) * apart(own, other):
        return None
    ends = finishes(own, other, *slow)
    in_time = [one.limit_s is None or end <= one.limit_s for one, end in zip((guest, first), ends, strict=True)]
    return mean if all(in_time) else None


def _fit(host: Host, guest: Sharer, rules: Rules) -> bool:
    needs = host.sharer.memory_mib, guest.memory_mib
    return None not in needs and sum(need or 0.0 for need in needs) <= (1 - rules.spare) * host.memory_mib


def _alone(one: Sharer, profile: Profile, speeds: Mapping[int, Mapping[Profile, float]], rules: Rules) -> float | None:
    """Seconds that a job still takes alone on that slice; None where it does not run there."""
    speed = speeds.get(one.job, {}).get(profile, 0.0)
    if not 0 < speed < math.inf:
        return None
    if one.left_s is not None:
        return max(1.0, min(one.left_s / speed, UNKNOWN_S))
    return UNKNOWN_S if one.limit_s is None else max(1.0, rules.of_limit * one.limit_s)


def _words(host: Host, guest: Sharer, mean: float, speeds: Mapping[int, Mapping[Profile, float]], rules: Rules) -> str:
    own, other = (_alone(one, host.profile, speeds, rules) or 0.0 for one in (guest, host.sharer))
    slow = rules.slow(guest, host.sharer), rules.slow(host.sharer, guest)
    return (
        f"beside job {host.sharer.job} on its {host.profile}: the two end {apart(own, other) - mean:.0f} s sooner on "
        f"average than one after the other (slowed down {slow[0]:.2f} and {slow[1]:.2f} times)"
    )

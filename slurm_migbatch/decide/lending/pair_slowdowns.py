"""Learn the slowdown of two training jobs on one slice from their reports. Pure.

A run's items between two of its reports, during which nothing changed on its slice, give a rate: alone, or next to
another job. The rate of its kind alone over the rate next to another job is a slowdown of the two applications on
slices of one profile: the smaller the slice, the less of it a job leaves idle. For an untried pair the slowdown follows
from the SM activity of both alone (`time_sliced`). If that is unknown, a low quantile of the measured ones is assumed
(`assumed`): if all pairs are similar it is accurate, and if they differ much an untried pair is still tried, because a
bad one is ended (`costs_s`).

This is an addition: SJF-BSBF (arXiv 2407.13088) takes slowdowns from a table that was measured beforehand; the values
of such a table (`[lending] pairs`) are used unchanged. Rates are items per second, slowdowns at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from slurm_migbatch.decide.lending.pair_finish import finishes
from slurm_migbatch.decide.snapshot import Run

MEASURED_S: Final = 60.0
"""Minimum seconds between two reports for a rate."""
_WEIGHT: Final = 2.0
"""Weight of the default assumption, in measured slowdowns."""
_MOST: Final = 10_000
"""Most rates and slowdowns kept."""
_LOWER: Final = 0.5
"""Standard deviations (of logarithms) by which an untried pair is assumed to be better than the tried ones."""
SWITCHING: Final = 1.4
"""Seconds on the GPU, next to another job, of one second of SM activity alone: SMs idle while kernels start and end,
and the driver switches between processes. Measured (`migbatch eval pairs`)."""

PairKey = tuple[str, str, str]
"""Application, the one next to it, and the profile of their slice; an empty profile stands for all of them."""

_Key = TypeVar("_Key")


class RateKey(NamedTuple):
    """Key of a rate alone: a user's jobs with the same hints on slices of one profile."""

    uid: int
    hints: str
    profile: str


class Reported(NamedTuple):
    """Report of a run; `app` is the name that slowdowns are stored under, empty if it has none.

    `activity` is the mean share of the slice's SMs in use so far (0 to 1), if the run always had the slice alone.
    """

    kind: RateKey
    app: str
    items: float
    at: float
    activity: float | None = None


class Stretch(NamedTuple):
    """A run's first report since something changed on its slice, and the run next to it since then."""

    beside: Run | None
    items: float
    at: float


class PairSlowdowns:
    """Slowdowns of pairs of applications: those of a table, and those that were measured here."""

    def __init__(self, table: Mapping[PairKey, float], usual: float) -> None:
        """`table` is used unchanged; `usual` is assumed as long as nothing has been measured."""
        self._table, self._usual = dict(table), usual
        self._slowdowns: dict[PairKey, float] = {}
        self._alone: dict[Run, float] = {}
        self._usually: dict[RateKey, float] = {}
        self._activity: dict[RateKey, float] = {}
        #: mean activity by user and profile, computed from `_activity`
        self._means: dict[int, dict[str, float]] | None = None
        self._stretches: dict[Run, Stretch] = {}
        self._runs: dict[tuple[Run, Run], float] = {}

    @property
    def known(self) -> dict[PairKey, float]:
        """Slowdowns of pairs in the table or measured."""
        measured = {key: slowdown for key, slowdown in self._slowdowns.items() if (*key[:2], "") not in self._table}
        return {**measured, **self._table}

    @property
    def assumed(self) -> dict[str, float]:
        """Slowdowns of unknown pairs by profile; on other profiles it is the usual one."""
        logs: dict[str, list[float]] = {}
        for (_, _, profile), slowdown in self._slowdowns.items():
            logs.setdefault(profile, []).append(math.log(slowdown))
        return {profile: self._quantile(of_profile) for profile, of_profile in logs.items()}

    def _quantile(self, logs: Sequence[float]) -> float:
        count, usual = len(logs) + _WEIGHT, math.log(self._usual)
        mean = (math.fsum(logs) + _WEIGHT * usual) / count
        variance = math.fsum((log - mean) ** 2 for log in logs) / count
        return math.exp(max(0.0, mean - _LOWER * math.sqrt(variance)))

    def activity(self, uid: int, hints: str) -> Mapping[str, float]:
        """Return the SM activity alone, by profile, of a user's jobs with these hints.

        Where it is unknown it is the mean of the user's other jobs; a profile that they had no slice of is omitted.
        """
        if self._means is None:
            activities: dict[int, dict[str, list[float]]] = {}
            for kind, share in self._activity.items():
                activities.setdefault(kind.uid, {}).setdefault(kind.profile, []).append(share)
            self._means = {
                of_uid: {profile: math.fsum(shares) / len(shares) for profile, shares in by_profile.items()}
                for of_uid, by_profile in activities.items()
            }
        means = self._means.get(uid, {})
        return {profile: self._activity.get(RateKey(uid, hints, profile), mean) for profile, mean in means.items()}

    def add_report(
        self, run: Run, report: Reported, beside: Run | None = None, other: str = "", *, again: bool = False
    ) -> None:
        """Add a report; `beside`: the run that shares the slice, None: none; `other`: its application.

        `again`: it is the run's last report once more.
        """
        stretch = self._stretches.get(run)
        if stretch is None or stretch.beside != beside or report.items < stretch.items:
            if again:  # it is from before the change
                self._stretches.pop(run, None)
            else:
                self._stretches[run] = Stretch(beside, report.items, report.at)
            return
        seconds, items = report.at - stretch.at, report.items - stretch.items
        if seconds < MEASURED_S or items <= 0:
            return
        if beside is None:
            self._alone[run] = items / seconds
            if report.activity is not None:
                _put(self._activity, report.kind, report.activity)
                self._means = None
            if report.app:
                _put(self._usually, report.kind, items / seconds)
            return
        alone = self._alone.get(run, self._usually.get(report.kind))
        if alone is not None:
            slowdown = max(1.0, alone * seconds / items)
            self._runs[run, beside] = slowdown
            if report.app and other:
                _put(self._slowdowns, (report.app, other, report.kind.profile), slowdown)

    def measured(self, run: Run, beside: Run) -> float | None:
        """Return the measured slowdown of a run next to another one; None if there is none."""
        return self._runs.get((run, beside))

    def forget(self, listed: Collection[Run]) -> None:
        """Drop the data of all runs except these."""
        kept = set(listed)
        self._stretches = {run: stretch for run, stretch in self._stretches.items() if run in kept}
        self._alone = {run: rate for run, rate in self._alone.items() if run in kept}
        self._runs = {pair: slowdown for pair, slowdown in self._runs.items() if kept.issuperset(pair)}


def _put(known: dict[_Key, float], key: _Key, value: float) -> None:
    """Store a value as the latest one; the oldest is dropped if there are too many, because users name the models."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MOST:
        del known[next(iter(known))]


def time_sliced(own: float, other: float, switching: float = SWITCHING) -> tuple[float, float]:
    """Return the slowdowns of two jobs on one slice, from the SM activity of each alone (0 to 1). A reconstruction.

    The driver lets only one of two processes compute at a time. Each job needs the SMs for a share of its time alone
    and is elsewhere for the rest (processor sharing between two customers): while both need them, each is at half
    speed. `switching` is the time on the GPU for each second of activity.
    """
    own, other = min(max(own, 0.0), 1.0), min(max(other, 0.0), 1.0)
    needs_own, needs_other = _needing(own, other, switching), _needing(other, own, switching)
    return 1.0 + switching * own * needs_other, 1.0 + switching * other * needs_own


def _needing(own: float, other: float, switching: float) -> float:
    """Return the share of time in which a job needs the SMs next to another one, both of them slowed down.

    It is x in x = own (1 + s y) / (1 + own s y), y = other (1 + s x) / (1 + other s x), where s is `switching`.
    """
    square = switching * other * (1.0 + switching * own)
    linear = 1.0 - switching**2 * own * other
    constant = own * (1.0 + switching * other)
    if square == 0.0:
        return own
    return (math.sqrt(linear * linear + 4.0 * square * constant) - linear) / (2.0 * square)


def costs_s(own: float, other: float, slow_own: float, slow_other: float) -> float:
    """Return the seconds of work that two lose by sharing until the first of them ends; negative: they gain.

    `own` and `other` are the remaining times of each alone.
    """
    until = min(finishes(own, other, slow_own, slow_other))
    return until * (1 - together_rate(slow_own, slow_other))


def together_rate(slow_own: float, slow_other: float) -> float:
    """Return the work that two on one slice do in the time in which one alone does 1."""
    return 1 / slow_own + 1 / slow_other

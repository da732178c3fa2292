"""Learn the slowdown of two training jobs on one slice from their reports. Pure.

A run's items between two of its reports, during which nothing changed on its slice, give a rate: alone, or next to
another job. The rate of its kind alone over the rate next to another job is a slowdown of the two applications. For an
untried pair a low quantile of the measured ones is assumed (`assumed`): if all pairs are similar it is accurate,
and if they differ much an untried pair is still tried, because a bad one is ended (`costs_s`).

This is an addition: SJF-BSBF (arXiv 2407.13088) takes slowdowns from a table that was measured beforehand; the values
of such a table (`[lending] pairs`) are used unchanged. Rates are items per second, slowdowns at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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


_Key = TypeVar("_Key")


class Kind(NamedTuple):
    """Key of a rate alone: a user's jobs with the same hints on slices of one profile."""

    uid: int
    hints: str
    profile: str


class Reported(NamedTuple):
    """Report of a run; `app` is the name that slowdowns are stored under, empty if it has none."""

    kind: Kind
    app: str
    items: float
    at: float


class Stretch(NamedTuple):
    """A run's first report since something changed on its slice, and the run next to it since then."""

    beside: Run | None
    items: float
    at: float


class PairSlowdowns:
    """Slowdowns of pairs of applications: those of a table, and those that were measured here."""

    def __init__(self, table: Mapping[tuple[str, str], float], usual: float) -> None:
        """`table` is used unchanged; `usual` is assumed as long as nothing has been measured."""
        self._table, self._usual = dict(table), usual
        self._learned: dict[tuple[str, str], float] = {}
        self._alone: dict[Run, float] = {}
        self._usually: dict[Kind, float] = {}
        self._stretches: dict[Run, Stretch] = {}
        self._runs: dict[tuple[Run, Run], float] = {}

    @property
    def known(self) -> dict[tuple[str, str], float]:
        """Slowdowns of pairs in the table or measured: (application, the one beside it)."""
        return {**self._learned, **self._table}

    @property
    def assumed(self) -> float:
        """Slowdown of an unknown pair."""
        logs = [math.log(slowdown) for slowdown in self._learned.values()]
        count, usual = len(logs) + _WEIGHT, math.log(self._usual)
        mean = (math.fsum(logs) + _WEIGHT * usual) / count
        variance = math.fsum((log - mean) ** 2 for log in logs) / count
        return math.exp(max(0.0, mean - _LOWER * math.sqrt(variance)))

    def add_report(self, run: Run, report: Reported, beside: Run | None = None, other: str = "") -> None:
        """Add a report; `beside`: the run that shares the slice, None: none; `other`: its application."""
        stretch = self._stretches.get(run)
        if stretch is None or stretch.beside != beside or report.items < stretch.items:
            self._stretches[run] = Stretch(beside, report.items, report.at)
            return
        seconds, items = report.at - stretch.at, report.items - stretch.items
        if seconds < MEASURED_S or items <= 0:
            return
        if beside is None:
            self._alone[run] = items / seconds
            if report.app:
                _put(self._usually, report.kind, items / seconds)
            return
        alone = self._alone.get(run, self._usually.get(report.kind))
        if alone is not None:
            slowdown = max(1.0, alone * seconds / items)
            self._runs[run, beside] = slowdown
            if report.app and other:
                _put(self._learned, (report.app, other), slowdown)

    def measured(self, run: Run, beside: Run) -> float | None:
        """Return the measured slowdown of a run next to another one; None if there is none."""
        return self._runs.get((run, beside))

    def forget(self, listed: Collection[Run]) -> None:
        """Drop the data of all runs except these."""
        kept = set(listed)
        for run in [run for run in self._stretches if run not in kept]:
            del self._stretches[run]
            self._alone.pop(run, None)
        self._runs = {pair: slowdown for pair, slowdown in self._runs.items() if kept.issuperset(pair)}


def _put(known: dict[_Key, float], key: _Key, value: float) -> None:
    """Store a value as the latest one; the oldest is dropped if there are too many, because users name the models."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MOST:
        del known[next(iter(known))]


def costs_s(own: float, other: float, slow_own: float, slow_other: float) -> float:
    """Return the seconds of work that two lose by sharing until the first of them ends; negative: they gain.

    `own` and `other` are the remaining times of each alone.
    """
    until = min(finishes(own, other, slow_own, slow_other))
    return until * (1 - together_rate(slow_own, slow_other))


def together_rate(slow_own: float, slow_other: float) -> float:
    """Return the work that two on one slice do in the time in which one alone does 1."""
    return 1 / slow_own + 1 / slow_other

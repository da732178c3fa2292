"""Estimate a training job's speed on each profile, from its own measurements, else from the predictor.

A job that ran on a 1g and a 3g slice shows how they compare better than any predictor. Its items are in a unit of its
own, so one profile alone gives no information; with several, each is scaled by its mean deviation from the prediction,
and profiles without runs are kept between the measured smaller and larger slices. None of this is from a paper.

Reports come from the job itself. A job that overstates its speed on large slices would get them first, so its
measurements count only up to `TRUST` from the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

LEAST_S: Final = 5.0
"""Seconds of training below which a report gives no speed: warm-up takes as long."""

TRUST: Final = 3.0
"""Largest accepted factor between a measured ratio of two profiles and the predicted one."""


class SpeedReport(NamedTuple):
    """A run's latest report: its work on slices of one profile since it began there.

    `seconds` are those of training (if a record has items and items a second, their quotient).
    """

    profile: str
    items: float
    seconds: float


def usable(reports: Iterable[SpeedReport]) -> list[SpeedReport]:
    """Return the reports that give a speed: something was done, for long enough, in finite numbers."""
    return [
        report
        for report in reports
        if report.profile and 0 < report.items < math.inf and LEAST_S <= report.seconds < math.inf
    ]


def work_done(reports: Iterable[SpeedReport]) -> dict[str, tuple[float, float]]:
    """Return the items done on each profile that the job ran on, and the seconds that they took."""
    done: dict[str, tuple[float, float]] = {}
    for report in usable(reports):
        items, seconds = done.get(report.profile, (0.0, 0.0))
        done[report.profile] = items + report.items, seconds + report.seconds
    return done


def speeds(predicted: Mapping[str, float], reports: Sequence[SpeedReport] = ()) -> dict[str, float]:
    """Return the speed on every profile of `predicted`, in the predictor's unit (usually of the whole GPU).

    Args:
        predicted: speed by profile, above 0, by the predictor or a rule.
        reports: the job's own, of all its runs; profiles that are not in `predicted` are ignored.

    Raises:
        ValueError: a predicted speed is not above 0.
    """
    if not all(0 < value < math.inf for value in predicted.values()):
        raise ValueError(f"predicted speeds must be above 0: {dict(predicted)}")
    done = {profile: done for profile, done in work_done(reports).items() if profile in predicted}
    if not done:
        return dict(predicted)
    offsets = {profile: math.log(items / seconds / predicted[profile]) for profile, (items, seconds) in done.items()}
    # runs are weighted by their length
    total_s = math.fsum(seconds for _, seconds in done.values())
    mean_offset = math.fsum(offsets[profile] * seconds for profile, (_, seconds) in done.items()) / total_s
    corrected = {
        profile: predicted[profile] * math.exp(max(-_REACH, min(_REACH, offset - mean_offset)))
        for profile, offset in offsets.items()
    }
    return {
        profile: corrected.get(profile, _between(profile, value, predicted, corrected))
        for profile, value in predicted.items()
    }


_REACH: Final = math.log(TRUST) / 2
"""Largest deviation of one figure: two of them, in opposite directions, make a ratio that is off by TRUST."""


def _between(profile: str, value: float, predicted: Mapping[str, float], near: Mapping[str, float]) -> float:
    """Return a predicted speed within the limits measured on smaller and on larger slices.

    If these contradict each other it is kept between the two.
    """
    below = [speed for other, speed in near.items() if predicted[other] <= value and other != profile]
    above = [speed for other, speed in near.items() if predicted[other] >= value and other != profile]
    low, high = max(below, default=0.0), min(above, default=math.inf)
    return max(min(low, high), min(max(low, high), value))

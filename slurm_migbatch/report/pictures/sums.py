"""Sums for charts: use, waits, predictions, loans, layouts, from rows of the record. No input or output."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.report.equivalents import WHOLE, gpu_equivalent
from slurm_migbatch.report.pictures.bins import Codes, Reals, TimeBins

HOUR_S: Final = 3600.0
#: classes of waits: upper bounds in seconds, and their labels
WAITS: Final = (
    (1.0, "under 1 s"), (10.0, "1 to 10 s"), (60.0, "10 s to 1 min"), (600.0, "1 to 10 min"),
    (3600.0, "10 min to 1 h"), (6 * 3600.0, "1 to 6 h"), (math.inf, "6 h and more"),
)  # fmt: skip
#: minimum share of a bin for which a memory slice must be held to be drawn as held
_MOSTLY: Final = 0.5
#: above the memory slices of any GPU
_MOST_SLICES: Final = 64
#: compute and memory slices of GPUs, by UUID
Wholes = Mapping[str, tuple[int, int]]
NO_GPUS: Final[Wholes] = MappingProxyType({})
_NO_ACCOUNT: Final = "(no account)"


@dataclass(frozen=True)
class GpuHours:
    """GPU hours: busy and idle by SM activity, and not sampled."""

    name: str
    busy: float
    idle: float
    unknown: float

    @property
    def total(self) -> float:
        """GPU hours."""
        return self.busy + self.idle + self.unknown

    @property
    def idle_share(self) -> float | None:
        """Idle part of the sampled hours; None if nothing was sampled."""
        sampled = self.busy + self.idle
        return self.idle / sampled if sampled > 0 else None


@dataclass(frozen=True)
class SliceColumns:
    """Slices held in a window, as columns of equal length.

    Attributes:
        gpu, profile, account: indices into `gpus`, `profiles` and `accounts`.
        start, size: memory slices.
        since, until: unix seconds; `until` is the end of the window for slices still held.
        sm: mean SM activity, nan if not sampled.
        gpus: (node, index if known, UUID); `wholes`: their compute and memory slices; `profiles`: by size.
    """

    gpu: Codes
    profile: Codes
    account: Codes
    start: Codes
    size: Codes
    since: Reals
    until: Reals
    sm: Reals
    gpus: Sequence[tuple[str, int | None, str]]
    wholes: Sequence[tuple[int, int]]
    profiles: Sequence[str]
    accounts: Sequence[str]

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[Any]], end: float, *, wholes: Wholes = NO_GPUS, named: bool = True
    ) -> SliceColumns:
        """Return the columns of rows of `store.windows.held_slices`.

        Args:
            end: of the window, unix seconds.
            wholes: compute and memory slices of GPUs by UUID; others have the usual numbers.
            named: False if names of accounts must be hidden.
        """
        columns = list(zip(*rows, strict=True)) or [()] * 10
        node, gpu, index, profile, start, size, since, until, account, sm = columns
        gpu_codes, gpus = _coded(zip(node, index, gpu, strict=True), _gpu_order)
        profile_codes, profiles = _coded(profile, profile_order)
        names = (name or _NO_ACCOUNT for name in account) if named else ("all accounts" for _ in account)
        account_codes, accounts = _coded(names, str)
        ends = [end if moment is None else moment for moment in until]
        return cls(
            gpu_codes, profile_codes, account_codes, np.array(start, np.int64),
            np.minimum(np.array(size, np.int64), _MOST_SLICES - 1),
            np.array(since, np.float64), np.array(ends, np.float64), np.array(sm, np.float64), gpus,
            [wholes.get(uuid, WHOLE) for _, _, uuid in gpus], profiles, accounts,
        )  # fmt: skip

    @cached_property
    def weight(self) -> Reals:
        """GPU equivalents of each slice."""
        shape = (max(len(self.gpus), 1), max(len(self.profiles), 1), _MOST_SLICES)
        distinct, inverse = np.unique(
            np.ravel_multi_index((self.gpu, self.profile, self.size), shape), return_inverse=True
        )
        combinations = zip(*(column.tolist() for column in np.unravel_index(distinct, shape)), strict=True)
        shares = [gpu_equivalent(self.profiles[profile], size, self.wholes[gpu]) for gpu, profile, size in combinations]
        weights: Reals = np.array(shares, np.float64)[inverse]
        return weights

    @cached_property
    def activity(self) -> tuple[Reals, Reals, Reals]:
        """GPU equivalents that were busy, idle and not sampled, of each slice."""
        unknown = np.isnan(self.sm)
        busy = np.where(unknown, 0.0, self.sm)
        return self.weight * busy, self.weight * np.where(unknown, 0.0, 1 - busy), self.weight * unknown


def _coded(values: Iterable[Any], order: Any) -> tuple[Codes, list[Any]]:
    """Return the index of each value in the sorted list of distinct values."""
    code_of: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    codes = np.fromiter(map(code_of.__getitem__, values), np.int64)
    distinct = sorted(code_of, key=order)
    number_of = np.empty(len(distinct), np.int64)
    number_of[[code_of[value] for value in distinct]] = np.arange(len(distinct))
    return number_of[codes], distinct


def _gpu_order(gpu: tuple[str, int | None, str]) -> tuple[str, int, str]:
    node, index, uuid = gpu
    return node, -1 if index is None else index, uuid


def profile_order(text: str) -> tuple[tuple[int, int, str], str]:
    """Order profiles by size; runs with several slices come after their first profile, other texts last."""
    try:
        profile = Profile.parse(text.split(",")[0].split(":")[0])
    except ProfileError:
        return (1000, 0, ""), text
    return (profile.compute, profile.memory_gb, profile.suffix), text


def use_by_account(held: SliceColumns, bins: TimeBins) -> list[GpuHours]:
    """Return the use of each account, most first."""
    sums = [
        bins.held(held.since, held.until, part, held.account, len(held.accounts)).sum(axis=1) / HOUR_S
        for part in held.activity
    ]
    uses = [GpuHours(name, *map(float, parts)) for name, *parts in zip(held.accounts, *sums, strict=True)]
    return sorted((use for use in uses if use.total > 0), key=lambda use: -use.total)


def use_over_time(held: SliceColumns, bins: TimeBins) -> Reals:
    """Return GPU hours in each bin that were busy, idle and not sampled, shape (3, bins)."""
    single_group = np.zeros(len(held.since), np.int64)
    return np.concatenate([bins.held(held.since, held.until, part, single_group, 1) for part in held.activity]) / HOUR_S


def profiles_over_time(held: SliceColumns, bins: TimeBins) -> Reals:
    """Return the mean number of GPUs used by slices of each profile in each bin, shape (profiles, bins)."""
    sums = bins.held(held.since, held.until, held.weight, held.profile, len(held.profiles))
    return np.divide(sums, bins.lengths, out=np.zeros_like(sums), where=bins.lengths > 0)


@dataclass(frozen=True)
class LayoutOverTime:
    """Layouts of GPUs over time: a row for each memory slice of each GPU, from slice 0 of the first GPU on.

    Attributes:
        gpus: names of the GPUs; `slices`: memory slices of each.
        profile: index of the profile that held the memory slice for most of the bin; -1 if it was held for less than
            half of it. Shape (gpus x slices, bins).
        share: part of the bin for which it was held, 0 to 1, of the same shape.
        left_out: number of GPUs not included.
    """

    gpus: Sequence[str]
    slices: int
    profile: Codes
    share: Reals
    left_out: int


def layout_over_time(
    held: SliceColumns, bins: TimeBins, known: Iterable[tuple[str, int | None, str]], max_gpus: int
) -> LayoutOverTime:
    """Return the layouts of the first `max_gpus` GPUs by node and index. `known`: (node, index, UUID) of further GPUs,
    which may have held nothing.
    """
    by_uuid = {gpu[2]: gpu for gpu in (*held.gpus, *known)}
    ordered = sorted(by_uuid.values(), key=_gpu_order)
    shown = {gpu[2]: row for row, gpu in enumerate(ordered[:max_gpus])}
    rows = np.array([shown.get(gpu[2], -1) for gpu in held.gpus], np.int64)
    slices = int((held.start + held.size).max()) if len(held.size) else 8
    row = rows[held.gpu] if len(held.gpu) else held.gpu
    shown_rows = np.flatnonzero(row >= 0)
    # one entry for each memory slice of each lease
    lease = np.repeat(shown_rows, held.size[shown_rows])
    within = np.arange(len(lease)) - np.repeat(
        np.cumsum(held.size[shown_rows]) - held.size[shown_rows], held.size[shown_rows]
    )
    cell = row[lease] * slices + held.start[lease] + within
    cells, profiles = len(shown) * slices, max(len(held.profiles), 1)
    sums = bins.held(
        held.since[lease],
        held.until[lease],
        np.ones(len(lease)),
        cell * profiles + held.profile[lease],
        cells * profiles,
    ).reshape(cells, profiles, bins.count)
    lengths = np.where(bins.lengths > 0, bins.lengths, np.inf)
    share = np.minimum(sums.sum(axis=1) / lengths, 1.0)
    profile = np.where(share >= _MOSTLY, sums.argmax(axis=1), -1)
    names = [f"{node} GPU {uuid if index is None else index}" for node, index, uuid in ordered[:max_gpus]]
    return LayoutOverTime(names, slices, profile, share, len(ordered) - len(shown))


@dataclass(frozen=True)
class Waits:
    """Runs of one profile by how long they waited: a number for each class of `WAITS`."""

    profile: str
    runs: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of runs."""
        return sum(self.runs)


def waits_by_profile(rows: Iterable[tuple[str, int, int]], max_profiles: int) -> list[Waits]:
    """Return the waits of the `max_profiles` profiles with most runs, by size, from (profile, class, runs); those of
    the others in one, which comes last.
    """
    counts: dict[str, list[int]] = {}
    for profile, number, runs in rows:
        counts.setdefault(profile, [0] * len(WAITS))[number] += runs
    by_runs = sorted(counts, key=lambda profile: -sum(counts[profile]))
    waits = [Waits(profile, tuple(counts[profile])) for profile in sorted(by_runs[:max_profiles], key=profile_order)]
    if rest := by_runs[max_profiles:]:
        waits.append(Waits("others", tuple(map(sum, zip(*(counts[profile] for profile in rest), strict=True)))))
    return waits


@dataclass(frozen=True)
class Agreement:
    """One figure of runs, predicted against measured.

    Attributes:
        runs: number of runs that have both values.
        counts: runs by bin of the measured and the predicted value, shape (bins, bins); `edges` of both, in log10.
        within: share of runs whose prediction is off by at most 10, 25 and 50 % of the measured value.
        middle: median of predicted over measured.
    """

    runs: int
    counts: Codes
    edges: Reals
    within: tuple[float, float, float]
    middle: float


def agreement(predicted: Reals, measured: Reals) -> Agreement | None:
    """Compare predicted with measured values; pairs with an unknown (nan) or non-positive value are ignored."""
    with np.errstate(invalid="ignore"):
        usable = (predicted > 0) & (measured > 0)
    predicted, measured = predicted[usable], measured[usable]
    if not len(measured):
        return None
    ratio = predicted / measured
    deviation = np.abs(ratio - 1)
    logs = np.log10(np.stack([measured, predicted]))
    low, high = float(logs.min()), float(logs.max())
    margin = max(0.05, (high - low) * 0.02)
    edges = np.linspace(low - margin, high + margin, 41)  # 40 bins
    counts = np.histogram2d(logs[0], logs[1], bins=(edges, edges))[0].astype(np.int64)
    within = tuple(float((deviation <= bound).mean()) for bound in (0.1, 0.25, 0.5))
    return Agreement(len(measured), counts, edges, (within[0], within[1], within[2]), float(np.median(ratio)))


@dataclass(frozen=True)
class Loans:
    """Loans over time.

    Attributes:
        started: per bin.
        ended: cause -> number per bin.
        hours: GPU hours on loan within the window.
        leaving_s: median seconds from the signal to the requeue of reclaimed loans; None without any.
    """

    started: Codes
    ended: dict[str, Codes]
    hours: float
    leaving_s: float | None


def loans_over_time(rows: Sequence[Sequence[Any]], bins: TimeBins, wholes: Wholes = NO_GPUS) -> Loans:
    """Sum up rows of `store.windows.loans`."""
    weight = np.array([gpu_equivalent(row[0], row[7], wholes.get(row[6], WHOLE)) for row in rows], np.float64)
    since = np.array([row[1] for row in rows], np.float64)
    until = np.array([bins.end if row[4] is None else row[4] for row in rows], np.float64)
    hours = bins.held(since, until, weight, np.zeros(len(rows), np.int64), 1).sum() / HOUR_S
    ended: dict[str, list[float]] = {}
    for row in rows:
        if row[4] is not None and bins.start <= row[4] <= bins.end:
            ended.setdefault(row[5] or "ended", []).append(row[4])
    leaving = [row[3] - row[2] for row in rows if row[2] is not None and row[3] is not None and row[3] >= row[2]]
    started = since[(since >= bins.start) & (since <= bins.end)]
    return Loans(
        np.bincount(bins.of(started), minlength=bins.count),
        {
            cause: np.bincount(bins.of(np.array(moments)), minlength=bins.count)
            for cause, moments in sorted(ended.items())
        },
        float(hours),
        median(leaving) if leaving else None,
    )

"""Predict what a recurring `mig:auto` job without hints needs from its own runs.

Memory. Each run has the peak of the slice that held most. Runs are taken as exchangeable, so the next run exceeds the
largest of n peaks with probability 1/(n+1): from n = 9 on the largest peak covers the required 90 % quantile. With
fewer runs it does not; the upper prediction bound of a log-normal is used instead (Student's t with n-1
degrees of freedom, 90 %), if that is larger than the largest peak. SAMPLED is added in either case, for what the
agent misses between two samples. A run that failed with its slice full (FULL, as in `predict.runs`), or reported out of
memory, needs more than that slice had, for as long as it is among the newest WINDOW runs. How much more is
unknown: the next run gets GROWTH times as much; if no run has completed yet it gets the largest slice, once,
so that this run measures the need. No run fails for memory twice in a row if the need grows by no more
than a third from one run to the next.

Use is not need: some programs take a fixed share of any slice. They are recognised by the name of their engine
(the submit filter looks for it), or by the same share of slices of different sizes (ALIKE). Their use
says nothing about their need; they get the smallest slice on which one of their runs completed.

Hints. A job with hints gets what is predicted for them, but not a slice on which a run of the same job with the same
hints ran out of memory (`exceeded_mib`).

Speed. If the used share of SMs and of memory bandwidth was sampled, no slice is chosen that would be slower by
more than the site allows than the smallest slice on which runs completed: the sampled use must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from slurm_migbatch.values.figures import gib
from slurm_migbatch.workload.catalog import ProfileOffer

WINDOW: Final = 20
"""Newest runs of a job that count."""
FULL: Final = 0.9
"""Share of its slice's memory from which a failed run counts as out of memory."""
SAMPLED: Final = 1.05
"""Added to the largest sampled peak, because the agent misses peaks between two samples."""
GROWTH: Final = 1.9
"""Memory of the next run relative to the slice that was full: nearly double, because slice sizes are steps."""
UNNAMED: Final = "the program"
"""Name of a program with a fixed share and no known engine."""
ALIKE: Final = 0.12
"""Largest relative difference between shares of slices of different sizes that still counts as a fixed share."""
LEAST_SHARE: Final = 0.5
"""A smaller fixed share leaves room on every slice and need not be distinguished from a need."""
APART: Final = 1.5
"""Minimum ratio of two slice sizes for their shares to be compared."""
_T90: Final = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415)
"""Student's t, one-sided 90 %, for 1 to 7 degrees of freedom: those of 2 to 8 runs."""

DONE, OUT_OF_MEMORY, FAILED, CUT = "done", "oom", "failed", "cut"
"""How a run ended: it completed or reached its time limit; it reported out of memory; it failed; it was cancelled."""


class PastRun(NamedTuple):
    """One ended run of a recurring job.

    Attributes:
        run: its number in the record.
        profile: GRES type of its slices, all of one type.
        ended: DONE, OUT_OF_MEMORY, FAILED or CUT.
        peak_mib: the peak of the slice that held most; None if too little was sampled.
        sm, dram: shares (0 to 1) of the slice's SMs and memory bandwidth in use over the whole run; None: not sampled.
        engine: the engine with a fixed share that the submit filter found; empty for any other program.
        work: label of the work that its hints described; empty if they described none that is known.
    """

    run: int
    profile: str
    ended: str
    peak_mib: float | None = None
    sm: float | None = None
    dram: float | None = None
    engine: str = ""
    work: str = ""


@dataclass(frozen=True)
class RunsPolicy:
    """The site's settings: `runs` completed runs make a history (0: histories are not used), `slowdown` is how many
    times longer a run may be expected to take than on the smallest slice on which runs completed.
    """

    runs: int = 0
    slowdown: float = 1.1


NO_RUNS: Final = RunsPolicy()
"""Histories are not used."""


@dataclass(frozen=True)
class ShownNeed:
    """What the next run needs, by its earlier runs.

    Attributes:
        runs: number of runs used.
        peak_mib: their largest peak.
        need_mib: memory that a slice must have.
        full_mib: memory of the largest slice on which a run ran out; 0 if none did or peaks require more.
        unknown: the last run ran out and none has completed.
        engine: the engine with a fixed share; empty if peaks are needs.
        sm_slices, bandwidth_mib: compute slices that were busy, and memory of a slice with sufficient bandwidth; 0 if
            not sampled.
    """

    runs: int
    peak_mib: float
    need_mib: int
    full_mib: int = 0
    unknown: bool = False
    engine: str = ""
    sm_slices: float = 0.0
    bandwidth_mib: float = 0.0

    def slowdown(self, offer: ProfileOffer) -> float:
        """Return how many times longer a run is expected to take on a slice than on the measured one."""
        return max(1.0, self.sm_slices / max(offer.compute_slices, 1), self.bandwidth_mib / offer.memory_mib)


def counted(past: Sequence[PastRun]) -> int:
    """Return the number of completed runs with a peak."""
    return sum(run.ended == DONE and run.peak_mib is not None for run in past[-WINDOW:])


def ran_out(run: PastRun, capacity_mib: float | None) -> bool:
    """Return whether a run failed because its slice had too little memory.

    For a program with a fixed share a full slice means nothing; the program must report it.
    """
    if run.ended == OUT_OF_MEMORY:
        return True
    full = capacity_mib is not None and run.peak_mib is not None and run.peak_mib >= FULL * capacity_mib
    return run.ended == FAILED and full and not run.engine


def reserving(past: Sequence[PastRun], capacities: Mapping[str, float]) -> str:
    """Return what takes a fixed share of its slice: the engine's name, UNNAMED if only the runs show it, else ""."""
    engine = next((run.engine for run in reversed(past) if run.engine), "")
    if engine:
        return engine
    ended = [run for run in past if run.ended in (DONE, CUT)]  # a run that ran out filled its slice whatever it needed
    same_share = fixed_share([(capacities.get(run.profile, 0.0), run.peak_mib or 0.0) for run in ended])
    return UNNAMED if same_share else ""


def fixed_share(seen: Sequence[tuple[float, float]]) -> bool:
    """Return whether runs held the same large share of slices of different sizes, by the capacity and peak (MiB) of
    each run; pairs with a 0 are left out.
    """
    usable = [(capacity, peak) for capacity, peak in seen if capacity > 0 and peak > 0]
    if not usable or max(usable)[0] < APART * min(usable)[0]:
        return False
    shares = [peak / capacity for capacity, peak in usable]
    return min(shares) >= LEAST_SHARE and max(shares) - min(shares) <= ALIKE * max(shares)


def bound(peaks: Sequence[float]) -> float:
    """Return the MiB that the next run stays below with probability 90 % (see above), from at least one peak.

    For a single run: its peak and half as much again.
    """
    largest, count = max(peaks), len(peaks)
    if count == 1:
        return largest * 1.5
    if count <= len(_T90) + 1:
        logs = [math.log(peak) for peak in peaks]
        largest = max(largest, math.exp(fmean(logs) + _T90[count - 2] * stdev(logs) * math.sqrt(1 + 1 / count)))
    return largest * SAMPLED


def need_of(past: Sequence[PastRun], offers: Mapping[str, ProfileOffer], least: int) -> ShownNeed | None:
    """Return the need by the newest runs; None while fewer than `least` completed and none ran out of memory.

    Args:
        past: runs, the newest last.
        offers: slices by GRES type. Of runs on others only the peak counts.
        least: number of completed runs in a history.
    """
    past = past[-WINDOW:]
    capacities = {name: float(offer.memory_mib) for name, offer in offers.items()}
    exhausted = [run for run in past if ran_out(run, capacities.get(run.profile))]
    if counted(past) < least and not exhausted:
        return None
    done = [run for run in past if run.ended == DONE]
    engine = reserving(past, capacities)
    named = engine not in ("", UNNAMED)
    last_ran_out = bool(exhausted) and exhausted[-1] is past[-1]
    full = math.floor(max((capacities.get(run.profile, 0.0) for run in exhausted), default=0.0))
    floor = (math.floor(full * GROWTH) if last_ran_out and not named else full + 1) if full else 0
    if engine:
        sufficient = [capacities[run.profile] for run in done if capacities.get(run.profile, 0.0) >= floor]
        need = math.floor(min(sufficient)) if sufficient else floor
    else:
        need = max(_by_peaks(past, exhausted), floor)
    if not need:
        return None
    unknown = last_ran_out and not done and not named
    largest_peak = max((run.peak_mib for run in past if run.peak_mib), default=0.0)
    return ShownNeed(
        len(past), largest_peak, need, full if need == floor else 0, unknown, engine, *_use_on_smallest(done, offers)
    )


def exceeded_mib(past: Sequence[PastRun], offers: Mapping[str, ProfileOffer], work: str, *, fills: bool) -> int:
    """Return the MiB of the largest slice on which a run of this work ran out of memory, and none has completed since
    on one as small; 0 if there is none. `fills`: the program takes a fixed share, so it must report it.
    """
    exceeded: list[int] = []
    for run in past[-WINDOW:]:
        offer = offers.get(run.profile)
        if offer is None or run.work != work:
            continue
        if run.ended == OUT_OF_MEMORY if fills else ran_out(run, offer.memory_mib):
            exceeded.append(offer.memory_mib)
        elif run.ended == DONE:
            exceeded = [mib for mib in exceeded if mib < offer.memory_mib]
    return max(exceeded, default=0)


def may_have_run_out(run: PastRun) -> bool:
    """Return whether `ran_out` may be true of a run on some slice."""
    return run.ended == OUT_OF_MEMORY or (run.ended == FAILED and run.peak_mib is not None)


def _by_peaks(past: Sequence[PastRun], short: Sequence[PastRun]) -> int:
    """Return the MiB that peaks require; peaks of runs that did not complete are lower bounds."""
    peaks = [run.peak_mib for run in past if run.ended == DONE and run.peak_mib]
    others = [run.peak_mib for run in past if run.ended != DONE and run.peak_mib and run not in short]
    return math.ceil(max(bound(peaks) if peaks else 0.0, max(others, default=0.0) * SAMPLED))


def _use_on_smallest(done: Sequence[PastRun], offers: Mapping[str, ProfileOffer]) -> tuple[float, float]:
    """Return what is in use on the smallest slice with completed runs: compute slices, and memory bandwidth as MiB of
    slice memory.
    """
    known = [run for run in done if run.profile in offers]
    if not known:
        return 0.0, 0.0
    smallest = min(known, key=lambda run: (offers[run.profile].compute_slices, offers[run.profile].memory_mib)).profile
    runs = [run for run in known if run.profile == smallest]
    sm = [run.sm for run in runs if run.sm is not None]
    dram = [run.dram for run in runs if run.dram is not None]
    offer = offers[smallest]
    return (
        median(sm) * offer.compute_slices if sm else 0.0,
        median(dram) * offer.memory_mib if dram else 0.0,
    )


SENTENCES: Final = {
    "runs": "the smallest slice with %s GiB (of %s GiB): your last %d runs of %s used at most %s GiB",
    "runs_kept": "your last %d runs of %s filled every slice they had (%s allocates a fixed share), so their need is "
    "unknown; this is the smallest on which one completed",
    "runs_full": "a larger slice, with %s GiB: a run of %s filled its slice of %s GiB",
    "runs_unknown": "the largest slice once, with %s GiB: the last run of %s filled its slice and none has completed, "
    "so their need is unknown",
    "runs_short": "the largest slice, with %s GiB: your last %d runs of %s needed %s GiB; see --comment='migbatch: "
    "mem=...'",
    "runs_larger": "a larger slice than predicted, with %s GiB: a run of %s with these hints ran out of memory on one "
    "with %s GiB; mem= in the hints states the need",
    "runs_largest": "no slice larger than one with %s GiB is available to the job, and a run of %s with these hints "
    "ran out of memory on one with %s GiB",
    "runs_few": "the site's default, as the job has no hints: after %d completed runs of %s (%d so far) it gets what "
    "they used; or add --comment='migbatch: model=... batch=...' or mem=...",
}
"""Why a slice was chosen for a recurring job, for the user; the keys are reasons in addition to `selection.REASONS`.
The submit shims do not have them: only the service knows the runs.
"""


ADVICE: Final = "your last %d runs of %s used at most %s GiB: --gres=mig:%s is enough"
"""Note to a user whose job requests a whole GPU."""


@dataclass(frozen=True)
class RecurringJob:
    """The history of a job that is submitted again: its name for messages and its runs, the newest last."""

    name: str
    past: tuple[PastRun, ...] = ()


def pick(
    job: RecurringJob, need: ShownNeed, allowed: Sequence[ProfileOffer], policy: RunsPolicy
) -> tuple[ProfileOffer, str, str]:
    """Return the slice, the reason (a key of SENTENCES) and the sentence; `allowed` from the cheapest, not empty."""
    offer, reason, smallest = choose(need, allowed, policy)
    details: tuple[object, ...] = (gib(need.need_mib), gib(offer.memory_mib), need.runs, job.name, gib(need.peak_mib))
    if reason == "runs_short":
        details = (gib(offer.memory_mib), need.runs, job.name, gib(need.need_mib))
    elif reason == "runs_unknown":
        details = (gib(offer.memory_mib), job.name)
    elif reason == "runs_full":
        details = (gib(offer.memory_mib), job.name, gib(need.full_mib))
    elif reason == "runs_kept":
        details = (need.runs, job.name, need.engine)
    slower = "" if offer == smallest else f"; on {smallest.profile.gres_type} they would take longer"
    return offer, reason, SENTENCES[reason] % details + slower


def choose(
    need: ShownNeed, allowed: Sequence[ProfileOffer], policy: RunsPolicy
) -> tuple[ProfileOffer, str, ProfileOffer]:
    """Return the slice, the reason, and the smallest slice that has the memory, if runs would take longer on it."""
    holding = [offer for offer in allowed if offer.memory_mib >= need.need_mib]
    if need.unknown or not holding:
        offer = max(allowed, key=lambda profile: profile.memory_mib)
        return offer, "runs_unknown" if holding else "runs_short", offer
    offer = next((fast for fast in holding if need.slowdown(fast) <= policy.slowdown), None) or min(
        holding, key=need.slowdown
    )
    return offer, "runs_full" if need.full_mib else "runs_kept" if need.engine else "runs", holding[0]


def advise(job: RecurringJob, whole: ProfileOffer, offers: Mapping[str, ProfileOffer], policy: RunsPolicy) -> str:
    """Return the note for a job that requests a whole GPU although its runs fit a slice, else ""."""
    need = need_of(job.past, offers, policy.runs)
    if need is None or need.engine or need.full_mib or need.unknown:
        return ""
    plain = [offer for offer in offers.values() if not offer.profile.suffix]
    offer, reason, _ = pick(job, need, plain, policy)
    if reason != "runs" or offer.memory_mib >= whole.memory_mib:
        return ""
    return ADVICE % (need.runs, job.name, gib(need.peak_mib), offer.profile.gres_type)

"""What a recurring job needs, from what its own runs showed: for `mig:auto` jobs that say nothing.

Memory. Each run shows the most that one of its slices held. Runs are taken as exchangeable, so the largest of n peaks
is exceeded by the next run's with probability 1/(n+1): from n = 9 on it bears the 90 % quantile that is wanted. Fewer
runs cannot bear it by rank alone; for them the upper prediction bound of a log-normal is taken (Student's t with n-1
degrees of freedom, 90 %), where that is larger than the largest peak. SAMPLED is added in either case, for what the
agent misses between two looks. A run that failed with its slice full (FULL, as in `predict.runs`), or said itself that
memory ran out, needs more than that slice had, for as long as it is among the newest WINDOW runs. How much more is not
known: the next run gets GROWTH times as much; where no run has completed yet it gets the largest slice, for this once,
so that the second one shows what is needed. No run fails for memory twice in a row where the need grows by no more
than a third from one run to the next.

Use is not need: some programs take a fixed share of whatever slice they get. They are known by the name of their engine
(the submit filter looks for it), or by having held the same share of slices of different sizes (ALIKE). What they held
says nothing about what they need; the smallest slice on which one of their runs completed does.

Speed. Where the share of SMs and of memory bandwidth in use was sampled, no slice is chosen that would be slower by
more than the site allows than the smallest slice on which runs completed: what was in use there must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Final

from slurm_migbatch.workload.catalog import ProfileOffer

WINDOW: Final = 20
"""Newest runs of a job that count."""
FULL: Final = 0.9
"""Share of its slice's memory that a failed run held where memory was what it lacked."""
SAMPLED: Final = 1.05
"""Peaks between two looks of the agent are missed; this much is added to the largest that was seen."""
GROWTH: Final = 1.9
"""How many times more memory than the slice that was full the next run gets: nearly the double, as slices come."""
UNNAMED: Final = "the program"
"""What takes a fixed share where nothing names it."""
ALIKE: Final = 0.12
"""Shares of slices of different sizes that differ by no more than this (relative) are a fixed share."""
LEAST_SHARE: Final = 0.5
"""A fixed share that is smaller than this leaves room on every slice and need not be told from a need."""
APART: Final = 1.5
"""How many times larger a slice must be than another for their shares to tell something."""
_T90: Final = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415)
"""Student's t, one-sided 90 %, for 1 to 7 degrees of freedom: those of 2 to 8 runs."""

DONE, OUT_OF_MEMORY, FAILED, CUT = "done", "oom", "failed", "cut"
"""How a run ended: it completed or ran into its time limit; it said that memory ran out; it failed; it was ended by
somebody else."""


@dataclass(frozen=True)
class PastRun:
    """One ended run of a recurring job.

    Attributes:
        run: the record's number of it.
        profile: GRES type of its slices, which were all alike.
        ended: DONE, OUT_OF_MEMORY, FAILED or CUT.
        peak_mib: the most that one of its slices held; None where too little was seen of it.
        sm, dram: shares (0 to 1) of the slice's SMs and memory bandwidth in use over the whole run; None: not sampled.
        engine: what takes a fixed share, by the submit filter's word; empty for any other program.
    """

    run: int
    profile: str
    ended: str
    peak_mib: float | None = None
    sm: float | None = None
    dram: float | None = None
    engine: str = ""

    def to_list(self) -> list[Any]:
        """Return the values, JSON-able."""
        return [self.run, self.profile, self.ended, self.peak_mib, self.sm, self.dram, self.engine]

    @classmethod
    def of_list(cls, values: Sequence[Any]) -> PastRun:
        """Return the run that `to_list` described."""
        return cls(*values)


@dataclass(frozen=True)
class RunsPolicy:
    """The site's choices: `runs` completed runs make a history (0: histories are not used), `slowdown` is how many
    times longer a run may be expected to take than on the smallest slice on which runs completed."""

    runs: int = 0
    slowdown: float = 1.1


NO_RUNS: Final = RunsPolicy()
"""Histories are not used."""


@dataclass(frozen=True)
class ShownNeed:
    """What runs showed that the next one needs.

    Attributes:
        runs: how many runs it rests on.
        peak_mib: the most that one of them held.
        need_mib: what a slice must have.
        full_mib: memory of the largest slice on which a run ran out; 0 where none did or peaks ask for more.
        unknown: the last run ran out and none has completed.
        engine: what takes a fixed share; empty where peaks are needs.
        sm_slices, bandwidth_mib: compute slices that were busy, and memory of a slice whose bandwidth would do; 0 where
            that was not sampled.
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
        """Return how many times longer a run is expected to take there than on the slice that was measured."""
        return max(1.0, self.sm_slices / max(offer.compute_slices, 1), self.bandwidth_mib / offer.memory_mib)


def counted(past: Sequence[PastRun]) -> int:
    """Return how many completed runs with a peak there are."""
    return sum(run.ended == DONE and run.peak_mib is not None for run in past[-WINDOW:])


def ran_out(run: PastRun, capacity_mib: float | None) -> bool:
    """Return whether a run died because its slice had too little memory.

    Of a program that is known to take a fixed share a full slice tells nothing; it has to say so itself.
    """
    if run.ended == OUT_OF_MEMORY:
        return True
    full = capacity_mib is not None and run.peak_mib is not None and run.peak_mib >= FULL * capacity_mib
    return run.ended == FAILED and full and not run.engine


def reserving(past: Sequence[PastRun], capacities: Mapping[str, float]) -> str:
    """Return what takes a fixed share of its slice: the engine's name, UNNAMED where only the runs show it, else ""."""
    named = next((run.engine for run in reversed(past) if run.engine), "")
    if named:
        return named
    held = [run for run in past if run.ended in (DONE, CUT)]  # what ran out was full whatever it needed
    alike = fixed_share([(capacities.get(run.profile, 0.0), run.peak_mib or 0.0) for run in held])
    return UNNAMED if alike else ""


def fixed_share(seen: Sequence[tuple[float, float]]) -> bool:
    """Return whether runs held the same large share of slices of different sizes.

    Args:
        seen: capacity and peak (MiB) of each run; pairs with a 0 are left out.
    """
    known = [(capacity, peak) for capacity, peak in seen if capacity > 0 and peak > 0]
    if not known or max(known)[0] < APART * min(known)[0]:
        return False
    shares = [peak / capacity for capacity, peak in known]
    return min(shares) >= LEAST_SHARE and max(shares) - min(shares) <= ALIKE * max(shares)


def bound(peaks: Sequence[float]) -> float:
    """Return the MiB that the next run stays below with 90 %, see above; at least one peak.

    A single run bears nothing: its peak and half as much again.
    """
    largest, count = max(peaks), len(peaks)
    if count == 1:
        return largest * 1.5
    if count <= len(_T90) + 1:
        logs = [math.log(peak) for peak in peaks]
        largest = max(largest, math.exp(fmean(logs) + _T90[count - 2] * stdev(logs) * math.sqrt(1 + 1 / count)))
    return largest * SAMPLED


def need_of(past: Sequence[PastRun], offers: Mapping[str, ProfileOffer], least: int) -> ShownNeed | None:
    """Return what the newest runs show; None while fewer than `least` completed and none ran out of memory.

    Args:
        past: runs, the newest last.
        offers: slices by GRES type. Of runs on others only the peak counts.
        least: how many completed runs make a history.
    """
    past = past[-WINDOW:]
    capacities = {name: float(offer.memory_mib) for name, offer in offers.items()}
    short = [run for run in past if ran_out(run, capacities.get(run.profile))]
    if counted(past) < least and not short:
        return None
    done = [run for run in past if run.ended == DONE]
    engine = reserving(past, capacities)
    named = engine not in ("", UNNAMED)
    just_now = bool(short) and short[-1] is past[-1]
    full = math.floor(max((capacities.get(run.profile, 0.0) for run in short), default=0.0))
    floor = (math.floor(full * GROWTH) if just_now and not named else full + 1) if full else 0
    if engine:
        enough = [capacities[run.profile] for run in done if capacities.get(run.profile, 0.0) >= floor]
        need = math.floor(min(enough)) if enough else floor
    else:
        need = max(_by_peaks(past, short), floor)
    if not need:
        return None
    unknown = just_now and not done and not named
    most = max((run.peak_mib for run in past if run.peak_mib), default=0.0)
    return ShownNeed(len(past), most, need, full if need == floor else 0, unknown, engine, *_busy(done, offers))


def _by_peaks(past: Sequence[PastRun], short: Sequence[PastRun]) -> int:
    """Return the MiB that peaks ask for; those of runs that did not complete are what was needed at least."""
    peaks = [run.peak_mib for run in past if run.ended == DONE and run.peak_mib]
    others = [run.peak_mib for run in past if run.ended != DONE and run.peak_mib and run not in short]
    return math.ceil(max(bound(peaks) if peaks else 0.0, max(others, default=0.0) * SAMPLED))


def _busy(done: Sequence[PastRun], offers: Mapping[str, ProfileOffer]) -> tuple[float, float]:
    """Return the compute slices and the memory-wide bandwidth in use on the smallest slice with completed runs."""
    known = [run for run in done if run.profile in offers]
    if not known:
        return 0.0, 0.0
    least = min(known, key=lambda run: (offers[run.profile].compute_slices, offers[run.profile].memory_mib)).profile
    here = [run for run in known if run.profile == least]
    sm = [run.sm for run in here if run.sm is not None]
    dram = [run.dram for run in here if run.dram is not None]
    offer = offers[least]
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
    "runs_few": "the site's default, as the job has no hints: after %d completed runs of %s (%d so far) it gets what "
    "they used; or add --comment='migbatch: model=... batch=...' or mem=...",
}
"""Why a slice was chosen for a recurring job, for the user; the keys are reasons beside `selection.REASONS`. The submit
shims do not have them: runs are known to the service alone."""


ADVICE: Final = "your last %d runs of %s used at most %s GiB: --gres=mig:%s is enough"
"""What a user is told whose job asks for a whole GPU."""


@dataclass(frozen=True)
class RecurringJob:
    """What is known of a job when it is submitted once more: its name for messages and its runs, the newest last."""

    name: str
    past: tuple[PastRun, ...] = ()


def pick(
    job: RecurringJob, need: ShownNeed, allowed: Sequence[ProfileOffer], policy: RunsPolicy
) -> tuple[ProfileOffer, str, str]:
    """Return the slice, the reason (a key of SENTENCES) and the sentence; `allowed` from the cheapest, not empty."""
    holding = [offer for offer in allowed if offer.memory_mib >= need.need_mib]
    if not holding:
        offer = max(allowed, key=lambda each: each.memory_mib)
        short = (_gib(offer.memory_mib), need.runs, job.name, _gib(need.need_mib))
        return offer, "runs_short", SENTENCES["runs_short"] % short
    if need.unknown:
        offer = max(allowed, key=lambda each: each.memory_mib)
        return offer, "runs_unknown", SENTENCES["runs_unknown"] % (_gib(offer.memory_mib), job.name)
    offer = next((each for each in holding if need.slowdown(each) <= policy.slowdown), min(holding, key=need.slowdown))
    slower = "" if offer == holding[0] else f"; on {holding[0].profile.gres_type} they would take longer"
    if need.full_mib:
        text = SENTENCES["runs_full"] % (_gib(offer.memory_mib), job.name, _gib(need.full_mib))
        return offer, "runs_full", text + slower
    if need.engine:
        return offer, "runs_kept", SENTENCES["runs_kept"] % (need.runs, job.name, need.engine) + slower
    words = (_gib(need.need_mib), _gib(offer.memory_mib), need.runs, job.name, _gib(need.peak_mib))
    return offer, "runs", SENTENCES["runs"] % words + slower


def advise(job: RecurringJob, whole: ProfileOffer, offers: Mapping[str, ProfileOffer], policy: RunsPolicy) -> str:
    """Return one sentence for a job that asks for a whole GPU where its runs would have done with a slice, else ""."""
    need = need_of(job.past, offers, policy.runs)
    if need is None or need.engine or need.full_mib or need.unknown:
        return ""
    plain = [offer for offer in offers.values() if not offer.profile.suffix]
    offer, reason, _ = pick(job, need, plain, policy)
    if reason != "runs" or offer.memory_mib >= whole.memory_mib:
        return ""
    return ADVICE % (need.runs, job.name, _gib(need.peak_mib), offer.profile.gres_type)


def _gib(mib: float) -> str:
    return f"{mib / 1024:.3g}"

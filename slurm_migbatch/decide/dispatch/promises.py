"""The promise of a decision: the profiles that meet a job's request as the granted one does, from the record.

A job whose decision has no record, because the compiled table chose, gets the same alternatives from the predictions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from slurm_migbatch.decide.capacity.comments import hints_of
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.dispatch.pending import Pending
from slurm_migbatch.decide.snapshot import Predictions, WeighedProfile
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.excluded import user_text

Known = OrderedDict[str, "Promise | None"]
"""Alternatives by the name of the filter's decision, or by comment and partition if it has none."""
CHOSEN: Final = frozenset({"fits", "batch_chosen", "by_memory", "unknown_model", "no_hints", "runs_few"})
"""Reasons of decisions (`predict.selection.REASONS`, `predict.recurring.SENTENCES`) that met the request with a profile
that the user did not name.
"""
UNNAMED: Final = "auto"
"""The decision's name if the compiled table chose: it has no record."""
REMEMBERED: Final = 100_000
"""Maximum number of decisions kept in memory."""


@dataclass(frozen=True)
class ProfileOption:
    """A profile that a job can have; `rate` is the conservative items a second of one slice, None: unknown."""

    profile: Profile
    rate: float | None = None


@dataclass(frozen=True)
class Promise:
    """What a decision promised a job: the granted profile, and all that meet the request, including it.

    `items` of the whole job (None: unknown), `deadline_s` from its start; `terms` describes the request. `retry`: it
    may be retried on a larger slice (retry=oom).
    """

    granted: Profile
    options: tuple[ProfileOption, ...]
    items: int | None = None
    deadline_s: int | None = None
    terms: str = ""
    retry: bool = False

    def seconds(self, profile: Profile, slice_count: int = 1) -> float | None:
        """Return the maximum duration on `slice_count` slices of a profile; None if unknown."""
        rate = next((option.rate for option in self.options if option.profile == profile), None)
        return None if not rate or self.items is None else self.items / (rate * slice_count)

    def within(self, seconds: float, slice_count: int = 1) -> Promise:
        """Return the promise of a job that has to be done in so many seconds, on `slice_count` slices."""
        options = (o for o in self.options if (takes := self.seconds(o.profile, slice_count)) and takes <= seconds)
        return replace(self, options=tuple(options))


def promise_of(
    granted: Profile, candidates: Iterable[WeighedProfile], items: int | None, deadline_s: int | None, terms: str = ""
) -> Promise | None:
    """Return the alternatives of a job that was granted this profile; None if there are none."""
    listed = list(candidates)
    granted_candidate = next((c for c in listed if c.profile == granted), None)
    if granted_candidate is None or not granted_candidate.ok:
        return None

    def is_as_good(other: WeighedProfile) -> bool:
        if not other.ok or other.memory_mib < granted_candidate.memory_mib:
            return False
        if granted_candidate.rate is None or other.rate is None:
            return other.rate == granted_candidate.rate and other.profile.compute >= granted.compute
        return deadline_s is not None or other.rate >= granted_candidate.rate

    options = tuple(ProfileOption(c.profile, c.rate) for c in listed if is_as_good(c))
    return Promise(granted, options, items, deadline_s, terms) if len(options) > 1 else None


def promise_from_record(row: Mapping[str, Any]) -> Promise | None:
    """Return the promise of a decision in the store's format (`Store.decision`); None if it has no alternatives."""
    facts, hints = row.get("facts"), row.get("hints")
    facts, hints = (part if isinstance(part, dict) else {} for part in (facts, hints))
    if facts.get("reason") not in CHOSEN:
        return None
    counts = slices(str(row.get("chosen") or ""))
    if len(counts) != 1:
        return None
    candidates = []
    for candidate in row.get("candidates") or ():
        try:
            profile, memory = Profile.parse(str(candidate["profile"])), int(candidate["capacity_mib"])
            bounds = candidate.get("throughput_per_s_range")
            candidates.append(
                WeighedProfile(profile, memory, float(bounds[0]) if bounds else None, bool(candidate["ok"]))
            )
        except (KeyError, TypeError, ValueError, IndexError):  # an old record, or created by hand
            return None
    promise = promise_of(next(iter(counts)), candidates, hints.get("items"), hints.get("deadline_s"), _terms(hints))
    return promise and replace(promise, retry=hints.get("retry") == "oom")


def _terms(hints: Mapping[str, Any]) -> str:
    terms = []
    if hints.get("slo_us"):
        terms.append(f"slo={hints['slo_us'] / 1000:g}ms")
    if hints.get("deadline_s"):
        terms.append(f"deadline={hints['deadline_s']}s")
    if hints.get("pipeline"):
        terms.append(f"pipeline={hints['pipeline']}")
    if hints.get("mem_mib"):
        terms.append(f"mem={hints['mem_mib']}MiB")
    terms += [f"{bound}={hints[bound]}" for bound in ("min", "max") if hints.get(bound)]
    return " ".join(terms)


class PromiseBook:
    """The alternatives of each pending job; `missing` are decisions needed for that."""

    def __init__(
        self, known: Known, absent: Mapping[str, tuple[float, float]], predictions: Predictions, now: float
    ) -> None:
        """Set up; `absent`: decisions missing from the record, each with when to query it again, and the delay."""
        self._known, self._absent, self._predictions, self._now = known, absent, predictions, now
        self.missing: dict[str, None] = {}

    def of(self, pending: Pending) -> Promise | None:
        """Return the alternatives of a job; None for nothing, or unknown."""
        name, known = pending.grant.decided, self._known
        key = f"{user_text(pending.row.comment)}@{pending.row.partition}" if name == UNNAMED else name
        if key in known:
            return known[key]
        if name != UNNAMED:
            if self._absent.get(name, (0.0, 0.0))[0] <= self._now:
                self.missing[name] = None
            return None
        promise, hints = None, hints_of(pending.row.comment)
        if hints is not None:
            # the compiled table chose, as the service does; the name of a pipeline does not change the answer
            choice = self._predictions.candidates(replace(hints, pipeline=None), pending.row.partition)
            promise = None if choice is None else promise_of(*choice, hints.items, hints.deadline_s)
        keep(known, key, promise)
        return promise


def keep(known: Known, key: str, promise: Promise | None) -> None:
    """Add a decision's promise to the known ones, in the place of the oldest if there are too many."""
    while len(known) >= REMEMBERED:
        known.popitem(last=False)
    known[key] = promise

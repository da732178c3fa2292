"""Turn finished runs into measured rows: what can be learned from them, and how much each counts.

A run on one slice teaches speed if the job reported it (`migbatch progress`), and memory from the driver. A completed
job without reports still shows that it processed its items (`items=` among the hints) within its lifetime: a lower
bound of the rate, startup included. So only long runs count, with less weight (`samples.SILENT`), and not at all
if other runs reported.

Jobs can report false figures, or count other things than the rest of the site does. So:

- figures more than ABSURD times away from physics are dropped, whoever reports them;
- one user's reports about a model count once: by the median of the user's runs, first for each cell;
- a user whose figures of a model are more than APART times away from those of the others (the median over users; of
  two, the one nearer to physics) is ignored for this model;
- runs of one user with larger or smaller batches than all of several others' count less, and not at all if they are
  unlikely by those (`outliers.unconfirmed`);
- memory of one user alone that is more than APART times below physics is ignored for a model whose specifications are
  known: the program may have left the GPU idle. So is the report of one user alone that more than FAR_ABOVE times as
  much was too little.

Memory is what the process took, which may be more than it needs (frameworks that take all memory): for a run whose
script names an engine that takes a fixed share of any slice, no memory is learned. For any other, a completed run
has shown that its peak is sufficient, so of several slices the smallest peak counts. A run that failed with its slice
full, or reported that it ran out of memory, needs more than that, by any factor. It is no measurement of the need, but
the next one gets a larger slice (`Learned.short`), unless a run of the same kind completed with less memory: not with a
smaller peak on a larger slice, of which the agent's samples missed the highest. Both rules apply within the runs of one
user, because one user's peak says little about another's need: over several users the median counts, of two the larger.

Jobs also run under a wrong model's name or with another batch than stated, and the memory of equal jobs differs. Such
rows bend the curve and widen the intervals of all work of the model. So where enough runs of the same work ended, ranks
among their peaks limit the upper end, whatever the curve says (`peaks_of`; as for recurring jobs).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.predict.cells import Cells, GpuSpec
from slurm_migbatch.predict.facts import ModelFacts
from slurm_migbatch.predict.known import TEXT_FAMILIES, Known, ModelKnowledge
from slurm_migbatch.predict.llm.names import generates, resolve
from slurm_migbatch.predict.population import pool
from slurm_migbatch.predict.recurring import SAMPLED
from slurm_migbatch.predict.samples import ALONE, RUNS, SHORT, SILENT
from slurm_migbatch.predict.state import KINDS, SURFACES, MemoryBounds
from slurm_migbatch.profiling.measurement import Measurement, MeasurementError
from slurm_migbatch.values.grouping import grouped
from slurm_migbatch.workload.gpufacts import short_name
from slurm_migbatch.workload.hints import SERVE
from slurm_migbatch.workload.lesson import Lesson
from slurm_migbatch.workload.modelfile import tagged_side

ABSURD: Final = 100.0
APART: Final = 5.0
FAR_ABOVE: Final = 20.0
SILENT_S: Final = 300.0
"""Shortest run without reports that counts: startup is a small part of it."""
FULL: Final = 0.9
"""Share of its slice's memory from which a failed run counts as out of memory."""
MOST_RUNS: Final = 50
"""Newest runs of one user in one cell that count."""
MOST_CELLS: Final = 40
"""Most cells of one model on one GPU to learn from; those with the most runs."""
AGREE: Final = 1.5
"""Largest factor between latency and rate that are consistent; above it the job waits for its input."""
SHARES: Final = 4
"""One user's part of the runs that are learned from, while others have some: one in so many."""
MOST_OWN: Final = 32
"""Models without public specifications that are learned from one user's runs."""
_ENDED_WELL: Final = frozenset({"COMPLETED", "TIMEOUT", "CANCELLED", "PREEMPTED"})

Key = tuple[str, str, str]
"""Model, kind of work, GPU: the subject of a belief."""


@dataclass(frozen=True)
class Observation:
    """Observation from one run: a row of the common table under the site's short name of the GPU, with user and time.

    `short`: it failed with its slice full, or reported that it ran out of memory, so it needs more than the slice has.
    """

    number: int
    run: int
    user: str
    row: Measurement
    short: bool = False

    @property
    def key(self) -> Key:
        """Model, kind of work and GPU."""
        return (self.row.model, self.row.kind, self.row.gpu)

    @property
    def cell(self) -> tuple[Any, ...]:
        """Key of equal runs."""
        row = self.row
        return (row.model, row.kind, row.gpu, row.profile, row.batch, row.input_size, row.source)

    def value(self, figure: str) -> float | None:
        """Return the logarithm of seconds per batch (`time`) or of MiB (`memory`)."""
        measured = self.row.figure(figure)
        return None if measured is None else math.log(measured)


@dataclass(frozen=True)
class LeftOut:
    """A user's ignored figures of one model: how many, and by which factor they differ from the expected ones."""

    key: Key
    user: str
    figure: str
    count: int
    factor: float


@dataclass(frozen=True)
class LearnableRuns:
    """The observations to learn from, and the ignored ones."""

    used: tuple[Observation, ...]
    left_out: tuple[LeftOut, ...]


def observations_of(
    runs: Iterable[Lesson], geometries: Mapping[str, Geometry], knowledge: ModelKnowledge
) -> list[Observation]:
    """Extract the observations of runs, one for each that has any. `geometries`: by NVML's name of the GPU."""
    latest: dict[int, Observation] = {}
    for run in runs:
        observation = _observation(run, geometries, knowledge)
        latest.pop(run.run, None)
        if observation is not None:
            latest[run.run] = observation
    return list(latest.values())


def share_out(observations: Sequence[Observation], most: int, public: Container[str]) -> list[Observation]:
    """Return the newest observations, at most `most`; one user exceeds 1/SHARES of them only if others leave room.

    Of models that are not `public`, the newest `MOST_OWN` of each user count: anyone can invent names, and each model
    slows down every later prediction.
    """
    counts: Counter[str] = Counter()
    own: defaultdict[str, set[str]] = defaultdict(set)
    within: list[Observation] = []
    beyond: list[Observation] = []
    for observation in reversed(observations):
        user, model = observation.user, observation.row.model
        if model not in public and model not in own[user]:
            if len(own[user]) >= MOST_OWN:
                continue
            own[user].add(model)
        counts[user] += 1
        (within if counts[user] <= most // SHARES else beyond).append(observation)
    kept = [*within, *beyond][:most]
    return sorted(kept, key=lambda observation: observation.number)


def _observation(run: Lesson, geometries: Mapping[str, Geometry], knowledge: ModelKnowledge) -> Observation | None:
    """Return what a run shows about its model; None if it shows nothing that can be learned."""
    geometry = None if run.gpu is None else geometries.get(run.gpu)
    if geometry is None or run.model is None or run.batch is None or run.profile is None or run.slices != 1:
        return None
    kind = "infer" if run.role in (None, "", SERVE) else run.role
    model = knowledge.canonical(run.model)
    facts = knowledge.facts.get(model)
    described = resolve(run.model.lower())
    if described is not None and (facts is None or (described.how != "size" and generates(described.name))):
        # an engine fills its share of any slice: its memory is not a need, and its requests are not batches. What is
        # computed for any batch is better than a curve through a few batches without the model's specifications
        return None
    if kind not in KINDS or (facts is not None and run.unit and run.unit != facts.unit):
        return None
    try:
        profile = Profile.parse(run.profile)
        info = geometry.info(profile)
    except (ProfileError, KeyError):
        return None
    speed, source = _speed(run)
    if run.role == SERVE and "latency_s" not in speed:
        speed = {}  # its rate is that of its requests, not what it is capable of
    peak, short = _memory(run, info.memory_mib), run.state not in _ENDED_WELL
    if short:
        speed, source = {}, SHORT
    if not speed and peak is None:
        return None
    try:
        row = Measurement(
            gpu=short_name(geometry.name, geometry.full.profile.memory_gb),
            model=model,
            family=facts.family if facts is not None else {"tok": TEXT_FAMILIES[0], "px": "cnn"}.get(run.unit, ""),
            kind=kind,
            profile=profile.name,
            compute_slices=info.compute_slices,
            memory_slices=info.memory_slices,
            sm_count=info.sm_count or None,
            batch=run.batch,
            input_size=run.input or _tagged(run.model, facts),
            memory_mib=peak,
            source=source,
            **speed,
        )
    except MeasurementError:
        return None
    return Observation(run.number, run.run, run.user or "?", row, short)


def _memory(run: Lesson, slice_mib: int) -> float | None:
    """Return what a run shows of its need in MiB: its peak, or of one that ran out of memory at least that; None if it
    shows nothing.
    """
    peak = run.memory_mib if run.memory_mib and run.memory_mib > 0 and not run.engine else None
    if run.state in _ENDED_WELL:
        return peak
    if run.oom:
        return float(slice_mib)
    # otherwise it may have failed for any reason, at any time
    return peak if peak is not None and peak >= FULL * slice_mib else None


def _tagged(model: str, facts: ModelFacts | None) -> int | None:
    """Return the side of the images that a request without `input` counts with, if it is not the model's usual one."""
    side = 0 if facts is None or facts.unit != "px" else tagged_side(model)
    return side if facts is not None and side > facts.reference else None


def _speed(run: Lesson) -> tuple[dict[str, Any], str]:
    """Return the speed figures of a run, and their source."""
    latency, rate = run.latency_s, run.throughput_per_s
    assert run.batch is not None
    if latency is not None and latency > 0:
        figures: dict[str, Any] = {"latency_s": latency}
        if rate is not None and 1 / AGREE <= rate * latency / run.batch <= AGREE:
            figures["throughput_per_s"] = rate
        if run.latency_p99_s is not None and run.latency_p99_s >= latency:
            figures["latency_p99_s"] = run.latency_p99_s
        return figures, RUNS
    if rate is not None and rate > 0:
        return {"throughput_per_s": rate}, RUNS
    items = run.items or run.items_hint
    if items and run.state == "COMPLETED" and run.elapsed_s >= SILENT_S:
        return {"throughput_per_s": items / run.elapsed_s}, SILENT
    return {}, RUNS


Expect = Callable[[str, Key, Sequence[Measurement], Known, GpuSpec], Sequence[float]]
"""Expected figures for rows of one key: logarithms of a figure."""


def physics(figure: str, key: Key, rows: Sequence[Measurement], known: Known, gpu: GpuSpec) -> Sequence[float]:
    """Return the expectation from data sheets and operation counts."""
    surface = SURFACES[figure]
    prior = pool(surface, key[1], ()).prior(key[0], known, gpu)
    values: list[float] = surface.curve(prior.mean, Cells.of_rows(rows, gpu, known)).tolist()
    return values


def select_learnable(
    observations: Sequence[Observation], knowledge: ModelKnowledge, expect: Expect = physics
) -> LearnableRuns:
    """Drop implausible observations. `expect`: the current predictor, with whose curves figures are compared."""
    groups = grouped(_of_agreed_unit(observations), lambda observation: observation.key)
    kept: list[Observation] = []
    left_out: list[LeftOut] = []
    for key, group in groups.items():
        rows = [observation.row for observation in group]
        known, gpu = knowledge.of(key[0], rows), GpuSpec.of_rows(rows)
        for figure in SURFACES:
            measured = [observation for observation in group if observation.value(figure) is not None]
            if not measured:
                continue
            rows = [observation.row for observation in measured]
            values = [observation.value(figure) or 0.0 for observation in measured]
            physical, present = (
                {id(point): value - mean for point, value, mean in zip(measured, values, means, strict=True)}
                for means in (physics(figure, key, rows, known, gpu), expect(figure, key, rows, known, gpu))
            )
            alone = figure == "memory" and known.doubt == 0
            bad = _implausible(figure, key, measured, physical, present, left_out, doubts_one=alone)
            group = [
                observation if id(observation) not in bad else _without(figure, observation) for observation in group
            ]
        kept += [
            observation
            for observation in group
            if observation.value("time") is not None or observation.value("memory") is not None
        ]
    return LearnableRuns(tuple(sorted(kept, key=lambda observation: observation.number)), tuple(left_out))


def _of_agreed_unit(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Yield the observations without those whose input is of another kind (texts, images) than most users state for the
    model, of as many the one of more runs: requests in another unit than the learned one are refused.
    """
    for group in grouped(observations, lambda observation: observation.row.model).values():
        stated = [observation for observation in group if observation.row.family]
        runs = Counter(observation.row.family for observation in stated)
        users = Counter(
            Counter(observation.row.family for observation in own).most_common(1)[0][0]
            for own in _by_user(stated).values()
        )
        agreed = max(runs, key=lambda family: (users[family], runs[family]), default="")
        yield from (observation for observation in group if observation.row.family in ("", agreed))


def _implausible(
    figure: str,
    key: Key,
    observations: Sequence[Observation],
    physical: Mapping[int, float],
    present: Mapping[int, float],
    left_out: list[LeftOut],
    *,
    doubts_one: bool,
) -> set[int]:
    """Return the ids of observations whose figure is implausible, and add them to `left_out` by user.

    `physical` and `present`: distances of logarithms by id, from physics and from the current predictor. `doubts_one`:
    a single user's figures far below physics do not count.
    """
    bad: set[int] = set()

    def drop(user: str, own: Sequence[Observation], distance: float) -> None:
        bad.update(map(id, own))
        left_out.append(LeftOut(key, user, figure, len(own), math.exp(min(abs(distance), 50.0))))

    for user, own in _by_user(observations).items():
        if absurd := [observation for observation in own if abs(physical[id(observation)]) > math.log(ABSURD)]:
            drop(user, absurd, median(physical[id(observation)] for observation in absurd))
    users = _by_user(observation for observation in observations if id(observation) not in bad)
    medians = {user: median(present[id(observation)] for observation in own) for user, own in users.items()}
    agreed = median(medians.values() or [0.0])
    if len(users) == 2 and max(medians.values()) - min(medians.values()) > math.log(APART):
        nearer = min(users, key=lambda user: abs(median(physical[id(observation)] for observation in users[user])))
        agreed = medians[nearer]
    for user, own in users.items():
        below = -median(physical[id(observation)] for observation in own)
        if doubts_one and len(users) == 1 and below > math.log(APART):
            drop(user, own, below)
        elif doubts_one and len(users) == 1:
            short = [observation for observation in own if observation.short]
            if far := [observation for observation in short if physical[id(observation)] > math.log(FAR_ABOVE)]:
                drop(user, far, median(physical[id(observation)] for observation in far))
        if abs(medians[user] - agreed) > math.log(APART):
            drop(user, own, medians[user] - agreed)
    return bad


def _by_user(observations: Iterable[Observation]) -> dict[str, list[Observation]]:
    return grouped(observations, lambda observation: observation.user)


def _without(figure: str, observation: Observation) -> Observation:
    if figure == "memory":
        return replace(observation, row=replace(observation.row, memory_mib=None))
    return replace(observation, row=replace(observation.row, throughput_per_s=None, latency_s=None, latency_p99_s=None))


def rows_of(observations: Sequence[Observation]) -> list[Measurement]:
    """Make a table of runs: each cell once, by medians; the rows do not depend on the order of users."""
    ordered = sorted(observations, key=lambda observation: observation.number)
    cells = grouped(ordered, lambda observation: observation.cell)
    timed = grouped((run for run in ordered if run.value("time") is not None), lambda observation: observation.key)
    batches = {key: _batches(group) for key, group in timed.items()}
    reported = {cell[:-1] for cell, group in cells.items() if cell[-1] == RUNS and _timed(group)}
    peaks = _memories(observations)
    by_key: dict[Key, list[tuple[int, Measurement]]] = {}
    for cell, group in cells.items():
        seconds = None if cell[-1] == SILENT and cell[:-1] in reported else _agreed(group, "time")
        first = group[0].row
        peak = peaks.pop((*group[0].key, first.batch, first.input_size, first.profile, group[0].short), None)
        if seconds is None and peak is None:
            continue
        row = replace(
            first,
            throughput_per_s=None if seconds is None else first.batch / seconds,
            latency_s=None,
            latency_p99_s=None,
            memory_mib=peak,
            source=ALONE if first.source == RUNS and _is_alone(group, batches.get(group[0].key, {})) else first.source,
        )
        by_key.setdefault(group[0].key, []).append((len(group), row))
    return [
        row for _, rows in sorted(by_key.items()) for _, row in sorted(rows, key=lambda item: -item[0])[:MOST_CELLS]
    ]


def _batches(observations: Iterable[Observation]) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest batch of each user."""
    by_user = {user: [run.row.batch for run in own] for user, own in _by_user(observations).items()}
    return {user: (min(batches), max(batches)) for user, batches in by_user.items()}


def _is_alone(group: Sequence[Observation], batches: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the runs of a cell have one user, and their batch is beyond those of several others."""
    user, batch = group[0].user, group[0].row.batch
    others = [ends for other, ends in batches.items() if other != user]
    if len(others) < 2 or len(_by_user(group)) > 1:
        return False
    return not min(low for low, _ in others) <= batch <= max(high for _, high in others)


def _memories(observations: Sequence[Observation]) -> dict[tuple[Any, ...], float]:
    """Return the peak in MiB by key, batch, input size, profile and whether the runs ran out of memory: the median over
    users, of two the larger. `_peak` selects the peak of each user.
    """
    groups = grouped(
        (observation for observation in observations if observation.row.memory_mib is not None),
        lambda observation: (*observation.key, observation.row.batch, observation.row.input_size),
    )
    peaks_by_profile: dict[tuple[Any, ...], float] = {}
    for cell, group in groups.items():
        peaks = sorted(_peak(own) for own in _by_user(group).values())
        peak, profile, short = peaks[len(peaks) // 2]
        key = (*cell, profile, short)
        peaks_by_profile[key] = peak
    return peaks_by_profile


def peaks_of(observations: Sequence[Observation], confidence: float) -> dict[Key, tuple[MemoryBounds, ...]]:
    """Return what work needs by its own runs, where there were enough of them, whatever is known of other work.

    At most: what the next run exceeds with no more than the rest of the probability `confidence`, but no less than what
    `rows_of` has for the same or less work. At least: what this share of the runs of each user took, by the median
    user, of two the smaller, but no more than more work needs at most. What one user runs under another's words raises
    nobody's need, so less work counts only if no fewer users ran it, and more work only if more users did.
    """
    agreed = grouped(_memories(observations).items(), lambda item: item[0][:3])
    found: dict[Key, tuple[MemoryBounds, ...]] = {}
    weighed = (observation for observation in observations if observation.row.memory_mib is not None)
    for key, group in grouped(weighed, lambda observation: observation.key).items():
        works = grouped(group, lambda observation: (observation.row.batch, observation.row.input_size or 0))
        users_of = {work: len(_by_user(own)) for work, own in works.items()}
        peaks: list[MemoryBounds] = []
        for work, own in sorted(works.items(), key=lambda work: -len(work[1]))[:MOST_CELLS]:
            batch, size = work
            users = [profiles for runs in _by_user(own).values() if (profiles := _by_profile(runs))]
            short = [o for o in group if o.short and o.row.batch <= batch and (o.row.input_size or 0) <= size]
            most = _most(users, short, confidence)
            within = [
                peak
                for (*_, less, part, _, failed), peak in agreed[key]
                if less <= batch and (part or 0) <= size and users_of[less, part or 0] >= users_of[work] and not failed
            ]
            if most is not None and within:
                least = _least(users, confidence)
                peaks.append(MemoryBounds(batch, size, SAMPLED * least, SAMPLED * max(most, *within)))
        if peaks:
            found[key] = tuple(peak._replace(least=_possible(peak, peaks, users_of)) for peak in peaks)
    return found


def _possible(peak: MemoryBounds, peaks: Sequence[MemoryBounds], users_of: Mapping[tuple[int, int], int]) -> float:
    """Return what work needs at least, if more work that more users ran needs no less."""
    users = users_of[peak.batch, peak.input]
    more = [other for other in peaks if other.batch >= peak.batch and other.input >= peak.input]
    return min([peak.least, *(other.most for other in more if users_of[other.batch, other.input] > users)])


def _by_profile(observations: Iterable[Observation]) -> dict[str, list[float]]:
    """Return the ascending peaks of one user's newest runs that had enough memory, by profile."""
    newest = [observation for observation in observations if not observation.short][-MOST_RUNS:]
    profiles = grouped(newest, lambda observation: observation.row.profile)
    return {name: sorted(run.row.memory_mib or 0.0 for run in runs) for name, runs in profiles.items()}


def _least(users: Sequence[Mapping[str, Sequence[float]]], confidence: float) -> float:
    """Return what the share `confidence` of a user's runs took on the profile with the least, by the median user."""
    shares = sorted(
        min(peaks[max(math.floor(confidence * len(peaks)), 1) - 1] for peaks in profiles.values()) for profiles in users
    )
    return shares[(len(shares) - 1) // 2]


def _most(
    users: Iterable[Mapping[str, Sequence[float]]], short: Sequence[Observation], confidence: float
) -> float | None:
    """Return the rank among the peaks of all users on one profile, the smallest of those ranks; None if no profile has
    enough runs.

    Runs that were `short` of memory on a profile that is no smaller needed more than any that had enough.
    """
    pooled: dict[str, list[float]] = {}
    for profiles in users:
        for name, peaks in profiles.items():
            pooled.setdefault(name, []).extend(peaks)
    ranks = []
    for name, peaks in pooled.items():
        more = sum(_memory_gb(observation) >= Profile.parse(name).memory_gb for observation in short)
        rank = math.ceil(confidence * (len(peaks) + more + 1) - 1e-9)
        if rank <= len(peaks):
            ranks.append(sorted(peaks)[rank - 1])
    return min(ranks, default=None)


def _peak(observations: Sequence[Observation]) -> tuple[float, str, bool]:
    """Return the peak in MiB of one user's runs of one cell, its profile, the smallest that sufficed, and whether none
    did.
    """
    sufficient = _sufficient(observations)
    counted = sufficient or [observation for observation in observations if observation.short]
    profiles = grouped(counted, lambda observation: observation.row.profile)
    peaks = [(peak, name) for name, group in profiles.items() if (peak := _agreed(group, "memory")) is not None]
    # if all runs failed, the largest peak is closest to the need
    return (*min(peaks), False) if sufficient else (*max(peaks), True)


def _sufficient(observations: Sequence[Observation]) -> list[Observation]:
    """Return the runs that had enough memory; none if one ran out at more than the peaks of those on larger slices."""
    short = [observation for observation in observations if observation.short]
    sufficient = [observation for observation in observations if not observation.short]
    if short and sufficient:
        highest = max(observation.row.memory_mib or 0.0 for observation in short)
        exhausted = max(map(_memory_gb, short))
        peak = min(observation.row.memory_mib or math.inf for observation in sufficient)
        if highest > peak and exhausted < min(map(_memory_gb, sufficient)):
            return []
    return sufficient


def _memory_gb(observation: Observation) -> int:
    return Profile.parse(observation.row.profile).memory_gb


def _timed(group: Iterable[Observation]) -> bool:
    return any(observation.value("time") is not None for observation in group)


def _agreed(group: Sequence[Observation], figure: str) -> float | None:
    """Return the figure of one cell: the median of each user's newest runs, then the median over users."""
    users = _by_user(observation for observation in group if observation.value(figure) is not None)
    if not users:
        return None
    medians = [
        median([v for observation in newest[-MOST_RUNS:] if (v := observation.value(figure)) is not None])
        for newest in users.values()
    ]
    return math.exp(median(medians))

"""Refit the predictor once: fit a candidate, compare it with the current model, and use it if it is not worse.

As a program it is a child of migbatchd: it reads one line of JSON from stdin, `{"config": "<migbatch.toml>", ...}`, and
writes one to stdout; the process exits at the end of stdin, whatever it is doing. It runs at the lowest priority and
with one numpy thread, so that it delays nothing else on the controller's host.

The check: of the data that the current model has not learned from, up to a half is held out from the candidate's fit,
runs if there are any, else measured points. Neither model has seen these, and if the candidate has a larger error than
the current model it is rejected, with the reason in the record. (If there is nothing new to hold out, both are compared
on data that both have seen.) Otherwise the held-out figures are added to every model's belief, which gives the new
version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

from slurm_migbatch.config import Config, loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.children import be_killed_first
from slurm_migbatch.daemon.facts import known_models, models_of
from slurm_migbatch.mig.geometry import Geometry, GeometryError
from slurm_migbatch.predict import state
from slurm_migbatch.predict.bounds import impossible
from slurm_migbatch.predict.check import coverage, expected_by, misses, ratios, worse
from slurm_migbatch.predict.facts import ModelFacts
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.runs import (
    SHARES,
    LearnableRuns,
    LeftOut,
    Observation,
    observations_of,
    peaks_of,
    rows_of,
    select_learnable,
    share_out,
)
from slurm_migbatch.predict.statefile import Index, ModelDirectory, Saved
from slurm_migbatch.predict.training import learn, settle
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.store import recurring
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.recurring import Learnable

T = TypeVar("T")
#: called at the start of each step of a refit, with its description and the number of steps
Progress = Callable[[str, int], None]
_STEPS = 3

MOST_HELD: Final = 5
"""At most one in so many figures is held out."""
_PAGE: Final = 5000
_FURTHEST: Final = 50
"""Ended runs examined per run that is learned from, before reading stops: most jobs may not report what they are."""
_READ: Final = 3
"""Runs with observations that are read per run that is learned from: one user may have most of the newest."""
_NICE: Final = 19


@dataclass(frozen=True)
class TrainingData:
    """Training data.

    `observations`: of the newest runs that have any; `learnable`: the plausible ones; `table`: the imported points;
    `fresh`: those imported since the current model was learned; `impossible`: why imported points that no GPU can reach
    are excluded.
    """

    reach: Learnable
    observations: tuple[Observation, ...]
    learnable: LearnableRuns
    table: tuple[Measurement, ...]
    fresh: tuple[Measurement, ...]
    impossible: tuple[str, ...] = ()

    @property
    def lesson(self) -> int:
        """The number of the newest observation."""
        return max((observation.number for observation in self.observations), default=0)


def gather(store: Store, facts: Sequence[ModelFacts], runs: int, present: Saved) -> TrainingData:
    """Read the training data from the record. `present`: the model used to compare figures of different users."""
    knowledge = ModelKnowledge(facts)
    reach = store.read(recurring.learnable)
    geometries = _geometries(store.inventory())
    observations: list[Observation] = []
    high = reach.lesson
    while high > 0 and not _enough(observations, runs) and reach.lesson - high < _FURTHEST * runs:
        low = max(high - _PAGE, 0)
        page = [lesson for lesson in store.lessons(low, _PAGE) if lesson.number <= high]
        observations = observations_of(page, geometries, knowledge) + observations
        high = low
    observations = share_out(observations, runs, knowledge.facts)
    learnable = select_learnable(observations, knowledge, expected_by(present.learned))
    since = float(present.report.get("imported", 0.0))
    table = store.measurements()
    implausible = {row: why for row in table if (why := impossible(row, knowledge))}
    return TrainingData(
        reach,
        tuple(observations),
        learnable,
        tuple(row for row in table if row not in implausible),
        tuple(row for row in store.measurements(since=since) if row not in implausible),
        tuple(implausible.values()),
    )


def _enough(observations: Sequence[Observation], runs: int) -> bool:
    """Return whether there are `runs` runs, of which each user's count up to a limit, or enough was read in search
    of other users.
    """
    counts = Counter(observation.user for observation in observations)
    return len(observations) >= _READ * runs or sum(min(count, runs // SHARES) for count in counts.values()) >= runs


def _geometries(inventory: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Geometry]:
    geometries: dict[str, Geometry] = {}
    for gpus in inventory.values():
        for gpu in gpus:
            if isinstance(gpu.get("geometry"), Mapping):
                with contextlib.suppress(GeometryError):
                    geometries[str(gpu.get("name"))] = Geometry.from_dict(gpu["geometry"])
    return geometries


def digest(facts: Iterable[ModelFacts]) -> str:
    """Return a digest of the specifications of models used in a fit, and of the format of what is learned: after an
    upgrade that changes it nothing learned before can be used.
    """
    text = json.dumps([state.FORMAT, *(asdict(fact) for fact in facts)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seen_of(reach: Learnable, facts: Iterable[ModelFacts]) -> dict[str, Any]:
    """Return how far a refit has read, for `Index.seen`."""
    return {"lesson": reach.lesson, "imported": reach.imported, "facts": digest(facts)}


def news(index: Index, reach: Learnable, facts: Iterable[ModelFacts]) -> bool:
    """Return whether there is anything new since the last refit: ended runs, an import, changed models."""
    return reach.lesson > _read_before(index.seen, reach) or bool(_changed(index, reach, facts))


def _read_before(read: Mapping[str, Any], reach: Learnable) -> int:
    """Return the number of the newest lesson read, according to the index or the report of a model; 0 if a restored
    record numbers its lessons from the beginning.
    """
    lesson = int(read.get("lesson", 0))
    return lesson if lesson <= reach.lesson else 0


def due(index: Index, material: TrainingData, facts: Iterable[ModelFacts], min_new: int) -> str:
    """Return why a refit is due; "" if it is not."""
    before = _read_before(index.seen, material.reach)
    fresh = sum(observation.number > before for observation in material.observations)
    if fresh >= min_new:
        return f"{fresh} new runs"
    return _changed(index, material.reach, facts)


def _changed(index: Index, reach: Learnable, facts: Iterable[ModelFacts]) -> str:
    """Return what besides runs is new since the last refit; "" if nothing."""
    if reach.imported > index.seen.get("imported", 0.0):
        return "imported measurements"
    if index.current > 0 and index.seen.get("facts") != digest(facts):
        return "changed specifications of models or another release"
    return ""


def watch(saved: Saved, material: TrainingData, facts: Sequence[ModelFacts], confidence: float) -> dict[str, Any]:
    """Check the current model on the runs that it has not learned from: coverage of limits, ratios by model."""
    since = _read_before(saved.report, material.reach)
    fresh = [observation for observation in material.learnable.used if observation.number > since]
    predictor = LearnedPredictor(saved.learned, facts, confidence=confidence)
    by_figure = coverage(predictor, fresh, confidence)
    return {
        "version": saved.learned.version,
        "since": since,
        "runs": len(fresh),
        "kept": {figure: kept.to_dict() for figure, kept in by_figure.items()},
        "models": ratios(saved.learned, [observation.row for observation in fresh], predictor.knowledge),
    }


def refit(
    directory: ModelDirectory,
    config: Config,
    material: TrainingData,
    present: Saved,
    why: str,
    progress: Progress = lambda text, of: None,
) -> dict[str, Any]:
    """Learn, check, and write the new version or the rejection.

    Returns:
        `outcome` ("taken", "refused" or "nothing"), `version` if one was created, `why`, and figures.

    Raises:
        StateError, OSError: the directory of models cannot be used.
    """
    began = time.monotonic()
    facts, learning = known_models(config), config.learning
    knowledge = ModelKnowledge(facts)
    used, table = material.learnable.used, material.table
    seen = seen_of(material.reach, facts)
    result: dict[str, Any] = {"ts": time.time(), "reason": why, "runs": len(used), "measured": len(table)}

    def none(outcome: str, text: str) -> dict[str, Any]:
        directory.note({**result, "outcome": outcome, "why": text}, seen)
        return {**result, "outcome": outcome, "why": text}

    if not used and not table:
        return none("nothing", "no run has reported figures yet, and nothing was imported")
    split = _hold_out(material, present, str(directory.index().last))
    progress(f"learning from {len(split.runs)} runs and {len(split.table)} measured points", _STEPS)
    candidate = learn([*split.table, *rows_of(split.runs)], knowledge)
    candidate_misses = misses(candidate, split.judge, knowledge)
    current_misses = misses(present.learned, split.judge, knowledge)
    result["check"] = {
        "on": split.name,
        "candidate": {figure: miss.to_dict() for figure, miss in candidate_misses.items()},
        "current": {figure: miss.to_dict() for figure, miss in current_misses.items()},
    }
    refusal = worse(candidate_misses, current_misses, learning.tolerance)
    if refusal:
        result["seconds"] = round(time.monotonic() - began, 2)
        return none("refused", refusal)
    progress("adding the held-out figures", _STEPS)
    rows = [*table, *rows_of(used)]
    learned = replace(settle(candidate, rows, knowledge), peaks=peaks_of(used, learning.confidence))
    report = {
        **result,
        "lesson": material.lesson,
        "imported": material.reach.imported,
        "rows": len(rows),
        "users": len({observation.user for observation in used}),
        "predecessor": present.learned.version,
        "trained": ratios(learned, [observation.row for observation in used], knowledge),
        "left_out": _left_out(material.learnable),
        "before": watch(present, material, facts, learning.confidence) if used else None,
        "seconds": round(time.monotonic() - began, 2),
    }
    version = directory.add(learned, report, seen, learning.keep, result["ts"])
    return {**result, "outcome": "taken", "version": version, "rows": len(rows), "seconds": report["seconds"]}


@dataclass(frozen=True)
class _Split:
    """The data for fitting the candidate, and the rows for judging it."""

    runs: Sequence[Observation]
    table: Sequence[Measurement]
    judge: Sequence[Measurement]
    name: str


def _hold_out(material: TrainingData, present: Saved, salt: str) -> _Split:
    used, table = material.learnable.used, material.table
    since = _read_before(present.report, material.reach)
    fresh = [observation for observation in used if observation.number > since]
    held_out = _chosen_part(fresh, len(used), lambda observation: f"{salt}:{observation.run}")
    if held_out:
        apart = {observation.run for observation in held_out}
        remaining = [observation for observation in used if observation.run not in apart]
        return _Split(remaining, table, [observation.row for observation in held_out], "new runs held out")
    if used:
        return _Split(used, table, [observation.row for observation in used], "runs that both were trained on")
    points = _chosen_part(material.fresh, len(table), lambda row: f"{salt}:{row.point}")
    if points:
        outside = {row.point for row in points}
        return _Split(used, [row for row in table if row.point not in outside], points, "new points held out")
    return _Split(used, table, table, "points that both were trained on")


def _chosen_part(fresh: Sequence[T], total: int, name: Callable[[T], str]) -> list[T]:
    """Return half of the fresh items, chosen by the digests of their names, but at most a fifth of `total`."""
    ordered = sorted(fresh, key=lambda item: hashlib.sha256(name(item).encode()).digest())
    return ordered[: min(len(fresh) // 2, max(1, total // MOST_HELD))]


def _left_out(learnable: LearnableRuns) -> dict[str, Any]:
    """Summarise implausible figures by model and figure; names of users stay in the record of runs."""
    groups: dict[str, dict[str, list[LeftOut]]] = {}
    for entry in learnable.left_out:
        groups.setdefault("/".join(entry.key), {}).setdefault(entry.figure, []).append(entry)
    return {
        name: {
            figure: {
                "runs": sum(entry.count for entry in group),
                "users": len({entry.user for entry in group}),
                "factor": round(max(entry.factor for entry in group), 1),
            }
            for figure, group in figures.items()
        }
        for name, figures in groups.items()
    }


def run(config: Config, *, force: str = "", progress: Progress = lambda text, of: None) -> dict[str, Any]:
    """Check the record and the current model, and refit if due (or if `force` gives a reason).

    Returns:
        `watch`, and `refit`: see `refit`; None if not due.

    Raises:
        StoreError, StateError, OSError: the record or the models cannot be used.
    """
    directory, facts = models_of(config), known_models(config)
    present = directory.current().saved
    progress("reading the record", _STEPS)
    with open_store(config.store.url, readonly=True) as store:
        material = gather(store, facts, config.learning.runs, present)
    result: dict[str, Any] = {
        "reach": list(material.reach),
        "watch": watch(present, material, facts, config.learning.confidence),
        "refit": None,
    }
    why = force or due(directory.index(), material, facts, config.learning.min_new)
    if why:
        result["refit"] = refit(directory, config, material, present, why, progress)
    return result


def main() -> None:
    """Run one refit for migbatchd."""
    first = sys.stdin.buffer.readline()
    if not first:
        return
    start = json.loads(first)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    be_killed_first()
    logs.setup(start["level"])
    print(json.dumps(run(loads(start["config"]))), flush=True)  # noqa: T201 the parent reads it


def _end_with_parent() -> None:
    # not through sys.stdin: Python aborts at exit if a thread is blocked in it
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

"""Run the whole evaluation of the predictor on a directory of tables, as one JSON-able object with its bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.evaluate import choice, relative
from slurm_migbatch.lab.evaluate.baselines import CURVE, guesses
from slurm_migbatch.lab.evaluate.curves import MeasuredCurves
from slurm_migbatch.lab.evaluate.heldout import (
    OURS,
    Guess,
    HeldOutPrediction,
    Leave,
    Mask,
    by_points,
    folds,
    identity,
    outcomes,
    with_empty_store,
)
from slurm_migbatch.lab.evaluate.scores import LEVELS, collect, coverage, scored, scored_all
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.points import FIRST_BATCH, MIDDLE_BATCH, SMALL_BATCH
from slurm_migbatch.predict.samples import samples_of
from slurm_migbatch.predict.state import KINDS
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder

RULE: Final = (
    f"largest slice at batch {FIRST_BATCH:g}; middle slice at batch {MIDDLE_BATCH:g}; smallest slice at batch "
    f"{SMALL_BATCH:g}; then the point likeliest to be worth choosing and least certain "
    "(slurm_migbatch/predict/points.py)"
)
MAPE_TARGETS: Final = (60.0, 30.0, 10.0, 8.0)
"""Mean error in per cent at 0, 1, 2, 3 points, for inference."""
COVERAGE_TARGET: Final = 0.03
STRANGERS_COVERAGE_TARGET: Final = 0.05
"""The same with whole families or laboratories held out."""


@dataclass(frozen=True)
class Options:
    """Options: the largest number of points, the margin's level, what is held out, whether specifications are
    ignored, and whether rules that need training are run (they take most of the time).
    """

    points: int = 3
    level: float = 0.9
    leave: Leave = "model"
    blind: bool = False
    trees: bool = True


@dataclass
class _KindPredictions:
    """All predictions of one kind of work and, for each sample, the curves of the models that were learned from."""

    time: list[HeldOutPrediction] = field(default_factory=list)
    memory: list[HeldOutPrediction] = field(default_factory=list)
    rules: list[Guess] = field(default_factory=list)
    taught: dict[int, Sequence[MeasuredCurves]] = field(default_factory=dict)


def measure(
    data: Path,
    train: Path | None,
    points: int,
    level: float,
    leave: Leave,
    quick: bool,
    blind: bool,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Evaluate the tables of a directory; `quick`: without the rules that must be trained. Raises TableError."""
    learned_from = None if train is None else read_folder(train)
    result = evaluate(read_folder(data), learned_from, Options(points, level, leave, blind, not quick), progress)
    return {"data": str(data), "train": None if train is None else str(train), **result}


def evaluate(
    rows: Sequence[Measurement],
    train: Sequence[Measurement] | None,
    options: Options,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Compute everything that the rows allow; the rest is listed under `notes`."""
    knowledge = ModelKnowledge(() if options.blind else BUILT_IN)
    kinds = {kind: _KindPredictions() for kind in KINDS}
    for fold in folds(rows, knowledge, train=train, leave=options.leave):
        progress(", ".join(sorted({sample.model for sample in fold.samples})), fold.of)
        time = list(outcomes(fold, "time", options.points))
        taught = [MeasuredCurves.of(sample) for sample in samples_of(fold.rows, knowledge)]
        for sample in fold.samples:
            kinds[sample.kind].taught[id(sample)] = taught
        for outcome in time:
            kinds[outcome.sample.kind].time.append(outcome)
        for outcome in outcomes(fold, "memory", options.points):
            kinds[outcome.sample.kind].memory.append(outcome)
        for guess in with_empty_store(fold, "time", options.points):
            kinds[guess.sample.kind].rules.append(guess)
        for guess in guesses(fold.samples, taught, time, options.points, trees=options.trees):
            kinds[guess.sample.kind].rules.append(guess)
    results = {kind: _kind(predictions, options) for kind, predictions in kinds.items() if predictions.time}
    return {
        "models": len({identity(row.model) for row in rows}),
        "rows": len(rows),
        "rule": RULE,
        "kinds": results,
        "notes": _notes(
            rows, train, [outcome for predictions in kinds.values() for outcome in predictions.time], options
        ),
        "bars": [bar.to_dict() for bar in _bars(results, options)],
    }


def _kind(predictions: _KindPredictions, options: Options) -> dict[str, Any]:
    last = {
        id(outcome.sample): outcome.done for outcome in sorted(predictions.time, key=lambda outcome: outcome.points)
    }

    def common(outcome: HeldOutPrediction) -> Mask:
        mask = scored(outcome)
        mask[list(last[id(outcome.sample)])] = False
        return mask

    methods = _by_method([*predictions.time, *predictions.rules])
    pairs = [
        (method, k, [(guess, predictions.taught[id(guess.sample)]) for guess in group])
        for (method, k), group in methods.items()
    ]
    return {
        "time": [
            {
                "k": k,
                **_figures(predicted, scored),
                "common": _short(predicted, common),
                "all_procs": _short(predicted, scored_all),
            }
            for k, predicted in by_points(predictions.time).items()
            if any(scored(outcome).any() for outcome in predicted)
        ],
        "memory": [
            {"k": k, **_figures(predicted, scored_all)}
            for k, predicted in by_points(predictions.memory).items()
            if any(scored_all(outcome).any() for outcome in predicted)
        ],
        "rules": _rule_errors(predictions, methods),
        "choice": choice.choices(methods, options.level),
        "relative": relative.score(pairs),
    }


def _by_method(all_guesses: Iterable[Guess]) -> dict[tuple[str, int], list[Guess]]:
    groups: dict[tuple[str, int], list[Guess]] = {}
    for guess in all_guesses:
        groups.setdefault((guess.method, guess.points), []).append(guess)
    return dict(sorted(groups.items(), key=lambda item: (item[0][0] != OURS, item[0][1], item[0][0])))


def _rule_errors(
    predictions: _KindPredictions, methods: Mapping[tuple[str, int], Sequence[Guess]]
) -> list[dict[str, Any]]:
    """Compute each rule's errors and the predictor's with as many points, both on cells held out from both."""
    max_points = max(outcome.points for outcome in predictions.time)
    outcomes = {(id(outcome.sample), outcome.points): outcome for outcome in predictions.time}
    result = []
    for (method, k), group in methods.items():
        if method == OURS or not any(scored(guess).any() for guess in group):
            continue
        same = min(max_points if k == CURVE else k, max_points)
        # a small table may not have enough cells for as many points
        pairs = {id(g.sample): (g, outcomes[id(g.sample), same]) for g in group if (id(g.sample), same) in outcomes}

        def neither(guess: Guess, pairs: Mapping[int, tuple[Guess, HeldOutPrediction]] = pairs) -> Mask:
            rule, predicted = pairs[id(guess.sample)]
            mask: Mask = scored(rule) & scored(predicted)
            return mask

        rule = collect([guess for guess, _ in pairs.values()], lambda guess: guess.errors, neither)
        predicted = collect([outcome for _, outcome in pairs.values()], lambda guess: guess.errors, neither)
        result.append(
            {
                "method": method,
                "k": k,
                **collect(group, lambda guess: guess.errors, scored).to_dict(),
                "same_points": {
                    "predictor_k": same,
                    "points": sum(len(errors) for errors in predicted.by_model.values()),
                    "rule": round(rule.mape, 2),
                    "predictor": round(predicted.mape, 2),
                }
                if predicted
                else None,
            }
        )
    return result


def _figures(predictions: Sequence[HeldOutPrediction], mask: Callable[[HeldOutPrediction], Mask]) -> dict[str, Any]:
    result = collect(predictions, lambda outcome: outcome.errors, mask).to_dict()
    result["coverage"] = [coverage(predictions, level, mask) for level in LEVELS]
    for name, listed in (("listed", True), ("unlisted", False)):
        group = [outcome for outcome in predictions if (outcome.sample.known.doubt == 0) is listed]
        result[name] = {
            **_short(group, mask),
            "coverage": [c for level in LEVELS if (c := coverage(group, level, mask))],
        }
    if any(outcome.seen for outcome in predictions):
        for name, seen in (("seen_elsewhere", True), ("never_seen", False)):
            result[name] = _short([outcome for outcome in predictions if outcome.seen is seen], mask)
    return result


def _short(predictions: Sequence[HeldOutPrediction], mask: Callable[[HeldOutPrediction], Mask]) -> dict[str, Any]:
    whole = collect(predictions, lambda outcome: outcome.errors, mask).to_dict()
    return {name: whole[name] for name in ("models", "points", "mape", "median") if name in whole}


def _bars(kinds: Mapping[str, Mapping[str, Any]], options: Options) -> list[Bar]:
    bars: list[Bar] = []
    if "infer" in kinds:
        bars += _inference_bars(kinds["infer"], options)
    if "train" in kinds and ("infer" not in kinds or options.leave != "model"):
        bars += _coverage_bars(kinds["train"]["time"], options)
    if "train" in kinds:
        errors = {(row["method"], row["k"]): row["mae"] for row in kinds["train"]["relative"]}
        if (OURS, 0) in errors:
            name = "relative speed of a slice in training, at submission: mean absolute error"
            bars.append(Bar(name, errors[OURS, 0], relative.TARGET))
    return bars


def _inference_bars(figures: Mapping[str, Any], options: Options) -> list[Bar]:
    bars = [
        Bar(f"mean error of throughput (%) at k={row['k']}", row["mape"], MAPE_TARGETS[row["k"]])
        for row in figures["time"]
        if row["k"] < len(MAPE_TARGETS)
    ]
    bars += _coverage_bars(figures["time"], options)
    max_points = max((row["k"] for row in figures["time"]), default=0)
    for row in figures["rules"]:
        same = row["same_points"]
        if same and (row["method"] == "physics, our points" or (row["method"] == "roofline" and max_points == 3)):
            name = f"mean error (%) at k={same['predictor_k']} against {row['method']} on the same cells"
            bars.append(Bar(name, same["predictor"], same["rule"]))
    for row in figures["choice"]:
        if row["method"] != OURS or row["k"] != max_points:
            continue
        if row["level"] is None:
            name = f"choice at k={max_points} by middle figures"
            bars.append(Bar(f"{name}: share of limits exceeded", row["broken"], choice.BROKEN_TARGET))
            bars.append(Bar(f"{name}: throughput per slice lost", 1 - row["quality"], 1 - choice.QUALITY_TARGET))
        elif row["level"] == options.level:
            name = f"choice at k={max_points} with a margin of {options.level:.0%}"
            bars.append(Bar(f"{name}: share of limits exceeded", row["broken"], choice.BROKEN_TARGET))
    return bars


def _coverage_bars(rows: Iterable[Mapping[str, Any]], options: Options) -> list[Bar]:
    target = COVERAGE_TARGET if options.leave == "model" else STRANGERS_COVERAGE_TARGET
    return [
        Bar(
            f"coverage of {cover['level']:.0%} intervals at k={row['k']}: distance from nominal",
            abs(cover["mean"] - cover["level"]),
            target,
        )
        for row in rows
        for cover in row["coverage"]
    ]


def _notes(
    rows: Sequence[Measurement],
    train: Sequence[Measurement] | None,
    predictions: Sequence[HeldOutPrediction],
    options: Options,
) -> list[str]:
    notes = []
    if train is None:
        names = "" if options.leave == "laboratory" else ", under all its names and from every source"
        notes.append(f"each {options.leave} is held out of the training{names}")
    else:
        seen = sorted({outcome.sample.model for outcome in predictions if outcome.seen})
        notes.append(
            "learned from another table, never from the scored laboratories' own rows of a scored model; "
            + (f"known from other laboratories: {', '.join(seen)}" if seen else "no scored model is in it")
        )
    strange = sorted({outcome.sample.model for outcome in predictions if outcome.sample.known.doubt})
    if strange and not options.blind:
        notes.append(
            f"no full specifications (unlisted), only data of the table or the architecture: {', '.join(strange)}"
        )
    if options.blind:
        notes.append("no specifications of models are used (--blind), only data of the table")
    computed: dict[str, set[int]] = {}
    for outcome in predictions:
        if (outcome.computed & scored(outcome)).any():
            computed.setdefault(outcome.sample.model, set()).add(outcome.points)
    if computed:
        models = (f"{model} (k={', '.join(map(str, sorted(points)))})" for model, points in sorted(computed.items()))
        notes.append(f"computed from the architecture, as requests get it: {', '.join(models)}")
    timed = {identity(outcome.sample.model) for outcome in predictions if scored(outcome).any()}
    missing = sorted({row.model for row in rows if identity(row.model) not in timed})
    if missing:
        notes.append(f"not scored, as no cell of one process ran: {', '.join(missing)}")
    few = sorted(
        {o.sample.model for o in predictions} - {o.sample.model for o in predictions if o.points == options.points}
    )
    if few:
        notes.append(f"with fewer than {options.points + 1} cells, so not at every k: {', '.join(few)}")
    if not any(outcome.sample.kind == "infer" for outcome in predictions):
        notes.append("no inference was measured: errors have no targets, and there is no choice under limits")
    return notes

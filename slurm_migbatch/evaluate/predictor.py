"""The whole evaluation of the predictor on a folder of tables, as one JSON-able object with its bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_migbatch.bench.bars import Bar
from slurm_migbatch.evaluate.heldout import Leave, Outcome, by_points, folds, identity, outcomes
from slurm_migbatch.evaluate.scores import LEVELS, Mask, collect, coverage, scored, scored_all
from slurm_migbatch.predict.known import Knowledge
from slurm_migbatch.predict.state import KINDS
from slurm_migbatch.profiling.measurement import Measurement

RULE: Final = (
    "largest slice at the smallest batch; middle slice at batch 32; smallest slice at batch 8; then the point that is "
    "expected to make the whole grid surest (slurm_migbatch/predict/points.py)"
)
MAPE_TARGETS: Final = (60.0, 30.0, 10.0, 8.0)
"""Mean error in per cent at 0, 1, 2, 3 points, for inference."""
COVERAGE_TARGET: Final = 0.03


@dataclass(frozen=True)
class Options:
    """What is asked for: the largest number of points, the margin's level, what is left out, whether facts count."""

    points: int = 3
    level: float = 0.9
    leave: Leave = "model"
    blind: bool = False


Say = Callable[[str], None]


def evaluate(
    rows: Sequence[Measurement],
    train: Sequence[Measurement] | None,
    options: Options,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Everything that can be computed from the rows; what cannot is named under `notes`."""
    knowledge = Knowledge(blind=options.blind)
    found: list[Outcome] = []
    for fold in folds(rows, knowledge, train=train, leave=options.leave):
        say(", ".join(sorted({sample.model for sample in fold.samples})))
        for figure in ("time", "memory"):
            found += outcomes(fold, figure, options.points)
    kinds = {kind: _kind([o for o in found if o.sample.kind == kind]) for kind in KINDS}
    kinds = {kind: result for kind, result in kinds.items() if result["time"]}
    return {
        "models": len({identity(row.model) for row in rows}),
        "rows": len(rows),
        "rule": RULE,
        "kinds": kinds,
        "notes": _notes(rows, train, found, options),
        "bars": [bar.to_dict() for bar in _bars(kinds)],
    }


def _kind(found: Sequence[Outcome]) -> dict[str, Any]:
    time = by_points(outcome for outcome in found if outcome.figure == "time")
    memory = by_points(outcome for outcome in found if outcome.figure == "memory")
    profiled = _profiled(found)

    def common(outcome: Outcome) -> Mask:
        mask = scored(outcome)
        mask[list(profiled[id(outcome.sample), outcome.figure])] = False
        return mask

    return {
        "time": [
            {
                "k": k,
                **_figures(here, scored),
                "common": _short(here, common),
                "all_procs": _short(here, scored_all),
            }
            for k, here in sorted(time.items())
            if any(scored(outcome).any() for outcome in here)
        ],
        "memory": [
            {"k": k, **_figures(here, scored_all)}
            for k, here in sorted(memory.items())
            if any(scored_all(outcome).any() for outcome in here)
        ],
    }


def _profiled(found: Sequence[Outcome]) -> Mapping[tuple[int, str], tuple[int, ...]]:
    """All points that were profiled of a sample with the most points."""
    return {(id(o.sample), o.figure): o.done for o in sorted(found, key=lambda outcome: outcome.points)}


def _figures(found: Sequence[Outcome], mask: Callable[[Outcome], Mask]) -> dict[str, Any]:
    result = collect(found, lambda outcome: outcome.errors, mask).to_dict()
    result["coverage"] = [coverage(found, level, mask) for level in LEVELS]
    for name, seen in (("seen_elsewhere", True), ("never_seen", False)):
        some = [outcome for outcome in found if outcome.seen is seen]
        if any(outcome.seen for outcome in found) and some:
            result[name] = _short(some, mask)
    return result


def _short(found: Sequence[Outcome], mask: Callable[[Outcome], Mask]) -> dict[str, Any]:
    whole = collect(found, lambda outcome: outcome.errors, mask).to_dict()
    return {name: whole[name] for name in ("models", "points", "mape", "median") if name in whole}


def _bars(kinds: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    bars: list[Bar] = []
    time = kinds["infer"]["time"] if "infer" in kinds else []
    for each in time:
        k = each["k"]
        if k < len(MAPE_TARGETS):
            bars.append(Bar(f"mean error of throughput (%) at k={k}", each["mape"], MAPE_TARGETS[k]))
    for each in time:
        for cover in each["coverage"]:
            name = f"coverage of {cover['level']:.0%} intervals at k={each['k']}: distance from nominal"
            bars.append(Bar(name, abs(cover["mean"] - cover["level"]), COVERAGE_TARGET))
    return bars


def _notes(
    rows: Sequence[Measurement], train: Sequence[Measurement] | None, found: Sequence[Outcome], options: Options
) -> list[str]:
    notes = []
    if train is None:
        notes.append(f"each {options.leave} is left out of the training under all its names and from every source")
    else:
        seen = sorted({outcome.sample.model for outcome in found if outcome.seen})
        notes.append(
            "trained on another table"
            + (f"; of these models it knows measurements by other laboratories: {', '.join(seen)}" if seen else "")
        )
    if options.blind:
        notes.append("no facts about models were used (--blind), only what the table says of them")
    timed = {outcome.sample.model for outcome in found if outcome.figure == "time" and scored(outcome).any()}
    missing = sorted({Knowledge().canonical(row.model) for row in rows} - timed)
    if missing:
        notes.append(f"not scored, as no point of one process ran: {', '.join(missing)}")
    return notes
